"""Many answers with proposals and without, on trained and random weights: the same bytes, and fewer passes."""

from __future__ import annotations

import random

import pytest

from deltafin.runtime import Generation, NGram, Runner, Sampling, Want
from deltafin.runtime.native.kda import KdaState

NEW = 16
SAMPLINGS = {
    "greedy": Sampling(top_logprobs=1),
    "seeded": Sampling(temperature=0.9, top_p=0.95, min_p=0.01, seed=20261130, top_logprobs=1),
}


class Parrot:
    """Proposes what it knows comes next, each time with an error somewhere."""

    def __init__(self, known, seed):
        self._known, self._random = known, random.Random(seed)

    def propose(self, ids, most):
        found = list(self._known[len(ids) : len(ids) + most])
        if found and self._random.random() < 0.7:
            at = self._random.randrange(len(found))
            found[at] = (found[at] + 1) % 256
        return found


def prompts(model, count):
    """Random ids; every other prompt repeats itself, so that there is something to look up."""
    rng = random.Random(7)
    words = model.config.vocab_size - 300  # no special ids
    found = []
    for number in range(count):
        ids = [rng.randrange(words) for _ in range(rng.randint(2, 12))]
        found.append(ids * 2 if number % 2 else ids)
    return found


def answers(model, given, sampling, drafts=None, depth=4):
    runner = Runner(model)
    found = []
    for number, ids in enumerate(given):
        draft = None if drafts is None else drafts[number]
        found.append(
            Generation(model.sequence(), ids, max_new=NEW, sampling=sampling, stop_ids=(), draft=draft, depth=depth)
        )
        runner.add(found[-1])
    drafted = accepted = 0
    while runner.active:
        for step in runner.step():
            drafted += step.drafted
            accepted += step.accepted
    return found, drafted, accepted


def state_bytes(seq):
    return [
        part.tobytes()
        for layer in seq.state
        for part in (
            (layer.history, layer.memory)
            if isinstance(layer, KdaState)
            else [b[: max(0, layer.length - 256 * i)] for i, b in enumerate(layer.blocks)]
        )
    ]


def check(model, sampling, count, depths):
    given = prompts(model, count)
    expected, *_ = answers(model, given, sampling)
    for depth in depths:
        drafts = [
            NGram() if n % 4 == 3 else Parrot([*ids, *e.tokens], n)
            for n, (ids, e) in enumerate(zip(given, expected, strict=True))
        ]
        found, drafted, accepted = answers(model, given, sampling, drafts, depth)
        assert 0 < accepted < drafted
        for one, other in zip(found, expected, strict=True):
            assert one.chosen == other.chosen, depth
            assert state_bytes(one.seq) == state_bytes(other.seq), depth


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_proposals_change_no_byte(demo_dir, open_model, sampling):
    with open_model(demo_dir, want=Want(rows=256, sequences=12, drafts=8)) as model:
        check(model, SAMPLINGS[sampling], 12, (3, 8))


@pytest.mark.slow
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("name", ["demo", "k93"])
def test_proposals_change_no_byte_of_200_answers_at_any_depth(request, open_model, sampling, name):
    with open_model(request.getfixturevalue(f"{name}_dir"), want=Want(rows=2048, sequences=200, drafts=8)) as model:
        check(model, SAMPLINGS[sampling], 200, range(1, 9))


def test_repetitive_text_brings_more_than_two_accepted_tokens_a_pass(demo):
    """And no state is written more than once a pass, nor copied."""
    ids = demo.tokenizer.encode("one two three one two three one two")
    plain = list(demo.generate(demo.sequence(), ids, max_new=80))
    generation = Generation(demo.sequence(), ids, max_new=80, draft=NGram(), depth=4)
    runner, traffic = Runner(demo), demo.state_traffic
    runner.add(generation)
    copied, passes, accepted = traffic.copied_nbytes, 0, 0
    while runner.active:
        before, known = traffic.written_nbytes, len(generation.seq)
        (step,) = runner.step()
        layers = generation.seq.state
        once = sum(s.nbytes for s in layers if isinstance(s, KdaState))
        latents = sum(s.blocks[0][0].nbytes for s in layers if not isinstance(s, KdaState))
        rows = 1 + step.drafted if known else len(ids)
        assert traffic.written_nbytes - before == once + rows * latents
        passes += 1
        accepted += step.accepted
    assert generation.tokens == plain
    assert traffic.copied_nbytes == copied
    assert accepted / passes >= 2.0, f"{accepted} in {passes} passes"
