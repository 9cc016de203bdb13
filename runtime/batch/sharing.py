"""Instructions that many requests of a batch begin with are computed once.

They ride in the passes like an answer, and every request that begins with them goes on from a copy of their state. That
changes no bit of an answer, only what it takes. One beginning is kept at a time, as long as requests need it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from deltafin.errors import NoMemory
from deltafin.runtime.batch.requests import Requests, beginning_key
from deltafin.runtime.batch.room import Room
from deltafin.runtime.generation import Generation, Runner
from deltafin.runtime.model import Model
from deltafin.runtime.openai import Task
from deltafin.runtime.sequence import Sequence
from deltafin.runtime.states import PrefixStore


class Beginnings(Protocol):
    """What earlier runs have computed of the beginnings of prompts."""

    def longest(self, ids: tuple[int, ...]) -> Sequence | None:
        """A sequence of the model that has seen a proper beginning of `ids`, for the caller to go on with; or None."""

    def keep(self, seq: Sequence) -> None:
        """Takes note of a sequence that a later run may begin with; it must not change."""


class StoredBeginnings:
    """Those that are kept on disk by a model's prefix store."""

    def __init__(self, model: Model, store: PrefixStore) -> None:
        self._model, self._store = model, store

    def longest(self, ids: tuple[int, ...]) -> Sequence | None:
        try:
            return self._store.longest(self._model, ids)
        except NoMemory:  # it is computed then, as memory was planned for
            return None

    def keep(self, seq: Sequence) -> None:
        self._store.keep(self._model, seq)


def worth_sharing(requests: Requests, rows: int) -> dict[bytes, int]:
    """How many open requests have each beginning that saves at least the `rows` of a pass, which it may take longer."""
    return {key: count for key, count, length in requests.beginnings() if (count - 1) * length >= rows}


@dataclass(slots=True)
class _Kept:
    key: bytes
    seq: Sequence  # that sees the beginning, and no more
    generation: Generation | None  # of one token that nobody wants, as long as the beginning is computed
    runner: Runner
    room: Room
    taken: int  # of the room


class Sharing:
    """Gives each request of a batch the sequence that it goes on from.

    `counts` are of requests by `beginning_key`; a beginning that is not in it is not shared. One takes room as an
    answer does; where there is none for it, requests compute their own.
    """

    def __init__(self, model: Model, counts: Mapping[bytes, int], beginnings: Beginnings | None = None) -> None:
        self._model = model
        self._left = dict(counts)
        self._beginnings = beginnings
        self._kept: _Kept | None = None
        self.saved = 0  # tokens that did not have to be computed

    @property
    def under_way(self) -> bool:
        """Whether a beginning is being computed."""
        generation = None if self._kept is None else self._kept.generation
        return generation is not None and generation.finish is None

    def owns(self, generation: Generation) -> bool:
        return self._kept is not None and self._kept.generation is generation

    def is_ready(self, task: Task, runner: Runner, room: Room) -> bool:
        """False if what the task begins with is being computed, from now on or already: ask again after a pass."""
        key = beginning_key(task)
        if self._kept is None and self._left.get(key, 0) > 1 and room.fits_both(task.shared, task.tokens):
            self._kept = self._begin(key, task, runner, room)
        kept = self._kept
        if kept is None:
            return True
        if kept.taken + room.size_of(task.tokens) > room.tokens:  # it would never find room beside that
            self._left.pop(kept.key)
            self.let_go()
            return True
        if kept.key != key:
            return True
        if kept.generation is not None and kept.generation.finish is not None:
            kept.generation = None
            if self._beginnings is not None:
                self._beginnings.keep(kept.seq)
        return kept.generation is None

    def sequence(self, task: Task) -> Sequence:
        """A sequence of its own for a task that is ready; it may have seen a part of the prompt, never all of it."""
        kept, key = self._kept, beginning_key(task)
        seq = self._fresh(task.ids) if kept is None or kept.key != key else self._model.fork(kept.seq)
        self.saved += len(seq)
        self.leave_out(task)
        return seq

    def leave_out(self, task: Task) -> None:
        """A task needs no beginning any more. With the last one that does, it goes."""
        key = beginning_key(task)
        if key in self._left:
            self._left[key] -= 1
            if self._kept is not None and self._kept.key == key and not self._left[key]:
                self.let_go()

    def come_back(self, task: Task) -> None:
        """A task that had a sequence will ask for one again."""
        key = beginning_key(task)
        if key in self._left:
            self._left[key] += 1

    def let_go(self) -> bool:
        """Gives the room of the beginning back; it is computed again if requests still need it. False without one."""
        kept, self._kept = self._kept, None
        if kept is None:
            return False
        if kept.generation is not None and kept.generation in kept.runner.active:
            kept.runner.remove(kept.generation)
        kept.room.give(kept.taken)
        return True

    def failed(self, *, alone: bool) -> None:
        """The beginning could not be computed. If it is to blame, each request finds that out by itself."""
        if alone and self._kept is not None:
            self._left.pop(self._kept.key)
        self.let_go()

    def _begin(self, key: bytes, task: Task, runner: Runner, room: Room) -> _Kept:
        seq = self._fresh(task.ids[: task.shared + 1])  # one more, since what it has seen is less than is asked for
        rest = task.ids[len(seq) : task.shared]
        self.saved += len(seq)
        generation = Generation(seq, rest, max_new=1) if rest else None
        if generation is not None:
            runner.add(generation)
        return _Kept(key, seq, generation, runner, room, room.take(task.shared))

    def _fresh(self, ids: tuple[int, ...]) -> Sequence:
        found = self._beginnings.longest(ids) if self._beginnings is not None else None
        return self._model.sequence() if found is None else found
