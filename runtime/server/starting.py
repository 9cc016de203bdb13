"""What a request goes on from: the longest beginning of its prompt that is known, in memory or on disk."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

from deltafin.errors import NoMemory
from deltafin.runtime.draft import Draft
from deltafin.runtime.generation import Generation
from deltafin.runtime.model import Model
from deltafin.runtime.openai import Task
from deltafin.runtime.sampling import Chosen
from deltafin.runtime.segment import Checkpoint
from deltafin.runtime.sequence import Sequence
from deltafin.runtime.server.recent import Recent
from deltafin.runtime.states import PrefixStore, PrefixWriter

log = logging.getLogger(__name__)


@dataclass(slots=True)
class Start:
    """Where one request begins. `mark` counts from the first token of its prompt."""

    seq: Sequence | None = None  # that has seen the first tokens of the prompt, never all
    mark: Checkpoint | None = None  # a state on the way that is to be kept
    writer: PrefixWriter | None = None
    keeps_prompt: bool = False  # whether the state after the whole prompt is to be kept, too

    def generation(self, task: Task, seq: Sequence, ends: Callable[[Chosen], bool], draft: Draft | None) -> Generation:
        """The answer to a task, which goes on from `seq`. Raises BadRequest."""
        mark = self.mark
        return Generation(
            seq,
            task.ids[len(seq) :],
            max_new=task.max_new,
            sampling=task.sampling,
            draft=draft,
            ends=ends,
            checkpoint=None if mark is None else Checkpoint(mark.at - len(seq), mark.sink),
        )

    def settle(self) -> None:
        """After a pass: a state that is whole is kept. Never raises, as `Starts.keep`."""
        if self.writer is not None and self.writer.complete:
            self._let_go(self.writer)

    def close(self) -> None:
        """No more passes; what is not whole goes. Never raises."""
        if self.writer is not None:
            self._let_go(self.writer)

    def _let_go(self, writer: PrefixWriter) -> None:
        self.writer = None
        try:
            try:
                if writer.complete:
                    writer.commit()
            finally:
                writer.abort()  # which does nothing after a commit
        except Exception:
            log.exception("the state of a prompt is not kept")


class Starts:
    """Finds beginnings, and keeps those that others may begin with. For the engine's thread."""

    def __init__(self, model: Model, store: PrefixStore) -> None:
        self._model, self.store = model, store

    def find(self, task: Task, recent: Recent, seq: Sequence | None = None) -> Start:
        """The best beginning of a task's prompt, and what of the prompt is worth keeping on the way.

        `seq` is one that is decided on already.
        """
        if seq is None:
            known = recent.longest(task.ids)
            seq = self._stored(task.ids, known)
            if seq is None and known:
                seq = recent.take(task.ids)
        return self._marked(task, seq, 0 if seq is None else len(seq))

    def keep(self, seq: Sequence) -> bool:
        """What an answer has left, or what has been computed of one that will not be finished.

        Never raises: a state that is not kept is computed again.
        """
        try:
            return self.store.keep(self._model, seq)
        except Exception:
            log.exception("the state of %d tokens is not kept", len(seq))
            return False

    def _stored(self, ids: tuple[int, ...], known: int) -> Sequence | None:
        try:
            return self.store.longest(self._model, ids, more_than=known)
        except NoMemory:  # it is computed, then
            return None

    def _marked(self, task: Task, seq: Sequence | None, known: int) -> Start:
        """Instructions first, which most requests share; else the whole prompt but its last token.

        From there the same question is answered again, and a chat goes on whose client leaves reasoning out. Where the
        place is taken by the instructions, the whole prompt is kept between two passes, for the chat at least.
        """
        at, instructions = task.shared, True
        if not known < at < len(task.ids) or self.store.has(self._model, task.ids[:at]):
            at, instructions = len(task.ids) - 1, False
        if at <= known:
            return Start(seq)
        writer = self.store.writer(self._model, task.ids[:at])
        mark = None if writer is None else Checkpoint(at, writer)
        return Start(seq, mark, writer, keeps_prompt=instructions and at < len(task.ids) - 1)
