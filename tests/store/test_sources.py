"""Objects before original shards before HTTP; and what happens when one of them lets the store down."""

from __future__ import annotations

import os
import shutil

import pytest

from deltafin.errors import BadCatalog, Corrupt, DiskError, Missing, NotFound, OldCatalog
from deltafin.store import all_items, drive, expert_items, fetch, read_status, spine_items

LAYER = 3


def _expert(store, number: int = 5, layer: int = LAYER) -> bytes:
    ((_, slot),) = [(e, s.tobytes()) for e, s in store.experts(layer, [number])]
    return slot


def _used(store) -> dict[str, int]:
    counts = store.stats.snapshot()
    return {source: counts[f"{source}_spans"] for source in ("object", "shard", "http") if counts[f"{source}_spans"]}


def _object(store, number: int = 5, layer: int = LAYER):
    root = store.roots[0]
    return root.object_path(root.log.entries[store.key(store.catalog.expert_spans(layer, [number])[0])])


# ---- the order ------------------------------------------------------------------------------------------


def test_what_was_fetched_once_comes_from_the_cache_from_then_on(hub_store, tiny_truth):
    store, server = hub_store()
    for _ in range(3):
        assert _expert(store) == tiny_truth.expert(LAYER, 5)
    assert _used(store) == {"http": 1, "object": 2}
    assert server.stats()["requests"] == 1


def test_shards_in_a_root_are_read_in_place_and_never_fetched_or_copied(hub, opened, tiny_dir, tiny_truth, objects):
    server = hub(tiny_dir)
    store = opened(roots=[tiny_dir])
    server.set_mode("ok")
    assert _expert(store) == tiny_truth.expert(LAYER, 5)
    assert _used(store) == {"shard": 1}
    assert server.stats()["requests"] == 0
    assert objects(store.roots[0].path) == {}


def test_objects_come_before_shards_in_place(full, opened, tiny_dir):
    store = opened(roots=[tiny_dir])
    _expert(store)
    assert _used(store) == {"object": 1}


def test_objects_of_another_root_are_read_and_never_changed(full, opened, tmp_path, tiny_truth):
    first, server = full
    shutil.copytree(first.roots[0].path, tmp_path / "other")
    before = {p: p.stat().st_mtime_ns for p in (tmp_path / "other").rglob("*")}
    store = opened(cache_dir=tmp_path / "new", roots=[tmp_path / "other"])
    server.set_mode("ok")
    assert _expert(store) == tiny_truth.expert(LAYER, 5)
    assert _used(store) == {"object": 1}
    assert server.stats()["requests"] == 0
    assert {p: p.stat().st_mtime_ns for p in (tmp_path / "other").rglob("*")} == before


def test_the_snapshot_of_another_hub_client_is_read_in_place(
    hub, opened, tmp_path, monkeypatch, range_server, tiny_dir, tiny_truth
):
    blobs = tmp_path / "hub" / "models--test--model" / "blobs"
    snapshot = blobs.parent / "snapshots" / range_server.COMMIT_A
    shutil.copytree(tiny_dir, blobs)
    snapshot.mkdir(parents=True)
    for path in blobs.iterdir():
        (snapshot / path.name).symlink_to(path)
    server = hub(tiny_dir)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    store = opened()
    server.set_mode("ok")
    assert _expert(store) == tiny_truth.expert(LAYER, 5)
    assert _used(store) == {"shard": 1}
    (snapshot / store.catalog.shards[LAYER].name).unlink()
    again = opened()
    assert _expert(again) == tiny_truth.expert(LAYER, 5)
    assert _used(again) == {"http": 1}


def test_the_snapshot_of_another_commit_is_not(hub, opened, tmp_path, monkeypatch, tiny_dir):
    snapshots = tmp_path / "hub" / "models--test--model" / "snapshots"
    shutil.copytree(tiny_dir, snapshots / ("c" * 40))
    hub(tiny_dir)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    store = opened()
    _expert(store)
    assert _used(store) == {"http": 1}


def test_a_root_that_is_no_directory_is_refused_by_name(hub, opened, tiny_dir, tmp_path):
    hub(tiny_dir)
    with pytest.raises(NotFound, match=f"--root {tmp_path / 'nowhere'}: no such directory"):
        opened(roots=[tmp_path / "nowhere"])


# ---- shards that are not what they seem -----------------------------------------------------------------


def test_a_shard_of_the_same_name_with_another_header_is_left_alone_with_a_warning(
    hub, opened, tmp_path, caplog, tiny_dir, tiny_truth
):
    other, name = tmp_path / "other", "model-00004-of-000012.safetensors"
    shutil.copytree(tiny_dir, other)
    _change_header(other / name)
    hub(tiny_dir)
    store = opened(roots=[other])
    assert [_expert(store, layer=layer) for layer in (2, 3, 3)] == [tiny_truth.expert(layer, 5) for layer in (2, 3, 3)]
    assert _used(store) == {"shard": 1, "http": 1, "object": 1}
    warnings = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
    assert warnings == [f"{other / name}: not the shard that was indexed; left alone"]


def _change_header(path) -> None:
    blob = path.read_bytes()
    path.write_bytes(blob.replace(b'"format":"pt"', b'"format":"np"', 1))
    assert path.read_bytes() != blob and path.stat().st_size == len(blob)


@pytest.mark.parametrize("nbytes", [0, 7, 8, 100, -1])
def test_a_shard_that_was_cut_is_left_alone(hub, opened, tmp_path, tiny_dir, tiny_truth, nbytes):
    other = tmp_path / "other"
    shutil.copytree(tiny_dir, other)
    path = other / "model-00004-of-000012.safetensors"
    os.truncate(path, nbytes if nbytes >= 0 else path.stat().st_size - 1)
    hub(tiny_dir)
    store = opened(roots=[other])
    assert _expert(store) == tiny_truth.expert(LAYER, 5)
    assert _used(store) == {"http": 1}


def test_a_shard_whose_header_cannot_be_read_is_left_alone(hub, opened, tmp_path, tiny_dir, tiny_truth, read_errors):
    shutil.copytree(tiny_dir, tmp_path / "other")
    hub(tiny_dir)
    store = opened(roots=[tmp_path / "other"])
    read_errors.where, read_errors.times = "other/model-00004", 10**9
    assert _expert(store) == tiny_truth.expert(LAYER, 5)
    assert _used(store) == {"http": 1}


@pytest.mark.parametrize("change", ["cut", "other header"])
def test_a_local_model_that_changed_since_it_was_indexed_is_an_error(opened, tmp_path, tiny_dir, change):
    model = tmp_path / "model"
    shutil.copytree(tiny_dir, model)
    opened(model).close()
    path = model / "model-00004-of-000012.safetensors"
    if change == "cut":
        os.truncate(path, path.stat().st_size - 1)
    else:
        _change_header(path)
    store = opened(model)
    with pytest.raises(BadCatalog, match=f"{path}: changed since it was indexed; rebuild .* df-index build"):
        _expert(store)
    assert len(_expert(store, layer=2)) == store.catalog.expert_nbytes, "the other shards are still good"


def test_a_local_model_that_was_moved_says_where_it_was(opened, tmp_path, tiny_dir):
    model = tmp_path / "model"
    shutil.copytree(tiny_dir, model)
    store = opened(model)
    model.rename(tmp_path / "gone")
    with pytest.raises(Missing, match=f"not found at {model}; was the directory moved"):
        _expert(store)
    with pytest.raises(Missing, match=f"not found at {model}; was the directory moved"):
        fetch(store, spine_items(store.catalog))


# ---- a drive that fails ---------------------------------------------------------------------------------


def test_a_read_that_fails_once_is_tried_again_and_nobody_notices(opened, tiny_dir, tiny_truth, read_errors, caplog):
    store = opened(tiny_dir)
    assert store.is_local(store.catalog.expert_spans(LAYER, [5])[0])
    read_errors.where, read_errors.times = "model-00004", 1
    assert _expert(store) == tiny_truth.expert(LAYER, 5)
    assert read_errors.seen == 2
    assert "disk_errors" not in store.stats.snapshot()
    assert caplog.records == []


def test_an_object_that_cannot_be_read_comes_from_the_next_source_with_a_warning(
    full, opened, tiny_dir, tiny_truth, read_errors, caplog
):
    first, _ = full
    store = opened(roots=[tiny_dir])
    read_errors.where, read_errors.times = _object(first).name, 10**9
    assert _expert(store) == tiny_truth.expert(LAYER, 5)
    assert _used(store) == {"shard": 1}
    assert store.stats.snapshot()["disk_errors"] == 1
    assert any("errno 5" in r.getMessage() and _object(first).name in r.getMessage() for r in caplog.records)


def test_an_object_that_cannot_be_read_is_fetched_if_there_is_no_other_source(full, opened, tiny_truth, read_errors):
    first, server = full
    store = opened()
    read_errors.where, read_errors.times = _object(first).name, 10**9
    assert _expert(store) == tiny_truth.expert(LAYER, 5)
    assert _used(store) == {"http": 1}
    assert server.stats()["requests"] == 1


def test_offline_an_object_that_cannot_be_read_names_errno_file_and_offset(full, opened, read_errors):
    first, _ = full
    read_errors.where, read_errors.times = _object(first).name, 10**9
    nbytes = first.catalog.expert_nbytes
    with pytest.raises(DiskError, match=rf"{_object(first)}: cannot read {nbytes} bytes at 0 \(errno 5\)"):
        _expert(opened(offline=True))


def test_a_file_that_ends_early_while_it_is_read_names_the_place(opened, tmp_path, tiny_dir):
    model = tmp_path / "model"
    shutil.copytree(tiny_dir, model)
    store = opened(model)
    span = store.catalog.expert_spans(LAYER, [5])[0]
    assert store.is_local(span)
    os.truncate(model / "model-00004-of-000012.safetensors", span.offset + 100)
    with pytest.raises(DiskError, match=f"ends at byte {span.offset + 100}, {span.nbytes - 100} bytes too early"):
        _expert(store)


# ---- objects that are damaged ---------------------------------------------------------------------------


@pytest.mark.parametrize("nbytes", [0, 1, 5000])
def test_an_object_of_the_wrong_length_is_a_miss_and_is_fetched_again(full, opened, tiny_truth, nbytes):
    first, server = full
    path = _object(first)
    os.truncate(path, nbytes)
    store = opened()
    assert not store.is_local(store.catalog.expert_spans(LAYER, [5])[0])
    assert _expert(store) == tiny_truth.expert(LAYER, 5) == path.read_bytes()
    assert _used(store) == {"http": 1}
    assert server.stats()["requests"] == 1


def test_twenty_newest_objects_of_no_length_are_fetched_again_and_no_others(
    full, opened, span_bytes, tiny_dir, new_slot
):
    """CA-05: what a power cut leaves where a rename overtook its data."""
    first, server = full
    paths = sorted((p for p in first.roots[0].path.rglob("objects/*/*")), key=lambda p: p.stat().st_mtime_ns)[-20:]
    for path in paths:
        os.truncate(path, 0)
    store = opened()
    items = all_items(store.catalog)
    lacking = [i for i in items if not store.is_local(i.span)]
    assert len(lacking) == 20
    fetch(store, lacking)
    assert server.stats()["requests"] == 20
    for item in items:
        content = store.read(item.span, new_slot(item.span.nbytes), expert=item.address)
        assert content.tobytes() == span_bytes(store, tiny_dir, item.span)


def _flip(path, at: int = -1) -> bytes:
    data = bytearray(path.read_bytes())
    data[at] ^= 4
    path.write_bytes(data)
    return bytes(data)


def test_a_flipped_bit_is_found_at_first_use_set_aside_and_fetched_again(full, opened, tiny_truth, caplog):
    first, _ = full
    path = _object(first)
    damaged = _flip(path)
    store = opened()
    assert _expert(store) == tiny_truth.expert(LAYER, 5) == path.read_bytes()
    assert _used(store) == {"http": 1}
    assert store.stats.snapshot()["corrupt_objects"] == 1
    aside = store.roots[0].path / "quarantine" / path.name
    assert aside.read_bytes() == damaged
    assert [str(path) in r.getMessage() and str(aside) in r.getMessage() for r in caplog.records] == [True]


def test_a_flipped_bit_is_found_wherever_it_is(full, opened, tiny_truth):
    first, _ = full
    path, good = _object(first), tiny_truth.expert(LAYER, 5)
    for at in (0, 1, len(good) // 2, len(good) - 1):
        _flip(path, at)
        assert _expert(opened()) == good == path.read_bytes()


def test_offline_a_flipped_bit_is_an_error_that_says_what_to_do(full, opened):
    first, _ = full
    path = _object(first)
    _flip(path)
    store = opened(offline=True)
    with pytest.raises(Corrupt, match=f"{path}: the content does not match .* moved to .*quarantine.*df-fetch"):
        _expert(store)
    assert not path.exists()
    with pytest.raises(Missing, match="--layers 3 --experts 5"):
        _expert(store)


def test_a_damaged_object_of_a_root_that_is_only_read_is_passed_over_and_left(full, opened, tmp_path, tiny_truth):
    first, _ = full
    shutil.copytree(first.roots[0].path, tmp_path / "other")
    path = tmp_path / "other" / _object(first).relative_to(first.roots[0].path)
    damaged = _flip(path)
    store = opened(cache_dir=tmp_path / "new", roots=[tmp_path / "other"])
    assert _expert(store) == tiny_truth.expert(LAYER, 5)
    assert path.read_bytes() == damaged
    with pytest.raises(Corrupt, match=str(path)):
        _expert(opened(cache_dir=shutil.copytree(tmp_path / "new" / "catalogs", tmp_path / "c" / "catalogs").parent,
                       roots=[tmp_path / "other"], offline=True))  # fmt: skip


def test_a_row_of_a_damaged_embedding_object_is_never_returned(full, opened, tiny_truth):
    first, _ = full
    span = first.catalog.embedding().spans[0]
    _flip(first.roots[0].object_path(first.roots[0].log.entries[first.key(span)]))
    store = opened()
    table = tiny_truth.table("language_model.model.embed_tokens.weight")
    assert (store.embedding([0, 9]) == table[[0, 9]]).all()
    assert store.stats.snapshot()["corrupt_objects"] == 1


@pytest.mark.parametrize("kind", ["directory", "dangling link", "link to a directory", "fifo"])
def test_something_else_under_the_name_of_an_object_is_no_object(full, opened, tmp_path, tiny_truth, kind):
    first, _ = full
    path = _object(first)
    path.unlink()
    if kind == "directory":
        path.mkdir()
    elif kind == "fifo":
        os.mkfifo(path)
    else:
        path.symlink_to(tmp_path if kind == "link to a directory" else tmp_path / "nowhere")
    store = opened()
    assert not store.is_local(store.catalog.expert_spans(LAYER, [5])[0])
    assert _expert(store) == tiny_truth.expert(LAYER, 5)
    assert read_status(opened()).experts_present >= 127


def test_what_a_link_among_the_objects_points_to_is_never_written(full, opened, tmp_path, tiny_truth):
    first, _ = full
    path, outside = _object(first), tmp_path / "outside"
    outside.write_bytes(b"precious")
    path.unlink()
    path.symlink_to(outside)
    store = opened()
    assert _expert(store) == tiny_truth.expert(LAYER, 5)
    assert outside.read_bytes() == b"precious"
    assert path.read_bytes() == tiny_truth.expert(LAYER, 5) and not path.is_symlink()


def test_an_object_that_vanishes_is_a_miss(full, opened, tiny_truth):
    first, _ = full
    store = opened()
    _expert(store)
    _object(first).unlink()
    assert _expert(store) == tiny_truth.expert(LAYER, 5)
    assert _used(store) == {"object": 1, "http": 1}


def test_an_object_in_use_may_be_removed_without_harm(full, opened, tiny_truth, monkeypatch):
    """Eviction is unlink: a reader that has the file open reads on."""
    first, _ = full
    store, path, real = opened(), _object(first), drive._io.read

    def evicting(fd, *args):
        path.unlink(missing_ok=True)
        return real(fd, *args)

    monkeypatch.setattr(drive._io, "read", evicting)
    assert _expert(store) == tiny_truth.expert(LAYER, 5)
    assert not path.exists()
    assert _used(store) == {"object": 1}


def test_an_object_that_vanishes_between_look_and_read_is_fetched_again(full, opened, tiny_truth, monkeypatch):
    first, _ = full
    store, path, real = opened(), _object(first), drive._io.open

    def vanishing(name, direct):
        if str(name) == str(path):
            path.unlink(missing_ok=True)
        return real(name, direct)

    monkeypatch.setattr(drive._io, "open", vanishing)
    assert _expert(store) == tiny_truth.expert(LAYER, 5)
    assert _used(store) == {"http": 1}


# ---- names that come from a server ----------------------------------------------------------------------


def test_no_name_that_a_server_lists_leads_out_of_the_cache(hub, opened, tmp_path, tiny_dir, monkeypatch):
    server = hub(tiny_dir)
    names = [*server.state.catalogue.names(), "../escape", "/etc/escape", "..\\escape", "a/../../escape",
             "../model-00001-of-000012.safetensors", "model-00001-of-000012.safetensors/../../escape"]  # fmt: skip
    monkeypatch.setattr(server.state.catalogue, "names", lambda: names)
    before = set(tmp_path.iterdir())
    store = opened()
    fetch(store, expert_items(store.catalog, [1], range(16)))
    assert set(tmp_path.iterdir()) - before == {store.roots[0].path}
    assert {p.name for p in store.roots[0].path.iterdir()} == {"catalogs", "claims", "objects", "objects.log", "tmp"}
    assert not any("escape" in row["path"] or ".." in row["path"] for row in server.state.log)


# ---- catalogs of another version ---------------------------------------------------------------------------


def test_an_old_catalog_of_something_within_reach_is_built_anew_and_any_other_is_refused(
    opened, hub, tiny_dir, tmp_path, monkeypatch
):
    hub(tiny_dir)
    cache = tmp_path / "cache"
    with monkeypatch.context() as patch:
        patch.setattr("deltafin.indexer.catalog.VERSION", 1)
        opened(tiny_dir, cache_dir=cache).close()
        opened(cache_dir=cache).close()
    assert len(list((cache / "catalogs").glob("*.catalog"))) == 2
    with pytest.raises(OldCatalog, match="rebuild it with df-index build"):
        opened(cache_dir=cache, offline=True)
    opened(tiny_dir, cache_dir=cache).close()
    opened(cache_dir=cache).close()
    opened(cache_dir=cache, offline=True)
