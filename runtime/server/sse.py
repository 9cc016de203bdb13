"""Server-sent events: the lines of a stream."""

from __future__ import annotations

from deltafin.runtime.openai import write_line

DONE = b"data: [DONE]\n\n"


def data(value: object) -> bytes:
    """An event that clients are shown."""
    return b"data: " + write_line(value) + b"\n"


def comment(value: object) -> bytes:
    """A line that clients skip; it keeps the connection from falling silent."""
    return b": " + write_line(value) + b"\n"
