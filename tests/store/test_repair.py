"""`verify --repair`: what is damaged or lost comes back, and nothing else is fetched."""

from __future__ import annotations

import itertools
import json
import os
import random
import shutil
import threading
import zlib

import pytest

from deltafin.errors import BadCatalog, Corrupt
from deltafin.indexer import Catalog
from deltafin.store import (
    PackFormat,
    Prover,
    all_items,
    expert_items,
    fetch,
    mend_logs,
    plan_repair,
    quick_verify,
    read_status,
    rebuild_catalog,
    remove,
    repair,
    rest_items,
    verify,
)
from deltafin.store.logrepair import Mended, corrected, mend_log, syndromes
from deltafin.store.objectlog import RECORD_NBYTES, ObjectEntry, ObjectLog, pack_record, span_key
from deltafin.store.verifystate import STATE_NAME, VerifyState, read_result, write_result


def _records(count, **fields):
    return [
        pack_record(
            span_key(bytes([i]) * 32, 64 * i, 100 + i), ObjectEntry(bytes([i]) * 32, bytes(16), 100 + i, **fields)
        )
        for i in range(count)
    ]


def _mended(opened, **keywords):
    """What `df-fetch verify --repair` does; the store, what was found, and what was done."""
    store = opened(**keywords)
    records = mend_logs(store)
    report = verify(store)
    done = repair(store, plan_repair(store, report))
    done.corrected_records = records.corrected
    return store, report, done


def _flip(path, at, mask=4):
    data = bytearray(path.read_bytes())
    data[at] ^= mask
    path.write_bytes(data)


def _is_as_it_was(store, objects, before):
    now = {name: path.read_bytes() for name, path in objects(store.roots[0].path).items()}
    assert now == before
    assert read_status(store).layers_whole == 9


@pytest.fixture
def before(full, objects):
    store, _ = full
    return {name: path.read_bytes() for name, path in objects(store.roots[0].path).items()}


# ---- records ---------------------------------------------------------------------------------------------------------


def test_each_single_bit_of_a_record_has_a_syndrome_of_its_own():
    """And none is zero, nor that of two wrong bits: a record with two is never taken for one with one."""
    single = syndromes()
    assert len(single) == 8 * RECORD_NBYTES and 0 not in single
    assert sorted(single.values()) == list(range(8 * RECORD_NBYTES))
    pairs = {one ^ two for one, two in itertools.combinations(single, 2)}
    assert not pairs & single.keys()


def test_every_single_wrong_bit_is_turned_back():
    for record in (_records(1)[0], _records(3, proven=True, held=False)[2]):
        for bit in range(8 * RECORD_NBYTES):
            wrong = bytearray(record)
            wrong[bit // 8] ^= 1 << bit % 8
            assert corrected(bytes(wrong)) == record


def test_two_wrong_bits_and_noise_are_no_record():
    record, numbers = _records(1)[0], random.Random(3)
    for _ in range(500):
        wrong = bytearray(record)
        for bit in numbers.sample(range(8 * RECORD_NBYTES), 2):
            wrong[bit // 8] ^= 1 << bit % 8
        assert corrected(bytes(wrong)) is None
        assert corrected(numbers.randbytes(RECORD_NBYTES)) is None
    assert corrected(bytes(RECORD_NBYTES)) is None


def test_a_log_with_flipped_bits_is_afterwards_what_it_was_to_the_byte(tmp_path):
    path, whole = tmp_path / "objects.log", b"".join(_records(20))
    numbers = random.Random(7)
    for _ in range(12):
        data = bytearray(whole)
        for number in numbers.sample(range(20), 3):
            at = RECORD_NBYTES * number + numbers.randrange(RECORD_NBYTES)
            data[at] ^= 1 << numbers.randrange(8)
        path.write_bytes(data)
        log = ObjectLog(path)
        assert len(log.entries) == 17
        assert mend_log(log) == Mended(3, 0)
        assert path.read_bytes() == whole and len(log.entries) == 20
    assert mend_log(ObjectLog(path)) == Mended()


def test_garbage_goes_and_every_record_stays_in_its_order(tmp_path):
    path, records = tmp_path / "objects.log", _records(6)
    torn, noise = records[0][:50], bytes(range(256)) * 3
    path.write_bytes(noise + records[0] + records[1] + torn + records[2] + b"DfO1" * 9 + records[3] + torn)
    log = ObjectLog(path)
    assert sum(nbytes for _, nbytes in log.garbage) == len(noise) + 50 + 36
    done = mend_log(log)
    assert done == Mended(0, len(noise) + 50 + 36 + 50)
    assert path.read_bytes() == b"".join(records[:4])
    assert list((tmp_path / "tmp").iterdir()) == []


def test_what_others_append_while_the_log_is_replaced_is_not_lost(tmp_path, monkeypatch):
    path = tmp_path / "objects.log"
    path.write_bytes(b"rubbish" + b"".join(_records(3)))
    late = _records(40)[10:]
    from deltafin.store import logrepair

    def slow(part, final):
        """A writer that opened the old file before it was replaced, and writes after."""
        old = os.open(final, os.O_WRONLY | os.O_APPEND)
        os.write(old, late[0])
        os.replace(part, final)
        threading.Timer(0.01, lambda: (os.write(old, late[1]), os.close(old))).start()

    monkeypatch.setattr(logrepair, "publish", slow)
    reader = ObjectLog(path)
    mend_log(ObjectLog(path))
    reader.refresh()
    assert len(reader.entries) == 5 and reader.garbage == []
    assert reader.entries == ObjectLog(path).entries


def test_a_reader_notices_that_the_log_was_replaced(tmp_path):
    path = tmp_path / "objects.log"
    path.write_bytes(b"".join(_records(5)) + b"xyz" + _records(6)[5])
    reader = ObjectLog(path)
    assert (len(reader.entries), reader.bad_records) == (6, 1)
    mend_log(ObjectLog(path))
    with open(path, "ab") as f:
        f.write(_records(8)[7])
    reader.refresh()
    assert (len(reader.entries), reader.bad_records) == (7, 0)


def test_a_later_unproven_record_replaces_nothing_that_is_proven(tmp_path):
    log = ObjectLog(tmp_path / "objects.log")
    key = span_key(bytes(32), 0, 5)
    first, other = ObjectEntry(b"a" * 32, b"a" * 16, 5), ObjectEntry(b"b" * 32, b"b" * 16, 5)
    log.append(key, first)
    assert log.append_all([(key, first)]) == 0, "nothing new"
    log.append(key, first._replace(proven=True))
    assert log.append_all([(key, other), (key, first)]) == 0
    log.forget(key)
    assert ObjectLog(log.path).entries == log.entries == {key: first._replace(proven=True, held=False)}
    log.append(key, first)
    assert log.entries[key] == first._replace(proven=True)
    log.append(key, other._replace(proven=True))
    assert log.entries[key] == other._replace(proven=True), "a later proof decides"
    assert log.release([key, b"?"]) == 1 and log.release([key]) == 0
    assert log.disprove([key]) == 1
    assert ObjectLog(log.path).entries == log.entries == {}
    log.append_all([(key, first._replace(proven=True))])
    log.disprove([key])
    assert ObjectLog(log.path).entries == log.entries == {key: first}


def test_records_of_before_proofs_are_unproven_and_held(tmp_path):
    body = bytearray(_records(1, proven=True, held=False)[0][:124])
    assert body[5] == 3
    body[5] = 0
    path = tmp_path / "objects.log"
    path.write_bytes(bytes(body) + zlib.crc32(body).to_bytes(4, "little"))
    (entry,) = ObjectLog(path).entries.values()
    assert (entry.proven, entry.held) == (False, True)


# ---- objects ---------------------------------------------------------------------------------------------------------


def test_damaged_objects_are_fetched_again_and_nothing_else(full, before, opened, objects, ranges):
    store, server = full
    victims = random.Random(2).sample(all_items(store.catalog), 9)
    for item in victims:
        _flip(store.object_of(item.span)[0].object_path(store.object_of(item.span)[1]), 77)
    store.close()
    server.set_mode("ok")
    fixed, report, done = _mended(opened)
    assert (len(report.damaged), done.spans, done.unrepaired, done.changed) == (9, 9, [], [])
    assert done.nbytes == sum(item.span.nbytes for item in victims)
    names = {(fixed.catalog.shards[i.span.shard].name, i.span.offset, i.span.nbytes) for i in victims}
    assert ranges(server).keys() == names
    _is_as_it_was(fixed, objects, before)
    assert len(list((fixed.roots[0].path / "quarantine").iterdir())) == 9


def test_object_files_that_were_swapped_are_refused_at_first_use_and_both_come_again(
    full, before, opened, objects, ranges, tiny_truth
):
    """Right size, wrong place: the name of an object says what its content must be."""
    store, server = full
    one, two = (root.object_path(entry) for root, entry in map(store.object_of, store.catalog.expert_spans(3, [5, 6])))
    aside = one.with_name("aside")
    one.rename(aside)
    two.rename(one)
    aside.rename(two)
    store.close()
    reader = opened(offline=True)
    for expert in (5, 6):
        with pytest.raises(Corrupt, match="does not match its digest"):
            list(reader.experts(3, [expert]))
    server.set_mode("ok")
    fixed, _, done = _mended(opened)
    assert (done.spans, done.changed, len(ranges(server))) == (2, [], 2)
    assert {e: slot.tobytes() for e, slot in fixed.experts(3, [5, 6])} == {e: tiny_truth.expert(3, e) for e in (5, 6)}
    _is_as_it_was(fixed, objects, before)


def test_lost_objects_come_again_but_not_those_that_were_removed_on_purpose(full, before, opened, objects, ranges):
    store, server = full
    lost, gone, evicted = (expert_items(store.catalog, [layer], [1, 2]) for layer in (3, 4, 5))
    for item in lost:
        root, entry = store.object_of(item.span)
        root.object_path(entry).unlink()
    remove(store, gone)
    for item in evicted:
        root, entry = store.object_of(item.span)
        root.log.release([store.key(item.span)])
        root.remove(entry)
    store.close()
    server.set_mode("ok")
    fixed, report, done = _mended(opened)
    assert (report.damaged, report.vanished, done.spans) == ([], 2, 2)
    assert [fixed.is_local(item.span) for item in [*lost, *gone, *evicted]] == [True] * 2 + [False] * 4
    assert len(ranges(server)) == 2


def test_a_flipped_record_needs_no_network(full, before, opened, objects):
    store, server = full
    log = store.roots[0].log.path
    store.close()
    whole = log.read_bytes()
    for number in (0, 17, 139):
        _flip(log, RECORD_NBYTES * number + 5 * number % 128)
    fixed, report, done = _mended(opened, offline=True)
    assert (done.corrected_records, done.spans, report.damaged, report.unknown) == (3, 0, [], 0)
    assert log.read_bytes() == whole
    _is_as_it_was(fixed, objects, before)
    assert server.stats()["requests"] == 0


def test_a_record_that_cannot_be_corrected_is_fetched_and_found_to_be_there(full, before, opened, objects, ranges):
    store, server = full
    log = store.roots[0].log.path
    store.close()
    for at in range(10, 40):
        _flip(log, RECORD_NBYTES * 20 + at)
    server.set_mode("ok")
    fixed, report, done = _mended(opened)
    assert (report.unknown, report.damaged, done.spans, len(ranges(server))) == (1, [], 1, 1)
    _is_as_it_was(fixed, objects, before)


def test_another_root_s_log_names_the_objects_of_a_lost_one(full, before, opened, objects, tmp_path):
    store, server = full
    here, there = store.roots[0].path, tmp_path / "copy"
    store.close()
    there.mkdir()
    (here / "objects.log").rename(there / "objects.log")
    _, report, done = _mended(opened, roots=[there], offline=True)
    assert (report.unknown, done.rerecorded, done.spans) == (140, 140, 0)
    assert server.stats()["requests"] == 0
    _is_as_it_was(opened(offline=True), objects, before)


def test_what_another_root_holds_is_not_lost(full, opened, objects, tmp_path):
    store, server = full
    there = tmp_path / "copy"
    shutil.copytree(store.roots[0].path, there)
    for path in list(objects(store.roots[0].path).values())[:5]:
        path.unlink()
    store.close()
    fixed, report, done = _mended(opened, roots=[there])
    assert (report.vanished, done.spans, done.unrepaired) == (5, 0, [])
    assert read_status(fixed).layers_whole == 9
    assert server.stats()["requests"] == 0


def test_offline_what_is_lost_is_said(full, opened):
    store, _ = full
    (item,) = expert_items(store.catalog, [3], [3])
    root, entry = store.object_of(item.span)
    root.object_path(entry).unlink()
    store.close()
    _, _, done = _mended(opened, offline=True)
    assert len(done.unrepaired) == 1 and done.unrepaired[0].startswith("1 spans: 1 spans")


def test_an_unproven_span_that_comes_otherwise_is_said_and_believed(full, opened):
    store, server = full
    (item,) = expert_items(store.catalog, [3], [3])
    root, entry = store.object_of(item.span)
    _flip(root.object_path(entry), 3)
    store.close()
    server.set_mode("corrupt_byte", at=9)
    fixed, _, done = _mended(opened)
    assert done.changed == ["expert 3 of layer 3: other bytes came than the first time; neither is proven"]
    assert done.unrepaired == [] and fixed.is_local(item.span)


def test_a_proven_span_that_comes_otherwise_is_refused_and_the_others_come(hub_store, opened):
    store, server = hub_store()
    items = sorted([*all_items(store.catalog), *rest_items(store.catalog)], key=lambda i: (i.span.shard, i.span.offset))
    with Prover(store, (item.span for item in items)) as prover:
        fetch(store, items, take=prover.take)
        assert len(prover.finish()) == 12
    victims = expert_items(store.catalog, [1, 2, 3], [3, 4])
    for item in victims:
        root, entry = store.object_of(item.span)
        root.object_path(entry).unlink()
    store.close()
    server.set_mode("corrupt_byte", at=9, path="model-00002*")
    fixed, _, done = _mended(opened)
    assert len(done.unrepaired) == 2 and all("contradict the proven digest" in line for line in done.unrepaired)
    assert [fixed.is_local(item.span) for item in victims] == [False] * 2 + [True] * 4


# ---- packs, shards, catalogs -----------------------------------------------------------------------------------------


def test_damaged_packs_are_made_again_from_what_is_here(full, opened, packs, objects):
    store, server = full
    packs.write(store, PackFormat.BF12)
    one, two = packs.paths(store.roots[0].path)[2:4]
    whole = one.read_bytes(), two.read_bytes()
    store.close()
    _flip(one, 30)  # the header
    _flip(two, len(whole[1]) - 5)
    fixed, report, done = _mended(opened)
    assert (len(report.damaged), done.packs, done.spans, done.unrepaired) == (2, 2, 0, [])
    assert (one.read_bytes(), two.read_bytes()) == whole
    assert len(packs.found(fixed).packs) == 9
    assert server.stats()["requests"] == 0


def test_wrong_spans_of_a_shard_in_place_come_as_objects(
    hub, opened, full_cache, tiny_dir, tmp_path, ranges, tiny_truth
):
    server = hub(tiny_dir)
    shutil.copytree(full_cache / "catalogs", tmp_path / "cache" / "catalogs")
    shutil.copytree(tiny_dir, tmp_path / "shards")
    verify(opened(roots=[tmp_path / "shards"]))
    store = opened(roots=[tmp_path / "shards"])
    (span,) = store.catalog.expert_spans(4, [9])
    _flip(tmp_path / "shards" / store.catalog.shards[span.shard].name, span.offset + 99)
    fixed, report, done = _mended(opened, roots=[tmp_path / "shards"])
    assert (report.wrong_spans, done.spans, done.unrepaired) == ([span], 1, [])
    assert ranges(server).keys() == {(fixed.catalog.shards[span.shard].name, span.offset, span.nbytes)}
    assert [slot.tobytes() for _, slot in fixed.experts(4, [9])] == [tiny_truth.expert(4, 9)]


def test_a_damaged_catalog_is_built_again_at_the_same_commit(full, policy, tmp_path):
    store, _ = full
    path, identity = store.catalog.path, store.catalog.identity
    store.close()
    assert rebuild_catalog("test/model", tmp_path / "cache", offline=False, policy=policy) is None
    for at in (100, 5000, path.stat().st_size - 4096 + 20):
        _flip(path, at)
        with pytest.raises(BadCatalog):
            Catalog(path)
        assert rebuild_catalog("test/model", tmp_path / "cache", offline=False, policy=policy) == path
        with Catalog(path) as catalog:
            assert catalog.identity == identity


# ---- quick, and going on ---------------------------------------------------------------------------------------------


def test_quick_looks_at_sizes_and_records_and_never_at_content(full, opened, read_errors):
    store, _ = full
    one, two, three = (store.object_of(item.span)[0].object_path(store.object_of(item.span)[1])
                       for item in expert_items(store.catalog, [1], [1, 2, 3]))  # fmt: skip
    os.truncate(one, 100)
    two.unlink()
    _flip(three, 50)
    _flip(store.roots[0].log.path, 5000)
    store.close()
    report = quick_verify(opened(offline=True))
    assert (report.mode, report.whole, report.vanished, report.bad_records) == ("quick", 138, 1, 1)
    assert len(report.damaged) == 1 and "expert 1 of layer 1: 100 bytes, expected 3264" in report.damaged[0]
    assert not one.exists(), "it is in quarantine"


def test_an_interrupted_verification_goes_on_and_hashes_nothing_twice(full, opened, monkeypatch):
    store, _ = full
    root = store.roots[0].path
    flipped = sorted((root / "objects").rglob("*/*"))[0]
    _flip(flipped, 3)
    told = 0

    def stop(nbytes):
        nonlocal told
        told += 1
        if told > 80:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        verify(store, stop, restart=False)
    known = VerifyState(root, "test/model")
    known.close(finished=False)
    assert 60 < known.resumed < 140
    left = len(list((root / "objects").rglob("*/*"))) - known.resumed  # the flipped one was reached, or not yet
    again = opened(offline=True)
    opens = []
    real = open

    def counting(path, *args, **keywords):
        opens.append(str(path))
        return real(path, *args, **keywords)

    monkeypatch.setattr("deltafin.store.verifying.open", counting, raising=False)
    report = verify(again, restart=False)
    assert not flipped.exists() and len(opens) == left
    assert (report.whole, len(report.damaged)) == (139, 1)
    assert not (root / STATE_NAME).exists()


def test_an_old_state_and_one_of_another_model_and_rubbish_are_left(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"x")
    state = VerifyState(tmp_path, "one")
    state.note_whole(path)
    state.close(finished=False)
    assert VerifyState(tmp_path, "two").resumed == 0
    for text in ('["verify", 1, "one", 5]\n', "[]", "null", "{", '["verify", 1, "one", 1e400]\n', "\0\xff"):
        (tmp_path / STATE_NAME).write_text(text)
        state = VerifyState(tmp_path, "one")
        assert state.resumed == 0
        state.close(finished=True)
    state = VerifyState(tmp_path, "one")
    state.note_whole(path)
    state.note_damaged("that")
    state.close(finished=False)
    with open(tmp_path / STATE_NAME, "a") as f:
        f.write('["whole", "/x", 5')
    state = VerifyState(tmp_path, "one")
    assert (state.is_whole(path), state.damaged, state.resumed) == (True, ["that"], 1)
    path.write_bytes(b"yy")
    assert not state.is_whole(path), "it was written since"
    state.close(finished=True)
    assert VerifyState(tmp_path, "one", restart=True).resumed == 0


def test_what_the_last_verification_found_is_kept_and_rubbish_is_nothing(tmp_path):
    assert read_result(tmp_path) is None
    told = {"model": "test/model", "damaged": [], "sound": True}
    write_result(tmp_path, {**told, "mode": "full", "whole": 3})
    first = read_result(tmp_path)
    write_result(tmp_path, {**told, "mode": "quick", "whole": 4})
    second = read_result(tmp_path)
    assert (second["mode"], second["whole"], second["last_full"]) == ("quick", 4, first["finished"])
    for text in ("", "[]", "{}", "nonsense", json.dumps({"finished": "yesterday"})):
        (tmp_path / "verify.json").write_text(text)
        assert read_result(tmp_path) is None
