"""Status, verify and removal: what is on disk, whether it is whole, and what goes when it is removed."""

from __future__ import annotations

import json
import os
import random
import shutil

import pytest

from deltafin.errors import BadCatalog, Corrupt
from deltafin.store import (
    Store,
    all_items,
    expert_items,
    fetch,
    nbytes_to_verify,
    pair_items,
    plan_fetch,
    read_status,
    removable,
    remove,
    spine_items,
    verify,
)
from deltafin.store.roots import Root


def _path(store, item):
    root = store.roots[0]
    return root.object_path(root.log.entries[store.key(item.span)])


def _flip(path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 3] ^= 0x20
    path.write_bytes(data)


# ---- verify ---------------------------------------------------------------------------------------------


def test_a_whole_cache_verifies_and_every_byte_is_counted(full):
    store, _ = full
    seen = []
    report = verify(store, seen.append)
    nbytes = sum(item.span.nbytes for item in all_items(store.catalog))
    assert report.as_json() == {
        "whole": 140, "whole_nbytes": nbytes, "damaged": [], "vanished": 0, "unknown": 0,
        "bad_records": 0, "mode": "full", "proven_shards": 0, "unproven_shards": 0, "packs": 0, "packs_nbytes": 0,
    }  # fmt: skip
    assert sum(seen) == nbytes_to_verify(store) == nbytes


def test_verify_names_exactly_the_ten_flipped_of_many_and_moves_them_aside(full, opened):
    store, server = full
    items = random.Random(5).sample(all_items(store.catalog), 10)
    paths = [_path(store, item) for item in items]
    for path in paths:
        _flip(path)
    report = verify(opened(offline=True))
    assert (report.whole, len(report.damaged)) == (130, 10)
    for item, path in zip(items, paths, strict=True):
        (line,) = [line for line in report.damaged if str(path) in line]
        assert item.label in line and f"{item.span.nbytes} bytes" in line and "quarantine" in line
        assert not path.exists()
        assert (store.roots[0].path / "quarantine" / path.name).exists()

    again = opened()
    assert verify(again).vanished == 10
    missing = plan_fetch(again, all_items(again.catalog))
    assert {i.span for i in missing.items} == {i.span for i in items}
    fetch(again, missing.items)
    assert server.stats()["requests"] == 10
    report = verify(again)
    assert (report.whole, report.damaged, report.vanished) == (140, [], 0)


@pytest.mark.parametrize("nbytes", [0, 1, 3000, 4000])
def test_verify_finds_an_object_that_was_cut_or_has_grown(full, nbytes):
    store, _ = full
    path = _path(store, expert_items(store.catalog, [1], [0])[0])
    assert path.stat().st_size == 3264
    os.truncate(path, nbytes)
    (line,) = verify(store).damaged
    assert str(path) in line and f"{nbytes} bytes" in line


def test_verify_changes_nothing_in_a_root_that_is_only_read(full, opened, tmp_path):
    store, _ = full
    other = tmp_path / "other"
    shutil.copytree(store.roots[0].path, other)
    path = other / _path(store, expert_items(store.catalog, [1], [0])[0]).relative_to(store.roots[0].path)
    _flip(path)
    report = verify(opened(roots=[other]))
    assert report.whole == 140 + 139
    assert len(report.damaged) == 1 and str(path) in report.damaged[0] and "quarantine" not in report.damaged[0]
    assert path.exists() and not (other / "quarantine").exists()


def test_whole_objects_that_no_record_names_are_counted(full):
    store, _ = full
    (store.roots[0].path / "objects.log").unlink()
    report = verify(Store(store.catalog, [Root(store.roots[0].path)], [], None, "without its log"))
    assert (report.whole, report.unknown, report.damaged) == (140, 140, [])


def test_a_damaged_object_that_no_record_names_is_moved_aside_too(full):
    store, _ = full
    name, folder = "ab" + "0" * 62, store.roots[0].path / "objects" / "ab"
    folder.mkdir(exist_ok=True)
    (folder / name).write_bytes(b"not what its name says")
    report = verify(store)
    assert report.whole == 140
    (line,) = report.damaged
    assert name in line and "named by no record" in line
    assert (store.roots[0].path / "quarantine" / name).exists()


def test_damaged_records_of_the_log_are_counted_and_cost_only_themselves(full, opened):
    store, _ = full
    log = store.roots[0].log.path
    data = bytearray(log.read_bytes())
    data[128 * 3 + 50] ^= 1
    data[128 * 77 + 5] ^= 1
    log.write_bytes(data)
    again = opened(offline=True)
    report = verify(again)
    assert (report.bad_records, report.whole, report.unknown, report.damaged) == (2, 140, 2, [])
    assert sum(again.is_local(item.span) for item in all_items(again.catalog)) == 138


def test_files_that_are_not_named_like_objects_are_none(full):
    store, _ = full
    folder = store.roots[0].path / "objects" / "ab"
    folder.mkdir(exist_ok=True)
    for name in (".DS_Store", "notes.txt", "cd" + "0" * 62, "AB" + "0" * 62, "ab" + "0" * 63):
        (folder / name).write_bytes(b"somebody else's")
    report = verify(store)
    assert (report.whole, report.damaged, report.unknown) == (140, [], 0)
    assert read_status(store).cache_objects == 140


def test_an_object_removed_while_it_is_being_verified_is_gone_and_not_damaged(full, monkeypatch):
    store, _ = full
    victim = _path(store, expert_items(store.catalog, [5], [7])[0])
    real = Root.object_files

    def listing(root):
        yield from list(real(root))
        victim.unlink(missing_ok=True)

    monkeypatch.setattr(Root, "object_files", listing)
    report = verify(store)
    assert (report.whole, report.damaged, report.vanished) == (139, [], 1)


def test_an_object_that_cannot_be_read_is_damaged_and_the_rest_is_still_checked(full, monkeypatch):
    store, _ = full
    victim, real = _path(store, expert_items(store.catalog, [5], [7])[0]), open

    def failing(path, *args, **keywords):
        if str(path) == str(victim):
            raise OSError(5, "Input/output error")
        return real(path, *args, **keywords)

    monkeypatch.setattr("deltafin.store.verifying.open", failing, raising=False)
    report = verify(store)
    assert report.whole == 139
    assert len(report.damaged) == 1 and str(victim) in report.damaged[0] and "Input/output" in report.damaged[0]


def test_verify_compares_local_shards_with_their_published_digests(hub, opened, tiny_dir, tmp_path):
    hub(tiny_dir)
    shards = tmp_path / "shards"
    shutil.copytree(tiny_dir, shards)
    report = verify(opened(roots=[shards]))
    assert (report.whole, report.damaged, report.unproven_shards) == (12, [], 0)
    assert report.whole_nbytes == sum(p.stat().st_size for p in tiny_dir.glob("*.safetensors"))
    _flip(shards / "model-00003-of-000012.safetensors")
    report = verify(opened(roots=[shards]))
    assert report.whole == 11
    path = shards / "model-00003-of-000012.safetensors"
    assert report.damaged == [
        f"{path}: SHA-256 differs from the published one: the spine of layer 2 (bytes from 68728)"
    ]
    assert (shards / "model-00003-of-000012.safetensors").exists(), "an original shard is never moved"


def test_local_shards_without_published_digests_are_counted_as_unproven(opened, tiny_dir):
    report = verify(opened(tiny_dir))
    assert (report.whole, report.damaged, report.unproven_shards) == (0, [], 12)


def test_links_and_folders_among_the_objects_are_neither_read_nor_counted(full, tmp_path):
    store, _ = full
    folder = store.roots[0].path / "objects" / "ab"
    folder.mkdir(exist_ok=True)
    outside = tmp_path / "outside"
    outside.write_bytes(b"x" * 100)
    (folder / ("ab" + "0" * 62)).symlink_to(outside)
    (folder / ("ab" + "1" * 62)).mkdir()
    os.mkfifo(folder / ("ab" + "2" * 62))
    report = verify(store)
    assert (report.whole, report.damaged, report.unknown) == (140, [], 0)
    assert read_status(store).cache_objects == 140


# ---- status ---------------------------------------------------------------------------------------------


def test_status_of_a_full_cache_says_all_of_it(full):
    store, _ = full
    items = all_items(store.catalog)
    spine = sum(i.span.nbytes for i in items if i.expert is None)
    status = read_status(store)
    assert json.loads(json.dumps(status.as_json())) == {
        "model": "test/model",
        "identity": f"test/model@{'a' * 12}",
        "spine_nbytes": spine,
        "spine_present_nbytes": spine,
        "experts": 128,
        "experts_present": 128,
        "expert_nbytes": 3264,
        "layers_whole": 9,
        "layers": 9,
        "cache_dir": str(store.roots[0].path),
        "cache_objects": 140,
        "cache_nbytes": sum(i.span.nbytes for i in items),
        "free_nbytes": status.free_nbytes,
        "proven_spans": 0,
        "proven_nbytes": 0,
        "unproven_spans": 140,
        "unproven_nbytes": sum(i.span.nbytes for i in items),
        "roots": [
            {
                "path": str(store.roots[0].path),
                "objects": 140,
                "nbytes": sum(i.span.nbytes for i in items),
                "free_nbytes": status.roots[0].free_nbytes,
                "writable": True,
                "budget": None,
                "room": status.roots[0].room,
            }
        ],
        "pinned_experts": 0,
        "states": 0,
        "states_nbytes": 0,
        "last_verify": None,
        "shard_directories": [],
        "packs": [],
    }
    assert abs(status.free_nbytes - shutil.disk_usage(store.roots[0].path).free) < 1 << 30


def test_status_counts_what_is_missing_by_kind_and_layer(full):
    store, _ = full
    _path(store, expert_items(store.catalog, [2], [0])[0]).unlink()
    _path(store, expert_items(store.catalog, [2], [1])[0]).unlink()
    layer_5 = [i for i in spine_items(store.catalog) if i.layer == 5]
    for item in layer_5:
        _path(store, item).unlink()
    status = read_status(store)
    assert (status.experts_present, status.layers_whole) == (126, 7)
    assert status.spine_nbytes - status.spine_present_nbytes == sum(i.span.nbytes for i in layer_5)
    assert status.cache_objects == 140 - 2 - len(layer_5)


def test_status_of_a_local_model_finds_everything_in_place(opened, tiny_dir):
    status = read_status(opened(tiny_dir))
    assert (status.experts_present, status.layers_whole, status.cache_objects) == (128, 9, 0)
    assert status.shard_directories == [str(tiny_dir)]


def test_status_of_a_local_model_that_changed_is_an_error(opened, tiny_dir, tmp_path):
    shutil.copytree(tiny_dir, tmp_path / "model")
    opened(tmp_path / "model").close()
    os.truncate(tmp_path / "model" / "model-00003-of-000012.safetensors", 999)
    with pytest.raises(BadCatalog, match=r"model-00003.*changed since it was indexed"):
        read_status(opened(tmp_path / "model"))


# ---- plans and removal ----------------------------------------------------------------------------------


def test_a_plan_takes_what_is_missing_in_order_up_to_a_limit(hub_store):
    store, _ = hub_store()
    fetch(store, expert_items(store.catalog, [1], [2, 3]))
    items = expert_items(store.catalog, [1], range(6))
    nbytes = store.catalog.expert_nbytes
    plan = plan_fetch(store, items)
    assert ([i.expert for i in plan.items], plan.present, plan.present_nbytes) == ([0, 1, 4, 5], 2, 2 * nbytes)
    assert plan.nbytes == 4 * nbytes
    for limit, taken in ((0, 0), (nbytes - 1, 0), (nbytes, 1), (3 * nbytes, 3), (10**9, 4)):
        assert len(plan_fetch(store, items, limit).items) == taken
    backwards = plan_fetch(store, pair_items(store.catalog, [(1, 5), (1, 2), (1, 0)]), nbytes)
    assert [i.expert for i in backwards.items] == [5]


def test_everything_is_everything_once_in_file_order(opened, tiny_dir):
    store = opened(tiny_dir)
    items = all_items(store.catalog)
    where = [(i.span.shard, i.span.offset) for i in items]
    assert where == sorted(where)
    ends = [(shard, offset + item.span.nbytes) for (shard, offset), item in zip(where, items, strict=True)]
    assert all(a <= b or a[0] != b[0] for a, b in zip(ends, where[1:], strict=False)), "no byte twice"
    ignored = store.catalog.totals.ignored_nbytes
    assert sum(i.span.nbytes for i in items) == store.catalog.totals.tensor_nbytes - ignored


def test_removal_takes_what_was_named_and_a_second_time_nothing(full):
    store, _ = full
    items = expert_items(store.catalog, [1, 2], [0, 1, 2])
    assert len(removable(store, items)) == 6
    remove(store, items)
    assert not any(store.is_local(i.span) for i in items)
    assert read_status(store).experts_present == 122
    assert removable(store, items) == []
    remove(store, items)


def test_what_is_removed_is_believed_anew_when_it_comes_again(full, opened, tiny_truth):
    """A digest learnt from an altered transfer would otherwise refuse the right bytes for ever."""
    store, server = full
    (item,) = expert_items(store.catalog, [3], [5])
    store.roots[0].log.forget(store.key(item.span))
    server.set_mode("corrupt_byte", at=3)
    altered = opened()
    fetch(altered, [item])
    server.set_mode("ok")
    with pytest.raises(Corrupt, match=r"contradict the digest on record .*df-fetch rm forgets it"):
        _path(altered, item).unlink()
        fetch(altered, [item])
    remove(altered, [item])
    again = opened()
    assert not again.is_local(item.span)
    assert [slot.tobytes() for _, slot in again.experts(3, [5])] == [tiny_truth.expert(3, 5)]
    assert [slot.tobytes() for _, slot in opened(offline=True).experts(3, [5])] == [tiny_truth.expert(3, 5)]


def test_an_object_that_other_spans_share_is_kept(hub_store, opened, tiny_dir, tmp_path):
    """Two experts of equal content are one object; it goes only when both are to go."""
    model = tmp_path / "model"
    shutil.copytree(tiny_dir, model)
    with opened(model) as local:
        one, two = local.catalog.expert_spans(3, [4, 5])
        path = model / local.catalog.shards[one.shard].name
    blob = bytearray(path.read_bytes())
    blob[two.offset : two.offset + two.nbytes] = blob[one.offset : one.offset + one.nbytes]
    path.write_bytes(blob)

    store, _ = hub_store(directory=model)
    first, second, other = expert_items(store.catalog, [3], [4, 5, 6])
    fetch(store, [first, second, other])
    assert read_status(store).cache_objects == 2
    assert removable(store, [first]) == []
    assert len(removable(store, [first, other])) == 1
    assert len(removable(store, [first, second])) == 1
    remove(store, [first, second])
    assert [store.is_local(item.span) for item in (first, second, other)] == [False, False, True]


def test_removing_forgets_a_digest_that_was_learnt_wrong(hub_store):
    """An altered first transfer must not refuse the right bytes for ever."""
    store, server = hub_store()
    (item,) = expert_items(store.catalog, [3], [4])
    server.set_mode("corrupt_byte", at=5)
    fetch(store, [item])
    server.set_mode("ok")
    store.roots[0].object_path(store.roots[0].find(store.key(item.span))).unlink()
    with pytest.raises(Corrupt, match="df-fetch rm"):
        fetch(store, [item])
    remove(store, [item])
    fetch(store, [item])
    assert store.is_local(item.span)
    assert Root(store.roots[0].path).find(store.key(item.span)) is not None
