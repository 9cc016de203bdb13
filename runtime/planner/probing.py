"""Measures what a plan needs to know of this machine: kernels, and what the program adds. A few seconds in all."""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections import abc
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import numpy as np
import xxhash

from deltafin.cext import _math
from deltafin.runtime.bench import Matrix, brief
from deltafin.runtime.clock import PassTimes, typical
from deltafin.runtime.memory import MemoryPlan, Want, least_budget, plan_memory
from deltafin.runtime.model import Model
from deltafin.runtime.planner.machine import MXFP4, ROWS, Figures, Kernels, Overheads
from deltafin.runtime.planner.shape import ModelShape, model_shape, total

# A matrix of attention stands for all of a format. Two matrices of an expert are one job of the threads.
MATRICES = (
    Matrix(MXFP4, "experts w1, w3", 3072, 3584, 2),
    Matrix("bf16", "q_proj", 12288, 7168),
    Matrix("bf12", "q_proj", 12288, 7168),
    Matrix("int8", "q_proj", 12288, 7168),
)
_HASHED_NBYTES = 16 << 20
_ROUNDS = 6
_TOKENS = 6  # a round
_WARM_UP = 12  # tokens, until nearly all experts of the demo have been read
_ROOM = 64 << 20  # all of the demo fits

Progress = Callable[[str], None]  # hears what is measured next


def probe(*, threads: int | None = None, progress: Progress = lambda what: None) -> Figures:
    """Everything but drives, with `threads` computing (default: all cores)."""
    before, load = _math.threads(), os.getloadavg()[0] / (os.cpu_count() or 1)
    if threads is not None:
        _math.set_threads(threads)
    try:
        progress("kernels")
        kernels = probe_kernels()
        progress("the program, with the demo model")
        overheads = probe_overheads(kernels)
    finally:
        _math.set_threads(before)
    return Figures(time.time(), kernels, overheads, load=load)


def probe_kernels() -> Kernels:
    """With the threads that are set."""
    found = brief(MATRICES, ROWS)
    block = np.random.default_rng(7).bytes(_HASHED_NBYTES)
    hashing = []
    for _ in range(3):
        start = time.perf_counter()
        xxhash.xxh3_128(block).digest()
        hashing.append(len(block) / (time.perf_counter() - start))
    # More rows never take less time; what says otherwise is noise, and a plan must not be faster for it.
    seconds = {format: tuple(np.maximum.accumulate(times).tolist()) for format, times in found.seconds.items()}
    return Kernels(_math.isa(), _math.threads(), seconds, found.memory_rate, statistics.median(hashing))


# ---- what the program adds -------------------------------------------------------------------------------


def probe_overheads(kernels: Kernels) -> Overheads:
    """Runs the demo in three ways, in turn: all in memory; experts read each time; the spine read each time, too."""
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="deltafin-"))
        all_here, experts_read, all_read = (_Run(stack, Path(folder), plan) for plan in (_roomy, _no_experts, _least))
        runs = (all_here, experts_read, all_read)
        for run in runs:
            run.take(_WARM_UP)
        for run in runs:
            run.passes.clear()
        for number in range(_ROUNDS):
            for run in runs[:: -1 if number % 2 else 1]:
                run.take(_TOKENS)
        shape = model_shape(all_here.model.store.catalog)
        found = _of_layers(all_here.passes, shape, kernels)
        read_s = (experts_read.total_s - all_here.total_s) / max(1.0, experts_read.reads - all_here.reads)
        away = [n for n in range(len(shape.layers)) if n not in all_read.plan.resident]
        pieces = sum(shape.layers[n].pieces for n in away)
        piece_s = (all_read.total_s - experts_read.total_s) / max(1, pieces)
    return replace(found, read_s=max(0.0, read_s), piece_s=max(0.0, piece_s))


class _Run:
    """The demo opened with a plan of its own, continuing a text."""

    def __init__(self, stack: ExitStack, folder: Path, plan: Callable[[ModelShape, Want], MemoryPlan]) -> None:
        from deltafin.store import open_store

        want = Want(rows=1, tokens=_WARM_UP + _ROUNDS * _TOKENS + 2)
        store = stack.enter_context(open_store("demo", cache_dir=folder, offline=True))
        self.plan = plan(model_shape(store.catalog), want)
        self.model = stack.enter_context(Model(store, plan=self.plan, spine="released"))
        self.passes: list[PassTimes] = []  # with the time of the whole token as their total
        model = self.model
        self._tokens: abc.Iterator[int] = model.generate(
            model.sequence(), [model.config.bos_id], max_new=want.tokens - 1, stop_ids=()
        )

    def take(self, count: int) -> None:
        for _ in range(count):
            start = time.perf_counter()
            next(self._tokens)
            assert self.model.last_pass is not None
            self.model.last_pass.total_s = time.perf_counter() - start
            self.passes.append(self.model.last_pass)

    @property
    def total_s(self) -> float:
        return typical([times.total_s for times in self.passes])

    @property
    def reads(self) -> float:
        return statistics.fmean(times.sums().reads for times in self.passes)


def _roomy(shape: ModelShape, want: Want) -> MemoryPlan:
    return plan_memory(_least_nbytes(shape, want) + _ROOM, shape, shape.pieces, want, _math.threads())


def _no_experts(shape: ModelShape, want: Want) -> MemoryPlan:
    return replace(_roomy(shape, want), resident_experts=0, resident_experts_nbytes=0)


def _least(shape: ModelShape, want: Want) -> MemoryPlan:
    return plan_memory(_least_nbytes(shape, want) + (1 << 20), shape, shape.pieces, want, _math.threads())


def _least_nbytes(shape: ModelShape, want: Want) -> int:
    return least_budget(shape, shape.pieces, want, _math.threads())


def _of_layers(passes: Sequence[PassTimes], shape: ModelShape, kernels: Kernels) -> Overheads:
    """What an average layer of an average pass takes beyond its products."""
    config = shape.config
    kda = [n for n, layer in enumerate(shape.layers) if layer.kda]
    mla = [n for n, layer in enumerate(shape.layers) if not layer.kda]
    moe = list(config.moe_layers)

    def beyond(seconds: Callable[[PassTimes], float], products_s: float) -> float:
        return max(0.0, typical([*map(seconds, passes)]) - products_s)

    def attention(numbers: list[int]) -> float:
        products = sum(kernels.product_s(shape.layers[n].weights(attention=True), 1) for n in numbers)
        return beyond(lambda t: sum(t.layers[n].attention_s for n in numbers), products) / len(numbers)

    shared = sum(kernels.product_s(shape.layers[n].weights(attention=False), 1) for n in moe)
    experts = len(moe) * config.top_k
    expert_products = experts * shape.expert_weights * kernels.per_weight(MXFP4, 1)
    head = kernels.product_s(total([*shape.head.matrices.values()]), 1)
    return Overheads(
        kda_s=attention(kda),
        mla_s=attention(mla),
        mlp_s=beyond(lambda t: sum(t.layers[n].shared_s for n in moe), shared) / len(moe),
        expert_s=beyond(lambda t: t.sums().expert_s, expert_products) / experts,
        pass_s=beyond(_outside_layers_s, head),
        read_s=0.0,
        piece_s=0.0,
    )


def _outside_layers_s(times: PassTimes) -> float:
    sums = times.sums()
    layers = sums.attention_s + sums.shared_s + sums.expert_s + sums.spine_wait_s + sums.expert_wait_s
    return times.total_s - layers
