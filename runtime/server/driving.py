"""Passes for whoever rides; and when one fails, who is to blame."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field

from deltafin.errors import DeltafinError, NetworkError
from deltafin.runtime.gate import Gate
from deltafin.runtime.generation import DEPTH, Generation, Runner, Step
from deltafin.runtime.model import Model
from deltafin.runtime.observer import Observer, RowSpan
from deltafin.runtime.server.counts import Counts
from deltafin.runtime.server.pace import Pace, PassClock, Progress

log = logging.getLogger(__name__)

RETRY_S = 600.0  # until guessing is tried again that had no memory


class Ending(BaseException):
    """The engine is to stop, in the middle of a pass or before one. For its own thread."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one pass brought. Everybody who is finished has a step; whoever has failed has left the runner."""

    steps: list[Step]
    failed: list[Generation] = field(default_factory=list)
    error: Exception | None = None  # why they have
    alone: bool = False  # whether only they were in the pass


class Passes:
    """Makes the passes of one `Runner`, and knows where they are and how long they take."""

    def __init__(
        self, model: Model, counts: Counts, gone: Callable[[], Collection[int]], ending: Callable[[], bool]
    ) -> None:
        """`gone` is as for `Runner.step`; `ending` is asked when a layer begins: `run` raises Ending then."""
        self.clock = PassClock(model.config.num_layers)
        self.pace = Pace()
        self._model, self._counts, self._gone, self._ending = model, counts, gone, ending
        self._gate = Gate()
        self.runner = Runner(model, self._gate)
        self._renewed_at = time.monotonic()
        self._read_before = self._fetched_before = 0

    def renew(self) -> None:
        """When nobody rides: guessing that was given up for want of memory is tried again, now and then."""
        assert not self.runner.active
        if not self.runner.is_drafting and time.monotonic() - self._renewed_at > RETRY_S:
            self.runner, self._renewed_at = Runner(self._model, self._gate), time.monotonic()

    def remove(self, generation: Generation) -> None:
        """If it still rides."""
        if generation in self.runner.active:
            self.runner.remove(generation)

    def run(self) -> Iterator[Outcome]:
        """One pass for all who ride; if that fails, one for each of them, so that nobody suffers for another."""
        riding = list(self.runner.active)
        if not riding:
            return
        for generation in riding:
            generation.depth = DEPTH if len(riding) == 1 else 0  # memory for guesses brings less than for company
        outcome = self._outcome(self.runner, riding)
        if len(riding) == 1 or outcome.failed != riding or isinstance(outcome.error, NetworkError):
            yield self._final(outcome)
        else:  # one of them is to blame; of a network that is the same for all
            log.warning("a pass for %d answers failed (%s); each is tried by itself", len(riding), outcome.error)
            del outcome
            yield from self._each_alone(riding)

    def progress(self) -> Progress:
        clock, stats = self.clock, self._model.store.stats
        return Progress(
            passes=clock.passes,
            layer=clock.layer,
            num_layers=clock.num_layers,
            rows=clock.rows,
            pass_s=clock.elapsed_s,
            read_nbytes=stats.read_nbytes - self._read_before,
            fetched_nbytes=stats.counts["http_nbytes"] - self._fetched_before,
            left_s=clock.left_s(self.pace.of_pass(clock.rows)),
        )

    def _each_alone(self, riding: Sequence[Generation]) -> Iterator[Outcome]:
        for number, generation in enumerate(riding):
            if generation.finish is not None or generation.seq.number in self._gone():
                continue
            runner = Runner(self._model)
            runner.add(generation)
            outcome = self._outcome(runner, [generation])
            if isinstance(outcome.error, NetworkError):
                rest = list(riding[number:])
                yield self._final(Outcome([], rest, outcome.error, alone=len(rest) == 1))
                return
            yield self._final(outcome)

    def _outcome(self, runner: Runner, riding: Sequence[Generation]) -> Outcome:
        """Of one pass. Raises Ending, and nothing else."""
        steps, error = self._tried(runner)
        failed = list(riding) if error is not None else []
        if error is not None and (runner.is_choosing or any(g.finish is not None for g in riding)):
            # The pass was computed, but choosing has failed for one: the others get their tokens all the same.
            failed = []
            while runner.is_choosing:
                steps, again = self._tried(runner)
                if again is None or not runner.unchosen:
                    break
                failed.append(runner.unchosen[0])  # there it has failed again
                runner.remove(failed[-1])
        known = {id(step.generation) for step in steps}
        steps += [Step(g, []) for g in riding if g.finish is not None and id(g) not in known]
        return Outcome(steps, failed, error if failed else None, alone=len(riding) == 1)

    def _final(self, outcome: Outcome) -> Outcome:
        for generation in outcome.failed:
            self.remove(generation)
        self.runner.active = [g for g in self.runner.active if g.finish is None]
        if outcome.error is not None:  # through its traceback whoever keeps it would keep the memory of a pass
            outcome.error.__traceback__ = outcome.error.__context__ = outcome.error.__cause__ = None
        return outcome

    def _tried(self, runner: Runner) -> tuple[list[Step], Exception | None]:
        try:
            return self._pass(runner), None
        except Exception as e:
            if self._ending():
                raise Ending from None
            if not isinstance(e, DeltafinError | MemoryError):
                log.exception("a pass failed for a reason of our own")
            return [], e

    def _pass(self, runner: Runner) -> list[Step]:
        if self._ending():
            raise Ending
        stats = self._model.store.stats
        self._read_before, self._fetched_before = stats.read_nbytes, stats.counts["http_nbytes"]
        watch = _Watch(self.clock, self._ending)
        began = time.monotonic()
        try:
            steps = runner.step(watch, self._gone)
        finally:
            self.clock.end()
        if watch.count:
            self._saw(watch, time.monotonic() - began)
        return steps

    def _saw(self, watch: _Watch, seconds: float) -> None:
        self.clock.passes += 1
        self._counts.passes += 1
        self._counts.pass_s += seconds
        self._counts.computed_tokens += watch.count
        if not watch.some_left:  # else it took less than its rows do
            self.pace.saw_pass(watch.count, seconds)


class _Watch(Observer):
    """Tells the clock where a pass is, and ends it if the engine is to stop."""

    def __init__(self, clock: PassClock, ending: Callable[[], bool]) -> None:
        self.count = 0  # rows that are computed to the end
        self.some_left = False
        self._clock, self._ending = clock, ending

    def rows(self, spans: Sequence[RowSpan]) -> None:
        self.count = sum(span.count for span in spans)
        self._clock.begin(self.count)

    def rows_left(self, spans: Sequence[RowSpan]) -> None:
        self.count, self.some_left = sum(span.count for span in spans), True

    def layer(self, layer: int, num_layers: int) -> None:
        self._clock.at(layer)
        if self._ending():
            raise Ending
