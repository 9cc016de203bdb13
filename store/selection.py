"""Which spans a command means: `--layers 1-5,9 --experts 0-31`, the spine, or everything."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from deltafin.errors import BadRequest
from deltafin.indexer import GLOBALS, Catalog, Span
from deltafin.store.spantable import REST, describe, span_table

_RANGE = re.compile(r"(\d{1,6})(?:-(\d{1,6}))?")


@dataclass(frozen=True, slots=True)
class Item:
    """A span with what it is; `expert` is None for parts of the spine."""

    span: Span
    layer: int
    expert: int | None = None

    @property
    def label(self) -> str:
        return describe(self.span.shard, self.span.offset, self.layer, self.expert)

    @property
    def address(self) -> tuple[int, int] | None:
        return None if self.expert is None else (self.layer, self.expert)


def parse_numbers(text: str, allowed: range, option: str) -> list[int]:
    """`"1-5,9"` -> [1, 2, 3, 4, 5, 9], each once, ascending."""
    numbers: set[int] = set()
    for piece in text.split(","):
        m = _RANGE.fullmatch(piece.strip())
        if m is None:
            raise BadRequest(f"{option} {text!r}: expected numbers and ranges like 1-5,9")
        first, last = int(m[1]), int(m[2] or m[1])
        if last < first:
            raise BadRequest(f"{option} {text!r}: {first}-{last} runs backwards")
        if first not in allowed or last not in allowed:
            raise BadRequest(f"{option} {text!r}: this model has {allowed.start} to {allowed.stop - 1}")
        numbers.update(range(first, last + 1))
    return sorted(numbers)


def spine_items(catalog: Catalog) -> list[Item]:
    """Everything that is no routed expert: all layers, final norms, embeddings, head."""
    items = [
        Item(span, layer)
        for layer in [*range(catalog.config.num_layers), GLOBALS]
        for span in catalog.spine(layer).spans
    ]
    return items + [Item(span, GLOBALS) for table in (catalog.embedding(), catalog.head()) for span in table.spans]


def expert_items(catalog: Catalog, layers: Iterable[int], experts: Iterable[int]) -> list[Item]:
    """The given experts of each of the given layers."""
    numbers = list(experts)
    return [
        Item(span, layer, expert)
        for layer in layers
        for expert, span in zip(numbers, catalog.expert_spans(layer, numbers), strict=True)
    ]


def pair_items(catalog: Catalog, pairs: Iterable[tuple[int, int]]) -> Iterator[Item]:
    """Experts given as (layer, expert), in that order."""
    for layer, expert in pairs:
        yield Item(catalog.expert_spans(layer, [expert])[0], layer, expert)


def rest_items(catalog: Catalog) -> list[Item]:
    """Bytes that no other item covers, of shards with a published digest: with them a whole shard can be proven."""
    table = span_table(catalog).with_rest(catalog)
    return [
        Item(table.span(row), REST)
        for row in (table.layer == REST).nonzero()[0].tolist()
        if catalog.shards[table.shard[row]].sha256 is not None
    ]


def all_items(catalog: Catalog) -> list[Item]:
    """Everything the text model needs, shard by shard in file order."""
    config = catalog.config
    items = spine_items(catalog) + expert_items(catalog, config.moe_layers, range(config.num_experts))
    return sorted(items, key=lambda i: (i.span.shard, i.span.offset))
