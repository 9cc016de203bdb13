import json
import struct
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from types import ModuleType

import pytest

RANK = {"F32": 0, "BF16": 1, "U8": 2}
WIDTH = {"F32": 4, "BF16": 2, "U8": 1}


@dataclass(frozen=True)
class Stored:
    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int
    data: bytes


def read_shard(path: Path) -> list[Stored]:
    """Every tensor, by where it lies."""
    content = path.read_bytes()
    (length,) = struct.unpack_from("<Q", content)
    header = json.loads(content[8 : 8 + length])
    header.pop("__metadata__", None)
    tensors = []
    for name, entry in header.items():
        start, end = entry["data_offsets"]
        tensors.append(
            Stored(
                name, entry["dtype"], tuple(entry["shape"]), start, end, content[8 + length + start : 8 + length + end]
            )
        )
    tensors.sort(key=lambda t: t.start)
    assert tensors[0].start == 0
    assert tensors[-1].end == len(content) - 8 - length
    return tensors


def read_all(folder: Path) -> dict[str, Stored]:
    return {t.name: t for path in folder.glob("*.safetensors") for t in read_shard(path)}


def expert_of(name: str) -> str:
    return name.split(".experts.")[1].split(".")[0]


@pytest.mark.parametrize("preset", ["tiny", "k93"])
def test_golden_checkpoints_are_reproduced_bit_for_bit(
    make_checkpoint: ModuleType, golden: Path, tmp_path: Path, preset: str
) -> None:
    manifest = golden / preset / "ckpt" / "MANIFEST.json"
    wanted = json.loads(manifest.read_text())
    make_checkpoint.generate(tmp_path, wanted["preset"], wanted["seed"], wanted["parameters"])
    assert (tmp_path / "MANIFEST.json").read_bytes() == manifest.read_bytes()
    assert {p.name for p in tmp_path.iterdir()} == {*wanted["sha256"], "MANIFEST.json"}


def test_spine_first_order_is_a_legal_layout(make_checkpoint: ModuleType, tmp_path: Path) -> None:
    sizes, _, total = make_checkpoint.generate(tmp_path, "tiny", order=make_checkpoint.Order.SPINE_FIRST)
    for path in tmp_path.glob("*.safetensors"):
        tensors = read_shard(path)
        assert all(before.end == after.start for before, after in pairwise(tensors))
        for t in tensors:
            count = 1
            for n in t.shape:
                count *= n
            assert t.end - t.start == count * WIDTH[t.dtype], t.name
        assert tensors == sorted(tensors, key=lambda t: (RANK[t.dtype], t.name))
        total -= tensors[-1].end
        run = [expert_of(t.name) for t in tensors if t.dtype == "U8"]
        if run:
            assert run[::6] == sorted(map(str, range(sizes["experts"])))
            assert all(len(set(run[i : i + 6])) == 1 for i in range(0, len(run), 6))
    assert total == 0


def test_both_orders_hold_the_same_tensors(make_checkpoint: ModuleType, tmp_path: Path) -> None:
    for order in make_checkpoint.Order:
        make_checkpoint.generate(tmp_path / order.value, "tiny", 7, order=order)
    by_name, spine_first = (read_all(tmp_path / order.value) for order in make_checkpoint.Order)
    assert by_name.keys() == spine_first.keys()
    assert all(t.data == spine_first[name].data for name, t in by_name.items())


def test_without_vision_only_text_shards_are_written(make_checkpoint: ModuleType, tmp_path: Path) -> None:
    make_checkpoint.generate(tmp_path, "tiny", vision=False)
    assert len(list(tmp_path.glob("model-*-of-000010.safetensors"))) == 10
    assert all(name.startswith("language_model.") for name in read_all(tmp_path))


def test_a_size_of_unknown_name_is_refused(make_checkpoint: ModuleType, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no such size: hiden"):
        make_checkpoint.generate(tmp_path, "tiny", overrides={"hiden": 3})


def test_every_expert_byte_tells_where_it_belongs(make_checkpoint: ModuleType, tmp_path: Path) -> None:
    make_checkpoint.generate(tmp_path, "tiny", encode_address=True)
    parts = make_checkpoint.EXPERT_TENSORS
    seen = set()
    for name, t in read_all(tmp_path).items():
        if ".experts." not in name:
            continue
        layer, expert = int(name.split(".layers.")[1].split(".")[0]), int(expert_of(name))
        number = parts.index(name.split(f".experts.{expert}.")[1])
        step = 16 if number % 2 else 8
        for position in range(len(t.data) // step):
            record = t.data[position * step : (position + 1) * step]
            address = make_checkpoint.read_address(record)
            assert address == make_checkpoint.Address(layer, expert, number, position), name
            seen.add(record)
        assert t.data == make_checkpoint.address_bytes(layer, expert, number, len(t.data))
        if number % 2:
            assert 112 <= min(t.data) <= max(t.data) < 128, "no scale is 255, none is extreme"
    assert len(seen) == 8 * 16 * 3 * (64 * 32 // 2 // 8 + 64 * 32 // 32 // 16), "no two records are alike"


def test_addresses_reach_the_corners_of_k3(make_checkpoint: ModuleType) -> None:
    for layer in (1, 2, 91, 92):
        for expert in (0, 255, 256, 511, 512, 895):
            for tensor, nbytes in enumerate((5_505_024, 344_064) * 3):
                data = make_checkpoint.address_bytes(layer, expert, tensor, nbytes)
                step = 16 if tensor % 2 else 8
                assert len(data) == nbytes
                last = make_checkpoint.Address(layer, expert, tensor, nbytes // step - 1)
                assert make_checkpoint.read_address(data[-step:]) == last


@pytest.mark.slow
def test_the_roster_has_all_text_tensors_of_k3_in_their_order(
    make_checkpoint: ModuleType, make_fullsize: ModuleType, tmp_path: Path
) -> None:
    make_checkpoint.generate(
        tmp_path, "roster", order=make_checkpoint.Order.SPINE_FIRST, vision=False, encode_address=True
    )
    for number in range(1, 95):
        stored = read_shard(tmp_path / f"model-{number:05d}-of-000094.safetensors")
        full = make_fullsize.shard_tensors(number)
        assert [(t.name, t.dtype, len(t.shape)) for t in stored] == [(t.name, t.dtype, len(t.shape)) for t in full]
