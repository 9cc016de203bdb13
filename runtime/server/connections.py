"""Connections of a server: not more than there are open files for, and none that holds one without a request."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from deltafin.runtime.openai import error_json

HEADERS_S = 30.0  # for the head of a request to arrive, since the connection or the first byte of a later one
DEAF_S = 300.0  # for a client to take what was sent, or to say that it is still there
_SPARE = 8  # connections beyond the limit that are told so; further ones are closed without a word
_RETRY_S = b"5"

_Message = MutableMapping[str, Any]


async def _busy(
    scope: _Message, receive: Callable[[], Awaitable[_Message]], send: Callable[[_Message], Awaitable[None]]
) -> None:
    """What a connection too many is told."""
    complaint = error_json("too many connections; try again soon", None, "too_many_connections", "server_error")
    body = json.dumps(complaint).encode()
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(body)).encode()),
        (b"retry-after", _RETRY_S),
        (b"connection", b"close"),
    ]
    await send({"type": "http.response.start", "status": 503, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def connections_of(most: int, headers_s: float = HEADERS_S) -> type[H11Protocol]:
    """The protocol for at most so many connections at once, as uvicorn's `http` setting takes it."""

    class Connection(H11Protocol):
        """One of them; closed if a head does not arrive in time."""

        _slow: asyncio.TimerHandle | None = None

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            if len(self.connections) > most:
                self.app = _busy
            if len(self.connections) > most + _SPARE:
                transport.abort()
                return
            _cut_when_deaf(transport)
            self._expect_head()

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            if self.cycle is None or self.cycle.response_complete:
                self._expect_head()
            else:
                self._has_head()

        def connection_lost(self, exc: Exception | None) -> None:
            self._has_head()
            super().connection_lost(exc)

        def _unsupported_upgrade_warning(self) -> None:
            """Some clients offer HTTP/2 with each request; they go on without it."""

        def send_400_response(self, msg: str) -> None:
            """What is no request gets an error like others."""
            body = json.dumps(error_json("this is no HTTP request that can be read")).encode()
            headers = [(b"content-type", b"application/json"), (b"connection", b"close")]
            for event in (h11.Response(status_code=400, headers=headers), h11.Data(data=body), h11.EndOfMessage()):
                self.transport.write(self.conn.send(event) or b"")
            self.transport.close()

        def _expect_head(self) -> None:
            if self._slow is None and not self.transport.is_closing():
                self._slow = self.loop.call_later(headers_s, self._too_slow)

        def _has_head(self) -> None:
            if self._slow is not None:
                self._slow.cancel()
                self._slow = None

        def _too_slow(self) -> None:
            self._slow = None
            if self.cycle is None or self.cycle.response_complete:
                self.transport.close()

    return Connection


def _cut_when_deaf(transport: asyncio.Transport) -> None:
    """A machine that is gone without a word, or a client that reads nothing, is not computed for any longer."""
    option, connected = getattr(socket, "TCP_USER_TIMEOUT", None), transport.get_extra_info("socket")
    if option is not None and connected is not None and connected.family != socket.AF_UNIX:
        connected.setsockopt(socket.IPPROTO_TCP, option, round(DEAF_S * 1000))
