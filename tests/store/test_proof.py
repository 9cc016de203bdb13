"""Bytes that arrive are unproven until a whole shard has its published SHA-256; what does not is found and replaced."""

from __future__ import annotations

import logging
import shutil

import pytest

from deltafin.errors import Corrupt
from deltafin.store import (
    Prover,
    all_items,
    expert_items,
    fetch,
    plan_fetch,
    read_status,
    rest_items,
    settle,
    verify,
)
from deltafin.store.objectlog import ObjectLog
from deltafin.store.spantable import REST, span_table

SHARDS = 12


def _everything(store):
    items = [*all_items(store.catalog), *rest_items(store.catalog)]
    return sorted(items, key=lambda item: (item.span.shard, item.span.offset))


def _fetch_all(store):
    """What `df-fetch all` does."""
    plan = plan_fetch(store, _everything(store))
    with Prover(store, (item.span for item in plan.items)) as prover:
        fetch(store, plan.items, take=prover.take)
        return prover.finish()


def _experts(store, layer, ids):
    return {expert: slot.tobytes() for expert, slot in store.experts(layer, ids)}


def _fetched(store) -> int:
    """Spans that this store has brought over HTTP."""
    return store.stats.snapshot()["http_spans"]


def _unproven(store):
    return [item for item in _everything(store) if not ((e := store.known(item.span)) and e.proven)]


@pytest.mark.parametrize("directory", ["tiny_dir", "spine_first_dir", "odd_dir", "demo_dir"])
def test_the_table_covers_every_byte_of_every_shard_once(opened, request, directory):
    store = opened(request.getfixturevalue(directory))
    table = span_table(store.catalog).with_rest(store.catalog)
    for number, shard in enumerate(store.catalog.shards):
        own, at = table.of_shard(number), 0
        for offset, nbytes in zip(own.offset.tolist(), own.nbytes.tolist(), strict=True):
            assert offset == at and nbytes > 0
            at += nbytes
        assert at == shard.nbytes
    text = [(item.span, item.layer, item.expert) for item in all_items(store.catalog)]
    rows = [row for row in range(len(table)) if table.layer[row] != REST]
    experts = [None if table.expert[row] < 0 else table.expert[row] for row in rows]
    assert text == [(table.span(row), table.layer[row], e) for row, e in zip(rows, experts, strict=True)]
    assert [store.key(table.span(row)) for row in range(len(table))] == table.keys(store.shard_ids)
    assert [item.label for item in all_items(store.catalog)] == [table.label(row) for row in rows]


def test_what_is_fetched_shard_by_shard_is_proven_as_it_comes_and_stays_so(hub_store, opened, caplog):
    store, server = hub_store()
    with caplog.at_level(logging.INFO, "deltafin"):
        verdicts = _fetch_all(store)
    assert [(v.shard, v.proven) for v in verdicts] == [(n, True) for n in range(SHARDS)]
    assert sum("published SHA-256" in r.message for r in caplog.records) == SHARDS
    assert _unproven(store) == []
    status = read_status(opened(offline=True))
    assert (status.proven_spans, status.unproven_spans) == (140, 0)
    assert server.stats()["bytes_sent"] < 1.3 * sum(s.nbytes for s in store.catalog.shards)


def test_experts_alone_are_unproven_and_the_rest_that_comes_later_proves_them_with_no_byte_twice(hub_store, opened):
    store, _ = hub_store()
    fetch(store, expert_items(store.catalog, store.catalog.config.moe_layers, range(5, 12)))
    assert (read_status(store).proven_spans, read_status(store).unproven_spans) == (0, 56)
    second = opened()
    assert all(v.proven for v in _fetch_all(second))
    assert _fetched(store) + _fetched(second) == 154
    assert read_status(opened(offline=True)).unproven_spans == 0


def test_a_proof_needs_one_write_and_no_second_one(hub_store, opened):
    store, _ = hub_store()
    _fetch_all(store)
    nbytes = store.roots[0].log.path.stat().st_size
    assert nbytes == 2 * 128 * 154, "one record on arrival, one when proven"
    assert _fetch_all(opened()) == []
    assert verify(opened(offline=True)).proven_shards == 0
    assert store.roots[0].log.path.stat().st_size == nbytes


def test_verify_proves_what_is_here_as_objects_without_the_network(hub_store, opened):
    store, server = hub_store()
    fetch(store, _everything(store))
    assert len(_unproven(store)) == 154
    store.close()
    server.set_mode("gone_404")
    report = verify(opened(offline=True))
    assert (report.proven_shards, report.whole, report.damaged) == (SHARDS, 154, [])
    assert _unproven(opened(offline=True)) == []


# ---- a shard that is not what was published ------------------------------------------------------------------


def _spoil(store, *items):
    """Records other bytes than the shard's for some spans, as an altered first transfer would have."""
    root = store.roots[0]
    for item in items:
        view = bytearray(item.span.nbytes)
        store.fetch(item.span, memoryview(view), expert=item.address)
        root.log.forget(store.key(item.span))
        view[item.span.nbytes // 2] ^= 1
        root.publish(store.key(item.span), memoryview(view))


def test_a_span_that_first_came_altered_is_found_fetched_again_and_all_is_proven(
    hub_store, opened, caplog, span_bytes, tiny_dir
):
    store, _ = hub_store()
    victims = expert_items(store.catalog, [3, 5], [2, 9])
    _spoil(store, *victims)
    verdicts = _fetch_all(store)
    wrong = sorted({item.span.shard for item in victims})
    assert sorted(v.shard for v in verdicts if not v.proven) == wrong
    assert all(len(_unproven_of(store, number)) > 0 for number in wrong)
    before = _fetched(store)
    for verdict in verdicts:
        if not verdict.proven:
            settle(store, verdict)
    assert _unproven(store) == []
    assert _fetched(store) - before == sum(v.spans for v in verdicts if not v.proven)
    assert len(list((store.roots[0].path / "quarantine").iterdir())) == 4
    assert sum("came otherwise this time" in r.message for r in caplog.records) == 4
    again = opened(offline=True)
    for item in victims:
        root, entry = again.object_of(item.span)
        assert root.object_path(entry).read_bytes() == span_bytes(again, tiny_dir, item.span)


def _unproven_of(store, number):
    return [item for item in _unproven(store) if item.span.shard == number]


def test_verify_finds_that_sound_objects_are_not_together_what_was_published(hub_store, opened):
    """Each object has the name that its content calls for: only the whole shard tells."""
    store, _ = hub_store()
    (victim,) = expert_items(store.catalog, [4], [6])
    _spoil(store, victim)
    fetch(store, plan_fetch(store, _everything(store)).items)
    report = verify(opened(offline=True))
    assert report.proven_shards == SHARDS - 1
    name = store.catalog.shards[victim.span.shard].name
    assert len(report.damaged) == 1 and report.damaged[0].startswith(f"{name}: its objects do not have, together")
    assert report.doubtful_shards == [victim.span.shard]


def test_two_experts_whose_records_were_swapped_are_found(hub_store, opened, tiny_truth):
    """Right size, wrong place: objects and records are sound, and only a whole shard or a manifest can tell."""
    store, _ = hub_store()
    fetch(store, _everything(store))
    log = store.roots[0].log
    one, two = (store.key(item.span) for item in expert_items(store.catalog, [2], [3, 7]))
    log.append_all([(one, log.entries[two]), (two, log.entries[one])])
    store.close()
    swapped = opened()
    report = verify(swapped)
    assert report.proven_shards == SHARDS - 1 and len(report.doubtful_shards) == 1
    with Prover(swapped, shards=report.doubtful_shards) as prover:
        (verdict,) = prover.finish()
    settle(swapped, verdict)
    assert _unproven(swapped) == []
    assert _experts(swapped, 2, [3, 7]) == {e: tiny_truth.expert(2, e) for e in (3, 7)}


def test_once_proven_swapped_records_are_not_believed(hub_store, opened, tiny_truth):
    store, _ = hub_store()
    _fetch_all(store)
    log = store.roots[0].log
    one, two = (store.key(item.span) for item in expert_items(store.catalog, [2], [3, 7]))
    first, second = (log.entries[key]._replace(proven=False) for key in (one, two))
    other = ObjectLog(log.path)
    other.entries.clear()  # a writer that knows of no proof
    other.append_all([(one, second), (two, first)])
    assert ObjectLog(log.path).entries == log.entries
    assert _experts(opened(offline=True), 2, [3, 7]) == {e: tiny_truth.expert(2, e) for e in (3, 7)}


def test_a_source_that_sends_altered_bytes_again_and_again_is_named_and_nothing_of_it_is_believed(
    hub_store, opened, tiny_dir
):
    store, server = hub_store()
    number, path = 4, "model-00005*"
    server.set_mode("corrupt_byte", at=2, path=path)
    verdicts = _fetch_all(store)
    (bad,) = [v for v in verdicts if not v.proven]
    assert bad.shard == number
    with pytest.raises(Corrupt, match=r"model-00005-of-000012.*although every span was fetched twice"):
        settle(store, bad)
    assert all(not store.is_local(item.span) for item in _everything(store) if item.span.shard == number)
    assert {item.span.shard for item in _unproven(opened(offline=True))} == {number}
    server.set_mode("ok")
    assert [v.proven for v in _fetch_all(opened())] == [True]


def test_without_published_digests_nothing_is_proven_and_nothing_is_asked(opened, tiny_dir):
    store = opened(tiny_dir)
    assert rest_items(store.catalog) == []
    with Prover(store) as prover:
        assert (prover.left_nbytes, prover.finish()) == (0, [])


def test_a_fetch_that_stops_half_way_leaves_whole_shards_proven_and_the_next_goes_on(hub_store, opened):
    store, _ = hub_store()
    items = _everything(store)
    count = 0

    def enough():
        nonlocal count
        count += 1
        return count > 100

    with Prover(store, (item.span for item in items)) as prover:
        fetch(store, items, enough=enough, take=prover.take)
        verdicts = prover.finish()
    assert 0 < len(verdicts) < SHARDS and all(v.proven for v in verdicts)
    second = opened()
    rest = _fetch_all(second)
    assert len(verdicts) + len(rest) == SHARDS and all(v.proven for v in rest)
    assert _fetched(store) + _fetched(second) == 154


# ---- original shards in place ----------------------------------------------------------------------------------


@pytest.fixture
def in_place(hub, opened, full_cache, tiny_dir, tmp_path):
    """A catalog with published digests, and the shards in a directory of the test's own."""
    hub(tiny_dir)
    shutil.copytree(full_cache / "catalogs", tmp_path / "cache" / "catalogs")
    shutil.copytree(tiny_dir, tmp_path / "shards")
    return lambda: opened(roots=[tmp_path / "shards"], offline=True), tmp_path / "shards"


def _exchange(path, one, two):
    data = bytearray(path.read_bytes())
    a, b = (data[span.offset : span.offset + span.nbytes] for span in (one, two))
    data[one.offset : one.offset + one.nbytes], data[two.offset : two.offset + two.nbytes] = b, a
    path.write_bytes(data)


def test_verified_shards_in_place_have_proven_spans(in_place):
    open_, _ = in_place
    assert (read_status(open_()).proven_spans, read_status(open_()).unproven_spans) == (0, 140)
    assert verify(open_()).proven_shards == SHARDS
    assert (read_status(open_()).proven_spans, read_status(open_()).unproven_spans) == (140, 0)
    store = open_()
    assert not (store.roots[0].path / "objects").exists(), "nothing was copied"
    (copy,) = store.copies(store.catalog.expert_spans(1, [0])[0])
    assert copy.drive is store.shard_directories[0].drive, (
        "a digest alone does not make reads wait for the cache's drive"
    )


def test_experts_exchanged_in_a_shard_are_refused_at_first_use_and_named_by_verify(in_place, tiny_truth, caplog):
    open_, shards = in_place
    store = open_()
    verify(store)
    one, two = store.catalog.expert_spans(6, [1, 8])
    _exchange(shards / store.catalog.shards[one.shard].name, one, two)
    late = open_()
    with pytest.raises(Corrupt, match=r"contradict their proven digest"):
        list(late.experts(6, [8]))
    assert "passed over" in caplog.text
    assert _experts(late, 6, [2]) == {2: tiny_truth.expert(6, 2)}
    report = verify(open_())
    assert len(report.damaged) == 1
    assert "expert 1 of layer 6" in report.damaged[0] and "expert 8 of layer 6" in report.damaged[0]
    assert sorted(report.wrong_spans, key=lambda s: s.offset) == sorted([one, two], key=lambda s: s.offset)


def test_rows_of_a_table_in_a_damaged_shard_are_refused_too(in_place):
    open_, shards = in_place
    store = open_()
    verify(store)
    span = store.catalog.embedding().spans[0]
    path = shards / store.catalog.shards[span.shard].name
    data = bytearray(path.read_bytes())
    data[span.offset + 5] ^= 1
    path.write_bytes(data)
    with pytest.raises(Corrupt, match="contradict their proven digest"):
        open_().embedding([200])


def test_a_root_whose_record_contradicts_a_proof_is_passed_over(
    full_cache, hub, opened, tiny_dir, tmp_path, tiny_truth
):
    """Another root holds other bytes under a sound name: what is proven here decides."""
    hub(tiny_dir)
    shutil.copytree(full_cache / "catalogs", tmp_path / "cache" / "catalogs")
    store = opened()
    _fetch_all(store)
    (item,) = expert_items(store.catalog, [1], [1])
    other = opened(cache_dir=tmp_path / "other")
    _spoil(other, item)
    _, own = store.object_of(item.span)
    store.roots[0].remove(own)
    both = opened(roots=[tmp_path / "other"], offline=True)
    assert not both.is_local(item.span)
    assert _experts(opened(roots=[tmp_path / "other"]), 1, [1]) == {1: tiny_truth.expert(1, 1)}


def test_a_record_is_proven_only_by_the_very_bytes_it_is_of(full_cache, hub, opened, tiny_dir, tmp_path, tiny_truth):
    """One root's object is damaged and its record wrong, another has the right bytes: the record stays unproven."""
    hub(tiny_dir)
    other = tmp_path / "other"
    shutil.copytree(full_cache, other)
    store = opened(roots=[other])
    (item,) = expert_items(store.catalog, [3], [5])
    root, key = store.roots[0], store.key(item.span)
    view = bytearray(item.span.nbytes)
    wrong = root.publish(key, memoryview(view))
    with open(root.object_path(wrong), "r+b") as f:
        f.write(b"x")
    again = opened(roots=[other])
    fetch(again, [i for i in rest_items(again.catalog) if i.span.shard == item.span.shard])
    with Prover(again, shards=[item.span.shard]) as prover:
        assert prover.finish() == []
    assert not again.known(item.span).proven
    assert not any(entry.proven for entry in opened(roots=[other]).roots[0].log.entries.values())
