"""Sequences leave a pass in the middle of it: at the next layer, and nobody who stays can tell."""

from __future__ import annotations

import pytest

from deltafin.errors import BadRequest
from deltafin.runtime import Generation, Leaving, Observer, Runner, Segment
from tests.runtime.test_generation import NEW, PROMPTS, SAMPLINGS, Parrot, answer, state_bytes

GREEDY = SAMPLINGS["greedy"]


class Leaver(Observer):
    """Lets sequences go when a layer of a certain pass begins, and counts the layers."""

    def __init__(self, layer, sequences, a_pass=0):
        self.at, self.sequences, self.a_pass = layer, sequences, a_pass
        self.passes = -1
        self.layers = []
        self.rows_seen = []
        self._gone = ()

    def rows(self, spans):
        self.passes += 1
        self.layers = []

    def rows_left(self, spans):
        self.rows_seen.append([(s.sequence, s.count) for s in spans])

    def layer(self, layer, num_layers):
        self.layers.append(layer)
        if self.passes == self.a_pass and layer == self.at - 1:
            self._gone = self.sequences

    def gone(self):
        if self.passes == self.a_pass and self.at == 0:
            self._gone = self.sequences
        return self._gone


@pytest.fixture(scope="module")
def alone(tiny):
    return [answer(tiny, ids, GREEDY) for ids in PROMPTS]


def begin(tiny, expected):
    """One with guesses, one that goes on, one that begins."""
    runner, generations = Runner(tiny), []
    for ids, known in zip(PROMPTS[:3], expected, strict=False):
        draft = Parrot([*ids, *known.tokens], 3)
        generations.append(
            Generation(tiny.sequence(), ids, max_new=NEW, sampling=GREEDY, stop_ids=(), draft=draft, depth=2)
        )
    for generation in generations[:2]:
        runner.add(generation)
        runner.step()
    runner.add(generations[2])
    return runner, generations


@pytest.mark.parametrize("who", [0, 1, 2])
def test_who_leaves_changes_nothing_for_the_others(tiny, alone, who):
    for layer in range(tiny.config.num_layers):
        runner, generations = begin(tiny, alone)
        leaver = generations[who]
        before = (len(leaver.seq), state_bytes(leaver.seq), list(leaver.chosen))
        watch = Leaver(layer, [leaver.seq.number])
        while runner.active:
            runner.step(watch, watch.gone)
            assert leaver not in runner.active
        assert len(watch.rows_seen) == 1
        assert leaver.seq.number not in [number for number, _ in watch.rows_seen[0]]
        for generation, expected in zip(generations, alone, strict=False):
            if generation is not leaver:
                assert generation.chosen == expected.chosen
                assert state_bytes(generation.seq) == state_bytes(expected.seq)
        assert (len(leaver.seq), state_bytes(leaver.seq), list(leaver.chosen)) == before
        runner.add(leaver)  # whoever changes their mind goes on where they were
        while runner.active:
            runner.step()
        assert leaver.chosen == alone[who].chosen


@pytest.mark.parametrize("layer", [0, 1, 4])
def test_when_all_leave_the_pass_is_over(tiny, alone, layer):
    runner, generations = begin(tiny, alone)
    before = [state_bytes(g.seq) for g in generations]
    watch = Leaver(layer, [g.seq.number for g in generations])
    assert runner.step(watch, watch.gone) == []
    assert watch.layers == list(range(layer))  # not one layer more
    assert not runner.active
    assert [state_bytes(g.seq) for g in generations] == before


def test_leaving_is_for_one_pass(tiny):
    rows = tiny.most_rows + 1
    segments = [Segment(tiny.sequence(), [5] * rows)]
    with pytest.raises(BadRequest, match="leaving is for a forward of one pass"):
        tiny.forward(segments, logits="last", leaving=Leaving(list))
