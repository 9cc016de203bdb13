"""The room of the engine, which a batch counts in the same way, and how it is lent to company."""

from __future__ import annotations

from collections.abc import Callable

from deltafin.runtime.batch.room import Room

__all__ = ["LentRoom", "Room"]


class LentRoom(Room):
    """A room as company sees it: what nobody uses now is let go of before something does not fit.

    Knows what has been taken through it, so that all of it can be given back.
    """

    def __init__(self, room: Room, let_go: Callable[[], bool]) -> None:
        """`let_go` lets go of one sequence in `room` that nobody uses; False if there is none."""
        super().__init__(room.sequences, room.tokens)
        self._room, self._let_go = room, let_go

    def fits(self, tokens: int) -> bool:
        while not self._room.fits(tokens):
            if not self._let_go():
                return False
        return True

    def fits_both(self, tokens: int, others: int) -> bool:
        while not self._room.fits_both(tokens, others):
            if not self._let_go():
                return False
        return True

    def take(self, tokens: int) -> int:
        self._room.take(tokens)
        return super().take(tokens)

    def give(self, taken: int) -> None:
        super().give(taken)
        self._room.give(taken)

    def give_all(self) -> None:
        self._room.taken_sequences -= self.taken_sequences
        self._room.taken_tokens -= self.taken_tokens
        self.taken_sequences = self.taken_tokens = 0
