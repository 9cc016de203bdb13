"""Which row of a pass belongs to which segment."""

from __future__ import annotations

from collections import abc
from itertools import accumulate, pairwise

from deltafin.runtime.observer import RowSpan
from deltafin.runtime.segment import Segment


class Rows:
    """The rows of a pass, segment after segment."""

    def __init__(self, segments: abc.Sequence[Segment]) -> None:
        edges = list(accumulate((len(s) for s in segments), initial=0))
        self.count = edges[-1]
        self.spans = [slice(a, b) for a, b in pairwise(edges)]  # a segment's rows
        self.observed = [RowSpan(s.seq.number, len(s.seq), len(s)) for s in segments]
        self.ids = [token for segment in segments for token in segment.ids]

    @property
    def last(self) -> list[int]:
        """The last row of every segment."""
        return [span.stop - 1 for span in self.spans]

    def name(self, row: int) -> str:
        """A row as an error shows it."""
        number = next(n for n, span in enumerate(self.spans) if row < span.stop)
        position = self.observed[number].position + row - self.spans[number].start
        return f"row {row} (segment {number}, position {position})"
