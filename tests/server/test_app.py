"""The application without streams: answers, models, errors, and answers that take long."""

from __future__ import annotations

import json
import logging
import socket
import subprocess
import threading
import time

import httpx
import pytest

# Without certificates, which take a while to read; a connection for each request.
HTTP = httpx.Client(verify=False, timeout=60, limits=httpx.Limits(max_keepalive_connections=0))


def chat(server, **more):
    return {
        "model": server.model_name,
        "messages": [{"role": "user", "content": "What is the capital of Portugal?"}],
        "reasoning_effort": "none",
        **more,
    }


def post(server, body, path="/v1/chat/completions", **keywords):
    if isinstance(body, bytes):
        return HTTP.post(f"{server.url}{path}", content=body, **keywords)
    return HTTP.post(f"{server.url}{path}", json=body, **keywords)


def error_of(response, status, param=None, code=None):
    """The message of an error, which has the shape that clients expect."""
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    told = response.json()
    assert set(told) == {"error"} and set(told["error"]) == {"message", "type", "param", "code"}
    error = told["error"]
    assert (error["param"], error["code"]) == (param, code), error
    assert "\n" not in error["message"] and "Traceback" not in response.text and len(error["message"]) < 400
    assert response.headers["x-request-id"].startswith("req_")
    return error["message"]


def test_an_answer_has_its_headers(server):
    response = post(server, chat(server))
    assert response.status_code == 200
    assert response.json()["choices"][0]["message"]["content"] == "The capital of Portugal is Lisbon."
    headers = response.headers
    assert headers["x-deltafin-queue-position"] == "0" and headers["cache-control"] == "no-cache"
    assert headers["x-accel-buffering"] == "no" and headers["x-content-type-options"] == "nosniff"
    assert headers["x-request-id"] != post(server, chat(server)).headers["x-request-id"]
    assert "x-deltafin-missing-experts" not in headers and "server" not in headers


def test_missing_experts_are_told_with_every_answer(server, monkeypatch):
    missing = type(server.services.missing)
    monkeypatch.setattr(missing, "count", property(lambda self: 812))
    body = chat(server, max_tokens=2)
    for response in (post(server, body), post(server, {**body, "stream": True}), HTTP.get(f"{server.url}/v1/models")):
        assert response.headers["x-deltafin-missing-experts"] == f"812 of {server.services.missing.total}"
    assert '"experts_missing":812' in post(server, {**body, "stream": True}).text


def test_models_are_listed_and_named(server):
    (model,) = HTTP.get(f"{server.url}/v1/models").json()["data"]
    assert model["id"] == server.model_name and model["object"] == "model"
    assert HTTP.get(f"{server.url}/v1/models/{server.model_name}").json() == model
    message = error_of(HTTP.get(f"{server.url}/v1/models/a/b"), 404, "model", "model_not_found")
    assert server.model_name in message


def test_another_model_is_not_answered_for(server):
    body = chat(server)
    message = error_of(post(server, {**body, "model": "gpt-4"}), 404, "model", "model_not_found")
    assert server.model_name in message and "gpt-4" in message
    for nothing in ({**body, "model": None}, {k: v for k, v in body.items() if k != "model"}):
        assert server.model_name in error_of(post(server, nothing), 400, "model")
    error_of(post(server, {**body, "model": 7}), 400, "model")


def test_a_server_may_have_other_names(new_server):
    server = new_server(name="kimi-k3", aliases=frozenset({"moonshotai/Kimi-K3"}), context=512)
    for name in ("kimi-k3", "moonshotai/Kimi-K3"):
        assert post(server, {**chat(server, max_tokens=1), "model": name}).json()["model"] == "kimi-k3"
        assert HTTP.get(f"{server.url}/v1/models/{name}").json()["id"] == "kimi-k3"


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"[1", b"\xff{}", b'{"a": NaN}', b'{"model": "x", "model": "y"}', b"[" * 100_000, b"\xef\xbb\xbf{}"],
    ids=["nothing", "cut", "list", "not UTF-8", "NaN", "a name twice", "deep", "BOM"],
)
def test_what_is_no_json_is_refused(server, body):
    assert "body" in error_of(post(server, body), 400)


@pytest.mark.parametrize("body", [b"[]", b"3", b'"text"', b"null"])
def test_what_is_no_object_is_refused(server, body):
    assert "expected an object" in error_of(post(server, body), 400)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("messages", 3),
        ("messages", []),
        ("temperature", "hot"),
        ("n", 3),
        ("max_tokens", 0),
        ("top_p", 2),
        ("tool_choice", "required"),
        ("audio", {"voice": "x"}),
        ("functions", []),
        ("logit_bias", {"-1": 1}),
    ],
)
def test_what_cannot_be_done_names_its_field(server, field, value):
    response = post(server, {**chat(server), field: value})
    assert response.status_code == 400 and response.json()["error"]["param"] == field
    assert field in response.json()["error"]["message"]


def test_content_types(server):
    raw = json.dumps(chat(server, max_tokens=1)).encode()
    for kind in ("application/json", "application/json; charset=utf-8", "application/x-www-form-urlencoded", ""):
        assert post(server, raw, headers={"Content-Type": kind}).status_code == 200
    assert "JSON" in error_of(post(server, raw, headers={"Content-Type": "multipart/form-data; boundary=x"}), 415)
    assert "Content-Encoding" in error_of(post(server, raw, headers={"Content-Encoding": "gzip"}), 415)


def test_unknown_paths_and_methods(server):
    assert "/v1/engines" in error_of(HTTP.get(f"{server.url}/v1/engines"), 404)
    refused = HTTP.get(f"{server.url}/v1/chat/completions")
    assert "GET" in error_of(refused, 405) and refused.headers["allow"] == "POST"
    error_of(HTTP.get(f"{server.url}/v1/models/"), 404, *error_names(HTTP.get(f"{server.url}/v1/models/")))
    assert "below /v1" in error_of(HTTP.post(f"{server.url}/chat/completions", json=chat(server)), 404)
    for path in ("/docs", "/redoc", "/../../etc/passwd", "/v1/models/%2e%2e%2f%00"):
        assert HTTP.get(f"{server.url}{path}").status_code == 404


@pytest.mark.parametrize("path", ["/health", "/v1/models"])
def test_what_watches_servers_may_ask_for_heads_only(server, path):
    response = HTTP.head(f"{server.url}{path}")
    assert response.status_code == 200 and response.content == b""
    assert response.headers["content-type"] == "application/json"


def error_names(response):
    error = response.json()["error"]
    return error["param"], error["code"]


def test_a_full_queue_is_told_with_when_to_try_again(new_server, brake):
    server = new_server(company=[brake], most_waiting=1, context=512)
    brake.hold()
    body = chat(server, max_tokens=1)
    with (
        ThreadsOf(1, lambda: post(server, body)) as riding,
        ThreadsOf(1, lambda: waits(server, body, brake)) as waiting,
    ):
        brake.wait()
        until = time.monotonic() + 20
        while server.engine.waiting < 1 and time.monotonic() < until:
            time.sleep(0.005)
        for stream in (False, True):
            refused = post(server, {**body, "stream": stream})
            assert "waiting" in error_of(refused, 429, None, "queue_full")
            assert 1 <= int(refused.headers["retry-after"]) <= 3600
        brake.release()
    assert [answer.status_code for answer in riding + waiting] == [200, 200]


def waits(server, body, brake):
    brake.wait()
    return post(server, body)


class ThreadsOf:
    """Runs something in threads; what it returned is there when they are done."""

    def __init__(self, count, run):
        self._results = []
        self._threads = [threading.Thread(target=lambda: self._results.append(run())) for _ in range(count)]

    def __enter__(self):
        for thread in self._threads:
            thread.start()
        return self._results

    def __exit__(self, *_):
        for thread in self._threads:
            thread.join(60)


def test_an_answer_that_takes_long_begins_with_white_space(new_server, brake):
    from openai import OpenAI

    server = new_server(company=[brake], keep_alive_s=0.1, context=512)
    body = chat(server)
    expected = post(server, body).json()["choices"]
    brake.hold()
    with ThreadsOf(1, lambda: post(server, body)) as answers:
        brake.wait()
        time.sleep(0.5)
        brake.release()
    (answer,) = answers
    assert answer.text.startswith("  ") and answer.headers["content-type"] == "application/json"
    assert answer.status_code == 200 and "content-length" not in answer.headers
    assert json.loads(answer.content)["choices"] == expected
    brake.hold()
    client = OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=0.4)  # of silence, not in all
    with ThreadsOf(1, lambda: client.chat.completions.create(**body)) as answers:
        brake.wait()
        time.sleep(0.8)
        brake.release()
    assert answers[0].choices[0].message.content == "The capital of Portugal is Lisbon."


def test_a_late_answer_that_is_no_json_comes_whole_and_says_so(server, new_server, brake):
    body = chat(server, max_tokens=3, response_format={"type": "json_schema", "json_schema": {"schema": {}}})
    early = post(server, body)
    assert early.status_code == 422
    server = new_server(company=[brake], keep_alive_s=0.05, context=512)
    brake.hold()
    with ThreadsOf(1, lambda: post(server, body)) as answers:
        brake.wait()
        time.sleep(0.3)
        brake.release()
    (late,) = answers
    assert late.status_code == 200 and late.json()["error"] == early.json()["error"]
    assert late.json()["choices"] == early.json()["answer"]["choices"]


def failing(server, monkeypatch, error, after_s=0.0):
    def forward(*args, **keywords):
        time.sleep(after_s)
        raise error

    monkeypatch.setattr(server.model, "forward", forward)


def test_a_failure_has_its_status_and_tells_no_folder(new_server, monkeypatch):
    from deltafin.errors import Missing, NetworkError, NoSpace

    server = new_server(context=512)
    for error, status, code in (
        (Missing("expert 3 of layer 2 is not in /data/my root/x/model-00001.safetensors"), 503, "missing_weights"),
        (NetworkError("https://huggingface.co/x: gave up after 5 tries"), 503, "network"),
        (NoSpace("/home/someone/.cache/objects/ab: no space left on device"), 503, "disk_full"),
        (RuntimeError("a fault of ours with /secret/path"), 500, None),
    ):
        failing(server, monkeypatch, error)
        for body in (chat(server), chat(server, stream=True)):
            response = post(server, body)
            if response.status_code != 200:
                message = error_of(response, status, None, code)
            else:  # a stream that had begun
                message = json.loads(response.text.rpartition("data: ")[2])["error"]["message"]
            assert not {"/data", "/home", "secret", "someone"} & set(message.replace("/", " /").split())
            assert ("https://huggingface.co/x" in message) is isinstance(error, NetworkError)


def test_a_late_failure_is_taken_for_no_answer(new_server, monkeypatch):
    from openai import APIConnectionError, OpenAI

    from deltafin.errors import NetworkError

    server = new_server(keep_alive_s=0.1, context=512)
    failing(server, monkeypatch, NetworkError("gave up"), after_s=0.5)
    raw = json.dumps(chat(server)).encode()
    head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % len(raw)
    with socket.create_connection(("127.0.0.1", server.port), timeout=20) as client:
        client.sendall(head + raw)
        got = b""
        while piece := client.recv(65536):
            got += piece
    assert got.startswith(b"HTTP/1.1 200") and b'"gave up"' in got
    assert not got.endswith(b"0\r\n\r\n")  # the last chunk, without which the answer is not whole
    client = OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
    with pytest.raises(APIConnectionError):
        client.chat.completions.create(**chat(server))
    words = ["curl", "-sS", "-d", raw.decode(), f"{server.url}/v1/chat/completions"]
    curl = subprocess.run(words, capture_output=True, text=True, timeout=20)
    assert curl.returncode == 18 and "gave up" in curl.stdout  # 18: a part of the answer is missing


def test_who_waits_when_the_server_stops_is_told(new_server, brake):
    server = new_server(company=[brake], context=512)
    brake.hold()
    body = chat(server)
    with ThreadsOf(3, lambda: post(server, body)) as answers:
        brake.wait()
        threading.Timer(0.3, brake.release).start()
        server.engine.close()
    for answer in answers:
        error_of(answer, 503, None, "stopped")
    error_of(post(server, body), 503, None, "stopped")
    assert HTTP.get(f"{server.url}/health").json()["status"] == "stopping"


def test_a_fault_of_ours_is_an_error_like_others_and_logged(server, monkeypatch, caplog):
    def broken(*args, **keywords):
        raise RuntimeError("/secret")

    monkeypatch.setattr("deltafin.runtime.server.routes.read_body", broken)
    with caplog.at_level(logging.INFO, "deltafin.server"):
        response = post(server, chat(server))
    assert "log" in error_of(response, 500) and "secret" not in response.text
    assert any(record.exc_info for record in caplog.records)


def test_prompts_and_answers_are_logged_only_if_asked(new_server, caplog):
    server = new_server(logs_prompts=True, context=512)
    with caplog.at_level(logging.INFO, "deltafin.server"):
        post(server, chat(server))
        until = time.monotonic() + 10
        while len(lines(caplog)) < 2 and time.monotonic() < until:
            time.sleep(0.01)
    told = json.loads(next(line for line in lines(caplog) if line.startswith("{")))
    assert "What is the capital of Portugal?" in told["prompt"]
    assert "The capital of Portugal is Lisbon." in told["answer"]


def test_the_log_has_one_line_a_request_and_no_secret(server, caplog):
    with caplog.at_level(logging.INFO):
        response = post(server, chat(server, max_tokens=3), headers={"Authorization": "Bearer sk-secret"})
        HTTP.get(f"{server.url}/nothing?token=sk-secret")
        with socket.create_connection(("127.0.0.1", server.port)) as client:
            client.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\n{")
        with socket.create_connection(("127.0.0.1", server.port)) as client:
            client.sendall(b"no HTTP at all\r\n\r\n")
            assert client.recv(65536).startswith(b"HTTP/1.1 400")
        until = time.monotonic() + 10
        while len(ours := lines(caplog)) < 3 and time.monotonic() < until:
            time.sleep(0.01)
    assert response.headers["x-request-id"] in ours[0] and "POST /v1/chat/completions 200 in" in ours[0]
    prompt = response.json()["usage"]["prompt_tokens"]
    assert f", {prompt} tokens (" in ours[0] and ours[0].endswith(" cached) + 3")
    assert "GET (none) 404" in ours[1] and "POST /v1/completions left" in ours[2]
    # pytest listens to uvicorn's access log, which has no handler otherwise, and to what the test's client logs.
    told = [r.getMessage() + str(r.exc_text) for r in caplog.records if r.name not in ("uvicorn.access", "httpx")]
    assert len(told) == 4 and not any(word in line for line in told for word in ("sk-secret", "Portugal", "Traceback"))


def lines(caplog):
    return [record.getMessage() for record in caplog.records if record.name == "deltafin.server"]
