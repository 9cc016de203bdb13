"""What a pass takes, from a shape, a plan of the memory and what is known of the machine; docs/plan.md explains it.

Nothing is measured here, and nothing is fitted to a model: the same terms hold for the demo and for Kimi K3.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from itertools import pairwise

from deltafin.indexer import ModelConfig
from deltafin.runtime.memory import MemoryPlan
from deltafin.runtime.planner.machine import MXFP4, Kernels, Overheads
from deltafin.runtime.planner.schedule import LayerWork, waits
from deltafin.runtime.planner.shape import AFTER, ROUTER, LayerShape, ModelShape, total
from deltafin.store import Encoding

MOST_TOKENS = 4  # that are walked for an average
MOST_PASSES = 6  # of a prompt, likewise
# Share of the experts by use -> share of the reads that they take, published for Kimi K3: 40 GB of its hottest
# experts took 41 % (held out), 32 % of them 66.5 %, 61 % of them 88.9 %.
SKEW = ((0.0, 0.0), (0.028, 0.41), (0.32, 0.665), (0.61, 0.889), (1.0, 1.0))


@dataclass(frozen=True, slots=True)
class Rates:
    """What a pass is computed and fed with."""

    kernels: Kernels
    overheads: Overheads
    drive: float  # bytes a second of all that is read; infinite where files are small and stay in the page cache


@dataclass(frozen=True, slots=True)
class PassTime:
    """Seconds by cause; they add up."""

    spine_wait_s: float = 0.0
    expert_wait_s: float = 0.0
    attention_s: float = 0.0
    shared_s: float = 0.0  # router, shared experts, projections, dense MLP
    expert_s: float = 0.0
    head_s: float = 0.0
    check_s: float = 0.0  # comparing with digests what is read for the first time
    program_s: float = 0.0  # what is neither product nor wait
    read_nbytes: int = 0
    read_s: float = 0.0  # that the drives are busy, most of it beside computing; no part of the sum

    @property
    def total_s(self) -> float:
        return self.wait_s + self.compute_s

    @property
    def wait_s(self) -> float:
        return self.spine_wait_s + self.expert_wait_s

    @property
    def compute_s(self) -> float:
        return self.attention_s + self.shared_s + self.expert_s + self.head_s + self.check_s + self.program_s

    @property
    def bound(self) -> str:
        """What takes longer by itself: reading or computing."""
        return "read" if self.read_s > self.compute_s else "compute"

    def plus(self, other: PassTime) -> PassTime:
        return PassTime(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(PassTime)))

    def times(self, factor: float) -> PassTime:
        parts = {f.name: getattr(self, f.name) * factor for f in fields(PassTime)}
        return PassTime(**{**parts, "read_nbytes": int(self.read_nbytes * factor)})

    def as_json(self) -> dict[str, object]:
        return {**asdict(self), "total_s": self.total_s, "bound": self.bound}


def pass_time(
    shape: ModelShape,
    plan: MemoryPlan,
    rates: Rates,
    *,
    rows: int = 1,
    miss: float,
    cold: bool = False,
    context: int = 0,
) -> PassTime:
    """One pass of `rows` rows, of which each chosen expert is in memory with probability 1 - `miss`.

    `cold`: the resident layers are read, and all is compared with its digest for the first time. `context`: tokens
    before the rows.
    """
    kernels, add = rates.kernels, rates.overheads
    config = shape.config
    chosen = union(config, rows)
    reads = chosen * miss
    one = shape.expert_weights * kernels.per_weight(MXFP4, rows * config.top_k / chosen)
    resident = frozenset(plan.resident)
    read = reads * shape.expert_nbytes * shape.moe_layers
    pieces = 0
    for number, layer in enumerate((*shape.layers, shape.head)):
        if cold or number not in resident:
            read += layer.nbytes
            pieces += layer.pieces
    check = read / kernels.hash_rate / kernels.threads if cold else 0.0
    spread = check / shape.config.num_layers  # the drive's threads hash while others compute, on the same cores
    work = []
    attention = shared = 0.0
    for layer in shape.layers:
        matrix_s = {name: kernels.product_s(weights, rows) for name, weights in layer.matrices.items()}
        mixing = _mixing_s(config, layer, kernels, rows, context) + kernels.product_s(layer.sliced, rows)
        mine = sum(s for name, s in matrix_s.items() if name.startswith("self_attn."))
        attention += mine + mixing
        shared += sum(matrix_s.values()) - mine
        work.append(
            LayerWork(
                matrix_s=matrix_s,
                attention_s=mixing + (add.kda_s if layer.kda else add.mla_s) + spread,
                shared_s=add.mlp_s,
                router=ROUTER if layer.moe else None,
                after=AFTER if layer.moe else None,
                chosen=chosen if layer.moe else 0.0,
                reads=reads if layer.moe else 0.0,
                expert_s=one + add.expert_s,
                read_s=add.read_s,
            )
        )
    head = kernels.product_s(total([*shape.head.matrices.values()]), 1)  # the last row's logits
    found = waits(
        shape.pieces, work, plan, expert_nbytes=shape.expert_nbytes, rate=rates.drive, piece_s=add.piece_s, head_s=head,
        cold=cold,
    )  # fmt: skip
    experts = shape.moe_layers * chosen * one
    computed = found.end_s - found.spine_s - found.expert_s
    return PassTime(
        spine_wait_s=found.spine_s,
        expert_wait_s=found.expert_s,
        attention_s=attention,
        shared_s=shared,
        expert_s=experts,
        head_s=head,
        check_s=check,
        program_s=add.pass_s + max(0.0, computed - attention - shared - experts - head - check),
        read_nbytes=int(read),
        read_s=read / rates.drive,
    )


def token_time(shape: ModelShape, plan: MemoryPlan, rates: Rates, *, first: int = 1, count: int = 1) -> PassTime:
    """The average of `count` passes of one row, after `first` others have filled what stays in memory.

    Of many passes some, evenly spaced, stand for all.
    """
    some = min(count, MOST_TOKENS)
    found = PassTime()
    for number in range(some):
        before = first + (2 * number + 1) * count // (2 * some)
        found = found.plus(pass_time(shape, plan, rates, miss=miss_share(shape, plan, before), context=before))
    return found.times(1 / some)


def cold_token_time(shape: ModelShape, plan: MemoryPlan, rates: Rates) -> PassTime:
    """The first token of a process: nothing is in memory, and everything is compared with its digest."""
    return pass_time(shape, plan, rates, miss=1.0, cold=True)


def prompt_time(shape: ModelShape, plan: MemoryPlan, rates: Rates, tokens: int) -> PassTime:
    """To the first new token of a fresh process: the prompt in as few passes as `plan` has rows for.

    Of many passes some, evenly spaced, stand for all but the first.
    """

    def one(number: int) -> PassTime:
        at = number * plan.rows
        miss = 1.0 if at == 0 else miss_share(shape, plan, at)
        rows = min(plan.rows, tokens - at)
        return pass_time(shape, plan, rates, rows=rows, miss=miss, cold=at == 0, context=at)

    found = one(0)
    later = -(-tokens // plan.rows) - 1
    some = min(later, MOST_PASSES)
    for number in range(some):
        first, end = number * later // some, (number + 1) * later // some
        found = found.plus(one(1 + (first + end) // 2).times(end - first))
    return found


def union(config: ModelConfig, rows: int) -> float:
    """How many experts of a layer some rows choose together if each chooses evenly; less where texts are alike."""
    if rows == 1:
        return float(config.top_k)
    return config.num_experts * (1 - (1 - config.top_k / config.num_experts) ** rows)


def miss_share(shape: ModelShape, plan: MemoryPlan, before: int) -> float:
    """How many of the chosen experts must be read after `before` rows have passed."""
    config = shape.config
    if plan.resident_experts == 0:
        return 1.0
    kept = min(1.0, plan.resident_experts / shape.experts)
    unseen = (1 - config.top_k / config.num_experts) ** before
    return max(1 - hit_share(kept, skewed=shape.published_skew), unseen)


def hit_share(kept: float, *, skewed: bool) -> float:
    """Share of the reads that the hottest `kept` of the experts take."""
    if not skewed:
        return kept
    for (low, at_low), (high, at_high) in pairwise(SKEW):
        if kept <= high:
            return at_low + (at_high - at_low) * (kept - low) / (high - low)
    return 1.0


def _mixing_s(config: ModelConfig, layer: LayerShape, kernels: Kernels, rows: int, context: int) -> float:
    """What attention takes beside its matrices: KDA's state once, MLA's keys for each row.

    KDA's recurrence over many rows is left out: 1.3 % of the layer's matrices.
    """
    if layer.kda:
        return 2 * layer.state_nbytes / kernels.memory_rate
    keys = rows * (context + (rows + 1) / 2)
    flop = 2 * keys * config.mla_heads * (2 * config.kv_lora_rank + config.qk_rope_head_dim)
    return flop / kernels.flops(str(Encoding.BF16))
