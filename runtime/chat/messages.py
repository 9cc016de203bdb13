"""What a conversation is made of, free of any wire or API."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from reprlib import repr as short

from deltafin.errors import BadRequest
from deltafin.runtime.chat.wire import EFFORTS

# Text, or several that are tokenised each by itself.
Content = str | Sequence[str]

# A JSON object as Python holds it, such as the declaration of a tool.
JsonObject = Mapping[str, object]


@dataclass(frozen=True, slots=True)
class ToolCall:
    """`arguments` is the JSON text of an object; "" means none, any other text is passed on as it is."""

    name: str
    arguments: str = ""
    id: str | None = None  # of the program's making; the model never sees it


@dataclass(frozen=True, slots=True)
class SystemMessage:
    """With `tools` it declares further tools, and content and name are left out."""

    content: Content = ""
    name: str = ""
    tools: Sequence[JsonObject] = ()


@dataclass(frozen=True, slots=True)
class UserMessage:
    content: Content = ""
    name: str = ""


@dataclass(frozen=True, slots=True)
class AssistantMessage:
    content: Content = ""
    reasoning: str = ""
    tool_calls: Sequence[ToolCall] = ()
    name: str = ""


@dataclass(frozen=True, slots=True)
class ToolResult:
    """What a call gave. `call_id` says which; where it says nothing, `tool` or its place among the results does."""

    content: Content = ""
    call_id: str | None = None
    tool: str = ""


Message = SystemMessage | UserMessage | AssistantMessage | ToolResult


def thinking_of(effort: str | None, field: str = "reasoning_effort") -> tuple[bool, str | None]:
    """(thinking, effort) of a `Conversation` for what a user asks for: none, low, high, max; by default max.

    Raises BadRequest, which names the field, for anything else: K3 has no medium.
    """
    if effort is None:
        return True, "max"
    if effort == "none":
        return False, None
    if effort not in EFFORTS:
        raise BadRequest(f"{field} is {short(effort)}; expected none, {', '.join(EFFORTS)}")
    return True, effort
