"""The gate: drafts where they pay and not where they do not, on machines and texts of every kind, simulated."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field, replace
from itertools import pairwise

import numpy as np
import pytest

from deltafin.runtime import Segment
from deltafin.runtime.clock import LayerTimes, PassTimes
from deltafin.runtime.drafted import DraftedExperts
from deltafin.runtime.gate import FIRST_TRIAL, LAST_TRIAL, Drafted, Gate
from deltafin.runtime.observer import Observer, Observers, RowSpan

EXPERTS = 1472  # of a row


@dataclass
class Machine:
    """What a pass really costs; the gate is shown its times only."""

    spine_s: float  # waiting for the spine, whatever the rows
    row_s: float  # computing a row
    expert_s: float  # an expert
    added: int = 1350  # experts of a drafted row that nobody else needed
    noise: float = 0.05
    random: random.Random = field(default_factory=lambda: random.Random(1))

    def times(self, answers: int, rows: int) -> PassTimes:
        experts = answers * EXPERTS + rows * self.added
        shake = self.random.lognormvariate(0, self.noise)
        computing, waiting = self.row_s * (answers + rows) * shake, self.expert_s * experts * shake
        layer = LayerTimes(
            spine_wait_s=self.spine_s * shake,
            attention_s=computing / 2,
            shared_s=computing / 2,
            expert_wait_s=waiting * 0.8,
            expert_s=waiting * 0.2,
            experts=experts,
        )
        return PassTimes(answers + rows, self.spine_s * shake + computing + waiting, 0.0, [layer])

    def price_of_a_row(self) -> float:
        """As a share of a pass with one row."""
        return (self.row_s + self.added * self.expert_s) / (self.spine_s + self.row_s + EXPERTS * self.expert_s)


RESIDENT = Machine(spine_s=0.0, row_s=0.02, expert_s=0.1 / EXPERTS, added=60)  # small, or all in memory and shared
STREAMED = Machine(spine_s=30.0, row_s=1.0, expert_s=6.0 / EXPERTS)  # a row costs a fifth of a pass
EXPENSIVE = Machine(spine_s=0.0, row_s=0.5, expert_s=6.0 / EXPERTS)  # and here nine tenths


class Run:
    """One answer after another pass, as the gate decides; a drafted row is accepted with the chance of the text."""

    def __init__(self, machine: Machine, seed: int = 1, answers: int = 1) -> None:
        self.gate = Gate()
        self.machine = replace(machine, random=random.Random(seed))
        self.answers = answers
        self.random = random.Random(seed)
        self.depths: list[int] = []
        self.seconds = self.tokens = 0.0

    def passes(self, count: int, chance: float, *, proposes: float = 1.0, most: int = 8) -> Run:
        for _ in range(count):
            depth = self.gate.depth(most)
            self.depths.append(depth)
            drafts = [self._draft(depth, chance) for _ in range(self.answers) if self.random.random() < proposes]
            times = self.machine.times(self.answers, sum(d.proposed for d in drafts))
            self.gate.saw(drafts, times, self.answers)
            self.seconds += times.total_s
            self.tokens += self.answers + sum(d.accepted for d in drafts)
        return self

    def _draft(self, depth: int, chance: float) -> Drafted:
        accepted = 0
        while accepted < depth and self.random.random() < chance:
            accepted += 1
        return Drafted(depth, accepted, [self.machine.added] * depth)

    @property
    def speed(self) -> float:
        """Tokens a second, by those without drafts."""
        alone = self.machine.spine_s + self.answers * (self.machine.row_s + EXPERTS * self.machine.expert_s)
        return self.tokens / self.seconds * alone / self.answers


@pytest.fixture(params=range(5))
def seed(request) -> int:
    return request.param


def test_repetitive_text_is_drafted_as_deep_as_asked(seed):
    for machine in (RESIDENT, STREAMED):
        run = Run(machine, seed).passes(60, 1.0)
        assert run.depths[10:] == [8] * 50
        assert run.tokens / 60 > 7
        assert run.speed > 3


def test_text_that_is_never_guessed_stops_within_passes_and_costs_little(seed):
    for machine in (RESIDENT, STREAMED, EXPENSIVE):
        run = Run(machine, seed).passes(200, 0.0)
        assert sum(depth > 0 for depth in run.depths[:16]) <= 7
        assert sum(depth > 0 for depth in run.depths[100:]) <= 3
        assert max(run.depths[16:]) <= 1
        assert 0.97 < run.speed <= 1


def test_expensive_experts_and_low_acceptance_mean_no_drafts(seed):
    run = Run(EXPENSIVE, seed).passes(200, 0.3)
    assert EXPENSIVE.price_of_a_row() > 0.9
    assert Counter(run.depths)[0] > 180 and max(run.depths) <= 2
    assert run.speed > 0.97


def test_the_same_acceptance_is_used_where_a_row_costs_little(seed):
    cheap = Run(Machine(spine_s=30.0, row_s=0.1, expert_s=0.3 / EXPERTS), seed).passes(200, 0.3)
    assert sum(depth >= 1 for depth in cheap.depths) > 120
    assert cheap.speed > 1.1


@pytest.mark.parametrize("machine", [RESIDENT, STREAMED, EXPENSIVE], ids=["resident", "streamed", "expensive"])
def test_speed_is_never_far_below_the_best_fixed_depth(machine):
    """Averaged over seeds, at any acceptance; the best is computed from what the gate is not told."""
    price = machine.price_of_a_row()
    for chance in (0.0, 0.1, 0.2, 0.3, 0.5, 0.7, 0.9, 0.97, 1.0):
        best = max(sum(chance**row for row in range(depth + 1)) / (1 + price * depth) for depth in range(9))
        speed = np.mean([Run(machine, seed).passes(200, chance).speed for seed in range(4)])
        assert speed > 0.97 * min(best, 1.0)
        assert speed > 0.88 * best, (chance, speed, best)


def test_a_change_of_the_text_is_noticed(seed):
    run = Run(STREAMED, seed).passes(80, 0.0).passes(80, 1.0).passes(80, 0.0)
    assert run.depths[60:80].count(0) >= 18
    assert run.depths[150:160] == [8] * 10  # LAST_TRIAL passes at most until the next trial, then a few
    assert run.depths[220:].count(0) >= 18
    assert FIRST_TRIAL < LAST_TRIAL <= 64


def test_a_trial_that_paid_is_followed_at_once():
    run = Run(Machine(spine_s=10.0, row_s=0.5, expert_s=6.0 / EXPERTS)).passes(80, 0.0).passes(80, 1.0)
    noticed = next(at for at in range(80, 160) if run.depths[at])
    assert all(run.depths[at] >= 1 for at in range(noticed, 160))


def test_trials_are_frequent_again_once_something_pays(seed):
    run = Run(STREAMED, seed).passes(200, 0.0).passes(100, 1.0)
    for _ in range(3):
        run.passes(16, 0.0)
        until = len(run.depths)
        run.passes(24, 1.0)
        assert any(run.depths[until : until + 18])


def test_trials_take_a_small_part_of_the_time():
    price = EXPENSIVE.price_of_a_row()
    run = Run(EXPENSIVE).passes(400, 0.0)
    trials = [at for at, depth in enumerate(run.depths) if depth]
    assert max(run.depths) == 1 and len(trials) > 3
    assert min(b - a for a, b in pairwise(trials)) * 0.02 > 0.8 * price


def test_a_change_of_the_machine_is_noticed(seed):
    """Experts that come to stay in memory make the same acceptance worth while, and the other way round."""
    run = Run(Machine(spine_s=2.0, row_s=0.1, expert_s=6.0 / EXPERTS), seed).passes(60, 0.45)
    assert sum(depth == 0 for depth in run.depths[-30:]) > 20
    run.machine = Machine(spine_s=2.0, row_s=0.1, expert_s=0.1 / EXPERTS)
    run.passes(60, 0.45)
    assert sum(depth >= 1 for depth in run.depths[-30:]) > 20
    run.machine = Machine(spine_s=2.0, row_s=0.1, expert_s=6.0 / EXPERTS)
    run.passes(60, 0.45)
    assert sum(depth == 0 for depth in run.depths[-30:]) > 20


def test_one_pass_that_was_stopped_ends_no_drafts(seed):
    run = Run(STREAMED, seed).passes(60, 0.8)
    before = run.gate.summary
    assert run.gate.depth(8) >= 1
    run.machine.spine_s *= 50
    run.passes(1, 0.8)
    run.machine.spine_s /= 50
    after = run.gate.summary
    assert after.price_s < 1.5 * before.price_s and after.gain_s < 1.5 * before.gain_s
    run.passes(20, 0.8)
    assert sum(depth >= 1 for depth in run.depths[-20:]) >= 15


def test_prices_come_near_the_real_ones(seed):
    run = Run(STREAMED, seed).passes(150, 0.8)
    summary = run.gate.summary
    real = STREAMED.row_s + STREAMED.added * STREAMED.expert_s
    assert summary.price_s == pytest.approx(real, rel=0.5)
    assert summary.gain_s == pytest.approx(STREAMED.spine_s + STREAMED.row_s + 6.0, rel=0.1)
    assert summary.chance == pytest.approx(0.8, abs=0.3)


def test_a_draft_that_seldom_proposes_is_tried_when_it_does():
    run = Run(STREAMED).passes(300, 1.0, proposes=0.1)
    assert run.depths[-1] == 8
    assert run.gate.summary.drafted_passes > 15


def test_answers_side_by_side_share_a_pass():
    """What an accepted token saves is its share of a pass, so in company a row must be cheaper to pay."""
    alone = Run(STREAMED).passes(100, 0.5)
    company = Run(STREAMED, answers=16).passes(100, 0.5)
    assert sum(depth >= 1 for depth in alone.depths) > 60 and sum(depth >= 1 for depth in company.depths) < 10
    assert company.speed > 0.97
    shared = Machine(spine_s=30.0, row_s=0.1, expert_s=6.0 / EXPERTS, added=50)
    assert Run(shared, answers=16).passes(100, 0.9).gate.summary.depth >= 4


def test_passes_with_rows_of_a_prompt_teach_no_prices():
    gate = Gate()
    for _ in range(5):
        gate.saw([], STREAMED.times(1, 500), 1)
    assert gate.depth(8) == 0 and gate.summary.price_s is None
    gate.saw([], STREAMED.times(1, 0), 1)
    before = gate.summary
    gate.saw([Drafted(2, 2, [9, 9])], STREAMED.times(1, 500), 1)
    after = gate.summary
    assert (before.price_s, before.gain_s) == (after.price_s, after.gain_s)
    assert after.chance > before.chance


def test_no_more_is_drafted_than_asked_for():
    run = Run(STREAMED).passes(30, 1.0, most=3)
    assert max(run.depths) == 3 and run.gate.depth(0) == 0 and run.gate.depth(-1) == 0
    assert run.gate.depth(5) == 5


def test_asking_changes_nothing():
    one, other = Run(STREAMED), Run(STREAMED)
    for _ in range(60):
        for most in (8, 3, 8):
            other.gate.depth(most)
        one.passes(1, 0.6)
        other.passes(1, 0.6)
    assert one.depths == other.depths


def test_the_summary_counts_and_reads_well():
    run = Run(STREAMED).passes(50, 1.0)
    summary = run.gate.summary
    assert summary.passes == 50 and summary.proposed == summary.accepted == run.tokens - 50
    assert summary.drafted_passes == sum(depth > 0 for depth in run.depths)
    assert str(summary).startswith(f"{summary.accepted} of {summary.proposed} drafted tokens accepted (100%) in")
    assert "depth 8: a row costs" in str(summary)
    assert str(Gate().summary) == "0 of 0 drafted tokens accepted in 0 of 0 passes; depth 0"


def test_times_without_layers_are_enough():
    """A backend that does not split its time: the price of a row comes from its trials."""
    gate, depths = Gate(), []
    for _ in range(40):
        depth = gate.depth(8)
        depths.append(depth)
        times = PassTimes(rows=1 + depth, total_s=1 + 0.05 * depth)
        gate.saw([Drafted(depth, depth, [0] * depth)], times, 1)
    assert depths[-20:] == [8] * 20


# What drafted rows add


def spans(*rows: tuple[int, int, int]) -> list[RowSpan]:
    return [RowSpan(*row) for row in rows]


def specified(kinds: list[tuple[int, int] | None], layers: list[np.ndarray]) -> Counter:
    """By (sequence, place in the draft): the definition, row against row."""
    added: Counter = Counter()
    for ids in layers:
        chosen = [set(row) for row in ids.tolist()]
        for row, kind in enumerate(kinds):
            if kind is None:
                continue
            others = [
                chosen[other] for other, its in enumerate(kinds) if its is None or its[0] != kind[0] or its[1] < kind[1]
            ]
            added[kind] += len(chosen[row].difference(*others))
    return added


def test_a_row_adds_the_experts_that_nobody_else_needs():
    observer = DraftedExperts({5: 11})
    observer.rows(spans((4, 0, 1), (5, 10, 3)))
    observer.routes(1, np.array([[1, 2], [2, 3], [3, 4], [4, 9]], np.int32), np.ones((4, 2), np.float32))
    observer.routes(2, np.array([[1, 2], [2, 3], [7, 8], [7, 1]], np.int32), np.ones((4, 2), np.float32))
    assert observer.added(5) == [3, 1]


def test_what_rows_add_is_what_the_definition_says(seed):
    rng = np.random.default_rng(seed)
    drafted = {3: 100, 4: 7, 9: 50}
    rows = spans((1, 0, 6), (3, 98, 5), (4, 6, 3), (9, 50, 4), (2, 40, 1))
    kinds: list[tuple[int, int] | None] = []
    for span in rows:
        for position in range(span.position, span.position + span.count):
            place = position - drafted.get(span.sequence, 10**9)
            kinds.append((span.sequence, place) if place >= 0 else None)
    observer = DraftedExperts(drafted)
    observer.rows(rows)
    layers = [np.stack([rng.permutation(40)[:4] for _ in kinds]).astype(np.int32) for _ in range(20)]
    for number, ids in enumerate(layers):
        observer.routes(number, ids, np.ones(ids.shape, np.float32))
    expected = specified(kinds, layers)
    for sequence, count in ((3, 3), (4, 2), (9, 4)):
        assert observer.added(sequence) == [expected[sequence, place] for place in range(count)]
        assert sum(observer.added(sequence)) > 0


def test_what_rows_add_is_what_the_store_multiplies(tiny):
    """A pass with drafted rows multiplies those of the pass without them, and what the rows added."""
    ids = [3, 141, 59, 26, 5, 14]
    seq = tiny.sequence()
    tiny.forward([Segment(seq, ids[:2])], logits="none")
    observer = DraftedExperts({seq.number: 3})
    tiny.forward([Segment(seq, ids[2:])], logits="none", observer=observer)
    together = tiny.last_pass.sums().experts
    other = tiny.sequence()
    tiny.forward([Segment(other, ids[:2])], logits="none")
    tiny.forward([Segment(other, ids[2:3])], logits="none")
    assert len(observer.added(seq.number)) == 3
    assert together == tiny.last_pass.sums().experts + sum(observer.added(seq.number))


def test_a_forward_in_several_passes_counts_each():
    observer = DraftedExperts({1: 4})
    for first, count, ids in ((0, 4, [[1], [2], [1], [3]]), (4, 1, [[1]]), (5, 2, [[1], [6]])):
        observer.rows(spans((1, first, count)))
        observer.routes(0, np.array(ids, np.int32), np.ones((count, 1), np.float32))
    assert observer.added(1) == [1, 1, 1]


def test_several_observers_see_the_same(tiny, new_recorder):
    class Plain(Observer):
        def __init__(self) -> None:
            self.seen: list[int] = []

        def routes(self, layer, ids, weights):
            self.seen.append(ids.copy())
            ids[:] = 0

    plain, one, other = Plain(), new_recorder(), new_recorder()
    tiny.forward([Segment(tiny.sequence(), [3, 141])], logits="none", observer=Observers(plain, one, other))
    assert one.calls == other.calls and one.calls[0] == "rows" and one.calls[-1] == "finished"
    assert all(np.array_equal(a, b) for a, b in zip(plain.seen, other.route_ids.values(), strict=True))
    assert not any(np.shares_memory(one.vectors[key], other.vectors[key]) for key in one.vectors)
    assert not Observers(plain).wants_hidden and Observers(plain, one).wants_hidden
