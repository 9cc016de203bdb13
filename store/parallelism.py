"""How many transfers at once a line is given: as many as make it faster, found by trying."""

from __future__ import annotations

from dataclasses import dataclass

START, LEAST, MOST = 4, 1, 16

_SETTLE_S = 1.0  # after a change: connections open, and transfers begun before it end
_MEASURE_S = 3.0
_TRY_AGAIN_S = 60.0  # lines change, in the evening for instance
_GAIN = 1.1  # twice as many transfers must bring so much more
_KEEP = 0.97  # of the rate that half as many must still bring


@dataclass(frozen=True, slots=True)
class _Trial:
    """Another number of transfers is tried; these are what it is compared with."""

    before: int
    rate: float


class Parallelism:
    """The number of transfers to have under way, from the bytes that have arrived so far.

    It starts with a few, doubles while that brings at least a tenth more, and halves while that costs next to
    nothing; then it rests for a minute and tries again. A server that throttles halves it at once, and nothing more is
    tried until the minute is over. Deterministic: it knows the time only from its caller. For one thread.
    """

    def __init__(self, now: float) -> None:
        self.transfers = START
        self._trial: _Trial | None = None
        self._up = True  # what to try next
        self._turned = False  # both ways have been tried since the last rest
        self._rest_until = now
        self._throttled = 0
        self._from = now
        self._nbytes: int | None = None  # when the measurement began; None while a change settles

    def observe(self, now: float, nbytes: int, throttled: int) -> int:
        """Bytes that have arrived and answers 429 and 503, both since the start; returns the number to have now."""
        if throttled > self._throttled:
            self._throttled = throttled
            self._shed(now, nbytes)
        elif now - self._from >= _SETTLE_S and self._nbytes is None:
            self._from, self._nbytes = now, nbytes
        elif self._nbytes is not None and now - self._from >= _MEASURE_S:
            self._judge(now, nbytes, (nbytes - self._nbytes) / (now - self._from))
        return self.transfers

    def disturbed(self, now: float, nbytes: int) -> None:
        """What is being measured says nothing of the line: the server asks to wait, or there is little to fetch."""
        self._begin(now, nbytes)

    def _begin(self, now: float, nbytes: int) -> None:
        self._from, self._nbytes = now, None

    def _judge(self, now: float, nbytes: int, rate: float) -> None:
        if (trial := self._trial) is None:
            if now >= self._rest_until:
                self._try(now, rate)
        else:
            self._trial = None
            grown = self.transfers > trial.before
            if rate >= trial.rate * (_GAIN if grown else _KEEP):
                self._try(now, rate)  # further the same way
            else:
                self.transfers = trial.before
                self._turn(now)
        self._begin(now, nbytes)

    def _try(self, now: float, rate: float) -> None:
        wanted = min(MOST, 2 * self.transfers) if self._up else max(LEAST, self.transfers // 2)
        if wanted == self.transfers:
            self._turn(now)
            return
        self._trial = _Trial(self.transfers, rate)
        self.transfers = wanted

    def _turn(self, now: float) -> None:
        """This way leads no further: the other one is tried, or it rests."""
        self._up = not self._up
        self._turned = not self._turned
        if not self._turned:
            self._rest_until = now + _TRY_AGAIN_S

    def _shed(self, now: float, nbytes: int) -> None:
        self._trial, self._up, self._turned = None, True, False
        self.transfers = max(LEAST, self.transfers // 2)
        self._rest_until = now + _TRY_AGAIN_S
        self._begin(now, nbytes)
