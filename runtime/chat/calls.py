"""A tool call while it is being written."""

from __future__ import annotations

from collections.abc import Mapping

from deltafin.runtime.chat.arguments import Argument, join


class OpenCall:
    """Gathers one call's values; `arguments` says what they come to once the call is closed."""

    def __init__(self, attributes: Mapping[str, str]) -> None:
        self.name = attributes.get("tool", "")
        self._sound = True
        self._arguments: list[Argument] = []
        self._json: str | None = None
        self._value: tuple[str, str] | None = None  # key and type of the argument being written; None in a json body
        self._text: list[str] = []

    def begin_argument(self, attributes: Mapping[str, str]) -> None:
        self._sound &= "key" in attributes
        self._value = attributes.get("key", ""), attributes.get("type", "")
        self._text = []

    def begin_json(self) -> None:
        self._value = None
        self._text = []

    def add(self, text: str) -> None:
        self._text.append(text)

    def end_value(self) -> None:
        text = "".join(self._text)
        if self._value is not None:
            self._arguments.append(Argument(*self._value, text))
        elif self._json is None:
            self._json = text

    def arguments(self) -> str | None:
        """JSON text, of the json body if there is one; None if this is no call: nameless, or an argument without key.

        A json body holds whatever the model wrote, JSON or not.
        """
        if not self.name or not self._sound:
            return None
        return self._json or join(self._arguments)
