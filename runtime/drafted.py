"""What the drafted rows of a pass cost: the experts that nobody else needed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from deltafin.runtime.observer import Observer, RowSpan


class DraftedExperts(Observer):
    """Counts, for one forward, the experts that each drafted row added to its passes, over all layers.

    `drafted` says from which position on the rows of a sequence, by its number, are proposals. A row adds an expert
    if it chose it, and no sure row of the pass did, nor a row of another sequence, nor an earlier row of its draft.
    """

    def __init__(self, drafted: Mapping[int, int]) -> None:
        self._drafted = dict(drafted)
        self._rows: list[tuple[int, int] | None] = []  # by row of the pass: sequence and place in its draft; None: sure
        self._added: dict[int, list[int]] = {sequence: [] for sequence in drafted}

    def added(self, sequence: int) -> list[int]:
        """Experts that each row of the sequence's draft added, in its order."""
        return list(self._added[sequence])

    def rows(self, spans: Sequence[RowSpan]) -> None:
        self.rows_left(spans)
        for row in self._rows:
            if row is not None:
                sequence, place = row
                counts = self._added[sequence]
                counts += [0] * (place + 1 - len(counts))

    def rows_left(self, spans: Sequence[RowSpan]) -> None:
        self._rows = []
        for span in spans:
            first = self._drafted.get(span.sequence)
            for position in range(span.position, span.position + span.count):
                sure = first is None or position < first
                self._rows.append(None if sure or first is None else (span.sequence, position - first))

    def routes(self, layer: int, ids: npt.NDArray[np.int32], weights: npt.NDArray[np.float32]) -> None:
        if not any(self._rows):
            return
        first: dict[
            int, tuple[int, int] | None
        ] = {}  # by expert: the only draft that needs it, and its first row there
        drafts: list[tuple[tuple[int, int], list[int]]] = []
        for row, experts in zip(self._rows, ids.tolist(), strict=True):
            if row is None:
                first.update(dict.fromkeys(experts))
            else:
                drafts.append((row, experts))
        for row, experts in drafts:
            for expert in experts:
                known = first.setdefault(expert, row)
                if known is not None and known[0] != row[0]:
                    first[expert] = None
        for found in first.values():
            if found is not None:
                sequence, place = found
                self._added[sequence][place] += 1
