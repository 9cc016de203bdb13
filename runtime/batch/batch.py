"""A batch under way: answers join and leave between passes, and every pass is on record before the next one."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Items
from dataclasses import asdict, dataclass

from deltafin.errors import BadRequest
from deltafin.runtime.batch.journal import Journal
from deltafin.runtime.batch.requests import Request, Requests
from deltafin.runtime.batch.results import Results
from deltafin.runtime.batch.room import Room
from deltafin.runtime.batch.sharing import Beginnings, Sharing
from deltafin.runtime.batch.sizing import Size
from deltafin.runtime.generation import Generation, Runner, Step
from deltafin.runtime.model import Model
from deltafin.runtime.observer import Observer
from deltafin.runtime.openai import Answer, BadBody, Serving, Task

UNKNOWN_MODEL = "model_not_found"  # the code of an error for a request that names a model which is not here


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
        _refuse(results, request, requests.complaint(request))
        progress()
    del requests.refused[:]
    return count


def _refuse(results: Results, request: Request, error: BadBody) -> None:
    _respond(results, request, 404 if error.code == UNKNOWN_MODEL else 400, error.as_json())


def _respond(results: Results, request: Request, status: int, body: dict[str, object]) -> None:
    response: dict[str, object] = {"status_code": status, "request_id": f"req_{request.key.hex()}", "body": body}
    results.append(request.key, request.custom_id, response)


@dataclass(slots=True)
class _Rider:
    """One answer under way."""

    request: Request
    task: Task
    answer: Answer
    generation: Generation
    room: Room
    taken: int  # of the room: what it may come to need


class Batch:
    """Answers every open request of a scanned input, as many at once as there is room for.

    `run` does all of it. Or somebody else makes the passes: then `join` and `took` come before and after each, and
    answers may be asked to step back. It may stop or fail at any point; another batch with the same files goes on.
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
        self._model, self._serving = model, serving
        self._requests, self._results, self._journal = requests, results, journal
        self._size = size
        self._sharing = Sharing(model, size.shared, beginnings)
        self._riders: dict[int, _Rider] = {}  # by id() of their generation, the youngest last
        self._begun_before: set[int] = set()  # requests that have stepped back
        self._rest = self._open_indexes()
        self._next: list[int] = []  # requests, the last one is next; empty only if none is left
        self._advance()

    @property
    def under_way(self) -> int:
        return len(self._riders)

    @property
    def waits(self) -> bool:
        """Whether a request could join now, if there were room for it."""
        return bool(self._next) and not self._sharing.under_way

    @property
    def over(self) -> bool:
        """Whether every request is answered."""
        return not self._next and not self._riders

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
        runner, room = Runner(self._model), Room(self._size.sequences, self._size.tokens)
        beside = Room(2, sys.maxsize)  # a beginning was planned for besides the answers
        started = time.monotonic()
        while True:
            self.join(runner, room, beside, progress)
            if not runner.active:
                break
            self.counts.together = max(self.counts.together, self.under_way)
            # Nothing here may hold what it returns: the memory of answers that are over is needed.
            self.took(runner.step(observer))
            self.counts.total_s = time.monotonic() - started
            progress()
        self._journal.remove()

    # ---- in a runner that somebody else steps -----------------------------------------------------------

    def join(
        self, runner: Runner, room: Room, beside: Room | None = None, progress: Callable[[], None] = lambda: None
    ) -> None:
        """Requests in the order of the file, as long as the next one finds room.

        What they share is kept in the room `beside`, by default in the same. Raises NoSpace or DiskError.
        """
        while self._next:
            index = self._next[-1]
            length = self._requests.lengths[index]
            if length > self._size.most_tokens:
                request = self._requests.read(index)
                self._sharing.leave_out(self._requests.task(request))
                self._refuse(request, self._too_long(length))
            elif not room.fits(length) or not self._begin(self._requests.read(index), runner, room, beside or room):
                return
            self._next.pop()
            self._advance()
            progress()

    def owns(self, generation: Generation) -> bool:
        return id(generation) in self._riders or self._sharing.owns(generation)

    def took(self, steps: Items[Step]) -> None:
        """What a pass brought; answers that are finished have left the runner. Raises NoSpace or DiskError."""
        steps = [step for step in steps if id(step.generation) in self._riders]
        self.counts.passes += 1
        self.counts.tokens += sum(len(step.new) for step in steps)
        self._record([(self._riders[id(s.generation)], len(s.new)) for s in steps if s.new])
        for step in steps:
            if step.generation.finish is not None:
                self._write(self._riders[id(step.generation)])
                self._out(step.generation)

    def step_back(self, runner: Runner) -> bool:
        """Takes the youngest answer out of the runner, to go on later; if there is none, what is kept for them.

        False if there is nothing to take. Its room is free then; the tokens that it has are not drawn again.
        """
        if not self._riders:
            return self._sharing.let_go()
        rider = next(reversed(self._riders.values()))
        if rider.generation in runner.active:
            runner.remove(rider.generation)
        self.put_back(rider.generation)
        return True

    def put_back(self, generation: Generation) -> None:
        """An answer has left the runner, and goes on later."""
        if self._sharing.owns(generation):
            self._sharing.failed(alone=False)
            return
        rider = self._out(generation)
        self._journal.put_back(rider.request.key, generation.chosen)
        self._sharing.come_back(rider.task)
        self._begun_before.add(rider.request.index)
        self._next.append(rider.request.index)

    def give_up(self, generation: Generation, code: str, message: str) -> None:
        """An answer has left the runner, and will not be tried again: its line says why. Raises NoSpace, DiskError."""
        if self._sharing.owns(generation):
            self._sharing.failed(alone=True)
            return
        request = self._riders[id(generation)].request
        self._results.append(request.key, request.custom_id, None, {"code": code, "message": message})
        self._out(generation)
        self.counts.refused += 1

    def key_of(self, generation: Generation) -> bytes | None:
        """Names the request of an answer under way."""
        rider = self._riders.get(id(generation))
        return None if rider is None else rider.request.key

    # ---- requests ------------------------------------------------------------------------------------

    def _open_indexes(self) -> Iterator[int]:
        return (index for index, length in enumerate(self._requests.lengths) if length)

    def _advance(self) -> None:
        if not self._next and (index := next(self._rest, None)) is not None:
            self._next.append(index)

    def _begin(self, request: Request, runner: Runner, room: Room, beside: Room) -> bool:
        """False if something else has to be computed first, or has taken the room."""
        task = self._requests.task(request)
        if not self._sharing.is_ready(task, runner, beside) or not room.fits(task.tokens):
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
        if request.index not in self._begun_before:
            self.counts.prompt_tokens += len(task.ids)
            self.counts.recovered += len(so_far)
        self.counts.shared = self._sharing.saved
        rider = _Rider(request, task, answer, generation, room, room.take(task.tokens))
        self._riders[id(generation)] = rider
        if generation.finish is not None:  # it was over, but its answer had not been written
            self._write(rider)
            self._out(generation)
            return True
        runner.add(generation)
        return True

    def _record(self, news: list[tuple[_Rider, int]]) -> None:
        """Puts what a pass brought into the journal, answers that it finished too: their lines may yet fail."""
        chosen = [(rider.request.key, rider.generation.chosen, count) for rider, count in news]
        self._journal.append((key, len(tokens) - count, tokens[-count:]) for key, tokens, count in chosen)
        if self._journal.is_long:
            self._journal.rewrite({r.request.key: r.generation.chosen for r in self._riders.values()})

    def _write(self, rider: _Rider) -> None:
        """Writes an answer that is over."""
        generation = rider.generation
        assert generation.finish is not None
        rider.answer.finish(generation.chosen, generation.finish)
        _respond(self._results, rider.request, 200, rider.answer.as_json(int(time.time())))
        self.counts.answered_tokens += len(generation.chosen)
        self.counts.answers += 1

    def _out(self, generation: Generation) -> _Rider:
        rider = self._riders.pop(id(generation))
        rider.room.give(rider.taken)
        return rider

    def _refuse(self, request: Request, error: BadBody) -> None:
        _refuse(self._results, request, error)
        self.counts.refused += 1

    def _too_long(self, length: int) -> BadBody:
        return BadBody(
            f"prompt and answer may come to {length} tokens; there is memory for {self._size.most_tokens}. Ask for "
            "fewer new tokens, or remove this answer and run the batch with more --ram",
            "max_tokens",
            "context_length_exceeded",
        )
