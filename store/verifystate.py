"""What a verification remembers: where an interrupted one goes on, and how the last one ended.

`verify.state` is appended to while one is under way, a JSON list a line; `verify.json` says what the last one found.
Both lie in the cache directory, and nothing depends on them: damaged or unwritable, all is hashed again.
"""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from pathlib import Path
from typing import TextIO, TypeGuard

from deltafin.indexer import discard, make_directory, publish, read_small, temporary

log = logging.getLogger(__name__)

STATE_NAME = "verify.state"
RESULT_NAME = "verify.json"
_VERSION = 1
_OLDEST_S = 7 * 24 * 3600.0
_MOST_NBYTES = 64 << 20
_EVERY_S = 1.0
# Neither through a link nor, waiting for a reader, into a named pipe.
_APPEND = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NONBLOCK | getattr(os, "O_NOFOLLOW", 0)


class VerifyState:
    """The files that an interrupted verification of a model has found whole already. Thread-safe."""

    def __init__(self, root: Path, model: str, *, restart: bool = False) -> None:
        self.path = root / STATE_NAME
        self.damaged: list[str] = []  # found before the interruption
        self._whole: dict[str, tuple[int, int]] = {}  # path -> bytes, time of the last change in ns
        self._lock = threading.Lock()
        self._file: TextIO | None = None
        self._written = 0.0
        goes_on = not restart and self._load(model)
        if not goes_on:
            self.damaged, self._whole = [], {}
        try:
            make_directory(root)
            if not goes_on:
                self.path.unlink(missing_ok=True)  # anew, and not through a link into another file
            self._file = os.fdopen(os.open(self.path, _APPEND, 0o644), "a", encoding="utf-8")
        except OSError as e:
            log.info("%s: cannot be written (%s); an interruption would begin anew", self.path, e.strerror)
            return
        if not goes_on:
            self._write(["verify", _VERSION, model, time.time()])

    @property
    def resumed(self) -> int:
        """How many files need not be hashed again."""
        return len(self._whole)

    def is_whole(self, path: Path) -> bool:
        """Whether a file was found whole, and has not been written since."""
        known = self._whole.get(str(path))
        return known is not None and known == _stamp(path)

    def note_whole(self, path: Path) -> None:
        if (stamp := _stamp(path)) is not None:
            self._write(["whole", str(path), *stamp])

    def note_damaged(self, line: str) -> None:
        self._write(["damaged", line])

    def close(self, *, finished: bool) -> None:
        """Lets go of the file; one that is finished leaves nothing behind."""
        with self._lock:
            if self._file is None:
                return
            try:
                self._file.close()
                if finished:
                    self.path.unlink(missing_ok=True)
            except OSError as e:
                log.info("%s: %s", self.path, e.strerror)
            self._file = None

    def _write(self, line: list[object]) -> None:
        with self._lock:
            if self._file is None:
                return
            try:
                self._file.write(json.dumps(line) + "\n")
                if time.monotonic() - self._written > _EVERY_S:
                    self._file.flush()
                    self._written = time.monotonic()
            except OSError as e:
                log.info("%s: cannot be written (%s); an interruption would begin anew", self.path, e.strerror)
                self._file = None

    def _load(self, model: str) -> bool:
        """Reads what an earlier run has left; False if there is nothing to go on with."""
        try:
            first, *lines = read_small(self.path, _MOST_NBYTES).decode(errors="replace").split("\n")
            kind, version, of, began = json.loads(first)
            if (kind, version, of) != ("verify", _VERSION, model) or not 0 <= time.time() - began < _OLDEST_S:
                return False
            for text in lines:
                self._note(text)
            return True
        except FileNotFoundError:
            return False
        except (OSError, ValueError, TypeError, RecursionError):
            return False

    def _note(self, text: str) -> None:
        try:
            line = json.loads(text)
            if line[0] == "whole" and isinstance(line[1], str):
                self._whole[line[1]] = int(line[2]), int(line[3])
            elif line[0] == "damaged":
                self.damaged.append(str(line[1]))
        except (ValueError, TypeError, LookupError, RecursionError):
            return  # the last line of a killed run may be torn


def _stamp(path: Path) -> tuple[int, int] | None:
    try:
        stat = os.stat(path)
    except OSError:
        return None
    return stat.st_size, stat.st_mtime_ns


def write_result(root: Path, result: dict[str, object]) -> None:
    """Publishes how a verification ended, with when a full one last did."""
    path = root / RESULT_NAME
    finished = int(time.time())
    before = read_result(root) or {}
    last_full = finished if result.get("mode") == "full" else before.get("last_full")
    part = temporary(root, RESULT_NAME)
    try:
        make_directory(root)
        part.write_text(json.dumps({"finished": finished, "last_full": last_full, **result}, ensure_ascii=False) + "\n")
        publish(part, path)
    except OSError as e:
        log.warning("%s: cannot be written (%s); status will not know of this verification", path, e.strerror)
    finally:
        discard(part)


def read_result(root: Path) -> dict[str, object] | None:
    """How the last verification ended; None if none did, or nothing can be read of it."""
    path = root / RESULT_NAME
    try:
        found = json.loads(read_small(path, _MOST_NBYTES))
    except (OSError, ValueError, RecursionError):
        return None
    return found if _is_result(found) else None


def _is_result(found: object) -> TypeGuard[dict[str, object]]:
    """Whether it has what is shown of it, in a form that can be."""
    if not isinstance(found, dict):
        return False
    finished, model, whole = found.get("finished"), found.get("model"), found.get("whole")
    return (
        type(finished) is int
        and 0 <= finished < 1 << 40
        and found.get("mode") in ("quick", "full")
        and isinstance(model, str)
        and model.isprintable()
        and type(whole) is int
        and isinstance(found.get("damaged"), list)
        and type(found.get("sound")) is bool
    )
