"""Long bodies that come together: they take turns, and only so much of them is held."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from contextlib import ExitStack
from types import SimpleNamespace

import httpx
import pytest

from deltafin.runtime.server.bodies import SMALL_NBYTES, Bodies
from deltafin.runtime.server.settings import Settings

LONG = b"[" + b" " * SMALL_NBYTES + b"]"
HTTP = httpx.Client(verify=False, timeout=60)


def request_of(body):
    async def stream():
        for start in range(0, len(body), 10_000):
            yield body[start : start + 10_000]

    return SimpleNamespace(headers={}, stream=stream)


class Together:
    """Counts how many bodies are being understood at once."""

    def __init__(self):
        self._lock, self._now, self.most = threading.Lock(), 0, 0

    def __call__(self, value):
        with self._lock:
            self._now += 1
            self.most = max(self.most, self._now)
        time.sleep(0.05)
        with self._lock:
            self._now -= 1
        return value


@pytest.mark.parametrize(("body", "at_once"), [(LONG, 1), (b"[]", 3)], ids=["long", "short"])
def test_long_bodies_are_understood_one_after_the_other(body, at_once):
    together = Together()

    async def read():
        bodies = Bodies(Settings())
        return await asyncio.gather(*(bodies.read(request_of(body), together) for _ in range(3)))

    assert asyncio.run(read()) == [[], [], []]
    assert together.most == at_once


def test_with_too_many_long_bodies_on_their_way_others_are_told_and_short_ones_answered(new_server):
    server = new_server(most_body_nbytes=100_000, context=512)
    url = f"{server.url}/v1/completions"
    short = json.dumps({"model": server.model_name, "prompt": "The", "max_tokens": 1}).encode()
    long = short + b" " * (99_000 - len(short))
    with ExitStack() as stack:
        for _ in range(4):  # 400,000 bytes are held at most; these never end
            client = stack.enter_context(socket.create_connection(("127.0.0.1", server.port), timeout=20))
            client.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 99999\r\n\r\n" + long)
        refused = _until(503, url, long)
        assert refused.json()["error"]["code"] == "busy" and int(refused.headers["retry-after"]) > 0
        assert HTTP.post(url, content=short).status_code == 200
    assert _until(200, url, long)  # what their clients have left behind is forgotten


def _until(status, url, body):
    until = time.monotonic() + 10
    while (response := HTTP.post(url, content=body)).status_code != status:
        assert time.monotonic() < until, response.text
        time.sleep(0.02)
    return response
