"""A batch whose answers ride in the engine's passes."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from deltafin.runtime.batch import (
    UNKNOWN_MODEL,
    Batch,
    Beginnings,
    Counts,
    Journal,
    Requests,
    Results,
    Size,
    answer_refused,
    journal_path,
    worth_sharing,
)
from deltafin.runtime.batch.sizing import PROMPT_ROWS
from deltafin.runtime.generation import Runner
from deltafin.runtime.openai import BadBody, Task
from deltafin.runtime.server.batch_records import BatchRecord
from deltafin.runtime.server.engine import Engine


class Riding:
    """Opened by any thread; then only the engine's may touch it, until it is given back to be closed.

    But for `cancel`, and what is only read.
    """

    def __init__(
        self,
        record: BatchRecord,
        source: Path,
        target: Path,
        engine: Engine,
        beginnings: Beginnings | None,
        names: frozenset[str],
        check: Callable[[], None],
    ) -> None:
        """Reads all requests and what is answered already, and answers those that cannot be done.

        `names` are those that requests may call the model by. `check` is called now and then, and may raise. Raises
        BadRequest if the results are not those of the requests, NoSpace or DiskError.
        """
        self.id = record.id
        self.trouble: Exception | None = None  # it cannot go on now
        self.cancelled = False
        serving = replace(engine.serving, max_new=record.max_new, most_tokens=record.most_tokens)
        with ExitStack() as stack:
            self._results = stack.enter_context(Results(target))
            requests = Requests(source, serving, check=lambda task: _check_model(task, names))
            stack.enter_context(requests)
            requests.scan(self._results, lambda nbytes: check())
            counts = Counts(len(requests), requests.answered)
            counts.refused = answer_refused(requests, self._results, check)
            journal = stack.enter_context(Journal(journal_path(target), requests.is_open))
            size = engine.size
            ours = Size(size.want, size.sequences, size.tokens, size.most_tokens, worth_sharing(requests, PROMPT_ROWS))
            self.batch = Batch(
                engine.model, serving, requests, self._results, journal, ours, beginnings=beginnings, counts=counts
            )
            self._files = stack.pop_all()

    @property
    def wants_a_turn(self) -> bool:
        """Whether something is to be done between two passes."""
        return self.leaves or self.batch.waits

    @property
    def leaves(self) -> bool:
        return self.cancelled or self.trouble is not None or self.batch.over

    def counted(self, record: BatchRecord) -> BatchRecord:
        """With what has been done so far."""
        counts, errors = self.batch.counts, self._results.errors
        done = counts.before + counts.answers + counts.refused
        return replace(record, total=counts.requests, completed=done - errors, failed=errors)

    def leave(self, runner: Runner) -> None:
        """All answers under way step back."""
        while self.batch.step_back(runner):
            pass

    def close(self) -> None:
        self._files.close()


def _check_model(task: Task, names: frozenset[str]) -> None:
    if task.model is not None and task.model not in names:
        raise BadBody(f"there is no model {task.model[:60]!r} here", "model", UNKNOWN_MODEL)
