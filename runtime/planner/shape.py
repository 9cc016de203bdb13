"""What a token of a model meets, in numbers: weights to multiply, bytes to read, layer by layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from deltafin.indexer import ModelConfig, Plannable
from deltafin.runtime.memory import kda_state_nbytes
from deltafin.runtime.native.passes import matrices
from deltafin.store import (
    HEAD,
    Encoding,
    LayerPieces,
    PackFormat,
    PackSet,
    foreseen_packs,
    piece_encoding,
    spine_pieces,
)

ROUTER = "block_sparse_moe.gate.weight"  # no expert can be asked for before
AFTER = "block_sparse_moe.routed_expert_up_proj.weight"  # what needs the experts' sum

Weights = dict[Encoding, int]  # how many of each encoding


@dataclass(frozen=True, slots=True)
class LayerShape:
    """One layer of the spine."""

    kda: bool
    moe: bool
    matrices: dict[str, Weights]  # that are multiplied as a whole, by name, in that order
    sliced: Weights  # MLA's matrix that is used in slices, and held
    state_nbytes: int  # of a sequence, read and written by each pass
    nbytes: int  # to be read, where it does not stay
    pieces: int

    def weights(self, *, attention: bool) -> Weights:
        """Of attention, or of everything else."""
        parts = [w for name, w in self.matrices.items() if name.startswith("self_attn.") == attention]
        return total([*parts, self.sliced] if attention else parts)


@dataclass(frozen=True, slots=True)
class ModelShape:
    """A model as it would be computed with one encoding of the spine."""

    config: ModelConfig
    layers: tuple[LayerShape, ...]
    head: LayerShape  # the final norms with it
    expert_nbytes: int
    expert_weights: int
    pieces: tuple[LayerPieces, ...]  # what `plan_memory` asks for
    spine_nbytes: int  # of everything that is no routed expert, as stored, embedding included
    published_skew: bool  # which experts are hot is known, and they are not used equally often

    @property
    def moe_layers(self) -> int:
        return len(self.config.moe_layers)

    @property
    def experts(self) -> int:
        return self.moe_layers * self.config.num_experts

    @property
    def pool_nbytes(self) -> int:
        """Of all routed experts."""
        return self.experts * self.expert_nbytes

    @property
    def full_nbytes(self) -> int:
        return self.spine_nbytes + self.pool_nbytes

    @property
    def token_expert_nbytes(self) -> int:
        """What one row asks for of experts."""
        return self.moe_layers * self.config.top_k * self.expert_nbytes

    @property
    def walk_nbytes(self) -> int:
        """What one pass reads of the spine if nothing of it stays."""
        return sum(layer.nbytes for layer in self.layers) + self.head.nbytes


def model_shape(
    catalog: Plannable,
    *,
    packs: PackSet | None = None,
    foreseen: PackFormat | None = None,
    published_skew: bool = False,
) -> ModelShape:
    """The shape with the spine from `packs`, or from packs of a format that nobody has made yet."""
    config = catalog.config
    pieces = spine_pieces(catalog, lambda layer: matrices(config, layer), packs)
    if foreseen is not None:
        pieces = foreseen_packs(pieces, foreseen)
    layers = tuple(_layer(config, layer, matrices(config, layer.number), foreseen) for layer in pieces[:-1])
    expert_weights = 3 * config.latent_size * config.expert_size
    walk = sum(piece.nbytes for layer in pieces for piece in (*layer.held, *layer.streamed))
    return ModelShape(
        config=config,
        layers=layers,
        head=_layer(config, pieces[-1], (HEAD,), None),
        expert_nbytes=catalog.expert_nbytes,
        expert_weights=expert_weights,
        pieces=tuple(pieces),
        spine_nbytes=walk + catalog.embedding().tensor.nbytes,
        published_skew=published_skew,
    )


def _layer(config: ModelConfig, layer: LayerPieces, names: Sequence[str], foreseen: PackFormat | None) -> LayerShape:
    """`names` are the matrices that are multiplied as a whole, in that order; small ones are held, not streamed."""
    whole: dict[str, Weights] = {name: {} for name in names}
    sliced: Weights = {}
    for piece in layer.streamed:
        assert piece.matrix is not None
        _add(whole[piece.matrix], piece_encoding(piece, foreseen), piece.rows * piece.k)
    for tensor in layer.tensors:
        if len(tensor.shape) == 2 and tensor.shape[0] > 1 and tensor.dtype == "BF16":
            _add(whole.get(tensor.name, sliced), Encoding.BF16, prod(tensor.shape))
    kda = config.is_kda(layer.number)
    return LayerShape(
        kda=kda,
        moe=layer.number in config.moe_layers,
        matrices=whole,
        sliced=sliced,
        state_nbytes=kda_state_nbytes(config) // len(config.kda_layers) if kda else 0,
        nbytes=sum(piece.nbytes for piece in (*layer.held, *layer.streamed)),
        pieces=len(layer.held) + len(layer.streamed),
    )


def _add(weights: Weights, encoding: Encoding, count: int) -> None:
    weights[encoding] = weights.get(encoding, 0) + count


def total(parts: Sequence[Weights]) -> Weights:
    """Sums by encoding."""
    found: Weights = {}
    for part in parts:
        for encoding, count in part.items():
            _add(found, encoding, count)
    return found
