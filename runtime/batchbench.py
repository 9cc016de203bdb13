"""What does one more conversation cost in a pass?

Passes of one new token each, for growing numbers of sequences with states of their own. The bytes of experts that a
pass reads are counted by the store and compared with the router's choices: each expert that any row chose, once.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from deltafin.errors import DeltafinError
from deltafin.indexer import ModelConfig
from deltafin.runtime.clock import LayerTimes, PassTimes
from deltafin.runtime.fullsize import device_nbytes
from deltafin.runtime.memory import KEY_BLOCK, MemoryPlan, Want
from deltafin.runtime.model import Model
from deltafin.runtime.observer import LayerProgress
from deltafin.runtime.passbench import Progress, resident_plan, streamed_plan
from deltafin.runtime.segment import Segment
from deltafin.runtime.sequence import Sequence as Conversation
from deltafin.store import Store

Plan = Callable[[Store, Want], MemoryPlan]


@dataclass(frozen=True, slots=True)
class BatchPass:
    """One pass in which each of some sequences gets a token."""

    sequences: int
    unions: tuple[int, ...]  # experts that any row chose, by MoE layer
    expert_nbytes: int  # read, which is as many experts
    spine_nbytes: int  # read: of the layers, the head and the embedding
    device_nbytes: int | None  # read from the device for this process, not from the page cache; None if unknown
    times: PassTimes


@dataclass(frozen=True, slots=True)
class BatchCost:
    """Passes over so many sequences, of several rounds."""

    passes: tuple[BatchPass, ...]

    @property
    def sequences(self) -> int:
        return self.passes[0].sequences

    @property
    def walls(self) -> list[float]:
        """Seconds a pass, ascending."""
        return sorted(p.times.total_s for p in self.passes)

    @property
    def wall_s(self) -> float:
        return statistics.median(self.walls)

    @property
    def tokens_s(self) -> float:
        return self.sequences / self.wall_s

    @property
    def union(self) -> float:
        """Experts of a layer, on average."""
        return statistics.fmean(count for p in self.passes for count in p.unions)

    @property
    def expert_nbytes(self) -> float:
        return statistics.fmean(p.expert_nbytes for p in self.passes)

    @property
    def spine_nbytes(self) -> float:
        return statistics.fmean(p.spine_nbytes for p in self.passes)

    @property
    def device_nbytes(self) -> float | None:
        known = [p.device_nbytes for p in self.passes if p.device_nbytes is not None]
        return statistics.fmean(known) if len(known) == len(self.passes) else None

    @property
    def parts(self) -> LayerTimes:
        """Sums over the layers of all passes."""
        total = LayerTimes()
        for p in self.passes:
            total.add(p.times.sums())
        return total

    @property
    def head_s(self) -> float:
        return statistics.fmean(p.times.head_s for p in self.passes)

    def all_layers_s(self, ours: ModelConfig, whole: ModelConfig) -> float | None:
        """Seconds a pass of the whole model, computed: each of its layers as long as ours of the kind, and the head.

        None if a kind of layer is not among ours.
        """
        seconds: dict[tuple[bool, bool], list[float]] = {}
        for p in self.passes:
            for layer, times in enumerate(p.times.layers):
                seconds.setdefault(_kind(ours, layer), []).append(_total_s(times))
        kinds = [_kind(whole, layer) for layer in range(whole.num_layers)]
        if not set(kinds) <= set(seconds):
            return None
        return self.head_s + sum(statistics.median(seconds[kind]) for kind in kinds)


def _kind(config: ModelConfig, layer: int) -> tuple[bool, bool]:
    return config.is_kda(layer), config.is_moe(layer)


def _total_s(times: LayerTimes) -> float:
    return times.spine_wait_s + times.attention_s + times.shared_s + times.expert_wait_s + times.expert_s


def costs(passes: Sequence[BatchPass]) -> list[BatchCost]:
    """By number of sequences, ascending."""
    counts = sorted({p.sequences for p in passes})
    return [BatchCost(tuple(p for p in passes if p.sequences == count)) for count in counts]


def uniform_union(config: ModelConfig, rows: int) -> float:
    """Experts that so many rows choose together, on average, if each of them chooses at random."""
    return config.num_experts * (1 - (1 - config.top_k / config.num_experts) ** rows)


def marginal_s(before: BatchCost, after: BatchCost) -> float:
    """Seconds a pass that each further sequence takes."""
    return (after.wall_s - before.wall_s) / (after.sequences - before.sequences)


def streamed(store: Store, sequences: int) -> MemoryPlan:
    """Nothing of the spine stays, and no expert: so that they are read."""
    plan = streamed_plan(store, _want(sequences))
    return replace(plan, resident_experts=0, resident_experts_nbytes=0)


def resident(store: Store, sequences: int) -> MemoryPlan:
    """All of the spine stays, and no expert."""
    return resident_plan(store, _want(sequences))


def _want(sequences: int) -> Want:
    # Latents grow by whole blocks, in each sequence.
    return Want(rows=sequences, tokens=sequences * KEY_BLOCK, sequences=sequences)


def measure_batches(model: Model, counts: Sequence[int], progress: Progress = lambda layers: None) -> list[BatchPass]:
    """A pass of each number of sequences, after one that begins all of them and fills what stays in memory."""
    tokens = np.random.default_rng(64)  # no text; the same on every machine
    sequences = [model.sequence() for _ in range(max(counts))]
    seen = _Unions(progress)
    return [_pass(model, sequences[:count], tokens, seen) for count in (len(sequences), *counts)][1:]


def _pass(model: Model, sequences: Sequence[Conversation], tokens: np.random.Generator, seen: _Unions) -> BatchPass:
    """Feeds each sequence a token of its own, and asks for the logits that follow."""
    stats = model.store.stats
    before, visits = _Reads.of(model), stats.expert_reads.copy()
    seen.chosen = {}
    ids = tokens.integers(0, model.config.vocab_size, len(sequences)).tolist()
    model.forward([Segment(s, [i]) for s, i in zip(sequences, ids, strict=True)], logits="last", observer=seen)
    after = _Reads.of(model)
    times = model.last_pass
    assert times is not None
    expert_nbytes = after.expert_nbytes - before.expert_nbytes
    _check(seen.chosen, stats.expert_reads - visits, expert_nbytes, model.store.catalog.expert_nbytes)
    return BatchPass(
        sequences=len(sequences),
        unions=tuple(len(seen.chosen[layer]) for layer in model.config.moe_layers),
        expert_nbytes=expert_nbytes,
        spine_nbytes=after.spine_nbytes - before.spine_nbytes,
        device_nbytes=None if None in (before.device, after.device) else (after.device or 0) - (before.device or 0),
        times=times,
    )


def _check(chosen: dict[int, set[int]], visits: Counter[tuple[int, int]], expert_nbytes: int, span_nbytes: int) -> None:
    """Raises DeltafinError unless each chosen expert was asked for once, and exactly their bytes were read."""
    union = Counter((layer, expert) for layer, experts in chosen.items() for expert in experts)
    if visits != union:
        raise DeltafinError(
            f"{visits.total()} experts were asked for, {visits.keys() ^ union.keys() or 'none'} of them in vain or not "
            f"at all; the router chose {union.total()}"
        )
    if expert_nbytes != len(union) * span_nbytes:
        raise DeltafinError(
            f"{expert_nbytes:,} bytes of experts were read; {len(union)} were chosen, of {span_nbytes:,} bytes each"
        )


@dataclass(frozen=True, slots=True)
class _Reads:
    """Bytes that were read so far, from anywhere but memory."""

    expert_nbytes: int
    spine_nbytes: int
    device: int | None

    @classmethod
    def of(cls, model: Model) -> _Reads:
        """What is in memory is spine only: no expert stays."""
        counts = model.store.stats.snapshot()
        used = counts["spine_nbytes"] + counts["head_nbytes"] + counts["embedding_nbytes"]
        spine = used - counts["ram_nbytes"]
        return cls(model.store.stats.read_nbytes - spine, spine, device_nbytes())


class _Unions(LayerProgress):
    """Which experts a pass chose."""

    def __init__(self, progress: Progress) -> None:
        super().__init__(progress)
        self.chosen: dict[int, set[int]] = {}

    def routes(self, layer: int, ids: npt.NDArray[np.int32], weights: npt.NDArray[np.float32]) -> None:
        self.chosen[layer] = set(np.unique(ids).tolist())
