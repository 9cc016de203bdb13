"""The one thread that computes: requests wait, join the running passes, and leave them.

A pass has a row of every answer under way, and as much of waiting prompts as it holds. Between two passes requests join
in the order in which they came, as long as memory is there for all that they may become; what is left is for batches,
which step back for requests. An answer depends on its request alone, not on the company.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Sequence as Items
from dataclasses import asdict, dataclass

from deltafin.errors import DeltafinError, NetworkError
from deltafin.runtime.draft import NGram
from deltafin.runtime.gate import Gate
from deltafin.runtime.generation import DEPTH, Generation, Runner, Step
from deltafin.runtime.model import Model
from deltafin.runtime.observer import Observer, RowSpan
from deltafin.runtime.openai import Answer, BadBody, Serving, Task
from deltafin.runtime.segment import Checkpoint
from deltafin.runtime.sequence import Sequence
from deltafin.runtime.server.company import Company
from deltafin.runtime.server.jobs import Began, Ended, Failed, Job, Listener
from deltafin.runtime.server.pace import Pace, PassClock, Progress
from deltafin.runtime.server.queueing import Place, place_of
from deltafin.runtime.server.recent import Recent
from deltafin.runtime.server.room import Room
from deltafin.runtime.server.sizing import ServerSize
from deltafin.runtime.server.starting import Start, Starts

log = logging.getLogger(__name__)


class Full(DeltafinError):
    """So many requests wait already that one more is not taken."""

    def __init__(self, waiting: int, retry_after_s: int) -> None:
        super().__init__(f"{waiting} requests are waiting already; try again in {retry_after_s} s")
        self.retry_after_s = retry_after_s


class Stopped(DeltafinError):
    """The server is shutting down, or its engine has failed for good."""


@dataclass(slots=True)
class Counts:
    """What an engine did so far. Its thread writes, others read single numbers."""

    submitted: int = 0
    answered: int = 0
    failed: int = 0
    left: int = 0  # requests whose clients went away
    left_layers: int = 0  # most layers that began between a client's going and the end of the work for it
    refused: int = 0  # for want of a place to wait
    prompt_tokens: int = 0  # of requests begun
    cached_tokens: int = 0  # of these, not computed
    computed_tokens: int = 0  # rows of prompts and answers that passes have computed
    tokens: int = 0  # drawn
    drafted: int = 0
    accepted: int = 0
    passes: int = 0
    pass_s: float = 0.0
    together: int = 0  # most answers that were under way at once

    def as_json(self) -> dict[str, float]:
        return asdict(self)


class _Stop(BaseException):
    """Ends a pass, for the engine's own thread."""


class Engine:
    """Answers tasks with one model, which only its thread touches between `start` and `close`."""

    def __init__(
        self,
        model: Model,
        serving: Serving,
        size: ServerSize,
        *,
        starts: Starts,
        most_waiting: int = 64,
        drafting: bool = True,
    ) -> None:
        """`starts` finds and keeps beginnings. `drafting`: whether an answer that is alone may be guessed ahead."""
        self.model, self.serving, self.size = model, serving, size
        self.most_waiting = most_waiting
        self.counts = Counts()
        self.pace = Pace()
        self.error: Exception | None = None  # of the engine itself: it is over then
        self._starts = starts
        self._room = Room(size.sequences, size.tokens)
        self._recent = Recent(self._room)
        self._drafting = drafting
        self._gate = Gate()
        self._runner = Runner(model, self._gate)
        self._clock = PassClock(model.config.num_layers)
        self._company: list[Company] = []
        self._jobs: dict[int, Job] = {}  # running, by id() of their generation
        self._changed = threading.Condition()  # of all below
        self._waiting: deque[Job] = deque()
        self._gone: list[Job] = []  # running, and their clients are gone
        self._stopping = False
        self._number = 0
        self._read_before = self._fetched_before = 0
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    # ---- for any thread --------------------------------------------------------------------------------

    def start(self, *company: Company) -> None:
        self._company += company
        self._thread.start()

    def close(self) -> None:
        """Ends the pass at the next layer; whoever waits is told `Stopped`. Returns when the thread is done."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        self.model.store.interrupt()
        if self._thread.ident is not None:
            self._thread.join()

    def submit(self, task: Task, name: str, listener: Listener) -> Job:
        """Queues a request; `name` is unlike that of any other. `listener` is told what becomes of it.

        Raises Full, Stopped, or BadBody if memory will never hold it.
        """
        if task.tokens > self.size.most_tokens:
            raise BadBody(
                f"prompt and answer may come to {task.tokens} tokens; this server has memory for "
                f"{self.size.most_tokens}. Ask for fewer new tokens, or start it with more --ram",
                "messages" if task.shared or "chat" in task.endpoint else "prompt",
                "context_length_exceeded",
            )
        with self._changed:
            if self._stopping or self.error is not None:
                raise Stopped("the server is shutting down" if self._stopping else f"the engine failed: {self.error}")
            if len(self._waiting) >= self.most_waiting:
                self.counts.refused += 1
                raise Full(len(self._waiting), self._retry_after_s())
            self._number += 1
            self.counts.submitted += 1
            job = Job(self._number, task, Answer(task, self.serving, name), listener)
            self._waiting.append(job)
            self._changed.notify_all()
        return job

    def leave(self, job: Job) -> None:
        """Nobody waits for it any more: it leaves the queue now, or the passes at the next layer. Tells nobody."""
        with self._changed:
            if job in self._waiting:
                self._waiting.remove(job)
                job.state = "over"
                self.counts.left += 1
            elif job.state == "running" and job not in self._gone:
                job.left_at = self._clock.layers
                self._gone.append(job)
                self._changed.notify_all()

    def wake(self) -> None:
        """Company has something new."""
        with self._changed:
            self._changed.notify_all()

    def place(self, job: Job) -> Place:
        """How many are before it, and how long its first token may take."""
        with self._changed:
            ahead = self._waiting.index(job) if job in self._waiting else -1
            running, waiting = list(self._jobs.values()), list(self._waiting)
        return place_of(job, ahead, waiting, running, self._room, self.pace, self.progress().left_s, self._most_rows)

    def progress(self) -> Progress:
        clock, stats = self._clock, self.model.store.stats
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

    @property
    def alive(self) -> bool:
        return self._thread.is_alive() and self.error is None

    @property
    def still_s(self) -> float:
        """Seconds in which no layer has begun or ended although one is under way; 0 between passes."""
        return time.monotonic() - self._clock.moved_at if self._clock.layer is not None else 0.0

    @property
    def running(self) -> int:
        return len(self._jobs)

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def recent(self) -> int:
        """Sequences in memory that nobody uses now."""
        return len(self._recent)

    # ---- the engine's thread ---------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while self._wait():
                self._let_go()
                self._admit()
                self._step()
        except _Stop:
            pass
        except Exception as e:  # a fault of ours: nothing more can be promised
            log.exception("the engine failed")
            with self._changed:
                self.error = e
        finally:
            self._end()

    def _wait(self) -> bool:
        """Until there is something to do; False if it is to end."""
        with self._changed:
            while not self._stopping:
                if self._waiting or self._gone or self._runner.active or any(c.ready() for c in self._company):
                    return True
                self._changed.wait()
        return False

    def _end(self) -> None:
        error = Stopped(f"the engine failed: {self.error}" if self.error is not None else "the server is shutting down")
        with self._changed:
            self._stopping = self._stopping or self.error is not None
            orphans = [*self._jobs.values(), *self._waiting]
            self._waiting.clear()
        for job in orphans:
            if job.generation is not None and self.error is None:
                job.start.close()
                self._starts.keep(job.generation.seq)
            self._fail(job, error)
        for company in self._company:
            company.close()
        self._recent.clear()

    def _let_go(self) -> None:
        """Running answers whose clients have left."""
        with self._changed:
            gone, self._gone = self._gone, []
        for job in gone:
            if job.state == "running":
                self.counts.left += 1
                assert job.left_at is not None
                self.counts.left_layers = max(self.counts.left_layers, self._clock.layers - job.left_at)
                self._out(job)

    def _gone_numbers(self) -> list[int]:
        """Asked when a layer begins."""
        return [job.generation.seq.number for job in self._gone if job.generation is not None]

    def _out(self, job: Job) -> None:
        """Its room is free; what it has computed may be gone on from."""
        generation = job.generation
        assert generation is not None
        job.state = "over"
        self._jobs.pop(id(generation), None)
        if generation in self._runner.active:
            self._runner.remove(generation)
        job.start.close()
        self._room.give(job.taken)
        self._recent.keep(generation.seq)

    # ---- joining

    def _admit(self) -> None:
        if not self._runner.active:  # one that has given up guessing for want of memory may have some now
            self._runner = Runner(self.model, self._gate)
        while self._waiting:
            job = self._waiting[0]
            if not self._make_room(job):
                return
            with self._changed:
                if not self._waiting or self._waiting[0] is not job:
                    continue  # it left meanwhile
                self._waiting.popleft()
                job.state = "running"
                job.taken = self._room.take(job.task.tokens)
            self._begin(job)
        for company in self._company:
            company.join(self._runner, self._room)
        self.counts.together = max(self.counts.together, len(self._runner.active))

    def _make_room(self, job: Job) -> bool:
        while not self._room.fits(job.task.tokens):
            if not (
                self._recent.drop_oldest(job.task.ids)
                or any(c.step_back(self._runner, self._room) for c in self._company)
                or self._recent.drop_oldest()
            ):
                return False
        return True

    def _begin(self, job: Job) -> None:
        task = job.task
        try:
            job.start = self._starts.find(task, self._recent)
            seq = self.model.sequence() if job.start.seq is None else job.start.seq
            job.generation = self._generation(job, seq, job.start)
        except DeltafinError as e:
            self._room.give(job.taken)
            self._fail(job, e)
            return
        job.answer.cached = len(seq)
        self.counts.prompt_tokens += len(task.ids)
        self.counts.cached_tokens += len(seq)
        self._jobs[id(job.generation)] = job
        self._runner.add(job.generation)
        job.listener(Began(len(seq)))

    def _generation(self, job: Job, seq: Sequence, start: Start) -> Generation:
        task = job.task
        checkpoint = None if start.mark is None else Checkpoint(start.mark.at - len(seq), start.mark.sink)
        return Generation(
            seq,
            task.ids[len(seq) :],
            max_new=task.max_new,
            sampling=task.sampling,
            draft=NGram() if self._drafting else None,
            ends=job.ends,
            checkpoint=checkpoint,
        )

    # ---- a pass

    def _step(self) -> None:
        active = list(self._runner.active)
        if not active:
            return
        for generation in active:
            generation.depth = DEPTH if len(active) == 1 else 0  # memory for guesses brings less than for company
        try:
            self._took(self._pass(self._runner))
        except Exception as e:
            self._failed(active, e)

    def _failed(self, active: Items[Generation], error: Exception) -> None:
        """After a pass that brought nothing."""
        if self._stopping:
            raise _Stop
        if not isinstance(error, DeltafinError | MemoryError):
            log.error("a pass failed for a reason of our own", exc_info=error)
        if len(active) == 1 or isinstance(error, NetworkError):  # which is the same for all of them
            self._drop(active, error, alone=len(active) == 1)
        else:
            log.warning("a pass for %d answers failed (%s); each is tried by itself", len(active), error)
            self._each_alone(active)

    def _each_alone(self, active: Items[Generation]) -> None:
        """One of them made a pass fail. The others are not to suffer for it."""
        for generation in active:
            runner = Runner(self.model)
            runner.add(generation)
            try:
                self._took(self._pass(runner))
            except Exception as e:
                self._failed([generation], e)

    def _pass(self, runner: Runner) -> list[Step]:
        if self._stopping:
            raise _Stop
        stats = self.model.store.stats
        self._read_before, self._fetched_before = stats.read_nbytes, stats.counts["http_nbytes"]
        began = time.monotonic()
        try:
            steps = runner.step(_Watch(self), self._gone_numbers)
        finally:
            self._clock.abandon()
        self._clock.passes += 1
        self.counts.passes += 1
        self.counts.pass_s += time.monotonic() - began
        self.counts.computed_tokens += self._clock.rows
        self.pace.saw_pass(self._clock.rows, time.monotonic() - began)
        return steps

    def _took(self, steps: list[Step]) -> None:
        theirs: list[Step] = []
        for step in steps:
            job = self._jobs.get(id(step.generation))
            if job is None:
                theirs.append(step)
                continue
            self.counts.tokens += len(step.new)
            self.counts.drafted += step.drafted
            self.counts.accepted += step.accepted
            if step.generation.finish is not None:
                self._finish(job)
            else:
                job.start.settle()
                if step.new and job not in self._gone:
                    job.listener(job.news())
        for company in self._company:
            company.took([step for step in theirs if company.owns(step.generation)])
        self._runner.active = [g for g in self._runner.active if g.finish is None]

    def _finish(self, job: Job) -> None:
        generation = job.generation
        assert generation is not None
        assert generation.finish is not None
        job.events += job.answer.finish(generation.chosen, generation.finish)
        news = job.news()
        job.start.settle()
        self.counts.answered += 1
        self.pace.saw_answer(len(generation.chosen))
        self._out(job)
        job.listener(Ended(news.events, news.chosen))
        # After the answer: whoever asked need not wait for the drive.
        self._starts.keep(generation.seq)

    def _drop(self, generations: Items[Generation], error: Exception, *, alone: bool) -> None:
        for generation in generations:
            if generation in self._runner.active:
                self._runner.remove(generation)
            job = self._jobs.get(id(generation))
            if job is not None:
                self._out(job)
                self._fail(job, error)
                continue
            for company in self._company:
                if company.owns(generation):
                    company.failed(generation, error, alone=alone)

    def _fail(self, job: Job, error: Exception) -> None:
        job.state = "over"
        self.counts.failed += 1
        job.listener(Failed(error))

    @property
    def _most_rows(self) -> int:
        rows = self.model.most_rows
        assert rows is not None  # torch has no server
        return rows

    def _retry_after_s(self) -> int:
        """Until a place in the queue is free: about one answer's time, shared by all that are under way."""
        pass_s = self.pace.of_pass(max(1, len(self._jobs)))
        if pass_s is None:
            return 30
        return max(1, min(3600, round(self.pace.answer_tokens * pass_s / max(1, len(self._jobs)))))


class _Watch(Observer):
    """Tells the engine's clock where a pass is, and ends it if the engine is to stop."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def rows(self, spans: Items[RowSpan]) -> None:
        self._engine._clock.begin(sum(span.count for span in spans))

    def layer(self, layer: int, num_layers: int) -> None:
        self._engine._clock.at(layer)
        if self._engine._stopping:
            raise _Stop
