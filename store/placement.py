"""Which experts should also lie where, so that a layer's reads end sooner: copies of hot ones on drives with time left.

Of every layer the expected reads of each expert, by heat, are dealt to the drives that have it. While one drive ends
last, its hottest expert is copied to one that ends earlier and has room; the layer that gains most comes first. That
evens out the average; a single token is evened out by experts that several drives could read, so then the hottest are
copied until each drive has enough of such. What is nowhere on this machine is left out.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from deltafin.store.balance import Place, Want, plan_reads

Pair = tuple[int, int]  # layer, expert
Weights = npt.NDArray[np.float64]  # [experts]: how likely a token asks for each

_LEAST_GAIN = 0.002  # of what a layer takes: less is not worth a copy
_SMOOTH = 0.05  # of the mean heat: an expert that was never seen may be asked for, too
# Of a layer's reads so many, in parts of what the drive can take of them, should also lie elsewhere: see docs/log.md.
_SHARED = 1.5
SAMPLES = 8  # tokens of which the reads are estimated
_SEED = 20_250_101


@dataclass(frozen=True, slots=True)
class Disk:
    """A root as far as placing is concerned; `room` in bytes is 0 where nothing is written."""

    rate: float
    room: int


@dataclass(frozen=True, slots=True)
class CopyTo:
    """An expert that should also lie in the root of this number."""

    layer: int
    expert: int
    disk: int


def use_weights(heat: npt.NDArray[np.float32], layers: Sequence[int], top_k: int) -> dict[int, Weights]:
    """How likely a token asks for each expert of a layer. Without any heat all count alike."""
    weights = {}
    for layer in layers:
        counts = heat[layer].astype(np.float64)
        mean = float(counts.mean())
        weights[layer] = _likely(counts + _SMOOTH * mean if mean > 0 else np.ones_like(counts), top_k)
    return weights


def _likely(counts: Weights, top_k: int) -> Weights:
    """In proportion to counts, none above 1, `top_k` in all."""
    top_k = min(top_k, len(counts))
    likely: Weights = np.minimum(1.0, counts * (top_k / counts.sum()))
    for _ in range(20):
        below = likely < 1
        if not below.any() or likely.sum() >= top_k - 1e-6:
            break
        likely[below] = np.minimum(1.0, likely[below] * ((top_k - (~below).sum()) / likely[below].sum()))
    return likely


def plan_copies(
    weights: Mapping[int, Weights],
    holders: Mapping[Pair, frozenset[int]],
    disks: Sequence[Disk],
    nbytes: int,
    limit_nbytes: int | None = None,
) -> list[CopyTo]:
    """The copies to make, those that gain most first, within the room of each disk and the limit for all."""
    room = [disk.room for disk in disks]
    left = sum(room) if limit_nbytes is None else limit_nbytes
    layers = [_Layer(layer, weights[layer], holders, disks) for layer in weights]
    heap: list[tuple[float, int, _Step]] = []

    def offer(number: int) -> None:
        open_disks = [d for d, free in enumerate(room) if free >= nbytes]
        if (step := layers[number].best_step(open_disks)) is not None:
            heapq.heappush(heap, (-step.gain_s, number, step))

    for number in range(len(layers)):
        offer(number)
    copies = []
    while heap and left >= nbytes:
        _, number, step = heapq.heappop(heap)
        if room[step.target] >= nbytes:
            layers[number].take(step)
            room[step.target] -= nbytes
            left -= nbytes
            copies.append(CopyTo(layers[number].layer, step.expert, step.target))
        offer(number)
    further = [found for layer in layers for found in layer.further()]
    for _, layer, expert, target in sorted(further, reverse=True):
        if left >= nbytes and room[target] >= nbytes:
            room[target] -= nbytes
            left -= nbytes
            copies.append(CopyTo(layer, expert, target))
    return copies


def expected_s(
    weights: Mapping[int, Weights],
    holders: Mapping[Pair, frozenset[int]],
    disks: Sequence[Disk],
    nbytes: int,
    top_k: int,
    samples: int = SAMPLES,
) -> float:
    """Seconds that a token's reads of experts take, planned as the store plans them; the mean over invented tokens."""
    choose = np.random.default_rng(_SEED)
    rates, idle = [disk.rate for disk in disks], [0.0] * len(disks)
    total = 0.0
    for layer, weight in weights.items():
        for _ in range(samples):
            chosen = choose.choice(len(weight), top_k, replace=False, p=weight / weight.sum())
            where = [holders.get((layer, int(expert)), frozenset()) for expert in chosen]
            wants = [Want(nbytes, tuple(Place(disk) for disk in sorted(found))) for found in where if found]
            total += plan_reads(wants, idle, rates).end_s
    return total / samples


@dataclass(frozen=True, slots=True)
class _Step:
    expert: int
    source: int
    target: int
    gain_s: float


@dataclass(slots=True)
class _Layer:
    """Expected work of the disks for one layer: each expert counts for the one that reads it."""

    layer: int
    weight: Weights
    holders: Mapping[Pair, frozenset[int]]
    disks: Sequence[Disk]
    ends: list[float] = field(init=False)  # in seconds, up to a factor
    reads: list[list[int]] = field(init=False)  # by disk: experts, the coldest first
    has: dict[int, set[int]] = field(init=False)

    def __post_init__(self) -> None:
        self.ends = [0.0] * len(self.disks)
        self.reads = [[] for _ in self.disks]
        self.has = {}
        for expert in np.argsort(-self.weight, kind="stable").tolist():
            found = self.holders.get((self.layer, expert))
            if not found:
                continue
            self.has[expert] = set(found)
            disk = min(found, key=lambda d: self.ends[d] + self._seconds(expert, d))
            self.ends[disk] += self._seconds(expert, disk)
            self.reads[disk].append(expert)
        for experts in self.reads:
            experts.reverse()

    def best_step(self, targets: Sequence[int]) -> _Step | None:
        """The hottest expert of the disk that ends last which one of the targets would still read sooner."""
        last = max(range(len(self.disks)), key=self.ends.__getitem__)
        for target in sorted(targets, key=self.ends.__getitem__):
            spare = self.ends[last] - self.ends[target]
            if spare <= 0:
                break
            for expert in reversed(self.reads[last]):
                gain = self._seconds(expert, last)
                if gain < _LEAST_GAIN * self.ends[last]:
                    break
                if target not in self.has[expert] and self._seconds(expert, target) < spare:
                    return _Step(expert, last, target, gain)
        return None

    def further(self) -> list[tuple[float, int, int, int]]:
        """Hottest experts to share: (weight, layer, expert, disk), until each writable disk has enough of them."""
        found = []
        total = sum(disk.rate for disk in self.disks)
        for number, disk in enumerate(self.disks):
            if disk.room <= 0:
                continue
            enough = _SHARED * float(self.weight.sum()) * disk.rate / total
            shared = sum(self.weight[e] for e, has in self.has.items() if number in has and len(has) > 1)
            for expert, has in self.has.items():  # the hottest first
                if shared >= enough:
                    break
                if number not in has:
                    shared += self.weight[expert]
                    found.append((float(self.weight[expert]), self.layer, expert, number))
        return found

    def take(self, step: _Step) -> None:
        self.reads[step.source].remove(step.expert)
        position = len(self.reads[step.target])
        while position and self.weight[self.reads[step.target][position - 1]] > self.weight[step.expert]:
            position -= 1
        self.reads[step.target].insert(position, step.expert)
        self.has[step.expert].add(step.target)
        self.ends[step.source] -= self._seconds(step.expert, step.source)
        self.ends[step.target] += self._seconds(step.expert, step.target)

    def _seconds(self, expert: int, disk: int) -> float:
        return float(self.weight[expert]) / self.disks[disk].rate
