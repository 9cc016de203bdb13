"""The mixture of experts: router, latent space, routed experts as they land, shared experts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from deltafin.cext import _math
from deltafin.errors import Corrupt
from deltafin.indexer import LAYER_PREFIX, ExpertPart, ModelConfig
from deltafin.runtime.native.products import Floats, Spine, mlp

Span = npt.NDArray[np.uint8]

NAN_SCALE = 255

# In the order in which they are multiplied.
MATRICES = (
    "block_sparse_moe.gate.weight",
    "block_sparse_moe.routed_expert_down_proj.weight",
    *(f"block_sparse_moe.shared_experts.{name}_proj.weight" for name in ("gate", "up", "down")),
    "block_sparse_moe.routed_expert_up_proj.weight",
)


@dataclass(frozen=True, slots=True)
class Routes:
    """Each row's experts in ascending number, the order in which their outputs are added, with their weights."""

    ids: npt.NDArray[np.int32]  # [rows, top_k]
    weights: Floats  # [rows, top_k]

    def experts(self) -> list[int]:
        """Each expert that any row chose, once, ascending."""
        union: list[int] = np.unique(self.ids).tolist()
        return union


def route(x: Floats, spine: Spine, config: ModelConfig) -> tuple[Routes, int]:
    """Every row's experts, and the first row whose keys hold a NaN, or -1."""
    scores = spine.linear("block_sparse_moe.gate.weight", x)  # [rows, experts]
    ids = np.empty((len(x), config.top_k), np.int32)
    weights = np.empty((len(x), config.top_k), np.float32)
    bias = spine.floats("block_sparse_moe.gate.e_score_correction_bias")
    bad = _math.all_finite(scores)
    if bad < 0:
        bad = _math.route(ids, weights, scores, bias, config.routed_scaling_factor)
    return Routes(ids, weights), bad


def mix_experts(
    latent: Floats,
    routes: Routes,
    landing: Iterator[tuple[int, Span]],
    layout: tuple[ExpertPart, ...],
    config: ModelConfig,
    layer: int,
) -> Floats:
    """The weighted sum of every row's experts [rows, latent], whatever order they land in."""
    outputs = np.empty((*routes.ids.shape, latent.shape[1]), np.float32)  # [rows, top_k, latent]
    waiting = set(routes.experts())
    for number, span in landing:
        waiting.remove(number)
        rows, places = np.nonzero(routes.ids == number)
        name = f"{LAYER_PREFIX}{layer}.block_sparse_moe.experts.{number}."
        outputs[rows, places] = expert(latent[rows], _parts(span, layout), name, config)
    assert not waiting, f"layer {layer}: the store never delivered experts {sorted(waiting)}"
    total = np.empty_like(latent)
    _math.combine(total, outputs, routes.weights)
    return total


def expert(t: Floats, parts: dict[str, Span], name: str, config: ModelConfig) -> Floats:
    """w2(SiTU(w1 t, w3 t)) for t [rows, latent]."""
    gate, up = multiply(t, ("w1", "w3"), parts, name)
    _math.situ(gate, gate, up, config.situ_beta, config.situ_linear_beta)
    (out,) = multiply(gate, ("w2",), parts, name)
    return out


def multiply(x: Floats, matrices: tuple[str, ...], parts: dict[str, Span], name: str) -> list[Floats]:
    """x times each of an expert's matrices, as one job: waking the threads costs as much as a fifth of a product."""
    products = []
    for w in matrices:
        packed, scale = parts[f"{w}.weight_packed"], parts[f"{w}.weight_scale"]
        products.append((np.empty((len(x), len(packed)), np.float32), x, packed, scale))
    try:
        _math.matmul_mxfp4_each(products)
    except ValueError:
        for w in matrices:
            _refuse_nan_scale(parts[f"{w}.weight_scale"], f"{name}{w}.weight_scale")
        raise
    return [out for out, *_ in products]


def _refuse_nan_scale(scale: Span, name: str) -> None:
    if len(bad := np.argwhere(scale == NAN_SCALE)):
        row, group = bad[0].tolist()
        raise Corrupt(
            f"{name}: the scale of row {row}, group {group} is 255, which is no number; "
            "the bytes are damaged: verify the store and fetch them again"
        )


def project(x: Floats, spine: Spine, config: ModelConfig) -> tuple[Floats, Floats]:
    """What needs no routed expert: the latents [rows, latent] and the shared experts' output [rows, hidden]."""
    latent = spine.linear("block_sparse_moe.routed_expert_down_proj.weight", x)
    return latent, mlp(x, spine, "block_sparse_moe.shared_experts.", config)


def unproject(total: Floats, shared: Floats, spine: Spine, config: ModelConfig) -> Floats:
    """One norm on the sum of the experts, never on each, then back to the model's width."""
    total = spine.norm("block_sparse_moe.routed_expert_norm.weight", total, config.rms_norm_eps)
    out = spine.linear("block_sparse_moe.routed_expert_up_proj.weight", total)
    _math.add(out, out, shared)
    return out


def _parts(span: Span, layout: tuple[ExpertPart, ...]) -> dict[str, Span]:
    return {p.name: span[p.offset : p.offset + p.nbytes].reshape(p.shape) for p in layout}
