"""What a pass asks of the store, and that streaming changes nothing: golden numbers with bytes from a hub."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass, field

import numpy as np
import pytest

import deltafin
from deltafin import Segment
from deltafin.indexer import GLOBALS

# Largest error of a logit and of their RMS: tests/golden/README.md.
LIMITS = {"tiny": (1e-3, 1e-4), "k93": (2e-2, 1e-3)}


@dataclass
class Stream:
    """A model computed from an empty cache: the golden arrays, logits by prompt, and what the first pass did."""

    name: str
    model: deltafin.Model
    golden: dict[str, np.ndarray]
    logits: dict[int, np.ndarray] = field(default_factory=dict)
    expert_reads: dict[tuple[int, int], int] = field(default_factory=dict)
    spine_reads: dict[int, int] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)
    first_ranges: dict[tuple[str, int, int], int] = field(default_factory=dict)
    later_ranges: dict[tuple[str, int, int], int] = field(default_factory=dict)
    hidden: dict[tuple[str, int], np.ndarray] = field(default_factory=dict)
    weights: dict[int, np.ndarray] = field(default_factory=dict)
    chosen: dict[int, dict[int, np.ndarray]] = field(default_factory=dict)

    def union(self, *prompts: int) -> set[tuple[int, int]]:
        """Every (layer, expert) that any row of these prompts chose in the golden run."""
        layers = self.golden["trace_moe_layers"].tolist()
        return {
            (layer, int(expert))
            for k in prompts
            for layer, ids in zip(layers, self.golden[f"p{k}_route_ids"], strict=True)
            for expert in np.unique(ids)
        }

    def spans(self, experts) -> set[tuple[str, int, int]]:
        catalog = self.model.store.catalog
        found = (catalog.expert_spans(layer, [expert])[0] for layer, expert in experts)
        return {(catalog.shards[s.shard].name, s.offset, s.nbytes) for s in found}

    def all_but_experts(self) -> set[tuple[str, int, int]]:
        catalog = self.model.store.catalog
        spans = [s for layer in range(catalog.config.num_layers) for s in catalog.spine(layer).spans]
        spans += [*catalog.spine(GLOBALS).spans, *catalog.embedding().spans, *catalog.head().spans]
        return {(catalog.shards[s.shard].name, s.offset, s.nbytes) for s in spans}


class Watcher(deltafin.Observer):
    wants_hidden = True

    def __init__(self, chosen, weights, hidden) -> None:
        self._chosen, self._weights, self._hidden = chosen, weights, hidden

    def routes(self, layer, ids, weights):
        self._chosen[layer], self._weights[layer] = ids, weights

    def hidden(self, layer, point, values):
        self._hidden[point, layer] = values


@pytest.fixture(scope="module", params=["tiny", "k93"])
def stream(request, golden, range_server, ranges, tmp_path_factory) -> Stream:
    directory = request.getfixturevalue(f"{request.param}_dir")
    arrays = dict(np.load(golden / request.param / "golden.npz"))
    with ExitStack() as stack:
        server = stack.enter_context(range_server.FaultServer(root=str(directory)))
        stack.enter_context(pytest.MonkeyPatch.context()).setenv("HF_ENDPOINT", server.url)
        model = stack.enter_context(deltafin.open("test/model", cache_dir=tmp_path_factory.mktemp("cache")))
        s = Stream(request.param, model, arrays)
        server.set_mode("ok")  # forget the headers
        for k in (3, 0, 1, 2):  # 130 rows first, from nothing; what is seen of p2 stays, as in the golden trace
            s.chosen[k] = {}
            watcher = Watcher(s.chosen[k], s.weights, s.hidden)
            segment = Segment(model.sequence(), arrays[f"p{k}_ids"])
            s.logits[k] = model.forward([segment], logits="all", observer=watcher)
            if k == 3:
                stats = model.store.stats
                s.expert_reads, s.spine_reads = dict(stats.expert_reads), dict(stats.spine_reads)
                s.counts, s.first_ranges = stats.snapshot(), ranges(server)
        s.later_ranges = ranges(server)
        s.later_ranges.subtract(s.first_ranges)
        yield s


def test_a_pass_of_130_rows_reads_each_expert_it_needs_once_and_no_other(stream):
    assert len(stream.golden["p3_ids"]) == 130
    assert stream.expert_reads == dict.fromkeys(stream.union(3), 1)


def test_a_pass_of_130_rows_reads_the_spine_of_each_layer_once(stream):
    assert stream.spine_reads == dict.fromkeys([*range(stream.model.config.num_layers), GLOBALS], 1)


def test_the_server_sent_each_range_of_that_pass_once_and_no_other(stream):
    expected = stream.spans(stream.union(3)) | stream.all_but_experts()
    assert stream.first_ranges == dict.fromkeys(expected, 1)
    assert stream.counts["http_spans"] == len(expected)
    assert stream.counts["http_nbytes"] == sum(nbytes for _, _, nbytes in expected)
    assert stream.counts["shard_spans"] == 0


def test_later_passes_fetch_only_experts_that_no_pass_before_them_needed(stream):
    asked = {span for span, count in stream.later_ranges.items() if count}
    assert asked == stream.spans(stream.union(0, 1, 2) - stream.union(3))
    assert max(stream.later_ranges.values()) <= 1


def test_streamed_logits_are_the_golden_ones(stream):
    largest, rms = LIMITS[stream.name]
    for k, logits in stream.logits.items():
        error = np.abs(logits - stream.golden[f"p{k}_logits"])
        assert error.max() < largest
        assert np.sqrt(np.mean(np.square(error))) < rms
        assert (logits.argmax(1) == stream.golden[f"p{k}_logits"].argmax(1)).all()


def test_streamed_routes_and_hidden_states_are_the_golden_ones(stream):
    for k, chosen in stream.chosen.items():
        for index, layer in enumerate(stream.golden["trace_moe_layers"].tolist()):
            expected = np.sort(stream.golden[f"p{k}_route_ids"][index], axis=1)
            assert (np.sort(chosen[layer], axis=1) == expected).all()
    for index, layer in enumerate(stream.golden["trace_moe_layers"].tolist()):
        error = np.abs(stream.weights[layer] - stream.golden["trace_route_weights"][index])
        assert error.max() < {"tiny": 3e-5, "k93": 3e-4}[stream.name]
    for point in ("attn_in", "attn_out", "mlp_in", "mlp_out", "layer_out"):
        for layer, expected in enumerate(stream.golden[f"trace_{point}"]):
            error = np.linalg.norm(stream.hidden[point, layer] - expected) / np.linalg.norm(expected)
            assert error < {"tiny": 1e-4, "k93": 3e-4}[stream.name]


def test_32_ids_continued_from_streamed_experts_are_the_golden_ones(stream):
    model = stream.model
    ids = list(model.generate(model.sequence(), stream.golden["p2_ids"], max_new=32, stop_ids=()))
    assert ids == stream.golden["p2_greedy"].tolist()


@pytest.mark.slow
def test_all_four_prompts_continue_with_32_golden_ids(stream):
    for k in range(4):
        model = stream.model
        ids = list(model.generate(model.sequence(), stream.golden[f"p{k}_ids"], max_new=32, stop_ids=()))
        assert ids == stream.golden[f"p{k}_greedy"].tolist()


@pytest.mark.parametrize("name", ["tiny", "k93"])
def test_a_pass_over_local_shards_reads_each_expert_and_spine_once(name, request, golden, tmp_path):
    directory = request.getfixturevalue(f"{name}_dir")
    arrays = dict(np.load(golden / name / "golden.npz"))
    with deltafin.open(directory, cache_dir=tmp_path) as model:
        s = Stream(name, model, arrays)
        model.forward([Segment(model.sequence(), arrays["p3_ids"])], logits="none")
        assert dict(model.store.stats.expert_reads) == dict.fromkeys(s.union(3), 1)
        layers = range(model.config.num_layers)
        assert {layer: model.store.stats.spine_reads[layer] for layer in layers} == dict.fromkeys(layers, 1)

        # Rows of several sequences share what they read just as rows of one do.
        before = dict(model.store.stats.expert_reads)
        model.forward([Segment(model.sequence(), arrays[f"p{k}_ids"]) for k in range(4)], logits="none")
        after = {pair: count - before.get(pair, 0) for pair, count in model.store.stats.expert_reads.items()}
        assert after == dict.fromkeys(s.union(0, 1, 2, 3), 1)
        assert {layer: model.store.stats.spine_reads[layer] for layer in layers} == dict.fromkeys(layers, 2)
