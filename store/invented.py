"""Invented weights: for any tensor of K3's architecture content with which a model computes sane numbers.

Content depends on a tensor's description and the position in it and on nothing else, so any piece can be made
without the rest, and the same again. Matrices are normal, of a size at which outputs are about as large as inputs;
BF16 is rounded from there, tails included, so that exponents are as frequent as in weights that were trained.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from functools import cache
from math import log2, prod
from statistics import NormalDist

import numpy as np
import numpy.typing as npt

from deltafin.indexer import ModelConfig, expert_layout

Bytes = npt.NDArray[np.uint8]

_SEED = 20261130
_BLOCK_NBYTES = 1 << 20  # what one generator makes
_BINS = 1 << 16  # of equal probability under the normal curve: a random 16-bit number names one
_ITEM_NBYTES = {"F32": 4, "BF16": 2}

# How much larger than its input a matrix's output is; the first end of a name counts, others are 1. Those of
# gated products are larger because SiTU shrinks, those of what returns to the residual smaller because many are summed.
_GAINS = (
    ("routed_expert_up_proj.weight", 0.8),
    ("shared_experts.down_proj.weight", 0.3),
    ("mlp.down_proj.weight", 0.4),
    (".gate_proj.weight", 2.5),
    (".up_proj.weight", 2.5),
    ("block_sparse_moe.gate.weight", 1.5),
    ("res_proj.weight", 1.2),
    ("self_attn.g_proj.weight", 1.5),
    ("q_b_proj.weight", 1.3),
    ("kv_a_proj_with_mqa.weight", 1.2),
    ("kv_b_proj.weight", 1.2),
    ("lm_head.weight", 2.0),
)
_EXPERT_GAINS = {"w1": 2.5, "w2": 1.0, "w3": 2.5}
_EMBEDDING = "embed_tokens.weight"
_EMBEDDING_SIZE = 0.8
_BIAS_SIZE = 0.02  # far below the spread of the scores, so that tokens and layers choose different experts
_EXPONENTS = 4  # scale bytes of a matrix are this many neighbouring ones, equally often
_CODE_SQUARE = 8.5625  # mean square of MXFP4's sixteen codes


@dataclass(frozen=True, slots=True)
class Invented:
    """One tensor, or an expert's whole span as dtype MXFP4; `variant` tells apart those of one name."""

    variant: str
    name: str
    dtype: str
    shape: tuple[int, ...]


class Inventor:
    """Makes content for one config."""

    def __init__(self, config: ModelConfig) -> None:
        self._config = config
        self._tables: dict[float, npt.NDArray[np.uint16]] = {}  # BF16 bits of the bins, by standard deviation

    def fill(self, out: Bytes, tensor: Invented, begin: int) -> None:
        """The bytes of a tensor from `begin` on."""
        if tensor.dtype == "MXFP4":
            whole = self._expert(tensor)
            out[:] = whole[begin : begin + len(out)]
            return
        at, end = begin, begin + len(out)
        while at < end:
            number, skip = divmod(at, _BLOCK_NBYTES)
            block = self._block(tensor, number)[skip : skip + end - at]
            out[at - begin : at - begin + len(block)] = block
            at += len(block)

    def _block(self, tensor: Invented, number: int) -> Bytes:
        item_nbytes = _ITEM_NBYTES[tensor.dtype]
        first = number * _BLOCK_NBYTES // item_nbytes
        count = min(_BLOCK_NBYTES // item_nbytes, prod(tensor.shape) - first)
        rng = _generator(tensor, number)
        if tensor.dtype == "BF16" and not tensor.name.endswith("norm.weight"):
            return self._normal(rng, count, self._size(tensor)).view(np.uint8)
        values = self._values(tensor, rng, first, count)
        return (values if tensor.dtype == "F32" else _bf16(values)).view(np.uint8)

    def _values(self, tensor: Invented, rng: np.random.Generator, first: int, count: int) -> npt.NDArray[np.float32]:
        """What is no matrix: norms, and the F32 tensors."""
        name = tensor.name.rpartition("self_attn.")[2]
        if name == "A_log":
            values = rng.random(count, np.float32) * np.float32(1.5) - np.float32(0.5)
            values[max(0, self._config.kda_heads - first) :] = 0  # one value a head, then zeros
            return values
        if name == "dt_bias":
            return rng.random(count, np.float32) * np.float32(8) - np.float32(7)
        normal = rng.standard_normal(count, np.float32)
        if name.endswith("conv1d.weight"):
            return normal * np.float32(0.5)
        if name.endswith("e_score_correction_bias"):
            return normal * np.float32(_BIAS_SIZE)
        assert name.endswith("norm.weight"), f"{tensor.name}: nobody said what its content is like"
        return normal * np.float32(0.2) + np.float32(1)

    def _size(self, tensor: Invented) -> float:
        """The standard deviation of a matrix."""
        if tensor.name.endswith(_EMBEDDING):
            return _EMBEDDING_SIZE
        gain = next((gain for end, gain in _GAINS if tensor.name.endswith(end)), 1.0)
        return gain / float(tensor.shape[-1] ** 0.5)

    def _normal(self, rng: np.random.Generator, count: int, size: float) -> npt.NDArray[np.uint16]:
        """BF16 bits of normal numbers. The outermost and innermost bins are wide: there they are drawn anew."""
        if size not in self._tables:
            self._tables[size] = _bf16(_bins() * np.float32(size))
        bins = rng.integers(0, _BINS - 1, count, np.uint16, endpoint=True)
        bits = self._tables[size].take(bins)
        wide = np.flatnonzero((bins + np.uint16(1) <= 1) | (bins - np.uint16(_BINS // 2 - 1) <= 1))
        inside = (bins[wide] + rng.random(len(wide))) / _BINS
        inverse = NormalDist(0, size).inv_cdf
        bits[wide] = _bf16(np.array([inverse(min(max(p, 1e-12), 1 - 1e-12)) for p in inside], np.float32))
        return bits

    def _expert(self, tensor: Invented) -> Bytes:
        layout = expert_layout(self._config)
        out = np.empty(sum(part.nbytes for part in layout), np.uint8)
        rng = _generator(tensor, 0)
        for part in layout:
            words = rng.integers(0, 2**64 - 1, -(-part.nbytes // 8), np.uint64, endpoint=True)
            data = words.view(np.uint8)[: part.nbytes]
            if part.name.endswith("scale"):
                data = data % np.uint8(_EXPONENTS) + np.uint8(self._lowest_scale(part.name.partition(".")[0]))
            out[part.offset : part.offset + part.nbytes] = data
        return out

    def _lowest_scale(self, matrix: str) -> int:
        columns = self._config.expert_size if matrix == "w2" else self._config.latent_size
        scale_square = sum(4.0**e for e in range(_EXPONENTS)) / _EXPONENTS
        wanted = _EXPERT_GAINS[matrix] / (columns * _CODE_SQUARE * scale_square) ** 0.5
        return 127 + round(log2(wanted))


def _generator(tensor: Invented, block: int) -> np.random.Generator:
    key = [_SEED, zlib.crc32(tensor.variant.encode()), zlib.crc32(tensor.name.encode()), block]
    return np.random.Generator(np.random.SFC64(key))


@cache
def _bins() -> npt.NDArray[np.float32]:
    """The middle of each bin, by probability."""
    inverse = NormalDist().inv_cdf
    upper = np.array([inverse((_BINS // 2 + i + 0.5) / _BINS) for i in range(_BINS // 2)], np.float32)
    return np.concatenate((-upper[::-1], upper))


def _bf16(values: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
    """Rounded to nearest, ties to even."""
    bits = values.view(np.uint32)
    return ((bits + ((bits >> np.uint32(16)) & np.uint32(1)) + np.uint32(0x7FFF)) >> np.uint32(16)).astype(np.uint16)
