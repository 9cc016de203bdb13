"""RMSNorm and its unweighted parts."""

from __future__ import annotations

import torch
from torch import Tensor

# Added to the sum of squares (not the mean) of KDA's q and k.
L2_EPS = 1e-6


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x * inverse_rms(x, eps) * weight


def inverse_rms(x: Tensor, eps: float) -> Tensor:
    return torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)


def l2_norm(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + L2_EPS)
