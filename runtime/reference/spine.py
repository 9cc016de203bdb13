"""One layer's spine (or the final norms, or a tile of the head) as float32 on the device.

The store hands out bfloat16 as raw bits. Widening a whole layer would treble its memory, so a matrix is
widened a tile of rows at a time, multiplied, and forgotten.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

# 64 MB once widened: large beside the cost of a call, small beside a layer's spine of 1.3 GB.
TILE_WEIGHTS = 1 << 24

# As the store hands it out: raw bfloat16 bits in uint16, or float32.
Stored = npt.NDArray[np.generic]


class Spine:
    """Named tensors of one layer; the arrays stay the store's until a product needs them."""

    def __init__(self, tensors: Mapping[str, Stored], device: torch.device) -> None:
        self.tensors = tensors
        self.device = device

    def __getitem__(self, name: str) -> Tensor:
        """A whole tensor in float32: for norms, biases and convolutions."""
        return widen(self.tensors[name], self.device)

    def linear(self, name: str, x: Tensor) -> Tensor:
        """y = x W^T."""
        return linear(x, self.tensors[name])  # [rows, out]


def linear(x: Tensor, weight: Stored) -> Tensor:
    """y = x W^T for a stored matrix [out, in] and x [rows, in] on any device."""
    out, width = weight.shape
    y = x.new_empty(x.shape[0], out)
    step = max(1, TILE_WEIGHTS // width)
    for first in range(0, out, step):
        tile = widen(weight[first : first + step], x.device)  # [<= step, in]
        y[:, first : first + step] = x @ tile.T
    return y  # [rows, out]


def widen(stored: Stored, device: torch.device) -> Tensor:
    """Exactly the stored values, as float32. Stored travel to the device before they widen."""
    if stored.dtype == np.uint16:
        return torch.from_numpy(stored.view(np.int16)).to(device).view(torch.bfloat16).float()
    return torch.from_numpy(stored).to(device)
