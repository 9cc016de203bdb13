"""A line for a person: one, whatever the text in it came from."""

from __future__ import annotations


def one_line(text: str) -> str:
    """The text in a single line; what would move a terminal's cursor, colour or hide something is written as escapes.

    Names of files, repositories and servers' words come from anywhere.
    """
    text = " ".join(text.splitlines())
    return text if text.isprintable() else "".join(c if c.isprintable() else _escaped(c) for c in text)


def _escaped(character: str) -> str:
    return character.encode("unicode_escape").decode()
