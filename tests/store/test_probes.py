"""Short measurements for a plan: of drives, and of the line."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from deltafin.cext import _io
from deltafin.errors import DeltafinError, Missing
from deltafin.indexer import parse_model
from deltafin.indexer.sources import ShardFile
from deltafin.store import direct_reads, driveprobe, lineprobe, probe_drive, probe_line

SPAN = 1 << 20


@pytest.fixture(autouse=True)
def small(monkeypatch) -> None:
    """Experts of one MiB, and 32 MiB of test file."""
    monkeypatch.setattr(driveprobe, "SPAN_NBYTES", SPAN)
    monkeypatch.setattr("deltafin.store.iobench.SPAN_NBYTES", SPAN)


def test_where_nothing_is_a_temporary_file_is_read_and_gone(tmp_path):
    found = probe_drive(tmp_path / "not" / "there", seconds=0.2)
    if found.note.startswith("tmpfs"):
        pytest.skip("the tests' directory is in memory")
    assert found.source == "a temporary file"
    assert found.rate is None or found.rate > 1e6
    assert (found.rate is None) == (found.direct is False)
    assert list(tmp_path.iterdir()) == [], "the directories that were made for it are gone too"


def test_objects_that_are_there_are_read_and_nothing_is_written(tmp_path, monkeypatch):
    for number in range(20):
        name = f"{number:064x}"
        folder = tmp_path / "objects" / name[:2]
        folder.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(os.urandom(SPAN))
    monkeypatch.setattr(driveprobe, "write_test_file", None)
    assert probe_drive(tmp_path, seconds=0.1).source == "objects"
    assert [p.name for p in tmp_path.iterdir()] == ["objects"]


def test_shards_that_are_there_are_read_in_place(tmp_path):
    for number in range(2):
        with open(tmp_path / f"model-{number:05}.safetensors", "wb") as f:
            f.write(os.urandom(SPAN) * 70)
    assert probe_drive(tmp_path, seconds=0.1).source == "shards"


def test_memory_is_not_measured_as_a_drive(small_disk):
    found = probe_drive(small_disk(8 << 20, "ram"))
    assert found.rate is None and found.source == "nothing" and "tmpfs" in found.note


def test_a_full_disk_is_left_alone(tmp_path, monkeypatch):
    monkeypatch.setattr(driveprobe, "free_nbytes", lambda path: 10 * SPAN)
    found = probe_drive(tmp_path)
    assert found.rate is None and "too little space" in found.note
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_fills_up_meanwhile_leaves_nothing_behind(tmp_path, monkeypatch):
    def full(path: Path, nbytes: int, written) -> None:
        path.write_bytes(b"some of it")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(driveprobe, "write_test_file", full)
    found = probe_drive(tmp_path)
    assert found.rate is None and "No space left" in found.note
    assert list(tmp_path.iterdir()) == []


def test_refused_direct_reads_give_no_rate(tmp_path, monkeypatch):
    real = _io.open
    monkeypatch.setattr(_io, "open", lambda path, direct: real(path, False))
    found = probe_drive(tmp_path, seconds=0.1)
    assert (found.rate, found.direct) == (None, False) and "refused" in found.note
    works, why = direct_reads(tmp_path)
    assert works is False and why
    assert list(tmp_path.iterdir()) == []


# ---- the line -------------------------------------------------------------------------------------------


def _shards(folder: Path, nbytes: int) -> Path:
    folder.mkdir()
    (folder / "model-00001-of-000001.safetensors").write_bytes(os.urandom(1 << 20) * (nbytes >> 20))
    (folder / "config.json").write_text("{}")
    return folder


def test_a_line_is_measured_over_ranges_that_are_thrown_away(hub, tmp_path):
    server = hub(_shards(tmp_path / "it", 32 << 20))
    source = parse_model("org/it", tmp_path).source()
    try:
        rate = probe_line(source, seconds=0.3)
    finally:
        source.close()
    assert rate > 1e6
    stats = server.stats()
    assert stats["bytes_sent"] < 40 * rate
    assert sorted(p.name for p in tmp_path.iterdir()) == ["it"], "nothing is kept"


class _Slow:
    """A source of one large file that takes so long for each byte."""

    def __init__(self, rate: float) -> None:
        self.rate = rate
        self.asked: list[int] = []

    def shard_files(self):
        return [ShardFile("big", 1 << 30), ShardFile("small", 1)]

    def read(self, shard, offset, nbytes):
        import time

        assert shard.name == "big" and offset + nbytes <= 1 << 30
        self.asked.append(nbytes)
        time.sleep(nbytes / self.rate)
        return bytes(nbytes), None


def test_a_slow_line_is_not_asked_for_much_and_a_quick_one_in_large_ranges():
    slow, quick = _Slow(1e6), _Slow(100e6)
    assert probe_line(slow, seconds=0.2) == pytest.approx(8e6, rel=0.4), "eight threads"
    assert sum(slow.asked) <= 8 * 2 * lineprobe.FIRST_NBYTES
    assert probe_line(quick, seconds=0.5) == pytest.approx(8 * 100e6, rel=0.5)
    assert max(quick.asked) == lineprobe.MOST_NBYTES


def test_a_source_that_fails_ends_the_measurement_at_once():
    class Broken(_Slow):
        def read(self, shard, offset, nbytes):
            raise DeltafinError("the hub says no")

    with pytest.raises(DeltafinError, match="says no"):
        probe_line(Broken(1.0), seconds=60)


def test_files_too_small_to_measure_with_are_said():
    class Small(_Slow):
        def shard_files(self):
            return [ShardFile("small", 1000)]

    with pytest.raises(Missing, match="--line"):
        probe_line(Small(1.0))
