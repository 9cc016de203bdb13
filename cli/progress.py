"""Progress on stderr: bars with rate and ETA on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import logging
import sys
import time
from types import TracebackType
from typing import Never, Self

from tqdm import tqdm

from deltafin.cli.lines import one_line

_LINE_EVERY_S = 10.0
_UNITS = ("B", "KB", "MB", "GB", "TB")


def human_nbytes(nbytes: float) -> str:
    """1560860324864 -> '1.56 TB' (powers of ten, as drives and lines are sold)."""
    for unit in _UNITS:
        if abs(nbytes) < 1000 or unit == _UNITS[-1]:
            return f"{nbytes:.0f} {unit}" if unit == "B" else f"{nbytes:.3g} {unit}"
        nbytes /= 1000
    raise AssertionError


def human_seconds(seconds: float) -> str:
    """'45 s', '12 min', '3.4 h' or '2.1 days'."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    if seconds < 90 * 60:
        return f"{seconds / 60:.0f} min"
    if seconds < 48 * 3600:
        return f"{seconds / 3600:.1f} h"
    return f"{seconds / 86400:.1f} days"


class Progress:
    """Counts towards a total; `unit` "B" for bytes. Prints nothing for work that is over at once."""

    def __init__(self, label: str, total: int, unit: str = "B") -> None:
        self._label, self._total, self._unit = label, total, unit
        self._done = 0
        self._started = self._printed = time.monotonic()
        self._bar: tqdm[Never] | None = None
        if sys.stderr.isatty():
            self._bar = tqdm(
                total=total,
                desc=label,
                unit=unit if unit == "B" else f" {unit}",
                unit_scale=unit == "B",
                file=sys.stderr,
                dynamic_ncols=True,
                delay=0.5,
                leave=True,
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.close()
        elif self._printed > self._started:
            self._line()

    def add(self, amount: int) -> None:
        self._done += amount
        if self._bar is not None:
            self._bar.update(amount)
        elif time.monotonic() - self._printed >= _LINE_EVERY_S:
            self._line()

    def set(self, done: int) -> None:
        self.add(done - self._done)

    def _line(self) -> None:
        self._printed = now = time.monotonic()
        rate = self._done / max(1e-9, now - self._started)
        left = human_seconds((self._total - self._done) / rate) if rate else "unknown"
        if self._unit == "B":
            amount = f"{human_nbytes(self._done)} of {human_nbytes(self._total)}, {human_nbytes(rate)}/s"
        else:
            amount = f"{self._done} of {self._total} {self._unit}"
        print(f"{self._label}: {amount}, {left} left", file=sys.stderr, flush=True)


class StderrHandler(logging.Handler):
    """Log records as single lines that do not tear a progress bar."""

    def __init__(self, command: str) -> None:
        super().__init__()
        self._command = command

    def emit(self, record: logging.LogRecord) -> None:
        text = one_line(self.format(record))
        tqdm.write(f"{self._command}: {record.levelname.lower()}: {text}", file=sys.stderr)
