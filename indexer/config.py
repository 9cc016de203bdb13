"""What a K3-shaped `config.json` says, checked once.

Field meanings and K3's own values: docs/model.md. Everything the engine computes is sized by this
class; a setting that would change the arithmetic and that the engine does not implement is refused here.
"""

from __future__ import annotations

import json
from dataclasses import dataclass

from deltafin.errors import BadCheckpoint
from deltafin.indexer.headers import show

# The constructor default of the two low-rank norms in Moonshot's code; config.json does not carry it.
LORA_NORM_EPS = 1e-6

# field of text_config -> the one value this engine computes
_FIXED: dict[str, object] = {
    "model_type": "kimi_linear",
    "hidden_act": "situ",
    "latent_moe_use_norm": True,
    "mla_use_nope": True,
    "mla_use_output_gate": True,
    "moe_layer_freq": 1,
    "moe_renormalize": True,
    "moe_router_activation_func": "sigmoid",
    "num_expert_group": 1,
    "num_nextn_predict_layers": 0,
    "tie_word_embeddings": False,
    "topk_group": 1,
    "topk_method": "noaux_tc",
}


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Sizes and constants of one checkpoint. Layers are counted from 0."""

    vocab_size: int
    hidden_size: int
    num_layers: int
    kda_layers: frozenset[int]
    max_positions: int
    rms_norm_eps: float
    attn_res_block_size: int
    # KDA
    kda_heads: int
    kda_head_dim: int
    conv_kernel: int
    gate_lower_bound: float
    # MLA
    mla_heads: int
    q_lora_rank: int
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    # MLPs
    first_moe_layer: int
    intermediate_size: int
    num_experts: int
    top_k: int
    num_shared_experts: int
    latent_size: int
    expert_size: int
    routed_scaling_factor: float
    situ_beta: float
    situ_linear_beta: float
    group_size: int
    # special ids
    bos_id: int
    eos_id: int
    pad_id: int

    def is_kda(self, layer: int) -> bool:
        return layer in self.kda_layers

    def is_moe(self, layer: int) -> bool:
        return layer >= self.first_moe_layer

    @property
    def moe_layers(self) -> range:
        return range(self.first_moe_layer, self.num_layers)

    @property
    def kda_width(self) -> int:
        return self.kda_heads * self.kda_head_dim

    @property
    def q_head_dim(self) -> int:
        """Scored dimensions of one MLA head: nope + rope (the latter never rotated)."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def shared_size(self) -> int:
        return self.num_shared_experts * self.expert_size


def parse_config(raw: bytes, where: str = "config.json") -> ModelConfig:
    """Read and check a config; `where` is the name that errors show."""
    try:
        root = json.loads(raw)
    except (ValueError, RecursionError) as e:
        raise BadCheckpoint(f"{where}: not JSON ({e})") from None
    if not isinstance(root, dict):
        raise BadCheckpoint(f"{where}: expected an object at the top level")
    if root.get("model_type") != "kimi_k3" or not isinstance(root.get("text_config"), dict):
        raise BadCheckpoint(
            f"{where}: model_type is {show(repr(root.get('model_type')))}; "
            "Deltafin runs kimi_k3 checkpoints with a text_config"
        )
    return _Reader(root["text_config"], where).read()


class _Reader:
    """Typed access to one text_config."""

    def __init__(self, text: dict[str, object], where: str) -> None:
        self.text = text
        self.where = where

    def read(self) -> ModelConfig:
        for name, want in _FIXED.items():
            self._fixed(self.text, name, want)
        linear = self._object("linear_attn_config")
        self._fixed(linear, "use_full_rank_gate", True)
        self._check_quantization()
        num_layers = self._int("num_hidden_layers")
        config = ModelConfig(
            vocab_size=self._int("vocab_size"),
            hidden_size=self._int("hidden_size"),
            num_layers=num_layers,
            kda_layers=self._kda_layers(linear, num_layers),
            max_positions=self._int("max_position_embeddings"),
            rms_norm_eps=self._float("rms_norm_eps"),
            attn_res_block_size=self._int("attn_res_block_size"),
            kda_heads=self._int("num_heads", linear),
            kda_head_dim=self._int("head_dim", linear),
            conv_kernel=self._int("short_conv_kernel_size", linear),
            gate_lower_bound=self._float("gate_lower_bound", linear),
            mla_heads=self._int("num_attention_heads"),
            q_lora_rank=self._int("q_lora_rank"),
            kv_lora_rank=self._int("kv_lora_rank"),
            qk_nope_head_dim=self._int("qk_nope_head_dim"),
            qk_rope_head_dim=self._int("qk_rope_head_dim"),
            v_head_dim=self._int("v_head_dim"),
            first_moe_layer=self._int("first_k_dense_replace", least=0),
            intermediate_size=self._int("intermediate_size"),
            num_experts=self._int("num_experts"),
            top_k=self._int("num_experts_per_token"),
            num_shared_experts=self._int("num_shared_experts"),
            latent_size=self._int("routed_expert_hidden_size"),
            expert_size=self._int("moe_intermediate_size"),
            routed_scaling_factor=self._float("routed_scaling_factor"),
            situ_beta=self._float("activation_situ_beta"),
            situ_linear_beta=self._float("activation_situ_linear_beta"),
            group_size=32,
            bos_id=self._int("bos_token_id", least=0),
            eos_id=self._int("eos_token_id", least=0),
            pad_id=self._int("pad_token_id", least=0),
        )
        self._check_sizes(config)
        return config

    def _check_sizes(self, c: ModelConfig) -> None:
        self._fixed(self.text, "num_key_value_heads", c.mla_heads)
        rules = [
            (c.top_k <= c.num_experts, "num_experts_per_token exceeds num_experts"),
            (c.num_experts <= 65535, "num_experts exceeds 65535"),
            (c.num_layers <= 65534, "num_hidden_layers exceeds 65534"),
            (c.latent_size % c.group_size == 0, "routed_expert_hidden_size is no multiple of 32"),
            (c.expert_size % c.group_size == 0, "moe_intermediate_size is no multiple of 32"),
            (c.gate_lower_bound < 0, "gate_lower_bound is not negative"),
            (c.rms_norm_eps > 0, "rms_norm_eps is not positive"),
            (c.situ_beta > 0 and c.situ_linear_beta > 0, "an activation_situ beta is not positive"),
            (c.first_moe_layer <= c.num_layers, "first_k_dense_replace exceeds num_hidden_layers"),
            (max(c.bos_id, c.eos_id, c.pad_id) < c.vocab_size, "a special token id lies outside the vocabulary"),
        ]
        for holds, complaint in rules:
            if not holds:
                raise BadCheckpoint(f"{self.where}: {complaint}")

    def _check_quantization(self) -> None:
        quant = self._object("quantization_config")
        self._fixed(quant, "format", "mxfp4-pack-quantized")
        groups = quant.get("config_groups")
        group = groups.get("group_0") if isinstance(groups, dict) else None
        weights = group.get("weights") if isinstance(group, dict) else None
        if not isinstance(weights, dict):
            raise BadCheckpoint(f"{self.where}: quantization_config has no config_groups.group_0.weights")
        for name, want in (("num_bits", 4), ("type", "float"), ("group_size", 32), ("symmetric", True)):
            self._fixed(weights, name, want)

    def _kda_layers(self, linear: dict[str, object], num_layers: int) -> frozenset[int]:
        """The config counts these layers from one; tensor names count from zero."""
        sets = []
        for name in ("kda_layers", "full_attn_layers"):
            value = linear.get(name)
            if not isinstance(value, list) or not all(type(v) is int for v in value):
                raise BadCheckpoint(f"{self.where}: linear_attn_config.{name} is not a list of layer numbers")
            sets.append([v - 1 for v in value])
        if sorted(sets[0] + sets[1]) != list(range(num_layers)):
            raise BadCheckpoint(
                f"{self.where}: kda_layers and full_attn_layers do not name each of the {num_layers} layers once"
            )
        return frozenset(sets[0])

    def _object(self, name: str) -> dict[str, object]:
        value = self.text.get(name)
        if not isinstance(value, dict):
            raise BadCheckpoint(f"{self.where}: text_config.{name} is missing")
        return value

    def _fixed(self, fields: dict[str, object], name: str, want: object) -> None:
        got = fields.get(name)
        if got != want or type(got) is not type(want):
            raise BadCheckpoint(f"{self.where}: {name} is {show(repr(got))}; this engine computes only {want!r}")

    def _int(self, name: str, fields: dict[str, object] | None = None, least: int = 1) -> int:
        value = (self.text if fields is None else fields).get(name)
        if type(value) is not int or not least <= value < 2**31:
            raise BadCheckpoint(f"{self.where}: {name} is {show(repr(value))}; expected an integer of at least {least}")
        return value

    def _float(self, name: str, fields: dict[str, object] | None = None) -> float:
        value = (self.text if fields is None else fields).get(name)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not abs(value) < 1e300:
            raise BadCheckpoint(f"{self.where}: {name} is {show(repr(value))}; expected a number")
        return float(value)
