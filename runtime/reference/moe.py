"""The mixture of experts: router, latent space, routed experts as they land, shared experts.

Routing depends on the layer's input alone, so the whole union of experts is known, and asked for, before the
first of their bytes is there.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from deltafin.indexer import ExpertPart, ModelConfig
from deltafin.runtime.reference import mxfp4
from deltafin.runtime.reference.mlp import mlp, situ
from deltafin.runtime.reference.norm import rms_norm
from deltafin.runtime.reference.spine import Spine

Span = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class Routes:
    """Each row's experts in ascending number, the order in which their outputs are added, with their weights."""

    ids: Tensor  # [rows, top_k] int64
    weights: Tensor  # [rows, top_k]

    def experts(self) -> list[int]:
        """Each expert that any row chose, once, ascending."""
        union: list[int] = np.unique(self.ids.cpu().numpy()).tolist()
        return union


def route(scores: Tensor, bias: Tensor, top_k: int, scaling_factor: float) -> Routes:
    """Choose by sigmoid + bias, of equals the lower number; weigh by the sigmoid alone. `scores` [rows, experts]."""
    p = torch.sigmoid(scores)
    order = torch.sort(p + bias, dim=1, descending=True, stable=True).indices  # stable: lowest number first
    ids = order[:, :top_k].sort(dim=1).values
    weights = p.gather(1, ids)
    weights = weights / (weights.sum(1, keepdim=True) + 1e-20) * scaling_factor
    return Routes(ids, weights)


def project(x: Tensor, spine: Spine, config: ModelConfig) -> tuple[Tensor, Tensor]:
    """What needs no routed expert: the latents [rows, latent] and the shared experts' output [rows, hidden]."""
    latent = spine.linear("block_sparse_moe.routed_expert_down_proj.weight", x)
    return latent, mlp(x, spine, "block_sparse_moe.shared_experts.", config)


def mix_experts(
    latent: Tensor,
    routes: Routes,
    landing: Iterator[tuple[int, Span]],
    layout: tuple[ExpertPart, ...],
    config: ModelConfig,
    layer: int,
) -> Tensor:
    """The weighted sum of every row's experts [rows, latent], whatever order they land in."""
    ids = routes.ids.cpu().numpy()
    waiting = set(routes.experts())
    outputs = latent.new_empty(*ids.shape, latent.shape[1])  # [rows, top_k, latent]
    for number, span in landing:
        waiting.remove(number)
        rows, places = (torch.from_numpy(i).to(latent.device) for i in np.nonzero(ids == number))
        name = f"language_model.model.layers.{layer}.block_sparse_moe.experts.{number}."
        outputs[rows, places] = expert(latent[rows], _parts(span, layout), name, config)
    assert not waiting, f"layer {layer}: the store never delivered experts {sorted(waiting)}"
    total = latent.new_zeros(latent.shape)
    for place in range(ids.shape[1]):  # ascending expert number
        total += routes.weights[:, place, None] * outputs[:, place]
    return total


def expert(t: Tensor, parts: dict[str, Span], name: str, config: ModelConfig) -> Tensor:
    """w2(SiTU(w1 t, w3 t)) for t [rows, latent], one matrix decoded at a time."""

    def times(x: Tensor, w: str) -> Tensor:
        matrix = mxfp4.decode(parts[f"{w}.weight_packed"], parts[f"{w}.weight_scale"], name + w, x.device)
        return x @ matrix.T

    return times(situ(times(t, "w1"), times(t, "w3"), config), "w2")


def unproject(total: Tensor, shared: Tensor, spine: Spine, config: ModelConfig) -> Tensor:
    """One norm on the sum of the experts, never on each, then back to the model's width."""
    total = rms_norm(total, spine["block_sparse_moe.routed_expert_norm.weight"], config.rms_norm_eps)
    return spine.linear("block_sparse_moe.routed_expert_up_proj.weight", total) + shared


def _parts(span: Span, layout: tuple[ExpertPart, ...]) -> dict[str, Span]:
    return {p.name: span[p.offset : p.offset + p.nbytes].reshape(p.shape) for p in layout}
