"""A batch under way: answers that depend on their request alone, and nothing lost or drawn twice when it is stopped."""

from __future__ import annotations

import json

import pytest

from deltafin.errors import NoSpace
from deltafin.indexer import Sketch, k3_config, parse_config
from deltafin.runtime import Generation, Observer, Runner, Want
from deltafin.runtime import memory as memory_module
from deltafin.runtime.batch import (
    Batch,
    Journal,
    Requests,
    Results,
    Size,
    choose_size,
    journal_path,
    worth_sharing,
)
from deltafin.runtime.memory import KEY_BLOCK, kda_state_nbytes, row_nbytes
from deltafin.runtime.native.passes import matrices
from deltafin.runtime.openai import Answer, Serving
from deltafin.store import spine_pieces


def room(sequences, blocks=64, **keywords):
    """A size for so many answers; the demo has memory for any."""
    return Size(Want(rows=64), sequences, blocks * KEY_BLOCK, most_tokens=1000, **keywords)


ROOMY = room(64)


@pytest.fixture(scope="module")
def serving(demo):
    config = demo.config
    return Serving("demo", "fp_test", demo.tokenizer, config.vocab_size, config.max_positions, max_new=50)


@pytest.fixture(scope="module")
def lines(kill_batches):
    """`lines(count)`: requests of both kinds, greedy and drawn, with and without log-probabilities, short ones."""
    return lambda count, **keywords: kill_batches.requests(count, short=True, **keywords)


class Work:
    """One input and output, and batches on them."""

    def __init__(self, folder, demo, serving) -> None:
        self.source, self.target = folder / "in.jsonl", folder / "out.jsonl"
        self.demo, self.serving = demo, serving

    def write(self, lines) -> None:
        self.source.write_text("".join(json.dumps(line) + "\n" for line in lines))

    def run(self, size=ROOMY, observer=None, progress=lambda: None, **keywords):
        with Results(self.target) as results, Requests(self.source, self.serving) as requests:
            requests.scan(results)
            with Journal(journal_path(self.target), requests.is_open) as journal:
                self.batch = Batch(self.demo, self.serving, requests, results, journal, size, **keywords)
                self.batch.run(observer, progress)
        return self.batch.counts

    def length(self, instructions):
        """How many tokens a conversation's instructions take."""
        with Requests(self.source, self.serving) as requests:
            raw = json.dumps(instructed("x", instructions)).encode()
            return requests.task(requests._request(raw, 0, 1)).shared

    def answers(self):
        found = {}
        for line in self.target.read_bytes().splitlines():
            answer = json.loads(line)
            answer["response"]["body"].pop("created", None)
            assert answer["custom_id"] not in found
            found[answer["custom_id"]] = answer
        return found

    def alone(self):
        """Each request by itself, without any file but the input."""
        found = {}
        with Requests(self.source, self.serving) as requests, Results(self.target.with_name("none")) as results:
            requests.scan(results)
            for index in range(len(requests)):
                request = requests.read(index)
                task = requests.task(request)
                answer = Answer(task, self.serving, request.key.hex())
                generation = Generation(
                    self.demo.sequence(), task.ids, max_new=task.max_new, sampling=task.sampling, ends=answer.ends
                )
                runner = Runner(self.demo)
                runner.add(generation)
                while runner.active:
                    runner.step()
                answer.finish(generation.chosen, generation.finish)
                found[request.custom_id] = json.loads(json.dumps(answer.as_json(0)))
                del found[request.custom_id]["created"]
        return found


@pytest.fixture
def work(tmp_path, demo, serving):
    return Work(tmp_path, demo, serving)


class After(Observer):
    """Raises in the pass after so many, in a certain layer."""

    def __init__(self, passes, layer, error) -> None:
        self.passes, self.at, self.error = passes, layer, error
        self.seen: list[int] = []  # sequences of each pass
        self.computed = 0  # rows

    def rows(self, spans):
        self.seen.append(len(spans))
        self.computed += sum(span.count for span in spans)

    def layer(self, layer, num_layers):
        if len(self.seen) > self.passes and layer == self.at:
            raise self.error


def is_as_alone(work, lines) -> None:
    work.write(lines)
    work.run()
    alone = work.alone()
    for name, answer in work.answers().items():
        assert answer["response"]["body"] == alone[name], name
    assert len(alone) == len(lines) == len(work.answers())
    texts = [json.dumps(a["choices"]) for a in alone.values()]
    assert sum('"logprob' in t and "-" in t for t in texts) > len(lines) // 8


def test_answers_are_those_of_each_request_alone_to_the_last_logprob(work, lines):
    is_as_alone(work, lines(8))


@pytest.mark.slow
def test_64_answers_are_those_of_each_request_alone_to_the_last_logprob(work, kill_batches):
    is_as_alone(work, kill_batches.requests(64))


def test_answers_join_in_order_and_never_more_than_there_is_room_for(work, lines, demo):
    work.write(lines(10))
    seen, live = After(10**9, 0, None), []
    counts = work.run(room(3, blocks=3), seen, lambda: live.append(len(demo._live)))
    assert (counts.answers, counts.open, max(seen.seen)) == (10, 0, 3)
    assert counts.passes == len(seen.seen) and work.batch.under_way == 0
    numbers = [int(name.partition(":")[0]) for name in work.answers()]
    # One that finishes late was begun with those that finished before it.
    assert all(n - place <= 2 for place, n in enumerate(numbers)) and sorted(numbers) == list(range(10))
    assert max(live) - min(live) <= 3, "an answer that is over holds no memory"


def test_room_is_counted_in_tokens_too(work, lines):
    long = {"custom_id": "long", "method": "POST", "url": "/v1/completions"}
    work.write([{**long, "body": {"prompt": "a", "max_tokens": 2 * KEY_BLOCK - 5, "stop": "e"}}, *lines(4)])
    seen = After(10**9, 0, None)
    work.run(room(4, blocks=3), seen)
    assert seen.seen[0] == 2, "the long one and one beside it"
    assert len(work.answers()) == 5


def test_a_request_that_is_too_long_for_memory_gets_an_error_and_the_others_answers(work, lines):
    long = {
        "custom_id": "long",
        "method": "POST",
        "url": "/v1/completions",
        "body": {"prompt": "a", "max_tokens": 2000},
    }
    work.write([long, *lines(2)])
    counts = work.run()
    assert (counts.answers, counts.refused, counts.open) == (2, 1, 0)
    answer = work.answers()["long"]
    assert answer["response"]["status_code"] == 400
    error = answer["response"]["body"]["error"]
    assert (error["param"], error["code"]) == ("max_tokens", "context_length_exceeded") and "1000" in error["message"]
    assert work.run().before == 3


def test_refused_requests_get_an_error_object_each_and_once(work, lines):
    bad = {"custom_id": "bad", "method": "POST", "url": "/v1/completions", "body": {"prompt": "a", "n": 2}}
    work.write([lines(1)[0], bad])
    counts = work.run()
    assert (counts.answers, counts.refused) == (1, 1)
    answer = work.answers()["bad"]
    assert answer["error"] is None and answer["response"]["status_code"] == 400
    error = answer["response"]["body"]["error"]
    assert (error["type"], error["param"]) == ("invalid_request_error", "n")
    again = work.run()
    assert (again.before, again.answers, again.refused, again.passes) == (2, 0, 0, 0)


@pytest.mark.parametrize("sequences", [2, 64])
def test_what_was_drawn_before_an_interrupt_is_not_drawn_again(work, lines, tmp_path, sequences):
    size = room(sequences)
    work.write(lines(5))
    whole = work.run(size)
    expected = work.answers()
    work.target.unlink()
    drawn, runs, recovered = 0, 0, 0
    for stop in (0, 3, 4, 10**9):
        try:
            counts = work.run(size, After(stop, runs, KeyboardInterrupt()))
        except KeyboardInterrupt:
            counts = work.batch.counts
        drawn, runs, recovered = drawn + counts.tokens, runs + 1, recovered + counts.recovered
    assert work.answers() == expected
    assert drawn == whole.tokens == whole.answered_tokens and recovered > 0
    assert sorted(p.name for p in tmp_path.iterdir()) == ["in.jsonl", "out.jsonl"]


def test_an_answer_that_was_over_but_not_written_is_written_without_a_pass(work, lines, monkeypatch):
    work.write(lines(3))
    work.run()
    expected = work.answers()
    work.target.unlink()
    append = Results.append

    def full(self, *args):
        raise NoSpace("full")

    monkeypatch.setattr(Results, "append", full)
    with pytest.raises(NoSpace):
        work.run()
    monkeypatch.setattr(Results, "append", append)
    counts = work.run()
    assert work.answers() == expected
    assert counts.recovered > 0 and counts.tokens + counts.recovered == sum(
        a["response"]["body"]["usage"]["completion_tokens"] for a in expected.values()
    )


def test_a_lost_or_damaged_journal_only_costs_time(work, lines):
    work.write(lines(4))
    work.run()
    expected = work.answers()
    for damage in (
        lambda p: p.unlink(),
        lambda p: p.write_bytes(b"x" * 500),
        lambda p: p.write_bytes(p.read_bytes()[:-9]),
    ):
        work.target.unlink()
        with pytest.raises(KeyboardInterrupt):
            work.run(observer=After(5, 2, KeyboardInterrupt()))
        damage(journal_path(work.target))
        work.run()
        assert work.answers() == expected


# ---- what requests share ------------------------------------------------------------------------------


def instructed(name, instructions, question="Hello"):
    messages = [{"role": "system", "content": instructions}, {"role": "user", "content": question}]
    body = {"messages": messages, "max_tokens": 6, "reasoning_effort": "none", "logprobs": True}
    return {"custom_id": name, "method": "POST", "url": "/v1/chat/completions", "body": body}


def worth(work, rows):
    with Requests(work.source, work.serving) as requests, Results(work.target) as results:
        requests.scan(results)
        return worth_sharing(requests, rows)


def test_instructions_of_many_requests_are_computed_once_and_change_no_bit(work):
    one, other = "Answer in one word. " * 5, "You are a poet. " * 5
    questions = ["Hello", "What is the capital of Peru?", "2 + 2", "Who are you?"]
    # The second is not shared as long as the first is kept; then it is.
    order = [(one, 0), (one, 1), (other, 0), (one, 2), (one, 3), (other, 1), (other, 2), (other, 3)]
    work.write([instructed(f"{n}", text, questions[k]) for n, (text, k) in enumerate(order)])
    shared = worth(work, 100)
    assert len(shared) == 2 and set(shared.values()) == {4}
    plain = work.run(room(3))
    expected = work.answers()
    assert plain.shared == 0
    work.target.unlink()
    seen = After(10**9, 0, None)
    counts = work.run(room(3, shared=shared), seen)
    assert work.answers() == expected
    length = {text: work.length(text) for text in (one, other)}
    assert counts.shared == 4 * length[one] + 3 * length[other]
    assert seen.computed == plain.prompt_tokens - counts.shared + sum(length.values()) + plain.tokens - 8


def test_few_or_short_instructions_are_not_worth_a_pass(work):
    work.write([instructed("a", "Be brief."), instructed("b", "Be brief."), instructed("c", "Be verbose. " * 50)])
    assert len(worth(work, 5)) == 1 and worth(work, 100) == {}
    work.write([request for request in ([instructed("a", "x " * 200)] * 1)])
    assert worth(work, 1) == {}


def test_sharing_survives_interrupts(work):
    text = "Answer in one word. " * 5
    work.write([instructed(f"{n}", text, f"{n} + {n}") for n in range(4)])
    shared = worth(work, 100)
    work.run(room(2))
    expected = work.answers()
    for stop in (0, 2):
        work.target.unlink()
        with pytest.raises(KeyboardInterrupt):
            work.run(room(2, shared=shared), After(stop, 5, KeyboardInterrupt()))
        work.run(room(2, shared=shared))
        assert work.answers() == expected


class Remembered:
    """Beginnings of earlier runs, in memory."""

    def __init__(self, demo) -> None:
        self.demo, self.kept = demo, []

    def longest(self, ids):
        found = [seq for seq in self.kept if len(seq) < len(ids) and list(ids[: len(seq)]) == seq.ids]
        return self.demo.fork(max(found, key=len)) if found else None

    def keep(self, seq):
        self.kept.append(self.demo.fork(seq))


def test_what_earlier_runs_have_seen_is_not_computed_again(work, demo):
    text = "Answer in one word. " * 5
    work.write([instructed(f"{n}", text, f"{n} + {n}") for n in range(4)])
    shared, length, remembered = worth(work, 100), work.length(text), Remembered(demo)
    work.run(room(3))
    expected = work.answers()
    for size, saved in ((room(3, shared=shared), 4), (room(3, shared=shared), 5), (room(3), 4)):
        work.target.unlink()
        counts = work.run(size, beginnings=remembered)
        assert work.answers() == expected and counts.shared == saved * length
    assert [len(seq) for seq in remembered.kept] == [length]


def test_the_rest_is_estimated_from_the_answers_that_are_there(work, lines):
    work.write(lines(8))
    left = []
    work.run(room(2), None, lambda: left.append(work.batch.left_s()))
    assert left[0] is None and left[-1] == 0
    known = [s for s in left if s is not None]
    assert max(known) > 0 and all(s >= 0 for s in known)


# ---- how many ride together ---------------------------------------------------------------------------


@pytest.fixture(scope="module")
def k3():
    sketch = Sketch(parse_config(k3_config()))
    return sketch, spine_pieces(sketch, lambda layer: matrices(sketch.config, layer))


@pytest.fixture(autouse=True)
def small_program(request, monkeypatch) -> None:
    """Whatever else the tests have left in memory."""
    if "k3" in request.fixturenames:
        monkeypatch.setattr(memory_module, "own_nbytes", lambda: 60_000_000)


@pytest.mark.parametrize("gigabytes", [1.5, 2, 3, 4, 8, 16, 32, 64, 128, 512])
@pytest.mark.parametrize("lengths", [[600] * 1000, [300, 9000] * 50, [200] * 3], ids=["even", "uneven", "few"])
def test_a_size_is_one_that_the_plan_has_room_for(k3, gigabytes, lengths):
    budget = int(gigabytes * 1e9)
    size = choose_size(*k3, budget, 4, lengths, 256)
    plan = memory_module.plan_memory(budget, *k3, size.want, 4)
    config = k3[0].config
    assert plan.total <= budget
    assert 1 <= size.sequences <= min(256, len(lengths))
    assert plan.sequences >= 2 * size.sequences * kda_state_nbytes(config)
    assert plan.rows == size.want.rows > size.sequences, "all ride in one pass, and prompts beside them"
    fitting = [n for n in lengths if n <= size.most_tokens]
    assert size.tokens >= max(fitting)
    if size.sequences < min(256, len(fitting)):
        state = 2 * kda_state_nbytes(config) + 4 * size.sequences * row_nbytes(config)
        spare = plan.resident_nbytes + plan.resident_experts_nbytes + plan.ring_nbytes
        assert spare < 3e9 + state, "memory for another one goes to the spine"


def test_more_memory_is_never_fewer_sequences(k3):
    found = [choose_size(*k3, n * 10**9, 4, [600] * 1000, 256).sequences for n in (2, 4, 8, 16, 32, 64, 128, 256)]
    assert found == sorted(found) and found[-1] == 256 and found[3] >= 12


def test_a_cap_is_kept_and_what_fits_nowhere_is_left_out(k3):
    assert choose_size(*k3, 64 * 10**9, 4, [600] * 1000, 7).sequences == 7
    size = choose_size(*k3, 2 * 10**9, 4, [600, 1_000_000], 256)
    assert size.most_tokens < 1_000_000 and size.tokens == 768
    assert choose_size(*k3, 10**9, 4, [600], 256).sequences == 1, "the plan says what lacks"
