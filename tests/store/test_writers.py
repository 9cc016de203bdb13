"""Many processes on one cache, none of them locking; and caches that are carried elsewhere."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess

import pytest

from deltafin.errors import Missing
from deltafin.store import all_items, fetch, rest_items, verify

# What flock does on some network disks: it lets everybody in, or nobody. Put in front of the standard library's.
NO_LOCKS = """
import fcntl
def flock(fd, operation):
    {body}
fcntl.flock = flock
"""


@pytest.fixture(
    params=[
        pytest.param("return None", id="no-op"),
        pytest.param("raise OSError(38, 'Function not implemented')", id="ENOSYS", marks=pytest.mark.slow),
    ]
)
def lockless(request, tmp_path) -> dict[str, str]:
    """An environment in which flock does nothing."""
    folder = tmp_path / "site"
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(NO_LOCKS.format(body=request.param))
    return {"PYTHONPATH": str(folder)}


def test_four_fetches_at_once_on_an_empty_cache_without_locks_leave_one_whole_set(
    start, hub, tiny_dir, tmp_path, lockless, objects, opened, span_bytes
):
    hub(tiny_dir, "slow_drip", bytes=65536, every=0.002)
    writers = [start("df-fetch", "all", "test/model", env=lockless) for _ in range(4)]
    outcomes = [writer.communicate(timeout=100) for writer in writers]
    assert [writer.returncode for writer in writers] == [0] * 4, outcomes
    assert [err for _, err in outcomes] == [""] * 4
    store = opened(offline=True)
    items = all_items(store.catalog) + rest_items(store.catalog)
    expected = {hashlib.sha256(span_bytes(store, tiny_dir, item.span)).hexdigest() for item in items}
    assert objects(tmp_path / "cache").keys() == expected
    report = verify(store)
    assert (report.whole, report.damaged, report.vanished, report.unknown) == (154, [], 0, 0)
    assert all(store.is_local(item.span) for item in items)
    assert list((tmp_path / "cache" / "tmp").iterdir()) == []


def test_a_writer_that_is_killed_does_not_disturb_the_others(start, hub, tiny_dir, tmp_path, opened):
    server = hub(tiny_dir)
    opened().close()
    server.set_mode("slow_drip", bytes=65536, every=0.02)
    writers = [start("df-fetch", "all", "test/model") for _ in range(3)]
    for line in iter(server.stats, None):
        if line["requests"] > 30:
            break
    writers[0].kill()
    outcomes = [writer.communicate(timeout=100) for writer in writers]
    assert [writer.returncode for writer in writers] == [-9, 0, 0], outcomes
    report = verify(opened(offline=True))
    assert (report.whole, report.damaged) == (154, [])
    assert list((tmp_path / "cache" / "tmp").iterdir()) == []


# ---- a cache that moves ---------------------------------------------------------------------------------


def _check(store, truth) -> None:
    for layer in store.catalog.config.moe_layers:
        for expert, slot in store.experts(layer, range(store.catalog.config.num_experts)):
            assert slot.tobytes() == truth.expert(layer, expert)
        assert {n: a.tobytes() for n, a in store.spine(layer).items()} == {
            n: t.raw for n, t in truth.spine(layer).items()
        }
    assert store.requests == store.stats.snapshot()["http_spans"] == 0


def test_a_cache_copied_elsewhere_works_there_from_its_log_alone(full, opened, tmp_path, tiny_truth, monkeypatch):
    store, server = full
    here, there = store.roots[0].path, tmp_path / "usb stick" / "ä copy"
    store.close()
    there.parent.mkdir()
    subprocess.run(["cp", "-r", here, there], check=True)
    shutil.rmtree(here)
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    copy = opened(cache_dir=there, offline=True)
    _check(copy, tiny_truth)
    assert verify(copy).whole == 140
    assert server.stats()["requests"] == 0


def test_a_copied_root_serves_a_machine_that_has_only_the_catalog(full, opened, tmp_path, tiny_truth):
    """The catalog is built anew, elsewhere and at another address: the log's keys do not depend on it."""
    store, server = full
    here, there = store.roots[0].path, tmp_path / "copy"
    store.close()
    subprocess.run(["cp", "-r", here, there], check=True)
    shutil.rmtree(here)
    shutil.rmtree(there / "catalogs")
    fresh = tmp_path / "fresh"
    opened(cache_dir=fresh).close()
    server.set_mode("ok")
    copy = opened(cache_dir=fresh, roots=[there], offline=True)
    _check(copy, tiny_truth)
    assert server.stats()["requests"] == 0
    assert not (fresh / "objects").exists()


def test_a_copied_root_is_used_by_a_model_of_another_name_with_the_same_shards(full, opened, tmp_path, tiny_truth):
    """The key is the shard's published digest, whoever publishes it."""
    store, server = full
    mirror = opened("somebody-else/mirror", cache_dir=tmp_path / "fresh", roots=[store.roots[0].path])
    server.set_mode("ok")
    _check(mirror, tiny_truth)
    assert server.stats()["requests"] == 0


def test_what_a_copied_root_lacks_is_fetched_into_the_cache_and_nowhere_else(full, opened, tmp_path, objects):
    store, _ = full
    there = tmp_path / "copy"
    shutil.copytree(store.roots[0].path, there)
    for path in list(objects(there).values())[:7]:
        path.unlink()
    mixed = opened(cache_dir=tmp_path / "fresh", roots=[there])
    missing = [item for item in all_items(mixed.catalog) if not mixed.is_local(item.span)]
    assert len(missing) == 7
    fetch(mixed, missing)
    assert len(objects(tmp_path / "fresh")) == 7
    assert len(objects(there)) == 133


def test_without_its_log_a_root_holds_nothing_and_says_what_is_missing(full, opened, tmp_path):
    store, _ = full
    (store.roots[0].path / "objects.log").unlink()
    again = opened(offline=True)
    assert not any(again.is_local(item.span) for item in all_items(again.catalog))
    with pytest.raises(Missing, match=r"140 spans .* are not on this machine"):
        fetch(again, all_items(again.catalog))


def test_a_read_only_copy_can_be_used(full, opened, tmp_path, tiny_truth):
    store, _ = full
    there = tmp_path / "copy"
    shutil.copytree(store.roots[0].path, there)
    before = sorted(there.rglob("*"))
    for folder, _, files in os.walk(there):
        for name in files:
            os.chmod(os.path.join(folder, name), 0o444)
        os.chmod(folder, 0o555)
    try:
        with opened(cache_dir=there, offline=True) as copy:
            _check(copy, tiny_truth)
    finally:
        for folder, _, _ in os.walk(there):
            os.chmod(folder, 0o755)
    assert sorted(there.rglob("*")) == before
