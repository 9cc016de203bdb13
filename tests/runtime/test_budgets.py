"""Promise 1 under every budget: no bit depends on what is in memory, in how many pieces it came, or from where.

Checkpoints are indexed with small spans, so that matrices are cut and stream in pieces as those of K3 do.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest

import deltafin
from deltafin.cext import _math
from deltafin.errors import Corrupt, DeltafinError, Missing
from deltafin.runtime import Segment
from deltafin.runtime.native import opening
from deltafin.store import (
    PackFormat,
    all_items,
    fetch,
    least_ring_nbytes,
    open_store,
    plan_packs,
    spine_pieces,
    write_packs,
)
from deltafin.store.drive import Drive

REPO = "org/model"
SPAN, SMALL = 12_000, 2_000  # bytes; K3: 32 MiB and 64 KiB
PROMPT = [5, 17, 2, 200, 33, 7, 90, 41, 5, 5, 118, 64, 9]


def _make_spans_small(patch: pytest.MonkeyPatch) -> None:
    patch.setattr("deltafin.indexer.catalog.SPINE_SPAN_NBYTES", SPAN)
    patch.setattr("deltafin.indexer.catalog.SMALL_TENSOR_NBYTES", SMALL)


@pytest.fixture(autouse=True)
def small_spans(monkeypatch) -> None:
    _make_spans_small(monkeypatch)


def least(plan, layers):
    """Two pieces at a time, two slots, one row a pass, nothing stays."""
    return _stream(plan, layers, least_ring_nbytes(layers), slots=2, rows=1, resident_experts=0)


def pieces(plan, layers):
    """Some layers stay, some experts, and a prompt takes a few passes."""
    ring = 3 * least_ring_nbytes(layers)
    return _stream(plan, layers, ring, slots=3, rows=5, resident_experts=9, resident=range(1, len(layers), 3))


def streamed(plan, layers):
    """Nothing stays, but a whole layer is read ahead."""
    ring = max(layer.slots_nbytes for layer in layers)
    return _stream(plan, layers, ring, slots=16, rows=512, resident_experts=0)


def ample(plan, layers):
    assert len(plan.resident) == len(layers)
    assert plan.resident_experts > 0
    return plan


def _stream(plan, layers, ring, *, slots, rows, resident_experts, resident=()):
    held = 2 * max(layer.held_nbytes for layer in layers)
    return replace(
        plan,
        resident=tuple(resident),
        ring_nbytes=ring,
        held_nbytes=held,
        slots=slots,
        rows=rows,
        resident_experts=resident_experts,
    )


BUDGETS = [least, pieces, streamed, ample]


@dataclass(frozen=True)
class Found:
    logits: bytes  # of the prompt
    ids: list[int]
    state: bytes  # the logits after everything, which depend on all of the state


def compute(model) -> Found:
    seq = model.sequence()
    prompt = [i % model.config.vocab_size for i in PROMPT]
    logits = model.forward([Segment(seq, prompt[:7])])
    logits = np.concatenate([logits, model.forward([Segment(seq, prompt[7:])])])
    ids = list(model.generate(seq, [prompt[0]], max_new=4, stop_ids=()))
    other = model.sequence()
    both = model.forward([Segment(other, prompt[:3]), Segment(seq, ids[-1:])])
    return Found(logits.tobytes(), ids, both.tobytes())


@pytest.fixture
def planned(monkeypatch) -> Callable[..., object]:
    """`planned(budget, model, ..)` opens a model whose plan `budget` has changed."""

    @contextmanager
    def open_(budget, model, **keywords) -> Iterator[object]:
        real = opening.plan_memory

        def plan(nbytes, catalog, layers, want, threads):
            return budget(real(nbytes, catalog, layers, want, threads), layers)

        with monkeypatch.context() as patch:
            patch.setattr(opening, "plan_memory", plan)
            model = deltafin.open(model, **keywords)
        with model:
            yield model

    return open_


@pytest.fixture(params=["tiny", pytest.param("k93", marks=pytest.mark.slow)], scope="session")
def checkpoint(request):
    return request.getfixturevalue(f"{request.param}_dir")


_expected: dict[str, Found] = {}


@pytest.fixture
def expected(checkpoint, open_model, tmp_path) -> Found:
    """What the model computes with everything in memory, indexed with ordinary spans."""
    if (key := str(checkpoint)) not in _expected:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("deltafin.indexer.catalog.SPINE_SPAN_NBYTES", 32 << 20)
            patch.setattr("deltafin.indexer.catalog.SMALL_TENSOR_NBYTES", 64 << 10)
            with deltafin.open(checkpoint, cache_dir=tmp_path / "expected") as model:
                _expected[key] = compute(model)
    return _expected[key]


@pytest.fixture(scope="session")
def fetched(checkpoint, range_server, tmp_path_factory) -> Path:
    """A cache with all of the checkpoint, in small spans. Copy it."""
    cache = tmp_path_factory.mktemp("fetched") / "cache"
    with range_server.FaultServer(root=str(checkpoint)) as server, pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_ENDPOINT", server.url)
        _make_spans_small(patch)
        with open_store(REPO, cache_dir=cache) as store:
            fetch(store, all_items(store.catalog))
    return cache


def _in_place(request, cache):
    return str(request.getfixturevalue("checkpoint"))


def _objects(request, cache):
    shutil.copytree(request.getfixturevalue("fetched"), cache)
    return REPO


def _http(request, cache):
    request.getfixturevalue("hub")(request.getfixturevalue("checkpoint"))
    return REPO


@pytest.mark.parametrize("budget", BUDGETS, ids=lambda f: f.__name__)
@pytest.mark.parametrize("source", [_in_place, _objects, _http], ids=["shards", "objects", "http"])
def test_no_bit_depends_on_the_budget_or_the_source(request, source, budget, planned, expected, tmp_path):
    cache = tmp_path / "cache"
    model = source(request, cache)
    with planned(budget, model, cache_dir=cache, offline=source is _objects) as opened:
        assert compute(opened) == expected
        counts = opened.store.stats.snapshot()
        kind = {_in_place: "shard", _objects: "object", _http: "http"}[source]
        assert counts[f"{kind}_spans"] > 0
        assert (counts["ram_spans"] > 0) == (budget in (pieces, ample))
        layers = opened.config.num_layers
        assert counts["spine_visits"] == opened.times.passes * (layers + 1)
        assert opened.times.passes == {least: 21, pieces: 9}.get(budget, 7)


@pytest.fixture
def kernels() -> Iterator[None]:
    isa, threads, grain = _math.isa(), _math.threads(), _math.grain()
    yield
    _math.set_isa(isa)
    _math.set_threads(threads)
    _math.set_grain(grain)


@pytest.mark.parametrize("threads", [1, 2, 3, 5])
@pytest.mark.parametrize("isa", _math.isas())
def test_no_bit_of_streamed_packs_depends_on_threads_or_instructions(
    tiny_dir, isa, threads, planned, tmp_path, kernels
):
    with deltafin.open(tiny_dir, cache_dir=tmp_path, spine="released") as model:
        wanted = compute(model)
    with open_store(str(tiny_dir), cache_dir=tmp_path) as store:
        write_packs(store, plan_packs(store, PackFormat.BF12, range(store.catalog.config.num_layers)))
    _math.set_isa(isa)
    _math.set_grain(7)
    with planned(pieces, tiny_dir, cache_dir=tmp_path, threads=threads) as model:
        assert compute(model) == wanted
        assert model.spine_label == "bf12"


def test_no_bit_depends_on_how_a_prompt_is_cut_into_calls_and_passes(tiny_dir, planned, tmp_path):
    wanted = None
    for budget in (ample, pieces, least):
        for step in (1, 3, 4, len(PROMPT)):
            with planned(budget, tiny_dir, cache_dir=tmp_path) as model:
                seq, rows = model.sequence(), []
                for start in range(0, len(PROMPT), step):
                    rows.append(model.forward([Segment(seq, PROMPT[start : start + step])]))
                found = np.concatenate(rows).tobytes()
            wanted = wanted or found
            assert found == wanted


def test_no_bit_depends_on_the_order_of_landing_or_flush_to_zero(tiny_dir, planned, tmp_path, monkeypatch):
    with planned(ample, tiny_dir, cache_dir=tmp_path) as model:
        wanted = compute(model)
    real = Drive.read

    def late(self, path, offset, nbytes, slot):
        time.sleep((offset // 8 * 2654435761 % 7) / 2000)  # some reads take longer than others
        return real(self, path, offset, nbytes, slot)

    monkeypatch.setattr(Drive, "read", late)
    try:
        _math.test_set_flush(True)
        with planned(pieces, tiny_dir, cache_dir=tmp_path) as model:
            assert compute(model) == wanted
    finally:
        _math.test_set_flush(False)


def test_no_bit_of_93_layers_depends_on_the_budget(k93_dir, k93, planned, tmp_path):
    seq = k93.sequence()
    wanted = k93.forward([Segment(seq, PROMPT)]).tobytes()
    for budget in (pieces, streamed):
        with planned(budget, k93_dir, cache_dir=tmp_path) as model:
            assert model.forward([Segment(model.sequence(), PROMPT)]).tobytes() == wanted


@pytest.mark.parametrize("budget", BUDGETS, ids=lambda f: f.__name__)
@pytest.mark.parametrize("encoding", [PackFormat.BF16, PackFormat.BF12])
def test_no_bit_depends_on_a_lossless_pack(checkpoint, encoding, budget, planned, expected, tmp_path):
    with open_store(str(checkpoint), cache_dir=tmp_path) as store:
        totals = write_packs(store, plan_packs(store, encoding, range(store.catalog.config.num_layers)))
    with planned(budget, checkpoint, cache_dir=tmp_path, spine=str(encoding)) as model:
        assert compute(model) == expected
        assert model.as_released and model.spine_label == encoding
        assert model.store.stats.snapshot()["pack_spans"] >= totals.layers
    with planned(budget, checkpoint, cache_dir=tmp_path) as model:
        assert model.spine_label == encoding, "what is lossless is used unasked"
    with planned(budget, checkpoint, cache_dir=tmp_path, spine="released") as model:
        assert compute(model) == expected
        assert model.spine_label is None and model.store.stats.snapshot()["pack_spans"] == 0


def test_bf12_is_used_before_bf16_and_int8_only_when_asked_for_and_is_labelled(tiny_dir, planned, tmp_path):
    with open_store(str(tiny_dir), cache_dir=tmp_path) as store:
        for encoding in PackFormat:
            write_packs(store, plan_packs(store, encoding, range(store.catalog.config.num_layers)))
    found = {}
    for asked in (None, "int8"):
        with planned(pieces, tiny_dir, cache_dir=tmp_path, spine=asked) as model:
            found[asked] = np.frombuffer(compute(model).logits, np.float32)
            label = model.spine_label
            assert (label, model.as_released) == (
                ("int8 (not as released)", False) if asked == "int8" else ("bf12", True)
            )
    difference = np.abs(found[None] - found["int8"])
    assert difference.max() > 0 and np.median(difference) < 0.5, "rounded, but the same model"


def test_a_layer_that_is_not_packed_streams_as_released_beside_those_that_are(tiny_dir, planned, tmp_path):
    with deltafin.open(tiny_dir, cache_dir=tmp_path, spine="released") as model:
        wanted = compute(model)
    with open_store(str(tiny_dir), cache_dir=tmp_path) as store:
        write_packs(store, plan_packs(store, PackFormat.BF12, [1, 4]))
    with planned(pieces, tiny_dir, cache_dir=tmp_path) as model:
        assert compute(model) == wanted
        assert model.spine_label == f"bf12 in 2 of {model.config.num_layers} layers"
    with pytest.raises(Missing, match=r"df-fetch spine .* --as bf12"):
        deltafin.open(tiny_dir, cache_dir=tmp_path, spine="bf12")


def test_a_damaged_piece_of_a_pack_is_never_computed_with(tiny_dir, planned, tmp_path):
    with open_store(str(tiny_dir), cache_dir=tmp_path) as store:
        write_packs(store, plan_packs(store, PackFormat.BF12, range(store.catalog.config.num_layers)))
        pack = store.packs(PackFormat.BF12).packs[3]
    with open(pack.path, "r+b") as f:
        f.seek(pack.pieces[2].offset + 5)
        byte = f.read(1)[0]
        f.seek(-1, 1)
        f.write(bytes([byte ^ 1]))
    for budget in (least, ample):
        with planned(budget, tiny_dir, cache_dir=tmp_path) as model:
            seq = model.sequence()
            with pytest.raises(
                Corrupt, match=rf"{pack.path.name}: damaged .*--spine released.*df-fetch spine MODEL --as"
            ):
                model.forward([Segment(seq, PROMPT)])
            assert len(seq) == 0


@pytest.mark.parametrize("direct_from", [0, 1 << 30], ids=["direct", "buffered"])
def test_no_bit_depends_on_direct_reads(request, direct_from, planned, expected, tmp_path, monkeypatch):
    monkeypatch.setattr("deltafin.store.drive.DIRECT_FROM_NBYTES", direct_from)
    for source in (_in_place, _objects):
        cache = tmp_path / source.__name__
        model = source(request, cache)
        with planned(pieces, model, cache_dir=cache, offline=True) as opened:
            assert compute(opened) == expected


def test_the_demo_says_the_same_in_pieces(demo_dir, planned, tmp_path, demo):
    prompt = demo.tokenizer.encode("The capital of France is")
    wanted = list(demo.generate(demo.sequence(), prompt, max_new=12))
    with planned(least, demo_dir, cache_dir=tmp_path) as model:
        assert list(model.generate(model.sequence(), prompt, max_new=12)) == wanted


def test_spans_are_rows_of_one_matrix_and_most_of_a_layer_streams(checkpoint, tmp_path):
    from deltafin.runtime.native.passes import matrices

    with open_store(str(checkpoint), cache_dir=tmp_path) as store:
        config = store.catalog.config
        layers = spine_pieces(store.catalog, lambda layer: matrices(config, layer))
        assert len(layers) == config.num_layers + 1
        for layer in layers[:-1]:
            assert {p.matrix for p in layer.streamed} <= set(matrices(config, layer.number))
            assert [p.matrix for p in layer.streamed] == sorted(
                (p.matrix for p in layer.streamed), key=matrices(config, layer.number).index
            ), "in the order of use"
            spans = store.catalog.spine(layer.number).spans
            assert sorted((p.span.shard, p.span.offset) for p in (*layer.held, *layer.streamed)) == sorted(
                (s.shard, s.offset) for s in spans
            ), "every span once"
        assert max(sum(p.matrix == "block_sparse_moe.gate.weight" for p in layer.streamed) for layer in layers) >= 1
        assert any(p.first > 0 for layer in layers for p in layer.streamed), "some matrix comes in several pieces"


def test_a_failure_in_the_middle_leaves_the_sequence_as_it_was_and_the_reader_usable(
    tiny_dir, planned, tmp_path, monkeypatch
):
    class Stop(DeltafinError):
        pass

    class Stopper(deltafin.Observer):
        def __init__(self, at):
            self.left = at

        def layer(self, layer, num_layers):
            self.left -= 1
            if self.left < 0:
                raise Stop

    for budget in (least, pieces, ample):
        with planned(budget, tiny_dir, cache_dir=tmp_path / budget.__name__) as model:
            seq = model.sequence()
            model.forward([Segment(seq, PROMPT[:4])], logits="none")
            twin = model.sequence()
            model.forward([Segment(twin, PROMPT[:4])], logits="none")
            for at in (0, 1, 5, 11, 14):  # also in a later pass of one forward
                before = seq.ids
                try:
                    model.forward([Segment(seq, PROMPT[4:])], logits="none", observer=Stopper(at))
                except Stop:
                    assert seq.ids == before
                else:
                    assert budget is ample and at >= model.config.num_layers
                    break
            if len(seq) == 4:
                wanted = model.forward([Segment(twin, PROMPT[4:])])
                assert model.forward([Segment(seq, PROMPT[4:])]).tobytes() == wanted.tobytes()


def test_a_lost_shard_in_the_middle_of_a_stream_is_one_error_and_nothing_hangs(tiny_dir, planned, tmp_path):
    copy = tmp_path / "ckpt"
    shutil.copytree(tiny_dir, copy)
    with planned(least, copy, cache_dir=tmp_path / "cache") as model:
        seq = model.sequence()
        model.forward([Segment(seq, PROMPT[:2])], logits="none")
        place = model.store.catalog.spine(5).tensors[0]
        last = copy / model.store.catalog.shards[place.shard].name
        hidden = last.rename(last.with_suffix(".away"))
        with pytest.raises(DeltafinError, match=last.name):
            model.forward([Segment(seq, PROMPT[2:])], logits="none")
        assert len(seq) == 2
        hidden.rename(last)
        model.forward([Segment(seq, PROMPT[2:])], logits="none")
        assert len(seq) == len(PROMPT)
