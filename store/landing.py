"""Experts of one layer on their way: reads fly ahead, each is handed out once as it lands."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from typing import Self

import numpy as np
import numpy.typing as npt

from deltafin.errors import DeltafinError

Slot = npt.NDArray[np.uint8]
Read = Callable[[int, Slot], Future[int]]  # starts reading an expert into a slot; its result is the expert's number


class Landing(Iterator[tuple[int, Slot]]):
    """Yields (expert, slot) in the order of arrival. A slot is used again at the next step.

    The first reads start at once: the caller has other work to do before it asks. Close it when leaving
    early, so that no read outlives a pass that failed.
    """

    def __init__(self, ids: Sequence[int], slots: Sequence[Slot], read: Read) -> None:
        self._read = read
        self._waiting = iter(ids)
        self._flying: dict[Future[int], Slot] = {}
        self._free: Slot | None = None  # the slot that the caller looks at
        for slot in slots:
            self._launch(slot)

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> tuple[int, Slot]:
        if self._free is not None:
            slot, self._free = self._free, None
            self._launch(slot)
        if not self._flying:
            raise StopIteration
        done, _ = wait(self._flying, return_when=FIRST_COMPLETED)
        future = done.pop()
        slot = self._flying.pop(future)
        expert = future.result()
        self._free = slot
        return expert, slot

    def close(self) -> None:
        """Starts no further read and waits for those under way; they write into slots."""
        self._waiting = iter(())
        wait(self._flying)

    def _launch(self, slot: Slot) -> None:
        if (expert := next(self._waiting, None)) is None:
            return
        try:
            self._flying[self._read(expert, slot)] = slot
        except RuntimeError:  # the pool takes no more work
            raise DeltafinError("the store was closed while experts were being read") from None
