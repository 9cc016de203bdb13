#!/usr/bin/env python3
"""Write a folder with all of Kimi K3 (1.56 TB) as sparse files: real headers, holes for weights.

Names, shapes, dtypes, sharding and order are those of moonshotai/Kimi-K3: layer L in shard L+1, then embeddings and
head, projector, vision tower; within a shard the F32 tensors, then BF16, then U8, each by name. Reading any weight
gives zeros. 76 MB of disk are used.

The headers are compact JSON in file order, without `__metadata__`, padded to 8. Written so, the lengths are Moonshot's:
818,696 for the header of shard 2 (818,728 with `"__metadata__":{"format":"pt"}` in front) and 1,560,936,091,448 bytes
for the 96 files together (3,064 more with it). Nothing but these sums confirms the order inside the spine and the names
inside the vision tower. The index, too, has the published length, 59,764,096, but lists the names in another order.

`damage` spoils one header in place, so that a test can ask whether the reader names the file and the tensor.
"""

import argparse
import json
import os
import struct
import time
from dataclasses import dataclass
from enum import Enum
from math import prod
from pathlib import Path
from typing import TypedDict

CONFIG = Path(__file__).resolve().parents[1] / "tests" / "golden" / "k3_config.json"

SHARDS = 96
TENSORS = 497_220
EXPERTS = 82_432
EXPERT_BYTES = 17_547_264
TENSOR_BYTES = 1_560_860_324_864
FILE_BYTES = 1_560_936_091_448
INDEX_BYTES = 59_764_096
SHARD_2_HEADER_LENGTH = 818_696

LAYERS = 93
MLA_LAYERS = frozenset({*range(3, LAYERS, 4), LAYERS - 1})
DATA_BYTES_OF_KDA_SHARD = 16_990_092_800
DATA_BYTES_OF_MLA_SHARD = 16_566_684_160
DATA_BYTES_OF_SHARD = {
    1: 2_341_213_184,
    **{n: DATA_BYTES_OF_MLA_SHARD if n - 1 in MLA_LAYERS else DATA_BYTES_OF_KDA_SHARD for n in range(2, 94)},
    94: 4_697_663_488,
    95: 92_289_024,
    96: 802_428_928,
}

HIDDEN, HEADS, HEAD_DIM = 7168, 96, 128
CHANNELS = HEADS * HEAD_DIM
Q_LORA, KV_LORA, ROPE = 1536, 512, 64
EXPERTS_PER_LAYER, LATENT, INTER, SHARED_INTER, DENSE_INTER = 896, 3584, 3072, 6144, 33792
VOCAB = 163_840

Shapes = dict[str, tuple[int, ...]]

_WIDTH = {"F32": 4, "BF16": 2, "U8": 1}  # and the order in which a shard holds them


@dataclass(frozen=True, slots=True)
class Tensor:
    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * _WIDTH[self.dtype]


def shard_name(number: int) -> str:
    return f"model-{number:05d}-of-{SHARDS:06d}.safetensors"


# What a shard holds


def shard_tensors(number: int) -> list[Tensor]:
    """The tensors of shard 1..96 in the order of their data."""
    f32: Shapes = {}
    bf16: Shapes = {}
    u8: Shapes = {}
    if number <= LAYERS:
        layer = number - 1
        prefix = f"language_model.model.layers.{layer}."
        bf16 |= _norms_and_residuals() | (_mla() if layer in MLA_LAYERS else _kda_bf16())
        if layer not in MLA_LAYERS:
            f32 |= _kda_f32()
        if layer == 0:
            bf16 |= _mlp("mlp.", DENSE_INTER)
        else:
            f32["block_sparse_moe.gate.e_score_correction_bias"] = (EXPERTS_PER_LAYER,)
            bf16 |= _moe()
            u8 |= _experts()
    elif number == 94:
        prefix, bf16 = "language_model.", _globals()
    elif number == 95:
        prefix, bf16 = "mm_projector.", _projector()
    else:
        prefix, bf16 = "vision_tower.", _vision_tower()
    return [
        Tensor(prefix + name, dtype, shapes[name])
        for dtype, shapes in (("F32", f32), ("BF16", bf16), ("U8", u8))
        for name in sorted(shapes)
    ]


def _norms_and_residuals() -> Shapes:
    return {
        "input_layernorm.weight": (HIDDEN,),
        "post_attention_layernorm.weight": (HIDDEN,),
        "self_attention_res_norm.weight": (HIDDEN,),
        "self_attention_res_proj.weight": (1, HIDDEN),
        "mlp_res_norm.weight": (HIDDEN,),
        "mlp_res_proj.weight": (1, HIDDEN),
    }


def _kda_f32() -> Shapes:
    return {
        "self_attn.A_log": (HEAD_DIM,),  # 96 heads and 32 zeros
        "self_attn.dt_bias": (CHANNELS,),
        "self_attn.o_norm.weight": (HEAD_DIM,),
        **{f"self_attn.{n}_conv1d.weight": (CHANNELS, 1, 4) for n in "qkv"},
    }


def _kda_bf16() -> Shapes:
    return {
        **{f"self_attn.{n}_proj.weight": (CHANNELS, HIDDEN) for n in "qkvg"},
        "self_attn.f_a_proj.weight": (HEAD_DIM, HIDDEN),
        "self_attn.f_b_proj.weight": (CHANNELS, HEAD_DIM),
        "self_attn.b_proj.weight": (HEADS, HIDDEN),
        "self_attn.o_proj.weight": (HIDDEN, CHANNELS),
    }


def _mla() -> Shapes:
    return {
        "self_attn.q_a_proj.weight": (Q_LORA, HIDDEN),
        "self_attn.q_a_layernorm.weight": (Q_LORA,),
        "self_attn.q_b_proj.weight": (HEADS * (HEAD_DIM + ROPE), Q_LORA),
        "self_attn.kv_a_proj_with_mqa.weight": (KV_LORA + ROPE, HIDDEN),
        "self_attn.kv_a_layernorm.weight": (KV_LORA,),
        "self_attn.kv_b_proj.weight": (HEADS * 2 * HEAD_DIM, KV_LORA),
        "self_attn.g_proj.weight": (CHANNELS, HIDDEN),
        "self_attn.o_proj.weight": (HIDDEN, CHANNELS),
    }


def _mlp(prefix: str, width: int) -> Shapes:
    return {
        f"{prefix}gate_proj.weight": (width, HIDDEN),
        f"{prefix}up_proj.weight": (width, HIDDEN),
        f"{prefix}down_proj.weight": (HIDDEN, width),
    }


def _moe() -> Shapes:
    return {
        "block_sparse_moe.gate.weight": (EXPERTS_PER_LAYER, HIDDEN),
        "block_sparse_moe.routed_expert_down_proj.weight": (LATENT, HIDDEN),
        "block_sparse_moe.routed_expert_norm.weight": (LATENT,),
        "block_sparse_moe.routed_expert_up_proj.weight": (HIDDEN, LATENT),
        **_mlp("block_sparse_moe.shared_experts.", SHARED_INTER),
    }


def _experts() -> Shapes:
    return {
        f"block_sparse_moe.experts.{expert}.{w}.{part}": (rows, cols // codes_per_byte)
        for expert in range(EXPERTS_PER_LAYER)
        for w, rows, cols in (("w1", INTER, LATENT), ("w2", LATENT, INTER), ("w3", INTER, LATENT))
        for part, codes_per_byte in (("weight_packed", 2), ("weight_scale", 32))
    }


def _globals() -> Shapes:
    return {
        "model.embed_tokens.weight": (VOCAB, HIDDEN),
        "lm_head.weight": (VOCAB, HIDDEN),
        "model.norm.weight": (HIDDEN,),
        "model.output_attn_res_norm.weight": (HIDDEN,),
        "model.output_attn_res_proj.weight": (1, HIDDEN),
    }


def _projector() -> Shapes:
    return {"proj.0.weight": (4096, 4096), "proj.2.weight": (HIDDEN, 4096), "post_norm.weight": (HIDDEN,)}


def _vision_tower() -> Shapes:
    block: Shapes = {
        "norm0.weight": (1024,),
        "norm1.weight": (1024,),
        "wqkv.weight": (3 * 1536, 1024),
        "wo.weight": (1024, 1536),
        "mlp.fc0.weight": (4096, 1024),
        "mlp.fc1.weight": (1024, 4096),
    }
    return {
        **{f"encoder.blocks.{i}.{name}": shape for i in range(27) for name, shape in block.items()},
        "encoder.final_layernorm.weight": (1024,),
        "patch_embed.pos_emb.weight": (64, 64, 1024),
        "patch_embed.proj.weight": (1024, 3, 14, 14),
    }


# Writing


@dataclass(frozen=True, slots=True)
class Totals:
    tensors: int
    experts: int
    tensor_bytes: int
    file_bytes: int
    header_lengths: tuple[int, ...]  # of shards 1, 2, .., without the 8 bytes that hold the length


def write(out: Path, *, index: bool = False) -> Totals:
    """Write 96 sparse shards and config.json into folder `out`, with `index` also model.safetensors.index.json.

    Raises OSError where the file system would store the holes. One shard's header is in memory at a time, and with
    `index` one shard's share of it.
    """
    out.mkdir(parents=True, exist_ok=True)
    _require_holes(out)
    tensors = experts = tensor_bytes = file_bytes = 0
    lengths: list[int] = []
    for number in range(1, SHARDS + 1):
        roster = shard_tensors(number)
        header, data_bytes = _header(roster)
        assert data_bytes == DATA_BYTES_OF_SHARD[number], f"shard {number} has {data_bytes} data bytes"
        size = 8 + len(header) + data_bytes
        with open(out / shard_name(number), "wb") as f:
            f.write(struct.pack("<Q", len(header)))
            f.write(header)
            f.truncate(size)
        tensors += len(roster)
        experts += sum(t.name.endswith(".w1.weight_packed") for t in roster)
        tensor_bytes += data_bytes
        file_bytes += size
        lengths.append(len(header))
    totals = Totals(tensors, experts, tensor_bytes, file_bytes, tuple(lengths))
    assert (tensors, experts, tensor_bytes) == (TENSORS, EXPERTS, TENSOR_BYTES), totals
    assert (file_bytes, lengths[1]) == (FILE_BYTES, SHARD_2_HEADER_LENGTH), totals
    (out / "config.json").write_bytes(CONFIG.read_bytes())
    if index:
        _write_index(out / "model.safetensors.index.json")
    return totals


def _header(roster: list[Tensor]) -> tuple[bytes, int]:
    """JSON text padded to 8 bytes, and how many data bytes it describes."""
    header: dict[str, object] = {}
    offset = 0
    for t in roster:
        end = offset + t.nbytes
        header[t.name] = {"dtype": t.dtype, "shape": t.shape, "data_offsets": (offset, end)}
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    return text + b" " * (-len(text) % 8), offset


def _write_index(path: Path) -> None:
    with open(path, "w", encoding="ascii", newline="\n") as f:
        f.write(f'{{\n  "metadata": {{\n    "total_size": {TENSOR_BYTES}\n  }},\n  "weight_map": {{')
        comma = ""
        for number in range(1, SHARDS + 1):
            f.write(comma + ",".join(f'\n    "{t.name}": "{shard_name(number)}"' for t in shard_tensors(number)))
            comma = ","
        f.write("\n  }\n}")
    assert path.stat().st_size == INDEX_BYTES, path.stat().st_size


def _require_holes(folder: Path) -> None:
    probe = folder / ".sparse-probe"
    try:
        with open(probe, "wb") as f:
            f.truncate(1 << 30)
            f.flush()
            stored = os.fstat(f.fileno()).st_blocks * 512
    finally:
        probe.unlink(missing_ok=True)
    if stored > 1 << 20:
        raise OSError(f"{folder}: its file system has no sparse files (a hole of 1 GiB took {stored} bytes)")


def disk_bytes(folder: Path) -> int:
    """What the files directly in `folder` really occupy."""
    return sum(entry.stat().st_blocks * 512 for entry in os.scandir(folder) if entry.is_file())


# Damage


class Damage(Enum):
    """What `damage` does to one expert tensor, or its file."""

    MOVED = "moved"  # 64 bytes later, length unchanged: a gap before it, and it runs into the next
    OVERLAP = "overlap"  # 64 bytes earlier, length unchanged: it begins inside the one before
    SWAPPED = "swapped"  # has changed places with the same tensor of another expert: no gap, but no expert is one span
    TRUNCATED = "truncated"  # ends 64 bytes early: fewer bytes than its shape needs
    CUT_FILE = "cut-file"  # the file ends 64 bytes early: the last tensor is not all there


DAMAGED_LAYER, DAMAGED_EXPERT = 45, 511


class _Entry(TypedDict):
    dtype: str
    shape: list[int]
    data_offsets: list[int]


@dataclass(frozen=True, slots=True)
class Damaged:
    shard: Path
    tensors: tuple[str, ...]  # an error that names any of these has found it; the one at fault is first
    original_header: bytes
    original_size: int

    def repair(self) -> None:
        with open(self.shard, "r+b") as f:
            f.seek(8)
            f.write(self.original_header)
            f.truncate(self.original_size)


def damage(out: Path, kind: Damage) -> Damaged:
    """Spoil one shard of a folder that `write` made: its header, in place and at its old length, or its size."""
    shard = out / shard_name(DAMAGED_LAYER + 1)
    with open(shard, "r+b") as f:
        size = f.seek(0, os.SEEK_END)
        f.seek(0)
        (length,) = struct.unpack("<Q", f.read(8))
        original = f.read(length)
        header: dict[str, _Entry] = json.loads(original)
        names = list(header)
        experts = f"language_model.model.layers.{DAMAGED_LAYER}.block_sparse_moe.experts."
        target = f"{experts}{DAMAGED_EXPERT}.w2.weight_packed"
        before, after = (names[names.index(target) + step] for step in (-1, 1))
        offsets = header[target]["data_offsets"]
        tensors: tuple[str, ...] = (target, before, after)
        match kind:
            case Damage.MOVED:
                offsets[:] = offsets[0] + 64, offsets[1] + 64
            case Damage.OVERLAP:
                offsets[:] = offsets[0] - 64, offsets[1] - 64
            case Damage.TRUNCATED:
                offsets[1] -= 64
                tensors = (target,)
            case Damage.SWAPPED:
                other = f"{experts}{DAMAGED_EXPERT - 1}.w2.weight_packed"
                header[target]["data_offsets"], header[other]["data_offsets"] = header[other]["data_offsets"], offsets
                tensors = tuple(f"{experts}{e}.{w}.{part}" for e in (DAMAGED_EXPERT, DAMAGED_EXPERT - 1)
                                for w in ("w2", "w1", "w3") for part in ("weight_packed", "weight_scale"))  # fmt: skip
            case Damage.CUT_FILE:
                f.truncate(size - 64)
                tensors = (names[-1],)
        text = json.dumps(header, separators=(",", ":")).encode().ljust(length)
        assert len(text) == length, "offsets got more digits"
        f.seek(8)
        f.write(text)
    return Damaged(shard, tensors, original, size)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--index", action="store_true", help="also write model.safetensors.index.json (60 MB)")
    parser.add_argument("--damage", type=Damage, choices=list(Damage), metavar="|".join(d.value for d in Damage),
                        help="afterwards spoil one shard")  # fmt: skip
    a = parser.parse_args()
    start = time.monotonic()
    totals = write(a.out, index=a.index)
    seconds = time.monotonic() - start
    print(f"{totals.tensors:,} tensors in {SHARDS} shards, {totals.experts:,} experts")
    print(f"{totals.tensor_bytes:,} tensor bytes, {totals.file_bytes:,} bytes in shards (published: the same)")
    print(f"header of shard 2: {totals.header_lengths[1]:,} bytes (published: the same)")
    print(f"{disk_bytes(a.out):,} bytes of disk in use, written in {seconds:.1f} s")
    if a.damage is not None:
        damaged = damage(a.out, a.damage)
        print(f"{a.damage.value}: {damaged.tensors[0]} in {damaged.shard.name}")


if __name__ == "__main__":
    main()
