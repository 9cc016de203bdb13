"""All spans of a catalog as arrays: for looking at 82,432 experts at once."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from deltafin.indexer import GLOBALS, Catalog, Span

REST = -2  # the "layer" of what a shard holds besides the text model: its header, the vision parts
SPINE = -1  # the "expert" of what is none
# The rest is cut into pieces of this size, like the spine: one is fetched as a whole and held in memory.
REST_SPAN_NBYTES = 32 << 20

Numbers = npt.NDArray[np.int64]

_KEY = np.dtype([("id", "V32"), ("offset", "<u8"), ("nbytes", "<u8")])


@dataclass(frozen=True, slots=True)
class SpanTable:
    """Spans in file order, as columns [spans] of equal length. `layer` may be GLOBALS or REST, `expert` SPINE."""

    shard: Numbers
    offset: Numbers
    nbytes: Numbers
    layer: Numbers
    expert: Numbers

    def __len__(self) -> int:
        return len(self.shard)

    def span(self, row: int) -> Span:
        return Span(int(self.shard[row]), int(self.offset[row]), int(self.nbytes[row]))

    def keys(self, shard_ids: Sequence[bytes]) -> list[bytes]:
        """How object logs name the spans (objectlog.span_key)."""
        table = np.empty(len(self), _KEY)
        table["id"] = np.frombuffer(b"".join(shard_ids), "V32")[self.shard]
        table["offset"], table["nbytes"] = self.offset, self.nbytes
        raw, width = table.tobytes(), _KEY.itemsize
        return [raw[at : at + width] for at in range(0, len(raw), width)]

    def label(self, row: int) -> str:
        """What a span is, for people."""
        expert = int(self.expert[row])
        where = int(self.shard[row]), int(self.offset[row])
        return describe(*where, int(self.layer[row]), None if expert == SPINE else expert)

    def of_shard(self, number: int) -> SpanTable:
        """The spans of one shard."""
        first, last = np.searchsorted(self.shard, (number, number + 1))
        return self._rows(slice(int(first), int(last)))

    def with_rest(self, catalog: Catalog) -> SpanTable:
        """Also what no span covers, so that every byte of every shard is in one; header and vision parts."""
        rest: list[tuple[int, int, int]] = []
        for number, shard in enumerate(catalog.shards):
            own = self.of_shard(number)
            begins = [*own.offset.tolist(), shard.nbytes]
            ends = [0, *(own.offset + own.nbytes).tolist()]
            header_nbytes = 8 + shard.header_nbytes
            for begin, end in zip(ends, begins, strict=True):
                # The header apart from what follows: it is small, and no tensor.
                cuts = [begin, *([header_nbytes] if begin < header_nbytes < end else []), end]
                for a, b in itertools.pairwise(cuts):
                    rest += [(number, at, min(REST_SPAN_NBYTES, b - at)) for at in range(a, b, REST_SPAN_NBYTES)]
        columns = np.array(rest, np.int64).reshape(-1, 3)
        filled = [np.full(len(rest), value) for value in (REST, SPINE)]
        merged = SpanTable(
            *(
                np.concatenate([mine, theirs])
                for mine, theirs in zip(
                    (self.shard, self.offset, self.nbytes, self.layer, self.expert), (*columns.T, *filled), strict=True
                )
            )
        )
        return merged._sorted()

    def _sorted(self) -> SpanTable:
        return self._rows(np.lexsort((self.offset, self.shard)))

    def _rows(self, rows: slice | npt.NDArray[np.intp]) -> SpanTable:
        return SpanTable(self.shard[rows], self.offset[rows], self.nbytes[rows], self.layer[rows], self.expert[rows])


def describe(shard: int, offset: int, layer: int, expert: int | None) -> str:
    """What a span is, for people."""
    if expert is not None:
        return f"expert {expert} of layer {layer}"
    if layer == REST:
        return f"the rest of shard {shard + 1} (bytes from {offset})"
    part = "the globals" if layer == GLOBALS else f"the spine of layer {layer}"
    return f"{part} (bytes from {offset})"


def span_table(catalog: Catalog) -> SpanTable:
    """Every span of the text model: spine, tables and experts."""
    spine = [
        (span, layer) for layer in [*range(catalog.config.num_layers), GLOBALS] for span in catalog.spine(layer).spans
    ]
    spine += [(span, GLOBALS) for table in (catalog.embedding(), catalog.head()) for span in table.spans]
    rows = np.array([(s.shard, s.offset, s.nbytes, layer, SPINE) for s, layer in spine], np.int64).reshape(-1, 5)
    experts = catalog.expert_table()
    sizes = np.full(len(experts), catalog.expert_nbytes)
    expert_rows = np.column_stack([experts[:, 2], experts[:, 3], sizes, experts[:, 0], experts[:, 1]])
    return SpanTable(*np.concatenate([rows, expert_rows]).T)._sorted()
