"""Where the parts of the store meet: several writable roots with proofs, claims, repair and placement."""

from __future__ import annotations

import os
import shutil
from dataclasses import replace

import numpy as np
import pytest

from deltafin.errors import DiskError
from deltafin.store import (
    Prover,
    RootSpec,
    all_items,
    expert_items,
    fetch,
    import_manifest,
    make_manifest,
    open_store,
    plan_fetch,
    plan_repair,
    read_status,
    repair,
    rest_items,
    settle_all,
    verify,
)

LAYER = 3


@pytest.fixture
def two(hub, opened, tiny_dir, full_cache, tmp_path):
    """`two()`: a store with an empty cache and one more writable root; and the hub's manifest of everything."""
    server = hub(tiny_dir)
    shutil.copytree(full_cache / "catalogs", tmp_path / "cache" / "catalogs")
    (tmp_path / "a").mkdir()

    def open_(**keywords):
        return opened(roots=[RootSpec(tmp_path / "a", write=True)], **keywords)

    return open_, server


@pytest.fixture
def manifest(full_cache, tmp_path, policy):
    """Everything of tiny, as proven."""
    shutil.copytree(full_cache, tmp_path / "elsewhere")
    with open_store("test/model", cache_dir=tmp_path / "elsewhere", offline=True, policy=policy) as store:
        made = make_manifest(store, partial=True, unproven=True)
    return replace(made, proven=np.ones(len(made), bool))


def _expert(store, number=0):
    (item,) = expert_items(store.catalog, [LAYER], [number])
    return item


def test_what_a_manifest_contradicts_in_another_root_is_never_read(two, manifest, tiny_truth, new_slot):
    open_, _ = two
    store = open_()
    item = _expert(store)
    true = tiny_truth.expert(LAYER, 0)
    wrong = bytes([true[0] ^ 1]) + true[1:]
    import_manifest(store, manifest)
    store.roots[1].publish(store.key(item.span), memoryview(wrong))  # as one that knew of no proof left it
    assert read_status(store).experts_present == 0
    assert [i.span for i in plan_fetch(store, [item]).items] == [item.span]
    got = store.read(item.span, new_slot(item.span.nbytes), expert=item.address)
    assert bytes(got) == true
    assert plan_fetch(store, [item]).items == ()


def test_digests_of_what_is_not_here_weigh_nothing_when_a_root_is_chosen(two, manifest):
    open_, _ = two
    store = open_()
    import_manifest(store, manifest)
    fetch(store, expert_items(store.catalog, [LAYER], range(16)))
    assert all(sum(1 for _ in root.object_files()) >= 4 for root in store.roots)


def test_the_objects_of_any_root_whose_log_is_lost_are_recorded_again(two):
    open_, _ = two
    store = open_()
    fetch(store, expert_items(store.catalog, [LAYER], range(16)))
    there = store.roots[1]
    names = [name for name, _ in there.object_files()]
    assert names
    # What another root knows of them, as after proving.
    for key, entry in list(there.log.entries.items()):
        store.roots[0].log.append(key, entry._replace(proven=True, held=False))
    store.close()
    there.log.path.unlink()
    store = open_(offline=True)
    report = verify(store)
    assert report.unknown == len(names)
    done = repair(store, plan_repair(store, report))
    assert done.rerecorded == len(names)
    assert plan_fetch(store, expert_items(store.catalog, [LAYER], range(16))).items == ()


def test_damage_that_cannot_be_repaired_is_said(opened, tiny_dir, tmp_path, full_cache, hub):
    """A damaged shard in place without any digest on record: nobody knows which bytes."""
    hub(tiny_dir)
    shutil.copytree(full_cache / "catalogs", tmp_path / "cache" / "catalogs")
    shards = tmp_path / "shards"
    shutil.copytree(tiny_dir, shards)
    victim = sorted(shards.glob("*.safetensors"))[2]
    data = bytearray(victim.read_bytes())
    data[-9] ^= 1
    victim.write_bytes(data)
    store = opened(roots=[RootSpec(shards)])
    report = verify(store)
    assert len(report.damaged) == 1
    done = repair(store, plan_repair(store, report))
    assert len(done.unrepaired) == 1


def test_what_a_manifest_contradicts_goes_to_quarantine_in_every_root(two, manifest, tiny_truth):
    open_, _ = two
    store = open_()
    item = _expert(store)
    other = store.roots[1]
    true = tiny_truth.expert(LAYER, 0)
    entry = other.publish(store.key(item.span), memoryview(bytes([true[0] ^ 1]) + true[1:]))
    assert import_manifest(store, manifest).replaced == 1
    assert not other.has(entry) and (other.path / "quarantine" / entry.sha256.hex()).exists()
    assert store.known(item.span).proven and store.key(item.span) not in other.log.entries


def test_a_copy_that_is_gone_is_asked_for_once(two):
    """Its record says that it is held; nobody removed it on purpose."""
    open_, _ = two
    store = open_()
    items = expert_items(store.catalog, [LAYER], range(16))
    fetch(store, items)
    for item in items:  # a copy of everything in both roots
        root, entry = store.object_of(item.span)
        other = store.roots[0 if root is store.roots[1] else 1]
        other.publish(store.key(item.span), memoryview(root.object_path(entry).read_bytes()))
    shutil.rmtree(store.roots[1].path / "objects")
    holders = set()
    for item in items:
        for copy in store.copies(item.span):
            if copy.holder is store.roots[1]:
                holders.add(item)
                with pytest.raises(DiskError) as failure:
                    copy.read_piece(0, 8, np.zeros(8192, np.uint8))
                store._local.failed_piece(copy, failure.value)
    assert len(holders) == 16
    assert all(len(store.copies(item.span)) == 1 for item in items)


def test_what_is_fetched_again_counts_before_a_root_that_is_only_read(
    hub, opened, tiny_dir, full_cache, tmp_path, tiny_truth
):
    """A shard whose first bytes were wrong, in a root that is only read, can still be proven."""
    hub(tiny_dir)
    for name in ("cache", "old", "new"):
        (tmp_path / name).mkdir()
    shutil.copytree(full_cache / "catalogs", tmp_path / "cache" / "catalogs")
    config = tmp_path / "config.toml"
    config.write_text("[cache]\nbudget = 100\n")
    roots = [RootSpec(tmp_path / "old"), RootSpec(tmp_path / "new", write=True)]
    store = opened(roots=roots, environ={**os.environ, "DELTAFIN_CONFIG": str(config)})
    item = _expert(store)
    true = tiny_truth.expert(LAYER, 0)
    old = next(root for root in store.roots if root.path == tmp_path / "old")
    old.publish(store.key(item.span), memoryview(bytes([true[0] ^ 1]) + true[1:]))
    items = [i for i in (*all_items(store.catalog), *rest_items(store.catalog)) if i.span.shard == item.span.shard]
    plan = plan_fetch(store, items)
    with Prover(store, (i.span for i in plan.items), [item.span.shard]) as prover:
        fetch(store, plan.items, take=prover.take)
        verdicts = prover.finish()
    assert [verdict.proven for verdict in verdicts] == [False]
    settle_all(store, verdicts)
    assert store.known(item.span).proven


def test_an_object_that_another_model_has_on_record_is_not_evicted_though_it_came_in_this_run(
    hub, opened, tiny_dir, full_cache, tmp_path, tiny_truth
):
    """Two revisions of a model share experts: one file, and a record for each."""
    hub(tiny_dir)
    shutil.copytree(full_cache / "catalogs", tmp_path / "cache" / "catalogs")
    config = tmp_path / "config.toml"
    config.write_text("[cache]\nbudget = 4000\nreserve = 0\n")
    store = opened(environ={**os.environ, "DELTAFIN_CONFIG": str(config)})
    root, first, second = store.roots[0], _expert(store), _expert(store, 1)
    true = memoryview(tiny_truth.expert(LAYER, 0))
    root.publish(b"of another revision".ljust(48), true)
    for _ in range(3):
        store.stats.visit_expert(LAYER, 1)
    evictor = store.keeper._evictor
    assert not evictor.make_room(root, 4000, (LAYER, 1)), "nothing of this model is there"
    entry = root.publish(store.key(first.span), true)
    evictor.kept(root, entry, (LAYER, 0), store.key(first.span))
    assert not evictor.make_room(root, second.span.nbytes, (LAYER, 1))
    assert root.has(entry)


def test_a_shard_fetched_once_more_lies_where_it_lay(two):
    """Of what came as before no second copy is made, though another root has more room."""
    open_, server = two
    server.set_mode("ok")
    items = [item for item in all_items(open_().catalog) if item.span.shard == LAYER]
    with open_() as store:
        fetch(store, items)
        before = {item: store.object_of(item.span)[0].path for item in items}
    with open_() as store:
        fetch(store, items, anew=True)
        assert {item: store.object_of(item.span)[0].path for item in items} == before
        assert sum(len(list(root.object_files())) for root in store.roots) == len(items)
