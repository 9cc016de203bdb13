"""Sequences whose answers are over, kept in memory as long as nobody needs their room: a chat goes on from one."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from collections.abc import Sequence as Ids
from dataclasses import dataclass

from deltafin.runtime.sequence import Sequence
from deltafin.runtime.server.room import Room


@dataclass(frozen=True, slots=True)
class _Kept:
    seq: Sequence
    ids: tuple[int, ...]
    taken: int  # of the room


class Recent:
    """The most recently used last. All of it is within a `Room`, and goes when an answer needs the place."""

    def __init__(self, room: Room) -> None:
        self._room = room
        self._kept: OrderedDict[int, _Kept] = OrderedDict()  # by Sequence.number

    def __len__(self) -> int:
        return len(self._kept)

    def __iter__(self) -> Iterator[Sequence]:
        return iter([kept.seq for kept in self._kept.values()])

    @property
    def tokens(self) -> int:
        return sum(len(kept.ids) for kept in self._kept.values())

    def keep(self, seq: Sequence) -> None:
        """If there is room now; what has the same tokens makes way for it. `seq` must have none taken any more."""
        ids = tuple(seq.ids)
        if not ids or not self._would_fit(len(ids)):
            return
        for number, kept in list(self._kept.items()):
            if kept.ids == ids[: len(kept.ids)]:  # whatever that was good for, this is, but for a shorter prompt
                self._drop(number)
        while not self._room.fits(len(ids)):
            self.drop_oldest()
        self._kept[seq.number] = _Kept(seq, ids, self._room.take(len(ids)))

    def longest(self, ids: Ids[int]) -> int:
        """How many of the first of `ids`, not all, the best one has seen; 0 if there is none."""
        best = self._best(ids)
        return 0 if best is None else len(best.ids)

    def taken(self, ids: Ids[int]) -> int:
        """How much of the room that one has taken."""
        best = self._best(ids)
        return 0 if best is None else best.taken

    def take(self, ids: Ids[int]) -> Sequence | None:
        """That one, which is the caller's now; its room is given back."""
        best = self._best(ids)
        return None if best is None else self._drop(best.seq.number)

    def drop_oldest(self, but: Ids[int] = ()) -> bool:
        """Makes room; not with the one that `take(but)` would return. False if there is nothing to drop."""
        best = self._best(but)
        for number, kept in self._kept.items():
            if kept is not best:
                self._drop(number)
                return True
        return False

    def clear(self) -> None:
        for number in list(self._kept):
            self._drop(number)

    def _would_fit(self, tokens: int) -> bool:
        """If all of these went."""
        room = self._room
        gone = sum(kept.taken for kept in self._kept.values())
        return room.would_fit(tokens, room.taken_sequences - len(self._kept), room.taken_tokens - gone)

    def _best(self, ids: Ids[int]) -> _Kept | None:
        """Of two that have seen as much, the one used last."""
        fitting = [kept for kept in self._kept.values() if _begins(kept.ids, ids)]
        return max(reversed(fitting), key=lambda kept: len(kept.ids), default=None)

    def _drop(self, number: int) -> Sequence:
        kept = self._kept.pop(number)
        self._room.give(kept.taken)
        return kept.seq


def _begins(beginning: tuple[int, ...], ids: Ids[int]) -> bool:
    return len(beginning) < len(ids) and tuple(ids[: len(beginning)]) == beginning
