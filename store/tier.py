"""Experts that stay in memory, chosen by how often they were used.

Least-recently-used keeps nothing here: a token asks for more experts than most machines hold, so each is gone before
it is asked for again. Counting uses does not have that edge: a newcomer must have been used more often than the
resident that it replaces, so one long prompt that touches everything once replaces nothing.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

Slot = npt.NDArray[np.uint8]
Key = tuple[int, int]  # layer, expert

# Counts are halved after this many uses for each slot, so that what was hot yesterday can go.
USES_A_SLOT = 64


class ExpertTier:
    """A fixed number of slots with the experts that were used most. Not thread-safe: the pass's own thread."""

    def __init__(self, slots: Iterable[Slot]) -> None:
        self._free = list(slots)
        self.capacity = len(self._free)
        self._resident: dict[Key, tuple[Slot, Slot]] = {}  # the slot, and the expert's bytes in it
        self._uses: dict[Key, float] = {}
        self._ranking: list[tuple[float, Key]] = []  # a heap; counts in it may be outdated, and then too small
        self._until_halving = USES_A_SLOT * self.capacity

    def __len__(self) -> int:
        return len(self._resident)

    def use(self, key: Key) -> Slot | None:
        """Counts a use; the expert's bytes if it is here. They stay valid until something is offered."""
        if self.capacity == 0:
            return None
        self._uses[key] = self._uses.get(key, 0.0) + 1.0
        self._until_halving -= 1
        if self._until_halving <= 0:
            self._halve()
        found = self._resident.get(key)
        return None if found is None else found[1]

    def offer(self, key: Key, slot: Slot, content: Slot) -> Slot:
        """Keeps an expert that was read into `slot`, or does not; returns a slot that is free to read into.

        The newcomer is registered last, so that an interrupt never leaves a slot with two owners.
        """
        if self.capacity == 0 or key in self._resident:
            return slot
        count = self._uses.get(key, 0.0)
        if self._free:
            freed = self._free.pop()
        else:
            least, coldest = self._coldest()
            if count <= least:
                return slot
            heapq.heappop(self._ranking)
            freed, _ = self._resident.pop(coldest)
        heapq.heappush(self._ranking, (count, key))
        self._resident[key] = (slot, content)
        return freed

    def shrink(self, count: int) -> list[Slot]:
        """Gives up to `count` slots back, free ones first, then those of the experts that were used least."""
        given: list[Slot] = []
        while len(given) < count and self.capacity:
            if self._free:
                given.append(self._free.pop())
            else:
                _, coldest = self._coldest()
                heapq.heappop(self._ranking)
                given.append(self._resident.pop(coldest)[0])
            self.capacity -= 1
        return given

    def _coldest(self) -> tuple[float, Key]:
        """The resident that was used least; it is at the top of the ranking then."""
        while True:
            noted, key = self._ranking[0]
            count = self._uses.get(key, 0.0)
            if key not in self._resident:  # an interrupt came between ranking and registering it
                heapq.heappop(self._ranking)
            elif count <= noted:
                return count, key
            else:
                heapq.heapreplace(self._ranking, (count, key))

    def _halve(self) -> None:
        self._until_halving = USES_A_SLOT * self.capacity
        self._uses = {key: count / 2 for key, count in self._uses.items() if count > 0.5 or key in self._resident}
        self._ranking = [(self._uses.get(key, 0.0), key) for key in self._resident]
        heapq.heapify(self._ranking)
