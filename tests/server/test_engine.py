"""The engine under attack: answers equal their lone runs, nobody suffers for another, nobody is forgotten."""

from __future__ import annotations

import gc
import random
import shutil
import threading
import weakref

import pytest

from deltafin.errors import DiskError, Missing, NetworkError, NoMemory, NotANumber
from deltafin.runtime import Generation, Sampler
from deltafin.runtime.openai import CHAT, TEXT, BadBody, read_body, serving_of
from deltafin.runtime.server import Began, Ended, Failed, Full, News, Stopped
from deltafin.runtime.server import engine as engine_module
from deltafin.runtime.states import PrefixWriter
from deltafin.store import state_files
from tests.server.engines import GUILTY, LONG_S, Told, alone, size_of

SLOW = pytest.mark.slow


def ids_of(seed: int, count: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(10, 500) for _ in range(count)]


def stays_sound(asking) -> None:
    """It still answers, and has forgotten nobody."""
    asking.settle()
    engine = asking.engine
    counts = engine.counts
    assert engine.alive
    assert counts.submitted == counts.answered + counts.failed + counts.left
    assert engine._room.taken_sequences == engine.recent
    assert engine._room.taken_tokens == sum(kept.taken for kept in engine._recent._kept.values())
    task = asking.text(ids_of(99, 7), 2)
    assert asking.ask(task).answer() == asking.alone(task)[0]


# ---- answers do not depend on company -----------------------------------------------------------------------


@pytest.fixture(scope="module")
def mix(kill_batches, demo):
    """Requests of all kinds, each with its lone answer."""
    serving = serving_of(demo.store, demo.tokenizer, demo.packs, 50)
    lines = kill_batches.requests(15, short=True)  # greedy and drawn, some with log-probabilities, some with tools
    bodies = [lines[n]["body"] | {"max_tokens": 60 if n == 12 else 8} for n in (1, 2, 4, 6, 10, 12, 13, 14)]
    bodies += [
        {"prompt": ids_of(1, 80), "max_tokens": 3},
        {"prompt": "The capital of", "max_tokens": 8, "stop": ["a", "is"]},
        {"prompt": ids_of(2, 1), "max_tokens": 5, "temperature": 2.0, "seed": 7, "top_p": 0.9},
        {"prompt": ids_of(3, 64) * 2, "max_tokens": 9},  # guesses find something in it
    ]
    tasks = [read_body(TEXT if "prompt" in body else CHAT, {**body, "model": None}, serving) for body in bodies]
    return [(task, *alone(demo, serving, task)) for task in tasks]


@pytest.mark.parametrize(("seed", "drafting"), [(0, True), pytest.param(1, False, marks=SLOW)])
def test_answers_equal_their_lone_runs_whoever_joins_and_leaves(new_engine, demo, monkeypatch, mix, seed, drafting):
    rng = random.Random(seed)
    monkeypatch.setattr(demo._backend, "most_rows", 48)
    asking = new_engine(size_of(4), chat=True, drafting=drafting)
    coming, asked = rng.sample(mix, len(mix)), []

    def some_come_and_go() -> None:
        while coming and rng.random() < 0.5:
            task, *expected = coming.pop()
            asked.append((asking.ask(task), *expected))
        if rng.random() < 0.1 and (riding := [told for told, *_ in asked if told.job.state == "running"]):
            asking.engine.leave(rng.choice(riding).job)

    asking.after_pass = some_come_and_go
    while coming:
        some_come_and_go()
        asking.settle()
    stayed = [entry for entry in asked if entry[0].job.left_at is None]
    assert len(asked) == len(mix)
    assert len(stayed) >= 4
    for told, answer, chosen in stayed:
        assert told.answer() == answer
        assert told.chosen == chosen
    assert asking.engine.counts.together > 1
    assert (asking.engine.counts.drafted > 0) <= drafting
    asking.after_pass = lambda: None
    stays_sound(asking)


def test_more_answers_than_a_pass_has_rows_ride_by_turns(new_engine, tiny, monkeypatch):
    """Neither do prompts starve for answers, nor answers for each other."""
    asking = new_engine(size_of(9))
    monkeypatch.setattr(tiny._backend, "most_rows", 4)
    tasks = [asking.text(ids_of(n, 3 + n), 4, seed=n, temperature=1.0) for n in range(8)]
    asked = [asking.ask(task) for task in tasks]
    began = threading.Event()
    late = asking.text(ids_of(50, 5), 2)

    def when_all_answer() -> None:
        if asking.engine.counts.tokens > 12 and not began.is_set():
            began.set()
            asked.append(asking.ask(late))

    asking.after_pass = when_all_answer
    asking.settle()
    for told, task in zip(asked, [*tasks, late], strict=True):
        assert told.answer() == asking.alone(task)[0]
    assert asking.engine.counts.failed == 0


# ---- leaving ------------------------------------------------------------------------------------------------


def test_who_leaves_the_queue_is_gone_at_once_and_told_nothing(new_engine):
    asking = new_engine(size_of(1))
    with asking.held:
        first, second, third = (asking.ask(asking.text(ids_of(n, 5), 3)) for n in range(3))
        asking.engine.leave(second.job)
        asking.engine.leave(second.job)
        assert asking.engine.counts.left == 1
        assert asking.engine.place(third.job).ahead == 1
    assert isinstance(first.wait(), Ended)
    assert isinstance(third.wait(), Ended)
    assert second.updates == []
    stays_sound(asking)


@pytest.mark.parametrize(("layer", "others"), [(0, 2), (4, 0), (8, 2)])
@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_who_leaves_in_a_pass_is_out_of_it_within_a_layer(new_engine, tiny, monkeypatch, phase, layer, others):
    monkeypatch.setattr(tiny._backend, "most_rows", 16)  # so that a prompt takes several passes
    asking = new_engine()
    riding = [(task := asking.text(ids_of(n, 8), 6), asking.ask(task)) for n in range(others)]
    prompt = ids_of(70, 40 if phase == "prefill" else 8)
    leaver = asking.ask(asking.text(prompt, 6))
    wanted = 0 if phase == "prefill" else 2
    known_at = []

    def leave(now: int) -> None:
        job = leaver.job
        passed = job is not None and job.generation is not None and len(job.generation.seq) > 0
        if now == layer and passed and not known_at and len(job.generation.chosen) == wanted:
            asking.engine.leave(job)
            asking.engine.leave(job)
            known_at.append(list(job.generation.seq.ids))

    asking.at_layer = leave
    asking.settle()
    counts = asking.engine.counts
    assert counts.left == 1
    assert counts.left_layers <= 1
    assert not leaver.over.is_set()
    for task, told in riding:
        assert told.answer() == asking.alone(task)[0]
    # A retry of the same prompt goes on from what had been computed.
    asking.at_layer = lambda layer: None
    computed = known_at[0][: len(prompt)]
    before = asking.engine.counts.computed_tokens
    again = asking.text(prompt, 1)
    told = asking.ask(again)
    assert told.answer() == asking.alone(again)[0]
    if phase == "prefill" and layer < 8:  # in the last one the pass was over before it could be left
        assert told.cached == len(computed) > 0
        assert asking.engine.counts.computed_tokens - before == len(prompt) - len(computed)
    stays_sound(asking)


def test_who_leaves_when_it_begins_or_between_passes_or_after_its_end(new_engine):
    asking = new_engine()
    for kind in (Began, News, Ended):
        told = Told()

        def leave(update, kind=kind, told=told) -> None:
            if isinstance(update, kind) and told.job is not None:
                asking.engine.leave(told.job)

        told._then = leave
        told.job = asking.engine.submit(asking.text(ids_of(3, 9), 5), "x", told)
        asking.settle()
        assert isinstance(told.updates[-1], kind) or kind is Began
    asking.engine.leave(told.job)
    assert asking.engine.counts.answered >= 1
    assert asking.engine.counts.left_layers == 0
    stays_sound(asking)


def test_the_room_of_who_left_is_for_others(new_engine):
    asking = new_engine(size_of(1))
    first = asking.ask(asking.text(ids_of(1, 20), 500))
    second_task = asking.text(ids_of(2, 20), 2)
    second = asking.ask(second_task)
    asking.engine.leave(first.job)
    assert second.answer() == asking.alone(second_task)[0]
    stays_sound(asking)


def test_nobody_outside_holds_the_memory_of_an_answer_that_is_over(new_engine):
    """Whoever writes an answer to a slow client keeps its job; the sequence goes when its room is taken."""
    asking = new_engine(size_of(1))
    told = asking.ask(asking.text(ids_of(1, 20), 2))
    told.wait()
    asking.settle()
    seq, seen = weakref.ref(next(iter(asking.engine._recent))), []
    gc.disable()
    try:
        asking.ask(asking.text(ids_of(2, 20), 2), lambda update: seen.append(seq() is None)).wait()
    finally:
        gc.enable()
    assert seen == [True] * len(seen)  # from the moment on when the next one begins
    assert told.job.generation is None


def test_a_pass_that_is_left_leaves_no_half_written_state(new_engine, tiny):
    asking = new_engine(keep_states=1 << 30)
    told = asking.ask(asking.text(ids_of(5, 30), 4))
    asking.at_layer = lambda layer: layer == 5 and asking.engine.leave(told.job)
    asking.settle()
    cache = tiny.store.roots[0].path
    assert asking.engine.counts.left == 1
    assert list((cache / "tmp").iterdir()) == []
    assert list(state_files(cache)) == []
    stays_sound(asking)
    asking.close()  # it may still be writing
    shutil.rmtree(cache / "states")


# ---- waiting ------------------------------------------------------------------------------------------------


def test_a_full_queue_says_when_to_come_again_and_the_rest_are_served_in_order(new_engine):
    asking = new_engine(size_of(1), most_waiting=3)
    began = []
    with asking.held:
        asked = [asking.ask(asking.text(ids_of(n, 4), 2), lambda u, n=n: note(began, u, n)) for n in range(3)]
        with pytest.raises(Full) as full:
            asking.ask(asking.text(ids_of(9, 4), 2))
        assert 1 <= full.value.retry_after_s <= 3600
        assert asking.engine.counts.refused == 1
    for told in asked:
        assert isinstance(told.wait(), Ended)
    assert began == sorted(began)
    stays_sound(asking)


def test_a_queue_is_full_with_long_prompts_too_but_takes_a_single_one_of_any_length(new_engine, monkeypatch):
    monkeypatch.setattr(engine_module, "MOST_WAITING_TOKENS", 20)
    asking = new_engine(size_of(1), most_waiting=9)
    with asking.held:
        first = asking.ask(asking.text(ids_of(1, 30), 2))
        with pytest.raises(Full):
            asking.ask(asking.text(ids_of(2, 1), 2))
    assert isinstance(first.wait(), Ended)
    with asking.held:
        asked = [asking.ask(asking.text(ids_of(n, 10), 2)) for n in range(2)]
        with pytest.raises(Full):
            asking.ask(asking.text(ids_of(3, 1), 2))
    assert all(isinstance(told.wait(), Ended) for told in asked)


def note(began, update, number) -> None:
    if isinstance(update, Began):
        began.append(number)


def test_a_large_request_waits_for_room_and_is_not_overtaken_for_ever(new_engine):
    """Small ones that come after it wait behind it, even if there is room for them."""
    asking = new_engine(size_of(4, tokens=768, most_tokens=768))
    began = []
    small = asking.ask(asking.text(ids_of(0, 4), 30), lambda u: note(began, u, 0))
    large_task = asking.text(ids_of(1, 600), 20)
    large = asking.ask(large_task, lambda u: note(began, u, 1))
    later = [asking.ask(asking.text(ids_of(n, 4), 3), lambda u, n=n: note(began, u, n)) for n in range(2, 6)]
    assert large.answer() == asking.alone(large_task)[0]
    for told in (small, *later):
        told.wait()
    assert began == [0, 1, 2, 3, 4, 5]
    stays_sound(asking)


def test_what_memory_will_never_hold_is_refused_at_once(new_engine):
    asking = new_engine(size_of(4, tokens=512, most_tokens=200))
    with pytest.raises(BadBody, match="memory for 200") as refused:
        asking.ask(asking.text(ids_of(1, 190), 20))
    assert refused.value.param == "prompt"
    assert refused.value.code == "context_length_exceeded"
    asking.ask(asking.text(ids_of(1, 190), 10)).wait()
    stays_sound(asking)


def test_no_request_of_many_threads_is_lost(new_engine, mix):
    asking = new_engine(size_of(8), chat=True, most_waiting=1000)
    short = [(task, *rest) for task, *rest in mix if task.max_new < 10 and len(task.ids) < 100][:4]
    assert short
    results, lock = [], threading.Lock()

    def client(number: int) -> None:
        for turn in range(2):
            task, answer, _ = short[(number + turn) % len(short)]
            told = asking.ask(task)
            if number % 5 == 4 and turn == 0:
                asking.engine.leave(told.job)
                continue
            found = told.answer() == answer
            with lock:
                results.append(found)

    threads = [threading.Thread(target=client, args=(n,)) for n in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [True] * 29
    assert asking.engine.counts.submitted == 32
    stays_sound(asking)


# ---- failures -----------------------------------------------------------------------------------------------


@pytest.fixture
def blaming(tiny, monkeypatch):
    """`blaming(error)`: passes fail in which a sequence has the guilty token."""
    forward = tiny.forward

    def blame(error: Exception, times: int = 10**9) -> None:
        left = [times]

        def spoiled(segments, **keywords):
            if any(GUILTY in s.ids or GUILTY in s.seq.ids for s in segments) and left[0]:
                left[0] -= 1
                raise error
            return forward(segments, **keywords)

        monkeypatch.setattr(tiny, "forward", spoiled)

    return blame


ERRORS = [
    NotANumber("row"),
    MemoryError("heap"),
    ValueError("bug"),
    *(pytest.param(error, marks=SLOW) for error in (Missing("expert"), NoMemory("much"), DiskError("gone"))),
]


@pytest.mark.parametrize("error", ERRORS, ids=lambda e: type(e).__name__)
def test_a_pass_that_fails_harms_only_who_is_to_blame(new_engine, blaming, error):
    asking = new_engine()
    tasks = [asking.text(ids_of(n, 8), 4, logprobs=1) for n in range(3)]
    blaming(error)
    asked = [asking.ask(task) for task in tasks]
    guilty = asking.ask(asking.text([*ids_of(9, 5), GUILTY, 11], 4))
    assert guilty.error() is error
    assert error.__traceback__ is None
    for told, task in zip(asked, tasks, strict=True):
        assert told.answer() == asking.alone(task)[0]
    assert asking.engine.counts.failed == 1
    stays_sound(asking)


def test_a_network_that_is_down_is_told_to_all_and_the_next_goes_on(new_engine, blaming):
    asking = new_engine()
    blaming(NetworkError("no route"), times=1)
    tasks = [asking.text([GUILTY, *ids_of(n, 8)], 4) for n in range(3)]
    with asking.held:
        asked = [asking.ask(task) for task in tasks]
    errors = [told.error() if isinstance(told.wait(), Failed) else None for told in asked]
    assert any(isinstance(error, NetworkError) for error in errors)
    assert asking.ask(tasks[0]).answer() == asking.alone(tasks[0])[0]
    stays_sound(asking)


def test_a_weight_that_is_no_number_ends_the_answer_that_computes_with_it(new_engine, tiny, monkeypatch):
    """Here an embedding: the real check finds it, in the real pass."""
    embedding = tiny.store.embedding

    def spoiled(ids):
        bits = embedding(ids)
        bits[[n for n, token in enumerate(ids) if token == GUILTY]] = 0x7FC0
        return bits

    monkeypatch.setattr(tiny.store, "embedding", spoiled)
    asking = new_engine()
    task = asking.text(ids_of(1, 8), 6)
    good = asking.ask(task)
    bad = asking.ask(asking.text([5, GUILTY, 7], 6))
    assert isinstance(bad.error(), NotANumber)
    assert good.answer() == asking.alone(task)[0]
    stays_sound(asking)


def test_a_choice_that_fails_ends_one_answer_and_loses_none_of_the_others(new_engine, monkeypatch):
    """The pass is computed by then: what it brought the others must not be lost."""
    asking = new_engine()
    tasks = [asking.text(ids_of(n, 8), 3, temperature=1.0, seed=n) for n in range(4)]
    expected = [asking.alone(task)[0] for task in tasks]
    choose = Sampler.choose

    def failing(self, values, position):
        if self.sampling.seed == 1 and position >= 9:
            raise MemoryError("no room for a copy")
        return choose(self, values, position)

    monkeypatch.setattr(Sampler, "choose", failing)
    asked = [asking.ask(task) for task in tasks]
    assert isinstance(asked[1].error(), MemoryError)
    for n in (0, 2, 3):
        assert asked[n].answer() == expected[n]
    stays_sound(asking)


def test_an_answer_that_was_finished_when_choosing_failed_is_told(new_engine, monkeypatch):
    asking = new_engine()
    tasks = [asking.text(ids_of(n, 8), 3 + n) for n in range(3)]
    expected = [asking.alone(task)[0] for task in tasks]
    take = Generation.take

    def failing(self, segment, logits):
        new = take(self, segment, logits)
        if self.finish is not None:
            raise MemoryError("after its last token")
        return new

    monkeypatch.setattr(Generation, "take", failing)
    asked = [asking.ask(task) for task in tasks]
    assert [told.answer() for told in asked] == expected
    monkeypatch.undo()
    stays_sound(asking)


def test_an_answer_that_cannot_be_written_ends_alone(new_engine):
    asking = new_engine()
    task = asking.text(ids_of(0, 8), 4)
    told = asking.ask(task)
    broken = [asking.ask(asking.text(ids_of(n, 8), 4)) for n in (1, 2)]

    def fail(*_):
        raise ValueError("a bug of ours")

    class Broken:
        tokens = ()
        ended = False
        push = finish = fail

    for one in broken:
        one.job.answer = Broken()
    assert {type(one.error()) for one in broken} == {ValueError}
    assert told.answer() == asking.alone(task)[0]
    stays_sound(asking)


def test_a_request_that_cannot_begin_is_told_and_takes_no_room(new_engine, monkeypatch):
    asking = new_engine(size_of(1))
    find = asking.engine._starts.find
    errors = iter([MemoryError("no"), OSError("a bug")])

    def failing(*args):
        if (error := next(errors, None)) is not None:
            raise error
        return find(*args)

    monkeypatch.setattr(asking.engine._starts, "find", failing)
    assert isinstance(asking.ask(asking.text(ids_of(0, 8))).error(), MemoryError)
    assert isinstance(asking.ask(asking.text(ids_of(0, 8))).error(), OSError)
    stays_sound(asking)


@pytest.mark.parametrize("kind", [Began, News, Ended])
def test_a_listener_that_raises_has_left(new_engine, kind):
    asking = new_engine()

    def rude(update) -> None:
        if isinstance(update, kind):
            raise RuntimeError("listener")

    task = asking.text(ids_of(1, 8), 4)
    polite = asking.ask(task)
    told = asking.ask(asking.text(ids_of(0, 8), 4), rude)
    assert polite.answer() == asking.alone(task)[0]
    asking.settle()
    assert isinstance(told.updates[-1], kind)
    stays_sound(asking)


def test_the_death_of_the_engine_is_told_to_all(new_engine, monkeypatch):
    asking = new_engine(size_of(1))
    engine = asking.engine
    with asking.held:
        asked = [asking.ask(asking.text(ids_of(n, 8), 4)) for n in range(3)]

        def fail(*_):
            raise ZeroDivisionError("somebody's prompt")

        monkeypatch.setattr(engine, "_let_go", fail)
    for told in asked:
        assert isinstance(told.error(), Stopped)
        assert str(told.error()) == "the engine failed; its log says why"
    engine._thread.join(10)
    assert not engine.alive
    assert isinstance(engine.error, ZeroDivisionError)
    with pytest.raises(Stopped, match="its log says why"):
        asking.ask(asking.text(ids_of(1, 4)))
    assert (engine.running, engine.waiting, engine.recent) == (0, 0, 0)


@pytest.mark.parametrize("at", ["the beginning", "the end"])
def test_who_is_between_two_places_when_the_engine_dies_is_told_as_well(new_engine, monkeypatch, at):
    asking = new_engine(size_of(2))
    engine = asking.engine

    def fail(*_):
        raise ZeroDivisionError("a bug of ours")

    monkeypatch.setattr(*((engine._room, "take") if at == "the beginning" else (engine._recent, "keep")), fail)
    with asking.held:
        asked = [asking.ask(asking.text(ids_of(n, 8), 4 + n)) for n in range(3)]
    for told in asked:
        assert isinstance(told.error(), Stopped)
    counts = engine.counts
    assert counts.submitted == counts.failed == 3


@pytest.mark.parametrize("error", [MemoryError(), ValueError("a bug of ours")])
def test_a_state_that_cannot_be_kept_ends_no_answer(new_engine, monkeypatch, error):
    asking = new_engine(size_of(2), keep_states=1 << 30)

    def fail(self):
        raise error

    monkeypatch.setattr(PrefixWriter, "commit", fail)
    asked = [asking.ask(asking.text(ids_of(n, 40), 6)) for n in range(2)]
    for told in asked:
        assert isinstance(told.wait(), Ended)
    assert asking.engine.alive


# ---- closing ------------------------------------------------------------------------------------------------


def test_closing_in_a_pass_ends_it_within_a_layer_and_tells_everybody(new_engine):
    asking = new_engine(size_of(2))
    reached, layers = threading.Event(), []

    def at(layer: int) -> None:
        layers.append(layer)
        if asking.engine.counts.tokens > 3:
            reached.set()
            while not asking.engine.stopping:  # the pass waits here until it is to end
                pass

    asking.at_layer = at
    asked = [asking.ask(asking.text(ids_of(n, 8), 400)) for n in range(3)]
    assert reached.wait(30)
    before = len(layers)
    asking.engine.close()
    assert len(layers) <= before + 1
    for told in asked:
        assert isinstance(told.error(), Stopped)
    assert not asking.engine.alive
    asking.engine.close()
    with pytest.raises(Stopped, match="shutting down"):
        asking.ask(asking.text(ids_of(1, 4)))


def test_who_leaves_the_queue_while_the_engine_ends_has_left(new_engine, monkeypatch):
    asking = new_engine(size_of(1))
    engine, begun, errors = asking.engine, threading.Event(), []
    asking.ask(asking.text(ids_of(1, 8), 400), lambda update: begun.set())
    waiting = asking.ask(asking.text(ids_of(2, 8), 4))
    assert begun.wait(LONG_S)
    out = engine._out

    def leaving(job) -> None:
        out(job)
        try:
            engine.leave(waiting.job)
        except Exception as e:
            errors.append(e)

    monkeypatch.setattr(engine, "_out", leaving)
    engine.close()
    assert not errors
    counts = engine.counts
    assert counts.submitted == counts.failed + counts.left == 2
    assert (engine.running, engine.waiting) == (0, 0)


def test_a_request_is_named_without_its_prompt(new_engine):
    asking = new_engine(start=False)
    assert repr(asking.ask(asking.text([7, 8])).job) == "Job(1, waiting)"


def test_closing_while_idle_and_before_the_start(new_engine):
    idle = new_engine()
    idle.ask(idle.text(ids_of(1, 4))).wait()
    idle.settle()
    idle.close()
    idle.close()
    assert not idle.engine.alive
    never = new_engine(start=False)
    told = never.ask(never.text(ids_of(1, 4)))
    assert not never.engine.alive
    never.close()
    assert isinstance(told.error(), Stopped)
    never.close()


# ---- estimates ----------------------------------------------------------------------------------------------


def test_places_are_known_once_something_was_computed_and_never_senseless(new_engine):
    asking = new_engine(size_of(2))
    seen, asked = [], []

    def look() -> None:
        for told in asked:
            place = asking.engine.place(told.job)
            progress = asking.engine.progress()
            seen.append((asking.engine.counts.passes, told.job.state, place))
            assert place.first_token_s is None or 0 <= place.first_token_s < 3600
            assert progress.left_s is None or 0 <= progress.left_s < 3600
            assert asking.engine.still_s >= 0

    asking.at_layer = lambda layer: look() if layer % 6 == 0 else None
    asking.after_pass = look
    with asking.held:
        asked += [asking.ask(asking.text(ids_of(n, 300 if n == 1 else 20), 4)) for n in range(5)]
        look()
    for told in asked:
        told.wait()
    asking.settle()
    known = [entry for entry in seen if entry[0] > 0]
    assert all(place.first_token_s is not None for _, _, place in known)
    waits = [place for _, state, place in known if state == "waiting"]
    assert {place.ahead for place in waits} >= {0, 1}
    assert all(place.first_token_s > 0 for place in waits)
    assert all(place.ahead is None for _, state, place in seen if state != "waiting")
    assert all(place.first_token_s == 0 for _, state, place in seen if state == "over")
