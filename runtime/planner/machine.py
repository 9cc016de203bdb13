"""What is known of a machine: rates of its kernels, what the program adds, its drives, its memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from deltafin.runtime.planner.shape import Weights
from deltafin.store import DriveProbe

MXFP4 = "mxfp4"
FORMATS = {MXFP4, "bf16", "bf12", "int8"}
ROWS = (1, 8, 64)  # at which the kernels are measured


@dataclass(frozen=True, slots=True)
class Kernels:
    """Seconds that a product takes for each stored weight, by format and number of rows, with all threads."""

    isa: str
    threads: int
    seconds: dict[str, tuple[float, ...]]  # format -> one for each of ROWS
    memory_rate: float  # bytes a second that the threads can read
    hash_rate: float  # bytes a second of XXH3-128, one thread

    def per_weight(self, format: str, rows: float) -> float:
        """Between measured numbers of rows on a straight line; beyond the last in proportion to the rows."""
        found = self.seconds[format]
        if rows >= ROWS[-1]:
            return found[-1] * rows / ROWS[-1]
        for (low, at_low), (high, at_high) in pairwise(zip(ROWS, found, strict=True)):
            if rows <= high:
                return at_low + (at_high - at_low) * max(0.0, rows - low) / (high - low)
        raise AssertionError

    def product_s(self, weights: Weights, rows: float) -> float:
        return sum(count * self.per_weight(str(encoding), rows) for encoding, count in weights.items())

    def flops(self, format: str) -> float:
        """Operations a second at the most rows measured."""
        return 2 * ROWS[-1] / self.seconds[format][-1]

    def with_threads(self, threads: int) -> Kernels:
        """For another number of cores: in proportion, which is what more cores give at best."""
        share = self.threads / threads
        seconds = {format: tuple(s * share for s in found) for format, found in self.seconds.items()}
        return replace(
            self, threads=threads, seconds=seconds, memory_rate=self.memory_rate / share, hash_rate=self.hash_rate
        )


@dataclass(frozen=True, slots=True)
class Overheads:
    """Seconds that the program takes beside products and reads; found by running the built-in demo model."""

    kda_s: float  # a layer's attention
    mla_s: float
    mlp_s: float  # a layer's router, shared experts and projections, or its dense MLP
    expert_s: float  # an expert
    pass_s: float  # embedding, head, and everything else
    read_s: float  # an expert that is read
    piece_s: float  # a piece of the spine that is read


@dataclass(frozen=True, slots=True)
class Figures:
    """Everything that was measured, and when."""

    measured_at: float  # unix time
    kernels: Kernels
    overheads: Overheads
    drives: tuple[DriveProbe, ...] = ()
    load: float = 0.0  # of other programs, in cores, for each core, when it was measured

    def rate_of(self, path: str, device: int) -> float | None:
        """Bytes a second of a directory, if the same device is still there."""
        return next((d.rate for d in self.drives if (d.path, d.device) == (path, device)), None)


def spread(nbytes: int, rates: Sequence[float], most: Sequence[int]) -> list[int]:
    """How to lay so many bytes, each once, over drives with room for `most`, so that reading ends soonest.

    In proportion to the rates; where a drive is full, the others take over. What fits nowhere is left out.
    """
    shares = [0] * len(rates)
    left, open_drives = nbytes, [i for i in range(len(rates)) if rates[i] > 0]
    while left > 0 and open_drives:
        total = sum(rates[i] for i in open_drives)
        wanted = {i: -(-left * rates[i] // total) for i in open_drives}
        full = [i for i in open_drives if shares[i] + wanted[i] >= most[i]]
        for i in full or open_drives:
            more = int(min(wanted[i], most[i] - shares[i], left))
            shares[i] += more
            left -= more
        open_drives = [i for i in open_drives if i not in full] if full else []
    return shares


def together(rates: Sequence[float], only: Sequence[int], everywhere: int = 0) -> float:
    """Bytes a second of several drives, of which each alone has `only` bytes, and all have `everywhere` bytes.

    What several have is read from whichever is free, so rates add up; what one has alone waits for it, so that the
    drive with the largest share for its rate decides.
    """
    total = sum(only) + everywhere
    if total == 0:
        return sum(rates)
    slowest = max((own / rate for own, rate in zip(only, rates, strict=True) if own), default=0.0)
    return total / max(slowest, total / sum(rates))
