"""What is wrong with a request, as a client of the API expects to be told."""

from __future__ import annotations

from deltafin.errors import BadRequest

INVALID = "invalid_request_error"


class BadBody(BadRequest):
    """A request that cannot be answered as it asks; `param` is the path of the field, None for the whole of it."""

    def __init__(self, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.param, self.code = param, code

    def as_json(self) -> dict[str, object]:
        """The error object of the API."""
        return error_json(str(self), self.param, self.code)


def error_json(
    message: str, param: str | None = None, code: str | None = None, kind: str = INVALID
) -> dict[str, object]:
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}
