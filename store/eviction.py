"""Eviction: cold experts make room for hot ones.

Only experts of the model in hand go, never the spine, a pinned expert, or an object that another model has on record.
Evicting is unlinking: open files stay valid, a vanished object is a miss, and its record stays, so that whatever is
fetched again must have the same bytes, proven or not. Two processes may evict at once.
"""

from __future__ import annotations

import heapq
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from deltafin.errors import DeltafinError, DiskError, NoSpace
from deltafin.indexer import Catalog, Span, disk_error
from deltafin.store.heat import Counts, Heat
from deltafin.store.objectlog import ObjectEntry
from deltafin.store.pins import Pair, Pins
from deltafin.store.roots import Root
from deltafin.store.stats import StoreStats

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Candidate:
    """An object that may go."""

    entry: ObjectEntry
    experts: tuple[Pair, ...]  # that it holds: usually one
    keys: tuple[bytes, ...]  # of their spans


@dataclass(slots=True)
class _Ranking:
    """The candidates of one root, coldest first. Heat in it may be outdated, and then too small."""

    heap: list[tuple[float, int, Candidate]]  # heat, age, what
    pinned: frozenset[Pair]
    stamp: tuple[int, int] | None
    changes: int  # of the root's log when it was made
    newest: int


def candidates(
    root: Root, key: Callable[[Span], bytes], catalog: Catalog, pinned: frozenset[Pair] | set[Pair]
) -> list[Candidate]:
    """What may go from a root, oldest first. Looks at every expert of the model and every record of the root."""
    config = catalog.config
    experts = {
        key(span): (layer, number)
        for layer in config.moe_layers
        for number, span in enumerate(catalog.expert_spans(layer, range(config.num_experts)))
    }
    owners: dict[bytes, list[tuple[Pair, bytes]]] = {}
    entries: dict[bytes, ObjectEntry] = {}
    kept: set[bytes] = set()
    for name, entry in list(root.log.entries.items()):
        entries[entry.sha256] = entry
        expert = experts.get(name)
        if expert is None or expert in pinned:
            kept.add(entry.sha256)
        else:
            owners.setdefault(entry.sha256, []).append((expert, name))
    return [
        Candidate(entries[sha256], tuple(pair for pair, _ in held), tuple(key for _, key in held))
        for sha256, held in owners.items()
        if sha256 not in kept
    ]


def _is_shared(root: Root, candidate: Candidate) -> bool:
    """Whether other spans are the same object by now: two revisions of a model have experts in common."""
    sha256 = candidate.entry.sha256
    return any(entry.sha256 == sha256 and key not in candidate.keys for key, entry in list(root.log.entries.items()))


def evict(root: Root, candidate: Candidate) -> bool:
    """Unlinks an object, and records that this was on purpose; False if it was gone. Raises NoSpace or DiskError."""
    removed = root.remove(candidate.entry)
    try:
        root.log.release(candidate.keys)
    except OSError as e:
        raise disk_error(e, root.log.path) from None
    return removed


def heat_of(experts: Sequence[Pair], counts: Counts) -> float:
    return float(sum(counts[pair] for pair in experts))


def coldest(found: Sequence[Candidate], counts: Counts) -> list[Candidate]:
    """Candidates in the order in which they go; of equally cold ones the oldest first."""
    return sorted(found, key=lambda candidate: heat_of(candidate.experts, counts))


class Evictor:
    """Makes room while a model runs, in roots with a budget. Thread-safe as long as one thread at a time asks."""

    def __init__(
        self, catalog: Catalog, key: Callable[[Span], bytes], heat: Heat, pins: Pins, stats: StoreStats
    ) -> None:
        self._catalog, self._key, self._heat, self._pins, self._stats = catalog, key, heat, pins, stats
        self._counts: Counts | None = None  # before this run
        self._rankings: dict[Root, _Ranking] = {}
        self._off = False

    def make_room(self, root: Root, nbytes: int, newcomer: Pair) -> bool:
        """Unlinks experts that are colder than the newcomer until it fits; what cannot fit so costs nobody anything."""
        assert root.space is not None
        if root.space.limits.budget is None or self._off:
            return False
        try:
            ranking = self._ranking(root)
        except DeltafinError as e:
            self._off = True
            log.warning("%s; nothing is evicted", e)
            return False
        limit = self._heat_now((newcomer,))
        lacking = nbytes - root.space.room()
        doomed: list[tuple[float, int, Candidate]] = []
        while lacking > 0 and (found := self._next(root, ranking, limit)) is not None:
            doomed.append(found)
            lacking -= found[2].entry.nbytes
        if lacking > 0:
            for found in doomed:
                heapq.heappush(ranking.heap, found)
            return False
        for _, _, candidate in doomed:
            self._evict(root, candidate)
        return True

    def kept(self, root: Root, entry: ObjectEntry, expert: Pair, key: bytes) -> None:
        """Takes note of an object that was published: later it may have to go itself."""
        if (ranking := self._rankings.get(root)) is not None and expert not in ranking.pinned:
            ranking.newest += 1
            candidate = Candidate(entry, (expert,), (key,))
            heapq.heappush(ranking.heap, (self._heat_now((expert,)), ranking.newest, candidate))

    def _ranking(self, root: Root) -> _Ranking:
        ranking, stamp = self._rankings.get(root), self._pins.stamp()
        if ranking is not None and ranking.stamp == stamp and ranking.heap:
            return ranking
        root.log.refresh_if_grown()
        # Where nothing may go, asking again for every expert that is streamed would take longer than the streaming.
        if ranking is None or ranking.stamp != stamp or ranking.changes != root.log.changes:
            pinned = frozenset(self._pins.read())
            found = candidates(root, self._key, self._catalog, pinned)
            heap = [(self._heat_now(c.experts), age, c) for age, c in enumerate(found)]
            heapq.heapify(heap)
            ranking = self._rankings[root] = _Ranking(heap, pinned, stamp, root.log.changes, len(heap))
        return ranking

    def _next(self, root: Root, ranking: _Ranking, limit: float) -> tuple[float, int, Candidate] | None:
        """The coldest object that is there and colder than `limit`, taken out of the ranking."""
        while ranking.heap:
            noted, age, candidate = ranking.heap[0]
            heat = self._heat_now(candidate.experts)
            if heat > noted:
                heapq.heapreplace(ranking.heap, (heat, age, candidate))
            elif heat >= limit:
                return None
            else:
                heapq.heappop(ranking.heap)
                if root.has(candidate.entry) and not _is_shared(root, candidate):
                    return heat, age, candidate
        return None

    def _heat_now(self, experts: Sequence[Pair]) -> float:
        if self._counts is None:
            self._counts = self._heat.read()
        return heat_of(experts, self._counts) + sum(self._stats.expert_reads[pair] for pair in experts)

    def _evict(self, root: Root, candidate: Candidate) -> None:
        try:
            if evict(root, candidate):
                self._stats.add(evicted_spans=1, evicted_nbytes=candidate.entry.nbytes)
        except (NoSpace, DiskError) as e:
            log.warning("%s", e)
