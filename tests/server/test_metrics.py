"""Health and metrics tell the truth, also of an engine that has died behind a process that lives."""

from __future__ import annotations

import json
import re
import time

import httpx
from prometheus_client.parser import text_string_to_metric_families

from deltafin.runtime.server import health

# Without certificates, which take a while to read; a connection for each request.
HTTP = httpx.Client(verify=False, timeout=60, limits=httpx.Limits(max_keepalive_connections=0))


def health_of(server):
    response = HTTP.get(f"{server.url}/health")
    return response.status_code, response.json()


def metrics_of(server):
    """Samples by name and labels."""
    response = HTTP.get(f"{server.url}/metrics")
    assert response.status_code == 200 and response.headers["content-type"].startswith("text/plain; version=0.0.4")
    samples = [s for family in text_string_to_metric_families(response.text) for s in family.samples]
    return {(s.name, *sorted(s.labels.values())): s.value for s in samples}


def complete(server, **more):
    body = {"model": server.model_name, "prompt": "The capital of", "max_tokens": 5, **more}
    return HTTP.post(f"{server.url}/v1/completions", json=body)


def wait_for(condition, timeout_s=20.0):
    until = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.01)


def test_a_server_that_is_well_says_so(server):
    status, told = health_of(server)
    assert status == 200
    assert told == {
        "status": "ok",
        "model": server.model_name,
        "engine_alive": True,
        "since_last_layer_s": 0.0,
        "running": 0,
        "waiting": 0,
        "missing_experts": 0,
    }


def test_an_engine_that_died_is_told_and_nobody_waits_for_it(new_server, monkeypatch):
    server = new_server(context=512)

    def broken(*_):
        raise SystemError("the engine's own thread fails")

    monkeypatch.setattr(server.engine, "_admit", broken)
    answer = complete(server)
    assert answer.status_code == 503 and answer.json()["error"]["code"] == "stopped"
    wait_for(lambda: not server.engine.alive)
    status, told = health_of(server)
    assert (status, told["status"], told["engine_alive"]) == (503, "failed", False)
    again = complete(server)
    assert again.status_code == 503 and "failed" in again.json()["error"]["message"]
    assert metrics_of(server)["deltafin_up",] == 0


def test_an_engine_that_stands_is_stalled(new_server, monkeypatch):
    import threading

    server = new_server(context=512)
    monkeypatch.setattr(health, "STALLED_S", 0.2)
    free, real = threading.Event(), server.model.forward

    def hanging(*args, **keywords):
        free.wait(20)
        return real(*args, **keywords)

    monkeypatch.setattr(server.model, "forward", hanging)
    asking = threading.Thread(target=complete, args=(server,))
    asking.start()
    try:
        wait_for(lambda: health_of(server)[1]["status"] == "stalled")
        status, told = health_of(server)
        assert status == 503 and told["running"] == 1 and told["since_last_layer_s"] >= 0.2
        assert metrics_of(server)["deltafin_up",] == 0
    finally:
        free.set()
        asking.join()
    assert health_of(server)[0] == 200


def test_metrics_count_what_happened(new_server):
    server = new_server(context=512)
    before = metrics_of(server)
    assert before["deltafin_answers_total",] == 0 and before["deltafin_up",] == 1
    answers = [complete(server), complete(server, stream=True), complete(server, prompt=3)]
    assert [a.status_code for a in answers] == [200, 200, 400]
    wait_for(lambda: server.engine.running == 0)
    found, counts = metrics_of(server), server.engine.counts
    assert found["deltafin_requests_total",] == found["deltafin_answers_total",] == 2
    assert found["deltafin_tokens_total",] == 10 == counts.tokens
    assert found["deltafin_passes_total",] == counts.passes > 0
    assert found["deltafin_pass_seconds_total",] == counts.pass_s > 0
    assert found["deltafin_cached_tokens_total",] == counts.cached_tokens
    assert found["deltafin_http_requests_total", "/v1/completions", "200", "POST"] == 2
    assert found["deltafin_http_requests_total", "/v1/completions", "400", "POST"] == 1
    assert found["deltafin_http_requests_total", "/metrics", "200", "GET"] >= 1
    assert found["deltafin_first_token_seconds_count",] == 2
    assert found["deltafin_first_token_seconds_sum",] > 0
    assert found["deltafin_read_bytes_total", "shard"] > 0
    assert found["deltafin_running",] == found["deltafin_waiting",] == found["deltafin_missing_experts",] == 0
    assert found["deltafin_experts",] == server.services.missing.total


def test_labels_come_from_the_routes_and_not_from_clients(server):
    for method, path in (("GET", "/v1/models/made-up"), ("BREW", "/v1/models"), ("GET", "/made/up")):
        HTTP.request(method, f"{server.url}{path}")
    found = metrics_of(server)
    assert found["deltafin_http_requests_total", "/v1/models/{model}", "404", "GET"] >= 1
    assert found["deltafin_http_requests_total", "(none)", "404", "GET"] >= 1
    assert not any("made" in label or label == "BREW" for key in found for label in key)


def test_batches_are_counted_by_status(file_server):
    body = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "The", "max_tokens": 1}}
    upload = {"file": ("in.jsonl", json.dumps(body).encode())}
    file = httpx.post(f"{file_server.url}/v1/files", files=upload, data={"purpose": "batch"}).json()
    wanted = {"input_file_id": file["id"], "endpoint": "/v1/completions", "completion_window": "24h"}

    def completed():
        text = httpx.get(f"{file_server.url}/metrics").text
        found = re.search(r'^deltafin_batches\{status="completed"\} (\S+)$', text, re.MULTILINE)
        return 0.0 if found is None else float(found[1])

    before = completed()
    httpx.post(f"{file_server.url}/v1/batches", json=wanted).raise_for_status()
    until = time.monotonic() + 20
    while completed() == before and time.monotonic() < until:
        time.sleep(0.05)
    assert completed() == before + 1
