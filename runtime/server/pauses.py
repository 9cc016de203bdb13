"""Work that had to stop and is tried again: soon, and then less and less often."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass

log = logging.getLogger(__name__)

LONGEST_S = 600.0


@dataclass(frozen=True, slots=True)
class _Pause:
    error: Exception
    length_s: float
    until: float  # by the monotonic clock


class Pauses:
    """Of things that have names. Each pause of one is twice as long as the one before, until `forget`."""

    def __init__(self, first_s: float) -> None:
        self._first_s = first_s
        self._pauses: dict[str, _Pause] = {}

    def begin(self, name: str, error: Exception) -> None:
        """Says so the first time."""
        before = self._pauses.get(name)
        length_s = self._first_s if before is None else min(2 * before.length_s, LONGEST_S)
        if before is None:
            log.warning("%s has to stop (%s); it is tried again in %.0f s", name, error, length_s)
        self._pauses[name] = _Pause(error, length_s, time.monotonic() + length_s)

    def forget(self, name: str) -> None:
        """It goes on, or is over."""
        self._pauses.pop(name, None)

    def why(self, name: str, now: float) -> Exception | None:
        """As long as the pause lasts; `now` is by the monotonic clock."""
        pause = self._pauses.get(name)
        return None if pause is None or pause.until <= now else pause.error

    def left_s(self, now: float) -> float | None:
        """Until the next one ends; None if there is none."""
        return min((pause.until - now for pause in self._pauses.values() if pause.until > now), default=None)
