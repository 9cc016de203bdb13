"""One line a request, at its end, and the last place where an error of ours is caught."""

from __future__ import annotations

import logging
import secrets
import time
from dataclasses import dataclass, field

from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from deltafin.runtime.server.errors import api_error
from deltafin.runtime.server.metrics import Meters
from deltafin.runtime.server.services import Services
from deltafin.runtime.server.telling import missing_headers

log = logging.getLogger("deltafin.server")

_KEY = "deltafin.record"  # of a scope
_METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS")
_ALWAYS = {"Cache-Control": "no-cache", "X-Content-Type-Options": "nosniff"}


@dataclass(slots=True)
class Record:
    """What is known of a request when it is over."""

    id: str = field(default_factory=lambda: f"req_{secrets.token_hex(12)}")
    status: int | None = None  # None: nothing was answered
    tokens: tuple[int, int, int] | None = None  # of the prompt, of these cached, of the answer
    left: bool = False  # its client went away before the end


def record_of(scope: Scope) -> Record:
    record: Record = scope.setdefault(_KEY, Record())
    return record


class RequestLog:
    """The outermost layer: gives each request an id, counts it, writes its line."""

    def __init__(self, app: ASGIApp, services: Services, meters: Meters) -> None:
        self._app, self._services, self._meters = app, services, meters

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        record, began = record_of(scope), time.monotonic()
        headers = _ALWAYS | {"X-Request-Id": record.id, **missing_headers(self._services)}
        raw = [(name.lower().encode(), value.encode()) for name, value in headers.items()]

        async def sending(message: Message) -> None:
            if message["type"] == "http.response.start":
                record.status = message["status"]
                own = list(message.get("headers", ()))
                named = {name.lower() for name, _ in own}
                message = {**message, "headers": own + [(name, value) for name, value in raw if name not in named]}
            await send(message)

        try:
            await self._app(scope, receive, sending)
        except ClientDisconnect:  # before its body was whole
            record.left = True
        except Exception as e:
            log.exception("%s: an error of our own", record.id)
            if record.status is None:
                await api_error(e).response()(scope, receive, sending)
            # Else the connection ends before the body does.
        finally:
            self._end(scope, record, time.monotonic() - began)

    def _end(self, scope: Scope, record: Record, seconds: float) -> None:
        route = _route(scope)
        method = scope["method"] if scope["method"] in _METHODS else "other"
        status = "left" if record.left else str(record.status or "none")
        self._meters.request(method, route, status)
        tokens = ""
        if record.tokens is not None:
            prompt, cached, new = record.tokens
            tokens = f", {prompt} tokens ({cached} cached) + {new}"
        log.info("%s %s %s %s in %.2f s%s", record.id, method, route, status, seconds, tokens)


def _route(scope: Scope) -> str:
    """As it was declared, so that it names no file, no batch and nothing that a client made up."""
    path = getattr(scope.get("route"), "path_format", None)
    return path if isinstance(path, str) else "(none)"
