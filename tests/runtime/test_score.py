"""Scoring: the same bytes as forward's, whatever company and cuts; and each expert once for all texts that fit."""

from __future__ import annotations

import math
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deltafin.cext import _math
from deltafin.errors import BadRequest, NoMemory
from deltafin.indexer import GLOBALS
from deltafin.runtime import Model, Observer, Segment, Want
from deltafin.runtime.native import head, opening
from deltafin.runtime.score import DIVIDED, Score, Text, groups, pass_count, perplexity, rows_a_pass, score
from deltafin.store import Bf16, Block

LENGTHS = (2, 9, 31, 2, 64, 5, 130, 3)


@pytest.fixture(scope="module")
def texts(tiny):
    rng = np.random.default_rng(5)
    ids = [rng.integers(0, tiny.config.vocab_size, count).tolist() for count in LENGTHS]
    return [Text(some, first=1 + number % (len(some) - 1)) for number, some in enumerate(ids)]


@pytest.fixture(scope="module")
def logits(tiny, texts):
    """All logits of each text, alone in a pass."""
    return [tiny.forward([Segment(tiny.sequence(), text.ids[:-1])]) for text in texts]


def _log_probs(logits, targets):
    """By the tiles of the head, from logits that are all there."""
    top, total = np.full(len(logits), -np.inf, np.float32), np.zeros(len(logits), np.float32)
    for first in range(0, logits.shape[1], head.SUM_TILE):
        _math.log_prob_tiles(top, total, np.ascontiguousarray(logits[:, first : first + head.SUM_TILE]), first)
    out = np.empty(len(logits), np.float32)
    _math.log_prob_finish(out, logits[np.arange(len(logits)), targets], top, total)
    return out


def _same(found, expected):
    assert [s.log_probs.tobytes() for s in found] == [s.log_probs.tobytes() for s in expected]
    assert [s.greedy for s in found] == [s.greedy for s in expected]


def test_log_probabilities_are_those_of_forward_and_of_all_logits_to_the_bit(tiny, texts, logits):
    for text, found, rows in zip(texts, score(tiny, texts), logits, strict=True):
        targets = list(text.ids[1:])
        alone = tiny.forward([Segment(tiny.sequence(), text.ids[:-1], targets)], logits="targets")
        assert found.log_probs.tobytes() == alone[text.first - 1 :].tobytes()
        assert found.log_probs.tobytes() == _log_probs(rows, targets)[text.first - 1 :].tobytes()


def test_a_text_is_greedy_if_every_scored_token_is_the_likeliest(tiny, texts, logits):
    likeliest = [rows.argmax(1).tolist() for rows in logits]
    short = [number for number, text in enumerate(texts) if len(text.ids) > 3]
    for number in short:
        ids = list(texts[number].ids)
        made = [Text([*ids[:3], likeliest[number][2]], first=3), Text([*ids[:3], likeliest[number][2] ^ 1], first=3)]
        assert [s.greedy for s in score(tiny, made)] == [True, False]
    scores = score(tiny, texts)
    for text, found, best in zip(texts, scores, likeliest, strict=True):
        assert found.greedy == (best[text.first - 1 :] == list(text.ids[text.first :]))


@pytest.mark.parametrize("rows", [3, 7, 40, 63, 200, 10_000])
def test_no_bit_depends_on_company_or_on_how_passes_are_cut(tiny, tiny_dir, texts, open_model, rows, monkeypatch):
    real = opening.plan_memory
    monkeypatch.setattr(opening, "plan_memory", lambda *args: replace(real(*args), rows=rows))
    with open_model(tiny_dir, want=Want(scoring=True)) as model:
        assert rows_a_pass(model) == rows
        cut = list(groups(texts, lambda text: text.rows, rows))
        found = [one for group in cut for one in score(model, group)]
        assert model.times.passes == pass_count([text.rows for text in texts], rows)
        assert (model.times.passes == 1) == (rows == 10_000)
    _same(found, [score(tiny, [text])[0] for text in texts])


@pytest.mark.slow
def test_no_bit_depends_on_company_or_cuts_through_all_layers(k93, k93_dir, open_model, monkeypatch):
    rng = np.random.default_rng(93)
    texts = [Text(rng.integers(0, k93.config.vocab_size, count).tolist()) for count in (2, 30, 7, 3, 12, 65)]
    alone = [score(k93, [text])[0] for text in texts]
    _same(score(k93, texts), alone)
    real = opening.plan_memory
    monkeypatch.setattr(opening, "plan_memory", lambda *args: replace(real(*args), rows=13))
    with open_model(k93_dir, want=Want(scoring=True)) as model:
        _same([one for group in groups(texts, lambda text: text.rows, 13) for one in score(model, group)], alone)


class Union(Observer):
    """Which experts each pass chose."""

    def __init__(self) -> None:
        self.passes: list[set[tuple[int, int]]] = []

    def rows(self, spans):
        self.passes.append(set())

    def routes(self, layer, ids, weights):
        self.passes[-1].update((layer, int(n)) for n in np.unique(ids))


@pytest.mark.usefixtures("nothing_stays")
def test_all_texts_that_fit_read_each_expert_and_each_layer_once(spoiled, texts):
    """By the reads themselves and by the store's counters."""
    union = Union()
    with Model(spoiled) as model:
        score(model, texts, union)
        [chosen] = union.passes
        layers = [*range(model.config.num_layers), GLOBALS]
    catalog = spoiled.catalog
    spans = [span for layer in layers for span in catalog.spine(layer).spans] + list(catalog.head().spans)
    spans += [catalog.expert_spans(layer, [number])[0] for layer, number in chosen]
    assert spoiled.reads == Counter(spans)
    assert spoiled.stats.expert_reads == Counter(chosen)
    assert spoiled.stats.spine_reads == Counter(layers)


@pytest.mark.usefixtures("nothing_stays")
def test_more_texts_than_fit_read_each_expert_once_a_pass(spoiled, texts, monkeypatch):
    before = opening.plan_memory
    monkeypatch.setattr(opening, "plan_memory", lambda *args: replace(before(*args), rows=100))
    union = Union()
    with Model(spoiled) as model:
        for group in groups(texts, lambda text: text.rows, 100):
            score(model, group, union)
    assert len(union.passes) == 3
    assert spoiled.stats.expert_reads == Counter(pair for chosen in union.passes for pair in chosen)


def test_scoring_leaves_nothing_behind_and_can_be_done_again_after_a_failure(tiny, texts):
    class Fails(Observer):
        armed = True

        def finished(self):
            if self.armed:
                raise RuntimeError("a bad observer")

    watch = Fails()
    with pytest.raises(RuntimeError):
        score(tiny, texts[:3], watch)
    watch.armed = False
    _same(score(tiny, texts[:3], watch), score(tiny, texts[:3]))


def test_the_reference_says_the_same_within_its_tolerance(tiny, tiny_torch, texts):
    for a, b in zip(score(tiny, texts), score(tiny_torch, texts), strict=True):
        assert np.abs(a.log_probs - b.log_probs).max() < 1e-3
        assert a.greedy == b.greedy


# ---- the head ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sizes", [(2500,), (1024, 1024, 452), (1, 1023, 1476), (700, 700, 700, 400), (2340, 160)])
def test_no_bit_depends_on_where_the_blocks_of_the_head_end(sizes):
    rng = np.random.default_rng(3)
    bits = (rng.standard_normal((2500, 32)).astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    y = rng.standard_normal((5, 32)).astype(np.float32)
    targets = np.array([0, 1023, 1024, 2047, 2499])
    edges = np.cumsum([0, *sizes])
    blocks = [Block(int(a), Bf16(bits[a:b])) for a, b in pairwise(edges)]
    found = head.score(y, iter(blocks), targets, likeliest=True)
    logits = head.logits(y, iter(blocks), 2500)
    assert found.log_probs.tobytes() == _log_probs(logits, targets).tobytes()
    assert found.likeliest.tolist() == logits.argmax(1).tolist()


def test_of_equal_logits_the_lowest_id_is_the_likeliest():
    bits = np.zeros((3000, 32), np.uint16)
    bits[[700, 1500, 2999], 0] = 0x3F80  # 1.0
    y = np.zeros((2, 32), np.float32)
    y[0, 0] = 1.0
    found = head.score(y, iter([Block(0, Bf16(bits))]), np.array([700, 5]), likeliest=True)
    assert found.likeliest.tolist() == [700, 0]


# ---- sums and cuts -------------------------------------------------------------------------------------------


def test_a_total_is_added_in_float64_first_token_first():
    values = np.array([-1e8, -1.25, -1e-3, -7.0], np.float32)
    expected = ((float(values[0]) + float(values[1])) + float(values[2])) + float(values[3])
    assert Score(values, greedy=False).total == expected
    assert perplexity(-4.0, 2) == math.exp(2)
    assert perplexity(-1e9, 1) == math.inf


@pytest.mark.parametrize(("ids", "first"), [([], 1), ([4], 1), ([4, 5], 0), ([4, 5], 2), ([4, 5, 6], -1)])
def test_a_text_without_anything_to_score_or_to_score_it_after_is_refused(ids, first):
    with pytest.raises(BadRequest, match="a token needs one before it"):
        Text(ids, first)


@given(st.lists(st.integers(1, 40), max_size=60), st.integers(1, 20))
def test_groups_keep_the_order_and_only_cut_what_fits_no_pass(counts, most):
    found = list(groups(enumerate(counts), lambda item: item[1], most))
    assert [item for group in found for item in group] == list(enumerate(counts))
    assert all(found)
    for group in found:
        at = 0
        for _, count in group:
            assert count > most or at // most == (at + count - 1) // most, "cut, though it fits a pass"
            at += count
    for group, after in pairwise(found):
        room = -sum(count for _, count in group) % most
        full = after[0][1] > most and sum(count > most for _, count in group) == DIVIDED
        assert room < after[0][1] <= most or room == 0 or full, "it would have fitted"
        assert sum(count > most for _, count in group) <= DIVIDED
    assert pass_count(counts, most) == sum(math.ceil(sum(c for _, c in group) / most) for group in found)


def test_a_long_text_that_was_not_planned_for_is_refused_and_short_ones_are_not(open_model, tiny_dir):
    want = Want(rows=4, tokens=8)
    with open_model(tiny_dir, want=want) as model:
        least = model.memory.total - model.memory.resident_experts_nbytes
    with open_model(tiny_dir, want=want, ram=least + (1 << 20)) as model:
        with pytest.raises(NoMemory, match="are left for them"):
            score(model, [Text([1] * 20_000)])
        assert model.times.passes == 0
        assert len(score(model, [Text([1, 2, 3])])[0].log_probs) == 2


# ---- memory ---------------------------------------------------------------------------------------------------

_PEAK = """
import re, sys, deltafin
from pathlib import Path
from deltafin.cext import _math
from deltafin.runtime import Want, memory
from deltafin.runtime.native.passes import matrices
from deltafin.runtime.score import Text, groups, score, rows_a_pass
from deltafin.store import spine_pieces
model, cache, extra = sys.argv[1], sys.argv[2], int(sys.argv[3])
lengths = list(map(int, sys.argv[4].split(",")))
want = Want(rows=sum(lengths) - len(lengths), tokens=max(lengths), scoring=True)
with deltafin.open(model, cache_dir=cache, want=want) as m:
    layers = spine_pieces(m.store.catalog, lambda layer: matrices(m.config, layer))
    ram = memory.least_budget(m.store.catalog, layers, want, _math.threads()) + extra
with deltafin.open(model, cache_dir=cache, ram=ram, want=want) as m:
    texts = [Text([(7 * n + i) % m.config.vocab_size for i in range(count)]) for n, count in enumerate(lengths)]
    for group in groups(texts, lambda text: text.rows, rows_a_pass(m)):
        score(m, group)
    peak = int(re.search(r"VmHWM:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1]) * 1024
    print(peak, ram, m.times.passes, m.memory.rows, m.memory.sequences)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the peak is read from /proc")
@pytest.mark.parametrize(("lengths", "extra"), [([3] * 400, 8 << 20), ([900, *[2] * 30, 400, 700, 800], 12 << 20)])
def test_the_peak_stays_below_the_budget_whatever_the_number_of_texts(demo_dir, tmp_path, lengths, extra):
    words = [sys.executable, "-c", _PEAK, str(demo_dir), str(tmp_path), str(extra), ",".join(map(str, lengths))]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120, check=True)
    peak, ram, passes, most_rows, _ = map(int, done.stdout.split())
    assert peak <= ram
    assert passes == pass_count([count - 1 for count in lengths], most_rows)
    assert passes > 1
