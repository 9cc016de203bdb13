"""How much memory there is for answers under way, and how much of it is taken."""

from __future__ import annotations

from collections.abc import Sequence

from deltafin.runtime.batch.sizing import blocks


class Room:
    """For a number of sequences, and for tokens of them all, each counted in whole blocks."""

    def __init__(self, sequences: int, tokens: int) -> None:
        self.sequences, self.tokens = sequences, tokens
        self.taken_sequences = self.taken_tokens = 0

    def fits(self, tokens: int) -> bool:
        """Whether one more sequence may grow to so many tokens. By itself, any that memory holds may."""
        return self.would_fit(tokens, self.taken_sequences, self.taken_tokens)

    def fits_instead(self, tokens: int, taken: int) -> bool:
        """The same if one that has `taken` goes first; 0 is none."""
        return self.would_fit(tokens, self.taken_sequences - (taken > 0), self.taken_tokens - taken)

    def fits_beside(self, tokens: int, taken: Sequence[int]) -> bool:
        """The same if all go but those that have `taken`."""
        return self.would_fit(tokens, len(taken), sum(taken))

    def fits_both(self, tokens: int, others: int) -> bool:
        """Whether two more sequences may grow to these."""
        return self.would_fit(tokens, self.taken_sequences + 1, self.taken_tokens + self.size_of(others))

    def would_fit(self, tokens: int, sequences: int, taken: int) -> bool:
        """The same beside so many other sequences, which have `taken` together."""
        return sequences == 0 or (sequences < self.sequences and taken + self.size_of(tokens) <= self.tokens)

    @staticmethod
    def size_of(tokens: int) -> int:
        """How much of it such a sequence takes."""
        return blocks(tokens)

    def take(self, tokens: int) -> int:
        """Takes it; returns what is to be given back."""
        taken = self.size_of(tokens)
        self.taken_sequences += 1
        self.taken_tokens += taken
        return taken

    def give(self, taken: int) -> None:
        assert self.taken_sequences > 0 and taken <= self.taken_tokens
        self.taken_sequences -= 1
        self.taken_tokens -= taken
