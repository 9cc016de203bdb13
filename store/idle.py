"""Leaving the line to a run: a run marks a file while it fetches, and an idle fetch waits while the mark is fresh."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

IDLE_TRANSFERS = 2  # at once, of an idle fetch: what it has begun when a run comes is still finished

_FILE = "line.busy"
_MARK_EVERY_S = 0.2
_FRESH_S = 1.0
_LOOK_EVERY_S = 0.2


class BusyLine:
    """The mark of a process that fetches for a run. Thread-safe, and cheap enough to be called with every packet."""

    def __init__(self, cache: Path) -> None:
        self._path = cache / _FILE
        self._marked_at = -_MARK_EVERY_S

    def mark(self) -> None:
        """Says that the line is in use now. That it cannot be said is no reason to stop."""
        now = time.monotonic()
        if now - self._marked_at < _MARK_EVERY_S:
            return
        self._marked_at = now
        with contextlib.suppress(OSError):
            os.close(os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o644))
            os.utime(self._path)


class Idle:
    """Says when a fetch may use the line. `waiting` is called once, when it has to wait for the first time."""

    def __init__(self, cache: Path, waiting: Callable[[], None] | None = None) -> None:
        self._path = cache / _FILE
        self._waiting = waiting

    @property
    def free(self) -> bool:
        """Whether no run has fetched within the last second."""
        try:
            age_s = time.time() - self._path.stat().st_mtime
        except OSError:
            return True
        free = abs(age_s) > _FRESH_S  # a mark from the future is of a clock that was wrong
        if not free and self._waiting is not None:
            waiting, self._waiting = self._waiting, None
            waiting()
        return free

    def wait(self, stopped: threading.Event) -> bool:
        """Waits until the line is free, and returns True; False once `stopped` is set."""
        while not stopped.is_set():
            if self.free:
                return True
            stopped.wait(_LOOK_EVERY_S)
        return False


def lower_priority() -> None:
    """Everything else on the machine goes first: processor and, where the system knows that, drives.

    Threads inherit it, so it comes before the first of them.
    """
    with contextlib.suppress(OSError):
        os.nice(19)
    if sys.platform == "linux":
        import psutil

        with contextlib.suppress(psutil.Error, OSError):
            psutil.Process().ionice(psutil.IOPRIO_CLASS_IDLE)
