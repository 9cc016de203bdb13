"""What one budget of memory is spent on.

The spine first, since a byte of it that stays saves a byte in every pass; then experts. But before either, what must be
there for anything to be computed: the program, the sequences, some rows, the pieces that are on their way.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Protocol

import psutil

from deltafin.errors import BadRequest
from deltafin.indexer import ModelConfig
from deltafin.store import LayerPieces, least_ring_nbytes, slot_nbytes

DEFAULT_SHARE = 0.75  # of what is available: others want to go on too, and the page cache is not nothing
ROWS = 512  # rows a pass is prepared for when nobody says how many there will be
TOKENS = 4096  # likewise of a sequence
# Python, libraries and their heaps, on top of what is in memory when a model is opened.
OVERHEAD_NBYTES = 40 << 20
LEAST_SLOTS = 2
ROWS_SHARE = 0.5  # of what is free, for the rows of long prompts
SLOTS_SHARE = 0.5  # of what is free then, so that all reads of a row can be on their way
RING_SHARE = 0.25  # of what is free then, so that reads go on while others are computed with
KEY_BLOCK = 256  # latents grow by this many tokens
HEAD_TILE = 1024  # logits of a row at once where their log-probabilities are wanted


class Planned(Protocol):
    """All that a plan asks of a model, besides the pieces of its spine."""

    @property
    def config(self) -> ModelConfig: ...

    @property
    def expert_nbytes(self) -> int: ...


@dataclass(frozen=True, slots=True)
class Want:
    """What a model is opened for."""

    rows: int = ROWS  # of the longest pass
    tokens: int = TOKENS  # in all sequences together; in the longest, if they are only scored
    sequences: int = 1  # whose states are kept
    drafts: int = 0  # rows of proposals for each sequence in a pass
    scoring: bool = False  # no state outlives its layer, but for that of a text which takes several passes

    def __post_init__(self) -> None:
        for name, least in (("rows", 1), ("tokens", 1), ("sequences", 1), ("drafts", 0)):
            if (value := getattr(self, name)) < least:
                raise BadRequest(f"want.{name} is {value}; expected at least {least}")


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Bytes by purpose; they add up to at most the budget."""

    budget: int
    program: int  # what was there before, and what the libraries take
    sequences: int
    rows: int  # how many a pass may have
    rows_nbytes: int
    logits_rows: int  # of how many rows logits are in `program`
    spine_layers: int  # the globals with the head count as one
    resident: tuple[int, ...]  # the layers that stay
    resident_nbytes: int
    ring_nbytes: int
    held_nbytes: int  # two buffers for what is held of a layer that does not stay
    slots: int
    slots_nbytes: int
    resident_experts: int
    resident_experts_nbytes: int

    @property
    def total(self) -> int:
        return (
            self.program + self.sequences + self.rows_nbytes + self.resident_nbytes + self.ring_nbytes
            + self.held_nbytes + self.slots_nbytes + self.resident_experts_nbytes
        )  # fmt: skip

    def as_json(self) -> dict[str, object]:
        return {**asdict(self), "resident": list(self.resident), "total": self.total}


def default_budget() -> int:
    """A safe share of what this process has and may still take, in bytes; what a cgroup allows counts."""
    return own_nbytes() + int(DEFAULT_SHARE * available_nbytes())


def own_nbytes() -> int:
    """What this process has now."""
    return int(psutil.Process().memory_info().rss)


def available_nbytes() -> int:
    """Memory that can be taken now without swapping."""
    return min([int(psutil.virtual_memory().available), *cgroup_left()])


def cgroup_left(proc: Path = Path("/proc/self/cgroup"), top: Path = Path("/sys/fs/cgroup")) -> list[int]:
    """What each control group that this process is in, and those above it, still allow."""
    left: list[int] = []
    try:
        lines = proc.read_text(errors="replace").splitlines()
    except OSError:
        return left
    for line in lines:
        _, controllers, path = line.split(":", 2) if line.count(":") >= 2 else ("", "-", "")
        if ".." in path.split("/"):  # outside of the namespace that is mounted here: its top is all that is seen
            path = "/"
        if controllers == "":
            left += _left_upwards(top, path, "memory.max", "memory.current")
        elif "memory" in controllers.split(","):
            left += _left_upwards(top / "memory", path, "memory.limit_in_bytes", "memory.usage_in_bytes")
    return left


def _left_upwards(top: Path, path: str, limit_file: str, usage_file: str) -> list[int]:
    left = []
    folder = top / path.lstrip("/")
    for group in (folder, *folder.parents):
        if not group.is_relative_to(top):
            break
        limit, usage = _number(group / limit_file), _number(group / usage_file)
        if limit is not None and usage is not None and limit < 1 << 60:
            # File pages that nobody has written to count as usage, but are given up before anything fails.
            left.append(max(0, limit - usage + (_inactive_file(group) or 0)))
    return left


def _number(file: Path) -> int | None:
    try:
        return int(file.read_text())
    except (OSError, ValueError):  # "max"
        return None


def _inactive_file(group: Path) -> int | None:
    try:
        fields = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        return int(fields.get("inactive_file", 0))
    except (OSError, ValueError):
        return None


# ---- what things take --------------------------------------------------------------------------------


def kda_state_nbytes(config: ModelConfig) -> int:
    """One sequence's KDA memories and histories, once."""
    history = (config.conv_kernel - 1) * 3 * config.kda_width
    memory = config.kda_heads * config.kda_head_dim**2
    return 4 * len(config.kda_layers) * (history + memory)


def latents_nbytes(config: ModelConfig, tokens: int) -> int:
    """One sequence's latent caches for so many tokens."""
    blocks = -(-tokens // KEY_BLOCK)
    layers = config.num_layers - len(config.kda_layers)
    return 4 * layers * blocks * KEY_BLOCK * (config.kv_lora_rank + config.qk_rope_head_dim)


def sequence_nbytes(config: ModelConfig, tokens: int) -> int:
    """A sequence between passes: its state, the one before, whose memory is written next, and its latents."""
    return 2 * kda_state_nbytes(config) + latents_nbytes(config, tokens)


def replay_nbytes(config: ModelConfig) -> int:
    """What is kept of one row with proposals until they are decided on: KDA's inputs, q, k, v and gates."""
    return 4 * len(config.kda_layers) * (7 * config.kda_width + config.kda_heads)


def scoring_nbytes(config: ModelConfig, tokens: int) -> int:
    """What texts that are only scored take, of which the longest has so many tokens: one layer's state at a time.

    In a layer of KDA that is the beginning of all of them, which is written to by none; in one of MLA the latents of
    two, where one takes the place of another.
    """
    kda, mla = len(config.kda_layers), config.num_layers - len(config.kda_layers)
    return kda_state_nbytes(config) // max(1, kda) + 2 * latents_nbytes(config, tokens) // max(1, mla)


def divided_nbytes(config: ModelConfig, tokens: int) -> int:
    """A text of so many tokens that is only scored, in several passes; where it ends, another may begin."""
    return sequence_nbytes(config, tokens) + latents_nbytes(config, tokens)


def row_nbytes(config: ModelConfig) -> int:
    """One row of a pass where most of it is in memory at once."""
    hidden = config.hidden_size
    blocks = -(-config.num_layers // config.attn_res_block_size) + 1
    kda = 11 * config.kda_width
    mla = config.mla_heads * (config.q_head_dim + 2 * config.v_head_dim) + 2 * config.q_lora_rank
    experts = config.top_k * config.latent_size + 2 * config.latent_size + 2 * (config.expert_size + config.latent_size)
    moe = experts + 3 * config.shared_size + hidden
    dense = 3 * config.intermediate_size
    return 4 * (blocks * hidden + 4 * hidden + max(kda, mla, moe, dense, HEAD_TILE))


def logits_nbytes(config: ModelConfig) -> int:
    """The logits of one row."""
    return 4 * config.vocab_size


def wanted_slots(config: ModelConfig) -> int:
    """Slots with which all reads of a row can be on their way at once."""
    return min(config.num_experts, max(config.top_k, 16))


# MLA looks at 64 queries at once, absorbed, and at what they attend to.
_QUERIES = 64


def _fixed_nbytes(config: ModelConfig, want: Want, threads: int) -> int:
    absorbed = 4 * _QUERIES * config.mla_heads * (2 * config.kv_lora_rank + config.qk_rope_head_dim)
    return (
        own_nbytes()
        + OVERHEAD_NBYTES
        + (threads << 20)  # scratch of the kernels
        + absorbed
        + 2 * logits_nbytes(config) * _logits_rows(want)  # the last pass's may still be in use
    )


def _logits_rows(want: Want) -> int:
    return want.sequences * (1 + want.drafts)


# ---- the plan ------------------------------------------------------------------------------------------


def least_budget(catalog: Planned, layers: Sequence[LayerPieces], want: Want, threads: int) -> int:
    """What a pass of one row takes at least; rows wanted beyond one that do not fit it come in further passes."""
    return _Needs(catalog, layers, want, threads).least


@dataclass(slots=True)
class _Needs:
    """What must be there for anything to be computed."""

    program: int
    sequences: int
    row: int
    slot: int
    together: int  # rows that must be in one pass, or `between` is needed
    between: int  # what those take from one pass to the next
    spine: _Spine

    def __init__(self, catalog: Planned, layers: Sequence[LayerPieces], want: Want, threads: int) -> None:
        config = catalog.config
        self.program = _fixed_nbytes(config, want, threads)
        self.row, self.slot = row_nbytes(config), slot_nbytes(catalog.expert_nbytes)
        state = kda_state_nbytes(config)
        if want.scoring:
            self.sequences = scoring_nbytes(config, want.tokens)
            self.together, self.between = want.tokens - 1, divided_nbytes(config, want.tokens)
        else:
            self.sequences = want.sequences * 2 * state + latents_nbytes(config, want.tokens)
            self.together, self.between = want.rows, want.sequences * state
        if want.drafts:
            self.sequences += want.sequences * (1 + want.drafts) * replay_nbytes(config)
        self.spine = _Spine(layers)

    @property
    def least(self) -> int:
        return self.program + self.sequences + self.row + self.spine.least_nbytes + LEAST_SLOTS * self.slot

    def check(self, budget: int) -> None:
        if budget < self.least:
            raise BadRequest(
                f"{_size(budget)} of memory are too little: {_size(self.least)} are needed at least, of which the "
                f"program takes {_size(self.program)}, sequences {_size(self.sequences)}, the spine on its way "
                f"{_size(self.spine.least_nbytes)} and experts {_size(LEAST_SLOTS * self.slot)}; give --ram "
                f"{_ask(self.least)} or more"
            )


def plan_memory(budget: int, catalog: Planned, layers: Sequence[LayerPieces], want: Want, threads: int) -> MemoryPlan:
    """Spends `budget` bytes on the spine's `layers`, experts and rows. Raises BadRequest if it is too small.

    Proposals only save time: where a pass would not hold all their rows, nothing is spent on them.
    """
    needs = _Needs(catalog, layers, want, threads)
    if want.drafts and budget >= needs.least:
        found = _spend(budget, catalog, want, layers, needs)
        if found.rows >= min(want.rows, want.sequences * (1 + want.drafts)):
            return found
    if want.drafts:
        want = replace(want, drafts=0)
        needs = _Needs(catalog, layers, want, threads)
    needs.check(budget)
    return _spend(budget, catalog, want, layers, needs)


def _spend(budget: int, catalog: Planned, want: Want, layers: Sequence[LayerPieces], needs: _Needs) -> MemoryPlan:
    config = catalog.config
    slot, row, spine = needs.slot, needs.row, needs.spine
    free = budget - needs.least
    rows, between = _rows(needs, want, free)
    free -= between + (rows - 1) * row
    slots = LEAST_SLOTS + max(0, min(wanted_slots(config) - LEAST_SLOTS, int(SLOTS_SHARE * free) // slot))
    free -= (slots - LEAST_SLOTS) * slot
    ring, held, resident = spine.spend(spine.least_nbytes + free)
    resident_nbytes = spine.kept_nbytes(resident)
    free += spine.least_nbytes - ring - held - resident_nbytes
    cached = min(free // slot, len(config.moe_layers) * config.num_experts)
    if cached < len(config.moe_layers) and cached < len(config.moe_layers) * config.num_experts:
        cached = 0  # not one a layer: nothing worth looking up
    return MemoryPlan(
        budget=budget,
        program=needs.program,
        sequences=needs.sequences + between,
        rows=rows,
        rows_nbytes=rows * row,
        logits_rows=_logits_rows(want),
        spine_layers=len(layers),
        resident=resident,
        resident_nbytes=resident_nbytes,
        ring_nbytes=ring,
        held_nbytes=held,
        slots=slots,
        slots_nbytes=slots * slot,
        resident_experts=cached,
        resident_experts_nbytes=cached * slot,
    )


def _rows(needs: _Needs, want: Want, free: int) -> tuple[int, int]:
    """How many rows a pass may have, and bytes for what goes on from one pass to the next; `free` is beside one row."""

    def fitting(nbytes: int) -> int:
        return 1 + min(want.rows - 1, int(ROWS_SHARE * nbytes) // needs.row)

    if (rows := fitting(free)) >= needs.together:
        return rows, 0
    if free >= needs.between + needs.row:
        return fitting(free - needs.between), needs.between
    if want.scoring:
        raise BadRequest(
            f"the longest text has {want.tokens:,} tokens, and what goes on of it from one pass to the next does not "
            f"fit into memory; give --ram {_ask(needs.least + needs.between + needs.row)} or more, or cut it"
        )
    return 1, 0


class _Spine:
    """Which layers stay, and what the others pass through."""

    def __init__(self, layers: Sequence[LayerPieces]) -> None:
        self._slots_nbytes = [layer.slots_nbytes for layer in layers]
        self._all_nbytes = sum(self._slots_nbytes)
        self._held = 2 * max(layer.held_nbytes for layer in layers)
        self._least_ring = least_ring_nbytes(layers)
        self._most_ring = max(
            self._least_ring, max(n - layer.held_nbytes for n, layer in zip(self._slots_nbytes, layers, strict=True))
        )
        self.least_nbytes = min(self._all_nbytes, self._least_ring + self._held)

    def kept_nbytes(self, resident: Sequence[int]) -> int:
        return sum(self._slots_nbytes[n] for n in resident)

    def spend(self, nbytes: int) -> tuple[int, int, tuple[int, ...]]:
        """Bytes of the ring, of the buffers for what is held, and the resident layers."""
        if nbytes >= self._all_nbytes:
            return 0, 0, tuple(range(len(self._slots_nbytes)))
        free = nbytes - self._least_ring - self._held
        ring = min(self._most_ring, self._least_ring + int(RING_SHARE * free))
        left = nbytes - ring - self._held
        total = len(self._slots_nbytes)
        for count in range(total - 1, -1, -1):
            # Spread over the pass, so that the reader always has something to do and never too much.
            resident = tuple((2 * i + 1) * total // (2 * count) for i in range(count))
            if self.kept_nbytes(resident) <= left:
                return ring, self._held, resident
        raise AssertionError("no resident layer takes no memory")


def _size(nbytes: int) -> str:
    return f"{nbytes / 1e9:.2f} GB" if nbytes >= 10**10 else f"{-(-nbytes // 10**6):,} MB"


def _ask(nbytes: int) -> str:
    """As --ram takes it, rounded up: what the program takes is not quite the same the next time."""
    return f"{-(-nbytes // 10**7) * 10 + 10}MB"
