"""The batches that are in the engine's passes now."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

from deltafin.errors import DeltafinError, DiskError, NetworkError, NoMemory, NoSpace
from deltafin.runtime.batch import Batch
from deltafin.runtime.generation import Generation, Runner, Step
from deltafin.runtime.server.errors import api_error
from deltafin.runtime.server.riding import Riding
from deltafin.runtime.server.room import Room

TRIES = 3  # of a request whose pass fails by itself for a reason that may go away


class Riders:
    """What a `Company` does, for several batches: the older one first. For the engine's thread.

    But for `all`, which any may read, and `add` and `remove`, which are for one thread at a time.
    """

    def __init__(self, give_back: Callable[[Riding], None]) -> None:
        """`give_back` takes a batch that is over, cancelled or in trouble, and calls `remove`."""
        self.all: tuple[Riding, ...] = ()  # replaced, never changed
        self._give_back = give_back
        self._tries: Counter[bytes] = Counter()  # by the key of a request

    def add(self, riding: Riding, order: Sequence[str]) -> None:
        """`order` are the ids of all batches, the oldest first."""
        self.all = tuple(sorted((*self.all, riding), key=lambda r: order.index(r.id)))

    def remove(self, riding: Riding) -> None:
        """Its answers have left the runner."""
        self.all = tuple(r for r in self.all if r is not riding)

    def find(self, batch_id: str) -> Riding | None:
        return next((riding for riding in self.all if riding.id == batch_id), None)

    def ready(self) -> bool:
        return any(riding.wants_a_turn for riding in self.all)

    def join(self, runner: Runner, room: Room) -> None:
        self._let_leave(runner)
        self._join(runner, room)
        waiting = next((r for r in self.all if r.batch.waits), None)
        # Nobody rides, and still there is no room for it: what others keep for later is in the way.
        if waiting is not None and not runner.active and self._let_go(waiting, runner):
            self._join(runner, room)
        self._let_leave(runner)

    def owner(self, generation: Generation) -> Riding | None:
        return next((riding for riding in self.all if riding.batch.owns(generation)), None)

    def took(self, steps: Sequence[Step]) -> None:
        for riding in self.all:
            try:
                riding.batch.took([step for step in steps if riding.batch.owns(step.generation)])
            except DeltafinError as e:
                riding.trouble = e

    def step_back(self, runner: Runner) -> bool:
        return any(riding.batch.step_back(runner) for riding in reversed(self.all))

    def failed(self, generation: Generation, error: Exception, *, alone: bool) -> None:
        riding = self.owner(generation)
        assert riding is not None
        if not alone or not self._is_to_blame(riding.batch, generation, error):
            riding.batch.put_back(generation)
            riding.trouble = error
            return
        told = api_error(error)
        try:
            riding.batch.give_up(generation, told.code or "server_error", str(told))
        except DeltafinError as e:
            riding.trouble = e

    def _join(self, runner: Runner, room: Room) -> None:
        for riding in self.all:
            if riding.leaves:
                continue
            try:
                riding.batch.join(runner, room)
            except (DeltafinError, MemoryError) as e:
                riding.trouble = e
            if riding.batch.waits and riding.trouble is None:
                return  # there is no room for the next one, and so none for younger batches

    def _let_go(self, but: Riding, runner: Runner) -> bool:
        """Of what batches keep, and nobody goes on from now; whether there was anything."""
        return any([riding.batch.step_back(runner) for riding in self.all if riding is not but])

    def _let_leave(self, runner: Runner) -> None:
        for riding in self.all:
            if riding.leaves:
                riding.leave(runner)
                self._give_back(riding)

    def _is_to_blame(self, batch: Batch, generation: Generation, error: Exception) -> bool:
        """Whether a request that failed by itself would fail again."""
        if isinstance(error, NetworkError | NoSpace):
            return False
        key = batch.key_of(generation)
        if key is None or not isinstance(error, NoMemory | MemoryError | DiskError):
            return True
        self._tries[key] += 1
        return self._tries[key] >= TRIES
