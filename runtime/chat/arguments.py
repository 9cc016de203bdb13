"""A call's arguments: JSON text on the side of the program, one element an argument on the wire.

Only the outermost object is taken apart. Strings are decoded; every other value keeps its source text both ways, so
`1e2` stays `1e2` and a call that the model wrote is written again byte for byte.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

_SPACE = re.compile(r"[ \t\n\r]*")
_STRING = re.compile(r'"(?:[^"\\]|\\.)*"', re.DOTALL)
_CONTROL = re.compile(r"[\x00-\x1f]")
_TYPES = {'"': "string", "{": "object", "[": "array", "t": "boolean", "f": "boolean", "n": "null"}


def _no_constant(name: str) -> object:
    raise ValueError(f"{name} is not JSON")


# Not strict: a raw line break inside a string is accepted. Integers are not converted, so none is too long.
_DECODER = json.JSONDecoder(strict=False, parse_int=len, parse_constant=_no_constant)


@dataclass(frozen=True, slots=True)
class Argument:
    """`text` is what stands between the tags: a string's own characters, the JSON of anything else."""

    key: str
    type: str  # string, number, boolean, null, object, array; what a model writes may be anything, "" if it is missing
    text: str


def split(arguments: str) -> list[Argument] | None:
    """The members of a JSON object, in their order, a repeated key too; None if the text is not a JSON object."""
    try:
        return list(_members(arguments))
    except (ValueError, RecursionError):
        return None


def join(arguments: Iterable[Argument]) -> str:
    """JSON text of an object. A value that is not JSON as its type says stays text, a string."""
    return "{" + ", ".join(f"{_quoted(a.key)}: {_value(a)}" for a in arguments) + "}"


def _members(source: str) -> Iterator[Argument]:
    at = _expect(source, _skip(source, 0), "{")
    if source.startswith("}", at):
        end = at
    else:
        while True:
            if not source.startswith('"', at):
                raise ValueError("a key must be a string")
            key, at = _DECODER.raw_decode(source, at)
            at = _expect(source, _skip(source, at), ":")
            value, end = _DECODER.raw_decode(source, at)
            kind = _TYPES.get(source[at], "number")
            yield Argument(key, kind, value if kind == "string" else source[at:end])
            end = _skip(source, end)
            if not source.startswith(",", end):
                break
            at = _skip(source, end + 1)
    if _expect(source, end, "}") != len(source):
        raise ValueError("text after the object")


def _expect(source: str, at: int, mark: str) -> int:
    """Where the next thing after the mark begins."""
    if not source.startswith(mark, at):
        raise ValueError(f"expected {mark!r} at {at}")
    return _skip(source, at + 1)


def _skip(source: str, at: int) -> int:
    space = _SPACE.match(source, at)
    assert space is not None  # it matches nothing at least
    return space.end()


def _value(argument: Argument) -> str:
    if argument.type in ("", "string"):
        return _quoted(argument.text)
    source = argument.text.strip(" \t\n\r")
    try:
        _, end = _DECODER.raw_decode(source)
    except (ValueError, RecursionError):
        return _quoted(argument.text)
    if end != len(source):
        return _quoted(argument.text)
    return _STRING.sub(_escaped, source)


def _escaped(string: re.Match[str]) -> str:
    """What the decoder here accepts inside a string and a stricter one would not."""
    return _CONTROL.sub(lambda c: f"\\u{ord(c[0]):04x}", string[0])


def _quoted(string: str) -> str:
    return json.dumps(string, ensure_ascii=False)
