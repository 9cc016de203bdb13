"""Messages that are typed, or come line by line from a pipe."""

from __future__ import annotations

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
        self._interrupted = False  # by the last thing that was typed
        if self.terminal:
            try:
                import readline  # noqa: F401  (arrow keys, and earlier messages, in `input`)
            except ImportError:
                pass

    def message(self, prompt: str = "> ") -> str:
        """The next one.

        Raises Leave at the end of input, KeyboardInterrupt for a second Ctrl-C in a row, BadRequest for no text at all.
        """
        while True:
            try:
                text = self._message(prompt)
            except KeyboardInterrupt:
                if self._interrupted or not self.terminal:
                    raise
                self._interrupted = True
                click.echo("\n(Ctrl-C again, Ctrl-D or /exit leaves)", err=True)
                continue
            except UnicodeDecodeError as e:
                raise BadRequest(f"what was typed is not {e.encoding.upper()} (byte {e.start})") from None
            self._interrupted = False
            return text

    def _message(self, prompt: str) -> str:
        line = self._line(prompt)
        if line.strip() == BLOCK:
            lines: list[str] = []
            while (line := self._line("... ")).strip() != BLOCK:
                lines.append(line)
            return "\n".join(lines)
        lines = [line]
        while lines[-1].endswith("\\"):
            lines[-1] = lines[-1][:-1]
            lines.append(self._line("... "))
        return "\n".join(lines)

    def _line(self, prompt: str) -> str:
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
