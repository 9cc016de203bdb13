"""How long things take here, from what they have taken so far."""

from __future__ import annotations

import time
from dataclasses import dataclass

SHARE = 0.2  # of the newest in a mean that forgets
TOKENS = 256.0  # of an answer, before there was one


@dataclass(frozen=True, slots=True)
class Progress:
    """Where the engine is. Taken at any time, from any thread."""

    passes: int  # that were finished
    layer: int | None  # that is computed, from 0; None between passes
    num_layers: int
    rows: int  # of the pass
    pass_s: float  # since it began
    read_nbytes: int  # in this pass, from anywhere but memory
    fetched_nbytes: int  # of these, over the network
    left_s: float | None  # of this pass; None if nothing is known yet


class Pace:
    """Means of passes and answers. The engine's thread writes, others read single numbers."""

    def __init__(self) -> None:
        self.row_s: float | None = None  # of a pass, for each of its rows beyond the first
        self.pass_s: float | None = None  # of a pass with one row
        self.answer_tokens = TOKENS
        self._answers = 0

    def saw_pass(self, rows: int, seconds: float) -> None:
        """Splits what a pass took between what any pass takes and its rows."""
        if self.pass_s is None or self.row_s is None:
            # Rows share what is read; until there is more to go by, a row more is a twentieth of the first.
            self.pass_s, self.row_s = seconds / (1 + (rows - 1) / 20), seconds / (20 + rows - 1)
            return
        expected = self.pass_s + (rows - 1) * self.row_s
        surprise = SHARE * (seconds - expected)
        part = (rows - 1) * self.row_s / expected if expected > 0 else 0.0
        self.pass_s = max(0.0, self.pass_s + surprise * (1 - part))
        if rows > 1:
            self.row_s = max(0.0, self.row_s + surprise * part / (rows - 1))

    def saw_answer(self, tokens: int) -> None:
        self._answers += 1
        self.answer_tokens += max(SHARE, 1 / self._answers) * (tokens - self.answer_tokens)

    def of_pass(self, rows: int) -> float | None:
        """Seconds of a pass with so many rows; None if nothing is known yet."""
        if self.pass_s is None or self.row_s is None:
            return None
        return self.pass_s + max(0, rows - 1) * self.row_s


class PassClock:
    """The pass under way: which layer, since when, and how much longer."""

    def __init__(self, num_layers: int) -> None:
        self.num_layers = num_layers
        self.layer: int | None = None
        self.rows = 0
        self.layers = 0  # begun, in all passes
        self.passes = 0  # that were computed to the end
        self._began = self._moved = time.monotonic()
        self._resting = True

    def begin(self, rows: int) -> None:
        self.move()
        self.rows, self._began = rows, self._moved

    def at(self, layer: int) -> None:
        self.layer = layer
        self.layers += 1
        self.move()

    def end(self) -> None:
        self.layer = None
        self.move()

    def move(self) -> None:
        """Something has happened."""
        self._moved = time.monotonic()
        self._resting = False

    def rest(self) -> None:
        """There is nothing to do."""
        self._resting = True

    @property
    def still_s(self) -> float:
        """Since something happened, while there is something to do."""
        return 0.0 if self._resting else time.monotonic() - self._moved

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self._began if self.layer is not None else 0.0

    def left_s(self, expected_s: float | None) -> float | None:
        """By what the layers so far have taken; in the first ones by what such a pass is expected to take.

        0 between passes.
        """
        layer, elapsed = self.layer, self.elapsed_s
        if layer is None:
            return 0.0
        if layer > 0 and layer * 10 >= self.num_layers:
            return elapsed * (self.num_layers - layer) / layer
        return None if expected_s is None else max(0.0, expected_s - elapsed)
