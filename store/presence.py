"""Whether a directory is still the one that was opened: drives are unplugged, mounts end, folders are renamed."""

from __future__ import annotations

import errno
import logging
import os
import threading
from pathlib import Path

log = logging.getLogger(__name__)

# The file system itself is away, whatever the directory looks like.
_AWAY = (errno.ENODEV, errno.ESTALE, errno.ENOTCONN, errno.ENXIO)
# Reads that fail one after the other, none between them succeeding: no damaged sector, the drive.
_MOST_FAILURES = 4


class Presence:
    """What is known of one directory's being there. `gone` says why it is not, and stays: it is not asked again.

    That it is gone is said once. A directory that was never there is not gone. Thread-safe.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.gone: str | None = None
        self._lock = threading.Lock()
        self._failures = 0
        try:
            self._identity: tuple[int, int] | None = _identity(path)
        except OSError:
            self._identity = None

    def look(self) -> bool:
        """Whether the directory has gone by now. One stat."""
        if self.gone is None:
            try:
                found = _identity(self.path)
            except OSError as e:
                if self._identity is not None:
                    self._lose(e.strerror or str(e))
            else:
                if self._identity is None:  # made meanwhile
                    self._identity = found
                elif found != self._identity:
                    self._lose("another directory is there now; was it unmounted?")
        return self.gone is not None

    def failed(self, number: int | None) -> bool:
        """Takes note of a read or write that failed with this errno; whether the directory is gone."""
        self._failures += 1
        if not self.look() and number is not None:
            if number in _AWAY:
                self._lose(os.strerror(number))
            elif number == errno.EIO and self._failures >= _MOST_FAILURES:
                self._lose(f"{self._failures} reads in a row failed: {os.strerror(number)}")
        return self.gone is not None

    def worked(self) -> None:
        """A read was good."""
        self._failures = 0

    def _lose(self, why: str) -> None:
        with self._lock:
            first = self.gone is None
            self.gone = self.gone or why
        if first:
            log.warning("%s is gone (%s); going on without it", self.path, why)


def _identity(path: Path) -> tuple[int, int]:
    found = os.stat(path)
    return found.st_dev, found.st_ino
