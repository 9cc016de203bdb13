"""Experts of one layer on their way: reads fly ahead, each is handed out once as it lands."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import CancelledError, Future
from queue import SimpleQueue
from typing import Self

import numpy as np
import numpy.typing as npt

from deltafin.errors import DeltafinError
from deltafin.store.drive import wait_out

Slot = npt.NDArray[np.uint8]
# Starts reading an expert into a slot; the future's result will be where in the slot it lies.
Read = Callable[[int, Slot, Future[Slot]], None]
Spent = Callable[[int, Slot, Slot], Slot]  # an expert, its slot and its bytes, used: returns a slot to read into


class Landing(Iterator[tuple[int, Slot]]):
    """Yields (expert, bytes): first those in memory, then the others in the order of arrival.

    The first reads start at once: the caller has other work to do before it asks. Bytes are valid until the next step.
    Close it when leaving early, so that no read outlives a pass that failed. `done` is told the slots that are left.
    """

    def __init__(
        self,
        here: Sequence[tuple[int, Slot]],
        away: Iterable[int],
        reads: int,
        slots: Sequence[Slot],
        read: Read,
        spent: Spent,
        done: Callable[[list[Slot]], None],
    ) -> None:
        """`away` are asked for one by one, as there are slots; they are `reads` in all."""
        self.count, self.reads = len(here) + reads, reads
        self._here = iter(here)
        self._waiting = iter(away)
        self._read, self._spent, self._done = read, spent, done
        self._flying: dict[Future[Slot], tuple[int, Slot]] = {}
        self._landed: SimpleQueue[Future[Slot]] = SimpleQueue()
        self._unused = list(reversed(slots))
        self._free: list[Slot] = []
        self._shown: tuple[int, Slot, Slot] | None = None  # what the caller looks at
        self._closed = False
        self.wait_s = 0.0  # that the caller had to wait
        self.reads_s = 0.0  # from the first read's start to the last one's end
        self._begun = time.perf_counter()
        try:
            while self._unused:
                self._launch(self._unused.pop())
        except BaseException:
            self.close()
            raise

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> tuple[int, Slot]:
        if (ready := next(self._here, None)) is not None:
            return ready
        try:
            return self._next()
        except BaseException:
            self.close()
            raise

    def _next(self) -> tuple[int, Slot]:
        if self._shown is not None:
            # Let go of first: an interrupt meanwhile may lose the slot, but must not leave it with two owners.
            shown, self._shown = self._shown, None
            self._launch(self._spent(*shown))
        if not self._flying:
            raise StopIteration
        begun = time.perf_counter()
        future = self._landed.get()
        self.wait_s += time.perf_counter() - begun
        expert, slot = self._flying.pop(future)
        try:
            content = future.result()
        except BaseException as e:
            self._free.append(slot)
            if isinstance(e, CancelledError):
                raise DeltafinError("the store was closed while experts were being read") from None
            raise
        self._shown = (expert, slot, content)
        return expert, content

    def close(self) -> None:
        """Starts no further read and waits for those under way; they write into slots. May be repeated."""
        if self._closed:
            return
        self._waiting = iter(())
        try:
            wait_out(self._flying)
        finally:
            self._closed = True
            self._free += self._unused
            self._free += [slot for _, slot in self._flying.values()]
            self._flying.clear()
            if self._shown is not None:
                self._free.append(self._shown[1])
                self._shown = None
            self._done(self._free)
            self._free = []

    def _launch(self, slot: Slot) -> None:
        if (expert := next(self._waiting, None)) is None:
            self._free.append(slot)
            return
        future: Future[Slot] = Future()
        future.add_done_callback(self._arrived)
        self._flying[future] = (expert, slot)
        self._read(expert, slot, future)

    def _arrived(self, future: Future[Slot]) -> None:
        self.reads_s = time.perf_counter() - self._begun
        self._landed.put(future)
