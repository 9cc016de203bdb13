"""Products with stored matrices, in fresh output arrays."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from deltafin.cext import _math
from deltafin.indexer import ModelConfig

Floats = npt.NDArray[np.float32]
Bits = npt.NDArray[np.uint16]
# As the store hands it out: raw bfloat16 bits in uint16, or float32.
Stored = npt.NDArray[np.generic]


class Spine:
    """Named tensors of one layer, as stored."""

    def __init__(self, tensors: Mapping[str, Stored]) -> None:
        self._tensors = tensors

    def bits(self, name: str) -> Bits:
        """A bfloat16 tensor."""
        tensor = self._tensors[name]
        assert tensor.dtype == np.uint16, name
        return tensor.view(np.uint16)

    def floats(self, name: str) -> Floats:
        """A float32 tensor."""
        tensor = self._tensors[name]
        assert tensor.dtype == np.float32, name
        return tensor.view(np.float32)

    def linear(self, name: str, x: Floats) -> Floats:
        """y = x W^T."""
        return linear(x, self.bits(name))  # [rows, out]

    def norm(self, name: str, x: Floats, eps: float) -> Floats:
        out = np.empty_like(x)
        _math.rms_norm(out, x, self.bits(name), eps)
        return out


def linear(x: Floats, weight: Bits) -> Floats:
    out = np.empty((x.shape[0], weight.shape[0]), np.float32)
    _math.matmul_bf16(out, x, weight)
    return out  # [rows, out]


def mlp(x: Floats, spine: Spine, prefix: str, config: ModelConfig) -> Floats:
    """down(SiTU(gate x, up x)) for the dense layer and the shared experts."""
    gate = spine.linear(prefix + "gate_proj.weight", x)  # [rows, width]
    up = spine.linear(prefix + "up_proj.weight", x)  # [rows, width]
    _math.situ(gate, gate, up, config.situ_beta, config.situ_linear_beta)
    return spine.linear(prefix + "down_proj.weight", gate)  # [rows, hidden]
