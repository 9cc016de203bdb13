"""What a parser reports while an answer arrives, and the whole of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from deltafin.runtime.chat.messages import AssistantMessage, ToolCall

# The model ended its message, with or without calling tools, or was cut.
Finish = Literal["stop", "tool_calls", "length"]


@dataclass(frozen=True, slots=True)
class ReasoningText:
    text: str


@dataclass(frozen=True, slots=True)
class ContentText:
    text: str


@dataclass(frozen=True, slots=True)
class ReasoningWasContent:
    """The model answered where it was to think: `text`, the end of the reasoning reported so far, is the answer."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolCallBegan:
    """A whole call: its arguments follow at once, since one that is never closed is none."""

    index: int  # from 0
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class ToolCallArguments:
    index: int
    text: str  # JSON of an object, or what the model wrote instead


@dataclass(frozen=True, slots=True)
class Finished:
    """The last event."""

    reason: Finish


Event = ReasoningText | ContentText | ReasoningWasContent | ToolCallBegan | ToolCallArguments | Finished


@dataclass(frozen=True, slots=True)
class Answer:
    reasoning: str
    content: str
    tool_calls: tuple[ToolCall, ...]
    finish: Finish | None  # None while it is under way

    def message(self) -> AssistantMessage:
        """The answer as a message of the conversation."""
        return AssistantMessage(self.content, self.reasoning, self.tool_calls)
