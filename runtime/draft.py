"""Guesses of the tokens to come, for a pass to check several of them at once."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Protocol

LONGEST, SHORTEST = 8, 2  # ids that an earlier place must have in common with the end of the text
MOST_PLACES = 128  # looked at; more would only be older


class Draft(Protocol):
    """A source of proposals.

    Any proposal is allowed: a pass computes what follows each, and only those that would have been chosen anyway are
    kept, so a wrong one costs time and never changes the text. Proposing must not raise, and need not be deterministic.
    `ids` may be any list, related to the one before or not, and belongs to the caller: it is not changed, nor kept, and
    may grow later. One thread at a time.
    """

    def propose(self, ids: Sequence[int], most: int) -> Sequence[int]:
        """Up to `most` ids that may follow `ids`; none where nothing is known, or if `most` is 0 or less."""


class NGram:
    """Prompt lookup: what followed the last time the text ended like this.

    Finds the place before the end that has the most ids in common with it, looking back from each, at least `shortest`
    and at most `longest`; of equals the latest; and proposes what followed there. Where that reaches the end of the
    text it goes on with the proposals themselves, so a text that repeats itself is repeated to any depth.

    Only places that share the last `shortest` ids are looked at, and of these the latest 128. An id costs one entry of
    a hash table and four bytes.
    """

    def __init__(self, longest: int = LONGEST, shortest: int = SHORTEST) -> None:
        assert 1 <= shortest <= longest
        self._longest, self._shortest = longest, shortest
        self._forget()

    def propose(self, ids: Sequence[int], most: int) -> list[int]:
        if most <= 0:
            return []
        self._learn(ids)
        place = self._best_place()
        if place == 0:
            return []
        known = self._ids
        period = len(known) - place
        return [known[place + i % period] for i in range(most)]

    def _forget(self) -> None:
        self._ids: list[int] = []
        # A place is the number of ids before it. The latest place that comes after these ids, and for each place the
        # one before it with the same ids (0: none).
        self._latest: dict[tuple[int, ...], int] = {}
        self._earlier = array("i")

    def _learn(self, ids: Sequence[int]) -> None:
        """Take in what is new. A list that does not continue the last one is learnt from its beginning."""
        known = len(self._ids)
        if list(ids[:known]) != self._ids:
            self._forget()
            known = 0
        self._ids += ids[known:]
        # The end itself is not entered yet: it must not be found as its own earlier place.
        for place in range(len(self._earlier), len(self._ids)):
            key = tuple(self._ids[max(0, place - self._shortest) : place])
            self._earlier.append(self._latest.get(key, 0))
            if len(key) == self._shortest:
                self._latest[key] = place

    def _best_place(self) -> int:
        """The place that looks most like the end, or 0."""
        ids, end = self._ids, len(self._ids)
        best, most = 0, 0
        place = self._latest.get(tuple(ids[end - self._shortest :]), 0) if end >= self._shortest else 0
        for _ in range(MOST_PLACES):
            if place == 0:
                break
            alike = self._shortest
            while alike < self._longest and alike < place and ids[place - 1 - alike] == ids[end - 1 - alike]:
                alike += 1
            if alike > most:
                best, most = place, alike
                if most == self._longest:
                    break
            place = self._earlier[place]
        return best
