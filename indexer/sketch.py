"""What a catalog would say of a model's spine, from its config alone: for planning before anything is indexed.

Spans are cut exactly as the catalog cuts them. Where experts lie, which shards there are and what their headers take
is not in a sketch.
"""

from __future__ import annotations

from math import prod

from deltafin.indexer import roles
from deltafin.indexer.catalog import (
    EMBEDDING_SPAN_NBYTES,
    GLOBALS,
    SPINE_SPAN_NBYTES,
    Catalog,
    RowTable,
    SpineGroup,
    row_table,
    spine_group,
)
from deltafin.indexer.config import ModelConfig
from deltafin.indexer.layout import Place
from deltafin.indexer.roles import Shapes

_ITEM_NBYTES = {"F32": 4, "BF16": 2}  # in the order in which a shard holds them


class Sketch:
    """The part of a catalog that follows from a config."""

    def __init__(self, config: ModelConfig) -> None:
        self.config = config
        self.expert_nbytes = roles.expert_nbytes(config)

    def spine(self, layer: int) -> SpineGroup:
        """As `Catalog.spine`, with offsets counted from the first tensor of the layer's shard."""
        if layer == GLOBALS:
            shapes = roles.global_shapes(self.config)
            names = [roles.FINAL_PREFIX + name for name in roles.FINAL_NAMES]
            places = [p for p in _places(shapes, self.config.num_layers) if p.name in names]
            return spine_group(places)
        return spine_group(_places(roles.spine_shapes(self.config, layer), layer))

    def embedding(self) -> RowTable:
        return row_table(self._global(roles.EMBEDDING), EMBEDDING_SPAN_NBYTES)

    def head(self) -> RowTable:
        return row_table(self._global(roles.HEAD), SPINE_SPAN_NBYTES)

    def _global(self, name: str) -> Place:
        places = _places(roles.global_shapes(self.config), self.config.num_layers)
        return next(p for p in places if p.name == name)


Plannable = Catalog | Sketch  # all that planning asks of a model


def _places(shapes: Shapes, shard: int) -> list[Place]:
    """The tensors of a shard one after the other, as they lie in the released files."""
    places = []
    at = 0
    for dtype, item_nbytes in _ITEM_NBYTES.items():
        for name in sorted(name for name, (d, _) in shapes.items() if d == dtype):
            shape = shapes[name][1]
            nbytes = prod(shape) * item_nbytes
            places.append(Place(name, dtype, shape, shard, at, nbytes))
            at += nbytes
    return places
