"""Manifests carry proofs from one machine to another, and a hostile file proves nothing and breaks nothing."""

from __future__ import annotations

import hashlib
import shutil
import tracemalloc
from dataclasses import replace

import numpy as np
import pytest
import zstandard
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from deltafin.errors import BadRequest, Corrupt, DeltafinError, Missing, NotFound
from deltafin.store import (
    Prover,
    all_items,
    expert_items,
    fetch,
    forget_proofs,
    import_manifest,
    make_manifest,
    read_manifest,
    read_status,
    remove,
    rest_items,
    verify,
    write_manifest,
)
from deltafin.store import manifest as module


def _prove(store):
    items = sorted([*all_items(store.catalog), *rest_items(store.catalog)], key=lambda i: (i.span.shard, i.span.offset))
    with Prover(store, (item.span for item in items)) as prover:
        fetch(store, items, take=prover.take)
        assert all(verdict.proven for verdict in prover.finish())


@pytest.fixture(scope="module")
def proven_cache(tmp_path_factory, range_server, tiny_dir, policy):
    """A cache in which everything is proven. Copy it."""
    from deltafin.store import open_store

    cache = tmp_path_factory.mktemp("proven") / "cache"
    with range_server.FaultServer(root=str(tiny_dir)) as server, pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_ENDPOINT", server.url)
        with open_store("test/model", cache_dir=cache, policy=policy) as store:
            _prove(store)
    return cache


@pytest.fixture
def proven(proven_cache, opened, tmp_path):
    shutil.copytree(proven_cache, tmp_path / "proven")
    return opened(cache_dir=tmp_path / "proven", offline=True)


@pytest.fixture(scope="module")
def made(proven_cache):
    """The manifest of that cache."""
    from deltafin.store import open_store

    with open_store("test/model", cache_dir=proven_cache, offline=True) as store:
        return make_manifest(store)


@pytest.fixture
def file(made, tmp_path):
    path = tmp_path / "tiny.manifest"
    write_manifest(made, path)
    return path


def test_what_was_written_is_read_again_and_the_bytes_do_not_depend_on_when(made, tmp_path):
    one, two = tmp_path / "a" / "one", tmp_path / "two"
    assert write_manifest(made, one) == write_manifest(made, two) == hashlib.sha256(one.read_bytes()).hexdigest()
    assert one.read_bytes() == two.read_bytes()
    found = read_manifest(one, hashlib.sha256(one.read_bytes()).hexdigest().upper())
    assert (found.repo, found.commit, found.shards) == (made.repo, made.commit, made.shards)
    for name in ("shard", "offset", "nbytes", "proven"):
        assert (getattr(found, name) == getattr(made, name)).all()
    assert (found.sha256, found.xxh3) == (made.sha256, made.xxh3)
    assert len(found) == 154 and found.proven.all()
    assert [p.name for p in tmp_path.iterdir() if p.is_file()] == ["two"]


def test_the_digests_are_those_of_the_bytes(made, tiny_dir):
    for row in range(len(made)):
        with open(tiny_dir / made.shards[made.shard[row]].name, "rb") as f:
            f.seek(made.offset[row])
            assert hashlib.sha256(f.read(made.nbytes[row])).digest() == made.sha256[row]


def test_with_a_manifest_whatever_a_mirror_alters_is_refused_at_the_first_byte_it_sends(
    hub_store, opened, file, tiny_truth
):
    store, server = hub_store()
    report = import_manifest(store, read_manifest(file))
    assert (report.spans, report.proven, report.new, report.replaced, report.foreign) == (154, 154, 154, 0, 0)
    server.set_mode("corrupt_byte", at=3, times=2)
    (slot,) = [slot.tobytes() for _, slot in store.experts(3, [5])]
    assert slot == tiny_truth.expert(3, 5)
    server.set_mode("corrupt_byte", at=3)
    with pytest.raises(Corrupt, match="contradict the proven digest on record"):
        fetch(store, expert_items(store.catalog, [3], [6]))
    status = read_status(opened(offline=True))
    assert (status.proven_spans, status.unproven_spans) == (1, 0)


def test_an_import_is_one_write_and_the_second_is_none(hub_store, made):
    store, _ = hub_store()
    import_manifest(store, made)
    nbytes = store.roots[0].log.path.stat().st_size
    assert nbytes == 154 * 128
    assert import_manifest(store, made).new == 0
    assert store.roots[0].log.path.stat().st_size == nbytes


def test_objects_whose_log_was_lost_are_found_again_by_a_manifest_without_the_network(full, opened, file):
    store, server = full
    store.close()
    (store.roots[0].path / "objects.log").unlink()
    again = opened(offline=True)
    assert not any(again.is_local(item.span) for item in all_items(again.catalog))
    import_manifest(again, read_manifest(file))
    assert all(again.is_local(item.span) for item in all_items(again.catalog))
    assert (read_status(again).proven_spans, read_status(again).layers_whole) == (140, 9)
    assert server.stats()["requests"] == 0


def test_a_manifest_wins_over_what_was_learnt_and_the_wrong_object_goes_to_quarantine(hub_store, opened, made):
    store, _ = hub_store()
    (item,) = expert_items(store.catalog, [2], [2])
    view = bytearray(item.span.nbytes)
    store.roots[0].publish(store.key(item.span), memoryview(view))
    assert store.is_local(item.span)
    assert import_manifest(store, made).replaced == 1
    assert not store.is_local(item.span)
    assert len(list((store.roots[0].path / "quarantine").iterdir())) == 1
    assert not opened(offline=True).is_local(item.span)


def test_what_contradicts_a_proof_is_refused_as_a_whole(proven, made):
    other = replace(made, sha256=(bytes(32), *made.sha256[1:]))
    before = proven.roots[0].log.path.read_bytes()
    with pytest.raises(BadRequest, match="contradicts 1 digests that are proven already; nothing was changed"):
        import_manifest(proven, other)
    assert proven.roots[0].log.path.read_bytes() == before


def test_a_manifest_of_another_commit_or_model_is_refused(opened, made, hub, demo_dir, tmp_path):
    hub(demo_dir)
    other = opened("test/other", cache_dir=tmp_path / "other")
    with pytest.raises(BadRequest, match=r"of another model \(test/model@a+, here test/other"):
        import_manifest(other, made)
    assert not (tmp_path / "other" / "objects.log").exists()


def test_removing_objects_keeps_what_is_proven(proven, opened, tmp_path):
    items = expert_items(proven.catalog, [1], [0, 1])
    remove(proven, items)
    again = opened(cache_dir=tmp_path / "proven", offline=True)
    assert not any(again.is_local(item.span) for item in items)
    entries = [again.known(item.span) for item in items]
    assert all(entry.proven and not entry.held for entry in entries)
    assert len(make_manifest(again)) == 154


def test_proofs_can_be_taken_back_and_what_is_here_stays(proven, opened, tmp_path):
    remove(proven, expert_items(proven.catalog, [1], [0]))
    assert forget_proofs(proven) == 154
    again = opened(cache_dir=tmp_path / "proven", offline=True)
    status = read_status(again)
    assert (status.proven_spans, status.unproven_spans) == (0, 139)
    assert verify(again).proven_shards == 11


# ---- what is exported ---------------------------------------------------------------------------------------------


def test_missing_or_unproven_digests_are_not_passed_over_in_silence(hub_store, made):
    store, _ = hub_store()
    with pytest.raises(Missing, match="of the digests of 140 spans 140 are not on record"):
        make_manifest(store)
    with pytest.raises(Missing, match="no digest is on record"):
        make_manifest(store, partial=True)
    fetch(store, expert_items(store.catalog, [1], [0, 1]))
    with pytest.raises(Missing, match="138 are not on record and 2 are not proven"):
        make_manifest(store)
    with pytest.raises(Missing, match="no digest is on record that could be exported"):
        make_manifest(store, partial=True)
    some = make_manifest(store, partial=True, unproven=True)
    assert (len(some), some.proven.any()) == (2, False)


def test_unproven_digests_prove_nothing_elsewhere(full, hub_store, opened, tmp_path):
    store, _ = full
    some = make_manifest(store, unproven=True)
    elsewhere = opened(cache_dir=tmp_path / "elsewhere")
    report = import_manifest(elsewhere, some)
    assert (report.spans, report.proven, report.new) == (140, 0, 140)
    assert read_status(elsewhere).proven_spans == 0
    assert not any(elsewhere.known(item.span).proven for item in all_items(elsewhere.catalog))


# ---- hostile files ------------------------------------------------------------------------------------------------


def _blob(data: bytes) -> bytes:
    return zstandard.ZstdCompressor(write_checksum=True).compress(data + hashlib.sha256(data).digest())


def _content(file) -> bytes:
    return zstandard.decompress(file.read_bytes())[:-32]


def test_every_flipped_bit_and_every_cut_is_noticed(file):
    whole = file.read_bytes()
    for bit in np.random.default_rng(1).integers(0, 8 * len(whole), 200).tolist():
        data = bytearray(whole)
        data[bit // 8] ^= 1 << bit % 8
        file.write_bytes(data)
        with pytest.raises(Corrupt, match="nothing of it was used"):
            read_manifest(file)
    for cut in [0, 1, 4, 8, 100, len(whole) // 2, len(whole) - 1]:
        file.write_bytes(whole[:cut])
        with pytest.raises(Corrupt):
            read_manifest(file)
    file.write_bytes(whole)
    with pytest.raises(Corrupt, match=r"expected 0000"):
        read_manifest(file, "0" * 64)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_bytes_that_were_made_to_pass_its_checksum_raise_one_kind_of_error(file, data):
    content = bytearray(_content(file))
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(content) - 1))
        content[at] = data.draw(st.integers(0, 255))
    forged = file.with_name("forged")
    forged.write_bytes(_blob(bytes(content)))
    try:
        found = read_manifest(forged)
    except DeltafinError as e:
        assert isinstance(e, Corrupt) and "\n" not in str(e)
        return
    ends = found.offset + found.nbytes
    assert all(end <= found.shards[number].nbytes for end, number in zip(ends, found.shard, strict=True))


@pytest.mark.parametrize(
    "column, value, what",
    [("shard", 12, "shards that it does not have"), ("nbytes", 0, "lengths that cannot be"),
     ("nbytes", 1 << 63, "lengths that cannot be"), ("gap", (1 << 64) - 8, "lengths that cannot be"),
     ("gap", 4096, "beyond")],
)  # fmt: skip
def test_numbers_that_cannot_be_are_named(file, made, column, value, what):
    content = bytearray(_content(file))
    at = len(content)
    for name, kind in reversed(module._COLUMNS):
        at -= len(made) * np.dtype(kind).itemsize
        if name == column:
            last = at + (len(made) - 1) * np.dtype(kind).itemsize
            content[last : last + np.dtype(kind).itemsize] = int(value).to_bytes(np.dtype(kind).itemsize, "little")
    file.write_bytes(_blob(bytes(content)))
    with pytest.raises(Corrupt, match=what):
        read_manifest(file)


def test_a_small_file_that_claims_to_be_large_takes_no_memory(file):
    bomb = zstandard.ZstdCompressor(level=19).compress(bytes(300 << 20))
    assert len(bomb) < 100_000
    file.write_bytes(bomb)
    tracemalloc.start()
    try:
        with pytest.raises(Corrupt, match="it claims to hold 314572800 bytes"):
            read_manifest(file)
        assert tracemalloc.get_traced_memory()[1] < 10e6
    finally:
        tracemalloc.stop()


def test_what_is_no_manifest_is_said(file, tmp_path):
    with pytest.raises(NotFound):
        read_manifest(tmp_path / "nowhere")
    for content in (b"", b"hello", zstandard.compress(b""), _blob(b"x" * 200), _blob(b"DfManif\n" + bytes(300))):
        file.write_bytes(content)
        with pytest.raises(Corrupt, match="no manifest, or damaged"):
            read_manifest(file)
