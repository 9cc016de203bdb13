"""Messages that are typed, or come line by line from a pipe."""

from __future__ import annotations

import io
import sys

import click

from deltafin.errors import BadRequest

BLOCK = '"""'


class Leave(Exception):
    """Nothing more will be typed."""


class MessageReader:
    """Reads messages of one line or several.

    A line that ends with a backslash goes on in the next; what stands between two lines of three quotes is one message.
    """

    def __init__(self) -> None:
        self.terminal = sys.stdin is not None and sys.stdin.isatty()
        self.quoted = False  # whether the last message stood between quotes, where / begins no command
        self._interrupted = False  # by the last thing that was typed
        if isinstance(sys.stdin, io.TextIOWrapper):
            sys.stdin.reconfigure(encoding="utf-8", errors="surrogateescape")  # whatever the locale says; see `_line`
        if self.terminal:
            try:
                import readline  # noqa: F401  (arrow keys, and earlier messages, in `input`)
            except ImportError:
                pass

    def message(self, prompt: str = "> ") -> str:
        """The next one.

        Raises Leave at the end of input, KeyboardInterrupt for a second Ctrl-C in a row, BadRequest for what is not
        UTF-8.
        """
        while True:
            try:
                text = self._message(prompt)
            except KeyboardInterrupt:
                if self._interrupted or not self.terminal:
                    raise
                self._interrupted = True
                click.echo("\n(Ctrl-C again or Ctrl-D leaves)", err=True)
                continue
            self._interrupted = False
            return text

    def _message(self, prompt: str) -> str:
        line: str | None = self._line(prompt)
        lines: list[str] = []
        self.quoted = line is not None and line.strip() == BLOCK
        if self.quoted:
            while (line := self._next_line()) is not None and line.strip() != BLOCK:
                lines.append(line)
            return "\n".join(lines)
        while line is not None and line.endswith("\\"):
            lines.append(line[:-1])
            line = self._next_line()
        return "\n".join(lines if line is None else [*lines, line])

    def _next_line(self) -> str | None:
        """Of the same message; None at the end of a file or a pipe, which ends the message, too."""
        try:
            return self._line("... ")
        except Leave:
            if self.terminal:
                raise  # whoever leaves there has not finished
            return None

    def _line(self, prompt: str) -> str:
        line = self._read(prompt)
        try:
            line.encode()
        except UnicodeEncodeError as e:
            raise BadRequest(f"{line[: e.start][-20:]!r} is followed by a byte that is not UTF-8") from None
        return line

    def _read(self, prompt: str) -> str:
        if sys.stdin is None:
            raise Leave
        if self.terminal and sys.stdout.isatty():
            try:
                return input(prompt)
            except EOFError:
                click.echo(err=True)
                raise Leave from None
        if self.terminal:
            click.echo(prompt, nl=False, err=True)
        line = sys.stdin.readline()
        if not line:
            raise Leave
        return line.removesuffix("\n")
