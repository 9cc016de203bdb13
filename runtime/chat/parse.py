"""Token ids of an answer to reasoning, content and tool calls, as they arrive.

Ids, not text, decide: a control token that the model spells out letter by letter is text. Text is reported as soon as
its characters are whole, and nothing that was reported is taken back.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable

from deltafin.runtime.chat import wire
from deltafin.runtime.chat.calls import OpenCall
from deltafin.runtime.chat.closing import CutTag, closing
from deltafin.runtime.chat.events import (
    Answer,
    ContentText,
    Event,
    Finish,
    Finished,
    ReasoningText,
    ReasoningWasContent,
    ToolCallArguments,
    ToolCallBegan,
)
from deltafin.runtime.chat.messages import ToolCall
from deltafin.runtime.chat.places import VALUES, Place, closed, opened
from deltafin.runtime.chat.wire import Control, Piece
from deltafin.runtime.tokenizer import Tokenizer, Utf8Stream


def invented_id() -> str:
    """An id for a tool call, unlike any other: the format has none."""
    return f"call_{secrets.token_hex(12)}"


class ChatParser:
    """One answer. `thinking` says what its prompt opened: `think`, or `response`.

    Raises BadRequest for an id outside the vocabulary, and for nothing that a model can write.
    """

    def __init__(self, tokenizer: Tokenizer, thinking: bool, new_id: Callable[[], str] = invented_id) -> None:
        self.ids: list[int] = []  # all of the answer, without an [EOS] or what came after its end
        self._tokenizer = tokenizer
        self._new_id = new_id
        controls = (wire.OPEN, wire.CLOSE, wire.SEP, wire.END_OF_MSG, wire.EOS)
        self._special: dict[int, Control | None] = dict.fromkeys(tokenizer.special_tokens.values())
        self._special |= {tokenizer.special_id(control.name): control for control in controls}
        self._utf8 = Utf8Stream()
        self._place = Place.THINK if thinking else Place.RESPONSE
        self._tag: CutTag | None = None  # control token seen, separator not yet
        self._call: OpenCall | None = None  # the last that was opened
        self._answered = not thinking  # whether there has been a response
        self._reasoning: list[str] = []
        self._thought = 0  # where in `_reasoning` the think element that is open began
        self._content: list[str] = []
        self._calls: list[ToolCall] = []
        self._finish: Finish | None = None
        self._ended_whole = False

    @property
    def done(self) -> bool:
        """Whether the answer has ended, by itself or by `finish`; what is pushed then is passed over."""
        return self._finish is not None

    @property
    def answer(self) -> Answer:
        """All that has been reported."""
        return Answer("".join(self._reasoning), "".join(self._content), tuple(self._calls), self._finish)

    def push(self, token: int) -> list[Event]:
        """What one more id of the answer brings."""
        if self.done:
            return []
        if token not in self._special:
            text = self._utf8.push(self._tokenizer.token_bytes(token))
            self.ids.append(token)
            return self._text(text)
        events = self._text(self._utf8.finish())
        control = self._special[token]
        if control != wire.EOS:
            self.ids.append(token)
        if control == wire.OPEN or control == wire.CLOSE:
            self._tag = CutTag(control)  # one that was never finished is neither text nor a tag
        elif control == wire.SEP and self._tag is not None:
            tag, self._tag = self._tag, None
            events += self._opened(tag.text) if tag.control == wire.OPEN else self._closed(tag.text)
        elif control == wire.END_OF_MSG or control == wire.EOS:
            self._ended_whole = control == wire.END_OF_MSG
            events += self._finished("tool_calls" if self._calls else "stop")
        return events

    def finish(self) -> list[Event]:
        """The answer was cut here: by a limit, a stop string or the user. Nothing, if it had ended."""
        if self.done:
            return []
        return [*self._text(self._utf8.finish()), *self._finished("length")]

    def closing(self) -> list[Piece]:
        """What makes a whole message of `ids`: the end of a tag that was cut, closing tags, the end marker.

        Nothing if the model ended it. What was cut becomes whole there, though not in `answer`: a call, or a tag that
        was about to close a response inside `think`.
        """
        return [] if self._ended_whole else closing(self._place, self._tag, self._answered)

    def _text(self, text: str) -> list[Event]:
        if not text:
            return []
        if self._tag is not None:
            self._tag.parts.append(text)
        elif self._place is Place.THINK:
            self._reasoning.append(text)
            return [ReasoningText(text)]
        elif self._place is Place.RESPONSE:
            self._content.append(text)
            return [ContentText(text)]
        elif self._place in VALUES:
            assert self._call is not None
            self._call.add(text)
        return []  # between elements it belongs to none

    def _opened(self, tag: str) -> list[Event]:
        name, attributes = wire.read_tag(tag)
        place = opened(self._place, name)
        if place is None:
            return []
        self._end_value()
        if place is Place.THINK and self._place is not Place.THINK:
            self._thought = len(self._reasoning)
        elif place is Place.CALL:
            self._call = OpenCall(attributes)
        elif place is Place.ARGUMENT and self._call is not None:
            self._call.begin_argument(attributes)
        elif place is Place.JSON and self._call is not None:
            self._call.begin_json()
        self._enter(place)
        return []

    def _closed(self, tag: str) -> list[Event]:
        name, _ = wire.read_tag(tag)
        place = closed(self._place, name)
        if place is None:
            return []
        self._end_value()
        events: list[Event] = []
        if name == "call":
            events = self._called()
        elif name == "response":
            self._answered = True
            events = self._reasoning_was_content()
        self._enter(place)
        return events

    def _enter(self, place: Place) -> None:
        self._answered |= place in (Place.RESPONSE, Place.TOOLS)
        self._place = place

    def _end_value(self) -> None:
        if self._place in VALUES and self._call is not None:
            self._call.end_value()

    def _called(self) -> list[Event]:
        assert self._call is not None
        arguments = self._call.arguments()
        if arguments is None:
            return []
        call = ToolCall(self._call.name, arguments, call_id := self._new_id())
        index = len(self._calls)
        self._calls.append(call)
        return [ToolCallBegan(index, call_id, call.name), ToolCallArguments(index, arguments)]

    def _reasoning_was_content(self) -> list[Event]:
        if self._place is not Place.THINK:
            return []
        text = "".join(self._reasoning[self._thought :])
        del self._reasoning[self._thought :]
        if not text:
            return []
        self._content.append(text)
        return [ReasoningWasContent(text)]

    def _finished(self, reason: Finish) -> list[Event]:
        self._finish = reason
        return [Finished(reason)]


def parse(ids: Iterable[int], tokenizer: Tokenizer, thinking: bool, new_id: Callable[[], str] = invented_id) -> Answer:
    """A whole answer at once."""
    parser = ChatParser(tokenizer, thinking, new_id)
    for token in ids:
        parser.push(token)
    parser.finish()
    return parser.answer
