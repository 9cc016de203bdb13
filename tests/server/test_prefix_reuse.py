"""What was computed once is gone on from, in memory and on disk, and the answer is that of a cold run (NU-08)."""

from __future__ import annotations

import logging
import shutil

import httpx
import pytest

from deltafin.errors import DiskError
from deltafin.store import state_files
from tests.server.engines import size_of
from tests.server.test_engine import ids_of

PLENTY = 1 << 30
TEXT = ids_of(7, 80)
OTHER = ids_of(8, 80)
SYSTEM = {"role": "system", "content": "You are Kimi, and you answer every question in one short sentence."}
FRANCE = {"role": "user", "content": "What is the capital of France?"}
ITALY = {"role": "user", "content": "What is the capital of Italy?"}


@pytest.fixture(autouse=True)
def no_states(tiny, demo):
    """The cache has none before a test, and none after it."""
    assert tiny.store.roots[0].path == demo.store.roots[0].path
    folder = tiny.store.roots[0].path / "states"
    shutil.rmtree(folder, ignore_errors=True)
    yield
    shutil.rmtree(folder, ignore_errors=True)


class Kept:
    """An engine; where only the disk is to help, another one for each request."""

    def __init__(self, place, new_engine, *, chat=False) -> None:
        self.place, self._new_engine, self._chat = place, new_engine, chat
        self.asking = self._engine()

    def served(self, task):
        if self.place == "disk":
            self.asking.close()
            self.asking = self._engine()
        return served(self.asking, task)

    def _engine(self):
        return self._new_engine(chat=self._chat, keep_states=0 if self.place == "memory" else PLENTY, drafting=False)

    def __getattr__(self, name):
        return getattr(self.asking, name)

    def on_disk(self, tokens: int) -> int:
        """So many, where the disk is there to help."""
        return 0 if self.place == "memory" else tokens


@pytest.fixture(params=[pytest.param("memory", marks=pytest.mark.slow), "disk"])
def kept(request, new_engine):
    return Kept(request.param, new_engine)


@pytest.fixture
def kept_on_disk(new_engine):
    return Kept("disk", new_engine)


@pytest.fixture
def kept_chats(new_engine):
    return Kept("disk", new_engine, chat=True)


def served(asking, task):
    """What an answer was, and how much of its prompt was not computed; it is that of a cold run."""
    before = asking.engine.counts.as_json()
    told = asking.ask(task)
    assert told.answer() == asking.alone(task)[0]
    asking.settle()
    after = asking.engine.counts.as_json()
    # Counts tell the truth: what is not cached is computed, and of the answer all but its last token.
    assert after["cached_tokens"] - before["cached_tokens"] == told.cached
    computed = len(task.ids) - told.cached + len(told.job.answer.tokens) - 1
    assert after["computed_tokens"] - before["computed_tokens"] == computed
    return told


def test_the_same_prompt_again(kept):
    task = kept.text(TEXT[:50], 3, logprobs=2)
    assert kept.served(task).cached == 0
    again = kept.served(task)
    assert again.cached == kept.on_disk(49)
    assert again.chosen == kept.alone(task)[1]


@pytest.mark.parametrize(
    "shared", [1, 63, pytest.param(64, marks=pytest.mark.slow), pytest.param(65, marks=pytest.mark.slow)]
)
def test_prompts_that_share_a_beginning(kept_on_disk, shared):
    """What is shared is found if it was once the beginning of a prompt; what differs never is."""
    kept = kept_on_disk
    kept.served(kept.text(TEXT[: shared + 1], 1))
    kept.served(kept.text([*TEXT[:shared], *OTHER[:5]], 1))
    assert kept.served(kept.text([*TEXT[:shared], *OTHER[5:10]], 2, logprobs=1)).cached == shared


def test_memory_keeps_whole_sequences_only(new_engine):
    kept = Kept("memory", new_engine)
    first = kept.served(kept.text(TEXT[:20], 2))
    assert kept.served(kept.text([*TEXT[:19], *OTHER[:5]], 2)).cached == 0
    assert kept.served(kept.text([*TEXT[:20], first.chosen[0].token, *OTHER[:5]], 2)).cached == 21


def test_a_shorter_prompt_after_a_longer_one(kept):
    kept.served(kept.text(TEXT, 2))
    assert kept.served(kept.text(TEXT[:65], 2)).cached == 0
    # And between the two nothing is confused.
    assert kept.served(kept.text(TEXT[:75], 2)).cached == kept.on_disk(64)
    assert kept.served(kept.text(TEXT, 2)).cached <= len(TEXT) - 1


@pytest.mark.parametrize("place", ["memory", "disk", "both"])
def test_a_chat_that_grows_computes_its_new_rows_only(new_engine, place):
    """On disk with a restart between any two turns."""
    kept = Kept(place, new_engine)
    ids, known = TEXT[:30], 0
    for turn in range(3):
        told = kept.served(kept.text(ids, 4))
        assert told.cached == known
        known = len(ids) + 3  # the last token of an answer is fed with the next turn
        ids = [*ids, *(c.token for c in told.job.answer.tokens), *OTHER[10 * turn : 10 * turn + 10]]


def test_an_answer_that_was_edited_or_is_wanted_anew(kept):
    first = kept.served(kept.text(TEXT[:40], 5))
    answer = [c.token for c in first.job.answer.tokens]
    edited = [*TEXT[:40], answer[0], (answer[1] + 1) % 500, *answer[2:], *OTHER[:6]]
    assert kept.served(kept.text(edited, 3)).cached == kept.on_disk(39)
    again = kept.served(kept.text(TEXT[:40], 5, temperature=1.0, seed=5))
    assert again.cached == kept.on_disk(39)


def test_instructions_are_shared_by_chats_that_differ_from_there_on(kept_chats):
    effort = {"reasoning_effort": "none"}
    first = kept_chats.chat(SYSTEM, FRANCE, **effort)
    second = kept_chats.chat(SYSTEM, ITALY, **effort)
    assert first.shared == second.shared > 10
    assert kept_chats.served(first).cached == 0
    assert kept_chats.served(second).cached == kept_chats.on_disk(first.shared)


@pytest.mark.parametrize("system", [True, False])
def test_a_client_that_leaves_reasoning_out_goes_on_from_its_question(kept_chats, system):
    """What it sends back is not what was computed: then the prompt's own state is what helps."""
    head = [SYSTEM, FRANCE] if system else [FRANCE]
    first = kept_chats.chat(*head, max_new=6, reasoning_effort="low")
    told = kept_chats.served(first)
    message = told.answer()["choices"][0]["message"]
    assert message["reasoning_content"]
    second = kept_chats.chat(
        *head, {"role": "assistant", "content": message["content"] or "?"}, ITALY, reasoning_effort="low"
    )
    assert second.ids[: len(first.ids)] == first.ids
    assert second.ids[len(first.ids)] != told.chosen[0].token
    assert kept_chats.served(second).cached == kept_chats.on_disk(len(first.ids))


def test_after_a_cancelled_and_after_a_failed_request(kept, monkeypatch, tiny):
    asking = kept.asking
    told = asking.ask(asking.text(TEXT[:60], 50))
    asking.after_pass = lambda: len(told.job.answer.tokens) > 3 and asking.engine.leave(told.job)
    asking.settle()
    asking.after_pass = lambda: None
    assert asking.engine.counts.left == 1
    task = kept.text([*TEXT[:60], *(c.token for c in told.job.answer.tokens), 5], 3)
    cached = kept.served(task).cached
    assert cached >= 59
    forward = tiny.forward

    def failing(segments, **keywords):
        if len(segments[0].seq) > 70:
            raise DiskError("gone")
        return forward(segments, **keywords)

    asking = kept.asking
    monkeypatch.setattr(tiny, "forward", failing)
    failed = asking.ask(asking.text([*TEXT[:70], 9], 20))
    assert isinstance(failed.error(), DiskError)
    monkeypatch.undo()
    kept.served(kept.text([*TEXT[:70], 9], 4))


def test_what_was_computed_of_an_answer_outlives_a_stop_of_the_server(new_engine):
    first = new_engine(keep_states=PLENTY, drafting=False)
    told = first.ask(first.text(TEXT[:40], 300))
    first.after_pass = lambda: first.engine._wake(stop=len(told.job.answer.tokens) > 5)
    told.over.wait(30)
    first.close()
    drawn = [c.token for c in told.job.answer.tokens]
    assert len(drawn) > 5
    second = new_engine(keep_states=PLENTY, drafting=False)
    assert served(second, second.text([*TEXT[:40], *drawn], 2)).cached == 40 + len(drawn) - 1


def test_under_pressure_memory_gives_up_what_is_not_needed_and_never_more_than_there_is(new_engine):
    asking = new_engine(size_of(2, tokens=768, most_tokens=768), drafting=False)
    room = asking.engine._room
    chats = [list(ids_of(n, 20)) for n in range(3)]
    for turn in range(3):
        for number, ids in enumerate(chats):
            told = served(asking, asking.text(ids, 2))
            assert room.taken_sequences <= 2 and room.taken_tokens <= 768
            ids += [*(c.token for c in told.job.answer.tokens), *ids_of(100 * turn + number, 15)]
            if turn:
                assert told.cached == 0  # of three chats that take turns, memory holds the two before
    # The one that was asked last goes on from memory, although with what it has it takes all of the room.
    ids = chats[-1]
    assert served(asking, asking.text(ids, 700 - len(ids), stop="e")).cached == len(ids) - 16


def test_states_on_disk_keep_to_their_budget(new_engine, tiny):
    probe = new_engine(keep_states=PLENTY)
    probe.ask(probe.text(TEXT[:30], 2)).wait()
    probe.close()
    files = list(state_files(tiny.store.roots[0].path))
    budget = 3 * max(file.nbytes for file in files)
    asking = new_engine(keep_states=budget, drafting=False)
    for number in range(5):
        served(asking, asking.text(ids_of(number, 30), 2))
        assert sum(file.nbytes for file in state_files(tiny.store.roots[0].path)) <= budget
    assert asking.engine.prefixes.evicted > 0


def test_a_damaged_state_is_said_and_computed_again(new_engine, tiny, caplog):
    first = new_engine(keep_states=PLENTY)
    task = first.text(TEXT[:50], 3)
    first.ask(task).wait()
    first.close()
    files = list(state_files(tiny.store.roots[0].path))
    assert files
    for file in files:
        data = bytearray(file.path.read_bytes())
        data[len(data) // 2] ^= 1
        file.path.write_bytes(data)
    second = new_engine(keep_states=PLENTY, drafting=False)
    with caplog.at_level(logging.WARNING):
        assert served(second, task).cached == 0
    assert second.engine.prefixes.damaged == 1
    assert "computed again" in caplog.text
    assert served(second, task).cached == 49


def test_over_http_a_chat_that_grows_over_restarts_computes_its_new_rows_only(new_server):
    """As a client sees it: text goes back and forth, and the server is another one for every turn."""
    messages, before = [SYSTEM], 0
    for turn, question in enumerate([FRANCE, ITALY, FRANCE]):
        server = new_server(keep_states=PLENTY, context=2048)
        messages.append(question)
        body = {"model": server.model_name, "messages": messages, "max_tokens": 20, "reasoning_effort": "none"}
        answer = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=60).json()
        message, usage = answer["choices"][0]["message"], answer["usage"]
        assert message["content"] == f"The capital of {('France is Paris', 'Italy is Rome')[turn % 2]}."
        assert usage["prompt_tokens_details"]["cached_tokens"] == before
        computed = usage["prompt_tokens"] - before + usage["completion_tokens"] - 1
        guesses = server.engine.counts.drafted - server.engine.counts.accepted
        assert server.engine.counts.computed_tokens == computed + guesses
        before = usage["total_tokens"] - 1  # the last token of an answer is fed with the next turn
        messages.append({"role": "assistant", "content": message["content"]})
        server.close()
