"""Counters of one store: what was asked for, where it came from, and what went wrong."""

from __future__ import annotations

import threading
from collections import Counter

SOURCES = ("ram", "object", "shard", "pack", "http")


class StoreStats:
    """Thread-safe counters. `expert_reads` and `spine_reads` count visits by (layer, expert) and layer."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.expert_reads: Counter[tuple[int, int]] = Counter()
        self.spine_reads: Counter[int] = Counter()
        self.counts: Counter[str] = Counter()

    def add(self, **amounts: int) -> None:
        with self._lock:
            self.counts.update(amounts)

    def visit_expert(self, layer: int, expert: int) -> None:
        with self._lock:
            self.expert_reads[layer, expert] += 1

    def visit_spine(self, layer: int) -> None:
        with self._lock:
            self.spine_reads[layer] += 1

    def snapshot(self) -> dict[str, int]:
        """All counters now: bytes by source, bytes of the spine as they were used, and numbers of events."""
        with self._lock:
            names = [f"{source}_{what}" for source in SOURCES for what in ("spans", "nbytes")]
            fixed = dict.fromkeys([*names, "spine_nbytes", "head_nbytes", "embedding_nbytes"], 0)
            return {
                **fixed,
                **self.counts,
                "expert_visits": self.expert_reads.total(),
                "spine_visits": self.spine_reads.total(),
            }

    @property
    def read_nbytes(self) -> int:
        """Bytes that came from anywhere but memory."""
        with self._lock:
            return sum(self.counts[f"{source}_nbytes"] for source in SOURCES if source != "ram")
