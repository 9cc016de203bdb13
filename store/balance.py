"""Which drive reads what: each span where it is there soonest, and some in parts so that all drives end together.

A layer waits for the slowest of its reads. The plan is a pure function of what lies where, what waits at each drive and
how fast each is. It is a greedy one that is then evened out: the drive that ends last gives bytes to one that has
the same span and ends earlier, until nobody can give. Bytes are handed on through a drive in between, too, so only
where a part would be too small does the end lie above that of the best possible plan.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from deltafin.cext import _io

# Below this the latency of one more read weighs more than what is evened out. A multiple of a page.
LEAST_PART_NBYTES = 1 << 20
_GAIN_S = 0.0005  # an earlier end than this is worth a move
_TURNS = 8  # moves for each drive at most


@dataclass(frozen=True, slots=True)
class Place:
    """One copy of a span: on which drive, and where in a page it begins. One slot can take parts of one phase only."""

    drive: int
    phase: int = 0


@dataclass(frozen=True, slots=True)
class Want:
    """A span to read; `places` has each drive at most once, and at least one."""

    nbytes: int
    places: tuple[Place, ...]


@dataclass(frozen=True, slots=True)
class Part:
    """Bytes `begin` to `end` of a span, to be read from one drive."""

    drive: int
    begin: int
    end: int


@dataclass(frozen=True, slots=True)
class ReadPlan:
    """For each want its parts, ascending; `order` has the wants by when their first byte is read."""

    parts: tuple[tuple[Part, ...], ...]
    order: tuple[int, ...]
    end_s: float  # when the last drive is through, from now


def plan_reads(
    wants: Sequence[Want],
    queued_s: Sequence[float],
    rates: Sequence[float],
    least_nbytes: int = LEAST_PART_NBYTES,
) -> ReadPlan:
    """A plan for drives of these rates, in bytes a second, each of which is busy for `queued_s` from now on."""
    state = _State(wants, list(queued_s), rates, least_nbytes + _io.PAGE)  # a cut may move by half a page
    state.assign()
    state.even_out()
    begins = state.begins(queued_s)
    return ReadPlan(
        tuple(_cut(want, shares) for want, shares in zip(wants, state.shares, strict=True)),
        tuple(sorted(range(len(wants)), key=begins.__getitem__)),
        max((state.ends[drive] for shares in state.shares for drive in shares), default=0.0),
    )


@dataclass(slots=True)
class _Move:
    """Bytes of a want that go from one drive to another, and when the later of the two then ends."""

    want: int
    source: int
    target: int
    nbytes: float
    end_s: float


class _State:
    def __init__(self, wants: Sequence[Want], ends: list[float], rates: Sequence[float], least: int) -> None:
        self.wants, self.ends, self.rates, self.least = wants, ends, rates, least
        self.shares: list[dict[int, float]] = [{} for _ in wants]  # bytes by drive
        self.phases = [{place.drive: place.phase for place in want.places} for want in wants]

    def assign(self) -> None:
        """Each want, the least movable first, goes whole to the drive that has it soonest."""
        for number in sorted(range(len(self.wants)), key=lambda n: len(self.wants[n].places)):
            nbytes = self.wants[number].nbytes
            drive = min(self.phases[number], key=lambda d: self.ends[d] + nbytes / self.rates[d])
            self.ends[drive] += nbytes / self.rates[drive]
            self.shares[number][drive] = nbytes

    def even_out(self) -> None:
        for _ in range(_TURNS * len(self.ends)):
            used = {drive for shares in self.shares for drive in shares}
            if len(used) == 0:
                return
            last = max(self.ends[drive] for drive in used)
            # Of drives that end together any may be the one that can give.
            late = [drive for drive in used if self.ends[drive] > last - _GAIN_S]
            move = next((m for drive in late if (m := self._best_move(drive)) is not None), None)
            if move is None:
                return
            self._apply(move)

    def begins(self, queued_s: Sequence[float]) -> list[float]:
        """When each want is begun if each drive reads its parts in the order of the wants."""
        at = list(queued_s)
        begins = []
        for shares in self.shares:
            begins.append(min(at[drive] for drive in shares))
            for drive, nbytes in shares.items():
                at[drive] += nbytes / self.rates[drive]
        return begins

    def _best_move(self, source: int) -> _Move | None:
        best: _Move | None = None
        for number, shares in enumerate(self.shares):
            if source not in shares:
                continue
            for target in self.phases[number]:
                if self.ends[target] < self.ends[source] - _GAIN_S:
                    move = self._move(number, source, target)
                    if move is not None and (best is None or move.end_s < best.end_s):
                        best = move
        return best if best is not None and best.end_s < self.ends[source] - _GAIN_S else None

    def _move(self, number: int, source: int, target: int) -> _Move | None:
        """The bytes that best go from `source` to `target`: so many that both end together, if that can be."""
        shares, least = self.shares[number], self.least
        here, there = shares[source], shares.get(target, 0.0)
        even = (self.ends[source] - self.ends[target]) / (1 / self.rates[source] + 1 / self.rates[target])
        amounts = [n for n in (even, least - there, here - least, here) if self._may_move(number, source, target, n)]
        return min((self._ending(number, source, target, n) for n in amounts), key=lambda m: m.end_s, default=None)

    def _may_move(self, number: int, source: int, target: int, nbytes: float) -> bool:
        """Whether no part gets too small by it, and all parts keep one phase."""
        shares, phases = self.shares[number], self.phases[number]
        left = shares[source] - nbytes
        others = {drive for drive in shares if drive != target and (drive != source or left > 0)}
        if not 0 < nbytes <= shares[source] or 0 < left < self.least:
            return False
        if others and shares.get(target, 0.0) + nbytes < self.least:
            return False
        return all(phases[drive] == phases[target] for drive in others)

    def _ending(self, number: int, source: int, target: int, nbytes: float) -> _Move:
        ends = self.ends[source] - nbytes / self.rates[source], self.ends[target] + nbytes / self.rates[target]
        return _Move(number, source, target, nbytes, max(ends))

    def _apply(self, move: _Move) -> None:
        shares = self.shares[move.want]
        shares[move.source] -= move.nbytes
        shares[move.target] = shares.get(move.target, 0.0) + move.nbytes
        if shares[move.source] <= 0:
            del shares[move.source]
        self.ends[move.source] -= move.nbytes / self.rates[move.source]
        self.ends[move.target] += move.nbytes / self.rates[move.target]


def _cut(want: Want, shares: dict[int, float]) -> tuple[Part, ...]:
    """Shares as parts, in the order of the places. Cuts lie on pages of the file, so each part is read directly."""
    drives = [place for place in want.places if place.drive in shares]
    parts, begin, share = [], 0, 0.0
    for place in drives[:-1]:
        share += shares[place.drive]
        end = round((place.phase + share) / _io.PAGE) * _io.PAGE - place.phase
        parts.append(Part(place.drive, begin, end))
        begin = end
    return (*parts, Part(drives[-1].drive, begin, want.nbytes))
