"""Whose result is it? The wire names a tool and counts; an API names the call by an id."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from deltafin.errors import BadRequest
from deltafin.runtime.chat.messages import ToolCall, ToolResult


def in_call_order(run: Sequence[ToolResult], calls: Sequence[ToolCall]) -> list[ToolResult]:
    """Consecutive results in the order of their calls and with the calls' names; as they are if any id is unknown."""
    places: dict[str, int] = {}
    for place, call in enumerate(calls):
        if call.id is not None:
            places.setdefault(call.id, place)
    resolved: list[tuple[int, ToolResult]] = []
    for result in run:
        if result.call_id is None or result.call_id not in places:
            return list(run)
        place = places[result.call_id]
        resolved.append((place, replace(result, tool=calls[place].name)))
    return [result for _, result in sorted(resolved, key=lambda found: found[0])]


def tool_of(result: ToolResult, count: int, calls: Sequence[ToolCall], at: str) -> str:
    """The tool that gave the `count`-th result since the assistant spoke, counted from 1."""
    if result.tool:
        return result.tool
    if count <= len(calls):
        return calls[count - 1].name
    raise BadRequest(
        f"{at} is a tool's result, and nothing says which tool's: "
        f"it needs a name, or a tool_call_id of the assistant message before it"
    )
