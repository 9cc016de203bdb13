"""df-bench io: a table beside its limits, on files that are gone afterwards, whatever happens."""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from deltafin.store import iobench

SMALL = ["--size", "71MB", "--seconds", "0.4"]
SPAN = iobench.SPAN_NBYTES


@pytest.fixture(autouse=True)
def few_turns(monkeypatch) -> None:
    """Enough for a table; nobody reads the numbers."""
    monkeypatch.setattr(iobench, "ROUNDS", 2)
    monkeypatch.setattr(iobench, "RAW_THREADS", (1, 2))
    monkeypatch.setattr(iobench, "DEPTHS", (1, 2))


@pytest.fixture
def where(tmp_path) -> Path:
    """A directory to measure in, with room for a test."""
    if shutil.disk_usage(tmp_path).free < 1_000_000_000:
        pytest.skip("the disk is nearly full")
    where = tmp_path / "drive"
    where.mkdir()
    return where


def test_the_table_shows_every_rate_beside_its_limit(df, where):
    done = df("df-bench", "io", "--dir", where, *SMALL)
    assert (done.status, done.err) == (0, "")
    conditions, _, head, *lines = done.out.splitlines()
    assert conditions.startswith(f"{where}, ") and "0.07 GB of test files, depth " in conditions
    assert (iobench.file_system(where) in conditions and "page cache" in conditions) or "in memory" in conditions
    assert head.split() == ["reads", "GB/s", "least", "most", "limit", "ratio", "core-s/GB"]
    names = [line[:38].strip() for line in lines]
    assert names[0].startswith("raw: ") and names[1:4] == [
        "spans: aligned",
        "spans: 3,088 bytes into a page",
        "spans: through the page cache, cold",
    ]
    assert names[4].startswith("spans: aligned, root of ")
    assert list(where.iterdir()) == []


def test_a_program_gets_all_ways_of_reading(df, where):
    done = df("df-bench", "io", "--dir", where, *SMALL, "--rate", "150MB", "--json")
    report = done.json
    assert report["set_nbytes"] == 4 * SPAN and report["rounds"] == 2 and not report["objects"]
    assert len(report["raw"]) == len(iobench.RAW_BLOCKS) * len(iobench.RAW_THREADS)
    best = max(line["rate"] for line in report["raw"])
    for line in report["raw"] + report["spans"][:-1]:
        assert line["limit"] == best == report["raw"][0]["rate"]
    limited = report["spans"][-1]
    assert limited["limit"] == 150e6 and 0 < limited["most"] <= 150e6
    for line in report["raw"] + report["spans"]:
        assert 0 < line["least"] <= line["rate"] <= line["most"]
        assert line["ratio"] == line["rate"] / line["limit"]
        assert line["core_s_per_gb"] >= 0


def test_the_cache_directory_is_measured_and_keeps_what_it_holds(df, tmp_path, where):
    cache = tmp_path / "cache"
    (cache / "tmp").mkdir(parents=True)
    (cache / "tmp" / "other").write_text("x")
    done = df("df-bench", "io", *SMALL)
    assert done.status == 0 and done.out.startswith(f"{cache}, ")
    assert sorted(str(p.relative_to(cache)) for p in cache.rglob("*")) == ["tmp", "tmp/other"]


def test_experts_that_are_there_are_read_instead_of_test_files(df, where):
    for digit in "ab":
        path = where / "objects" / (2 * digit) / (64 * digit)
        path.parent.mkdir(parents=True)
        path.write_bytes(np.random.default_rng(3).bytes(SPAN))
    (where / "objects" / "cc").mkdir()
    (where / "objects" / "cc" / (64 * "c")).write_bytes(b"no expert")
    before = sorted(where.rglob("*"))
    done = df("df-bench", "io", "--dir", where, *SMALL, "--json")
    assert done.json["objects"] and done.json["set_nbytes"] == 4 * SPAN
    assert sorted(where.rglob("*")) == before


def test_a_full_disk_is_told_before_anything_is_written(df, where, monkeypatch):
    monkeypatch.setattr(iobench, "free_nbytes", lambda path: 560_000_000)
    done = df("df-bench", "io", "--dir", where, *SMALL)
    assert done.status == 1
    assert f"{where}: test files" in done.err and "560000000 are free" in done.err and "--size" in done.err
    assert list(where.iterdir()) == []


def test_a_disk_that_fills_up_meanwhile_is_one_line_and_leaves_nothing(df, small_disk, monkeypatch):
    disk = small_disk(60_000_000, "full")
    monkeypatch.setattr(iobench, "free_nbytes", lambda path: 10**12)
    done = df("df-bench", "io", "--dir", disk, *SMALL)
    assert done.status == 1 and done.err.startswith(f"df-bench: {disk}/tmp: cannot write: No space left")
    assert list(disk.iterdir()) == []


def test_memory_is_not_taken_for_a_drive(df, small_disk):
    disk = small_disk(700_000_000, "memory")
    done = df("df-bench", "io", "--dir", disk, *SMALL)
    assert done.status == 0 and ", tmpfs, in memory: this proves nothing of any drive; " in done.out


@pytest.mark.parametrize(
    ("args", "status", "says"),
    [
        (["--size", "70MB"], 2, "70000000 bytes of test files are too few; from 70189056 on"),
        (["--size", "0"], 2, "too few"),
        (["--rate", "0"], 2, "rate"),
        (["--rate", "fast"], 2, "is no size"),
        (["--seconds", "0"], 2, "0.1"),
        (["--dir", __file__], 2, "is a file"),
    ],
)
def test_what_makes_no_sense_is_refused(df, where, args, status, says):
    done = df("df-bench", "io", "--dir", where, *args)
    assert done.status == status and says in done.err, done.err
    assert list(where.iterdir()) == []


@pytest.mark.parametrize("moment", ["writing", "reading"])
def test_ctrl_c_removes_the_test_files(start, where, until, moment):
    size = "400MB" if moment == "writing" else "71MB"
    process = start("df-bench", "io", "--dir", where, "--size", size, "--seconds", "60")
    wanted = 1 if moment == "writing" else 3
    until(lambda: sum(p.is_file() for p in where.rglob("*")) >= wanted)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130 and out == b""
    assert err.lstrip(b"\n").endswith(b"df-bench: interrupted; what was finished is kept\n") and b"Traceback" not in err
    assert list(where.iterdir()) == []


def test_what_a_killed_run_left_is_removed_by_the_next(start, df, where, until):
    process = start("df-bench", "io", "--dir", where, "--size", "71MB", "--seconds", "60")
    until(lambda: sum(p.is_file() for p in where.rglob("*")) >= 3)
    process.kill()
    process.wait()
    assert any(where.rglob("*.part"))
    assert df("df-bench", "io", "--dir", where, *SMALL).status == 0
    assert list(where.iterdir()) == []


def test_bytes_that_differ_between_two_ways_of_reading_are_not_measured(df, where, monkeypatch):
    real = iobench.Drive.read

    def wrong(self, path, offset, nbytes, slot):
        part = real(self, path, offset, nbytes, slot)
        part[-1] ^= 1
        return part

    monkeypatch.setattr(iobench.Drive, "read", wrong)
    done = df("df-bench", "io", "--dir", where, *SMALL)
    assert done.status == 1 and "differ between a direct and a buffered read" in done.err
    assert list(where.iterdir()) == []


def test_a_drive_without_direct_reads_is_measured_as_it_is(df, where, monkeypatch):
    from deltafin.cext import _io
    from deltafin.store import drive

    door = SimpleNamespace(open=lambda path, direct: (_io.open(path, False)[0], False), read=_io.read, PAGE=_io.PAGE)
    monkeypatch.setattr(drive, "_io", door)
    done = df("df-bench", "io", "--dir", where, *SMALL)
    assert done.status == 0 and "through the page cache: direct reads are refused" in done.out
    assert done.err.count("direct reads are refused") == 1


def test_a_file_system_is_found_by_its_innermost_mount(small_disk, tmp_path):
    disk = small_disk(1_000_000, "with a space")
    assert iobench.file_system(disk) == "tmpfs"
    assert iobench.file_system(disk / "not" / "there") == "tmpfs"
    assert iobench.file_system(Path("/proc")) == "proc"
    os.symlink(disk, tmp_path / "link")
    assert iobench.file_system(tmp_path / "link") == "tmpfs"
