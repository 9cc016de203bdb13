"""Gated multi-head latent attention, absorbed, without any rotation.

A token leaves one latent and one shared key part behind, whatever the number of heads. Keys and values are
never expanded: kv_b's key half moves to the query, its value half to the output. Nothing here knows positions
but the causal mask.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from deltafin.indexer import LORA_NORM_EPS, ModelConfig
from deltafin.runtime.reference.norm import rms_norm
from deltafin.runtime.reference.spine import Spine

# Scores exist for this many queries and keys at once: with K3's 96 heads, 6 MB beside 14 MB of queries.
KEY_BLOCK = 256
QUERY_BLOCK = 64


@dataclass(frozen=True, slots=True)
class Latents:
    """One sequence's cache in one layer: rows of [latent | key part] in blocks of KEY_BLOCK.

    Growing writes only rows beyond `length`, which belong to nobody yet, so an older `Latents` over the same blocks
    still says what it said. Blocks rather than one array: growing never copies or doubles a long context.
    """

    blocks: tuple[Tensor, ...] = ()  # each [KEY_BLOCK, kv_lora + rope]
    length: int = 0

    def extended(self, rows: Tensor) -> Latents:
        blocks, length = list(self.blocks), self.length
        while rows.shape[0]:
            at = length % KEY_BLOCK
            if at == 0:
                blocks.append(rows.new_empty(KEY_BLOCK, rows.shape[1]))
            some, rows = rows[: KEY_BLOCK - at], rows[KEY_BLOCK - at :]
            blocks[-1][at : at + some.shape[0]] = some
            length += some.shape[0]
        return Latents(tuple(blocks), length)

    def shortened(self, length: int) -> Latents:
        """Only the first `length` rows; the next to be added take the others' place."""
        return Latents(self.blocks[: -(-length // KEY_BLOCK)], length)

    def copied(self) -> Latents:
        return Latents(tuple(block.clone() for block in self.blocks), self.length)


def mla(
    x: Tensor, spans: list[slice], states: list[Latents], spine: Spine, config: ModelConfig
) -> tuple[Tensor, list[Latents]]:
    """Attention's output [rows, hidden] and each segment's cache with its rows appended."""
    heads, nope, rank = config.mla_heads, config.qk_nope_head_dim, config.kv_lora_rank
    low = rms_norm(spine.linear("self_attn.q_a_proj.weight", x), spine["self_attn.q_a_layernorm.weight"], LORA_NORM_EPS)
    q = spine.linear("self_attn.q_b_proj.weight", low).view(-1, heads, config.q_head_dim)  # [rows, heads, nope + rope]
    kv = spine.linear("self_attn.kv_a_proj_with_mqa.weight", x)  # [rows, rank + rope]
    latent = rms_norm(kv[:, :rank], spine["self_attn.kv_a_layernorm.weight"], LORA_NORM_EPS)
    cached = torch.cat([latent, kv[:, rank:]], dim=1)  # the key part is not normalised
    kv_b = spine["self_attn.kv_b_proj.weight"].view(heads, nope + config.v_head_dim, rank)
    to_key, to_value = kv_b[:, :nope], kv_b[:, nope:]  # [heads, nope, rank], [heads, v, rank]

    out = x.new_empty(x.shape[0], heads, config.v_head_dim)
    after: list[Latents] = []
    for span, state in zip(spans, states, strict=True):
        keys = state.extended(cached[span])
        for first in range(span.start, span.stop, QUERY_BLOCK):
            rows = slice(first, min(first + QUERY_BLOCK, span.stop))
            absorbed = torch.einsum("rhn,hnc->rhc", q[rows, :, :nope], to_key)  # [rows, heads, rank]
            query = torch.cat([absorbed, q[rows, :, nope:]], dim=2) * config.q_head_dim**-0.5
            attended = attend(query, keys, state.length + first - span.start, rank)
            out[rows] = torch.einsum("rhc,hvc->rhv", attended, to_value)
        after.append(keys)

    gated = out.flatten(1) * torch.sigmoid(spine.linear("self_attn.g_proj.weight", x))
    return spine.linear("self_attn.o_proj.weight", gated), after


def attend(query: Tensor, keys: Latents, position: int, rank: int) -> Tensor:
    """Softmax-weighted latents [rows, heads, rank] for queries [rows, heads, rank + rope] at `position` onwards.

    One walk over the key blocks with a running maximum and sum, so memory does not grow with the context.
    """
    rows, heads, _ = query.shape
    top = query.new_full((rows, heads, 1), -torch.inf)
    total = query.new_zeros(rows, heads, 1)
    sums = query.new_zeros(rows, heads, rank)
    mine = torch.arange(position, position + rows, device=query.device)
    for number, block in enumerate(keys.blocks[: (position + rows - 1) // KEY_BLOCK + 1]):
        first = number * KEY_BLOCK
        seen = block[: position + rows - first]  # what no query sees may be unwritten memory
        scores = torch.einsum("rhc,sc->rhs", query, seen)
        theirs = torch.arange(first, first + seen.shape[0], device=query.device)
        scores.masked_fill_((theirs > mine[:, None]).unsqueeze(1), -torch.inf)
        new_top = torch.maximum(top, scores.amax(-1, keepdim=True))  # finite from the first block on: key 0 is visible
        weights = torch.exp(scores - new_top)
        fade = torch.exp(top - new_top)
        total = total * fade + weights.sum(-1, keepdim=True)
        sums = sums * fade + torch.einsum("rhs,sc->rhc", weights, seen[:, :rank])
        top = new_top
    return sums / total
