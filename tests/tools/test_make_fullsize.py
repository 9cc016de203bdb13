import json
import struct
import time
import urllib.request
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from types import ModuleType

import pytest

pytestmark = pytest.mark.slow  # half a million names, written and read; nothing else changes them


@pytest.fixture(scope="module")
def k3(make_fullsize: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("k3")
    make_fullsize.write(folder, index=True)
    yield folder
    for path in folder.iterdir():  # tools that copy or archive old temporary folders would not know the holes
        path.unlink()


def read_header(path: Path) -> tuple[int, dict[str, dict[str, list[int]]]]:
    with open(path, "rb") as f:
        (length,) = struct.unpack("<Q", f.read(8))
        return length, json.loads(f.read(length))


def test_sizes_are_the_published_ones(k3: Path) -> None:
    shards = sorted(k3.glob("*.safetensors"))
    assert [p.name for p in shards] == [f"model-{n:05d}-of-000096.safetensors" for n in range(1, 97)]
    assert sum(p.stat().st_size for p in shards) == 1_560_936_091_448
    assert shards[1].stat().st_size == 16_990_911_504
    tensors = tensor_bytes = 0
    for path in shards:
        length, header = read_header(path)
        tensors += len(header)
        tensor_bytes += path.stat().st_size - 8 - length
    assert tensors == 497_220
    assert tensor_bytes == 1_560_860_324_864


@pytest.mark.parametrize(
    ("number", "count", "data_bytes"),
    [
        (1, 23, 2_341_213_184),
        (2, 5_404, 16_990_092_800),
        (4, 5_398, 16_566_684_160),
        (93, 5_398, 16_566_684_160),
        (94, 5, 4_697_663_488),
        (95, 3, 92_289_024),
        (96, 165, 802_428_928),
    ],
)
def test_a_shard_is_full_without_gap_or_overlap(
    make_fullsize: ModuleType, k3: Path, number: int, count: int, data_bytes: int
) -> None:
    path = k3 / make_fullsize.shard_name(number)
    length, header = read_header(path)
    assert length % 8 == 0
    assert len(header) == count
    spans = [entry["data_offsets"] for entry in header.values()]
    assert spans[0][0] == 0
    assert all(before[1] == after[0] for before, after in pairwise(spans))
    assert spans[-1][1] == data_bytes == path.stat().st_size - 8 - length


def test_shard_2_lies_as_published(make_fullsize: ModuleType, k3: Path) -> None:
    length, header = read_header(k3 / make_fullsize.shard_name(2))
    assert length == 818_696
    experts = "language_model.model.layers.1.block_sparse_moe.experts."
    assert header[f"{experts}0.w1.weight_packed"]["data_offsets"][0] == 1_267_744_256
    names = [name for name in header if name.startswith(experts)]
    assert [name.removeprefix(experts).split(".")[0] for name in names[::6]] == sorted(map(str, range(896)))
    assert [name.removeprefix(f"{experts}0.") for name in names[:6]] == [
        "w1.weight_packed",
        "w1.weight_scale",
        "w2.weight_packed",
        "w2.weight_scale",
        "w3.weight_packed",
        "w3.weight_scale",
    ]
    start, end = header[names[0]]["data_offsets"][0], header[names[5]]["data_offsets"][1]
    assert end - start == 17_547_264


def test_the_index_lists_every_tensor_and_has_the_published_length(k3: Path) -> None:
    path = k3 / "model.safetensors.index.json"
    assert path.stat().st_size == 59_764_096
    index = json.loads(path.read_text())
    assert index["metadata"]["total_size"] == 1_560_860_324_864
    weight_map = index["weight_map"]
    assert len(weight_map) == 497_220
    assert all(weight_map[name] == shard.name for shard in k3.glob("*.safetensors") for name in read_header(shard)[1])


def test_only_headers_take_disk(make_fullsize: ModuleType, k3: Path) -> None:
    assert make_fullsize.disk_bytes(k3) < 200_000_000


@pytest.mark.parametrize("kind", ["moved", "overlap", "swapped", "truncated", "cut-file"])
def test_damage_is_what_it_says_and_can_be_repaired(make_fullsize: ModuleType, k3: Path, kind: str) -> None:
    path = k3 / make_fullsize.shard_name(make_fullsize.DAMAGED_LAYER + 1)
    sound_length, sound = read_header(path)
    size = path.stat().st_size
    damaged = make_fullsize.damage(k3, make_fullsize.Damage(kind))
    try:
        length, header = read_header(path)
        assert damaged.shard == path
        assert length == sound_length
        changed = [name for name in sound if header[name] != sound[name]]
        begin, end = header[damaged.tensors[0]]["data_offsets"]
        old_begin, old_end = sound[damaged.tensors[0]]["data_offsets"]
        assert path.stat().st_size == size - (64 if kind == "cut-file" else 0)
        match kind:
            case "moved":
                assert (begin, end) == (old_begin + 64, old_end + 64)
            case "overlap":
                assert (begin, end) == (old_begin - 64, old_end - 64)
            case "truncated":
                assert (begin, end) == (old_begin, old_end - 64)
            case "swapped":
                assert end - begin == old_end - old_begin
                assert begin != old_begin
        assert len(changed) == {"swapped": 2, "cut-file": 0}.get(kind, 1)
        assert set(changed) <= set(damaged.tensors)
    finally:
        damaged.repair()
    assert read_header(path) == (sound_length, sound)
    assert path.stat().st_size == size


def test_a_loopback_hub_serves_it_at_once(make_fullsize: ModuleType, range_server: ModuleType, k3: Path) -> None:
    with range_server.FaultServer(root=str(k3)) as server:
        start = time.monotonic()
        with urllib.request.urlopen(f"{server.url}/api/models/moonshotai/Kimi-K3/tree/main") as answer:
            files = json.load(answer)
        assert sum(f["size"] for f in files if f["path"].endswith(".safetensors")) == 1_560_936_091_448
        last_expert = (16_990_911_504 - 17_547_264, 16_990_911_503)
        request = urllib.request.Request(
            f"{server.url}/moonshotai/Kimi-K3/resolve/main/{make_fullsize.shard_name(2)}",
            headers={"Range": "bytes={}-{}".format(*last_expert)},
        )
        with urllib.request.urlopen(request) as answer:
            assert answer.status == 206
            assert answer.read() == bytes(17_547_264)
        assert time.monotonic() - start < 10
