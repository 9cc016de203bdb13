"""The arena: all memory that spans are read into, one piece of fixed size, cut into slots."""

from __future__ import annotations

import mmap
from contextlib import suppress
from typing import Self

import numpy as np
import numpy.typing as npt

from deltafin.cext import _io
from deltafin.errors import NoMemory

Slot = npt.NDArray[np.uint8]

HUGE_PAGE = 2 << 20


def slot_nbytes(nbytes: int) -> int:
    """What a slot needs so that a span of `nbytes` fits wherever in a page it starts."""
    return _up(nbytes, _io.PAGE) + _io.PAGE


class Arena:
    """One piece of memory on huge pages, handed out once from front to back.

    Slots live until the arena and all arrays that look into it are gone. Taking is for the thread that
    opens a store; it is not guarded. A forked child does not have this memory: open(2) forbids forking
    while direct reads into private memory are under way, unless it is kept from the child.
    """

    def __init__(self, nbytes: int) -> None:
        self.nbytes = _up(nbytes, _io.PAGE)
        self._taken = 0
        try:
            # Private: huge pages of shared memory are another setting of the system, and usually off.
            flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
            self._memory: mmap.mmap | None = mmap.mmap(-1, _up(self.nbytes, HUGE_PAGE) + HUGE_PAGE, flags=flags)
        except (OSError, OverflowError, ValueError) as e:
            raise NoMemory(f"cannot get {nbytes} bytes of memory for slots: {e}") from None
        whole: Slot = np.frombuffer(self._memory, np.uint8)
        self._start = whole.ctypes.data
        start = -whole.ctypes.data % HUGE_PAGE
        for advice in ("MADV_HUGEPAGE", "MADV_DONTFORK"):
            if hasattr(mmap, advice):
                with suppress(OSError):  # a kernel without it: slower, or as unsafe as any program that forks
                    self._memory.madvise(getattr(mmap, advice), start, _up(self.nbytes, HUGE_PAGE))
        self._bytes: Slot | None = whole[start : start + self.nbytes]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    @property
    def left_nbytes(self) -> int:
        """What can still be taken."""
        return 0 if self._bytes is None else self.nbytes - self._taken

    def take(self, nbytes: int) -> Slot:
        """The next `nbytes`, starting on a page. Raises NoMemory when they are not there."""
        if self._bytes is None or nbytes > self.left_nbytes:
            raise NoMemory(
                f"{nbytes} bytes of memory for slots are wanted, but of {self.nbytes} only {self.left_nbytes} are left"
            )
        start, self._taken = self._taken, min(self.nbytes, self._taken + _up(nbytes, _io.PAGE))
        return self._bytes[start : start + nbytes]

    def give_back(self, slot: Slot) -> None:
        """Lets the system have the pages of a slot that nobody uses any more; it must not be used again."""
        if self._memory is not None and hasattr(mmap, "MADV_DONTNEED"):
            start = slot.ctypes.data - self._start
            assert start >= 0 and start % _io.PAGE == 0
            self._memory.madvise(mmap.MADV_DONTNEED, start, _up(len(slot), _io.PAGE))

    def close(self) -> None:
        """Takes no more. The memory goes back now, or with the last array that looks into it."""
        self._bytes = None
        memory, self._memory = self._memory, None
        if memory is not None:
            with suppress(BufferError):
                memory.close()


def own_slot(nbytes: int) -> Slot:
    """Memory of its own for one span of `nbytes`."""
    return Arena(slot_nbytes(nbytes)).take(slot_nbytes(nbytes))


def _up(nbytes: int, unit: int) -> int:
    return -(-nbytes // unit) * unit
