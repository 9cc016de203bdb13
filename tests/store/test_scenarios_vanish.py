"""Places that go away while they are used, links that lead out of a cache, and removals that are cut off."""

from __future__ import annotations

import os
import shutil
import subprocess

import pytest

from deltafin.errors import DiskError, Missing, NoSpace
from deltafin.store import all_items, check, expert_items, fetch, remove, verify


def _experts(store, truth, layers) -> None:
    for layer in layers:
        for expert, content in store.experts(layer, range(16)):
            assert content.tobytes() == truth.expert(layer, expert)


def _warnings(caplog) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]


def test_a_directory_of_shards_that_goes_away_is_said_once_and_the_network_takes_over(
    hub_store, opened, tiny_dir, tmp_path, tiny_truth, caplog
):
    hub_store()[0].close()
    copy = shutil.copytree(tiny_dir, tmp_path / "drive" / "model")
    store = opened(roots=[copy])
    _experts(store, tiny_truth, [1, 2])
    shutil.rmtree(copy)
    _experts(store, tiny_truth, range(1, 9))
    (warning,) = _warnings(caplog)
    assert warning.startswith(f"{copy} is gone")


def test_nothing_is_written_where_a_drive_was_mounted(hub_store, small_disk, tmp_path, tiny_truth, caplog):
    cache = small_disk(8 << 20, "cache")
    store, _ = hub_store()
    _experts(store, tiny_truth, [1])
    subprocess.run(["umount", "-l", cache], check=True)
    try:
        _experts(store, tiny_truth, [1, 2, 3])
        assert list(cache.iterdir()) == []
        with pytest.raises(NoSpace, match="every root that may be written to is gone"):
            fetch(store, expert_items(store.catalog, [4], range(16)))
        gone, unkept = [w for w in _warnings(caplog) if "going on" in w]
        assert gone.startswith(f"{cache} is gone") and unkept.endswith("without keeping what is fetched")
    finally:
        subprocess.run(["mount", "-t", "tmpfs", "tmpfs", cache], check=True)  # for the fixture to unmount


def test_offline_a_cache_that_went_away_is_named(full, opened, tiny_truth, tmp_path):
    full[0].close()
    store = opened(offline=True)
    _experts(store, tiny_truth, [1])
    os.rename(tmp_path / "cache", tmp_path / "elsewhere")
    with pytest.raises(Missing, match=f"was in {tmp_path}/cache, which is gone"):
        _experts(store, tiny_truth, [1])
    os.rename(tmp_path / "elsewhere", tmp_path / "cache")


@pytest.mark.parametrize("name", ["objects", "objects/{}", "tmp", "objects.log"])
def test_no_link_in_a_cache_leads_a_write_out_of_it(full, opened, tmp_path, name):
    """CA-08, as in a cache that came from somebody else."""
    store, server = full
    (item,) = expert_items(store.catalog, [1], [0])
    entry = store.roots[0].find(store.key(item.span))
    place = store.roots[0].path / name.format(entry.sha256.hex()[:2])
    remove(store, [item])
    store.close()
    outside = tmp_path / "outside"
    if name == "objects.log":
        shutil.copy(place, outside)
        place.unlink()
    else:
        shutil.copytree(place, outside)
        shutil.rmtree(place)
    place.symlink_to(outside)
    before = outside.stat().st_size, sorted(outside.rglob("*"))
    server.set_mode("ok")
    with pytest.raises(DiskError, match="link"):
        fetch(opened(), [item])
    assert (outside.stat().st_size, sorted(outside.rglob("*"))) == before


def test_a_link_in_place_of_an_object_is_a_miss_and_is_replaced(full, opened, tmp_path, objects):
    store, server = full
    (item,) = expert_items(store.catalog, [1], [0])
    path = store.roots[0].object_path(store.roots[0].find(store.key(item.span)))
    outside = tmp_path / "outside"
    os.rename(path, outside)
    path.symlink_to(outside)
    assert not store.is_local(item.span)
    server.set_mode("ok")
    fetch(store, [item])
    assert path.is_file() and not path.is_symlink() and outside.exists()


@pytest.mark.parametrize("after", [0, 1, 50, 139])
def test_a_removal_that_is_cut_off_is_finished_by_the_next_one(full, opened, monkeypatch, objects, after):
    """Were records taken back first, nothing would ever remove the objects."""
    store, _ = full
    items, done = all_items(store.catalog), 0
    real = check.Root.remove

    def interrupted(root, entry):
        nonlocal done
        if done == after:
            raise KeyboardInterrupt
        done += 1
        return real(root, entry)

    with monkeypatch.context() as patch:
        patch.setattr(check.Root, "remove", interrupted)
        with pytest.raises(KeyboardInterrupt):
            remove(store, items)
    report = verify(opened(offline=True))
    assert (report.damaged, report.unknown, report.whole) == ([], 0, 140 - after)
    remove(opened(offline=True), items)
    assert objects(store.roots[0].path) == {}
