"""A batch under way: answers join and leave between passes, and every pass is on record before the next one."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass

from deltafin.errors import BadRequest
from deltafin.runtime.batch.journal import Journal
from deltafin.runtime.batch.requests import Request, Requests
from deltafin.runtime.batch.results import Results
from deltafin.runtime.batch.sharing import Beginnings, Sharing
from deltafin.runtime.batch.sizing import Size, blocks
from deltafin.runtime.generation import Generation, Runner
from deltafin.runtime.model import Model
from deltafin.runtime.observer import Observer
from deltafin.runtime.openai import Answer, BadBody, Serving


@dataclass(slots=True)
class Counts:
    """What a run of a batch has come to."""

    requests: int  # in the file
    before: int = 0  # answered by earlier runs
    answers: int = 0  # of this run
    refused: int = 0  # requests that got an error for an answer
    prompt_tokens: int = 0  # of answers begun
    tokens: int = 0  # drawn
    answered_tokens: int = 0  # of all answers of this run
    recovered: int = 0  # drawn by an earlier run, and taken from its journal
    shared: int = 0  # tokens of prompts that were not computed, because an earlier one began with them
    together: int = 0  # most answers that were under way at once
    passes: int = 0
    total_s: float = 0.0  # since the first answer was begun

    @property
    def open(self) -> int:
        return self.requests - self.before - self.answers - self.refused

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.total_s if self.total_s else 0.0

    def as_json(self) -> dict[str, object]:
        return {**asdict(self), "tokens_per_s": round(self.tokens_per_s, 6)}


def answer_refused(requests: Requests, results: Results, progress: Callable[[], None] = lambda: None) -> int:
    """Writes the errors of all requests that the scan refused, once; returns how many. No model is needed for that."""
    count = len(requests.refused)
    for index in requests.refused:
        request = requests.read(index)
        _respond(results, request, 400, requests.complaint(request).as_json())
        progress()
    del requests.refused[:]
    return count


def _respond(results: Results, request: Request, status: int, body: dict[str, object]) -> None:
    response: dict[str, object] = {"status_code": status, "request_id": f"req_{request.key.hex()}", "body": body}
    results.append(request.key, request.custom_id, response)


@dataclass(slots=True)
class _Rider:
    """One answer under way."""

    request: Request
    answer: Answer
    generation: Generation
    room: int  # tokens of memory that it may come to need


class Batch:
    """Answers every open request of a scanned input, as many at once as `size` has room for.

    `run` may be interrupted or fail at any point; another batch with the same files goes on from there.
    """

    def __init__(
        self,
        model: Model,
        serving: Serving,
        requests: Requests,
        results: Results,
        journal: Journal,
        size: Size,
        *,
        beginnings: Beginnings | None = None,
        counts: Counts | None = None,
    ) -> None:
        """`counts` go on from what has been done already."""
        self.counts = counts or Counts(len(requests), requests.answered)
        self._runner = Runner(model)
        self._serving = serving
        self._requests, self._results, self._journal = requests, results, journal
        self._size = size
        self._sharing = Sharing(self._runner, size.shared, beginnings)
        self._riders: dict[int, _Rider] = {}  # by id() of their generation
        self._room = size.tokens
        self._next = self._open_indexes()
        self._waiting: int | None = next(self._next, None)

    @property
    def under_way(self) -> int:
        return len(self._riders)

    def left_s(self) -> float | None:
        """How long the rest may take, if its answers are like those that are there; None before there is one."""
        counts = self.counts
        if not counts.answers or not counts.tokens:
            return None
        mean = counts.answered_tokens / counts.answers
        under_way = sum(max(1.0, mean - len(r.generation.chosen)) for r in self._riders.values())
        return (under_way + mean * (counts.open - len(self._riders))) / counts.tokens_per_s

    def run(self, observer: Observer | None = None, progress: Callable[[], None] = lambda: None) -> None:
        """Answers all. `progress` is called after every pass and every answer.

        Raises NoSpace, DiskError, or what a pass raises.
        """
        self.counts.refused += answer_refused(self._requests, self._results, progress)
        started = time.monotonic()
        while True:
            self._join(progress)
            if not self._runner.active:
                break
            self.counts.together = max(self.counts.together, self.under_way)
            self._step(observer)
            self.counts.total_s = time.monotonic() - started
            progress()
        self._journal.remove()

    def _open_indexes(self) -> Iterator[int]:
        return (index for index, length in enumerate(self._requests.lengths) if length)

    def _join(self, progress: Callable[[], None]) -> None:
        """Requests in the order of the file, as long as the next one finds room."""
        while self._waiting is not None and len(self._riders) < self._size.sequences:
            length = self._requests.lengths[self._waiting]
            if length > self._size.most_tokens:
                request = self._requests.read(self._waiting)
                self._sharing.leave_out(self._requests.task(request))
                self._refuse(request, self._too_long(length))
            elif blocks(length) > self._room or not self._begin(self._requests.read(self._waiting)):
                return
            progress()
            self._waiting = next(self._next, None)

    def _begin(self, request: Request) -> bool:
        """False if something else has to be computed first."""
        task = self._requests.task(request)
        if not self._sharing.is_ready(task):
            return False
        answer = Answer(task, self._serving, request.key.hex())
        so_far = self._journal.take(request.key)
        seq = self._sharing.sequence(task)
        try:
            generation = Generation(
                seq,
                task.ids[len(seq) :],
                max_new=task.max_new,
                sampling=task.sampling,
                ends=answer.ends,
                so_far=so_far,
            )
        except BadRequest as e:
            self._refuse(request, BadBody(str(e)))
            return True
        rider = _Rider(request, answer, generation, blocks(task.tokens))
        self.counts.prompt_tokens += len(task.ids)
        self.counts.recovered += len(so_far)
        self.counts.shared = self._sharing.saved
        self._room -= rider.room
        if generation.finish is not None:  # it was over, but its answer had not been written
            self._leave(rider)
            return True
        self._riders[id(generation)] = rider
        self._runner.add(generation)
        return True

    def _step(self, observer: Observer | None) -> None:
        """One pass. Nothing outside may hold what it returns: the memory of answers that are over is needed."""
        steps = [step for step in self._runner.step(observer) if id(step.generation) in self._riders]
        self.counts.passes += 1
        self.counts.tokens += sum(len(step.new) for step in steps)
        self._record([(self._riders[id(s.generation)], len(s.new)) for s in steps if s.new])
        for step in steps:
            if step.generation.finish is not None:
                self._leave(self._riders.pop(id(step.generation)))

    def _record(self, news: list[tuple[_Rider, int]]) -> None:
        """Puts what a pass brought into the journal, answers that it finished too: their lines may yet fail."""
        chosen = [(rider.request.key, rider.generation.chosen, count) for rider, count in news]
        self._journal.append((key, len(tokens) - count, tokens[-count:]) for key, tokens, count in chosen)
        if self._journal.is_long:
            self._journal.rewrite({r.request.key: r.generation.chosen for r in self._riders.values()})

    def _leave(self, rider: _Rider) -> None:
        """Writes an answer that is over."""
        generation = rider.generation
        assert generation.finish is not None
        rider.answer.finish(generation.chosen, generation.finish)
        self._room += rider.room
        self.counts.answered_tokens += len(generation.chosen)
        _respond(self._results, rider.request, 200, rider.answer.as_json(int(time.time())))
        self.counts.answers += 1

    def _refuse(self, request: Request, error: BadBody) -> None:
        _respond(self._results, request, 400, error.as_json())
        self.counts.refused += 1

    def _too_long(self, length: int) -> BadBody:
        return BadBody(
            f"prompt and answer may come to {length} tokens; there is memory for {self._size.most_tokens}. Ask for "
            "fewer new tokens, or remove this answer and run the batch with more --ram",
            "max_tokens",
            "context_length_exceeded",
        )
