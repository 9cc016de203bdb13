"""What the chat format looks like: control tokens, tags, and the sentences that the format itself writes.

A conversation is a list of pieces, text or one control token each. Every piece is tokenised by itself, so where one
ends decides the ids: a tag is its control token, its name, four pieces an attribute, and the separator.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass

from deltafin.errors import BadRequest


@dataclass(frozen=True, slots=True)
class Control:
    """One control token, by name. Text never becomes one, whatever it spells."""

    name: str


Piece = Control | str

OPEN = Control("<|open|>")
CLOSE = Control("<|close|>")
SEP = Control("<|sep|>")
END_OF_MSG = Control("<|end_of_msg|>")
EOS = Control("[EOS]")

EFFORTS = ("low", "high", "max")  # "medium" stands in the sentence below, and the format refuses it

EFFORT = (
    "`thinking_effort` guides on how much to think in your thinking channel (not including the response channel), "
    "supported values include `low`, `medium`, `high`, and `max`.\n"
    "Now the system is invoked with `thinking_effort={effort}`."
)
TOOLS = "# Tools\nHere are the available tools, described in JSONSchema.\n\n```json\n{tools}\n```"
MORE_TOOLS = (
    "## New Tools Available\n"
    "The system dynamically extends the toolset via lazy-loading.\n"
    "You have access to all existing and extended tools.\n"
    "Here are the specs for the extended tools.\n\n```json\n{tools}\n```"
)
TOOL_CHOICES = {
    "required": "The system is invoked with `tool_choice=required`.\nYou MUST call tools in the next message.",
    "none": "The system is invoked with `tool_choice=none`.\nYou MUST NOT call any tools in the next message.",
}
RESPONSE_FORMAT = (
    "The system is invoked with `response_format={kind}`.\n"
    "Your response must be raw JSON data without markdown code blocks (```json) or any additional formatting."
)
SCHEMA = "\nThe JSON data must match the following schema:\n```json\n{schema}\n```"

# A key follows a blank: looked for only there, so that a long tag without one is read once, not once a letter.
_ATTRIBUTE = re.compile(r'\s([^\s="]+)="([^"]*)"')
_NAME = re.compile(r"\s*(\S*)")


def text(content: str | Sequence[str]) -> list[Piece]:
    """Each part is a piece; an empty one is none."""
    parts = [content] if isinstance(content, str) else content
    return [part for part in parts if part]


def open_tag(name: str, *attributes: tuple[str, str]) -> list[Piece]:
    pieces: list[Piece] = [OPEN, name]
    for key, value in attributes:
        pieces += [f" {key}", '="', *text(_escaped(value)), '"']
    return [*pieces, SEP]


def close_tag(name: str) -> list[Piece]:
    return [CLOSE, name, SEP]


def element(name: str, content: str | Sequence[str], *attributes: tuple[str, str]) -> list[Piece]:
    return [*open_tag(name, *attributes), *text(content), *close_tag(name)]


def read_tag(tag: str) -> tuple[str, dict[str, str]]:
    """Name and attributes of what stood between a control token and the separator; what is malformed is left out."""
    name = _NAME.match(tag)
    assert name is not None  # it matches nothing at least
    attributes: dict[str, str] = {}
    for key, value in _ATTRIBUTE.findall(tag, name.end()):
        attributes.setdefault(key, _unescaped(value))
    return name[1], attributes


def compact_json(value: object, at: str) -> str:
    """As tools and schemas are declared: keys sorted by code point. Raises BadRequest, which names `at`."""
    return _json(value, at, (",", ":"), sort=True)


def spaced_json(value: object, at: str) -> str:
    """As arguments are written: keys as they came. Raises BadRequest, which names `at`."""
    return _json(value, at, (", ", ": "), sort=False)


def _json(value: object, at: str, separators: tuple[str, str], *, sort: bool) -> str:
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False, sort_keys=sort, separators=separators)
    except (TypeError, ValueError) as e:
        raise BadRequest(f"{at} is not JSON ({e})") from None
    except RecursionError:
        raise BadRequest(f"{at} is nested too deeply") from None


def _escaped(value: str) -> str:
    return value.replace("&", "&amp;").replace('"', "&quot;")


def _unescaped(value: str) -> str:
    # In this order: "&amp;quot;" was "&quot;".
    return value.replace("&quot;", '"').replace("&amp;", "&")
