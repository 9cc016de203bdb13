"""What stands before the routes: web pages, keys, and bodies that are too large or never come."""

from __future__ import annotations

import json
import re
import resource
import socket
import time

import httpx
import pytest

from deltafin.runtime.server.guard import is_loopback
from deltafin.runtime.server.settings import Settings
from deltafin.store import open_store

# Without certificates, which take a while to read; a connection for each request.
HTTP = httpx.Client(verify=False, timeout=60, limits=httpx.Limits(max_keepalive_connections=0))


KEY = "sk-correct-horse"


@pytest.fixture(scope="module")
def keyed(server_of, demo_dir, tmp_path_factory):
    with open_store(demo_dir, cache_dir=tmp_path_factory.mktemp("keyed")) as store:
        served = server_of(store, context=512, api_key=KEY, cors_origins=("https://ours.example",))
        yield served
        served.close()


def get(server, path="/v1/models", **headers):
    return HTTP.get(f"{server.url}{path}", headers={k.replace("_", "-"): v for k, v in headers.items()})


def error_of(response, status):
    assert response.status_code == status, response.text
    return response.json()["error"]


# ---- keys


@pytest.mark.parametrize(
    "given",
    [None, "", "Bearer", "Bearer wrong", f"Basic {KEY}", KEY, f"Bearer {KEY}x", f"Bearer {KEY[:-1]}"],
)
def test_without_the_key_there_is_nothing(keyed, given):
    headers = {} if given is None else {"Authorization": given}
    for path in ("/v1/models", "/metrics", "/openapi.json", "/nothing"):
        response = HTTP.get(f"{keyed.url}{path}", headers=headers)
        error = error_of(response, 401)
        assert error["type"] == "authentication_error" and error["code"] == "invalid_api_key"
        assert response.headers["www-authenticate"] == "Bearer" and KEY not in response.text
    assert error_of(HTTP.post(f"{keyed.url}/v1/completions", json={}, headers=headers), 401)


@pytest.mark.parametrize("scheme", ["Bearer", "bearer", "BEARER", "Bearer  "])
def test_with_the_key_all_is_open(keyed, scheme):
    for path in ("/v1/models", "/metrics", "/openapi.json"):
        assert get(keyed, path, Authorization=f"{scheme} {KEY}").status_code == 200


def test_health_without_the_key_says_only_whether_all_is_well(keyed):
    assert get(keyed, "/health").json() == {"status": "ok"}
    assert "waiting" in get(keyed, "/health", Authorization=f"Bearer {KEY}").json()


def test_the_key_is_compared_as_bytes_of_one_length(keyed):
    strange = f"Bearer {KEY}".encode() + b"\xff\x00\xc3"
    raw = b"GET /v1/models HTTP/1.1\r\nHost: x\r\nConnection: close\r\nAuthorization: Bearer \xff\xfe\xc3\r\n\r\n"
    assert exchange(keyed, raw).startswith(b"HTTP/1.1 401")
    assert exchange(keyed, raw.replace(b"Bearer \xff\xfe\xc3", strange)).startswith(b"HTTP/1.1 40")


def test_settings_do_not_show_the_key():
    assert KEY not in repr(Settings(api_key=KEY))


# ---- web pages


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("localhost:8000", 200),
        ("LOCALHOST", 200),
        ("app.localhost:1", 200),
        ("127.0.0.1", 200),
        ("127.8.9.1:80", 200),
        ("[::1]:8000", 200),
        ("evil.example:8000", 403),
        ("localhost.evil.example", 403),
        ("127.0.0.1.evil.example", 403),
        ("10.0.0.1", 403),
        ("[2001:db8::1]", 403),
    ],
)
def test_without_a_key_only_names_of_this_machine_are_answered(server, host, status):
    assert is_loopback(host) is (status == 200)
    response = get(server, Host=host)
    assert response.status_code == status
    if status == 403:
        assert host[:20] in error_of(response, 403)["message"]


def test_with_a_key_any_name_is(keyed):
    assert get(keyed, Host="models.example", Authorization=f"Bearer {KEY}").status_code == 200


@pytest.mark.parametrize(
    "origin", ["https://evil.example", "null", "http://localhost:1", "http://127.0.0.1", "file://", "http://["]
)
def test_a_web_page_of_elsewhere_starts_no_work(server, origin):
    submitted = server.engine.counts.submitted
    body = {"model": server.model_name, "prompt": "The", "max_tokens": 1}
    for kind in ("application/json", "text/plain", "application/x-www-form-urlencoded"):
        headers = {"Origin": origin, "Content-Type": kind}
        response = HTTP.post(f"{server.url}/v1/completions", content=json.dumps(body), headers=headers)
        assert "--cors" in error_of(response, 403)["message"]
        assert "access-control-allow-origin" not in response.headers
    assert server.engine.counts.submitted == submitted
    asking = {"Origin": origin, "Access-Control-Request-Method": "POST"}
    assert HTTP.options(f"{server.url}/v1/completions", headers=asking).status_code == 403


def test_a_page_from_here_may_ask(server):
    assert get(server, Origin=server.url).status_code == 200
    assert get(server, Origin=server.url, Host="localhost").status_code == 403  # that is another origin


def test_origins_that_are_configured_may_ask_and_get_cors_headers(keyed):
    ours = {"Origin": "https://ours.example"}
    asking = {**ours, "Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization"}
    preflight = HTTP.options(f"{keyed.url}/v1/chat/completions", headers=asking)  # which has no key
    assert preflight.status_code == 200
    assert preflight.headers["access-control-allow-origin"] == "https://ours.example"
    assert "authorization" in preflight.headers["access-control-allow-headers"].lower()
    answer = HTTP.get(f"{keyed.url}/v1/models", headers={**ours, "Authorization": f"Bearer {KEY}"})
    assert answer.status_code == 200 and "X-Request-Id" in answer.headers["access-control-expose-headers"]
    refused = HTTP.get(f"{keyed.url}/v1/models", headers=ours)
    assert refused.status_code == 401 and refused.headers["access-control-allow-origin"] == "https://ours.example"
    error_of(HTTP.options(f"{keyed.url}/v1/models", headers={**asking, "Origin": "https://evil.example"}), 403)


# ---- bodies


def exchange(server, raw, timeout_s=20.0):
    with socket.create_connection(("127.0.0.1", server.port), timeout=timeout_s) as client:
        client.sendall(raw)
        return rest_of(client)


def rest_of(client):
    got = b""
    try:
        while piece := client.recv(65536):
            got += piece
    except ConnectionResetError:
        pass
    return got


def head(*lines):
    return "\r\n".join(["POST /v1/completions HTTP/1.1", "Host: localhost", *lines, "", ""]).encode()


@pytest.fixture
def small(new_server):
    return new_server(most_body_nbytes=1000, body_timeout_s=1.0, context=512)


def test_a_body_that_says_it_is_too_large_is_not_read(small):
    with socket.create_connection(("127.0.0.1", small.port), timeout=20) as client:
        client.sendall(head("Content-Length: 1001"))  # and not one byte of it
        began = time.monotonic()
        got = b""
        while b"body_too_large" not in got and (piece := client.recv(65536)):
            got += piece
        assert got.startswith(b"HTTP/1.1 413") and b"connection: close" in got.lower()
        assert time.monotonic() - began < 1.5  # told before the server waits for a client that may still be sending
        assert rest_of(client) == b""  # and then closed


def test_a_body_that_does_not_say_its_size_is_counted(small):
    chunk = b"190\r\n" + b" " * 400 + b"\r\n"
    got = exchange(small, head("Transfer-Encoding: chunked") + 3 * chunk)
    assert got.startswith(b"HTTP/1.1 413") and b"1000 bytes" in got
    got = exchange(small, head("Transfer-Encoding: chunked", "Connection: close") + 2 * chunk + b"0\r\n\r\n")
    assert got.startswith(b"HTTP/1.1 400")


def test_a_body_of_just_the_limit_is_read(small):
    body = json.dumps({"model": small.model_name, "prompt": "The", "max_tokens": 1}).encode()
    body += b" " * (1000 - len(body))
    assert HTTP.post(f"{small.url}/v1/completions", content=body).status_code == 200
    error_of(HTTP.post(f"{small.url}/v1/completions", content=body + b" "), 413)


def test_a_client_still_sending_sees_why_it_was_refused(new_server):
    server = new_server(most_body_nbytes=399_999, context=512)
    with socket.create_connection(("127.0.0.1", server.port), timeout=20) as client:
        client.sendall(head("Content-Length: 400000"))
        for _ in range(20):  # reads nothing before all is sent, as many clients do
            time.sleep(0.01)
            client.sendall(b" " * 20_000)
        assert rest_of(client).startswith(b"HTTP/1.1 413")


def test_huge_bodies_leave_memory_flat(small):
    block = b" " * (1 << 16)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for framing in ("Content-Length: 67108864", "Transfer-Encoding: chunked"):
        with socket.create_connection(("127.0.0.1", small.port), timeout=20) as client:
            client.sendall(head(framing))
            try:
                for _ in range(1024):
                    client.sendall(block if "Length" in framing else b"10000\r\n" + block + b"\r\n")
            except OSError:
                pass
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 16 << 10  # KiB
    assert get(small).status_code == 200


def test_a_body_that_stays_away_is_not_waited_for(small):
    began = time.monotonic()
    got = exchange(small, head("Content-Length: 100") + b'{"model":')
    assert got.startswith(b"HTTP/1.1 408") and b"for 1 s" in got and b"connection: close" in got.lower()
    assert 0.9 < time.monotonic() - began < 15


def test_a_slow_body_that_comes_is_waited_for(small):
    body = json.dumps({"model": small.model_name, "prompt": "The", "max_tokens": 1}).encode()
    with socket.create_connection(("127.0.0.1", small.port), timeout=20) as client:
        client.sendall(head(f"Content-Length: {len(body)}", "Connection: close"))
        for start in range(0, len(body), 12):
            client.sendall(body[start : start + 12])
            time.sleep(0.22)  # 1.3 s in all
        assert rest_of(client).startswith(b"HTTP/1.1 200")


def test_a_body_with_two_lengths_is_refused_and_what_follows_is_no_request(server):
    """Of a proxy that goes by the other length, that would be a request that it never saw."""
    hidden = b"0\r\n\r\nGET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
    got = exchange(server, head("Transfer-Encoding: chunked", f"Content-Length: {len(hidden)}") + hidden)
    assert got.startswith(b"HTTP/1.1 400") and b"Content-Length and Transfer-Encoding" in got
    assert got.count(b"HTTP/1.1") == 1


@pytest.mark.parametrize(
    "raw",
    [
        b"nothing\r\n\r\n",
        b"GET / HTTP/1.1\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: -1\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" * 20 + b"\r\n\r\n",
    ],
    ids=["nothing", "no host", "negative", "two lengths", "TLS"],
)
def test_what_is_no_request_is_a_plain_400(server, raw):
    top, _, body = exchange(server, raw).partition(b"\r\n\r\n")
    assert top.startswith(b"HTTP/1.1 400") and b"application/json" in top
    assert json.loads(re.sub(rb"\r\n|^[0-9a-f]+\r\n|0\r\n\r\n$", b"", body))["error"]["type"] == "invalid_request_error"
    assert get(server).status_code == 200


@pytest.mark.parametrize("nbytes", [70_000, 4_000_000])
def test_a_head_that_is_too_large_is_refused(server, nbytes):
    with socket.create_connection(("127.0.0.1", server.port), timeout=20) as client:
        try:
            client.sendall(b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nX: ")
            client.sendall(b"x" * nbytes + b"\r\n\r\n")
        except OSError:  # it was closed while it was sending
            pass
        got = rest_of(client)
    assert got[:12] in (b"HTTP/1.1 431", b"HTTP/1.1 400", b"") and bool(got) >= (nbytes == 70_000)
    assert get(server, X="x" * 60_000).status_code == 200


def test_an_offer_of_another_protocol_is_passed_over(server, caplog):
    offers = {"Connection": "Upgrade, HTTP2-Settings", "Upgrade": "h2c", "HTTP2-Settings": "AAMAAABkAAQAoAAAAAIAAAAA"}
    assert HTTP.get(f"{server.url}/v1/models", headers=offers).status_code == 200
    assert "uvicorn.error" not in {record.name for record in caplog.records}
