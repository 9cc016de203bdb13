"""Which row of a pass belongs to which part of which segment."""

from __future__ import annotations

from collections import abc
from itertools import accumulate, pairwise

from deltafin.runtime.observer import RowSpan
from deltafin.runtime.segment import Part


class Rows:
    """The rows of a pass, part after part."""

    def __init__(self, parts: abc.Sequence[Part]) -> None:
        edges = list(accumulate((len(p) for p in parts), initial=0))
        self.count = edges[-1]
        self.spans = [slice(a, b) for a, b in pairwise(edges)]  # a part's rows
        self.observed = [RowSpan(p.sequence, p.position, len(p)) for p in parts]
        self.ids = [token for part in parts for token in part.ids]
        self._segments = [p.segment for p in parts]
        # the rows whose logits are wanted
        self.tails = [
            row for span, p in zip(self.spans, parts, strict=True) for row in range(span.stop - p.tail, span.stop)
        ]

    def name(self, row: int) -> str:
        """A row as an error shows it."""
        number = next(n for n, span in enumerate(self.spans) if row < span.stop)
        position = self.observed[number].position + row - self.spans[number].start
        return f"row {row} (segment {self._segments[number]}, position {position})"
