"""What stands before every route: whom a request may come from, who asks, and how large its body is.

All of it is decided from the head of a request, before its body is read, but for the size of a body that does not say
its own.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import ipaddress
import time

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from deltafin.runtime.server.errors import ApiError
from deltafin.runtime.server.settings import Settings

OPEN = "/health"  # needs no key
MOST_HEAD_NBYTES = 64 << 10  # of a request's line and headers
_TRUSTED = "deltafin.trusted"  # of a scope
_MULTIPART_NBYTES = 64 << 10  # around an uploaded file
_LINGER_S = 1.0


class Heads:
    """Refuses a head that is too large or can be read in two ways, and keeps web pages out.

    A browser lets them send requests to this machine. A page is told by its Origin, and one whose name was made to
    point here by the Host that it asked for. With a key any Host will do: no page knows it.
    """

    def __init__(self, app: ASGIApp, settings: Settings) -> None:
        self._app, self._settings = app, settings

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if (
            scope["type"] == "http"
            and (refusal := _too_large(scope) or _ambiguous(scope) or self._refusal(Headers(scope=scope))) is not None
        ):
            await refusal.response()(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _refusal(self, headers: Headers) -> ApiError | None:
        host, origin, settings = headers.get("host", ""), headers.get("origin"), self._settings
        if host and settings.api_key is None and not (is_loopback(host) or _name(host) == settings.host.lower()):
            return ApiError(
                403, f"without an API key only loopback names are answered, and the request is for {host[:100]!r}"
            )
        same = origin is not None and origin.partition("://")[2] == host != ""
        if origin is None or same or {origin, "*"} & set(settings.cors_origins):
            return None
        return ApiError(403, f"web pages of {origin[:100]!r} may not ask here; df-serve --cors allows them")


class Keys:
    """Asks for the key, if there is one."""

    def __init__(self, app: ASGIApp, settings: Settings) -> None:
        self._app = app
        self._digest = None if settings.api_key is None else _digest(settings.api_key.encode())

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            scope[_TRUSTED] = self._digest is None or self._has_key(Headers(scope=scope))
            if not scope[_TRUSTED] and scope["path"] != OPEN:
                await _no_key(scope).response()(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _has_key(self, headers: Headers) -> bool:
        assert self._digest is not None
        scheme, _, key = headers.get("authorization", "").partition(" ")
        # Digests have one length, so the time tells nothing about the key, not even its length.
        same = hmac.compare_digest(_digest(key.strip().encode("latin-1")), self._digest)
        return same and scheme.lower() == "bearer"


class BodyLimits:
    """Refuses a body that is too large, before it is read if it says so, and does not wait for one that stays away."""

    def __init__(self, app: ASGIApp, settings: Settings) -> None:
        self._app, self._settings = app, settings

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        body = _Body(receive, self._most(scope["path"]), self._settings.body_timeout_s)
        declared = Headers(scope=scope).get("content-length", "0")
        if declared.isdecimal() and int(declared) > body.most:
            await body.too_large().response()(scope, receive, body.lingering(send))
            return
        await self._app(scope, body.receive, body.lingering(send))

    def _most(self, path: str) -> int:
        if path.rstrip("/") == "/v1/files":
            return self._settings.most_file_nbytes + _MULTIPART_NBYTES
        return self._settings.most_body_nbytes


class _Body:
    """One that is being read."""

    def __init__(self, receive: Receive, most: int, timeout_s: float) -> None:
        self._receive, self.most, self._timeout_s = receive, most, timeout_s
        self._nbytes = 0
        self._over = False
        self._rest = False  # whether more may come that nobody will read

    async def receive(self) -> Message:
        if self._over:
            return await self._receive()
        try:
            async with asyncio.timeout(self._timeout_s):
                message = await self._receive()
        except TimeoutError:
            raise ApiError(
                408, f"the body has not come further for {self._timeout_s:g} s", headers={"Connection": "close"}
            ) from None
        self._over = not message.get("more_body", False)
        self._nbytes += len(message.get("body", b""))
        if self._nbytes > self.most:
            raise self.too_large()
        return message

    def too_large(self) -> ApiError:
        self._rest = not self._over
        return ApiError(
            413,
            f"the body is larger than the {self.most} bytes that this server takes",
            code="body_too_large",
            headers={"Connection": "close"},
        )

    def lingering(self, send: Send) -> Send:
        """A client that is still sending when its connection is closed may never see the answer, so it gets a while."""

        async def sending(message: Message) -> None:
            if self._rest and message["type"] == "http.response.body" and not message.get("more_body", False):
                self._rest = False
                await send({**message, "more_body": True})
                await self._throw_away()
                message = {"type": "http.response.body"}
            await send(message)

        return sending

    async def _throw_away(self) -> None:
        """What comes within seconds, as much again as was allowed at most."""
        until, nbytes = time.monotonic() + _LINGER_S, 0
        while nbytes <= self.most:
            try:
                async with asyncio.timeout(max(0.0, until - time.monotonic())):
                    message = await self._receive()
            except TimeoutError:
                return
            if not message.get("more_body", False):
                return
            nbytes += len(message.get("body", b""))


def is_trusted(scope: Scope) -> bool:
    """Whether a request has the key, or none is needed."""
    return bool(scope.get(_TRUSTED))


def is_loopback(host: str) -> bool:
    """Whether a Host header names this machine as only this machine can."""
    name = _name(host)
    if name == "localhost" or name.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


def _too_large(scope: Scope) -> ApiError | None:
    nbytes = (
        len(scope.get("raw_path") or b"")
        + len(scope["query_string"])
        + sum(len(n) + len(v) for n, v in scope["headers"])
    )
    if nbytes <= MOST_HEAD_NBYTES:
        return None
    return ApiError(431, f"the headers are larger than the {MOST_HEAD_NBYTES} bytes that this server takes")


def _ambiguous(scope: Scope) -> ApiError | None:
    """Where a body with two lengths ends, a proxy on the way may see in another place, and what follows as its own."""
    headers = Headers(scope=scope)
    if "transfer-encoding" not in headers or "content-length" not in headers:
        return None
    return ApiError(
        400, "Content-Length and Transfer-Encoding are both given; send one of them", headers={"Connection": "close"}
    )


def _name(host: str) -> str:
    """Of `name:port`, or of `[address]:port`."""
    if host.startswith("["):
        return host[1:].partition("]")[0].lower()
    return host.partition(":")[0].rstrip(".").lower()


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


def _no_key(scope: Scope) -> ApiError:
    given = "authorization" in Headers(scope=scope)
    message = "the API key is wrong" if given else "an API key is needed: send it as Authorization: Bearer"
    return ApiError(401, message, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})
