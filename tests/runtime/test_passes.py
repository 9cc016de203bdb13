"""One pass: the same answers however its rows are cut, and each byte read once."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from deltafin.indexer import GLOBALS
from deltafin.runtime import Model, Segment

CLOSE = 1e-3  # the golden set's tolerance for a logit


@pytest.fixture(scope="module")
def prompts(golden):
    arrays = np.load(golden / "tiny" / "golden.npz")
    return [arrays[f"p{k}_ids"].tolist() for k in range(4)]


@pytest.fixture(scope="module")
def alone(tiny, prompts):
    """Each prompt's logits from a pass of its own."""
    return [tiny.forward([Segment(tiny.sequence(), ids)]) for ids in prompts]


def _same(found, expected):
    assert found.shape == expected.shape
    assert np.abs(found - expected).max() < CLOSE
    assert (found.argmax(1) == expected.argmax(1)).all()


@pytest.mark.parametrize("cut", [1, 2, 3, 4, 63, 64, 65, 127, 128, 129])
def test_a_prompt_cut_in_two_gives_the_same_logits(tiny, prompts, alone, cut):
    seq = tiny.sequence()
    parts = [tiny.forward([Segment(seq, ids)]) for ids in (prompts[3][:cut], prompts[3][cut:])]
    _same(np.concatenate(parts), alone[3])


def test_a_prompt_fed_token_by_token_gives_the_same_logits(tiny, prompts, alone):
    seq = tiny.sequence()
    _same(np.concatenate([tiny.forward([Segment(seq, [token])]) for token in prompts[2]]), alone[2])
    assert len(seq) == len(prompts[2])
    assert seq.ids == prompts[2]


def test_sequences_in_one_pass_give_what_each_gives_alone(tiny, prompts, alone):
    _same(tiny.forward([Segment(tiny.sequence(), ids) for ids in prompts]), np.concatenate(alone))


def test_sequences_of_different_age_share_a_pass(tiny, prompts, alone):
    old, new = tiny.sequence(), tiny.sequence()
    tiny.forward([Segment(old, prompts[3][:50])], logits="none")
    found = tiny.forward([Segment(new, prompts[2]), Segment(old, prompts[3][50:])])
    _same(found, np.concatenate([alone[2], alone[3][50:]]))


def test_last_is_each_segments_last_row(tiny, prompts, alone):
    found = tiny.forward([Segment(tiny.sequence(), ids) for ids in prompts], logits="last")
    _same(found, np.stack([logits[-1] for logits in alone]))


def test_none_returns_nothing_and_advances(tiny, prompts, alone):
    seq = tiny.sequence()
    assert tiny.forward([Segment(seq, prompts[1][:-1])], logits="none") is None
    _same(tiny.forward([Segment(seq, prompts[1][-1:])]), alone[1][-1:])


def test_targets_are_the_log_softmax_of_all(tiny, prompts, alone):
    rng = np.random.default_rng(1)
    targets = [rng.integers(0, tiny.config.vocab_size, len(ids)) for ids in prompts]
    segments = [Segment(tiny.sequence(), ids, want) for ids, want in zip(prompts, targets, strict=True)]
    found = tiny.forward(segments, logits="targets")
    logits = np.concatenate(alone).astype(np.float64)
    logits -= logits.max(1, keepdims=True)
    expected = logits - np.log(np.exp(logits).sum(1, keepdims=True))
    rows = np.arange(len(found))
    assert found.dtype == np.float32
    assert np.abs(found - expected[rows, np.concatenate(targets)]).max() < CLOSE


@pytest.mark.parametrize("cuts", [[130], [1, 5, 37, 87]])
def test_a_pass_of_130_rows_reads_each_spine_and_each_expert_once(spoiled, spoiled_model, prompts, recorder, cuts):
    """By the reads themselves and by the store's counters, for one sequence and for several."""
    model, catalog, stats = spoiled_model, spoiled.catalog, spoiled.stats
    ids = iter(prompts[3])
    segments = [Segment(model.sequence(), [next(ids) for _ in range(cut)]) for cut in cuts]
    model.forward(segments, logits="none", observer=recorder)
    chosen = [(layer, int(n)) for layer, ids in recorder.route_ids.items() for n in np.unique(ids)]
    layers = [*range(model.config.num_layers), GLOBALS]
    spans = [span for layer in layers for span in catalog.spine(layer).spans]
    spans += [catalog.expert_spans(layer, [number])[0] for layer, number in chosen]
    assert spoiled.reads == Counter(spans)
    assert stats.expert_reads == Counter(chosen)
    assert stats.spine_reads == Counter(layers)


def test_what_stays_in_memory_is_visited_in_each_pass_and_read_once(spoiled, prompts):
    with Model(spoiled) as model:
        first = model.forward([Segment(model.sequence(), prompts[3])])
        reads, spines, experts = (
            spoiled.reads.copy(),
            spoiled.stats.spine_reads.copy(),
            spoiled.stats.expert_reads.copy(),
        )
        again = model.forward([Segment(model.sequence(), prompts[3])])
    assert set(reads.values()) == {1}
    assert spoiled.reads == reads
    assert spoiled.stats.spine_reads == spines + spines
    assert spoiled.stats.expert_reads == experts + experts
    assert again.tobytes() == first.tobytes()


@pytest.mark.parametrize("order", [sorted, lambda x: sorted(x, reverse=True), lambda x: sorted(x, key=str)])
def test_the_order_in_which_experts_land_changes_no_bit(spoiled, spoiled_model, prompts, order):
    """The outputs of a row are added in ascending expert number, whatever came first."""

    def on_landing(landing):
        spans = {number: span.copy() for number, span in landing}
        for number in order(spans):
            yield number, spans[number]

    expected = spoiled_model.forward([Segment(spoiled_model.sequence(), prompts[2])])
    spoiled.on_landing = on_landing
    found = spoiled_model.forward([Segment(spoiled_model.sequence(), prompts[2])])
    assert found.tobytes() == expected.tobytes()


def test_an_observer_sees_the_pass_in_order(tiny, recorder):
    first, second = tiny.sequence(), tiny.sequence()
    tiny.forward([Segment(first, [1, 2])], logits="none")
    tiny.forward([Segment(second, [5]), Segment(first, [3, 4, 5])], logits="none", observer=recorder)
    [spans] = recorder.spans
    assert [(s.sequence, s.position, s.count) for s in spans] == [(second.number, 0, 1), (first.number, 2, 3)]
    assert recorder.calls[:5] == ["rows", "layer 0", "attn_in 0", "attn_out 0", "mlp_in 0"]
    assert recorder.calls[-2:] == [f"final_norm {tiny.config.num_layers}", "finished"]
    assert recorder.layers == list(range(tiny.config.num_layers))
    for layer in tiny.config.moe_layers:
        assert recorder.route_ids[layer].dtype == np.int32
        assert recorder.route_weights[layer].shape == (4, tiny.config.top_k)
        assert (np.diff(recorder.route_weights[layer], axis=1) <= 0).all()


def test_hidden_vectors_are_shown_only_to_who_asks(tiny, recorder):
    recorder.wants_hidden = False
    tiny.forward([Segment(tiny.sequence(), [1])], logits="none", observer=recorder)
    assert not recorder.vectors
    assert recorder.route_ids
