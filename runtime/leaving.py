"""Sequences that leave a pass while it goes on, because nobody waits for them any more."""

from __future__ import annotations

from collections import abc


class Leaving:
    """Says which sequences leave, and remembers which have left: their rows were taken out of the pass.

    For one `Model.forward`. What leaves changes no bit of what stays.
    """

    def __init__(self, gone: abc.Callable[[], abc.Collection[int]]) -> None:
        """`gone` returns numbers of sequences. It is asked when a layer begins, in the thread of the pass."""
        self._gone = gone
        self.left: set[int] = set()

    def among(self, numbers: abc.Iterable[int]) -> set[int]:
        """Which of these leave now."""
        leaving = set(numbers) & set(self._gone())
        self.left |= leaving
        return leaving
