"""Room in a writable root: a budget of its own, and a reserve that stays free on its disk."""

from __future__ import annotations

import os
import shutil
import threading
import time
from pathlib import Path

from deltafin.errors import NoSpace
from deltafin.store.config import Limits

# Unless another reserve is asked for: a disk without any free space is trouble for everybody on it.
RESERVE_NBYTES = 1_000_000_000
RESERVE_PART = 0.01  # of a disk, where that is less
# Other processes write too. What they took is seen when the bytes are counted again, at the latest after this part of
# the budget was written; a budget is exact for one writer.
_RECOUNT_PART = 1 / 20
_COUNT_PART = 1 / 50  # of the time may be spent counting a root that stays full: it is asked for every streamed expert
_QUICK_S = 0.01  # what takes no longer may be done each time
_SETTLE_S = 60.0  # for writes under way; a drive that takes longer has other trouble
_COUNTED = ("objects", "packs", "quarantine", "tmp")


class Space:
    """What may still be written to one root. Thread-safe. The bytes there are counted once, if there is a budget."""

    def __init__(self, path: Path, limits: Limits) -> None:
        self.path = path
        self.limits = limits
        self._lock = threading.Lock()
        self._settled = threading.Condition(self._lock)  # told whenever a write is over
        self._used: int | None = None  # None: to be counted
        self._since_count = 0
        self._count_again_at = 0.0  # time.monotonic() before which a full root need not be counted once more
        self._flying = 0  # promised to writes that are under way

    @property
    def used_nbytes(self) -> int:
        """Bytes in the root, of all models; counted now if they were not yet."""
        with self._lock:
            return self._count()

    def room(self) -> int:
        """Bytes that may be written; at least 0."""
        with self._lock:
            return max(0, self._room())

    @property
    def left_on_disk(self) -> int:
        """Bytes free on its disk beyond the reserve, whatever the budget says; at least 0."""
        return max(0, self._left_on_disk())

    def take(self, nbytes: int) -> bool:
        """Promises room for a write, if there is enough. `wrote` or `give_back` follows.

        Before a budget is called used up, writes under way are waited for and the bytes are counted again, unless that
        was done just now.
        """
        counted = False
        with self._lock:
            while self._room() < nbytes:
                if counted or self.limits.budget is None or self._left_on_disk() < nbytes:
                    return False
                if self._flying:
                    if not self._settled.wait(_SETTLE_S):
                        return False
                elif time.monotonic() < self._count_again_at:
                    return False
                else:
                    self._used, counted = None, True
            self._flying += nbytes
            return True

    def wrote(self, nbytes: int) -> None:
        """A promised write is done."""
        with self._lock:
            self._flying -= nbytes
            if self._used is not None:
                self._used += nbytes
                self._since_count += nbytes
            self._settled.notify_all()

    def give_back(self, nbytes: int) -> None:
        """A promised write came to nothing."""
        with self._lock:
            self._flying -= nbytes
            self._settled.notify_all()

    def unlink(self, path: Path, nbytes: int) -> None:
        """Removes a file of the root; not while the bytes are being counted, or they would be subtracted twice."""
        with self._lock:
            os.unlink(path)
            if self._used is not None:
                self._used = max(0, self._used - nbytes)

    def full(self) -> NoSpace:
        """The error that says why nothing more goes there."""
        with self._lock:
            budget = self.limits.budget
            if budget is not None and budget - self._count() - self._flying <= self._left_on_disk():
                why = f"{self._count()} bytes of its budget of {budget} are taken"
            else:
                total, free = _disk(self.path)
                why = f"{free} bytes are free on its disk, of which {self._reserve(total)} are kept free"
        return NoSpace(f"{self.path}: full: {why}; free some space, raise the limit or add a root")

    def _room(self) -> int:
        left = self._left_on_disk()
        if self.limits.budget is not None:
            left = min(left, self.limits.budget - self._count() - self._flying)
        return left

    def _left_on_disk(self) -> int:
        try:
            total, free = _disk(self.path)
        except OSError:
            return 0  # gone
        return free - self._reserve(total)  # of writes under way a part is taken already; the rest may use the reserve

    def _reserve(self, total: int) -> int:
        if self.limits.reserve is not None:
            return self.limits.reserve
        return min(RESERVE_NBYTES, int(RESERVE_PART * total))

    def _count(self) -> int:
        """Counts only while nothing is being written, or it would be counted twice."""
        budget = self.limits.budget
        again = budget is not None and self._since_count > _RECOUNT_PART * budget and not self._flying
        if self._used is None or again:
            begun = time.monotonic()
            self._used = sum(_nbytes_below(str(self.path / name)) for name in _COUNTED)
            self._since_count = 0
            ended = time.monotonic()
            took_s = ended - begun
            self._count_again_at = ended + (took_s / _COUNT_PART if took_s > _QUICK_S else 0.0)
        return self._used


def free_nbytes(path: Path) -> int:
    """Free space where `path` is or will be."""
    return _disk(path)[1]


def _disk(path: Path) -> tuple[int, int]:
    """Bytes in all and free where `path` is or will be."""
    while not path.exists() and path.parent != path:
        path = path.parent
    usage = shutil.disk_usage(path)
    return usage.total, usage.free


def _nbytes_below(folder: str) -> int:
    nbytes = 0
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                try:
                    if entry.is_dir(follow_symlinks=False):
                        nbytes += _nbytes_below(entry.path)
                    else:
                        nbytes += entry.stat(follow_symlinks=False).st_size
                except FileNotFoundError:
                    continue  # removed meanwhile
    except OSError:
        pass  # not there yet, or gone: nothing of it counts
    return nbytes
