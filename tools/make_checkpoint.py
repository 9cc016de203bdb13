#!/usr/bin/env python3
"""Write a small random-weights checkpoint shaped like moonshotai/Kimi-K3.

The output folder has the layout of the original checkpoint (text part):

    config.json                       kimi_k3 wrapping text_config kimi_linear
    model-00001-of-0000NN.safetensors one shard per decoder layer (layer L is in shard L+1), then one shard with
                                      embed_tokens / lm_head / final norms, then, unless vision is off, one with a
                                      stub mm_projector and one with a stub vision_tower (a text loader skips those)
    model.safetensors.index.json
    MANIFEST.json                     preset, seed, SHA-256 of every file

Tensor names, ranks and storage types follow the published checkpoint:

  * BF16 everything, except
  * F32: A_log, dt_bias, {q,k,v}_conv1d.weight, KDA o_norm.weight, gate.e_score_correction_bias
  * U8: routed experts' weight_packed (two E2M1 codes a byte, low nibble is the even column) and weight_scale (E8M0,
    one per 32 input columns)
  * A_log is one value per KDA head, zero-padded to length head_dim (the real one is 96 values padded to 128).

Needs only numpy. Bit-for-bit deterministic: numbers come from raw Philox output with additions and exact scalings only
(no libm calls), so a (preset, seed) pair names one checkpoint on every machine; tests/golden holds the digests.

With encode_address the routed experts hold no weights but their own address (`address_bytes`): whoever reads them can
tell which layer, expert and tensor each byte came from. They are still legal MXFP4.
"""

import argparse
import hashlib
import json
import struct
import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import NotRequired, TypedDict, cast

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Bytes = NDArray[np.uint8]


class Sizes(TypedDict):
    """What distinguishes one checkpoint from another; the optional ones have K3's values when absent."""

    layers: int
    block: int  # layers per attention-residual block
    hidden: int
    heads: int
    head_dim: int  # of KDA
    q_lora: int
    kv_lora: int
    nope: int
    rope: int
    v_dim: int
    experts: int
    top_k: int
    shared: int
    latent: int
    inter: int
    dense_inter: int
    vocab: int
    full_attn: NotRequired[list[int]]  # MLA layers counted from 1, as config.json does
    first_k_dense: NotRequired[int]
    routed_scaling: NotRequired[float]
    lora_gain: NotRequired[float]  # below 1, the layernorm epsilon of the small latents (1e-6, not 1e-5) shows


_K93 = Sizes(layers=93, block=12, hidden=64, heads=3, head_dim=32, q_lora=48, kv_lora=32, nope=32, rope=16, v_dim=32,
             experts=24, top_k=4, shared=2, latent=32, inter=96, dense_inter=224, vocab=512)  # fmt: skip

PRESETS: dict[str, Sizes] = {
    # Under 3 MB. The tail (8, 9) mirrors K3's (92, 93): two MLA layers in a row.
    "tiny": Sizes(layers=9, block=4, hidden=128, heads=3, head_dim=32, q_lora=48, kv_lora=32, nope=32, rope=16,
                  v_dim=32, experts=16, top_k=4, shared=2, latent=64, inter=32, dense_inter=192, vocab=512),
    # K3's real pattern of 93 layers with narrow matrices, about 26 MB.
    "k93": _K93,
    "small": _K93,
    # K3's real expert (3584 x 3072, 17,547,264 bytes), two layers, about 175 MB.
    "wide": Sizes(layers=2, block=12, hidden=512, heads=3, head_dim=128, q_lora=96, kv_lora=64, nope=128, rope=64,
                  v_dim=128, experts=8, top_k=4, shared=2, latent=3584, inter=3072, dense_inter=1024, vocab=512),
    # All 92 x 896 experts of K3 under their real names, each as small as MXFP4 allows: 260 MB, half of it JSON.
    "roster": Sizes(layers=93, block=12, hidden=32, heads=2, head_dim=16, q_lora=16, kv_lora=16, nope=16, rope=16,
                    v_dim=16, experts=896, top_k=16, shared=2, latent=32, inter=32, dense_inter=32, vocab=512),
}  # fmt: skip

DEFAULT_SEED = 20261129
CONV_TAPS = 4
GROUP = 32  # columns under one MXFP4 scale


class Order(Enum):
    """How tensors lie in a shard. In both, an expert's six tensors are one span and experts go 0, 1, 10, 11, .., 2."""

    NAME = "name"  # plain string order: the expert run lies amid the spine
    SPINE_FIRST = "spine-first"  # as K3: F32, then BF16, then U8, each by name


@dataclass(frozen=True, slots=True)
class Tensor:
    name: str
    dtype: str
    shape: tuple[int, ...]
    data: bytes


_DTYPE_RANK = {"F32": 0, "BF16": 1, "U8": 2}


# Deterministic random numbers


class Rng:
    """Raw Philox words keyed by (seed, tensor name)."""

    def __init__(self, seed: int, name: str) -> None:
        key = (seed & 0xFFFFFFFF) << 32 | (zlib.crc32(name.encode()) & 0xFFFFFFFF)
        self._words = np.random.Philox(key=key)

    def uniform(self, shape: tuple[int, ...]) -> Floats:
        """In [0, 1), multiples of 2**-53."""
        raw = self._words.random_raw(int(np.prod(shape)))
        return ((raw >> np.uint64(11)).astype(np.float64) * 2.0**-53).reshape(shape)

    def normal(self, shape: tuple[int, ...]) -> Floats:
        """Sum of eight 16-bit uniforms, centred, unit variance."""
        n = int(np.prod(shape))
        total = np.zeros(n, np.float64)
        for word in self._words.random_raw(2 * n).reshape(2, n):
            for shift in (0, 16, 32, 48):
                total += ((word >> np.uint64(shift)) & np.uint64(0xFFFF)).astype(np.float64)
        total = total * 2.0**-16 - 8 * (0.5 - 2.0**-17)
        return (total * 1.224744871391589).reshape(shape)  # sqrt(12 / 8)


# Storage types


def bf16_tensor(name: str, values: Floats) -> Tensor:
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    round_to_even = ((bits >> np.uint32(16)) & np.uint32(1)) + np.uint32(0x7FFF)
    return Tensor(name, "BF16", values.shape, ((bits + round_to_even) >> np.uint32(16)).astype("<u2").tobytes())


def f32_tensor(name: str, values: Floats) -> Tensor:
    return Tensor(name, "F32", values.shape, np.ascontiguousarray(values, "<f4").tobytes())


# Halfway between neighbouring E2M1 magnitudes 0, .5, 1, 1.5, 2, 3, 4, 6.
_E2M1_MIDPOINTS = np.array([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])


def mxfp4(weights: Floats) -> tuple[Bytes, Bytes]:
    """[rows, cols] float -> (packed [rows, cols / 2], scales [rows, cols / 32])."""
    rows, cols = weights.shape
    groups = weights.reshape(rows, cols // GROUP, GROUP)
    _, exponent = np.frexp(np.abs(groups).max(-1))  # the largest is m * 2**exponent, m in [.5, 1)
    scale: NDArray[np.int32] = np.where(groups.any(-1), exponent - 3, 0).astype(np.int32)  # floor(log2(largest)) - 2
    scaled = np.ldexp(groups, -scale[..., None])
    magnitude = np.abs(scaled)
    nearest = np.searchsorted(_E2M1_MIDPOINTS, magnitude.reshape(-1), side="right").reshape(magnitude.shape)
    code = (nearest.astype(np.uint8) | (np.signbit(scaled).astype(np.uint8) << 3)).reshape(rows, cols)
    return (code[:, 0::2] | (code[:, 1::2] << 4)).astype(np.uint8), (scale + 127).astype(np.uint8)


# Addresses in place of weights

EXPERT_TENSORS = tuple(f"{w}.{part}" for w in ("w1", "w2", "w3") for part in ("weight_packed", "weight_scale"))
_SCALE_BASE = 112  # scale bytes become 112..127, so weights stay within 6 and no sum overflows


@dataclass(frozen=True, slots=True)
class Address:
    """The record at `position` of tensor `EXPERT_TENSORS[tensor]` of an expert."""

    layer: int
    expert: int
    tensor: int
    position: int


def address_bytes(layer: int, expert: int, tensor: int, nbytes: int) -> bytes:
    """What `encode_address` stores in tensor `EXPERT_TENSORS[tensor]` of that expert.

    Records of 64 bits, big endian: layer (12), expert (12), tensor (4), position counted in records (36). Packed bytes
    hold them as they are; scale bytes hold one nibble each, most significant first, added to 112. Every byte of a
    checkpoint thus tells where it belongs, and a shift by any number of records shows as well as a wrong expert.
    """
    is_scale = tensor % 2 == 1
    records = -(-nbytes // (16 if is_scale else 8))
    head = layer << 52 | expert << 40 | tensor << 36
    words = (np.arange(records, dtype=np.uint64) + np.uint64(head)).astype(">u8").view(np.uint8)
    if is_scale:
        words = np.stack((words >> 4, words & 15), axis=-1).reshape(-1) + np.uint8(_SCALE_BASE)
    return words[:nbytes].tobytes()


def read_address(record: bytes) -> Address:
    """The inverse, for one record: 8 packed bytes or 16 scale bytes."""
    if len(record) == 16:
        nibbles = [b - _SCALE_BASE for b in record]
        if not all(0 <= n < 16 for n in nibbles):
            raise ValueError(f"scale bytes hold no address: {record.hex()}")
        record = bytes(high << 4 | low for high, low in zip(nibbles[::2], nibbles[1::2], strict=True))
    (word,) = struct.unpack(">Q", record)
    return Address(word >> 52, word >> 40 & 0xFFF, word >> 36 & 0xF, word & 0xFFFFFFFFF)


# The checkpoint


def mla_layers(sizes: Sizes) -> list[int]:
    """Counted from 1. K3's pattern: 4, 8, 12, .. and the last layer."""
    n = sizes["layers"]
    return sizes.get("full_attn") or sorted({*range(4, n + 1, 4), n})


def build_config(sizes: Sizes) -> dict[str, object]:
    n, full, vocab = sizes["layers"], mla_layers(sizes), sizes["vocab"]
    weights: dict[str, object] = {
        "actorder": None, "block_structure": None, "dynamic": False, "group_size": GROUP, "num_bits": 4,
        "observer": "minmax", "observer_kwargs": {}, "scale_dtype": "torch.uint8", "strategy": "group",
        "symmetric": True, "type": "float", "zp_dtype": None,
    }  # fmt: skip
    quantization: dict[str, object] = {
        "config_groups": {
            "group_0": {
                "format": "mxfp4-pack-quantized",
                "input_activations": None,
                "output_activations": None,
                "targets": ["Linear"],
                "weights": weights,
            }
        },
        "format": "mxfp4-pack-quantized",
        "global_compression_ratio": None,
        "ignore": [
            "re:.*self_attn.*", "re:.*shared_experts.*", "re:.*mlp\\.(gate|up|gate_up|down)_proj.*",
            "re:.*lm_head.*", "re:.*vision_tower.*", "re:.*mm_projector.*",
        ],
        "kv_cache_scheme": None,
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
    }  # fmt: skip
    text: dict[str, object] = {
        "activation_situ_beta": 4.0,
        "activation_situ_linear_beta": 25.0,
        "architectures": ["KimiLinearForCausalLM"],
        "attn_res_block_size": sizes["block"],
        "bos_token_id": vocab - 256,
        "eos_token_id": vocab - 254,
        "pad_token_id": vocab - 1,
        "dtype": "bfloat16",
        "first_k_dense_replace": sizes.get("first_k_dense", 1),
        "hidden_act": "situ",
        "hidden_size": sizes["hidden"],
        "initializer_range": 0.02,
        "intermediate_size": sizes["dense_inter"],
        "kv_lora_rank": sizes["kv_lora"],
        "latent_moe_use_norm": True,
        "linear_attn_config": {
            "full_attn_layers": full,
            "gate_lower_bound": -5.0,
            "head_dim": sizes["head_dim"],
            "kda_layers": [i for i in range(1, n + 1) if i not in full],
            "num_heads": sizes["heads"],
            "short_conv_kernel_size": CONV_TAPS,
            "use_full_rank_gate": True,
        },
        "max_position_embeddings": 1048576,
        "mla_use_nope": True,
        "mla_use_output_gate": True,
        "model_type": "kimi_linear",
        "moe_intermediate_size": sizes["inter"],
        "moe_layer_freq": 1,
        "moe_renormalize": True,
        "moe_router_activation_func": "sigmoid",
        "num_attention_heads": sizes["heads"],
        "num_expert_group": 1,
        "num_experts": sizes["experts"],
        "num_experts_per_token": sizes["top_k"],
        "num_hidden_layers": n,
        "num_key_value_heads": sizes["heads"],
        "num_nextn_predict_layers": 0,
        "num_shared_experts": sizes["shared"],
        "q_lora_rank": sizes["q_lora"],
        "qk_nope_head_dim": sizes["nope"],
        "qk_rope_head_dim": sizes["rope"],
        "quantization_config": quantization,
        "rms_norm_eps": 1e-5,
        "routed_expert_hidden_size": sizes["latent"],
        "routed_scaling_factor": sizes.get("routed_scaling", 1.0),
        "tie_word_embeddings": False,
        "topk_group": 1,
        "topk_method": "noaux_tc",
        "transformers_version": "4.56.2",
        "use_cache": True,
        "use_grouped_topk": True,
        "v_head_dim": sizes["v_dim"],
        "vocab_size": vocab,
    }
    return {
        "architectures": ["KimiK3ForConditionalGeneration"],
        "bos_token_id": vocab - 256,
        "dtype": "bfloat16",
        "eos_token_id": vocab - 254,
        "ignore_index": -100,
        "image_placeholder": "<|kimi_image_placeholder|>",
        "media_placeholder_token_id": vocab - 235,
        "model_type": "kimi_k3",
        "pad_token_id": vocab - 1,
        "text_config": text,
        "tie_word_embeddings": False,
        "vision_config": {
            "mm_hidden_size": 16, "mm_projector_type": "patchmergerv2", "patch_size": 14,
            "text_hidden_size": sizes["hidden"], "vt_hidden_size": 16, "vt_intermediate_size": 32,
            "vt_num_attention_heads": 2, "vt_num_hidden_layers": 1, "qkv_hidden_size": 16,
        },
    }  # fmt: skip


class _Layer:
    """Makes the tensors of one decoder layer; names are relative to the layer and key the random numbers."""

    def __init__(self, layer: int, seed: int) -> None:
        self.prefix = f"language_model.model.layers.{layer}."
        self.seed = seed

    def rng(self, name: str) -> Rng:
        return Rng(self.seed, self.prefix + name)

    def linear(self, name: str, rows: int, cols: int, gain: float = 1.0) -> Tensor:
        return bf16_tensor(self.prefix + name, self.rng(name).normal((rows, cols)) * (gain / float(cols) ** 0.5))

    def norm(self, name: str, n: int) -> Tensor:
        return bf16_tensor(self.prefix + name, 1.0 + 0.2 * self.rng(name).normal((n,)))

    def f32(self, name: str, values: Floats) -> Tensor:
        return f32_tensor(self.prefix + name, values)


def layer_tensors(sizes: Sizes, layer: int, seed: int, encode_address: bool) -> Iterator[Tensor]:
    make = _Layer(layer, seed)
    hidden = sizes["hidden"]
    yield make.norm("input_layernorm.weight", hidden)
    yield make.norm("post_attention_layernorm.weight", hidden)
    for name in ("self_attention_res", "mlp_res"):
        yield make.norm(f"{name}_norm.weight", hidden)
        yield make.linear(f"{name}_proj.weight", 1, hidden, 1.2)
    yield from _mla(make, sizes) if layer + 1 in mla_layers(sizes) else _kda(make, sizes)
    if layer >= sizes.get("first_k_dense", 1):
        yield from _moe(make, sizes)
        yield from _experts(make, sizes, layer, encode_address)
        return
    for name in ("gate", "up"):
        yield make.linear(f"mlp.{name}_proj.weight", sizes["dense_inter"], hidden, 2.5)
    yield make.linear("mlp.down_proj.weight", hidden, sizes["dense_inter"], 0.4)


def _kda(make: _Layer, sizes: Sizes) -> Iterator[Tensor]:
    hidden, heads, head_dim = sizes["hidden"], sizes["heads"], sizes["head_dim"]
    channels = heads * head_dim
    a = "self_attn."
    for n in "qkv":
        yield make.linear(f"{a}{n}_proj.weight", channels, hidden)
        conv = f"{a}{n}_conv1d.weight"
        yield make.f32(conv, make.rng(conv).normal((channels, 1, CONV_TAPS)) * 0.5)
    a_log = np.zeros(max(head_dim, heads))
    a_log[:heads] = make.rng(a + "A_log").uniform((heads,)) * 1.5 - 0.5
    yield make.f32(a + "A_log", a_log)
    yield make.f32(a + "dt_bias", make.rng(a + "dt_bias").uniform((channels,)) * 8.0 - 7.0)
    yield make.linear(a + "f_a_proj.weight", head_dim, hidden)
    yield make.linear(a + "f_b_proj.weight", channels, head_dim)
    yield make.linear(a + "b_proj.weight", heads, hidden)
    yield make.linear(a + "g_proj.weight", channels, hidden, 1.5)
    yield make.f32(a + "o_norm.weight", 1.0 + 0.2 * make.rng(a + "o_norm.weight").normal((head_dim,)))
    yield make.linear(a + "o_proj.weight", hidden, channels)


def _mla(make: _Layer, sizes: Sizes) -> Iterator[Tensor]:
    hidden, heads, q_lora, kv_lora = sizes["hidden"], sizes["heads"], sizes["q_lora"], sizes["kv_lora"]
    nope, rope, v_dim = sizes["nope"], sizes["rope"], sizes["v_dim"]
    lora_gain = sizes.get("lora_gain", 1.0)
    a = "self_attn."
    yield make.linear(a + "q_a_proj.weight", q_lora, hidden, lora_gain)
    yield make.norm(a + "q_a_layernorm.weight", q_lora)
    yield make.linear(a + "q_b_proj.weight", heads * (nope + rope), q_lora, 1.3)
    kv_a = a + "kv_a_proj_with_mqa.weight"
    weights = make.rng(kv_a).normal((kv_lora + rope, hidden)) * (1.2 / float(hidden) ** 0.5)
    weights[:kv_lora] *= lora_gain
    yield bf16_tensor(make.prefix + kv_a, weights)
    yield make.norm(a + "kv_a_layernorm.weight", kv_lora)
    yield make.linear(a + "kv_b_proj.weight", heads * (nope + v_dim), kv_lora, 1.2)
    yield make.linear(a + "g_proj.weight", heads * v_dim, hidden, 1.5)
    yield make.linear(a + "o_proj.weight", hidden, heads * v_dim, 1.5)


def _moe(make: _Layer, sizes: Sizes) -> Iterator[Tensor]:
    hidden, latent, experts = sizes["hidden"], sizes["latent"], sizes["experts"]
    m = "block_sparse_moe."
    yield make.linear(m + "gate.weight", experts, hidden, 1.5)
    yield make.f32(m + "gate.e_score_correction_bias", make.rng(m + "bias").normal((experts,)) * 0.15)
    yield make.linear(m + "routed_expert_down_proj.weight", latent, hidden)
    yield make.norm(m + "routed_expert_norm.weight", latent)
    yield make.linear(m + "routed_expert_up_proj.weight", hidden, latent, 0.8)
    width = sizes["inter"] * sizes["shared"]
    for n in ("gate", "up"):
        yield make.linear(f"{m}shared_experts.{n}_proj.weight", width, hidden, 2.5)
    yield make.linear(m + "shared_experts.down_proj.weight", hidden, width, 0.3)


def _experts(make: _Layer, sizes: Sizes, layer: int, encode_address: bool) -> Iterator[Tensor]:
    latent, inter = sizes["latent"], sizes["inter"]
    matrices = (("w1", inter, latent, 2.5), ("w2", latent, inter, 1.0), ("w3", inter, latent, 2.5))
    for expert in range(sizes["experts"]):
        for number, (w, rows, cols, gain) in enumerate(matrices):
            name = f"block_sparse_moe.experts.{expert}.{w}"
            shapes = (rows, cols // 2), (rows, cols // GROUP)
            if encode_address:
                data = [
                    address_bytes(layer, expert, 2 * number + part, shape[0] * shape[1])
                    for part, shape in enumerate(shapes)
                ]
            else:
                rng = make.rng(name)
                row_gain = 0.5 + 1.5 * rng.uniform((rows, 1))  # two octaves, so that scale bytes vary
                data = [x.tobytes() for x in mxfp4(rng.normal((rows, cols)) * row_gain * (gain / float(cols) ** 0.5))]
            yield Tensor(f"{make.prefix}{name}.weight_packed", "U8", shapes[0], data[0])
            yield Tensor(f"{make.prefix}{name}.weight_scale", "U8", shapes[1], data[1])


def global_tensors(sizes: Sizes, seed: int) -> Iterator[Tensor]:
    hidden, vocab = sizes["hidden"], sizes["vocab"]
    b = "language_model.model."

    def normal(key: str, shape: tuple[int, ...]) -> Floats:
        return Rng(seed, key).normal(shape)

    yield bf16_tensor(b + "embed_tokens.weight", normal(b + "embed", (vocab, hidden)) * 0.8)
    yield bf16_tensor(b + "norm.weight", 1.0 + 0.2 * normal(b + "norm", (hidden,)))
    yield bf16_tensor(b + "output_attn_res_norm.weight", 1.0 + 0.2 * normal(b + "oarn", (hidden,)))
    yield bf16_tensor(b + "output_attn_res_proj.weight", normal(b + "oarp", (1, hidden)) * (1.2 / float(hidden) ** 0.5))
    head = normal("lm_head", (vocab, hidden)) * (2.0 / float(hidden) ** 0.5)
    yield bf16_tensor("language_model.lm_head.weight", head)


def stub_projector(sizes: Sizes, seed: int) -> Iterator[Tensor]:
    hidden, rng = sizes["hidden"], Rng(seed, "mm")
    yield bf16_tensor("mm_projector.post_norm.weight", 1.0 + 0.1 * rng.normal((hidden,)))
    yield bf16_tensor("mm_projector.proj.0.weight", 0.1 * rng.normal((64, 64)))
    yield bf16_tensor("mm_projector.proj.2.weight", 0.1 * rng.normal((hidden, 64)))


def stub_vision_tower(seed: int) -> Iterator[Tensor]:
    rng = Rng(seed, "vt")
    b = "vision_tower.encoder.blocks.0."
    yield bf16_tensor(b + "mlp.fc0.weight", 0.1 * rng.normal((32, 16)))
    yield bf16_tensor(b + "mlp.fc1.weight", 0.1 * rng.normal((16, 32)))
    yield bf16_tensor(b + "norm0.weight", 1.0 + 0.1 * rng.normal((16,)))
    yield bf16_tensor(b + "norm1.weight", 1.0 + 0.1 * rng.normal((16,)))
    yield bf16_tensor(b + "wo.weight", 0.1 * rng.normal((16, 16)))
    yield bf16_tensor(b + "wqkv.weight", 0.1 * rng.normal((48, 16)))
    yield bf16_tensor("vision_tower.encoder.final_layernorm.weight", 1.0 + 0.1 * rng.normal((16,)))
    yield bf16_tensor("vision_tower.patch_embed.pos_emb.weight", 0.1 * rng.normal((4, 4, 16)))
    yield bf16_tensor("vision_tower.patch_embed.proj.weight", 0.1 * rng.normal((16, 3, 14, 14)))


# Files


@dataclass(frozen=True, slots=True)
class _Shard:
    names: list[str]
    tensor_bytes: int
    sha256: str


def _write_shard(path: Path, tensors: Iterable[Tensor], order: Order) -> _Shard:
    by_name = sorted(tensors, key=lambda t: t.name)
    items = by_name if order is Order.NAME else sorted(by_name, key=lambda t: _DTYPE_RANK[t.dtype])
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for t in items:
        end = offset + len(t.data)
        header[t.name] = {"dtype": t.dtype, "shape": list(t.shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    digest = hashlib.sha256()
    with open(path, "wb") as f:
        for piece in (struct.pack("<Q", len(text)), text, *(t.data for t in items)):
            f.write(piece)
            digest.update(piece)
    return _Shard([t.name for t in items], offset, digest.hexdigest())


def _write_json(path: Path, content: Mapping[str, object]) -> str:
    """Returns the SHA-256 of what was written."""
    data = (json.dumps(content, indent=2, sort_keys=True) + "\n").encode()
    path.write_bytes(data)
    return hashlib.sha256(data).hexdigest()


def generate(
    out: str | Path,
    preset: str | Sizes,
    seed: int = DEFAULT_SEED,
    overrides: Mapping[str, object] | None = None,
    *,
    order: Order = Order.NAME,
    vision: bool = True,
    encode_address: bool = False,
) -> tuple[Sizes, dict[str, object], int]:
    """Write a checkpoint into folder `out` and return its sizes, its config and its number of tensor bytes.

    `overrides` replaces single entries of the preset. One shard at a time is in memory. Files of the same names are
    overwritten, others left alone.
    """
    sizes = _resolve(preset, overrides or {})
    config = build_config(sizes)
    folder = Path(out)
    folder.mkdir(parents=True, exist_ok=True)
    shards = [layer_tensors(sizes, layer, seed, encode_address) for layer in range(sizes["layers"])]
    shards.append(global_tensors(sizes, seed))
    if vision:
        shards += [stub_projector(sizes, seed), stub_vision_tower(seed)]

    sums = {"config.json": _write_json(folder / "config.json", config)}
    weight_map: dict[str, str] = {}
    total = 0
    for number, tensors in enumerate(shards, 1):
        name = f"model-{number:05d}-of-{len(shards):06d}.safetensors"
        shard = _write_shard(folder / name, tensors, order)
        weight_map.update(dict.fromkeys(shard.names, name))
        total += shard.tensor_bytes
        sums[name] = shard.sha256
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    sums["model.safetensors.index.json"] = _write_json(folder / "model.safetensors.index.json", index)

    manifest: dict[str, object] = {
        "generator": "make_tiny_k3.py",  # the name under which the golden checkpoints were published
        "parameters": sizes,
        "preset": preset if isinstance(preset, str) else "custom",
        "seed": seed,
        "sha256": sums,
    }
    if order is not Order.NAME:
        manifest["order"] = order.value
    if not vision:
        manifest["vision"] = False
    if encode_address:
        manifest["encode_address"] = True
    _write_json(folder / "MANIFEST.json", manifest)
    return sizes, config, total


def _resolve(preset: str | Sizes, overrides: Mapping[str, object]) -> Sizes:
    unknown = set(overrides) - set(Sizes.__annotations__)
    if unknown:
        raise ValueError(f"no such size: {', '.join(sorted(unknown))}; there are {', '.join(Sizes.__annotations__)}")
    sizes = cast(Sizes, {**(PRESETS[preset] if isinstance(preset, str) else preset), **overrides})
    if sizes["latent"] % GROUP or sizes["inter"] % GROUP:
        raise ValueError(f"latent {sizes['latent']} and inter {sizes['inter']} must be multiples of {GROUP}")
    return sizes


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--preset", default="tiny", choices=sorted(PRESETS))
    parser.add_argument("--seed", type=int, default=DEFAULT_SEED)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=JSON",
                        help="override one size of the preset, e.g. heads=5 or full_attn=[2,4]")  # fmt: skip
    parser.add_argument("--order", type=Order, choices=list(Order), default=Order.NAME, metavar="name|spine-first",
                        help="how tensors lie in a shard: plain string order, or as in K3")  # fmt: skip
    parser.add_argument("--vision", action=argparse.BooleanOptionalAction, default=True,
                        help="write the two stub shards that a text engine skips")  # fmt: skip
    parser.add_argument("--encode-address", action="store_true",
                        help="fill routed experts with their own address instead of random weights")  # fmt: skip
    a = parser.parse_args()
    try:
        overrides = {key: json.loads(value) for key, _, value in (item.partition("=") for item in a.set)}
        sizes, _, total = generate(
            a.out, a.preset, a.seed, overrides, order=a.order, vision=a.vision, encode_address=a.encode_address
        )
    except ValueError as e:
        parser.error(str(e))
    print(f"{a.out}: preset {a.preset} seed {a.seed}: {total / 1e6:.2f} MB of tensors")
    print(json.dumps(sizes))


if __name__ == "__main__":
    main()
