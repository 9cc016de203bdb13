"""How much memory there is for answers under way, and how much of it is taken."""

from __future__ import annotations

from deltafin.runtime.batch.sizing import blocks


class Room:
    """For a number of sequences, and for tokens of them all, each counted in whole blocks."""

    def __init__(self, sequences: int, tokens: int) -> None:
        self.sequences, self.tokens = sequences, tokens
        self.taken_sequences = self.taken_tokens = 0

    def fits(self, tokens: int) -> bool:
        """Whether one more sequence may grow to so many tokens. By itself, any that memory holds may."""
        if self.taken_sequences == 0:
            return True
        return self.taken_sequences < self.sequences and self.taken_tokens + blocks(tokens) <= self.tokens

    def take(self, tokens: int) -> int:
        """Takes it; returns what is to be given back."""
        self.taken_sequences += 1
        self.taken_tokens += blocks(tokens)
        return blocks(tokens)

    def give(self, taken: int) -> None:
        self.taken_sequences -= 1
        self.taken_tokens -= taken
