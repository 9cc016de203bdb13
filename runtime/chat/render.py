"""A conversation to the pieces, and the ids, that the model is to read."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from reprlib import repr as short

from deltafin.errors import BadRequest
from deltafin.runtime.chat import arguments, wire
from deltafin.runtime.chat.messages import (
    AssistantMessage,
    JsonObject,
    Message,
    SystemMessage,
    ToolCall,
    ToolResult,
    UserMessage,
)
from deltafin.runtime.chat.results import in_call_order, tool_of
from deltafin.runtime.chat.wire import Control, Piece
from deltafin.runtime.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Conversation:
    """Messages and how the next one is asked for. Raises BadRequest, which names what makes no sense.

    `effort` is low, high, max or None for none said, and counts only where the model thinks. `tool_choice` and
    `response_format` are as OpenAI's API has them; auto, a tool by name and text ask for nothing in words.
    """

    messages: Sequence[Message] = ()
    tools: Sequence[JsonObject] = ()
    thinking: bool = True
    effort: str | None = None
    tool_choice: str | JsonObject | None = None
    response_format: str | JsonObject | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "messages", tuple(self.messages))
        object.__setattr__(self, "tools", tuple(self.tools))
        if self.thinking and self.effort is not None and self.effort not in wire.EFFORTS:
            raise BadRequest(f"effort is {short(self.effort)}; expected {', '.join(wire.EFFORTS)}")
        _check_tool_choice(self.tool_choice)
        _response_kind(self.response_format)


@dataclass(frozen=True, slots=True)
class Prompt:
    """What is fed for the next answer, and where a state is worth keeping.

    `preamble` counts the ids of declared tools, effort and leading system messages: what conversations share.
    `ends` counts, for each message, the ids up to its end.
    """

    ids: tuple[int, ...]
    preamble: int
    ends: tuple[int, ...]


def pieces(conversation: Conversation, *, opening: bool = True) -> list[Piece]:
    """All of a conversation; `opening` begins the assistant's next message."""
    return _flat([_head(conversation), *_bodies(conversation), _tail(conversation, opening)])


def follow_up(conversation: Conversation, after: int) -> list[Piece]:
    """The pieces that follow the first `after` messages, up to the opening of the next answer.

    They join to `pieces(conversation)` if what came before ended with its last message, without words about
    `tool_choice` or `response_format`: those stay where they were said, and the format itself says them only last.
    """
    assert 0 <= after <= len(conversation.messages)
    # Consecutive results are put into the order of their calls, so they must come together.
    assert after == 0 or not all(isinstance(m, ToolResult) for m in conversation.messages[after - 1 : after + 1][:2])
    head = [_head(conversation)] if after == 0 else []
    return _flat([*head, *_bodies(conversation)[after:], _tail(conversation, opening=True)])


def encode(pieces: Iterable[Piece], tokenizer: Tokenizer) -> list[int]:
    """Ids of pieces, each by itself."""
    ids: list[int] = []
    for piece in pieces:
        if isinstance(piece, Control):
            ids.append(tokenizer.special_id(piece.name))
        else:
            ids += tokenizer.encode(piece)
    return ids


def prompt(conversation: Conversation, tokenizer: Tokenizer) -> Prompt:
    ids = encode(_head(conversation), tokenizer)
    preamble, ends = len(ids), []
    for message, body in zip(conversation.messages, _bodies(conversation), strict=True):
        leading = len(ids) == preamble
        ids += encode(body, tokenizer)
        ends.append(len(ids))
        if leading and isinstance(message, SystemMessage):
            preamble = len(ids)
    ids += encode(_tail(conversation, opening=True), tokenizer)
    return Prompt(tuple(ids), preamble, tuple(ends))


def _head(conversation: Conversation) -> list[Piece]:
    found: list[Piece] = []
    if conversation.tools:
        found += _note("tool-declare", wire.TOOLS.format(tools=wire.compact_json(conversation.tools, "tools")))
    if conversation.thinking and conversation.effort is not None:
        found += _note("thinking-effort", wire.EFFORT.format(effort=conversation.effort))
    return found


def _bodies(conversation: Conversation) -> list[list[Piece]]:
    """The pieces of each message, in the order in which the model reads them."""
    bodies: list[list[Piece]] = []
    calls: Sequence[ToolCall] = ()
    count = 0  # results since the assistant last spoke
    messages = conversation.messages
    while len(bodies) < len(messages):
        at = len(bodies)
        message = messages[at]
        if isinstance(message, ToolResult):
            run = _run(messages, at)
            for place, result in enumerate(in_call_order(run, calls), start=at):
                count += 1
                tool = tool_of(result, count, calls, f"messages[{place}]")
                bodies.append(_message(result.content, "tool", ("tool", tool), ("index", str(count))))
            continue
        if isinstance(message, AssistantMessage):
            calls, count = message.tool_calls, 0
            bodies.append(_assistant(message, conversation.thinking))
        elif isinstance(message, SystemMessage) and message.tools:
            tools = wire.compact_json(list(message.tools), f"messages[{at}].tools")
            bodies.append(_note("tool-declare", wire.MORE_TOOLS.format(tools=tools)))
        else:
            role = "user" if isinstance(message, UserMessage) else "system"
            bodies.append(_message(message.content, role, *_name(message.name)))
    return bodies


def _run(messages: Sequence[Message], at: int) -> list[ToolResult]:
    run: list[ToolResult] = []
    for message in messages[at:]:
        if not isinstance(message, ToolResult):
            break
        run.append(message)
    return run


def _tail(conversation: Conversation, opening: bool) -> list[Piece]:
    found: list[Piece] = []
    if isinstance(conversation.tool_choice, str) and conversation.tool_choice in wire.TOOL_CHOICES:
        found += _note("tool-choice", wire.TOOL_CHOICES[conversation.tool_choice])
    kind = _response_kind(conversation.response_format)
    if kind != "text":
        schema = ""
        if kind == "json_schema":
            text = wire.compact_json(_schema(conversation.response_format), "response_format.json_schema")
            schema = wire.SCHEMA.format(schema=text)
        found += _note("response-format", wire.RESPONSE_FORMAT.format(kind=kind) + schema)
    if opening:
        found += wire.open_tag("message", ("role", "assistant"))
        found += wire.open_tag("think" if conversation.thinking else "response")
    return found


def _assistant(message: AssistantMessage, thinking: bool) -> list[Piece]:
    found = wire.open_tag("message", ("role", "assistant"), *_name(message.name))
    if thinking:
        found += wire.element("think", message.reasoning)
    found += wire.element("response", message.content)
    if message.tool_calls:
        found += wire.open_tag("tools")
        for index, call in enumerate(message.tool_calls, start=1):
            found += wire.open_tag("call", ("tool", call.name), ("index", str(index)))
            found += [*_arguments(call.arguments), *wire.close_tag("call")]
        found += wire.close_tag("tools")
    return [*found, *wire.close_tag("message"), wire.END_OF_MSG]


def _arguments(text: str) -> list[Piece]:
    split = arguments.split(text) if text else []
    if split is None:
        return wire.element("json", text, ("type", "object"))
    return _flat([wire.element("argument", a.text, ("key", a.key), ("type", a.type)) for a in split])


def _message(content: str | Sequence[str], role: str, *attributes: tuple[str, str]) -> list[Piece]:
    return [*wire.element("message", content, ("role", role), *attributes), wire.END_OF_MSG]


def _note(kind: str, body: str) -> list[Piece]:
    """A message that the format itself writes."""
    return _message(body, "system", ("type", kind))


def _name(name: str) -> list[tuple[str, str]]:
    return [("name", name)] if name else []


def _check_tool_choice(choice: str | JsonObject | None) -> None:
    if choice is None or choice in ("auto", *wire.TOOL_CHOICES):
        return
    if not isinstance(choice, Mapping) or choice.get("type") != "function":
        raise BadRequest(f"tool_choice is {short(choice)}; expected auto, none, required or a function by name")


def _response_kind(wanted: str | JsonObject | None) -> str:
    kind = wanted.get("type") if isinstance(wanted, Mapping) else wanted
    if kind is None and not isinstance(wanted, Mapping):
        return "text"
    if not isinstance(kind, str) or kind not in ("text", "json_object", "json_schema"):
        raise BadRequest(f"response_format is {short(kind)}; expected text, json_object or json_schema")
    return kind


def _schema(wanted: str | JsonObject | None) -> object:
    holder = wanted.get("json_schema") if isinstance(wanted, Mapping) else None
    if holder is None:
        return None
    if not isinstance(holder, Mapping):
        raise BadRequest(f"response_format.json_schema is {short(holder)}; expected an object")
    return holder.get("schema", holder.get("json_schema", holder))


def _flat(parts: Iterable[Iterable[Piece]]) -> list[Piece]:
    return [piece for part in parts for piece in part]
