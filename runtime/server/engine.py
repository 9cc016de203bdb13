"""The one thread that computes: requests wait, join the running passes, and leave them.

A pass has a row of every answer under way, and as much of waiting prompts as it holds. Between two passes requests join
in the order in which they came, as long as memory is there for all that they may become; what is left is for batches,
which step back for requests. An answer depends on its request alone, not on the company.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Sequence as Items

from deltafin.errors import DeltafinError
from deltafin.runtime.draft import NGram
from deltafin.runtime.generation import Generation, Step
from deltafin.runtime.model import Model
from deltafin.runtime.openai import Answer, Serving, Task
from deltafin.runtime.server.beside import Beside
from deltafin.runtime.server.company import Company
from deltafin.runtime.server.counts import Counts
from deltafin.runtime.server.driving import Ending, Outcome, Passes
from deltafin.runtime.server.jobs import Began, Ended, Failed, Job, Listener, Update
from deltafin.runtime.server.pace import Pace, Progress
from deltafin.runtime.server.queueing import Place, place_of, retry_after_s
from deltafin.runtime.server.recent import Recent
from deltafin.runtime.server.refusing import Full, Stopped, too_long
from deltafin.runtime.server.room import Room
from deltafin.runtime.server.sizing import ServerSize
from deltafin.runtime.server.starting import Start, Starts
from deltafin.runtime.states import PrefixStats

log = logging.getLogger(__name__)

MOST_WAITING_TOKENS = 1 << 22  # of prompts in the queue, but for a single one: each takes some 36 bytes of memory
STUCK_S = 1.0  # until company that had no room is asked again


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
        self.error: Exception | None = None  # of the engine itself: it is over then
        self._starts = starts
        self._drafting = drafting
        self._changed = threading.Condition()  # of what any thread may change, to the next blank line
        self._open: set[Job] = set()  # not over: somebody is to be told
        self._jobs: dict[int, Job] = {}  # of these, running, by id() of their generation
        self._waiting: deque[Job] = deque()
        self._gone: list[Job] = []  # running, and their clients are gone
        self._stopping = self._woken = False
        self._number = 0

        self._passes = Passes(model, self.counts, self._gone_numbers, lambda: self._stopping)
        self._room = Room(size.sequences, size.tokens)
        self._recent = Recent(self._room)
        self._beside = Beside(self._passes, self._room, self._recent.drop_oldest, lambda g: id(g) in self._jobs)
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    # ---- for any thread --------------------------------------------------------------------------------

    def start(self, *company: Company) -> None:
        """Once, and not after `close`."""
        for one in company:
            self._beside.add(one)
        self._thread.start()

    def close(self) -> None:
        """Ends the pass at the next layer; whoever waits is told `Stopped`. Returns when the thread is done."""
        self._wake(stop=True)
        self.model.store.interrupt()
        if self._thread.ident is None:
            self._end()
        else:
            self._thread.join()

    def submit(self, task: Task, name: str, listener: Listener) -> Job:
        """Queues a request; `name` is unlike that of any other. `listener` is told what becomes of it.

        Raises Full, Stopped, or BadBody if memory will never hold it.
        """
        if task.tokens > self.size.most_tokens:
            raise too_long(task, self.size.most_tokens)
        with self._changed:
            if self.error is not None or self._stopping:
                raise self._stopped()
            if self._is_full(task):
                self.counts.refused += 1
                raise Full(len(self._waiting), retry_after_s(len(self._jobs), self.pace))
            self._number += 1
            self.counts.submitted += 1
            job = Job(self._number, task, Answer(task, self.serving, name), listener)
            self._open.add(job)
            self._waiting.append(job)
            self._wake()
        return job

    def _is_full(self, task: Task) -> bool:
        tokens = sum(len(job.task.ids) for job in self._waiting)
        return len(self._waiting) >= self.most_waiting or 0 < tokens > MOST_WAITING_TOKENS - len(task.ids)

    def leave(self, job: Job) -> None:
        """Nobody waits for it any more: it leaves the queue now, or the passes at the next layer. Tells nobody."""
        with self._changed:
            if job.state == "over" or job.left_at is not None:
                return
            job.left_at = self._passes.clock.layers
            if job.state == "waiting":
                self._waiting.remove(job)
                self._open.remove(job)
                job.state = "over"
                self.counts.left += 1
            else:
                self._gone.append(job)
            self._wake()

    def wake(self) -> None:
        """Company has something new."""
        self._wake()

    def place(self, job: Job) -> Place:
        """How many are before it, and how long its first token may take."""
        with self._changed:
            waiting, running = list(self._waiting), list(self._jobs.values())
        left_s = self.progress().left_s
        return place_of(job, waiting, running, self._room, self.pace, left_s, self._most_rows)

    def progress(self) -> Progress:
        return self._passes.progress()

    @property
    def pace(self) -> Pace:
        return self._passes.pace

    @property
    def alive(self) -> bool:
        return self._thread.is_alive() and self.error is None

    @property
    def stopping(self) -> bool:
        return self._stopping

    @property
    def still_s(self) -> float:
        """Seconds in which nothing has moved although there is something to do."""
        return self._passes.clock.still_s

    @property
    def running(self) -> int:
        """Requests that ride, or are about to."""
        with self._changed:
            return len(self._open) - len(self._waiting)

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def recent(self) -> int:
        """Sequences in memory that nobody uses now."""
        return len(self._recent)

    @property
    def prefixes(self) -> PrefixStats:
        """Of the states that are kept on disk."""
        return self._starts.store.stats

    def _wake(self, *, stop: bool = False) -> None:
        with self._changed:
            self._stopping = self._stopping or stop
            self._woken = True
            self._changed.notify_all()

    # ---- the engine's thread ---------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while self._wait():
                self._let_go()
                self._admit()
                for outcome in self._passes.run():
                    self._took(outcome)
                    del outcome  # or the memory of answers that are over is not free for those that join next
        except Ending:
            pass
        except BaseException as e:  # a fault of ours: nothing more can be promised
            log.exception("the engine failed")
            self.error = e if isinstance(e, Exception) else RuntimeError(repr(e))
        finally:
            self._end()

    def _wait(self) -> bool:
        """Until there is something to do; False if it is to end."""
        stuck = False  # something is ready, but had no room a moment ago
        while True:
            self._passes.clock.move()
            with self._changed:
                if self._stopping:
                    return False
                self._woken = False
                if self._waiting or self._gone or self._passes.runner.active:
                    return True
            # Without the lock: who is asked may have one of its own, and wake the engine while it holds that.
            if not stuck and self._beside.ready():
                self._admit()
                stuck = True
                continue
            with self._changed:
                self._passes.clock.rest()
                self._changed.wait_for(lambda: self._woken or self._stopping, STUCK_S if stuck else None)
            stuck = False

    def _end(self) -> None:
        with self._changed:
            self._stopping = True
            left = sorted(self._open, key=lambda job: job.number)
            self._waiting.clear()
            for job in left:
                job.state = "over"  # so that `leave` looks for none of them where it is no more
        for job in left:
            if job.generation is not None:
                try:
                    self._out(job)
                except Exception:  # the others are to be told all the same
                    log.exception("at the end of the engine")
            self._fail(job, self._stopped())
        if self.error is None:
            for seq in self._recent:
                self._starts.keep(seq)
        self._beside.close()
        self._recent.clear()

    def _stopped(self) -> Stopped:
        # What an error of ours says may be anybody's prompt: it is for the log.
        return Stopped("the server is shutting down" if self.error is None else "the engine failed; its log says why")

    # ---- leaving

    def _gone_numbers(self) -> list[int]:
        """Asked when a layer begins."""
        if not self._gone:
            return []
        with self._changed:
            for job in self._gone:
                job.out_at = self._passes.clock.layers if job.out_at is None else job.out_at
            return [job.generation.seq.number for job in self._gone if job.generation is not None]

    def _let_go(self) -> None:
        """Running answers whose clients have left."""
        with self._changed:
            gone, self._gone = self._gone, []
        for job in gone:
            if job.state == "running":
                self._out(job)
                with self._changed:
                    self._open.remove(job)
                    self.counts.left += 1
                    layers = job.layers_for_nobody(self._passes.clock.layers)
                    self.counts.left_layers = max(self.counts.left_layers, layers)

    def _out(self, job: Job) -> None:
        """Its room is free; what it has computed may be gone on from."""
        generation = job.generation
        with self._changed:
            self._jobs.pop(id(generation), None)
            job.state, job.generation = "over", None
        start, job.start = job.start, Start()
        self._room.give(job.taken)
        start.close()
        if generation is not None:
            self._passes.remove(generation)
            self._recent.keep(generation.seq)

    def _fail(self, job: Job, error: Exception) -> None:
        with self._changed:
            self._open.remove(job)
            job.state = "over"
            self.counts.failed += 1
        self._tell(job, Failed(error))

    def _tell(self, job: Job, update: Update) -> None:
        if job.left_at is not None:
            return
        try:
            job.listener(update)
        except Exception:
            log.exception("whoever waits for request %d cannot be told", job.number)
            self.leave(job)

    # ---- joining

    def _admit(self) -> None:
        if not self._passes.runner.active:
            self._passes.renew()
        while (job := self._next_waiting()) is not None and self._make_room(job):
            with self._changed:
                if job.state != "waiting":
                    continue  # it left meanwhile
                self._waiting.remove(job)
                job.state = "running"
            self._begin(job)
        self._beside.join()  # also while a request waits for room: they step back then
        self.counts.together = max(self.counts.together, len(self._passes.runner.active))

    def _next_waiting(self) -> Job | None:
        with self._changed:
            return self._waiting[0] if self._waiting else None

    def _make_room(self, job: Job) -> bool:
        """Lets go of what is in the way of a request, if that is enough: whether it is."""
        tokens, ids = job.task.tokens, job.task.ids
        if not self._room.fits_beside(tokens, [j.taken for j in self._jobs.values()]):
            return False
        # What it goes on from makes room for it by becoming it.
        while not self._room.fits_instead(tokens, self._recent.taken(ids)):
            if not (self._recent.drop_oldest(ids) or self._beside.step_back() or self._recent.drop_oldest()):
                return False
        return True

    def _begin(self, job: Job) -> None:
        task = job.task
        seq = None if self._room.fits(task.tokens) else self._recent.take(task.ids)
        job.taken = self._room.take(task.tokens)
        try:
            job.start = self._starts.find(task, self._recent, seq)
            seq, job.start.seq = job.start.seq or self.model.sequence(), None
            generation = job.start.generation(task, seq, job.ends, NGram() if self._drafting else None)
        except Exception as e:
            if not isinstance(e, DeltafinError | MemoryError):
                log.exception("request %d could not begin", job.number)
            self._out(job)
            self._fail(job, e)
            return
        job.answer.cached = len(seq)
        self.counts.prompt_tokens += len(task.ids)
        self.counts.cached_tokens += len(seq)
        with self._changed:
            job.generation = generation
            self._jobs[id(generation)] = job
        self._passes.runner.add(generation)
        self._tell(job, Began(len(seq)))

    # ---- after a pass

    def _took(self, outcome: Outcome) -> None:
        theirs: list[Step] = []
        for step in outcome.steps:
            job = self._jobs.get(id(step.generation))
            if job is None:
                theirs.append(step)
            else:
                self._advance(job, step)
        self._beside.took(theirs)
        if outcome.error is not None:
            self._drop(outcome.failed, outcome.error, alone=outcome.alone)

    def _advance(self, job: Job, step: Step) -> None:
        self.counts.tokens += len(step.new)
        self.counts.drafted += step.drafted
        self.counts.accepted += step.accepted
        if step.generation.finish is not None:
            self._finish(job, step.generation)
            return
        job.start.settle()
        if job.has_news:
            self._tell(job, job.news())
        if step.new and job.start.keeps_prompt:
            job.start.keeps_prompt = False
            self._starts.keep(step.generation.seq)

    def _finish(self, job: Job, generation: Generation) -> None:
        try:
            news = job.finish(generation)
        except Exception as e:
            log.exception("the answer to request %d could not be written", job.number)
            self._out(job)
            self._fail(job, e)
            return
        self.pace.saw_answer(len(generation.chosen))
        self._out(job)
        with self._changed:
            self._open.remove(job)
            self.counts.answered += 1
        self._tell(job, Ended(news.events, news.chosen))
        # After the answer: whoever asked need not wait for the drive.
        self._starts.keep(generation.seq)

    def _drop(self, generations: Items[Generation], error: Exception, *, alone: bool) -> None:
        for generation in generations:
            job = self._jobs.get(id(generation))
            if job is None:
                self._beside.failed(generation, error, alone=alone)
            else:
                self._out(job)
                self._fail(job, error)

    @property
    def _most_rows(self) -> int:
        rows = self.model.most_rows
        assert rows is not None  # torch has no server
        return rows
