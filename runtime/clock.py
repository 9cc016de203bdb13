"""Where the time of a pass goes, layer by layer."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field, fields


def typical(seconds: Sequence[float]) -> float:
    """The mean without the largest and smallest tenth: what a busy machine does to one of many is left out."""
    cut = len(seconds) // 10
    return statistics.fmean(sorted(seconds)[cut : len(seconds) - cut])


@dataclass(slots=True)
class LayerTimes:
    """Seconds of one layer in one pass; together they are nearly all of it."""

    spine_wait_s: float = 0.0  # for pieces of the spine
    attention_s: float = 0.0  # everything up to the attention's output, and what is between that and the router
    shared_s: float = 0.0  # router, shared experts, latent projections; or the dense MLP
    expert_wait_s: float = 0.0  # for experts
    expert_s: float = 0.0  # multiplying them
    experts: int = 0  # that were multiplied
    reads: int = 0  # of these, those that were not in memory
    reads_s: float = 0.0  # from the first expert's read to the end of the last one's; much of it beside the others

    def add(self, other: LayerTimes) -> None:
        for f in fields(LayerTimes):
            setattr(self, f.name, getattr(self, f.name) + getattr(other, f.name))


@dataclass(slots=True)
class PassTimes:
    """One pass."""

    rows: int = 0
    total_s: float = 0.0
    head_s: float = 0.0  # final norm and head, without waiting
    layers: list[LayerTimes] = field(default_factory=list)

    def sums(self) -> LayerTimes:
        total = LayerTimes()
        for layer in self.layers:
            total.add(layer)
        return total


@dataclass(slots=True)
class RunTimes:
    """All passes of a model so far."""

    passes: int = 0
    rows: int = 0
    total_s: float = 0.0
    head_s: float = 0.0
    layers: LayerTimes = field(default_factory=LayerTimes)  # sums

    def add(self, times: PassTimes) -> None:
        self.passes += 1
        self.rows += times.rows
        self.total_s += times.total_s
        self.head_s += times.head_s
        self.layers.add(times.sums())
