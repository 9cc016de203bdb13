"""Bodies of requests as JSON, and what they ask for. How long one may get and may take, the guard sees to."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import nullcontext
from typing import TypeVar

from starlette.requests import Request

from deltafin.errors import BadRequest
from deltafin.runtime.openai import parse
from deltafin.runtime.server.errors import ApiError
from deltafin.runtime.server.settings import Settings

SMALL_NBYTES = 64 << 10
_TOGETHER = 4  # bodies of the greatest length that are held at once
_RETRY_S = 10

_T = TypeVar("_T")


class _Busy(ApiError):
    def __init__(self) -> None:
        super().__init__(
            503,
            "too many long requests are being read; try again soon",
            code="busy",
            headers={"Retry-After": str(_RETRY_S)},
        )


class Bodies:
    """All that are being read. Large ones are understood one after the other, and only so much of them is held.

    JSON in memory takes up to twenty times its length, and many clients may send the longest there may be at once.
    """

    def __init__(self, settings: Settings) -> None:
        self._most_nbytes = _TOGETHER * settings.most_body_nbytes
        self._nbytes = 0  # held of large ones
        self._one = asyncio.Lock()

    async def read(self, request: Request, understand: Callable[[object], _T]) -> _T:
        """What `understand` makes of a body's value; it runs in a thread, so that what streams meanwhile goes on.

        The content type is not insisted on: a web page of elsewhere is told by its Origin, and curl sends a form's
        type. Raises ApiError where the body is no JSON, or where too much is being read already.
        """
        _check_headers(request)
        pieces: list[bytes] = []
        stream, nbytes, held = request.stream(), 0, 0
        try:
            # `request.body()` would keep the bytes for as long as the answer takes.
            async for piece in stream:
                nbytes += len(piece)
                more = nbytes - held if nbytes > SMALL_NBYTES else 0
                if self._nbytes + more > self._most_nbytes:
                    raise _Busy
                self._nbytes, held = self._nbytes + more, held + more
                pieces.append(piece)
            async with self._one if held else nullcontext():
                return await asyncio.to_thread(_understood, pieces, understand)
        except _Busy:
            pieces.clear()
            self._nbytes, held = self._nbytes - held, 0
            async for _ in stream:  # so that the client, which may still be sending, comes to hear of it
                pass
            raise
        finally:
            self._nbytes -= held


def _check_headers(request: Request) -> None:
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind.startswith("multipart/"):
        raise ApiError(415, f"the content type is {kind[:60]}; send JSON, as application/json")
    if request.headers.get("content-encoding", "identity").strip().lower() not in ("", "identity"):
        raise ApiError(415, "bodies are read as they are; send this one without a Content-Encoding")


def _understood(pieces: list[bytes], understand: Callable[[object], _T]) -> _T:
    """Takes the pieces, of which nothing is kept."""
    body = b"".join(pieces)
    pieces.clear()
    if not body:
        raise ApiError(400, "the body is empty; send a JSON object")
    try:
        value = parse(body)
    except BadRequest as e:
        raise ApiError(400, f"the body is {e}" if str(e).startswith("not") else f"the body: {e}") from None
    del body
    return understand(value)
