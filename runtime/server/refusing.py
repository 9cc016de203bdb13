"""Why a request is not taken, or given up by the server."""

from __future__ import annotations

from deltafin.errors import DeltafinError


class Full(DeltafinError):
    """So many requests wait already that one more is not taken."""

    def __init__(self, waiting: int, retry_after_s: int) -> None:
        super().__init__(f"{waiting} requests are waiting already; try again in {retry_after_s} s")
        self.retry_after_s = retry_after_s


class Stopped(DeltafinError):
    """The server is shutting down, or its engine has failed for good."""
