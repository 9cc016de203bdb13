"""SiTU and the gated MLP; the dense layer, the shared experts and a routed expert differ only in their matrices."""

from __future__ import annotations

import torch
from torch import Tensor

from deltafin.indexer import ModelConfig
from deltafin.runtime.reference.spine import Spine


def situ(gate: Tensor, up: Tensor, config: ModelConfig) -> Tensor:
    """[b tanh(gate/b) sig(gate)] [l tanh(up/l)]: the sigmoid sees the uncapped gate."""
    b, cap = config.situ_beta, config.situ_linear_beta
    return b * torch.tanh(gate / b) * torch.sigmoid(gate) * (cap * torch.tanh(up / cap))


def mlp(x: Tensor, spine: Spine, prefix: str, config: ModelConfig) -> Tensor:
    gate = spine.linear(prefix + "gate_proj.weight", x)  # [rows, width]
    up = spine.linear(prefix + "up_proj.weight", x)  # [rows, width]
    return spine.linear(prefix + "down_proj.weight", situ(gate, up, config))  # [rows, hidden]
