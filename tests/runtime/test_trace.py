"""Router choices on disk: readable after a kill, refused when they are another model's."""

from __future__ import annotations

import json
import logging
from dataclasses import replace

import numpy as np
import pytest
import zstandard

from deltafin.errors import BadRequest, DiskError
from deltafin.runtime import Segment, TraceWriter, expert_uses, read_trace

IDS = [3, 141, 59, 26, 5]


@pytest.fixture(scope="module")
def traced(tiny, tmp_path_factory, new_recorder):
    """A trace of three passes, the sizes of the file after each, and what an observer saw in the last."""
    path = tmp_path_factory.mktemp("trace") / "routes.zst"
    first, second = tiny.sequence(), tiny.sequence()
    sizes = []
    with TraceWriter(path, tiny.store.catalog) as writer:
        sizes.append(path.stat().st_size)
        tiny.forward([Segment(first, IDS)], logits="none", observer=writer)
        sizes.append(path.stat().st_size)
        tiny.forward([Segment(second, [7]), Segment(first, [8, 9])], logits="none", observer=writer)
        sizes.append(path.stat().st_size)
        tiny.forward([Segment(second, [10])], logits="none", observer=writer)
    sizes.append(path.stat().st_size)
    recorder = new_recorder()
    again = tiny.sequence()
    tiny.forward([Segment(again, IDS)], logits="none", observer=recorder)
    return path, sizes, (first.number, second.number), recorder


def test_a_trace_gives_back_every_choice(tiny, traced):
    path, _, (first, second), recorder = traced
    trace = read_trace(path)
    assert trace.header.model == tiny.store.catalog.identity
    assert trace.header.moe_layers == tuple(tiny.config.moe_layers)
    lines = list(trace)
    assert not trace.torn
    assert [(line.number, line.layer) for line in lines] == [
        (p, layer) for p in range(3) for layer in tiny.config.moe_layers
    ]
    assert lines[0].rows == tuple((first, i) for i in range(5))
    assert lines[8].rows == ((second, 0), (first, 5), (first, 6))
    for line in lines[:8]:
        assert (line.ids == recorder.route_ids[line.layer]).all()
        assert (line.weights == recorder.route_weights[line.layer]).all()


def test_the_file_is_plain_json_lines_under_zstd(traced):
    path, *_ = traced
    text = zstandard.ZstdDecompressor().stream_reader(path.open("rb"), read_across_frames=True).read().decode()
    header, *lines = [json.loads(line) for line in text.splitlines()]
    assert header["format"] == "deltafin-trace"
    assert set(lines[0]) == {"pass", "layer", "rows", "ids", "weights"}


def test_uses_count_rows(tiny, traced):
    path, *_ = traced
    uses = expert_uses(path, tiny.config)
    assert uses.total() == 9 * 8 * tiny.config.top_k
    assert all(layer in tiny.config.moe_layers and 0 <= n < tiny.config.num_experts for layer, n in uses)


def test_a_trace_cut_anywhere_gives_its_whole_passes_and_says_so(tiny, traced, tmp_path, caplog):
    path, sizes, *_ = traced
    raw = path.read_bytes()
    for cut in [*range(sizes[0], len(raw), 37), *sizes]:
        torn = tmp_path / "torn.zst"
        torn.write_bytes(raw[:cut])
        trace = read_trace(torn)
        passes = sum(size <= cut for size in sizes) - 1
        assert len(list(trace)) == 8 * passes
        assert trace.torn == (cut not in sizes)
    torn.write_bytes(raw[: sizes[1] + 20])
    with caplog.at_level(logging.WARNING):
        assert expert_uses(torn, tiny.config).total() == 5 * 8 * tiny.config.top_k
    assert "ends inside a pass" in caplog.text


def test_a_pass_that_failed_is_not_in_the_trace(spoiled, spoiled_model, tmp_path):
    path = tmp_path / "t.zst"
    seq = spoiled_model.sequence()

    def on_spine(layer, tensors):
        if layer == 6:
            raise DiskError("gone")
        return tensors

    with TraceWriter(path, spoiled_model.store.catalog) as writer:
        spoiled.on_spine = on_spine
        with pytest.raises(DiskError):
            spoiled_model.forward([Segment(seq, IDS)], observer=writer)
        spoiled.on_spine = None
        spoiled_model.forward([Segment(seq, [1])], observer=writer)
    assert [(line.number, line.rows) for line in read_trace(path)] == [(0, ((seq.number, 0),))] * 8


def test_a_trace_of_a_differently_shaped_model_is_refused(tiny, traced):
    path, *_ = traced
    for change in ({"num_experts": 17}, {"top_k": 3}, {"first_moe_layer": 2}):
        with pytest.raises(BadRequest, match="of a model with 8 MoE layers, 16 experts, 4 chosen") as caught:
            expert_uses(path, replace(tiny.config, **change))
        assert "\n" not in str(caught.value)


HEADER = {"format": "deltafin-trace", "version": 1, "model": "m", "moe_layers": [1], "top_k": 2, "num_experts": 4}
LINE = {"pass": 0, "layer": 1, "rows": [[0, 0]], "ids": [[1, 2]], "weights": [[0.5, 0.5]]}


def _file(*frames) -> bytes:
    raw = [frame if isinstance(frame, bytes) else json.dumps(frame).encode() + b"\n" for frame in frames]
    return b"".join(zstandard.compress(frame) for frame in raw)


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"plain text, no trace",
        zstandard.compress(b'{"format": "deltafin-trace"}\n')[:-3],
        _file(b"not json\n"),
        _file({**HEADER, "format": "other"}),
        _file({**HEADER, "version": 2}),
        _file({k: v for k, v in HEADER.items() if k != "top_k"}),
        _file({**HEADER, "moe_layers": ["1"]}),
        _file(HEADER, b"not json\n"),
        _file(HEADER, {**LINE, "layer": 2}),
        _file(HEADER, {**LINE, "ids": [[1, 4]]}),
        _file(HEADER, {**LINE, "ids": [[1, -1]]}),
        _file(HEADER, {**LINE, "ids": [[1, 2, 3]]}),
        _file(HEADER, {**LINE, "ids": [[1], [2, 3]]}),
        _file(HEADER, {**LINE, "ids": [[1, 1e300]]}),
        _file(HEADER, {**LINE, "ids": [[1.5, 2]]}),
        _file(HEADER, {**LINE, "rows": [[0, 0], [0, 1]]}),
        _file(HEADER, {**LINE, "rows": None}),
        _file(HEADER, {**LINE, "weights": [["a", "b"]]}),
        _file(HEADER, {**LINE, "pass": None}),
        _file(HEADER) + b"something else",
    ],
)
def test_files_that_are_no_trace_are_refused_in_one_line(tmp_path, raw):
    path = tmp_path / "t.zst"
    path.write_bytes(raw)
    with pytest.raises(BadRequest) as caught:
        list(read_trace(path))
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_flipped_bit_is_noticed(traced, tmp_path):
    path, sizes, *_ = traced
    raw = bytearray(path.read_bytes())
    raw[(sizes[0] + sizes[1]) // 2] ^= 4
    damaged = tmp_path / "damaged.zst"
    damaged.write_bytes(raw)
    with pytest.raises(BadRequest):
        list(read_trace(damaged))


def test_a_missing_file_and_a_missing_folder_are_refused(tiny, tmp_path):
    with pytest.raises(BadRequest, match="cannot be read"):
        read_trace(tmp_path / "none.zst")
    with pytest.raises(BadRequest, match="cannot be written"):
        TraceWriter(tmp_path / "none" / "t.zst", tiny.store.catalog)


def test_a_full_disk_fails_the_pass_with_its_cause(tiny):
    from deltafin.errors import NoSpace

    seq = tiny.sequence()
    with pytest.raises(NoSpace, match="/dev/full"):
        writer = TraceWriter("/dev/full", tiny.store.catalog)
        tiny.forward([Segment(seq, IDS)], observer=writer)
    assert len(seq) == 0
    assert np.isfinite(tiny.forward([Segment(seq, IDS)])).all()
