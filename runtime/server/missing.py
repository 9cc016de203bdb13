"""How many experts are not on this machine, for whoever asks often: each answer of a server says it."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from deltafin.store import Store

_SHARE = 0.02  # of a core, at most, for looking: K3 has 82,432 experts
_LEAST_S = 1.0  # between two looks
_MOST_S = 60.0  # then it is looked in any case: another process may have fetched


@dataclass(frozen=True, slots=True)
class _Seen:
    """What one look found."""

    missing: Mapping[int, Sequence[int]]  # experts by layer
    count: int
    events: tuple[int, int]  # spans that had been fetched and evicted when it began
    next_at: float  # of the monotonic clock: not looked again before


class MissingExperts:
    """Experts of a store that are in none of its roots or directories.

    The numbers are those of the last look. When one is asked for, the store has fetched meanwhile and the last look
    is not too recent, a thread of its own looks again; nobody waits for it.
    """

    def __init__(self, store: Store) -> None:
        """Looks at every expert, which for K3 takes about a second."""
        self._store = store
        self._every = range(store.catalog.config.num_experts)
        self._layers = store.catalog.config.moe_layers
        self.total = len(self._every) * len(self._layers)
        self._looking = threading.Lock()
        self._closed = False
        self._seen = self._look(dict.fromkeys(self._layers, self._every))

    @property
    def count(self) -> int:
        self._refresh()
        return self._seen.count

    @property
    def nbytes(self) -> int:
        return self.count * self._store.catalog.expert_nbytes

    @property
    def may_fetch(self) -> bool:
        """Whether they come when they are asked for; without, an answer that needs one fails."""
        return self._store.may_fetch

    def describe(self) -> str:
        """One line for people; empty if none is missing."""
        if not (count := self.count):
            return ""
        size = count * self._store.catalog.expert_nbytes
        shown = f"{size / 1e9:,.1f} GB" if size >= 10**9 else f"{-(-size // 10**6)} MB"
        then = "each is fetched when it is first needed" if self.may_fetch else "an answer that needs one fails"
        return f"{count:,} of {self.total:,} experts ({shown}) are not on this machine; {then}"

    def close(self) -> None:
        """Before the store is: no look is under way then. The last numbers stay."""
        with self._looking:
            self._closed = True

    def look(self) -> None:
        """Looks now, and waits for it."""
        with self._looking:
            if self._closed:
                return
            # One that was there stays there unless it is evicted, so as a rule only the missing ones are looked at.
            evicted = self._events()[1] != self._seen.events[1]
            self._seen = self._look(dict.fromkeys(self._layers, self._every) if evicted else self._seen.missing)

    def _look(self, where: Mapping[int, Iterable[int]]) -> _Seen:
        began, events = time.monotonic(), self._events()
        missing = {layer: self._missing(layer, experts) for layer, experts in where.items()}
        now = time.monotonic()
        next_at = now + max(_LEAST_S, (now - began) / _SHARE)
        return _Seen(missing, sum(map(len, missing.values())), events, next_at)

    def _missing(self, layer: int, experts: Iterable[int]) -> list[int]:
        numbers = list(experts)
        spans = self._store.catalog.expert_spans(layer, numbers)
        return [number for number, span in zip(numbers, spans, strict=True) if not self._store.is_local(span)]

    def _events(self) -> tuple[int, int]:
        counts = self._store.stats.counts
        return counts["http_spans"], counts["evicted_spans"]

    def _refresh(self) -> None:
        seen, now = self._seen, time.monotonic()
        changed = seen.events != self._events() or (seen.count and now > seen.next_at + _MOST_S)
        if not changed or now < seen.next_at or self._closed or self._looking.locked():
            return
        try:
            threading.Thread(target=self.look, name="missing experts", daemon=True).start()
        except RuntimeError:  # no thread to be had now
            pass
