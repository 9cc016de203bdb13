"""Clients that behave badly (tests/faults/bad_clients.py): none harms the server, or makes it work for nobody."""

from __future__ import annotations

import http.client
import json
import subprocess
import sys
import threading
import time

import psutil
import pytest

from tests.conftest import ROOT, load

# What each must show besides its own "ok", which is null where the client cannot know.
QUICK_S = 10.0


@pytest.fixture(scope="module")
def bad_clients():
    return load(ROOT / "tests" / "faults" / "bad_clients.py")


@pytest.fixture
def quick(new_server):
    """Whoever is slow or silent is not waited for very long."""
    return new_server(body_timeout_s=1.0, most_body_nbytes=4 << 20, context=8192)


def all_of(bad_clients, server) -> dict[str, dict[str, object]]:
    """What each of them reports."""
    target = bad_clients.Target(server.url, server.model_name, 60)
    rows = {}
    for name, client in bad_clients.CLIENTS.items():
        rows[name] = client(target)
        status, _, _ = bad_clients.split(target.exchange(target.head("GET", "/v1/models")))
        assert status == 200, f"after {name}"
    return rows


def settled(server) -> None:
    """Nobody is worked for any more."""
    deadline = time.monotonic() + 20
    while server.engine.running or server.engine.waiting:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_all_of_them(bad_clients, quick):
    rows = all_of(bad_clients, quick)
    settled(quick)
    assert len(rows) == 15
    null = {name for name, row in rows.items() if row["ok"] is None}
    assert null <= {"leave_before_first_token", "leave_midstream", "half_request"}
    assert [name for name, row in rows.items() if row["ok"] is False] == []
    # What nobody but the server can judge: its work for those that have left has stopped at once.
    for name in ("leave_before_first_token", "leave_midstream"):
        assert rows[name]["status"] == 200
        assert rows[name]["next_request_s"] < QUICK_S  # 4,000 tokens would take minutes
    assert rows["leave_midstream"]["events_seen"] >= 2
    counts = quick.engine.counts
    assert counts.left == 2
    assert counts.left_layers <= 1
    assert counts.failed == 0
    assert counts.submitted == counts.answered + counts.left
    assert rows["too_long"]["status"] in (400, 413)
    assert quick.engine.alive


@pytest.mark.slow
def test_memory_is_steady_over_rounds(bad_clients, quick):
    process = psutil.Process()
    nbytes = []
    for _ in range(12):
        all_of(bad_clients, quick)
        settled(quick)
        nbytes.append(process.memory_info().rss)
    assert nbytes[-1] - nbytes[3] < 30 << 20, nbytes  # of which the clients of this process are a part
    assert quick.engine.recent <= quick.engine.size.sequences


READER = """
import http.client, sys
connection = http.client.HTTPConnection("127.0.0.1", int(sys.argv[1]))
connection.request("POST", "/v1/completions", sys.argv[2], {"Content-Type": "application/json"})
answer = connection.getresponse()
while True:
    print(answer.readline().decode().strip(), flush=True)
"""


def endless(server, **more) -> str:
    """A body whose answer would take minutes."""
    bias = {str(token): -100 for token in server.model.stop_ids}
    body = {"model": server.model_name, "prompt": "Once", "max_tokens": 4000, "logit_bias": bias, "stream": True}
    return json.dumps({**body, **more})


def test_a_client_that_is_killed_midstream_frees_its_sequence_within_a_layer(quick):
    before = quick.engine.counts.left
    words = [sys.executable, "-c", READER, str(quick.port), endless(quick)]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as client:
        for _ in range(8):
            assert client.stdout.readline()
        assert quick.engine.running == 1
        client.kill()
        client.wait()
        killed_at = time.monotonic()
        settled(quick)
        assert time.monotonic() - killed_at < 5
    assert quick.engine.counts.left == before + 1
    assert quick.engine.counts.left_layers <= 1
    assert quick.engine._room.taken_sequences == quick.engine.recent


def test_a_client_that_reads_nothing_is_no_burden_to_others(quick):
    """Its answer is computed and waits for it; the next one does not."""
    slow = http.client.HTTPConnection("127.0.0.1", quick.port)
    slow.request("POST", "/v1/completions", endless(quick, max_tokens=300), {"Content-Type": "application/json"})
    began = time.monotonic()
    fast = http.client.HTTPConnection("127.0.0.1", quick.port)
    fast.request("POST", "/v1/completions", endless(quick, max_tokens=2, stream=False), {})
    assert json.loads(fast.getresponse().read())["usage"]["completion_tokens"] == 2
    assert time.monotonic() - began < 10
    slow.close()
    settled(quick)


def test_a_whole_answer_whose_client_leaves_stops_too(quick):
    """Also before anything was sent to it."""
    client = http.client.HTTPConnection("127.0.0.1", quick.port)
    client.request("POST", "/v1/completions", endless(quick, stream=False), {"Content-Type": "application/json"})
    deadline = time.monotonic() + 10
    while not quick.engine.counts.tokens and time.monotonic() < deadline:
        time.sleep(0.005)
    client.close()
    settled(quick)
    assert quick.engine.counts.left == 1
    assert quick.engine.counts.left_layers <= 1


def test_who_retries_while_the_first_is_in_prefill_is_served_from_what_was_computed(quick):
    """SV-01: retries of a long prompt cost what one does, and end."""
    ids = [10 + n * n % 400 for n in range(900)]
    body = endless(quick, prompt=ids, max_tokens=2, stream=False)
    for _ in range(2):
        client = http.client.HTTPConnection("127.0.0.1", quick.port)
        before = quick.engine.counts.computed_tokens
        client.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
        deadline = time.monotonic() + 30
        while quick.engine.counts.computed_tokens == before and time.monotonic() < deadline:
            time.sleep(0.001)
        client.close()
    last = http.client.HTTPConnection("127.0.0.1", quick.port)
    last.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
    usage = json.loads(last.getresponse().read())["usage"]
    settled(quick)
    assert usage["prompt_tokens_details"]["cached_tokens"] > 200
    # Each pass was needed: of a prompt no row is computed twice, but for a pass that was left in its middle.
    assert quick.engine.counts.computed_tokens <= len(ids) + 1 + 2 * quick.model.most_rows


@pytest.mark.slow
def test_answers_are_not_mixed_up_in_200_rounds(bad_clients, quick):
    """SV-03: with leaving clients in between."""
    target = bad_clients.Target(quick.url, quick.model_name, 60)
    for turn in range(200):
        leaver = (
            threading.Thread(target=bad_clients.CLIENTS["leave_midstream"], args=(target,)) if turn % 4 == 0 else None
        )
        if leaver is not None:
            leaver.start()
        row = bad_clients.CLIENTS["parallel"](target)
        if leaver is not None:
            leaver.join()
        assert row["ok"] is True, row
    settled(quick)
    assert quick.engine.counts.left_layers <= 1
