"""How near is a pass to its critical path, and does a prompt read each byte once?

Times are compared on roots held to a rate, so that a noisy drive does not decide; counts need no clock.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from deltafin.cext import _math
from deltafin.indexer import Catalog
from deltafin.runtime.clock import LayerTimes, PassTimes
from deltafin.runtime.memory import MemoryPlan, Want, least_budget, plan_memory
from deltafin.runtime.model import Model
from deltafin.runtime.native import matrices
from deltafin.runtime.observer import LayerProgress
from deltafin.runtime.segment import Segment
from deltafin.store import Store, spine_pieces

Progress = Callable[[int], None]  # layers done

FMA_STEPS = 100_000


@dataclass(frozen=True, slots=True)
class PassCost:
    """Passes of one row each, on average, beside the time that no schedule could do without."""

    resident_layers: int
    spine_layers: int
    ram: int
    passes: int
    wall_s: float
    critical_s: float
    drive_s: float  # what the drive needs for everything that is read
    compute_s: float
    read_nbytes: int  # a pass
    parts: LayerTimes  # sums over the layers of all passes

    @property
    def ratio(self) -> float:
        return self.wall_s / self.critical_s


def measure_passes(model: Model, rate: float, tokens: int, progress: Progress = lambda layers: None) -> PassCost:
    """Generates one token to fill what stays in memory, then `tokens` that count; the roots must be held to `rate`."""
    plan = model.memory
    assert plan is not None
    passes: list[PassTimes] = []
    reads: list[int] = []
    start_id = model.config.bos_id
    generated = model.generate(
        model.sequence(), [start_id], max_new=tokens + 1, stop_ids=(), observer=LayerProgress(progress)
    )
    for _ in generated:
        reads.append(model.store.stats.read_nbytes)
        assert model.last_pass is not None
        passes.append(model.last_pass)
    counted = passes[1:]
    nbytes = [after - before for before, after in pairwise(reads)]
    expert_nbytes = model.store.catalog.expert_nbytes
    critical = [_critical_s(times, expert_nbytes, rate, read) for times, read in zip(counted, nbytes, strict=True)]
    parts = LayerTimes()
    for times in counted:
        parts.add(times.sums())
    waits = parts.spine_wait_s + parts.expert_wait_s
    return PassCost(
        resident_layers=len(plan.resident),
        spine_layers=plan.spine_layers,
        ram=plan.budget,
        passes=len(counted),
        wall_s=sum(t.total_s for t in counted) / len(counted),
        critical_s=sum(critical) / len(critical),
        drive_s=sum(nbytes) / rate / len(counted),
        compute_s=(sum(t.total_s for t in counted) - waits) / len(counted),
        read_nbytes=sum(nbytes) // len(counted),
        parts=parts,
    )


def _critical_s(times: PassTimes, expert_nbytes: int, rate: float, read_nbytes: int) -> float:
    """Seconds that depend on each other: attention, the longer of reading and shared work, one expert; layer by layer.

    A drive that brings the spine too is busy with all of it, whatever waits for what.
    """
    path = times.head_s
    for layer in times.layers:
        one = layer.expert_s / layer.experts if layer.experts else 0.0
        path += layer.attention_s + max(layer.reads * expert_nbytes / rate, layer.shared_s) + one
    return max(path, read_nbytes / rate)


def streamed_plan(store: Store, want: Want) -> MemoryPlan:
    """The most memory in which nothing of the spine stays."""
    return _most(store, want, lambda plan: not plan.resident)


def resident_plan(store: Store, want: Want) -> MemoryPlan:
    """All of the spine stays, and no expert: so that they are read."""
    plan = _most(store, want, lambda plan: len(plan.resident) < plan.spine_layers, then_nbytes=_STEP)
    return replace(plan, resident_experts=0, resident_experts_nbytes=0)


_STEP = 1 << 20


def _most(store: Store, want: Want, holds: Callable[[MemoryPlan], bool], then_nbytes: int = 0) -> MemoryPlan:
    """The plan for the largest budget, to a megabyte, that has a property which more memory ends; or for a bit more."""
    catalog = store.catalog
    config = catalog.config
    layers = spine_pieces(catalog, lambda layer: matrices(config, layer))
    low = least_budget(catalog, layers, want, _math.threads()) + _STEP
    high = low + sum(layer.slots_nbytes for layer in layers) + (64 << 30)
    while high - low > _STEP:
        middle = (low + high) // 2
        low, high = (
            (middle, high) if holds(plan_memory(middle, catalog, layers, want, _math.threads())) else (low, middle)
        )
    return plan_memory(low + then_nbytes, catalog, layers, want, _math.threads())


# ---- a prompt ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PrefillCost:
    """A prompt in as few passes as memory allows: what was asked for, beside what it needed."""

    rows: int
    passes: int
    unique_experts: int  # (layer, expert) pairs that any row chose
    expert_visits: int
    expert_nbytes: int  # asked for
    spine_visits: int  # of layers, globals included
    layers: int
    wall_s: float
    flop: float  # of the matrices
    flop_limit_s: float  # at the peak of multiply-adds, measured in the same run
    read_nbytes: int
    parts: LayerTimes

    @property
    def excess(self) -> float:
        """Experts asked for by experts needed: 1 is each once."""
        return self.expert_visits / self.unique_experts


def measure_prefill(model: Model, ids: Sequence[int], progress: Progress = lambda layers: None) -> PrefillCost:
    """Feeds `ids` to a new sequence."""
    before, read_before = model.store.stats.snapshot(), model.store.stats.read_nbytes
    passes_before, parts_before = model.times.passes, replace(model.times.layers)
    routes = _Routes(progress)
    start = time.perf_counter()
    model.forward([Segment(model.sequence(), ids)], logits="last", observer=routes)
    wall_s = time.perf_counter() - start
    after = model.store.stats.snapshot()
    parts = LayerTimes()
    parts.add(model.times.layers)
    for name in LayerTimes.__slots__:
        setattr(parts, name, getattr(parts, name) - getattr(parts_before, name))
    visits = after["expert_visits"] - before["expert_visits"]
    flop = len(ids) * row_flop(model.store.catalog)
    return PrefillCost(
        rows=len(ids),
        passes=model.times.passes - passes_before,
        unique_experts=len(routes.chosen),
        expert_visits=visits,
        expert_nbytes=visits * model.store.catalog.expert_nbytes,
        spine_visits=after["spine_visits"] - before["spine_visits"],
        layers=model.config.num_layers,
        wall_s=wall_s,
        flop=flop,
        flop_limit_s=flop / _peak_flops(),
        read_nbytes=model.store.stats.read_nbytes - read_before,
        parts=parts,
    )


def row_flop(catalog: Catalog) -> float:
    """Operations of one row in the matrices: two for each weight that it meets."""
    config = catalog.config
    spine = sum(
        place.nbytes // 2
        for layer in range(config.num_layers)
        for place in catalog.spine(layer).tensors
        if place.dtype == "BF16" and len(place.shape) == 2
    )
    expert = 3 * config.latent_size * config.expert_size
    return 2.0 * (spine + len(config.moe_layers) * config.top_k * expert)


def _peak_flops() -> float:
    best = 0.0
    for _ in range(5):
        start = time.perf_counter()
        flop = _math.limit_fma(4 * _math.threads(), FMA_STEPS)
        best = max(best, flop / (time.perf_counter() - start))
    return best


class _Routes(LayerProgress):
    """Remembers which experts were chosen at all."""

    def __init__(self, progress: Progress) -> None:
        super().__init__(progress)
        self.chosen: set[tuple[int, int]] = set()

    def routes(self, layer: int, ids: npt.NDArray[np.int32], weights: npt.NDArray[np.float32]) -> None:
        self.chosen.update((layer, expert) for expert in np.unique(ids).tolist())
