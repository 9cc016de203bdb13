"""Answers side by side, with proposals, in pieces: the same tokens, the same log-probabilities, the same state."""

from __future__ import annotations

import numpy as np
import pytest

from deltafin.errors import BadRequest, Missing, NoMemory
from deltafin.runtime import Checkpoint, Generation, Model, Observer, Runner, Sampling, Segment, Want
from deltafin.runtime.native.kda import KdaState

PROMPTS = [[3, 141, 59, 26, 5], [7], list(range(40, 75)), [9, 9, 9], [200, 100]]
NEW = 12
SAMPLINGS = {
    "greedy": Sampling(top_logprobs=2),
    "seeded": Sampling(temperature=1.3, top_p=0.95, seed=7, top_logprobs=2),
}
GREEDY = SAMPLINGS["greedy"]


class Parrot:
    """Proposes what it was told comes next, but every `wrong`th token of it is another."""

    def __init__(self, known, wrong):
        self._known, self._wrong = known, wrong

    def propose(self, ids, most):
        proposals = list(self._known[len(ids) : len(ids) + most])
        return [
            (token + 1) % 100 if self._wrong and (len(ids) + n) % self._wrong == 0 else token
            for n, token in enumerate(proposals)
        ]


def run(model, generations, observer=None):
    runner = Runner(model)
    for generation in generations:
        runner.add(generation)
    steps = 0
    while runner.active:
        runner.step(observer)
        steps += 1
    return steps


def answer(model, ids, sampling, **options):
    generation = Generation(model.sequence(), ids, max_new=NEW, sampling=sampling, stop_ids=(), **options)
    run(model, [generation])
    return generation


def state_bytes(seq):
    """Everything a sequence remembers, without what happens to lie behind it."""
    found = []
    for layer in seq.state:
        if isinstance(layer, KdaState):
            found += [layer.history.tobytes(), layer.memory.tobytes()]
        else:
            rows = np.concatenate(layer.blocks)[: layer.length] if layer.blocks else np.empty(0)
            found.append(rows.tobytes())
    return found


@pytest.fixture(scope="module")
def alone(tiny):
    """Each prompt's answer, computed by itself and without proposals."""
    return {name: [answer(tiny, ids, s) for ids in PROMPTS] for name, s in SAMPLINGS.items()}


@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("depth", [1, 2, 3, 8])
def test_proposals_change_nothing(tiny, alone, sampling, depth):
    for ids, expected in zip(PROMPTS[:3], alone[sampling], strict=False):
        for wrong in (0, 3):
            draft = Parrot([*ids, *expected.tokens], wrong)
            found = answer(tiny, ids, SAMPLINGS[sampling], draft=draft, depth=depth)
            assert found.chosen == expected.chosen  # tokens, log-probabilities and those of others
            assert found.seq.ids == expected.seq.ids
            assert state_bytes(found.seq) == state_bytes(expected.seq)


def test_right_proposals_save_passes(tiny, alone):
    for ids, expected in zip(PROMPTS, alone["greedy"], strict=True):
        draft = Parrot([*ids, *expected.tokens], wrong=0)
        generation = Generation(tiny.sequence(), ids, max_new=NEW, sampling=GREEDY, stop_ids=(), draft=draft, depth=4)
        first = 5 if len(ids) == 1 else 1  # a pass over a longer prompt has no proposals
        assert run(tiny, [generation]) == 1 + -(-(NEW - first) // 5)


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_answers_do_not_depend_on_company(tiny, alone, sampling):
    how = SAMPLINGS[sampling]
    together = [Generation(tiny.sequence(), ids, max_new=NEW, sampling=how, stop_ids=()) for ids in PROMPTS]
    assert run(tiny, together) == NEW
    for found, expected in zip(together, alone[sampling], strict=True):
        assert found.chosen == expected.chosen
        assert state_bytes(found.seq) == state_bytes(expected.seq)


def test_answers_join_and_leave_between_steps(tiny, alone):
    runner = Runner(tiny)
    generations = [Generation(tiny.sequence(), ids, max_new=NEW, sampling=GREEDY, stop_ids=()) for ids in PROMPTS]
    for generation in generations:
        runner.add(generation)
        runner.step()
        runner.step()
    dropped = generations[1]
    runner.remove(dropped)
    while runner.active:
        runner.step()
    for found, expected in zip(generations, alone["greedy"], strict=True):
        assert found.chosen == expected.chosen[: len(found.chosen)]
        assert (found.finish is None) == (found is dropped)


def test_a_long_prompt_goes_in_pieces_beside_answers(tiny_dir, open_model, alone, recorder):
    with open_model(tiny_dir, want=Want(rows=8, sequences=len(PROMPTS))) as model:
        model._backend.most_rows = 8
        generations = [Generation(model.sequence(), i, max_new=NEW, sampling=GREEDY, stop_ids=()) for i in PROMPTS]
        run(model, generations, recorder)
        assert max(sum(s.count for s in spans) for spans in recorder.spans) <= 8
        # The short ones got on while the long one was still being read.
        assert any(len(spans) > 1 and any(s.count > 1 for s in spans) for spans in recorder.spans[1:])
        for found, expected in zip(generations, alone["greedy"], strict=True):
            assert found.chosen == expected.chosen


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_tokens_of_an_earlier_life_are_fed_and_not_drawn_again(tiny, alone, sampling):
    expected = alone[sampling][0]
    seen = []
    generation = Generation(
        tiny.sequence(),
        PROMPTS[0],
        max_new=NEW,
        sampling=SAMPLINGS[sampling],
        stop_ids=(),
        so_far=expected.chosen[:7],
        ends=lambda chosen: bool(seen.append(chosen.token)),
    )
    assert seen == expected.tokens[:7]
    assert run(tiny, [generation]) == NEW - 7
    assert generation.chosen == expected.chosen and seen == expected.tokens
    assert state_bytes(generation.seq) == state_bytes(expected.seq)
    whole = Generation(tiny.sequence(), PROMPTS[0], max_new=NEW, so_far=expected.chosen, stop_ids=())
    assert whole.finish == "length"
    assert run(tiny, [whole]) == 0


def test_who_reads_along_may_end_an_answer_in_the_middle_of_accepted_proposals(tiny, alone):
    expected = alone["greedy"][0]
    end = expected.tokens[4]
    cut = expected.tokens.index(end) + 1
    draft = Parrot([*PROMPTS[0], *expected.tokens], wrong=0)
    found = answer(tiny, PROMPTS[0], GREEDY, draft=draft, depth=8, ends=lambda c: c.token == end)
    assert found.finish == "stop"
    assert found.chosen == expected.chosen[:cut]
    assert found.seq.ids == [*PROMPTS[0], *expected.tokens[: cut - 1]]


def test_undecided_proposals_are_rejected(tiny, alone):
    """A sequence that was fed proposals and then left alone holds none of them."""
    expected = alone["greedy"][0]
    seq = tiny.sequence()
    tiny.forward([Segment(seq, PROMPTS[0])], logits="none")
    tiny.forward([Segment(seq, [*expected.tokens[:1], 1, 2, 3], tail=4, drafted=3)], logits="tails")
    assert seq.ids == [*PROMPTS[0], expected.tokens[0]]
    rest = list(tiny.generate(seq, expected.tokens[1:2], max_new=NEW - 2, stop_ids=()))
    assert rest == expected.tokens[2:]
    with pytest.raises(BadRequest, match="1 proposals cannot be accepted"):
        seq.accept(1)


@pytest.mark.parametrize("error", [Missing, NoMemory])
def test_what_only_proposals_lack_ends_proposals_and_not_the_answer(tiny, alone, monkeypatch, caplog, error):
    expected = alone["greedy"][0]
    forward, passes = tiny.forward, []

    def lacking(segments, **keywords):
        passes.append(sum(segment.drafted for segment in segments))
        if passes[-1]:
            raise error("expert 5 of layer 5 is not here")
        return forward(segments, **keywords)

    monkeypatch.setattr(tiny, "forward", lacking)
    found = answer(tiny, PROMPTS[0], GREEDY, draft=Parrot([*PROMPTS[0], *expected.tokens], wrong=0))
    assert found.chosen == expected.chosen
    assert sum(map(bool, passes)) == 1, "it is tried once"
    assert [r.message for r in caplog.records] == ["expert 5 of layer 5 is not here; going on without proposals"]


def test_a_failed_pass_with_proposals_leaves_its_sequence(tiny, alone):
    expected = alone["greedy"][0]
    seq = tiny.sequence()
    tiny.forward([Segment(seq, PROMPTS[0])], logits="none")
    before = state_bytes(seq)

    segment = Segment(seq, [*expected.tokens[:3]], tail=3, drafted=2)
    with pytest.raises(Broken):
        tiny.forward([segment], logits="tails", observer=Breaks())
    assert seq.ids == PROMPTS[0] and state_bytes(seq) == before
    tiny.forward([segment], logits="tails")
    seq.accept(2)
    assert seq.ids == [*PROMPTS[0], *expected.tokens[:3]]


def test_states_are_written_once_a_pass_and_never_copied(tiny, alone):
    """Also where proposals are rejected; and only two buffers a layer are ever used."""
    expected = alone["greedy"][2]
    draft = Parrot([*PROMPTS[2], *expected.tokens], wrong=3)
    generation = Generation(
        tiny.sequence(), PROMPTS[2], max_new=NEW, sampling=GREEDY, stop_ids=(), draft=draft, depth=4
    )
    runner, traffic = Runner(tiny), tiny.state_traffic
    runner.add(generation)
    copied = traffic.copied_nbytes
    buffers: dict[int, set[int]] = {}
    rejected = 0
    while runner.active:
        before = traffic.written_nbytes
        (step,) = runner.step()
        rejected += step.drafted - step.accepted
        kda = [s for s in generation.seq.state if isinstance(s, KdaState)]
        latents = [s for s in generation.seq.state if not isinstance(s, KdaState)]
        rows = sum(s.blocks[0][0].nbytes for s in latents) * max(step.drafted + 1, len(PROMPTS[2]))
        assert traffic.written_nbytes - before <= sum(s.nbytes for s in kda) + rows
        for number, state in enumerate(kda):
            buffers.setdefault(number, set()).add(state.memory.__array_interface__["data"][0])
    assert rejected > 0
    assert traffic.copied_nbytes == copied
    assert all(len(found) == 2 for found in buffers.values())


class Broken(Exception):
    pass


class Breaks(Observer):
    def finished(self):
        raise Broken


class Kept:
    def __init__(self):
        self.layers = []

    def layer(self, layer, state):
        assert layer == len(self.layers)
        self.layers.append(state.copied())


@pytest.mark.parametrize("at", [1, 4, 5])
@pytest.mark.parametrize("rows", [3, 100])
def test_a_checkpoint_is_the_state_in_the_middle_of_a_prompt(tiny_dir, open_model, tiny, alone, at, rows):
    ids, expected = PROMPTS[0], alone["greedy"][0]
    half = tiny.sequence()
    tiny.forward([Segment(half, ids[:at])], logits="none")
    with open_model(tiny_dir) as model:
        model._backend.most_rows = rows
        sink = Kept()
        found = answer(model, ids, GREEDY, checkpoint=Checkpoint(at, sink))
        assert found.chosen == expected.chosen
        assert state_bytes(found.seq) == state_bytes(expected.seq)
        kept = model.restore(ids[:at], tuple(sink.layers))
        assert state_bytes(kept) == state_bytes(half)
        if at < len(ids):
            on = Generation(kept, ids[at:], max_new=NEW, sampling=GREEDY, stop_ids=())
            run(model, [on])
            assert on.chosen == expected.chosen


@pytest.mark.parametrize("at", [1, 3])
def test_a_checkpoint_comes_before_proposals(tiny, alone, at):
    """One at the end of a prompt of one token, and one in the answer."""
    expected, sink = alone["greedy"][1], Kept()
    draft = Parrot([*PROMPTS[1], *expected.tokens], wrong=0)
    found = answer(tiny, PROMPTS[1], GREEDY, draft=draft, checkpoint=Checkpoint(at, sink))
    assert found.chosen == expected.chosen
    kept = tiny.restore([*PROMPTS[1], *expected.tokens][:at], tuple(sink.layers))
    on = Generation(kept, [expected.tokens[at - 1]], max_new=NEW - at, sampling=GREEDY, stop_ids=())
    run(tiny, [on])
    assert on.chosen == expected.chosen[at:]


def test_a_checkpoint_comes_although_proposals_beside_it_do_not_fit(tiny_dir, open_model, alone, monkeypatch):
    with open_model(tiny_dir) as model:
        real = model.forward

        def forward(segments, **keywords):
            if any(s.drafted for s in segments):
                raise NoMemory("too many rows")
            return real(segments, **keywords)

        monkeypatch.setattr(model, "forward", forward)
        runner, sink = Runner(model), Kept()
        expected = alone["greedy"]
        draft = Parrot([*PROMPTS[1], *expected[1].tokens], wrong=0)
        runner.add(Generation(model.sequence(), PROMPTS[1], max_new=NEW, sampling=GREEDY, stop_ids=(), draft=draft))
        runner.add(Generation(model.sequence(), PROMPTS[0], max_new=NEW, stop_ids=(), checkpoint=Checkpoint(4, sink)))
        first, second = runner.active
        while runner.active:
            runner.step()
        assert len(sink.layers) == model.config.num_layers
        assert (first.tokens, second.tokens) == (expected[1].tokens, expected[0].tokens)


def test_after_an_interrupt_nothing_is_chosen_twice_or_not_at_all(tiny, alone):
    """Interrupted while tokens are chosen: the first answer has its last one, the third none yet."""
    expected = alone["greedy"]

    def interrupt(_chosen):
        if len(second.chosen) == 3:
            raise KeyboardInterrupt
        return False

    first = Generation(tiny.sequence(), PROMPTS[0], max_new=4, sampling=GREEDY, stop_ids=())
    second = Generation(tiny.sequence(), PROMPTS[1], max_new=NEW, sampling=GREEDY, stop_ids=(), ends=interrupt)
    third = Generation(tiny.sequence(), PROMPTS[3], max_new=NEW, sampling=GREEDY, stop_ids=())
    runner = Runner(tiny)
    runner.add(first)
    runner.step()
    for generation in (second, third):
        runner.add(generation)
    with pytest.raises(KeyboardInterrupt):
        while True:
            runner.step()
    assert (first.finish, second.finish, third.finish) == ("length", None, None)
    taken, left = runner.step()  # what the interrupted step had brought is not lost either
    assert (taken.generation, taken.new) == (first, first.chosen[-1:])
    assert (left.generation, len(left.new)) == (third, 1)
    while runner.active:
        runner.step()
    assert first.chosen == expected[0].chosen[:4]
    assert second.chosen == expected[1].chosen
    assert third.chosen == expected[3].chosen


def test_an_answer_that_lost_its_logits_says_so_and_can_be_begun_anew(tiny, alone):
    expected = alone["greedy"][0]
    lost = Generation(tiny.sequence(), PROMPTS[0], max_new=NEW, sampling=GREEDY, stop_ids=())
    runner = Runner(tiny)
    runner.add(lost)
    runner.step()
    tiny.forward([Segment(lost.seq, lost.pending)], logits="none")  # as a pass that was interrupted at its very end
    with pytest.raises(BadRequest, match="so_far"):
        runner.step()
    runner.remove(lost)
    anew = Generation(tiny.sequence(), PROMPTS[0], max_new=NEW, sampling=GREEDY, stop_ids=(), so_far=lost.chosen)
    assert run(tiny, [anew]) == NEW - 1
    assert anew.chosen == expected.chosen


def test_a_fork_goes_its_own_way(tiny, alone):
    expected = alone["greedy"][0]
    seq = tiny.sequence()
    tiny.forward([Segment(seq, PROMPTS[0][:-1])], logits="none")
    copied = tiny.state_traffic.copied_nbytes
    other = tiny.fork(seq)
    assert tiny.state_traffic.copied_nbytes > copied
    tiny.forward([Segment(other, [1, 2, 3])], logits="none")
    for one in (seq, tiny.fork(seq)):
        assert list(tiny.generate(one, PROMPTS[0][-1:], max_new=NEW, stop_ids=())) == expected.tokens
    assert other.ids == [*PROMPTS[0][:-1], 1, 2, 3]


@pytest.mark.parametrize("rows", [2, 100])
def test_scoring_leaves_sequences_as_they_are(tiny_dir, open_model, rows):
    ids, targets = PROMPTS[0], [*PROMPTS[0][1:], 8]
    with open_model(tiny_dir) as model:
        fresh = model.sequence()
        expected = model.forward([Segment(model.sequence(), ids, targets)], logits="targets")
        model._backend.most_rows = rows
        for _ in range(2):
            found = model.forward([Segment(fresh, ids, targets)], logits="targets", advance=False)
            assert found.tobytes() == expected.tobytes()
            assert len(fresh) == 0
        started = model.sequence()
        model.forward([Segment(started, ids[:2])], logits="none")
        before = state_bytes(started)
        found = model.forward([Segment(started, ids[2:], targets[2:])], logits="targets", advance=False)
        assert found.tobytes() == expected[2:].tobytes()
        assert state_bytes(started) == before and len(started) == 2


def test_torch_decides_on_proposals_too(tiny_torch):
    expected = answer(tiny_torch, PROMPTS[0], Sampling())
    for wrong in (0, 2):
        draft = Parrot([*PROMPTS[0], *expected.tokens], wrong)
        options = {"max_new": NEW, "stop_ids": (), "draft": draft, "depth": 3}
        found = Generation(tiny_torch.sequence(), PROMPTS[0], **options)
        steps = run(tiny_torch, [found])
        assert found.tokens == expected.tokens
        assert wrong or steps == 1 + -(-(NEW - 1) // 4)  # a pass may have any number of rows


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_new": 0}, "max_new is 0"),
        ({"max_new": 10**9}, "exceed the model's"),
        ({"depth": -1}, "depth of drafts is -1"),
        ({"ids": []}, "the prompt is empty"),
    ],
)
def test_what_makes_no_sense_is_refused(tiny: Model, options, message):
    with pytest.raises(BadRequest, match=message):
        Generation(tiny.sequence(), options.pop("ids", [1]), **{"max_new": 4, **options})


def test_an_answer_of_another_model_is_refused(tiny: Model, tiny_torch):
    with pytest.raises(BadRequest, match="belongs to another model"):
        Runner(tiny).add(Generation(tiny_torch.sequence(), [1], max_new=1))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tail": 4}, "tail 4"),
        ({"tail": -1}, "tail -1"),
        ({"drafted": 3}, "3 of them drafted"),
        ({"checkpoint": Checkpoint(4, Kept())}, "a checkpoint is after 1 to 3"),
        ({"checkpoint": Checkpoint(1, Kept()), "drafted": 1}, "with 1 proposals"),
    ],
)
def test_segments_that_make_no_sense_are_refused(tiny: Model, options, message):
    with pytest.raises(BadRequest, match=message):
        tiny.forward([Segment(tiny.sequence(), [1, 2, 3], **options)], logits="tails")


def test_where_answers_alone_would_fill_a_pass_they_ride_by_turns_and_prompts_get_a_part(tiny, monkeypatch):
    """No pass has more rows than it may, no answer waits for long, and a prompt does not wait for all of them."""
    monkeypatch.setattr(tiny._backend, "most_rows", 4)
    forward, rows = tiny.forward, []

    def counted(segments, **keywords):
        rows.append(sum(len(s) for s in segments))
        return forward(segments, **keywords)

    monkeypatch.setattr(tiny, "forward", counted)

    def generation(first, count, new):
        return Generation(tiny.sequence(), range(first, first + count), max_new=new, sampling=GREEDY, stop_ids=())

    runner = Runner(tiny)
    answers = [generation(10 * n, 1, 6) for n in range(9)]
    for one in answers:
        runner.add(one)
    for step in range(1, 10):
        runner.step()
        told = [len(one.chosen) for one in answers]
        assert max(told) - min(told) <= 1
        assert sum(told) == 4 * step
    prompt = generation(200, 6, 1)
    runner.add(prompt)
    for left in range(5, 0, -1):  # a quarter of the rows
        runner.step()
        assert prompt.waiting == left
    while runner.active:
        runner.step()
    assert max(rows) == 4
    for one in [*answers, prompt]:
        alone = Runner(tiny)
        again = Generation(tiny.sequence(), one.ids, max_new=one.max_new, sampling=GREEDY, stop_ids=())
        alone.add(again)
        while alone.active:
            alone.step()
        assert again.chosen == one.chosen
