"""Whether a file is a list of requests at all: every line that is none, not only the first, before anything is done."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from deltafin.errors import BadRequest
from deltafin.indexer import disk_error
from deltafin.runtime.batch.keys import Keys, digest
from deltafin.runtime.batch.requests import MOST_LINE_NBYTES
from deltafin.runtime.openai import Endpoint, parse
from deltafin.runtime.openai.fields import shown

MOST_ERRORS = 100  # that are told; a file of another kind has one in every line


@dataclass(frozen=True, slots=True)
class LineError:
    """What is wrong with a line, from 1; `line` is None for the whole file."""

    code: str
    message: str
    param: str | None = None
    line: int | None = None

    def as_json(self) -> dict[str, object]:
        return {"code": self.code, "message": self.message, "param": self.param, "line": self.line}


class Checked:
    """What reading a file has found."""

    def __init__(self) -> None:
        self.requests = 0
        self.errors: list[LineError] = []


def check_input(path: Path, endpoint: Endpoint, progress: Callable[[int], None] = lambda nbytes: None) -> Checked:
    """Reads all lines: each is to be a request to `endpoint` with a name of its own. Bodies are not looked at.

    `progress` is told how many bytes are done. Stops at `MOST_ERRORS`. Raises DiskError.
    """
    found = Checked()
    names, lines = Keys(), array("Q")
    try:
        for number, raw in _lines(path, progress):
            try:
                name = _check(raw, endpoint)
            except _Wrong as e:
                found.errors.append(LineError(e.code, str(e), e.param, number))
                if len(found.errors) == MOST_ERRORS:
                    return found
                continue
            names.add(digest(name.encode()))
            lines.append(number)
    except OSError as e:
        raise disk_error(e, path, "cannot read the requests") from None
    found.requests = len(names)
    names.seal()
    if (twice := names.repeated()) is not None:
        later, earlier = (lines[index] for index in twice)
        why = f"line {earlier} has the same custom_id; each request needs its own"
        found.errors.append(LineError("duplicate_custom_id", why, "custom_id", later))
    if not found.requests and not found.errors:
        found.errors.append(LineError("empty_file", "there are no requests in the file"))
    return found


class _Wrong(Exception):
    def __init__(self, code: str, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.code, self.param = code, param


def _lines(path: Path, progress: Callable[[int], None]) -> Iterator[tuple[int, bytes]]:
    """Those that are not blank, with their numbers. What a line has beyond the most there can be is passed over."""
    with open(path, "rb") as file:
        nbytes, number = 0, 0
        while raw := file.readline(MOST_LINE_NBYTES):
            number += 1
            nbytes += len(raw)
            line, rest = raw, raw
            while len(rest) == MOST_LINE_NBYTES and not rest.endswith(b"\n"):
                rest = file.readline(MOST_LINE_NBYTES)
                nbytes += len(rest)
            if not line.isspace():
                yield number, line
            progress(nbytes)


def _check(raw: bytes, endpoint: Endpoint) -> str:
    """The custom_id of a request. Raises _Wrong."""
    if len(raw) == MOST_LINE_NBYTES and not raw.endswith(b"\n"):
        raise _Wrong("line_too_long", f"has more than {MOST_LINE_NBYTES:,} bytes")
    try:
        fields = parse(raw)
    except BadRequest as e:
        raise _Wrong("invalid_json_line", f"{e}; expected one request a line") from None
    if not isinstance(fields, dict):
        raise _Wrong("invalid_json_line", f"is {shown(fields)}; expected an object, one request a line")
    name = fields.get("custom_id")
    if not isinstance(name, str) or not name:
        raise _Wrong("invalid_custom_id", f"custom_id is {shown(name)}; expected a name of its own", "custom_id")
    try:
        name.encode()
    except UnicodeEncodeError:
        raise _Wrong("invalid_custom_id", "custom_id has half of a surrogate pair in it", "custom_id") from None
    if (method := fields.get("method")) != "POST":
        raise _Wrong("invalid_method", f'method is {shown(method)}; expected "POST"', "method")
    if (url := fields.get("url")) != endpoint:
        raise _Wrong("mismatched_endpoint", f'url is {shown(url)}; the batch is for "{endpoint}"', "url")
    if not isinstance(body := fields.get("body"), dict):
        raise _Wrong("invalid_body", f"body is {shown(body)}; expected an object", "body")
    return name
