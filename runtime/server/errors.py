"""What a client is told when a request cannot be done: OpenAI's error object, and a status."""

from __future__ import annotations

from collections.abc import Mapping

from deltafin.errors import BadRequest, Corrupt, DeltafinError, Missing, NetworkError, NoMemory, NoSpace
from deltafin.runtime.openai import BadBody, error_json
from deltafin.runtime.server.engine import Full, Stopped

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


def api_error(error: Exception) -> ApiError:
    """What any error comes to. Of one that is no `DeltafinError` nothing is told but that it is our fault."""
    match error:
        case ApiError():
            return error
        case BadBody():
            return ApiError(400, str(error), param=error.param, code=error.code)
        case Full():
            return ApiError(429, str(error), code="queue_full", headers={"Retry-After": str(error.retry_after_s)})
        case Stopped():
            return ApiError(503, str(error), code="stopped", headers={"Retry-After": "30"})
        case Missing():
            return ApiError(503, str(error), code="missing_weights")
        case NetworkError():
            return ApiError(503, str(error), code="network", headers={"Retry-After": "60"})
        case NoMemory() | MemoryError():
            return ApiError(503, str(error) or "out of memory", code="out_of_memory")
        case NoSpace():
            return ApiError(503, str(error), code="disk_full")
        case Corrupt():
            return ApiError(500, str(error), code="corrupt_weights")
        case BadRequest():
            return ApiError(400, str(error))
        case DeltafinError():
            return ApiError(500, str(error))
        case _:
            return ApiError(500, "an error of the server's own; its log says more")
