"""Many digests in little memory: a million of them take 16 MB, and as much again once they can be found."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from itertools import pairwise

import numpy as np

KEY_NBYTES = 16


def digest(*parts: bytes) -> bytes:
    """A key of these parts, and of where each ends."""
    h = hashlib.blake2b(digest_size=KEY_NBYTES)
    for part in parts:
        h.update(len(part).to_bytes(8, "little"))
        h.update(part)
    return h.digest()


class Keys:
    """Digests in the order in which they were added. `seal` comes between adding and looking things up."""

    def __init__(self) -> None:
        self._raw = bytearray()
        self._order = np.empty(0, np.int64)  # indexes, by ascending digest
        self._high = np.empty(0, np.uint64)  # the first half of each digest, in that order

    def __len__(self) -> int:
        return len(self._raw) // KEY_NBYTES

    def __getitem__(self, index: int) -> bytes:
        return bytes(self._raw[index * KEY_NBYTES : (index + 1) * KEY_NBYTES])

    def add(self, key: bytes) -> None:
        assert len(key) == KEY_NBYTES
        self._raw += key

    def seal(self) -> None:
        halves = np.frombuffer(bytes(self._raw), ">u8").reshape(-1, 2)
        self._order = np.lexsort((halves[:, 1], halves[:, 0]))
        self._high = halves[self._order, 0].astype(np.uint64)

    def find(self, key: bytes) -> int:
        """The index of a digest, of equal ones the lowest; -1 if it is not there."""
        high = np.uint64(int.from_bytes(key[:8], "big"))
        at = int(np.searchsorted(self._high, high))
        while at < len(self._high) and self._high[at] == high:
            if self[int(self._order[at])] == key:
                return int(self._order[at])
            at += 1
        return -1

    def repeated(self) -> tuple[int, int] | None:
        """The first digest that was there before: its index, and the index of the one before it."""
        halves = np.frombuffer(bytes(self._raw), ">u8").reshape(-1, 2)[self._order]
        again = np.flatnonzero((halves[1:] == halves[:-1]).all(axis=1)) + 1  # lexsort is stable: the later one
        if not len(again):
            return None
        later = int(self._order[again].min())
        return later, self.find(self[later])

    def repetitions(self) -> Iterator[tuple[bytes, int, int]]:
        """Every different digest that is there more than once: how often, and the index where it is first."""
        if not len(self):
            return
        halves = np.frombuffer(bytes(self._raw), ">u8").reshape(-1, 2)[self._order]
        starts = np.flatnonzero((halves[1:] != halves[:-1]).any(axis=1)) + 1
        for start, end in pairwise([0, *starts.tolist(), len(self)]):
            if end - start > 1:
                first = int(self._order[start])
                yield self[first], end - start, first
