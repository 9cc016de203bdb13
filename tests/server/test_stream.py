"""Streams: joined they are the whole answer, they are never silent, and they end as they should."""

from __future__ import annotations

import itertools
import json
import socket
import time

import httpx
import pytest

from deltafin.runtime.server import connections

# Without certificates, which take a while to read; a connection for each request.
HTTP = httpx.Client(verify=False, timeout=60, limits=httpx.Limits(max_keepalive_connections=0))


def post(server, path="/v1/chat/completions", **body):
    return HTTP.post(f"{server.url}{path}", json={"model": server.model_name, **body})


def chat(text="What is the capital of Portugal?", **more):
    return {"messages": [{"role": "user", "content": text}], "reasoning_effort": "low", **more}


def events(text):
    """Data and comments of a stream, in order; [DONE] as None."""
    assert text.endswith("\n\n")
    found = []
    for event in text[:-2].split("\n\n"):
        (line,) = event.split("\n")
        kind, _, value = line.partition(": ")
        found.append(("data" if kind == "data" else "comment", None if value == "[DONE]" else json.loads(value)))
    return found


def chunks(response):
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    found = [value for kind, value in events(response.text) if kind == "data"]
    assert found[-1] is None and None not in found[:-1]
    return found[:-1]


def joined(found):
    """What a client makes of chunks of a chat: the message and the rest of the choice."""
    message, calls, logprobs, ids, reasons = {"content": ""}, [], [], [], []
    for chunk in found:
        for choice in chunk["choices"]:
            delta = choice["delta"]
            message |= {k: v for k, v in delta.items() if k == "role"}
            for name in ("content", "reasoning_content"):
                if name in delta:
                    message[name] = message.get(name, "") + delta[name]
            for call in delta.get("tool_calls", []):
                if "id" in call:
                    assert call["index"] == len(calls) and call["type"] == "function"
                    calls.append({"type": "function", "function": dict(call["function"])})
                else:
                    calls[call["index"]]["function"]["arguments"] += call["function"]["arguments"]
            logprobs += (choice["logprobs"] or {"content": []})["content"]
            ids += choice.get("token_ids", [])
            reasons += [choice["finish_reason"]] if choice["finish_reason"] else []
    (reason,) = reasons
    assert found[-1]["choices"] == [] or found[-1]["choices"][0]["finish_reason"]
    return message, calls, logprobs, ids, reason


GOLDEN = ["capital, thinking low", "two tool calls", "json object"]


@pytest.mark.parametrize("name", GOLDEN)
def test_joined_chunks_are_the_whole_answer(server, golden, name):
    cases = json.loads((golden / "demo.json").read_text())["cases"]
    case = next(case for case in cases if case["name"] == name)
    body = {
        "messages": case["messages"],
        "tools": case.get("tools"),
        "reasoning_effort": case["effort"] if case["thinking"] else "none",
        "logprobs": True,
        "top_logprobs": 2,
        "return_token_ids": True,
    }
    if "response_format" in case:
        body["response_format"] = {"type": case["response_format"]}
    response = post(server, **body)
    whole = response.json()
    streamed = chunks(post(server, **body, stream=True, stream_options={"include_usage": True}))
    (choice,) = whole["choices"]
    message, calls, logprobs, ids, reason = joined(streamed)
    shown = {k: v for k, v in choice["message"].items() if k not in ("tool_calls", "refusal")}
    assert message == {**shown, "content": shown["content"] or ""}
    expected = [{k: v for k, v in call.items() if k != "id"} for call in choice["message"].get("tool_calls", [])]
    assert calls == expected and bool(calls) == ("tool" in name)
    assert logprobs == choice["logprobs"]["content"] and ids == choice["token_ids"] == case["ids"]
    assert reason == choice["finish_reason"]
    assert streamed[0]["choices"][0]["prompt_token_ids"] == choice["prompt_token_ids"]
    assert streamed[-1]["choices"] == [] and streamed[-1]["usage"] == whole["usage"]
    assert all(chunk["usage"] is None for chunk in streamed[:-1])
    assert {chunk["id"] for chunk in streamed} == {streamed[0]["id"]} != {whole["id"]}
    assert {chunk["object"] for chunk in streamed} == {"chat.completion.chunk"}
    assert {c["system_fingerprint"] for c in streamed} == {whole["system_fingerprint"]}


def test_joined_text_is_the_whole_completion_with_its_logprobs(server):
    body = {"prompt": "The capital of", "max_tokens": 20, "logprobs": 3, "temperature": 1.0, "seed": 4, "stop": ["."]}
    (whole,) = post(server, "/v1/completions", **body).json()["choices"]
    streamed = chunks(post(server, "/v1/completions", **body, stream=True))
    choices = [chunk["choices"][0] for chunk in streamed]
    assert "".join(choice["text"] for choice in choices) == whole["text"]
    for name, values in whole["logprobs"].items():
        assert [v for c in choices if c["logprobs"] for v in c["logprobs"][name]] == values
    assert [c["finish_reason"] for c in choices if c["finish_reason"]] == [whole["finish_reason"]]
    assert {chunk["object"] for chunk in streamed} == {"text_completion"} and {c["seed"] for c in streamed} == {4}
    assert not any("usage" in chunk for chunk in streamed)


def test_a_drawn_seed_is_told_and_gives_the_same_answer_again(server):
    body = {"prompt": "The", "max_tokens": 12, "temperature": 5.0}
    first, second = (post(server, "/v1/completions", **body).json() for _ in range(2))
    assert first["seed"] != second["seed"] and first["choices"] != second["choices"]
    again = post(server, "/v1/completions", **body, seed=first["seed"]).json()
    assert again["choices"] == first["choices"] and again["seed"] == first["seed"]


def test_progress_comes_as_comments_or_if_asked_as_chunks(server):
    plain = events(post(server, **chat(max_tokens=3, stream=True)).text)
    assert plain[0][0] == "comment" and {"queue_position", "layer"} & set(plain[0][1])
    asked = {"include_progress": True, "include_usage": True}
    found = events(post(server, **chat(max_tokens=3, stream=True, stream_options=asked)).text)
    assert {kind for kind, _ in found} == {"data"}
    told = [value for _, value in found if value and "progress" in value]
    assert told and all(value["choices"] == [] and value["usage"] is None for value in told)
    riding = told[-1]["progress"]
    assert riding["layers"] == server.model.config.num_layers and riding["tokens_cached"] >= 0
    assert {"read_bytes", "fetched_bytes", "estimate_s", "tokens"} <= set(riding)


def lines_until(response, wanted):
    """Lines of a stream that is not over, up to the first that has `wanted` in it."""
    found = []
    for line in response:
        found.append(line)
        if wanted in line:
            return found
    raise AssertionError(found)


def test_a_request_that_waits_hears_its_place_and_is_never_left_in_silence(new_server, brake):
    server = new_server(company=[brake], keep_alive_s=0.1, context=512)
    brake.hold()
    body = {"model": server.model_name, **chat(max_tokens=3, stream=True)}
    with HTTP.stream("POST", f"{server.url}/v1/chat/completions", json=body) as first:
        brake.wait()
        with HTTP.stream("POST", f"{server.url}/v1/chat/completions", json=body) as second:
            assert second.headers["x-deltafin-queue-position"] == "1"
            arrived = []
            lines = second.iter_lines()
            while len(arrived) < 5:
                if next(lines).startswith(": {"):
                    arrived.append(time.monotonic())
            assert max(b - a for a, b in itertools.pairwise(arrived)) < 1.0
            brake.release()
            assert "data: [DONE]" in lines_until(lines, "[DONE]")
        assert "data: [DONE]" in lines_until(first.iter_lines(), "[DONE]")


def test_an_error_after_the_beginning_is_an_event_and_there_is_no_done(new_server, monkeypatch):
    from openai import APIError, OpenAI

    from deltafin.errors import DiskError

    server = new_server(context=512)
    real, passes = server.model.forward, []

    def forward(*args, **keywords):
        passes.append(1)
        if len(passes) > 3:
            raise DiskError("reading /secret/place/object: Input/output error")
        return real(*args, **keywords)

    monkeypatch.setattr(server.model, "forward", forward)
    response = post(server, **chat(stream=True))
    found = [value for kind, value in events(response.text) if kind == "data"]
    assert response.status_code == 200 and None not in found and "choices" in found[-2]
    assert found[-1]["error"]["type"] == "server_error"
    assert "Input/output" in found[-1]["error"]["message"] and "secret" not in response.text
    passes.clear()
    client = OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
    with pytest.raises(APIError, match="Input/output"):
        for _ in client.chat.completions.create(model=server.model_name, stream=True, **chat()):
            pass
    monkeypatch.setattr(server.model, "forward", real)
    assert post(server, **chat(max_tokens=2)).status_code == 200


def test_an_answer_that_is_no_json_although_it_was_asked_for_ends_with_an_error(server):
    body = chat("Tell me something.", response_format={"type": "json_object"}, max_tokens=4)
    refused = post(server, **body)
    error = refused.json()["error"]
    assert (refused.status_code, error["param"], error["code"]) == (422, "response_format", "not_json")
    assert refused.json()["answer"]["usage"]["completion_tokens"] == 4  # nothing that was computed is lost
    found = [value for kind, value in events(post(server, **body, stream=True).text) if kind == "data"]
    assert found[-1]["error"]["code"] == "not_json" and found[-2]["choices"][0]["finish_reason"] == "length"


def test_a_slow_reader_neither_stops_the_engine_nor_loses_a_token(server):
    body = json.dumps({"model": server.model_name, "prompt": "The", "max_tokens": 150, "stream": True, "logprobs": 20})
    head = f"POST /v1/completions HTTP/1.0\r\nContent-Length: {len(body)}\r\n\r\n"
    with socket.socket() as slow:
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        slow.connect(("127.0.0.1", server.port))
        answered = server.engine.counts.answered
        slow.sendall((head + body).encode())
        until = time.monotonic() + 20
        while server.engine.counts.answered == answered and time.monotonic() < until:
            time.sleep(0.02)  # and reads nothing
        assert server.engine.counts.answered == answered + 1
        raw = b""
        while piece := slow.recv(65536):
            raw += piece
    found = [value for kind, value in events(raw.partition(b"\r\n\r\n")[2].decode()) if kind == "data"]
    assert found[-1] is None
    choices = [chunk["choices"][0] for chunk in found[:-1]]
    assert sum(len(c["logprobs"]["tokens"]) for c in choices if c["logprobs"]) == 150


def ask(server, **body):
    """A connection on which an answer is waited for."""
    raw = json.dumps({"model": server.model_name, "prompt": "The", **body})
    client = socket.create_connection(("127.0.0.1", server.port))
    client.sendall(
        f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(raw)}\r\n\r\n{raw}".encode()
    )
    return client


def wait_for(condition, timeout_s=20.0):
    until = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.005)


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_goes_away_stops_its_work(new_server, brake, stream):
    server = new_server(company=[brake], context=4096)
    engine, counts = server.engine, server.engine.counts
    ask_long = {"max_tokens": 4000, "stream": stream}
    with ask(server, **ask_long):  # leaves while it rides
        wait_for(lambda: counts.tokens)
    wait_for(lambda: counts.left == 1)
    assert counts.left_layers <= 1 and engine.running == 0
    brake.hold()
    with ask(server, **ask_long):
        brake.wait()
        with ask(server, **ask_long):  # leaves the queue
            wait_for(lambda: engine.waiting == 1)
        wait_for(lambda: engine.waiting == 0)
        assert counts.left == 2 and engine.running == 1
    brake.release()
    wait_for(lambda: counts.left == 3)
    assert engine.running == engine.waiting == 0 and counts.submitted == 3


def test_a_client_that_reads_nothing_for_long_is_not_computed_for(new_server, monkeypatch):
    monkeypatch.setattr(connections, "DEAF_S", 0.3)
    server = new_server(context=8192)
    with socket.socket() as deaf:
        deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        deaf.connect(("127.0.0.1", server.port))
        body = {"model": server.model_name, "prompt": "The", "max_tokens": 8000, "stream": True, "logprobs": 20}
        raw = json.dumps(body)
        deaf.sendall(
            f"POST /v1/completions HTTP/1.1\r\nHost: a.localhost\r\nContent-Length: {len(raw)}\r\n\r\n{raw}".encode()
        )
        wait_for(lambda: server.engine.counts.left == 1)
    assert server.engine.running == 0
