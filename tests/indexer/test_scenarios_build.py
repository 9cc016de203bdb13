"""Several builders, and what others left in the folder of catalogs."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
import threading
import time

import pytest

from deltafin.errors import BadCatalog, DeltafinError
from deltafin.indexer import Catalog, build_catalog, catalog, clear_stale, parse_model, this_host


@pytest.fixture
def building(tiny_dir, tmp_path):
    """An older catalog, and a lock on it as another builder would hold it; `(path, build)`."""
    path = tmp_path / "it.catalog"

    def build(**keywords) -> None:
        build_catalog(parse_model(str(tiny_dir), tmp_path).source(), path, "it", **keywords)

    build()
    with open(path.with_suffix(".lock"), "wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield path, build, lambda: fcntl.flock(lock, fcntl.LOCK_UN)


@pytest.fixture
def waiting(building):
    """A builder that waits for that one; joined at the end, and it must not have failed."""
    _, build, _ = building
    failures = []

    def wait() -> None:
        try:
            build(wait=True)
        except BaseException as e:
            failures.append(e)

    thread = threading.Thread(target=wait)
    thread.start()
    time.sleep(0.2)
    assert thread.is_alive()
    yield thread
    thread.join(20)
    assert not thread.is_alive() and not failures


def test_who_waited_for_a_builder_that_failed_builds_instead_of_taking_the_older_catalog(building, waiting):
    path, _, unlock = building
    before = path.stat().st_ino
    keep = open(path, "rb")  # noqa: SIM115  (its inode number must not be used again)
    unlock()
    waiting.join(20)
    assert path.stat().st_ino != before
    keep.close()


def test_who_waited_for_a_builder_that_succeeded_takes_its_catalog(building, waiting):
    path, _, unlock = building
    newer = path.with_name("newer")
    newer.write_bytes(path.read_bytes())
    os.replace(newer, path)
    before = path.stat().st_ino
    unlock()
    waiting.join(20)
    assert path.stat().st_ino == before


def test_a_builder_that_does_not_wait_is_refused_and_changes_nothing(building):
    path, build, _ = building
    before = path.stat()
    with pytest.raises(DeltafinError, match="busy, another process is building this catalog"):
        build()
    assert path.stat() == before


@pytest.mark.parametrize("code", [38, 95, 37])  # not implemented, not supported, no locks available
def test_a_file_system_without_locks_is_no_obstacle(building, monkeypatch, code):
    path, build, _ = building
    before = path.read_bytes()

    def flock(*_args):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(fcntl, "flock", flock)
    build()
    assert len(path.read_bytes()) == len(before)


@pytest.mark.parametrize("pid", ["9" * 20, "99999999999", "²", "١٢", "-1", "", "0x10"])
def test_a_leftover_whose_writer_no_process_can_be_is_left_for_a_day_and_is_no_crash(tmp_path, pid):
    path = tmp_path / f".it.{this_host()}.{pid}.0.part"
    path.touch()
    assert clear_stale(tmp_path) == 0 and path.exists()
    os.utime(path, (time.time() - 90_000,) * 2)
    assert clear_stale(tmp_path) == 1 and not path.exists()


def test_a_leftover_of_a_dead_writer_is_cleared_at_once(tmp_path):
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    (tmp_path / f".it.{this_host()}.{process.pid}.0.part").touch()
    assert clear_stale(tmp_path) == 1


# ---- a reader while a new catalog is published ---------------------------------------------------------


@pytest.fixture
def replaced(tmp_path, tiny_dir, demo_dir, monkeypatch):
    """`replaced(times)`: the catalog at the returned path is replaced behind the back of whoever checks it."""
    sources = [tiny_dir, demo_dir]
    for number, directory in enumerate(sources):
        path = tmp_path / f"{number}.catalog"
        build_catalog(parse_model(str(directory), tmp_path).source(), path, "it")
    path, left = tmp_path / "it.catalog", 0
    shutil.copy(tmp_path / "0.catalog", path)
    check = catalog._check_digest

    def check_and_replace(checked):
        nonlocal left
        records = check(checked)
        if left:
            left -= 1
            shutil.copy(tmp_path / f"{left % 2}.catalog", tmp_path / "next")
            os.replace(tmp_path / "next", path)
        return records

    monkeypatch.setattr(catalog, "_check_digest", check_and_replace)

    def plan(times: int):
        nonlocal left
        left = times
        return path

    return plan


@pytest.mark.parametrize("times", [0, 1, 2, 3, 4])
def test_a_reader_while_catalogs_are_replaced_gets_a_whole_one(replaced, times):
    path = replaced(times)
    with Catalog(path) as one, Catalog(path) as two:
        assert one._handle is two._handle, "one file is never opened twice"
        assert one.totals.experts == len(one.config.moe_layers) * one.config.num_experts
        assert one.expert_spans(1, [0]) == two.expert_spans(1, [0])
        assert one.totals.experts == 128


def test_a_catalog_that_is_replaced_for_ever_is_an_error(replaced):
    with pytest.raises(BadCatalog, match="again and again"):
        Catalog(replaced(1000))


def test_damage_that_stays_is_not_looked_at_twice(replaced, monkeypatch):
    path, looks = replaced(0), []
    os.truncate(path, 5000)
    real = catalog._check_digest
    monkeypatch.setattr(catalog, "_check_digest", lambda p: (looks.append(p), real(p))[1])
    with pytest.raises(BadCatalog, match="rebuild it"):
        Catalog(path)
    assert len(looks) == 1
