"""A pack that is not exactly right is never used, and whatever ends its writer, none is half there."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import struct
import time
from pathlib import Path

import pytest
import xxhash

from deltafin.errors import BadCatalog, Corrupt, DiskError, Missing, NoSpace
from deltafin.store import (
    PackFormat,
    plan_packs,
    remove_packs,
    verify,
    write_packs,
)

FORMATS = list(PackFormat)
PREFIX = 56


def _flip(path: Path, at: int, bit: int = 3) -> None:
    with open(path, "r+b") as f:
        f.seek(at)
        (byte,) = f.read(1)
        f.seek(at)
        f.write(bytes([byte ^ 1 << bit]))


# ---- a store of tiny with small spans, to be damaged ----------------------------------------------------


@pytest.fixture
def tiny(packs, opened, small_spans, tiny_dir, tmp_path):
    """(store, model): a copy of tiny on disk, with bf12 packs of all layers."""
    model = tmp_path / "model"
    shutil.copytree(tiny_dir, model)
    with small_spans():
        store = opened(model)
    packs.write(store)
    return store, model


def _written(packs, store, layer: int, format=PackFormat.BF12):
    return packs.found(store, format).packs[layer]


def test_packing_is_deterministic(packs, tiny, tmp_path):
    store, _ = tiny
    before = {path: path.read_bytes() for path in packs.paths(tmp_path / "cache")}
    remove_packs(store, PackFormat.BF12)
    assert not (tmp_path / "cache" / "packs").exists()
    packs.write(store)
    assert {path: path.read_bytes() for path in packs.paths(tmp_path / "cache")} == before


def test_a_plan_guesses_the_size_within_a_few_percent_and_bf16_to_the_byte(tiny):
    store, _ = tiny
    for format, most in ((PackFormat.BF12, 1.05), (PackFormat.BF16, 1.0)):
        remove_packs(store, PackFormat.BF12)
        plan = plan_packs(store, format, range(9))
        done = write_packs(store, plan)
        assert 1 <= max(done.pack_nbytes, plan.pack_nbytes) / min(done.pack_nbytes, plan.pack_nbytes) <= most


def test_opening_reads_headers_only(packs, tiny, monkeypatch):
    """The data may be gone: a hole of the right length is not looked at."""
    store, _ = tiny
    for pack in packs.found(store).packs.values():
        nbytes, first = pack.nbytes, pack.pieces[0].offset
        os.truncate(pack.path, first)
        os.truncate(pack.path, nbytes)
    assert len(packs.found(store).packs) == 9


def _spots(pack) -> dict[str, int]:
    """A byte of every kind of thing in a pack."""
    (text_nbytes,) = struct.unpack("<Q", pack.path.read_bytes()[16:24])
    spots = {"magic": 3, "version": 8, "length": 13, "text length": 16, "digest": 40}
    spots |= {"text": PREFIX + text_nbytes // 2, "end of text": PREFIX + text_nbytes - 1}
    spots["padding of the header"] = PREFIX + text_nbytes + 1
    for piece in pack.pieces:
        for part in piece.parts:
            if part.nbytes:
                spots[f"{piece.encoding} {part.name}"] = piece.offset + part.offset + part.nbytes // 2
        if piece.nbytes % 4096:
            spots["padding"] = piece.offset + piece.nbytes
    return spots


def test_a_flipped_bit_anywhere_is_detected_and_the_next_packing_repairs_it(packs, tiny, tmp_path):
    store, _ = tiny
    path = _written(packs, store, 3).path
    whole = path.read_bytes()
    spots = _spots(_written(packs, store, 3))
    assert {"bf12 codes", "bf12 base", "bf12 starts", "raw bytes", "padding"} <= spots.keys()
    aside = tmp_path / "cache" / "quarantine" / f"{path.parts[-3]}-bf12-layer-00003.pack"
    for where, at in spots.items():
        _flip(path, at)
        if at < 4096 or "header" in where:
            found = packs.found(store)
            assert 3 not in found.packs and len(found.packs) == 8, where
            (complaint,) = found.complaints
            assert complaint.startswith(f"{path}: ") and complaint.endswith(
                f"passed over: write it again with df-fetch spine {store.catalog.name} --as bf12"
            )
        report = verify(store)
        (line,) = report.damaged
        assert line.startswith(f"{path}: ") and line.endswith(f"; moved to {aside}"), where
        assert report.packs == 8
        assert aside.exists() and not path.exists()
        assert write_packs(store, plan_packs(store, PackFormat.BF12, range(9))).layers == 1
        assert path.read_bytes() == whole


def test_exceptions_that_are_damaged_are_detected(packs, opened, small_spans, tiny_dir, tmp_path):
    model = _copy_with(tiny_dir, tmp_path / "model", "layers.1.self_attn.q_proj.weight", {70: 0x8000, 130: 1})
    with small_spans():
        store = opened(model)
    packs.write(store, layers=[1])
    piece = next(p for p in _written(packs, store, 1).pieces if p.encoding == "bf12" and p.exceptions > 1)
    for part in piece.parts[3:]:
        _flip(_written(packs, store, 1).path, piece.offset + part.offset)
        assert "does not match its digest" in verify(store).damaged[0]
        packs.write(store, layers=[1])


@pytest.mark.parametrize("cut", [0, 1, 55, 56, 4096, -4096, -1])
def test_a_pack_that_was_cut_short_is_passed_over(packs, tiny, cut, caplog):
    store, _ = tiny
    path = _written(packs, store, 5).path
    os.truncate(path, cut % path.stat().st_size)
    assert 5 not in packs.found(store).packs
    assert f"{path}: the header of this pack is damaged" in caplog.text
    assert len(verify(store).damaged) == 1


def test_a_pack_that_grew_is_passed_over(packs, tiny):
    store, _ = tiny
    path = _written(packs, store, 5).path
    os.truncate(path, path.stat().st_size + 4096)
    assert 5 not in packs.found(store).packs


def _forge(path: Path, change) -> None:
    """Rewrites a header with a digest that is right."""
    blob = path.read_bytes()
    magic, version, room, nbytes, _ = struct.unpack("<8sIIQ32s", blob[:PREFIX])
    about = json.loads(blob[PREFIX : PREFIX + nbytes])
    change(about)
    text = json.dumps(about, separators=(",", ":")).encode()
    prefix = struct.pack("<8sIIQ32s", magic, version, room, len(text), hashlib.sha256(text).digest())
    path.write_bytes((prefix + text).ljust(room, b"\0") + blob[room:])


def _encoded(about, kind: str = "bf12"):
    return next(piece for piece in about["pieces"] if piece["encoding"] == kind)


FORGERIES = {
    "another layer": lambda a: a.update(layer=4),
    "another format": lambda a: a.update(format="bf16"),
    "an unknown format": lambda a: a.update(format="bf13"),
    "no pieces": lambda a: a.update(pieces=[]),
    "a piece less": lambda a: a["pieces"].pop(),
    "pieces swapped": lambda a: a["pieces"].reverse(),
    "a piece twice": lambda a: a["pieces"].append(a["pieces"][-1]),
    "another span": lambda a: a["pieces"][0]["span"].__setitem__(1, 0),
    "a span too long": lambda a: a["pieces"][0]["span"].__setitem__(2, 1 << 40),
    "a negative span": lambda a: a["pieces"][0]["span"].__setitem__(2, -1),
    "a boolean": lambda a: a["pieces"][0]["span"].__setitem__(0, True),
    "a text": lambda a: a["pieces"][0]["span"].__setitem__(0, "3"),
    "a float": lambda a: _encoded(a).update(exceptions=1.5),
    "many exceptions": lambda a: _encoded(a).update(exceptions=1 << 40),
    "an unknown encoding": lambda a: _encoded(a).update(encoding="bf11"),
    "another encoding": lambda a: _encoded(a).update(encoding="int8"),
    "raw": lambda a: _encoded(a).update(encoding="raw", shape=None),
    "another shape": lambda a: _encoded(a)["shape"].reverse(),
    "three dimensions": lambda a: _encoded(a)["shape"].append(1),
    "no shape": lambda a: _encoded(a).update(shape=None),
    "overlap": lambda a: a["pieces"][1].update(offset=a["pieces"][0]["offset"]),
    "a part elsewhere": lambda a: _encoded(a)["parts"]["codes"].__setitem__(0, 64),
    "a part less": lambda a: _encoded(a)["parts"].pop("values"),
    "a short digest": lambda a: a["pieces"][0].update(xxh3="00"),
    "no digest": lambda a: a["pieces"][0].pop("xxh3"),
    "another shard": lambda a: next(iter(a["shards"].values())).update(id="00" * 32),
    "a shard number": lambda a: a.update(shards={"9999": next(iter(a["shards"].values()))}),
    "no shards": lambda a: a.update(shards={}),
    "shards in a list": lambda a: a.update(shards=[]),
    "another time": lambda a: next(iter(a["shards"].values())).update(mtime_ns=5),
}


@pytest.mark.parametrize("name", FORGERIES)
def test_a_header_that_is_not_this_layers_is_passed_over_though_its_digest_is_right(packs, tiny, name):
    store, _ = tiny
    path = _written(packs, store, 3).path
    _forge(path, FORGERIES[name])
    found = packs.found(store)
    assert 3 not in found.packs and len(found.packs) == 8
    assert found.complaints[0].startswith(f"{path}: ")
    assert len(verify(store).damaged) == 1


def test_nesting_without_end_is_damage_and_no_crash(packs, tiny):
    store, _ = tiny
    path = _written(packs, store, 3).path
    _, _, room, _, _ = struct.unpack("<8sIIQ32s", path.read_bytes()[:PREFIX])
    text = b"[" * (room - PREFIX)
    prefix = struct.pack("<8sIIQ32s", b"DfPack\r\n", 1, room, len(text), hashlib.sha256(text).digest())
    path.write_bytes(prefix + text + path.read_bytes()[room:])
    assert 3 not in packs.found(store).packs


# ---- other models, and models that change ---------------------------------------------------------------


def _copy_with(source: Path, to: Path, name: str, weights: dict[int, int]) -> Path:
    """A copy of a checkpoint with some weights of the tensor that ends with `name` replaced, by flat index."""
    shutil.copytree(source, to)
    for path in to.glob("*.safetensors"):
        blob = bytearray(path.read_bytes())
        start = 8 + struct.unpack("<Q", blob[:8])[0]
        for tensor, about in json.loads(blob[8:start]).items():
            if tensor.endswith(name):
                for index, bits in weights.items():
                    struct.pack_into("<H", blob, start + about["data_offsets"][0] + 2 * index, bits)
                path.write_bytes(blob)
    return to


def test_a_shard_that_was_written_again_takes_its_pack_out_of_use(packs, tiny, caplog):
    """Header and size are the same, so the shard's identity is; what is in it may not be."""
    store, model = tiny
    number = store.catalog.spine(4).spans[0].shard
    path = model / store.catalog.shards[number].name
    os.utime(path, ns=(1, path.stat().st_mtime_ns + 1))
    assert sorted(packs.found(store).packs) == [0, 1, 2, 3, 5, 6, 7, 8]
    assert f"{path.name} was changed after this pack was made from it" in caplog.text
    packs.write(store)
    assert len(packs.found(store).packs) == 9


def test_a_shard_that_changes_while_it_is_packed_makes_no_pack(packs, tiny, monkeypatch):
    store, model = tiny
    remove_packs(store, PackFormat.BF12)
    real = store.read

    def read(span, *args, **keywords):
        os.utime(model / store.catalog.shards[span.shard].name)
        return real(span, *args, **keywords)

    monkeypatch.setattr(store, "read", read)
    with pytest.raises(BadCatalog, match=r"changed while it was being packed"):
        packs.write(store, layers=[2])
    assert packs.found(store).packs == {}


def test_packs_of_another_model_in_the_same_place_are_not_used_but_verified(
    packs, tiny, opened, hub, tiny_dir, small_spans
):
    store, _ = tiny
    hub(tiny_dir)
    with small_spans():
        other = opened()
    assert packs.found(other).packs == {} and packs.found(other).complaints == ()
    assert verify(other).packs == 9
    victim = packs.paths(store.roots[0].path)[0]
    shutil.copytree(victim.parents[1], victim.parents[2] / victim.parents[1].name.replace("0", "1"))
    theirs = victim.parents[2] / _key(other)
    shutil.copytree(victim.parents[1], theirs)
    found = packs.found(other)
    assert found.packs == {} and len(found.complaints) == 9
    assert "this pack was made from another model" in found.complaints[0]


def _key(store) -> str:
    from deltafin.store.packs import model_key

    return model_key(store.shard_ids)


def test_a_pack_of_another_layer_under_this_name_is_not_used(packs, tiny):
    store, _ = tiny
    shutil.copy(_written(packs, store, 5).path, _written(packs, store, 6).path)
    found = packs.found(store)
    assert 6 not in found.packs
    assert "this is layer 5 as bf12, expected layer 6 as bf12" in found.complaints[0]


def test_packs_made_for_other_spans_are_not_used(packs, tiny, opened, tmp_path):
    store, model = tiny
    other = opened(model, cache_dir=tmp_path / "other", roots=[store.roots[0].path])
    found = packs.found(other)
    assert found.packs == {}
    assert "cuts the spine otherwise" in found.complaints[0]


def test_packs_in_a_further_root_are_used_where_the_cache_has_none(packs, tiny, opened, tmp_path, small_spans):
    store, model = tiny
    with small_spans():
        other = opened(model, cache_dir=tmp_path / "other", roots=[store.roots[0].path])
    assert len(packs.found(other).packs) == 9
    assert plan_packs(other, PackFormat.BF12, range(9)).layers == ()
    _flip(_written(packs, store, 2).path, 50)
    assert plan_packs(other, PackFormat.BF12, range(9)).layers == (2,)
    report = verify(other)
    assert len(report.damaged) == 1 and "moved" not in report.damaged[0], "a further root is only read"
    packs.write(other)
    found = packs.found(other)
    assert len(found.packs) == 9
    assert found.packs[2].path.is_relative_to(tmp_path / "other")


def test_a_pack_that_does_not_decode_to_its_source_is_found(packs, tiny):
    """Everything in it is consistent; only the source tells."""
    store, _ = tiny
    pack = _written(packs, store, 3)
    index, piece = next((i, p) for i, p in enumerate(pack.pieces) if p.encoding == "bf12")
    _flip(pack.path, piece.offset)
    digest = xxhash.xxh3_128(packs.piece(pack, piece)).hexdigest()
    _forge(pack.path, lambda a: a["pieces"][index].update(xxh3=digest))
    assert len(packs.found(store).packs) == 9
    assert "does not decode to the bytes it was made from" in verify(store).damaged[0]


def test_int8_of_a_row_with_infinity_names_the_tensor_and_the_row(packs, opened, small_spans, tiny_dir, tmp_path):
    model = _copy_with(tiny_dir, tmp_path / "model", "layers.2.self_attn.q_proj.weight", {128 * 90 + 7: 0x7F80})
    with small_spans():
        store = opened(model)
    with pytest.raises(Corrupt, match=r"layer 2: self_attn\.q_proj\.weight: row 90 holds an infinity or NaN"):
        packs.write(store, PackFormat.INT8)
    assert 2 not in packs.found(store, PackFormat.INT8).packs
    assert list((tmp_path / "cache" / "tmp").iterdir()) == []
    packs.write(store, PackFormat.BF12)
    assert verify(store).damaged == []


# ---- the network, kills and full disks ------------------------------------------------------------------


def test_layers_that_were_finished_before_a_kill_are_not_fetched_again(packs, hub_store, start, ranges, tmp_path):
    store, server = hub_store("slow_drip", bytes=16384, every=0.05)
    spans = [
        {(store.catalog.shards[s.shard].name, s.offset, s.nbytes) for s in store.catalog.spine(layer).spans}
        for layer in range(9)
    ]
    process = start("df-fetch", "spine", "test/model", "--as", "bf12")
    while len(packs.paths(tmp_path / "cache")) < 2 and process.poll() is None:
        time.sleep(0.002)
    process.kill()
    assert process.wait() == -9
    finished = sorted(packs.found(store).packs)
    assert 2 <= len(finished) < 9
    assert len(packs.paths(tmp_path / "cache")) == len(finished), "nothing half-written looks whole"
    server.set_mode("ok")
    done = start("df-fetch", "spine", "test/model", "--as", "bf12")
    out, err = done.communicate(timeout=60)
    assert (done.returncode, err) == (0, "")
    assert f"packed {9 - len(finished)} layers as bf12" in out
    again = set(ranges(server))
    assert not any(spans[layer] & again for layer in finished)
    assert all(spans[layer] <= again for layer in range(9) if layer not in finished)
    assert len(packs.found(store).packs) == 9
    assert list((tmp_path / "cache" / "tmp").iterdir()) == []


def test_bytes_that_contradict_the_digest_on_record_are_never_packed(packs, hub_store, opened, tiny_dir, tmp_path):
    store, server = hub_store()
    span = store.catalog.spine(3).spans[0]
    store.fetch(span, memoryview(bytearray(span.nbytes)))
    shutil.rmtree(tmp_path / "cache" / "objects")
    server.set_mode("corrupt_byte")
    with pytest.raises(Corrupt, match="contradict the digest on record"):
        packs.write(store, layers=[3])
    assert packs.paths(tmp_path / "cache") == []


def test_offline_says_how_much_is_out_of_reach(packs, full, opened, tmp_path):
    store, server = full
    shutil.rmtree(store.roots[0].path / "objects")
    server.set_mode("ok")
    with pytest.raises(Missing, match=r"bytes of the spine are not on this machine and fetching is off"):
        packs.write(opened(offline=True))
    assert server.stats()["requests"] == 0


def test_a_disk_that_cannot_hold_the_packs_is_no_space_before_anything_is_read(
    packs, tiny, opened, small_disk, small_spans
):
    _, model = tiny
    cache = small_disk(1_000_000, "small")
    with small_spans():
        store = opened(model, cache_dir=cache)
    before = store.stats.snapshot()
    with pytest.raises(NoSpace, match=r"packs of [\d,]+ bytes are to be written, and [\d,]+ are free"):
        packs.write(store)
    assert store.stats.snapshot() == before
    assert not (cache / "packs").exists()


def test_a_disk_that_fills_up_leaves_nothing_half_written(packs, tiny, opened, small_disk, small_spans, monkeypatch):
    _, model = tiny
    cache = small_disk(1_000_000, "small")
    monkeypatch.setattr("deltafin.store.packing.free_nbytes", lambda path: 1 << 40)
    with small_spans():
        store = opened(model, cache_dir=cache)
    with pytest.raises(NoSpace, match=r"layer-0000\d\.pack: cannot write: No space left on device; free some space"):
        packs.write(store)
    assert list((cache / "tmp").iterdir()) == []
    whole = packs.found(store)
    assert len(whole.packs) == len(packs.paths(cache)) < 9 and whole.complaints == ()


def test_progress_counts_every_byte_of_the_source_once(tiny):
    store, _ = tiny
    remove_packs(store, PackFormat.BF12)
    seen: list[int] = []
    plan = plan_packs(store, PackFormat.BF12, range(9))
    write_packs(store, plan, seen.append)
    assert sum(seen) == plan.source_nbytes


@pytest.mark.parametrize("kind", ["pipe", "folder", "loop"])
def test_what_is_named_as_a_pack_but_is_no_file_is_passed_over_and_moved_aside(packs, tiny, kind):
    store, _ = tiny
    path = packs.paths(store.roots[0].path)[1]
    path.unlink()
    {"pipe": lambda: os.mkfifo(path), "folder": path.mkdir, "loop": lambda: path.symlink_to(path)}[kind]()
    found = packs.found(store)
    assert 1 not in found.packs and len(found.complaints) == 1
    report = verify(store)
    assert [line for line in report.damaged if f"{path}: not a file; moved to" in line]
    assert not os.path.lexists(path)
    packs.write(store, layers=[1])
    assert 1 in packs.found(store).packs


def test_a_read_only_place_is_one_error_and_not_two(packs, tiny, monkeypatch):
    store, _ = tiny

    def refuse(*args):
        raise OSError(30, "Read-only file system")

    remove_packs(store, PackFormat.BF12)
    monkeypatch.setattr("deltafin.store.packing.make_directory", refuse)
    with pytest.raises(DiskError, match="Read-only file system") as caught:
        packs.write(store, layers=[2])
    assert caught.value.__cause__ is None and caught.value.__suppress_context__
