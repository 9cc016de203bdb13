"""The gate in a runner: what it decides changes the number of passes and nothing else."""

from __future__ import annotations

import pytest

from deltafin.runtime.draft import NGram
from deltafin.runtime.gate import Gate
from deltafin.runtime.generation import Generation, Runner
from deltafin.runtime.sampling import Sampling

IDS = [3, 141, 59, 26, 5, 3, 141]


class Wrong:
    """Proposes what never comes: the id after the one that was chosen here without drafts."""

    def __init__(self, tokens, start) -> None:
        self.tokens, self.start = tokens, start

    def propose(self, ids, most):
        at = len(ids) - self.start
        return [(token + 1) % 256 for token in self.tokens[at : at + most]]


def answer(model, draft, gate, *, observer=None, sampling=None, max_new=40):
    generation = Generation(
        model.sequence(), IDS, max_new=max_new, sampling=sampling, stop_ids=(), draft=draft, depth=8
    )
    runner = Runner(model, gate)
    runner.add(generation)
    steps = []
    while runner.active:
        steps += runner.step(observer)
    return generation, steps


@pytest.mark.parametrize("sampling", [Sampling(top_logprobs=2), Sampling(temperature=1, seed=5, top_logprobs=2)])
def test_the_gate_changes_no_token(tiny, sampling):
    alone, _ = answer(tiny, None, None, sampling=sampling)
    gate = Gate()
    gated, steps = answer(tiny, NGram(), gate, sampling=sampling)
    assert gated.chosen == alone.chosen
    assert gate.summary.passes == len(steps)
    assert gate.summary.proposed == sum(step.drafted for step in steps)
    assert gate.summary.accepted == sum(step.accepted for step in steps)
    assert gate.summary.gain_s > 0 and gate.summary.price_s > 0


def test_proposals_that_are_never_right_end_soon(tiny):
    alone, plain = answer(tiny, None, None, max_new=100)
    wrong = Wrong(alone.tokens, len(IDS))
    _, ungated = answer(tiny, wrong, None, max_new=100)
    gated, steps = answer(tiny, wrong, Gate(), max_new=100)
    assert gated.tokens == alone.tokens and len(steps) == len(plain) == 100
    rows = sum(step.drafted for step in steps)
    assert 0 < rows < 0.2 * sum(step.drafted for step in ungated)


def test_the_runners_observer_sees_gated_passes_too(tiny, recorder):
    generation, steps = answer(tiny, NGram(), Gate(), observer=recorder)
    assert len(recorder.spans) == len(steps)
    assert recorder.spans[-1][0].position == len(IDS) + len(generation.tokens) - 1 - len(steps[-1].new)
