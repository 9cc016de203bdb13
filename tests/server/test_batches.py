"""Batches of the API: answers are those of `df-run batch`, whatever rides along, fails or is killed meanwhile."""

from __future__ import annotations

import errno
import json
import os
import shutil
import threading
import time
from dataclasses import replace
from types import SimpleNamespace

import openai
import pytest

from deltafin.errors import DeltafinError, DiskError, NetworkError, NoMemory, NoSpace, NotANumber
from deltafin.runtime import Observer, Runner, Want
from deltafin.runtime.batch import Batch, Journal, Requests, Results, Size, journal_path
from deltafin.runtime.memory import KEY_BLOCK
from deltafin.runtime.openai import CHAT, serving_of
from deltafin.runtime.server import ServerSize
from deltafin.runtime.server.batches import BatchService
from deltafin.runtime.server.room import LentRoom, Room
from deltafin.runtime.server.settings import Settings

OVER = ("completed", "failed", "cancelled")
LONG_S = 60.0  # until a test gives up


def request(name, question="Hello", **body):
    body = {"messages": [{"role": "user", "content": question}], "max_tokens": 6, "reasoning_effort": "none", **body}
    return {"custom_id": name, "method": "POST", "url": CHAT, "body": body}


def requests(count, **body):
    """Greedy ones and drawn ones, some with log-probabilities, of different lengths."""
    return [
        request(
            f"{n}",
            f"{n} + {n}?",
            **{"max_tokens": 3 + n % 3, "temperature": 1.5 * (n % 3 == 1), "logprobs": n % 4 == 2, **body},
        )
        for n in range(count)
    ]


def jsonl(lines):
    return "".join(json.dumps(line) + "\n" for line in lines).encode()


def answers(raw):
    """All lines by custom_id, without the time; none is there twice."""
    found = {}
    for line in raw.splitlines():
        answer = json.loads(line)
        if answer["response"] is not None:
            answer["response"]["body"].pop("created", None)
        assert answer["custom_id"] not in found, "a line is doubled"
        found[answer["custom_id"]] = answer
    return found


def size_of(sequences, tokens=64 * KEY_BLOCK):
    return ServerSize(Want(rows=64), sequences, tokens, most_tokens=1000)


THREE = size_of(3)


@pytest.fixture(scope="module")
def serving(demo):
    return serving_of(demo.store, demo.tokenizer, demo.packs, 50)


@pytest.fixture(scope="module")
def lone(demo, serving, tmp_path_factory):
    """`lone(lines)`: the answers of `df-run batch`, which depend on a line alone."""
    known = {}

    def answered(lines):
        new = [line for line in map(json.dumps, lines) if line not in known]
        if new:
            source = tmp_path_factory.mktemp("lone") / "requests"
            source.write_text("".join(f"{line}\n" for line in new))
            with Results(source.with_name("out")) as results, Requests(source, serving) as found:
                found.scan(results)
                with Journal(journal_path(results.path), found.is_open) as journal:
                    Batch(demo, serving, found, results, journal, Size(Want(rows=64), 8, KEY_BLOCK * 64, 1000)).run()
            told = answers(source.with_name("out").read_bytes())
            known.update({line: told[json.loads(line)["custom_id"]] for line in new})
        return {line["custom_id"]: known[json.dumps(line)] for line in lines}

    return answered


class Driver:
    """A service on a folder, and its passes, which the test makes."""

    def __init__(self, folder, demo, serving, size, **keywords) -> None:
        self.engine = SimpleNamespace(model=demo, serving=serving, size=size, wake=lambda: None)
        self.service = BatchService(folder, self.engine, serving, Settings(), first_pause_s=0.02, **keywords)
        self.runner, self.room = Runner(demo), Room(size.sequences, size.tokens)
        self.passes = 0

    def start(self, lines, **keywords):
        part = self.service.files.part()
        part.write_bytes(lines if isinstance(lines, bytes) else jsonl(lines))
        file = self.service.add_file(part, "requests.jsonl")
        return self.service.create(file.id, CHAT, None, **keywords).id

    def turn(self, observer=None) -> None:
        """What an engine does between two passes, and the next one."""
        self.service.join(self.runner, self.room)
        if self.runner.active:
            self.passes += 1
            riding = list(self.runner.active)
            try:
                steps = self.runner.step(observer)
            except (DeltafinError, MemoryError) as e:
                for generation in riding:
                    self.runner.remove(generation)
                    if self.service.owns(generation):
                        self.service.failed(generation, e, alone=len(riding) == 1)
            else:
                self.service.took(steps)
        else:
            time.sleep(0.001)

    def until(self, batch_id, reached=lambda record: record.is_over, observer=None):
        end = time.monotonic() + LONG_S
        while not reached(record := self.service.find(batch_id)):
            assert time.monotonic() < end, record
            self.turn(observer)
        return record

    def outputs(self, record):
        """Answers and errors."""
        found = []
        for there, file_id in ((record.has_output, record.output_id), (record.has_errors, record.error_id)):
            raw = self.service.files.path(file_id).read_bytes() if there else b""
            assert bool(raw) == there, "no file is made for nothing"
            found.append(answers(raw))
        return found

    def is_clean(self) -> None:
        """Nobody rides, all room is free, and nothing is left on the drive but records and files."""
        self.service.join(self.runner, self.room)
        assert (self.runner.active, self.room.taken_sequences, self.room.taken_tokens) == ([], 0, 0)
        end = time.monotonic() + LONG_S  # the record comes first
        while left := [p for p in self.service._folder.path.iterdir() if p.suffix != ".json"]:
            assert time.monotonic() < end, left
        assert all(p.suffix in ("", ".json") for p in self.service.files.folder.iterdir())


@pytest.fixture
def new_driver(tmp_path, demo, serving):
    """`new_driver()` is a service on the same folder as the one before, which is closed first."""
    running = []

    def start(folder=tmp_path / "data", size=THREE, serving=serving, **keywords):
        while running:
            running.pop().service.close()
        running.append(Driver(folder, demo, serving, size, **keywords))
        return running[-1]

    yield start
    while running:
        running.pop().service.close()


class Failing(Observer):
    """Raises in one layer of the passes that `when` says: it is told how many there were, and rows of this one."""

    def __init__(self, error, when) -> None:
        self.error, self.when, self.passes, self.count = error, when, 0, 0

    def rows(self, spans) -> None:
        self.passes, self.count = self.passes + 1, len(spans)

    def layer(self, layer, num_layers) -> None:
        if layer == 1 and self.when(self.passes, self.count):
            raise self.error


# ---- through HTTP, with the official client ------------------------------------------------------------------


@pytest.fixture
def batching(new_server, tmp_path):
    """`batching()` is a server with a folder, and the official client for it."""

    def start(**settings):
        served = new_server(data=tmp_path / "data", **settings)
        return served, openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0)

    return start


def wait(client, batch):
    end = time.monotonic() + LONG_S
    while batch.status not in OVER:
        assert time.monotonic() < end, batch
        time.sleep(0.01)
        batch = client.batches.retrieve(batch.id)
    return batch


def test_the_official_client_gets_the_answers_of_df_run_batch(batching, lone, serving):
    served, client = batching(max_new=serving.max_new)
    lines = requests(5)
    lines[0]["body"]["model"] = served.model_name
    wrong = [request("twice", n=2), request("other", model="gpt-4o")]
    file = client.files.create(file=("in.jsonl", jsonl([*lines, *wrong])), purpose="batch")
    batch = client.batches.create(
        input_file_id=file.id, endpoint=CHAT, completion_window="24h", metadata={"for": "a test"}
    )
    assert batch.status == "validating" and batch.metadata == {"for": "a test"}
    batch = wait(client, batch)
    counts = batch.request_counts
    assert (batch.status, counts.total, counts.completed, counts.failed) == ("completed", 7, 5, 2)
    found = answers(client.files.content(batch.output_file_id).content)
    assert found == lone(lines)
    errors = answers(client.files.content(batch.error_file_id).content)
    told = {name: (e["response"]["status_code"], e["response"]["body"]["error"]["param"]) for name, e in errors.items()}
    assert told == {"twice": (400, "n"), "other": (404, "model")}
    usages = [answer["response"]["body"]["usage"] for answer in found.values()]
    assert batch.usage.input_tokens == sum(u["prompt_tokens"] for u in usages)
    assert batch.usage.output_tokens == sum(u["completion_tokens"] for u in usages)
    times = [batch.created_at, batch.in_progress_at, batch.finalizing_at, batch.completed_at]
    assert None not in times and times == sorted(times)
    assert (batch.model, batch.endpoint, batch.input_file_id) == (served.model_name, CHAT, file.id)
    assert client.files.retrieve(batch.output_file_id).purpose == "batch_output"


def test_requests_are_not_held_up_by_a_batch_and_change_nothing_of_it(batching, lone, serving):
    served, client = batching(parallel=1, max_new=serving.max_new)
    lines = requests(2, max_tokens=90, stop=["\0"])
    file = client.files.create(file=("in.jsonl", jsonl(lines)), purpose="batch")
    batch = client.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="24h")
    riding = served.services.batches
    end = time.monotonic() + LONG_S
    while not any(r.batch.counts.tokens for r in riding._riders.all):
        assert time.monotonic() < end and client.batches.retrieve(batch.id).status not in OVER
        time.sleep(0.002)
    answer = client.chat.completions.create(
        model=served.model_name, messages=[{"role": "user", "content": "Hello"}], max_tokens=3
    )
    assert answer.usage.completion_tokens == 3
    assert client.batches.retrieve(batch.id).status == "in_progress", "the only place was given up for the request"
    batch = wait(client, batch)
    assert answers(client.files.content(batch.output_file_id).content) == lone(lines)


def test_lists_go_page_by_page(file_server):
    client = openai.OpenAI(base_url=f"{file_server.url}/v1", api_key="none", max_retries=0)
    files = [client.files.create(file=(f"{n}.jsonl", b"{}\n"), purpose="batch").id for n in range(5)]
    assert [f.id for f in client.files.list(limit=2)][:5] == files[::-1]
    assert [f.id for f in client.files.list(limit=2, order="asc", after=files[1])] == files[2:]
    assert list(client.files.list(purpose="batch_output")) == []
    batches = [client.batches.create(input_file_id=f, endpoint=CHAT, completion_window="24h").id for f in files]
    assert [b.id for b in client.batches.list(limit=2)][:5] == batches[::-1]
    page = client.batches.list(limit=2)
    assert page.has_more and page.last_id == batches[3]
    for wrong, status in (({"limit": 0}, 400), ({"limit": 101}, 400), ({"after": "batch_none"}, 404)):
        with pytest.raises(openai.APIStatusError) as told:
            client.batches.list(**wrong)
        assert (told.value.status_code, told.value.body["param"]) == (status, next(iter(wrong)))


@pytest.mark.parametrize(
    ("body", "status", "param"),
    [
        ({"completion_window": "1h"}, 400, "completion_window"),
        ({"completion_window": None}, 400, "completion_window"),
        ({"endpoint": "/v1/embeddings"}, 400, "endpoint"),
        ({"endpoint": None}, 400, "endpoint"),
        ({"input_file_id": None}, 400, "input_file_id"),
        ({"input_file_id": 7}, 400, "input_file_id"),
        ({"input_file_id": "../../lock"}, 404, "input_file_id"),
        ({"output_expires_after": {"anchor": "created_at", "seconds": 3600}}, 400, "output_expires_after"),
        ({"metadata": {"a": 1}}, 400, "metadata.a"),
        ({"metadata": {"a" * 65: "b"}}, 400, "metadata"),
        ({"metadata": {"a": "b" * 513}}, 400, "metadata"),
        ({"metadata": {f"{n}": "b" for n in range(17)}}, 400, "metadata"),
    ],
)
def test_what_cannot_be_done_is_refused_by_field(file_server, body, status, param):
    client = openai.OpenAI(base_url=f"{file_server.url}/v1", api_key="none", max_retries=0)
    file = client.files.create(file=("in.jsonl", b"{}\n"), purpose="batch")
    given = {"input_file_id": file.id, "endpoint": CHAT, "completion_window": "24h", **body}
    before = len(file_server.services.batches.all())
    with pytest.raises(openai.APIStatusError) as told:
        client.post("/batches", body=given, cast_to=object)
    assert (told.value.status_code, told.value.body["param"]) == (status, param)
    assert len(file_server.services.batches.all()) == before
    for method, path in (("get", "/batches/batch_x"), ("post", "/batches/batch_x/cancel")):
        with pytest.raises(openai.NotFoundError):
            getattr(client, method)(path, cast_to=object)


# ---- what becomes of a batch ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        (b"", [("empty_file", None)]),
        (b"\n \n", [("empty_file", None)]),
        (b"[]\nnot json\n" + jsonl([request("a")]), [("invalid_json_line", 1), ("invalid_json_line", 2)]),
        (jsonl([request("a"), request("b"), request("a")]), [("duplicate_custom_id", 3)]),
        (jsonl([request("a"), {**request("b"), "url": "/v1/completions"}]), [("mismatched_endpoint", 2)]),
        (jsonl([{**request("a"), "method": "GET"}]), [("invalid_method", 1)]),
        (jsonl([{**request("a"), "body": 3}]), [("invalid_body", 1)]),
        (jsonl([{**request("a"), "custom_id": ""}, {}]), [("invalid_custom_id", 1), ("invalid_custom_id", 2)]),
        (b"\xff\n" * 300, [("invalid_json_line", n) for n in range(1, 101)]),
    ],
    ids=["empty", "blank", "json", "twice", "endpoint", "method", "body", "names", "many"],
)  # fmt: skip
def test_a_file_that_is_no_list_of_requests_fails_and_says_which_lines(new_driver, raw, expected):
    driver = new_driver()
    record = driver.until(driver.start(raw))
    assert record.status == "failed" and driver.passes == 0
    told = record.as_json()
    assert [(e["code"], e["line"]) for e in told["errors"]["data"]] == expected
    assert told["failed_at"] is not None and told["output_file_id"] is None


def test_several_batches_share_the_room_and_end_in_order(new_driver, lone):
    driver = new_driver(size=size_of(4))
    lines = [requests(3, max_tokens=9, stop=["\0"]), requests(3), requests(2)]
    ids = [driver.start(batch) for batch in lines]
    together = Failing(None, lambda passes, count: counts.append(count))
    counts = []
    records = [driver.until(batch_id, observer=together) for batch_id in ids]
    for record, batch in zip(records, lines, strict=True):
        assert driver.outputs(record) == [lone(batch), {}]
    assert max(counts) == 4, "what the first leaves, the second takes"
    driver.is_clean()


def test_a_cancelled_batch_keeps_what_is_answered(new_driver, lone):
    driver = new_driver(size=size_of(1))
    lines = requests(6)
    batch_id = driver.start(lines)
    driver.until(batch_id, lambda record: record.completed >= 2)
    record = driver.service.cancel(batch_id)
    assert record.status == "cancelling" and record.as_json()["cancelling_at"]
    assert driver.service.cancel(batch_id).status == "cancelling", "once more is no mistake"
    record = driver.until(batch_id)
    expected = lone(lines)
    found, errors = driver.outputs(record)
    assert record.status == "cancelled" and 2 <= len(found) < 6 and errors == {}
    assert all(found[name] == expected[name] for name in found)
    assert (record.completed, record.total) == (len(found), 6)
    driver.is_clean()
    with pytest.raises(DeltafinError, match="nothing to cancel"):
        driver.service.cancel(batch_id)


def test_a_restart_goes_on_and_draws_nothing_twice(new_driver, lone):
    lines = requests(6)
    driver = new_driver(size=size_of(2))
    batch_id = driver.start(lines)
    tokens = 0
    for least in (1, 3, 5):
        driver.until(batch_id, lambda record, least=least: record.completed >= least)
        tokens += sum(r.batch.counts.tokens for r in driver.service._riders.all)
        driver = new_driver(size=size_of(2))
    driver.until(batch_id, lambda record: bool(driver.service._riders.all))
    riding = driver.service._riders.all[0]
    record = driver.until(batch_id)
    found, errors = driver.outputs(record)
    assert found == lone(lines) and errors == {}
    assert tokens + riding.batch.counts.tokens == record.usage.completion
    driver.is_clean()


def test_answers_step_back_for_others_and_go_on_without_drawing_twice(new_driver, lone):
    driver = new_driver(size=size_of(3))
    lines = requests(6)
    batch_id = driver.start(lines)
    turn, taken = 0, 0
    while not driver.service.find(batch_id).is_over:
        driver.turn()
        turn += 1
        if turn % 2 == 0 and driver.runner.active:
            riding = driver.service._riders.all[0]
            youngest, before = driver.runner.active[-1], driver.room.taken_sequences
            assert driver.service.step_back(driver.runner, driver.room)
            taken += 1
            assert youngest not in driver.runner.active and driver.room.taken_sequences == before - 1
            counts = riding.batch.counts
    record = driver.service.find(batch_id)
    assert driver.outputs(record) == [lone(lines), {}] and taken > 3
    assert counts.tokens == record.usage.completion
    assert not driver.service.step_back(driver.runner, driver.room)
    driver.is_clean()


def instructed(count):
    text = "Answer in one word. " * 12
    messages = [{"role": "system", "content": text}]
    return [
        request(f"{n}", messages=[*messages, {"role": "user", "content": f"{n}?"}], max_tokens=3) for n in range(count)
    ]


@pytest.mark.parametrize("sequences", [1, 2])
def test_shared_instructions_take_room_or_are_left_out(new_driver, lone, sequences):
    lines = instructed(6)
    driver = new_driver(size=size_of(sequences))
    batch_id = driver.start(lines)
    most, shared = 0, 0
    while not driver.service.find(batch_id).is_over:
        driver.turn()
        most = max(most, driver.room.taken_sequences, len(driver.runner.active))
        shared = max([shared, *(r.batch.counts.shared for r in driver.service._riders.all)])
    assert driver.outputs(driver.service.find(batch_id)) == [lone(lines), {}]
    assert most <= sequences
    assert (shared > 0) == (sequences > 1)
    driver.is_clean()


def test_what_is_kept_for_a_batch_makes_way(new_driver, lone):
    lines = instructed(5)
    driver = new_driver(size=size_of(2))
    batch_id = driver.start(lines)
    driver.until(batch_id, lambda record: record.completed >= 1)
    assert driver.room.taken_sequences > 0
    while driver.service.step_back(driver.runner, driver.room):
        pass
    assert (driver.room.taken_sequences, driver.runner.active) == (0, [])
    assert driver.outputs(driver.until(batch_id)) == [lone(lines), {}]
    driver.is_clean()


def test_room_for_two_is_made_by_letting_go_of_what_nobody_uses():
    room = Room(3, 6 * KEY_BLOCK)
    unused = [room.take(KEY_BLOCK), room.take(KEY_BLOCK)]

    def let_go():
        if unused:
            room.give(unused.pop())
        return bool(unused) or room.taken_sequences == 0

    lent = LentRoom(room, let_go)
    assert not room.fits_both(KEY_BLOCK, KEY_BLOCK) and lent.fits_both(4 * KEY_BLOCK, KEY_BLOCK)
    assert len(unused) == 1, "no more than has to go"
    assert not Room(1, 64 * KEY_BLOCK).fits_both(1, 1) and not Room(9, KEY_BLOCK).fits_both(1, 1)


# ---- what goes wrong -----------------------------------------------------------------------------------------


def test_a_network_that_is_away_only_costs_time_and_is_said(new_driver, lone, caplog):
    driver, lines = new_driver(), requests(4)
    batch_id = driver.start(lines)
    away = Failing(NetworkError("hub: gave up"), lambda passes, count: 2 <= passes <= 4)
    told = driver.until(batch_id, lambda record: bool(record.errors), observer=away).as_json()
    assert told["status"] == "in_progress" and told["errors"]["data"][0]["code"] == "network"
    record = driver.until(batch_id, observer=away)
    assert driver.outputs(record) == [lone(lines), {}] and record.as_json()["errors"] is None
    assert sum("has to stop" in line for line in caplog.messages) == 1, "it is said once"
    driver.is_clean()


@pytest.mark.parametrize("error", [NotANumber("layer 3"), DiskError("/a/drive: gone"), NoMemory("little")])
def test_a_request_that_always_fails_by_itself_gets_an_error_and_the_others_answers(new_driver, lone, error):
    lines = requests(3)
    driver = new_driver(size=size_of(1))
    batch_id = driver.start(lines)

    def is_second(passes, count):
        record = driver.service.find(batch_id)
        return (record.completed, record.failed) == (1, 0)

    bad = Failing(error, is_second)
    record = driver.until(batch_id, observer=bad)
    found, errors = driver.outputs(record)
    (name,) = errors
    expected = lone(lines)
    del expected[name]
    assert found == expected
    assert errors[name]["response"] is None and set(errors[name]["error"]) == {"code", "message"}
    assert "/a/" not in errors[name]["error"]["message"]
    assert (record.status, record.completed, record.failed) == ("completed", 2, 1)
    driver.is_clean()


def test_instructions_that_fail_are_not_tried_for_ever(new_driver, lone):
    lines = instructed(3)
    driver = new_driver()
    batch_id = driver.start(lines)
    first = Failing(NotANumber("layer 3"), lambda passes, count: passes == 1)
    assert driver.outputs(driver.until(batch_id, observer=first)) == [lone(lines), {}]
    driver.is_clean()


@pytest.mark.parametrize("call", ["append", "fsync"])
def test_a_full_drive_suspends_and_nothing_is_doubled(new_driver, lone, monkeypatch, call):
    driver, lines = new_driver(), requests(4)
    batch_id = driver.start(lines)
    driver.until(batch_id, lambda record: record.completed == 1)
    fails = [2]
    if call == "append":
        whole = Results.append

        def full(self, *args):
            if fails[0]:
                fails[0] -= 1
                raise NoSpace("full")
            whole(self, *args)

        monkeypatch.setattr(Results, "append", full)
    else:  # the line is there, and the drive says that it may not be
        whole_sync = os.fsync

        def unsure(fd):
            if fails[0] and os.readlink(f"/proc/self/fd/{fd}").endswith(f"{batch_id}.jsonl"):
                fails[0] -= 1
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            whole_sync(fd)

        monkeypatch.setattr(os, "fsync", unsure)
    record = driver.until(batch_id)
    assert fails == [0] and driver.outputs(record) == [lone(lines), {}]
    driver.is_clean()


def test_a_drive_that_is_full_for_records_is_waited_for(new_driver, lone, monkeypatch):
    driver, lines = new_driver(), requests(2)
    batch_id = driver.start(lines)
    fails, whole = [4], os.replace

    def full(source, target):
        if fails[0] and threading.current_thread().name == "batches":
            fails[0] -= 1
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        whole(source, target)

    monkeypatch.setattr(os, "replace", full)
    record = driver.until(batch_id)
    assert fails == [0] and record.status == "completed" and driver.outputs(record) == [lone(lines), {}]
    driver.is_clean()


def test_another_model_ends_a_batch_that_has_answers_and_begins_one_anew_that_has_none(new_driver, serving, lone):
    lines = requests(3)
    driver = new_driver(size=size_of(1))
    begun = driver.start(lines)
    driver.until(begun, lambda record: record.completed == 1)
    waiting = driver.start(lines)
    other = replace(serving, fingerprint="fp_other")
    driver = new_driver(serving=other)
    record = driver.until(begun)
    told = record.as_json()
    assert (record.status, told["errors"]["data"][0]["code"]) == ("failed", "model_changed")
    found, _ = driver.outputs(record)
    expected = lone(lines)
    assert len(found) == 1 and all(found[name] == expected[name] for name in found)
    record = driver.until(waiting)
    found, _ = driver.outputs(record)
    assert record.status == "completed"
    assert {a["response"]["body"]["system_fingerprint"] for a in found.values()} == {"fp_other"}
    driver.is_clean()


def test_a_batch_goes_on_with_the_model_name_and_tokens_that_it_was_made_for(new_driver, serving):
    driver = new_driver(serving=replace(serving, max_new=8))
    batch_id = driver.start([request("a", max_tokens=None, model=serving.name)])
    driver = new_driver(serving=replace(serving, max_new=3, name="renamed"))
    found, errors = driver.outputs(driver.until(batch_id))
    body = found["a"]["response"]["body"]
    assert errors == {} and (body["usage"]["completion_tokens"], body["choices"][0]["finish_reason"]) == (8, "length")


def test_results_that_somebody_has_changed_are_left_alone_and_said(new_driver):
    driver = new_driver(size=size_of(1))
    batch_id = driver.start(requests(3))
    driver.until(batch_id, lambda record: record.completed == 1)
    driver.service.close()
    path = driver.service._folder.path / f"{batch_id}.jsonl"
    path.write_bytes(b"my notes\n" + path.read_bytes())
    driver = new_driver()
    record = driver.until(batch_id)
    assert record.status == "failed" and record.errors[0].code == "results_unusable"
    assert str(path.parent) not in json.dumps(record.as_json())
    new_driver()
    assert path.read_bytes().startswith(b"my notes\n")


def test_a_folder_has_one_server(new_driver, tmp_path, demo, serving):
    driver = new_driver()
    with pytest.raises(DeltafinError, match="another server keeps its files"):
        Driver(tmp_path / "data", demo, serving, size_of(1))
    driver.service.close()
    with pytest.raises(DeltafinError, match="shutting down"):
        driver.start(requests(1))
    Driver(tmp_path / "data", demo, serving, size_of(1)).service.close()


# ---- killed at any step --------------------------------------------------------------------------------------


class Kills:
    """Copies of a folder as a kill would leave it, one before and one after each step that reaches the drive."""

    def __init__(self, data, into, monkeypatch) -> None:
        self.data, self.into, self.copies = data, into, []
        self.lock = threading.Lock()
        for name in ("replace", "fsync", "unlink"):
            monkeypatch.setattr(os, name, self.around(getattr(os, name)))

    def around(self, call):
        def watched(*args, **keywords):
            self.copy()
            result = call(*args, **keywords)
            self.copy()
            return result

        return watched

    def copy(self) -> None:
        with self.lock:
            seen = sorted((str(p.relative_to(self.data)), p.stat().st_size) for p in self.data.rglob("*"))
            if not self.copies or self.copies[-1][1] != seen:
                target = self.into / f"{len(self.copies)}"
                shutil.copytree(self.data, target)
                self.copies.append((target, seen))


def killed_anywhere(new_driver, lone, monkeypatch, tmp_path, *, every, cancel) -> None:
    lines = [*requests(3), request("bad", n=2)]
    expected = lone(lines)
    driver = new_driver(size=size_of(2))
    batch_id = driver.start(lines)
    with monkeypatch.context() as patch:
        kills = Kills(tmp_path / "data", tmp_path / "kills", patch)
        if cancel:
            driver.until(batch_id, lambda record: record.completed == 1)
            driver.service.cancel(batch_id)
        whole = driver.until(batch_id)
        driver.is_clean()
    assert len(kills.copies) > 20
    seen = set()
    for folder, _ in [*kills.copies[:-1:every], kills.copies[-1]]:
        driver = new_driver(folder, size=size_of(2))
        seen.add(driver.service.find(batch_id).status)
        record = driver.until(batch_id)
        found, errors = driver.outputs(record)
        if record.status == "completed":
            assert {**found, **errors} == expected and set(errors) == {"bad"}
        else:
            assert record.status == whole.status == "cancelled"
            assert found and all(expected[name] == answer for name, answer in {**found, **errors}.items())
        driver.is_clean()
        files = [file.id for file in driver.service.files.all()]
        assert len(files) == 1 + record.has_output + record.has_errors and len(set(files)) == len(files)
    assert {whole.status, "cancelling" if cancel else "finalizing"} <= seen


@pytest.mark.parametrize("cancel", [False, True], ids=["", "cancelled"])
def test_killed_at_some_steps_a_batch_ends_with_the_same_lines(new_driver, lone, monkeypatch, tmp_path, cancel):
    killed_anywhere(new_driver, lone, monkeypatch, tmp_path, every=7, cancel=cancel)


@pytest.mark.slow
@pytest.mark.parametrize("cancel", [False, True], ids=["", "cancelled"])
def test_killed_at_any_step_a_batch_ends_with_the_same_lines(new_driver, lone, monkeypatch, tmp_path, cancel):
    killed_anywhere(new_driver, lone, monkeypatch, tmp_path, every=1, cancel=cancel)
