"""Products with stored matrices."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from deltafin.cext import _math
from deltafin.indexer import ModelConfig
from deltafin.store import Bf12, Bf16, Block, Int8, SpineLayer

Floats = npt.NDArray[np.float32]
Bits = npt.NDArray[np.uint16]

# In the order in which they are multiplied.
MLP_MATRICES = tuple(f"mlp.{name}_proj.weight" for name in ("gate", "up", "down"))


class Spine:
    """Named tensors of one layer: small ones as stored, matrices block by block as they come."""

    def __init__(self, layer: SpineLayer) -> None:
        self._layer = layer

    def bits(self, name: str) -> Bits:
        """A bfloat16 tensor."""
        tensor = self._layer.tensors[name]
        assert tensor.dtype == np.uint16, name
        return tensor.view(np.uint16)

    def floats(self, name: str) -> Floats:
        """A float32 tensor."""
        tensor = self._layer.tensors[name]
        assert tensor.dtype == np.float32, name
        return tensor.view(np.float32)

    def linear(self, name: str, x: Floats) -> Floats:
        """y = x W^T [rows, out]; each matrix once a pass, in the order of the MATRICES."""
        out = np.empty((len(x), self._layer.rows(name)), np.float32)
        for block in self._layer.blocks(name):
            multiply(out, x, block)
        return out

    def norm(self, name: str, x: Floats, eps: float) -> Floats:
        out = np.empty_like(x)
        _math.rms_norm(out, x, self.bits(name), eps)
        return out


def multiply(out: Floats, x: Floats, block: Block) -> None:
    """x times some rows of a matrix, into their columns of `out`."""
    match block.weights:
        case Bf16(bits):
            _math.matmul_bf16(out, x, bits, block.first)
        case Bf12(codes, base, starts, columns, values):
            _math.matmul_bf12(out, x, codes, base, starts, columns, values, block.first)
        case Int8(integers, scale):
            _math.matmul_int8(out, x, integers, scale, block.first)


def mlp(x: Floats, spine: Spine, prefix: str, config: ModelConfig) -> Floats:
    """down(SiTU(gate x, up x)) for the dense layer and the shared experts."""
    gate = spine.linear(prefix + "gate_proj.weight", x)  # [rows, width]
    up = spine.linear(prefix + "up_proj.weight", x)  # [rows, width]
    _math.situ(gate, gate, up, config.situ_beta, config.situ_linear_beta)
    return spine.linear(prefix + "down_proj.weight", gate)  # [rows, hidden]
