"""A ring of memory: parts are taken at one end and given back at the other, in the same order."""

from __future__ import annotations

from collections import deque

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]


class Ring:
    """Contiguous parts of one piece of memory, first in, first out. For one thread."""

    def __init__(self, memory: Bytes) -> None:
        self._memory = memory
        self._taken: deque[tuple[int, int]] = deque()  # begin and end, oldest first

    def take(self, nbytes: int) -> Bytes | None:
        """The next part, or None while there is no room for it."""
        start, end = 0, len(self._memory)  # the room that the next part may lie in
        if self._taken:
            oldest, start = self._taken[0][0], self._taken[-1][1]
            if start <= oldest:  # it has gone round already
                end = oldest
            elif start + nbytes > end:
                start, end = 0, oldest
        if start + nbytes > end:
            return None
        self._taken.append((start, start + nbytes))
        return self._memory[start : start + nbytes]

    def release(self, part: Bytes) -> None:
        """Gives back the oldest part."""
        begin, end = self._taken.popleft()
        assert part.ctypes.data == self._memory.ctypes.data + begin and len(part) == end - begin, "out of order"

    def clear(self) -> None:
        self._taken.clear()
