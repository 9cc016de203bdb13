"""config.json: every setting that would change the arithmetic or the layout is computed as it says, or refused."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import pytest

from deltafin.errors import BadCheckpoint
from deltafin.indexer import parse_config

TINY = json.loads((Path(__file__).parents[1] / "golden/tiny/ckpt/config.json").read_bytes())
GONE = object()

TEXT = ("text_config",)
LINEAR = ("text_config", "linear_attn_config")
QUANT = ("text_config", "quantization_config")
WEIGHTS = (*QUANT, "config_groups", "group_0", "weights")

# Settings with one value that this engine computes, and others that it must not take for it.
FIXED = [
    ((), "model_type", ["kimi_k2", GONE, None]),
    (TEXT, "model_type", ["kimi_k25", GONE]),
    (TEXT, "hidden_act", ["silu", GONE]),
    (TEXT, "latent_moe_use_norm", [False, GONE, 1]),
    (TEXT, "mla_use_nope", [False, GONE]),
    (TEXT, "mla_use_output_gate", [False, GONE]),
    (TEXT, "moe_layer_freq", [2, True, 1.0, GONE]),
    (TEXT, "moe_renormalize", [False, GONE]),
    (TEXT, "moe_router_activation_func", ["softmax", GONE]),
    (TEXT, "num_expert_group", [8, GONE]),
    (TEXT, "num_nextn_predict_layers", [1, False, GONE]),
    (TEXT, "tie_word_embeddings", [True, 0, GONE]),
    (TEXT, "topk_group", [4, GONE]),
    (TEXT, "topk_method", ["greedy", GONE]),
    (TEXT, "num_key_value_heads", [1, 4, GONE]),
    (LINEAR, "use_full_rank_gate", [False, GONE]),
    (QUANT, "format", ["pack-quantized", "nvfp4-pack-quantized", GONE]),
    (WEIGHTS, "num_bits", [8, GONE]),
    (WEIGHTS, "type", ["int", GONE]),
    (WEIGHTS, "group_size", [16, 128, GONE]),
    (WEIGHTS, "symmetric", [False, GONE]),
]
INTEGERS = [
    *((TEXT, name) for name in (
        "vocab_size", "hidden_size", "num_hidden_layers", "max_position_embeddings", "attn_res_block_size",
        "num_attention_heads", "q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim",
        "intermediate_size", "num_experts", "num_experts_per_token", "num_shared_experts",
        "routed_expert_hidden_size", "moe_intermediate_size",
    )),
    *((LINEAR, name) for name in ("num_heads", "head_dim", "short_conv_kernel_size")),
]  # fmt: skip
COUNTED_FROM_0 = [(TEXT, n) for n in ("first_k_dense_replace", "bos_token_id", "eos_token_id", "pad_token_id")]
NUMBERS = [
    *((TEXT, n) for n in ("rms_norm_eps", "routed_scaling_factor", "activation_situ_beta")),
    (TEXT, "activation_situ_linear_beta"),
    (LINEAR, "gate_lower_bound"),
]
# Each alone is a fine number; together with the rest they make no model.
CONTRADICTIONS = [
    (TEXT, "num_experts_per_token", 17, "num_experts_per_token exceeds num_experts"),
    (TEXT, "num_experts", 65_536, "num_experts exceeds 65535"),
    (TEXT, "num_hidden_layers", 10, "do not name each of the 10 layers once"),
    (TEXT, "num_hidden_layers", 8, "do not name each of the 8 layers once"),
    (TEXT, "routed_expert_hidden_size", 80, "routed_expert_hidden_size is no multiple of 32"),
    (TEXT, "moe_intermediate_size", 33, "moe_intermediate_size is no multiple of 32"),
    (TEXT, "first_k_dense_replace", 10, "first_k_dense_replace exceeds"),
    (TEXT, "bos_token_id", 512, "outside the vocabulary"),
    (TEXT, "eos_token_id", 512, "outside the vocabulary"),
    (TEXT, "pad_token_id", 512, "outside the vocabulary"),
    (TEXT, "rms_norm_eps", 0, "rms_norm_eps is not positive"),
    (TEXT, "activation_situ_beta", -4.0, "activation_situ beta"),
    (TEXT, "activation_situ_linear_beta", 0.0, "activation_situ beta"),
    (LINEAR, "gate_lower_bound", 0.0, "gate_lower_bound is not negative"),
    (LINEAR, "kda_layers", [1, 2, 3, 5, 6], "do not name each"),
    (LINEAR, "kda_layers", [1, 2, 3, 5, 6, 7, 7], "do not name each"),
    (LINEAR, "kda_layers", [0, 1, 2, 3, 5, 6], "do not name each"),
    (LINEAR, "kda_layers", [1, 2, 3, 4, 5, 6, 7], "do not name each"),
    (LINEAR, "kda_layers", [1, 2, 3, 5, 6, "7"], "kda_layers is not a list"),
    (LINEAR, "full_attn_layers", 4, "full_attn_layers is not a list"),
]
OBJECTS = [(), TEXT, LINEAR, QUANT, WEIGHTS]


def changed(path: tuple[str, ...], name: str, value: object) -> bytes:
    config = copy.deepcopy(TINY)
    place = config
    for step in path:
        place = place[step]
    if value is GONE:
        del place[name]
    else:
        place[name] = value
    return json.dumps(config).encode()


def named(cases):
    return [pytest.param(*case, id="-".join(map(str, case[0][-1:] + case[1:2]))) for case in cases]


def refuse(raw: bytes, match: str) -> None:
    with pytest.raises(BadCheckpoint, match=match) as refusal:
        parse_config(raw, "the/config.json")
    assert str(refusal.value).startswith("the/config.json: ")
    assert "\n" not in str(refusal.value)
    assert len(str(refusal.value)) < 400


@pytest.mark.parametrize(("path", "name", "values"), named(FIXED))
def test_a_setting_that_this_engine_does_not_compute_is_refused_by_name(path, name, values):
    for value in values:
        refuse(changed(path, name, value), name)


@pytest.mark.parametrize(("path", "name"), named(INTEGERS))
def test_a_size_that_is_no_positive_integer_is_refused_by_name(path, name):
    for value in (0, -1, "8", 1.5, 8.0, True, None, [8], 2**31, 10**400, GONE):
        refuse(changed(path, name, value), name)


@pytest.mark.parametrize(("path", "name"), named(COUNTED_FROM_0))
def test_a_number_counted_from_zero_may_be_zero_but_not_less(path, name):
    parse_config(changed(path, name, 0))
    for value in (-1, "0", 0.5, False, None, GONE):
        refuse(changed(path, name, value), name)


@pytest.mark.parametrize(("path", "name"), named(NUMBERS))
def test_a_constant_that_is_no_finite_number_is_refused_by_name(path, name):
    for value in ("1", None, True, [], float("nan"), float("inf"), -float("inf"), 10**400, -(10**400), GONE):
        refuse(changed(path, name, value), name)


@pytest.mark.parametrize(("path", "name", "value", "complaint"), named(CONTRADICTIONS))
def test_sizes_that_contradict_each_other_are_refused(path, name, value, complaint):
    refuse(changed(path, name, value), complaint)


@pytest.mark.parametrize("path", OBJECTS[1:], ids=lambda path: path[-1])
@pytest.mark.parametrize("value", [GONE, None, [], "x", 3], ids=lambda value: "gone" if value is GONE else str(value))
def test_a_missing_section_is_refused(path, value):
    refuse(changed(path[:-1], path[-1], value), "text_config|quantization_config|linear_attn_config")


@pytest.mark.parametrize(
    "raw",
    [b"", b"{", b"null", b"[]", b'"kimi_k3"', b"\xff\xfe", b"<html>", b"[" * 100_000, b'{"a":' + b"9" * 5000 + b"}"],
    ids=lambda raw: raw[:8].decode(errors="replace") or "empty",
)
def test_what_is_no_json_object_is_refused(raw):
    refuse(raw, "not JSON|expected an object|model_type")


def test_a_config_cut_short_anywhere_is_refused():
    raw = json.dumps(TINY).encode()
    for at in range(0, len(raw), 37):
        refuse(raw[:at], "not JSON")


@pytest.mark.parametrize("depth", [900, 970, 980, 990, 1000])
def test_a_value_nested_to_any_depth_is_refused(depth):
    refuse(json.dumps(TINY).replace('"kimi_linear"', "[" * depth + "]" * depth).encode(), "model_type|not JSON")


def test_layers_are_counted_from_one_in_the_config_and_from_zero_here():
    config = parse_config(json.dumps(TINY).encode())
    assert config.kda_layers == {0, 1, 2, 4, 5, 6}
    assert [config.is_kda(layer) for layer in (2, 3, 7, 8)] == [True, False, False, False]
    assert list(config.moe_layers) == [1, 2, 3, 4, 5, 6, 7, 8]


def test_the_config_of_kimi_k3_is_read_as_published(golden):
    c = parse_config((golden / "k3_config.json").read_bytes())
    assert (c.num_layers, c.num_experts, c.top_k, len(c.kda_layers), c.first_moe_layer) == (93, 896, 16, 69, 1)
    assert (c.hidden_size, c.vocab_size, c.latent_size, c.expert_size, c.shared_size) == (
        7168,
        163_840,
        3584,
        3072,
        6144,
    )
    assert (c.kda_width, c.q_head_dim, c.kv_lora_rank, c.q_lora_rank) == (12_288, 192, 512, 1536)
    assert (c.gate_lower_bound, c.rms_norm_eps, c.routed_scaling_factor) == (-5.0, 1e-5, 1.0)
    assert (c.situ_beta, c.situ_linear_beta, c.attn_res_block_size) == (4.0, 25.0, 12)
    assert (c.bos_id, c.eos_id, c.pad_id) == (163_584, 163_586, 163_839)
