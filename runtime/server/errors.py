"""What a client is told when a request cannot be done: OpenAI's error object, and a status."""

from __future__ import annotations

import re
from collections.abc import Mapping

from starlette.responses import Response

from deltafin.errors import BadRequest, Corrupt, DeltafinError, Missing, NetworkError, NoMemory, NoSpace
from deltafin.runtime.openai import BadBody, error_json, write_line
from deltafin.runtime.server.refusing import Full, Stopped

# A file of this machine in a message: its folders.
_FOLDERS = re.compile(r"(?<![\w:/.])~?/(?:[^\s/'\",;:()]+/)*(?=[^\s/])")
_KINDS = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}


class ApiError(DeltafinError):
    """An answer that is an error. `message` is one line that says what to do."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.param, self.code = status, param, code
        self.headers = dict(headers or {})

    def as_json(self) -> dict[str, object]:
        kind = _KINDS.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return error_json(str(self), self.param, self.code, kind)

    def response(self) -> Response:
        return Response(write_line(self.as_json()), self.status, self.headers, "application/json")


class NotAsAsked(ApiError):
    """The answer is no JSON, which response_format asks for and nothing can force. It is told with the error."""

    def __init__(self, answer: Mapping[str, object] | None = None) -> None:
        """`answer` is the object of the API; None if the client has it already."""
        super().__init__(
            422,
            "the model's answer is not the JSON that response_format asks for; ask again in other words, or with more "
            "max_tokens if it was cut",
            param="response_format",
            code="not_json",
        )
        self._answer = answer

    def as_json(self) -> dict[str, object]:
        told = super().as_json()
        return told if self._answer is None else {**told, "answer": self._answer}


def api_error(error: Exception) -> ApiError:
    """What any error comes to, without the folders that it may name.

    Of one that is no `DeltafinError` nothing is told but that it is our fault.
    """
    match error:
        case ApiError():
            return error
        case BadBody():
            return ApiError(400, str(error), param=error.param, code=error.code)
    text = _FOLDERS.sub("", str(error))
    match error:
        case Full():
            return ApiError(429, text, code="queue_full", headers={"Retry-After": str(error.retry_after_s)})
        case Stopped():
            return ApiError(503, text, code="stopped", headers={"Retry-After": "30"})
        case Missing():
            return ApiError(503, text, code="missing_weights")
        case NetworkError():
            return ApiError(503, text, code="network", headers={"Retry-After": "60"})
        case NoMemory() | MemoryError():
            return ApiError(503, text or "out of memory", code="out_of_memory")
        case NoSpace():
            return ApiError(503, text, code="disk_full")
        case Corrupt():
            return ApiError(500, text, code="corrupt_weights")
        case BadRequest():
            return ApiError(400, text)
        case DeltafinError():
            return ApiError(500, text)
        case _:
            return ApiError(500, "an error of the server's own; its log says more")
