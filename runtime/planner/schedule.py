"""Who waits for whom in a pass: one that computes, one drive that serves reads, and the ring between them.

The pass is walked in the order in which the engine walks it, with its rules: pieces of the spine are asked for in their
order as soon as there is room in the ring, experts before all others, both are served by a drive of a fixed rate, one
after the other, and what is here is computed with at once. Only the clock is imagined.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from deltafin.runtime.memory import MemoryPlan
from deltafin.store import DEPTH, LayerPieces, least_ring_nbytes, slot_nbytes


@dataclass(frozen=True, slots=True)
class LayerWork:
    """Seconds of computing in a layer: for each matrix a weight of it, and what comes on top, in order of time."""

    matrix_s: dict[str, float]  # by name, all of its rows
    attention_s: float  # beside its matrices, the program's part included
    shared_s: float
    router: str | None  # the matrix after which the experts are asked for; None without experts
    after: str | None  # the matrix that waits for the experts' sum
    chosen: float  # experts that are multiplied
    reads: float  # of these, those that are read
    expert_s: float  # one of them
    read_s: float  # what the program adds for one that is read


@dataclass(slots=True)
class Waits:
    """What was waited for, and when the pass was through."""

    spine_s: float = 0.0
    expert_s: float = 0.0
    end_s: float = 0.0


class _Drive:
    """Serves reads one after the other; so many are accepted at once, and then come before urgent ones."""

    def __init__(self, rate: float) -> None:
        self._rate = rate
        self._free_at = 0.0
        self._accepted: deque[float] = deque([0.0] * DEPTH, DEPTH)  # ends of the last ones
        self._queue: deque[tuple[int, float, int]] = deque()  # number, asked for at, bytes
        self._ends: dict[int, float] = {}

    def ask(self, number: int, now: float, nbytes: int) -> None:
        self._queue.append((number, now, nbytes))

    def urgent(self, now: float, nbytes: float) -> float:
        """When a read that goes before all that were not accepted yet will be here."""
        self._accept_until(now)
        return self._serve(now, nbytes)

    def end(self, number: int) -> float:
        """When the read of that number will be here."""
        while number not in self._ends:
            self._accept_next()
        return self._ends.pop(number)

    def _accept_until(self, now: float) -> None:
        while self._queue and max(self._queue[0][1], self._accepted[0]) < now:
            self._accept_next()

    def _accept_next(self) -> None:
        number, asked_at, nbytes = self._queue.popleft()
        self._ends[number] = self._serve(asked_at, nbytes)

    def _serve(self, asked_at: float, nbytes: float) -> float:
        start = max(self._free_at, asked_at, self._accepted[0])
        self._free_at = start + nbytes / self._rate
        self._accepted.append(self._free_at)
        return self._free_at


class _Ring:
    """Which parts of the ring are taken, as `store.ring` takes them."""

    def __init__(self, nbytes: int) -> None:
        self._nbytes = nbytes
        self._taken: deque[tuple[int, int]] = deque()

    def take(self, nbytes: int) -> bool:
        start, end = 0, self._nbytes
        if self._taken:
            oldest, start = self._taken[0][0], self._taken[-1][1]
            if start <= oldest:
                end = oldest
            elif start + nbytes > end:
                start, end = 0, oldest
        if start + nbytes > end:
            return False
        self._taken.append((start, start + nbytes))
        return True

    def release(self) -> None:
        self._taken.popleft()


@dataclass(slots=True)
class _Load:
    """A piece of a layer that has to be read in this pass."""

    number: int
    layer: int
    nbytes: int
    slot_nbytes: int
    held: bool
    kept: bool  # it has memory of its own


class _Walk:
    """The spine on its way, as `store.spine` brings it."""

    def __init__(self, layers: Sequence[LayerPieces], plan: MemoryPlan, drive: _Drive, *, cold: bool) -> None:
        resident = frozenset(plan.resident)
        away = [layer for n, layer in enumerate(layers) if n not in resident]
        self._ring = _Ring(max(plan.ring_nbytes, least_ring_nbytes(away)))
        self._drive = drive
        self._buffers: list[int | None] = [None, None]  # whose held pieces they have
        self.held: list[list[_Load]] = []
        self.streamed: list[dict[str, list[_Load]]] = []
        self._queue: deque[_Load] = deque()
        count = 0
        for n, layer in enumerate(layers):
            held: list[_Load] = []
            streamed: dict[str, list[_Load]] = {}
            if cold or n not in resident:
                for piece in (*layer.held, *layer.streamed):
                    kept = n in resident
                    load = _Load(count, n, piece.nbytes, slot_nbytes(piece.nbytes), piece.matrix is None, kept)
                    count += 1
                    self._queue.append(load)
                    if piece.matrix is None:
                        held.append(load)
                    else:
                        streamed.setdefault(piece.matrix, []).append(load)
            self.held.append(held)
            self.streamed.append(streamed)
        self.advance(0.0)

    def layer(self, number: int, now: float) -> None:
        """The layers before are done with."""
        self._buffers = [owner if owner is not None and owner >= number else None for owner in self._buffers]
        self.advance(now)

    def release(self, load: _Load, now: float) -> None:
        if not load.held and not load.kept:
            self._ring.release()
            self.advance(now)

    def advance(self, now: float) -> None:
        while self._queue and self._has_room(self._queue[0]):
            load = self._queue.popleft()
            self._drive.ask(load.number, now, load.nbytes)

    def _has_room(self, load: _Load) -> bool:
        if load.kept:
            return True
        if not load.held:
            return self._ring.take(load.slot_nbytes)
        if load.layer in self._buffers:
            return True
        if None not in self._buffers:
            return False
        self._buffers[self._buffers.index(None)] = load.layer
        return True


def waits(
    layers: Sequence[LayerPieces],
    work: Sequence[LayerWork],
    plan: MemoryPlan,
    *,
    expert_nbytes: int,
    rate: float,
    piece_s: float,
    head_s: float,
    cold: bool,
) -> Waits:
    """Walks one pass; `work` is of the layers without the head, which is the last of `layers`."""
    drive = _Drive(rate)
    walk = _Walk(layers, plan, drive, cold=cold)
    found = Waits()
    now = 0.0
    owed = 0.0  # experts are read whole: half of one a layer is one in every second layer

    def take(loads: Sequence[_Load], compute_s: float, now: float) -> float:
        """Pieces one after the other, each computed with as soon as it is here."""
        for load in loads:
            here = drive.end(load.number)
            found.spine_s += max(0.0, here - now)
            now = max(now, here) + piece_s + compute_s / len(loads)
            walk.release(load, now)
        return now if loads else now + compute_s

    for n, of in enumerate(work):
        walk.layer(n, now)
        now = take(walk.held[n], 0.0, now) + of.attention_s + of.shared_s / 2
        experts: _Experts | None = None
        for name, compute_s in of.matrix_s.items():
            if name == of.after and experts is not None:
                now = experts.land(now, found)
            now = take(walk.streamed[n].get(name, ()), compute_s, now)
            if name == of.router:
                owed += of.reads
                experts = _Experts(drive, of, int(owed), plan.slots, expert_nbytes, now)
                owed -= int(owed)
        now += of.shared_s / 2
    walk.layer(len(work), now)
    now = take(walk.held[-1], 0.0, now)
    head = [load for loads in walk.streamed[-1].values() for load in loads]
    found.end_s = take(head, head_s, now)
    return found


class _Experts:
    """The experts of a layer on their way: as many as there are slots, the next whenever one is through.

    They go in bundles of a quarter of the slots: a prompt has so many that each alone would take long to imagine.
    """

    def __init__(self, drive: _Drive, of: LayerWork, reads: int, slots: int, nbytes: int, now: float) -> None:
        self._drive, self._of, self._reads = drive, of, reads
        each = max(1, slots // 4) if reads > slots else 1
        self._bundles = deque(min(each, reads - at) for at in range(0, reads, each))  # experts in each
        self._nbytes = nbytes
        self._flying: deque[tuple[int, float]] = deque()  # experts, here at
        for _ in range(max(1, slots // each)):
            self._ask(now)

    def land(self, now: float, found: Waits) -> float:
        """Multiplies those in memory, then the others as they come; when all are through."""
        now += max(0.0, self._of.chosen - self._reads) * self._of.expert_s
        while self._flying:
            count, here = self._flying.popleft()
            found.expert_s += max(0.0, here - now)
            now = max(now, here) + count * (self._of.expert_s + self._of.read_s)
            self._ask(now)
        return now

    def _ask(self, now: float) -> None:
        if self._bundles:
            count = self._bundles.popleft()
            self._flying.append((count, self._drive.urgent(now, count * self._nbytes)))
