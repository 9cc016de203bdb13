"""Messages as OpenAI's API has them, JSON already read, to messages of ours. Whatever is wrong is named by its path."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from reprlib import repr as short

from deltafin.errors import BadRequest
from deltafin.runtime.chat.messages import (
    AssistantMessage,
    JsonObject,
    Message,
    SystemMessage,
    ToolCall,
    ToolResult,
    UserMessage,
)
from deltafin.runtime.chat.wire import spaced_json

# What would change the answer and is not there; null, false and empty mean that it was not asked for.
_UNSUPPORTED = {
    "audio": "audio is not supported",
    "function_call": "use tool_calls",
    "partial": "an answer cannot be begun for the model",
    "prefix": "an answer cannot be begun for the model",
}


def from_openai(messages: object, field: str = "messages") -> tuple[Message, ...]:
    """Raises BadRequest, which says which field is wrong and what it should be. Fields that mean nothing here, such
    as `refusal` or `annotations`, are passed over."""
    return tuple(_message(_object(m, at), at) for m, at in _items(messages, field))


def _message(message: JsonObject, at: str) -> Message:
    for key, why in _UNSUPPORTED.items():
        if message.get(key):
            raise BadRequest(f"{at}.{key}: {why}")
    content = _content(message.get("content"), f"{at}.content")
    role = message.get("role")
    if role == "tool":
        call_id = message.get("tool_call_id")
        call_id = message.get("id") if call_id is None else call_id
        tool = _string(message, "tool", at) or _string(message, "name", at)
        return ToolResult(content, None if call_id is None else str(call_id), tool)
    name = _string(message, "name", at)
    if role == "user":
        return UserMessage(content, name)
    if role in ("system", "developer"):
        return SystemMessage(content, name, tools_of(message.get("tools"), f"{at}.tools"))
    if role == "assistant":
        where = "reasoning" if message.get("reasoning_content") is None else "reasoning_content"
        calls = _items(message.get("tool_calls"), f"{at}.tool_calls")
        reasoning = _string(message, where, at)
        return AssistantMessage(content, reasoning, tuple(_call(_object(c, where), where) for c, where in calls), name)
    raise BadRequest(f"{at}.role is {short(role)}; expected system, developer, user, assistant or tool")


def tools_of(tools: object, field: str = "tools") -> tuple[JsonObject, ...]:
    """Declarations of tools; null is none."""
    return tuple(_object(tool, at) for tool, at in _items(tools, field))


def _content(content: object, at: str) -> str | tuple[str, ...]:
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, Sequence):
        raise BadRequest(f"{at} is {_kind(content)}; expected text or a list of parts")
    return tuple(_part(_object(part, where), where) for part, where in _items(content, at))


def _part(part: JsonObject, at: str) -> str:
    if part.get("type") != "text":
        raise BadRequest(f"{at}.type is {short(part.get('type'))}; only text is supported")
    if not isinstance(part.get("text"), str):
        raise BadRequest(f"{at}.text is {_kind(part.get('text'))}; expected text")
    return _string(part, "text", at)


def _call(call: JsonObject, at: str) -> ToolCall:
    if call.get("type", "function") != "function":
        raise BadRequest(f"{at}.type is {short(call.get('type'))}; expected function")
    inner = call.get("function")
    function, where = (call, at) if inner is None else (_object(inner, f"{at}.function"), f"{at}.function")
    name = _string(function, "name", where)
    if not name:
        raise BadRequest(f"{where}.name is missing; a call must say which tool")
    call_id = call.get("id")
    arguments = _arguments(function.get("arguments"), f"{where}.arguments")
    return ToolCall(name, arguments, None if call_id is None else str(call_id))


def _arguments(arguments: object, at: str) -> str:
    if arguments is None or isinstance(arguments, str):
        return arguments or ""
    if not isinstance(arguments, Mapping):
        raise BadRequest(f"{at} is {_kind(arguments)}; expected an object, or its JSON text")
    return spaced_json(arguments, at)


def _items(value: object, at: str) -> list[tuple[object, str]]:
    """What a list holds, each with its path; null is an empty list."""
    if value is None:
        return []
    if isinstance(value, str | bytes) or not isinstance(value, Sequence):
        raise BadRequest(f"{at} is {_kind(value)}; expected a list")
    return [(item, f"{at}[{i}]") for i, item in enumerate(value)]


def _object(value: object, at: str) -> JsonObject:
    if not isinstance(value, Mapping):
        raise BadRequest(f"{at} is {_kind(value)}; expected an object")
    return value


def _string(message: JsonObject, key: str, at: str) -> str:
    value = message.get(key)
    if value is None:
        return ""
    if not isinstance(value, str):
        raise BadRequest(f"{at}.{key} is {_kind(value)}; expected text")
    return value


def _kind(value: object) -> str:
    """What JSON calls it."""
    match value:
        case None:
            return "null"
        case bool():
            return "a boolean"
        case int() | float():
            return "a number"
        case str():
            return "text"
        case Mapping():
            return "an object"
        case Sequence():
            return "a list"
    return type(value).__name__
