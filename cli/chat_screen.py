"""How an answer of a chat looks: reasoning apart from the answer, tool calls as JSON."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING

from deltafin.cli.answering import Screen, column_after, harmless

if TYPE_CHECKING:
    from deltafin.runtime.chat import ToolCall

_DIM, _PLAIN = "\x1b[2m", "\x1b[0m"


class ChatScreen(Screen):
    """On a terminal reasoning is dim and stands before the answer; elsewhere it goes to stderr, beside the result."""

    def __init__(self, *, quiet: bool, hide_thinking: bool) -> None:
        super().__init__(quiet=quiet)
        self._hide = hide_thinking or quiet
        self._terminal = sys.stdout.isatty()
        self._thinking = False  # what is on the screen now

    def reasoning(self, text: str) -> None:
        if self._hide or not text:
            return
        if not self._terminal:
            sys.stderr.write(harmless(text, sys.stderr))
            sys.stderr.flush()
            self.error_column = column_after(text, self.error_column)
        elif self._thinking:
            self.write(text)
        else:
            self._put(_DIM)
            self.write(text)
        self._thinking = True

    def content(self, text: str) -> None:
        if text:
            self._end_thinking()
            self.write(text)

    def tool_call(self, call: ToolCall) -> None:
        self._end_thinking()
        self._break()
        self.write(_line(call) + "\n")

    def end(self) -> None:
        """The answer is over, or was interrupted."""
        self._end_thinking()
        self._break()

    def _end_thinking(self) -> None:
        if not self._thinking:
            return
        self._thinking = False
        if self._terminal:
            self._put(_PLAIN)
            self.write("\n\n")
        else:
            sys.stderr.write("\n")
            sys.stderr.flush()
            self.error_column = 0

    def _break(self) -> None:
        if self.column:
            self.write("\n")


def _line(call: ToolCall) -> str:
    """JSON, with arguments as the object that they are, or as the text that the model wrote instead."""
    try:
        line = _json(call.name, json.loads(call.arguments) if call.arguments else {})
    except (ValueError, RecursionError):  # no JSON, or NaN and infinity, which are none either
        line = _json(call.name, call.arguments)
    # An escaped half of a surrogate pair is JSON, but has no bytes.
    return line.encode("utf-8", "backslashreplace").decode()


def _json(name: str, arguments: object) -> str:
    return json.dumps({"tool": name, "arguments": arguments}, ensure_ascii=False, allow_nan=False)
