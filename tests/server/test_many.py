"""Many requests of many clients: each has the answer that it would have had alone, and none is lost."""

from __future__ import annotations

import json
import random
import socket
import threading
import time

import httpx
import openai
import pytest
from openai import OpenAI

from deltafin.runtime.openai import CHAT, read_body
from tests.server.engines import alone
from tests.server.test_bad_clients import endless, settled

QUESTIONS = [
    "What is the capital of Portugal?",
    "What is the capital of Kenya?",
    "What are the three largest moons of Saturn?",
    "What is 12 + 30?",
    "Tell me about quantum computing.",
    "Hello!",
]


def bodies(server, count):
    """Chats of several kinds, some drawn, some streamed."""
    for number in range(count):
        body = {
            "model": server.model_name,
            "messages": [{"role": "user", "content": QUESTIONS[number % len(QUESTIONS)]}],
            "max_tokens": 3 + number % 4,
            "reasoning_effort": "low" if number % 7 == 0 else "none",
            "stream": number % 2 == 0,
        }
        if number % 3 == 1:
            body |= {"temperature": 1.5, "seed": number % 4}
        yield body


def expected(server, body):
    """The message and the count of tokens of a lone run."""
    answer, chosen = alone(server.model, server.serving, read_body(CHAT, body, server.serving))
    message = answer["choices"][0]["message"]
    return message["content"], message.get("reasoning_content", ""), len(chosen)


def asked(server, body):
    """The same over HTTP."""
    if not body["stream"]:
        answer = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=300).json()
        message = answer["choices"][0]["message"]
        found = message["content"], message.get("reasoning_content", "")
        return *found, answer["usage"]["completion_tokens"]
    body = {**body, "stream_options": {"include_usage": True}}
    content, reasoning, tokens = "", "", None
    with httpx.stream("POST", f"{server.url}/v1/chat/completions", json=body, timeout=300) as lines:
        data = [line.removeprefix("data: ") for line in lines.iter_lines() if line.startswith("data: ")]
    assert data[-1] == "[DONE]"
    for chunk in map(json.loads, data[:-1]):
        tokens = chunk["usage"]["completion_tokens"] if chunk.get("usage") else tokens
        for choice in chunk["choices"]:
            content += choice["delta"].get("content") or ""
            reasoning += choice["delta"].get("reasoning_content") or ""
    return content, reasoning, tokens


def leave(server) -> None:
    """Asks for a long answer, and hangs up when it has begun."""
    raw = endless(server).encode()
    with socket.create_connection(("127.0.0.1", server.port), timeout=300) as connection:
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n")
        connection.sendall(f"Content-Length: {len(raw)}\r\n\r\n".encode() + raw)
        connection.recv(100)


def many(server, requests, clients):
    """Each client asks one request after the other; every tenth time somebody else comes and goes."""
    work = list(bodies(server, requests))
    known = {}
    for body in work:
        known.setdefault(json.dumps({**body, "stream": None}), None)
    found, lock, rng = {}, threading.Lock(), random.Random(1)
    coming = iter(rng.sample(range(requests), requests))

    def client() -> None:
        while True:
            with lock:
                number = next(coming, None)
            if number is None:
                return
            if number % 10 == 9:
                leave(server)
            answer = asked(server, work[number])
            with lock:
                found[number] = answer

    threads = [threading.Thread(target=client) for _ in range(clients)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    settled(server)
    server.engine.close()  # the model is free now
    server.model.store.resume()
    assert len(found) == requests
    for number, body in enumerate(work):
        key = json.dumps({**body, "stream": None})
        known[key] = known[key] or expected(server, body)
        assert found[number] == known[key], body
    counts = server.engine.counts
    assert counts.answered == requests
    assert counts.left == requests // 10
    assert counts.left_layers <= 1
    assert (counts.failed, counts.refused) == (0, 0)
    assert counts.together > 1
    return counts


def test_twelve_requests_of_six_clients(new_server):
    many(new_server(context=4096), 12, 6)


@pytest.mark.slow
@pytest.mark.parametrize("keep_states", [0, 1 << 30])
def test_two_hundred_requests_of_sixteen_clients(new_server, keep_states):
    counts = many(new_server(context=4096, keep_states=keep_states), 200, 16)
    assert counts.together == 8
    assert (counts.cached_tokens > 0) == (keep_states > 0)


def test_a_full_queue_is_429_and_the_official_client_comes_again(new_server):
    server = new_server(parallel=1, context=512, most_waiting=1)
    body = next(iter(bodies(server, 1))) | {"stream": False}
    known = expected(server, body)
    assert asked(server, body) == known  # now it is known how long things take
    settled(server)
    clock, goes_on, told = server.engine._passes.clock, threading.Event(), []
    at = clock.at

    def held_at(layer: int) -> None:
        goes_on.wait(30)
        at(layer)

    clock.at = held_at
    for number in range(2):  # one rides, one waits
        server.engine.submit(read_body(CHAT, body, server.serving), str(number), told.append)
        while server.engine.waiting > number:
            time.sleep(0.005)
    url = f"{server.url}/v1"
    with pytest.raises(openai.RateLimitError) as refused:
        OpenAI(base_url=url, api_key="x", max_retries=0).chat.completions.create(**body)
    assert refused.value.code == "queue_full"
    assert 1 <= int(refused.value.response.headers["retry-after"]) <= 10
    threading.Timer(0.3, goes_on.set).start()
    answer = OpenAI(base_url=url, api_key="x", max_retries=4).chat.completions.create(**body)
    message = answer.choices[0].message
    assert (message.content, message.reasoning_content, answer.usage.completion_tokens) == known
    assert server.engine.counts.refused >= 2
    settled(server)
    assert [type(update).__name__ for update in told].count("Ended") == 2


def test_a_server_that_goes_is_503_for_those_who_wait(new_server):
    """Also in a stream whose status was sent: an event with the error ends it, and no [DONE] comes."""
    server = new_server(parallel=1, context=4096)
    told, begun = [], threading.Event()

    def wait(stream: bool) -> None:
        body, text = endless(server, stream=stream), ""
        with httpx.stream("POST", f"{server.url}/v1/completions", content=body, timeout=60) as got:
            for piece in got.iter_text():
                text += piece
                begun.set()
        told.append((got.status_code, text))

    threads = [threading.Thread(target=wait, args=(stream,)) for stream in (True, False)]
    threads[0].start()
    assert begun.wait(30)
    threads[1].start()
    while not server.engine.waiting:
        time.sleep(0.005)
    server.engine.close()
    for thread in threads:
        thread.join()
    (streamed,) = [text for status, text in told if status == 200]
    (whole,) = [text for status, text in told if status == 503]
    assert json.loads(streamed.strip().splitlines()[-1].removeprefix("data: "))["error"]["code"] == "stopped"
    assert "[DONE]" not in streamed
    assert json.loads(whole)["error"]["code"] == "stopped"
    assert httpx.get(f"{server.url}/health").status_code == 503
    refused = httpx.post(f"{server.url}/v1/completions", content=endless(server))
    assert (refused.status_code, refused.headers["retry-after"]) == (503, "30")
