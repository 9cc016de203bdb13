"""Gated multi-head latent attention, absorbed, over a float32 latent cache in fixed blocks."""

from __future__ import annotations

from collections import abc
from dataclasses import dataclass

import numpy as np

from deltafin.cext import _math
from deltafin.indexer import LORA_NORM_EPS, ModelConfig
from deltafin.runtime.native.products import Floats, Spine
from deltafin.runtime.segment import Part
from deltafin.runtime.traffic import StateTraffic

# In the order in which they are multiplied; kv_b_proj is used in slices, several times.
MATRICES = tuple(
    f"self_attn.{name}.weight" for name in ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "g_proj", "o_proj")
)

KEY_BLOCK = 256  # part of the arithmetic: softmax goes block by block, counted from position 0
# Queries that are absorbed at once: with K3's 96 heads 14 MB, and 13 MB of what they attend to.
QUERY_BLOCK = 64


@dataclass(frozen=True, slots=True)
class Latents:
    """One sequence's cache in one layer: rows of [latent | key part] in blocks of KEY_BLOCK.

    Growing writes only rows beyond `length`, which belong to nobody yet, so an older `Latents` over the
    same blocks still says what it said. Blocks rather than one array: growing never copies a long context.
    """

    blocks: tuple[Floats, ...] = ()  # each [KEY_BLOCK, kv_lora + rope]
    length: int = 0

    def extended(self, rows: Floats) -> Latents:
        blocks, length = list(self.blocks), self.length
        while len(rows):
            at = length % KEY_BLOCK
            if at == 0:
                blocks.append(np.empty((KEY_BLOCK, rows.shape[1]), np.float32))
            some, rows = rows[: KEY_BLOCK - at], rows[KEY_BLOCK - at :]
            blocks[-1][at : at + len(some)] = some
            length += len(some)
        return Latents(tuple(blocks), length)

    def shortened(self, length: int) -> Latents:
        """Only the first `length` rows; the next to be added take the others' place."""
        assert length <= self.length
        return Latents(self.blocks[: -(-length // KEY_BLOCK)], length)

    def copied(self) -> Latents:
        return Latents(tuple(block.copy() for block in self.blocks), self.length)

    @property
    def nbytes(self) -> int:
        return sum(block.nbytes for block in self.blocks)


@dataclass(frozen=True, slots=True)
class MlaDecision:
    """A layer's cache with rows of which the last are proposals, and its length without any of them."""

    keys: Latents
    before: int

    def accept(self, count: int) -> Latents:
        """The cache with the first `count` rows."""
        return self.keys.shortened(self.before + count)


def mla(
    x: Floats,
    parts: abc.Sequence[Part],
    spans: list[slice],
    states: list[Latents],
    spine: Spine,
    config: ModelConfig,
    layer: int,
    traffic: StateTraffic,
) -> tuple[Floats, list[Latents | MlaDecision | None]]:
    """Attention's output [rows, hidden] and what is left of each part; `spans` are the parts' rows.

    Left is the cache with its rows appended; or, if some are proposals, what decides on them; or nothing if nobody
    keeps it.
    """
    rows, heads, rank, rope = x.shape[0], config.mla_heads, config.kv_lora_rank, config.qk_rope_head_dim
    low = spine.norm("self_attn.q_a_layernorm.weight", spine.linear("self_attn.q_a_proj.weight", x), LORA_NORM_EPS)
    q = spine.linear("self_attn.q_b_proj.weight", low).reshape(rows, heads, config.q_head_dim)
    cached = np.empty((rows, rank + rope), np.float32)
    kv = spine.linear("self_attn.kv_a_proj_with_mqa.weight", x)  # [rows, rank + rope]
    _math.mla_latents(cached, kv, spine.bits("self_attn.kv_a_layernorm.weight"), LORA_NORM_EPS)
    kv_b = spine.bits("self_attn.kv_b_proj.weight")  # [heads * (nope + v), rank]

    out = np.empty((rows, heads * config.v_head_dim), np.float32)
    after: list[Latents | MlaDecision | None] = []
    for part, span, state in zip(parts, spans, states, strict=True):
        keys = state.extended(cached[span])
        traffic.written_nbytes += cached[span].nbytes
        if part.checkpoint is not None:
            part.checkpoint.sink.layer(layer, keys.shortened(state.length + part.checkpoint.at))
        for first in range(span.start, span.stop, QUERY_BLOCK):
            some = slice(first, min(first + QUERY_BLOCK, span.stop))
            query = np.empty((some.stop - first, heads, rank + rope), np.float32)
            _math.mla_absorb(query, q[some], kv_b)
            attended = np.empty((some.stop - first, heads, rank), np.float32)
            _math.mla_attend(attended, query, keys.blocks, state.length + first - span.start)
            _math.mla_values(out[some], attended, kv_b)
        after.append(MlaDecision(keys, state.length) if part.drafted else keys if part.keep else None)

    _math.sigmoid_gate(out, out, spine.linear("self_attn.g_proj.weight", x))
    return spine.linear("self_attn.o_proj.weight", out), after
