"""Packs hold the spine's bytes wherever those came from: of every model, in every format."""

from __future__ import annotations

from contextlib import ExitStack, nullcontext

import numpy as np
import pytest
import xxhash

from deltafin.store import (
    Bf12,
    Bf16,
    Int8,
    PackFormat,
    Raw,
    all_items,
    fetch,
    open_store,
    plan_packs,
    read_status,
    verify,
    write_packs,
)
from deltafin.store.encodings import decode, matrices_of

FORMATS = list(PackFormat)

CASES = [
    ("shards", "tiny", "small"),
    ("shards", "tiny", "default"),
    ("shards", "odd", "small"),
    ("shards", "demo", "small"),
    ("shards", "k93", "default"),
    ("objects", "tiny", "small"),
    ("http", "tiny", "small"),
    ("http", "odd", "small"),
]


@pytest.fixture(scope="module", params=CASES, ids=[" ".join(case) for case in CASES])
def case(packs, request, tmp_path_factory, range_server, small_spans, policy):
    """(store, directory, where the bytes came from), with packs of all formats written."""
    place, layout, spans = request.param
    directory = request.getfixturevalue(f"{layout}_dir")
    cache = tmp_path_factory.mktemp("cache")
    with ExitStack() as stack:
        stack.enter_context(small_spans() if spans == "small" else nullcontext())
        keywords = {"cache_dir": cache, "policy": policy}
        if place == "shards":
            store = open_store(str(directory), **keywords)
        else:
            server = stack.enter_context(range_server.FaultServer(root=str(directory)))
            patch = stack.enter_context(pytest.MonkeyPatch.context())
            patch.setenv("HF_ENDPOINT", server.url)
            store = open_store("test/model", **keywords)
            if place == "objects":
                fetch(store, all_items(store.catalog))
                store.close()
                store = open_store("test/model", offline=True, **keywords)
        stack.enter_context(store)
        for format in FORMATS:
            packs.write(store, format)
        yield store, directory, place


def test_every_piece_is_a_span_of_the_layer_and_starts_on_a_page(packs, case):
    store, _, _ = case
    for format in FORMATS:
        found = packs.found(store, format)
        assert sorted(found.packs) == list(range(store.catalog.config.num_layers))
        for layer, pack in found.packs.items():
            assert tuple(piece.span for piece in pack.pieces) == store.catalog.spine(layer).spans
            end = 4096
            for piece in pack.pieces:
                assert piece.offset % 4096 == 0 and piece.offset >= end
                assert all(part.offset % 64 == 0 for part in piece.parts)
                end = piece.offset + piece.nbytes
                assert xxhash.xxh3_128(packs.piece(pack, piece)).digest() == piece.xxh3
            assert pack.path.stat().st_size == pack.nbytes == -(-end // 4096) * 4096


def test_bf16_and_bf12_decode_to_the_bytes_of_the_shard(packs, case, span_bytes):
    store, directory, _ = case
    for format in (PackFormat.BF16, PackFormat.BF12):
        for pack in packs.found(store, format).packs.values():
            for piece in pack.pieces:
                decoded = decode(piece.arrays(packs.piece(pack, piece)))
                assert decoded.tobytes() == span_bytes(store, directory, piece.span)


def test_int8_rows_are_the_nearest_multiples_of_their_scale(packs, case, span_bytes):
    store, directory, _ = case
    for pack in packs.found(store, PackFormat.INT8).packs.values():
        for piece in pack.pieces:
            arrays = piece.arrays(packs.piece(pack, piece))
            source = np.frombuffer(span_bytes(store, directory, piece.span), np.uint8)
            if not isinstance(arrays, Int8):
                assert decode(arrays).tobytes() == source.tobytes()
                continue
            weights = (source.view(np.uint16).astype(np.uint32) << 16).view(np.float32).reshape(arrays.q.shape)
            assert (arrays.scale == np.abs(weights).max(1) / np.float32(127)).all()
            assert (np.abs(arrays.q * arrays.scale[:, None] - weights) <= 0.501 * arrays.scale[:, None]).all()


def test_only_whole_matrices_are_encoded_and_never_the_ones_that_must_stay(packs, case):
    store, _, _ = case
    seen = set()
    sliced, router = "self_attn.kv_b_proj.weight", "block_sparse_moe.gate.weight"
    kept = {PackFormat.BF12: (sliced,), PackFormat.INT8: (sliced, router)}
    for format in FORMATS:
        for layer, pack in packs.found(store, format).packs.items():
            for piece, matrix in zip(pack.pieces, matrices_of(store.catalog.spine(layer)), strict=True):
                kind = {"raw": Raw, "bf16": Bf16, "bf12": Bf12, "int8": Int8}[piece.encoding]
                assert isinstance(piece.arrays(packs.piece(pack, piece)), kind)
                seen.add((format, piece.encoding))
                if matrix is None:
                    assert piece.encoding == "raw"
                elif format is PackFormat.BF16 or matrix.name in kept[format]:
                    assert piece.encoding == "bf16"
    if store.catalog.config.hidden_size % 32 == 0 and (PackFormat.BF16, "bf16") in seen:
        assert (PackFormat.BF12, "bf12") in seen and (PackFormat.INT8, "int8") in seen


def test_nothing_is_kept_twice(case):
    """What came over HTTP went into packs only, once for each format."""
    store, _, place = case
    counts = store.stats.snapshot()
    spine = [span for layer in range(store.catalog.config.num_layers) for span in store.catalog.spine(layer).spans]
    if place == "http":
        assert counts["http_spans"] == len(FORMATS) * len(spine)
        assert not (store.roots[0].path / "objects").exists()
    else:
        assert counts["http_spans"] == 0


def test_packs_of_every_format_pass_verification_and_are_listed(packs, case):
    store, _, _ = case
    report = verify(store)
    layers = store.catalog.config.num_layers
    assert (report.packs, report.damaged) == (3 * layers, [])
    listed = [(p.format, p.as_released, p.layers) for p in read_status(store).packs]
    assert listed == [("bf16", True, layers), ("bf12", True, layers), ("int8", False, layers)]
    nbytes = sum(path.stat().st_size for path in packs.paths(store.roots[0].path))
    assert sum(p.nbytes for p in read_status(store).packs) == report.packs_nbytes == nbytes


def test_writing_again_finds_everything_there(case):
    store, _, _ = case
    for format in FORMATS:
        plan = plan_packs(store, format, range(store.catalog.config.num_layers))
        assert (plan.layers, plan.source_nbytes, plan.pack_nbytes) == ((), 0, 0)
        assert write_packs(store, plan).layers == 0
