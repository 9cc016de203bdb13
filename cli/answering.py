"""Runs one answer to its end, and shows text as it comes."""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, TextIO

if TYPE_CHECKING:
    from collections.abc import Callable

    from deltafin.cli.watch import Watch
    from deltafin.runtime import Chosen, Gate, GateSummary, Generation, Model, Tokenizer


@dataclass(slots=True)
class Outcome:
    """What came out, and when."""

    chosen: list[Chosen] = field(default_factory=list)
    text: str = ""
    finish: Literal["stop", "length", "tool_calls"] | None = None  # None: interrupted
    first_token_s: float = 0.0
    total_s: float = 0.0
    drafted: int = 0  # tokens that were guessed and checked
    accepted: int = 0  # of these
    drafts: GateSummary | None = None  # None: nothing was to be guessed

    @property
    def ids(self) -> list[int]:
        return [c.token for c in self.chosen]

    @property
    def stopped(self) -> bool:
        """Whether the answer ended by itself, not by --max-new."""
        return self.finish not in (None, "length")


# A terminal obeys these; what a model writes is only to be seen. Others get every character as it is.
_SHOWN = {code: 0x2400 + code for code in range(32) if code not in (9, 10)}
_SHOWN |= {0x7F: 0x2421} | dict.fromkeys(range(0x80, 0xA0), 0xFFFD)


def harmless(text: str, stream: TextIO) -> str:
    """The text as it may go there."""
    return text.translate(_SHOWN) if stream.isatty() else text


class Screen:
    """Text on stdout, and where it has left the cursor."""

    def __init__(self, *, quiet: bool) -> None:
        self._quiet = quiet
        self.column = self.error_column = 0  # of stdout and of stderr, for a status beside the text

    def write(self, text: str) -> None:
        if self._quiet or not text:
            return
        self._put(harmless(text, sys.stdout))
        self.column = column_after(text, self.column)

    def _put(self, text: str) -> None:
        sys.stdout.write(text)
        sys.stdout.flush()


def column_after(text: str, column: int) -> int:
    """Where text that begins in a column leaves the cursor."""
    line = text.rpartition("\n")[2]
    return len(line) + (column if "\n" not in text else 0)


class TextReader:
    """Reads an answer as plain text up to a stop string, or shows its ids. Stop tokens are no part of the text."""

    def __init__(self, tokenizer: Tokenizer | None, stops: tuple[str, ...], screen: Screen, *, as_ids: bool) -> None:
        from deltafin.runtime import StopStrings, StreamDecoder

        self._decoder = StreamDecoder(tokenizer) if tokenizer is not None else None
        self._stops = StopStrings(stops)
        self._screen, self._as_ids = screen, as_ids or tokenizer is None
        self._count = 0
        self.text = ""

    def push(self, token: int, *, last: bool) -> bool:
        """Takes a token; whether a stop string has come. `last` is a stop token."""
        if self._as_ids:
            self._screen.write((" " if self._count else "") + str(token))
        self._count += 1
        if last or self._decoder is None:
            return False
        text, stopped = self._stops.push(self._decoder.push(token))
        self._show(text)
        return stopped

    def finish(self) -> None:
        """Ends the output with a newline, also after an interruption."""
        if not self._count:
            return
        if self._decoder is not None:
            text, _ = self._stops.push(self._decoder.finish())
            self._show(text + self._stops.finish())
        self._screen.write("\n")

    def _show(self, text: str) -> None:
        self.text += text
        if not self._as_ids:
            self._screen.write(text)


class Answering:
    """Follows one generation: counts, times, and hands each token on while the pass goes on."""

    def __init__(self, watch: Watch, read: Callable[[int, bool], bool], stop_ids: frozenset[int], gate: Gate) -> None:
        """`read` takes each token, and whether it is a stop token; says whether it is to be the last."""
        self.outcome = Outcome()
        self._gate = gate
        self._watch, self._read, self._stop_ids = watch, read, stop_ids
        self._started = time.monotonic()

    def ends(self, chosen: Chosen) -> bool:
        """For `Generation`: takes a token that is no stop token."""
        self._took(chosen)
        return self._read(chosen.token, False)

    def run(self, engine: Model, generation: Generation) -> None:
        """To its end. An interruption leaves the outcome as far as it went."""
        from deltafin.runtime import Runner

        # torch, which takes no times, teaches a gate nothing.
        runner, outcome = Runner(engine, self._gate if engine.memory is not None else None), self.outcome
        runner.add(generation)
        self._started = time.monotonic()
        try:
            while runner.active:
                for step in runner.step(self._watch):
                    outcome.drafted += step.drafted
                    outcome.accepted += step.accepted
                    if step.new and step.new[-1].token in self._stop_ids:
                        self._took(step.new[-1])
                        self._read(step.new[-1].token, True)
            outcome.finish = generation.finish
        finally:
            self._watch.clear()
            if generation.draft is not None and runner.gate is not None:
                outcome.drafts = runner.gate.summary

    def _took(self, chosen: Chosen) -> None:
        outcome = self.outcome
        outcome.chosen.append(chosen)
        outcome.total_s = time.monotonic() - self._started
        outcome.first_token_s = outcome.first_token_s or outcome.total_s
        self._watch.token(len(outcome.chosen))
