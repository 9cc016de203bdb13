"""Why a request is not taken, or given up by the server."""

from __future__ import annotations

from deltafin.errors import DeltafinError
from deltafin.runtime.openai import CHAT, BadBody, Task


class Full(DeltafinError):
    """So many requests wait already that one more is not taken."""

    def __init__(self, waiting: int, retry_after_s: int) -> None:
        super().__init__(f"{waiting} requests are waiting already; try again in {retry_after_s} s")
        self.retry_after_s = retry_after_s


def too_long(task: Task, most_tokens: int) -> BadBody:
    """Memory will never hold it."""
    return BadBody(
        f"prompt and answer may come to {task.tokens} tokens; this server has memory for {most_tokens}. Ask for fewer "
        "new tokens, or start it with more --ram",
        "messages" if task.endpoint == CHAT else "prompt",
        "context_length_exceeded",
    )


class Stopped(DeltafinError):
    """The server is shutting down, or its engine has failed for good."""
