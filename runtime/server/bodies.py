"""Bodies of requests as JSON. How large they may get and how long they may take, the guard sees to."""

from __future__ import annotations

import asyncio

from starlette.requests import Request

from deltafin.errors import BadRequest
from deltafin.runtime.openai import parse
from deltafin.runtime.server.errors import ApiError

_SMALL_NBYTES = 64 << 10  # read at once; for others, connections that stream are not to wait


async def read_json(request: Request) -> object:
    """The value of a body. Raises ApiError where it is none.

    The content type is not insisted on: a web page of elsewhere is told by its Origin, and curl sends a form's type.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind.startswith("multipart/"):
        raise ApiError(415, f"the content type is {kind[:60]}; send JSON, as application/json")
    if request.headers.get("content-encoding", "identity").strip().lower() not in ("", "identity"):
        raise ApiError(415, "bodies are read as they are; send this one without a Content-Encoding")
    # `request.body()` would keep the bytes for as long as the answer takes.
    body = b"".join([piece async for piece in request.stream()])
    if not body:
        raise ApiError(400, "the body is empty; send a JSON object")
    try:
        return parse(body) if len(body) <= _SMALL_NBYTES else await asyncio.to_thread(parse, body)
    except BadRequest as e:
        raise ApiError(400, f"the body is {e}" if str(e).startswith("not") else f"the body: {e}") from None
