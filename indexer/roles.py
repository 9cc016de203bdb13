"""Names -> roles: which tensors a checkpoint with a given config must have, and which it may.

Names, shapes and storage types: docs/model.md. A name that is neither expected nor one of the vision
parts is an error, so a catalog is a proof that nothing is missing and nothing is unknown.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from deltafin.indexer.config import ModelConfig

LAYER_PREFIX = "language_model.model.layers."
IGNORED_PREFIXES = ("vision_tower.", "mm_projector.")

EMBEDDING = "language_model.model.embed_tokens.weight"
HEAD = "language_model.lm_head.weight"
FINAL_PREFIX = "language_model.model."
FINAL_NAMES = ("norm.weight", "output_attn_res_norm.weight", "output_attn_res_proj.weight")

# The six tensors of an expert in the order in which they lie (which is also name order).
EXPERT_PARTS = (
    "w1.weight_packed",
    "w1.weight_scale",
    "w2.weight_packed",
    "w2.weight_scale",
    "w3.weight_packed",
    "w3.weight_scale",
)

_EXPERT = re.compile(
    r"language_model\.model\.layers\.(0|[1-9]\d{0,4})\.block_sparse_moe\.experts\.(0|[1-9]\d{0,4})\.(w[123]\.weight_(?:packed|scale))"
)
_LAYER = re.compile(r"language_model\.model\.layers\.(0|[1-9]\d{0,4})\.(.+)")
_PART_NUMBER = {name: i for i, name in enumerate(EXPERT_PARTS)}


@dataclass(frozen=True, slots=True)
class ExpertPart:
    """One of the six tensors of an expert; `offset` counts from the start of the expert's span."""

    name: str
    shape: tuple[int, int]
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class ExpertName:
    layer: int
    expert: int
    part: int  # index into EXPERT_PARTS


@dataclass(frozen=True, slots=True)
class SpineName:
    layer: int
    short: str  # the name without its layer prefix


Shapes = dict[str, tuple[str, tuple[int, ...]]]  # name -> dtype, shape


def classify(name: str) -> ExpertName | SpineName | None:
    """The place of a layer tensor by its name alone; None for anything that is not in a layer."""
    if m := _EXPERT.fullmatch(name):
        return ExpertName(int(m[1]), int(m[2]), _PART_NUMBER[m[3]])
    if m := _LAYER.fullmatch(name):
        return SpineName(int(m[1]), m[2])
    return None


def is_ignored(name: str) -> bool:
    """True for the vision parts, which a text engine records and skips."""
    return name.startswith(IGNORED_PREFIXES)


def expert_layout(config: ModelConfig) -> tuple[ExpertPart, ...]:
    """The six tensors inside an expert's span. w1 is the gate, w3 the up and w2 the down projection."""
    latent, width, group = config.latent_size, config.expert_size, config.group_size
    parts, at = [], 0
    for name in EXPERT_PARTS:
        rows, cols = (latent, width) if name.startswith("w2") else (width, latent)
        shape = (rows, cols // 2) if name.endswith("packed") else (rows, cols // group)
        parts.append(ExpertPart(name, shape, at, shape[0] * shape[1]))
        at += shape[0] * shape[1]
    return tuple(parts)


def expert_nbytes(config: ModelConfig) -> int:
    """Bytes of one expert: 17,547,264 for K3."""
    return sum(p.nbytes for p in expert_layout(config))


def global_shapes(config: ModelConfig) -> Shapes:
    """The tensors outside the layers, by full name."""
    hidden, vocab = config.hidden_size, config.vocab_size
    return {
        EMBEDDING: ("BF16", (vocab, hidden)),
        HEAD: ("BF16", (vocab, hidden)),
        FINAL_PREFIX + "norm.weight": ("BF16", (hidden,)),
        FINAL_PREFIX + "output_attn_res_norm.weight": ("BF16", (hidden,)),
        FINAL_PREFIX + "output_attn_res_proj.weight": ("BF16", (1, hidden)),
    }


def spine_shapes(config: ModelConfig, layer: int) -> Shapes:
    """Every tensor of a layer that is not a routed expert, by short name."""
    hidden = config.hidden_size
    shapes: Shapes = {
        "input_layernorm.weight": ("BF16", (hidden,)),
        "post_attention_layernorm.weight": ("BF16", (hidden,)),
        "self_attention_res_norm.weight": ("BF16", (hidden,)),
        "self_attention_res_proj.weight": ("BF16", (1, hidden)),
        "mlp_res_norm.weight": ("BF16", (hidden,)),
        "mlp_res_proj.weight": ("BF16", (1, hidden)),
    }
    shapes |= _kda_shapes(config) if config.is_kda(layer) else _mla_shapes(config)
    shapes |= _moe_shapes(config) if config.is_moe(layer) else _dense_shapes(config)
    return shapes


def _kda_shapes(c: ModelConfig) -> Shapes:
    hidden, width, dim = c.hidden_size, c.kda_width, c.kda_head_dim
    shapes: Shapes = {
        # One value per head, padded with zeros: 96 values in 128 places in K3.
        "self_attn.A_log": ("F32", (max(dim, c.kda_heads),)),
        "self_attn.dt_bias": ("F32", (width,)),
        "self_attn.f_a_proj.weight": ("BF16", (dim, hidden)),
        "self_attn.f_b_proj.weight": ("BF16", (width, dim)),
        "self_attn.b_proj.weight": ("BF16", (c.kda_heads, hidden)),
        "self_attn.g_proj.weight": ("BF16", (width, hidden)),
        "self_attn.o_norm.weight": ("F32", (dim,)),
        "self_attn.o_proj.weight": ("BF16", (hidden, width)),
    }
    for which in "qkv":
        shapes[f"self_attn.{which}_proj.weight"] = ("BF16", (width, hidden))
        shapes[f"self_attn.{which}_conv1d.weight"] = ("F32", (width, 1, c.conv_kernel))
    return shapes


def _mla_shapes(c: ModelConfig) -> Shapes:
    hidden, heads = c.hidden_size, c.mla_heads
    return {
        "self_attn.q_a_proj.weight": ("BF16", (c.q_lora_rank, hidden)),
        "self_attn.q_a_layernorm.weight": ("BF16", (c.q_lora_rank,)),
        "self_attn.q_b_proj.weight": ("BF16", (heads * c.q_head_dim, c.q_lora_rank)),
        "self_attn.kv_a_proj_with_mqa.weight": ("BF16", (c.kv_lora_rank + c.qk_rope_head_dim, hidden)),
        "self_attn.kv_a_layernorm.weight": ("BF16", (c.kv_lora_rank,)),
        "self_attn.kv_b_proj.weight": ("BF16", (heads * (c.qk_nope_head_dim + c.v_head_dim), c.kv_lora_rank)),
        "self_attn.g_proj.weight": ("BF16", (heads * c.v_head_dim, hidden)),
        "self_attn.o_proj.weight": ("BF16", (hidden, heads * c.v_head_dim)),
    }


def _dense_shapes(c: ModelConfig) -> Shapes:
    return {
        "mlp.gate_proj.weight": ("BF16", (c.intermediate_size, c.hidden_size)),
        "mlp.up_proj.weight": ("BF16", (c.intermediate_size, c.hidden_size)),
        "mlp.down_proj.weight": ("BF16", (c.hidden_size, c.intermediate_size)),
    }


def _moe_shapes(c: ModelConfig) -> Shapes:
    hidden, moe = c.hidden_size, "block_sparse_moe."
    return {
        moe + "gate.weight": ("BF16", (c.num_experts, hidden)),
        moe + "gate.e_score_correction_bias": ("F32", (c.num_experts,)),
        moe + "routed_expert_down_proj.weight": ("BF16", (c.latent_size, hidden)),
        moe + "routed_expert_norm.weight": ("BF16", (c.latent_size,)),
        moe + "routed_expert_up_proj.weight": ("BF16", (hidden, c.latent_size)),
        moe + "shared_experts.gate_proj.weight": ("BF16", (c.shared_size, hidden)),
        moe + "shared_experts.up_proj.weight": ("BF16", (c.shared_size, hidden)),
        moe + "shared_experts.down_proj.weight": ("BF16", (hidden, c.shared_size)),
    }
