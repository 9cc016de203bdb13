"""A checkpoint that is nowhere: the headers that it would have, made from its config.

Laid out as Kimi K3 is: layer L in shard L+1, then embeddings, head and final norms, then what a text engine
ignores; in a shard the F32 tensors, then BF16, then U8, each by name. With K3's config the lengths of all
headers and files are the published ones. A catalog built from it is like the real one but for the names of
repository and commit and the digests of whole shards, which nobody has.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from math import prod
from pathlib import Path

from deltafin.indexer import roles
from deltafin.indexer.answers import Answer, ShardFile
from deltafin.indexer.config import ModelConfig, parse_config
from deltafin.indexer.headers import PREFIX_NBYTES
from deltafin.indexer.roles import Shapes
from deltafin.indexer.sources import Location

_ITEM_NBYTES = {"F32": 4, "BF16": 2, "U8": 1}  # in the order in which a shard holds them


class Blueprint:
    """A source of headers and config.json; weights read as zeros. `ignored` are shards of the vision parts."""

    def __init__(self, location: Location, config_json: bytes, ignored: Sequence[Shapes] = ()) -> None:
        self._location = location
        self._config_json = config_json
        config = parse_config(config_json)
        layers = [_layer_shapes(config, layer) for layer in range(config.num_layers)]
        rosters = [*layers, roles.global_shapes(config), *ignored]
        self._shards: dict[str, tuple[bytes, int]] = {}  # name -> start of the file up to the data, bytes of the file
        for number, roster in enumerate(rosters, 1):
            header, data_nbytes = _header(roster)
            start = len(header).to_bytes(PREFIX_NBYTES, "little") + header
            name = f"model-{number:05d}-of-{len(rosters):06d}.safetensors"
            self._shards[name] = start, len(start) + data_nbytes

    @property
    def location(self) -> Location:
        return self._location

    def shard_files(self) -> list[ShardFile]:
        return [ShardFile(name, nbytes) for name, (_, nbytes) in self._shards.items()]

    def read(self, shard: ShardFile, offset: int, nbytes: int) -> tuple[bytes, Answer]:
        start, file_nbytes = self._shards[shard.name]
        return start[offset : offset + nbytes].ljust(min(nbytes, file_nbytes - offset), b"\0"), Answer()

    def read_file(self, name: str, max_nbytes: int) -> bytes | None:
        return self._config_json if name == "config.json" else None

    def close(self) -> None:
        pass


def k3_config(layers: int | None = None) -> bytes:
    """A config.json that says of Kimi K3 what this engine reads of it; with `layers` only of its first ones."""
    raw = (Path(__file__).parent / "k3_config.json").read_bytes()
    if layers is None:
        return raw
    config = json.loads(raw)
    text = config["text_config"]
    assert 1 <= layers <= text["num_hidden_layers"]
    text["num_hidden_layers"] = layers
    for kind in ("full_attn_layers", "kda_layers"):
        numbers = text["linear_attn_config"][kind]
        text["linear_attn_config"][kind] = [n for n in numbers if n <= layers]
    return json.dumps(config, indent=1).encode()


def k3_ignored() -> list[Shapes]:
    """Kimi K3's projector and vision tower, one shard each. The names inside the tower are not confirmed."""
    block = {
        "norm0.weight": (1024,),
        "norm1.weight": (1024,),
        "wqkv.weight": (3 * 1536, 1024),
        "wo.weight": (1024, 1536),
        "mlp.fc0.weight": (4096, 1024),
        "mlp.fc1.weight": (1024, 4096),
    }
    tower: dict[str, tuple[int, ...]] = {
        **{f"encoder.blocks.{i}.{name}": shape for i in range(27) for name, shape in block.items()},
        "encoder.final_layernorm.weight": (1024,),
        "patch_embed.pos_emb.weight": (64, 64, 1024),
        "patch_embed.proj.weight": (1024, 3, 14, 14),
    }
    projector = {"proj.0.weight": (4096, 4096), "proj.2.weight": (7168, 4096), "post_norm.weight": (7168,)}
    return [
        {"mm_projector." + name: ("BF16", shape) for name, shape in projector.items()},
        {"vision_tower." + name: ("BF16", shape) for name, shape in tower.items()},
    ]


def _layer_shapes(config: ModelConfig, layer: int) -> Shapes:
    """Every tensor of a layer's shard by full name, routed experts included."""
    prefix = f"{roles.LAYER_PREFIX}{layer}."
    shapes: Shapes = {prefix + name: what for name, what in roles.spine_shapes(config, layer).items()}
    if config.is_moe(layer):
        for part in roles.expert_layout(config):
            for expert in range(config.num_experts):
                shapes[f"{prefix}block_sparse_moe.experts.{expert}.{part.name}"] = "U8", part.shape
    return shapes


def _header(shapes: Shapes) -> tuple[bytes, int]:
    """Compact JSON in file order, padded to 8 bytes, and how many bytes of data it describes."""
    header: dict[str, object] = {}
    offset = 0
    for dtype, item_nbytes in _ITEM_NBYTES.items():
        for name in sorted(name for name, (d, _) in shapes.items() if d == dtype):
            shape = shapes[name][1]
            end = offset + prod(shape) * item_nbytes
            header[name] = {"dtype": dtype, "shape": shape, "data_offsets": (offset, end)}
            offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    return text + b" " * (-len(text) % 8), offset
