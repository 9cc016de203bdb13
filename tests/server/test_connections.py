"""Connections themselves: too many are told so, and none is held open by a client that asks nothing."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import uvicorn

from deltafin.runtime.server.connections import connections_of


async def _app(scope, receive, send) -> None:
    """Answers at once, or a second later if the path says so."""
    if scope["path"] == "/slow":
        await asyncio.sleep(1)
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
    await send({"type": "http.response.body", "body": b"ok"})


@contextmanager
def _serving(most: int, headers_s: float = 30.0) -> Iterator[int]:
    listener = socket.create_server(("127.0.0.1", 0))
    config = uvicorn.Config(
        _app, http=connections_of(most, headers_s), ws="none", lifespan="off", log_config=None, timeout_keep_alive=30
    )
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    try:
        yield listener.getsockname()[1]
    finally:
        server.should_exit = True
        thread.join(10)


def _ask(client: socket.socket, path: str = "/") -> bytes:
    """The whole answer."""
    client.sendall(f"GET {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
    answer = b""
    while not answer.endswith((b"\r\n\r\nok", b"}}")):
        piece = client.recv(4096)
        assert piece, answer
        answer += piece
    return answer


def _ends_after(client: socket.socket) -> float:
    began = time.monotonic()
    client.settimeout(10)
    assert client.recv(1) == b""
    return time.monotonic() - began


def test_too_many_are_told_to_come_again_and_far_too_many_are_closed():
    with _serving(2) as port, ExitStack() as stack:
        clients = [stack.enter_context(socket.create_connection(("127.0.0.1", port), 5)) for _ in range(13)]
        for client in clients[:2]:
            assert _ask(client).startswith(b"HTTP/1.1 200")
        head, _, body = _ask(clients[2]).partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 503") and b"retry-after: 5" in head and b"connection: close" in head
        assert json.loads(body)["error"]["code"] == "too_many_connections"
        assert all(_is_closed(client) for client in clients[10:])
        for client in clients:
            client.close()
        time.sleep(0.1)
        with socket.create_connection(("127.0.0.1", port), 5) as later:
            assert _ask(later).startswith(b"HTTP/1.1 200")


def _is_closed(client: socket.socket) -> bool:
    try:
        return client.recv(1) == b""
    except ConnectionError:
        return True


def test_a_connection_without_a_request_is_closed():
    with _serving(10, headers_s=0.2) as port, socket.create_connection(("127.0.0.1", port), 5) as silent:
        assert _ends_after(silent) < 5


def test_a_head_that_never_ends_is_not_waited_for_also_in_a_later_request():
    with _serving(10, headers_s=0.2) as port:
        with socket.create_connection(("127.0.0.1", port), 5) as slow:
            slow.sendall(b"GET / HTTP/1.1\r\nHost: x\r\nX-")
            assert _ends_after(slow) < 5
        with socket.create_connection(("127.0.0.1", port), 5) as later:
            assert _ask(later).startswith(b"HTTP/1.1 200")
            later.sendall(b"GET / HT")
            assert _ends_after(later) < 5


def test_an_answer_that_takes_longer_than_a_head_may_is_not_cut_off():
    with _serving(10, headers_s=0.2) as port, socket.create_connection(("127.0.0.1", port), 5) as client:
        assert _ask(client, "/slow").startswith(b"HTTP/1.1 200")
        time.sleep(0.4)
        assert _ask(client).startswith(b"HTTP/1.1 200"), "between two requests the time for idle ones counts"
