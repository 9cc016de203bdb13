"""The whole plan for a user: what stays, what a token takes, what the download takes, what would change it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from deltafin.errors import BadRequest
from deltafin.runtime.memory import MemoryPlan, Want, plan_memory
from deltafin.runtime.planner.machine import Figures, spread, together
from deltafin.runtime.planner.shape import ModelShape, model_shape
from deltafin.runtime.planner.subject import Present, Subject
from deltafin.runtime.planner.timing import PassTime, Rates, cold_token_time, hit_share, prompt_time, token_time
from deltafin.runtime.planner.whatif import Changes
from deltafin.store import DIRECT_FROM_NBYTES, DriveProbe, PackFormat

PROMPTS = (10, 500, 5000)
NEW_TOKENS = 128  # that memory is planned for beside the prompt
MORE_RAM = 64_000_000_000
LINES = (100e6 / 8, 1e9 / 8)  # bytes a second, where nothing is known of the line
ASSUMED_DRIVE = 3e9  # a common NVMe drive, where no drive can be measured
_PACKED_AS = "the spine packed as"
BF12_LEVER = f"{_PACKED_AS} {PackFormat.BF12.label}"
HOT_EXPERTS = 0.32  # of the experts: the useful partial install
WARM_AFTER = 512  # rows that have passed when a token is called warm


@dataclass(frozen=True, slots=True)
class PromptPlan:
    """A prompt under even routing; experts of real texts are fewer."""

    tokens: int
    passes: int
    time: PassTime | None  # None if it does not fit into the memory


@dataclass(frozen=True, slots=True)
class Lever:
    """One change, and what a warm token takes then."""

    name: str
    token_s: float
    as_released: bool = True


@dataclass(frozen=True, slots=True)
class Install:
    """Bytes of a whole install, or of the spine with the hottest experts, and how long a line takes for the rest."""

    full_nbytes: int
    partial_nbytes: int
    partial_reads: float  # share of all reads of experts that the partial one serves
    missing_nbytes: int
    partial_missing_nbytes: int
    spine_missing_nbytes: int
    free_nbytes: int  # on all drives that may be written to
    line: float | None  # bytes a second, None if unknown
    full_s: dict[float, float]  # by line, in bytes a second
    partial_s: dict[float, float]
    shares: dict[str, int]  # how a full install would best lie on the drives that were measured
    fits: bool
    partial_fits: bool


@dataclass(frozen=True, slots=True)
class Streaming:
    """Tokens whose experts all come over the line."""

    token_nbytes: int
    token_s: dict[float, float]  # by line
    full_after_tokens: int  # cold tokens that move as many bytes as all experts


@dataclass(frozen=True, slots=True)
class Plan:
    model: str
    identity: str
    threads: int
    budget: int
    spine: str
    as_released: bool
    drive: float | None  # bytes a second of all that is read; None where it is memory anyway
    drive_assumed: bool
    memory: MemoryPlan
    warm: PassTime
    cold: PassTime
    prompts: tuple[PromptPlan, ...]
    install: Install | None  # None for a model that is whole on this machine
    streaming: Streaming | None
    levers: tuple[Lever, ...]


@dataclass(frozen=True, slots=True)
class _Setting:
    """What a prediction is made for."""

    shape: ModelShape
    budget: int
    rates: Rates

    def memory(self, rows: int = 1, tokens: int = NEW_TOKENS) -> MemoryPlan:
        want = Want(rows=rows, tokens=tokens)
        return plan_memory(self.budget, self.shape, self.shape.pieces, want, self.rates.kernels.threads)

    def warm(self) -> PassTime:
        return token_time(self.shape, self.memory(), self.rates, first=WARM_AFTER)


def make_plan(
    subject: Subject,
    here: Present | None,
    figures: Figures,
    *,
    budget: int,
    line: float | None = None,
    spine: str | None = None,
    changes: Changes = Changes(),  # noqa: B008  (frozen)
) -> Plan:
    """A plan for `budget` bytes of memory on a machine with these figures, or with `changes` to them.

    Raises BadRequest if the model cannot be computed in so little memory.
    """
    spine = changes.spine or spine
    shape, label, as_released = _shape(subject, spine)
    kernels = figures.kernels if changes.cores is None else figures.kernels.with_threads(changes.cores)
    line = changes.line or line
    devices = _devices(figures.drives)
    found = changes.drives or _drive_rate(devices, here, shape.full_nbytes)
    small = shape.expert_nbytes < DIRECT_FROM_NBYTES and changes.drives is None
    drive = (math.inf if small else found or ASSUMED_DRIVE) + sum(changes.more_drives)
    setting = _Setting(shape, changes.ram or budget, Rates(kernels, figures.overheads, drive))
    install = _install(subject, shape, here, devices, line)
    return Plan(
        model=subject.model,
        identity=subject.identity,
        threads=kernels.threads,
        budget=setting.budget,
        spine=label,
        as_released=as_released,
        drive=None if math.isinf(drive) else drive,
        drive_assumed=not small and found is None,
        memory=setting.memory(),
        warm=setting.warm(),
        cold=cold_token_time(shape, setting.memory(), setting.rates),
        prompts=tuple(_prompt(setting, tokens) for tokens in PROMPTS),
        install=install,
        streaming=_streaming(shape, line) if install is not None else None,
        levers=tuple(_levers(subject, setting, devices, spine)),
    )


def _shape(subject: Subject, spine: str | None) -> tuple[ModelShape, str, bool]:
    """The shape with the encoding that is asked for, whether there are packs of it or not."""
    skew = subject.published_skew
    packs = subject.packs(spine)
    whole = packs is not None and len(packs.packs) == subject.catalog.config.num_layers
    if packs is not None and (spine is None or whole):
        shape = model_shape(subject.catalog, packs=packs, published_skew=skew)
        return shape, packs.format.label, packs.format.as_released
    if spine in (None, "released"):
        return model_shape(subject.catalog, published_skew=skew), "released", True
    format = PackFormat(spine)
    shape = model_shape(subject.catalog, foreseen=format, published_skew=skew)
    return shape, f"{format.label}, to be packed", format.as_released


@dataclass(frozen=True, slots=True)
class _Device:
    """A file system: directories on the same one share its rate and its space."""

    paths: tuple[str, ...]
    rate: float | None
    free_nbytes: int  # that may be written to


def _devices(drives: Sequence[DriveProbe]) -> list[_Device]:
    found: dict[int, list[DriveProbe]] = {}
    for drive in drives:
        found.setdefault(drive.device, []).append(drive)
    return [
        _Device(
            tuple(drive.path for drive in same),
            max((drive.rate for drive in same if drive.rate is not None), default=None),
            max((drive.free_nbytes for drive in same if drive.writable), default=0),
        )
        for same in found.values()
    ]


def _drive_rate(devices: Sequence[_Device], here: Present | None, nbytes: int) -> float | None:
    """Bytes a second with what is here where it is; before anything is, as all `nbytes` would best lie."""
    known = [(device, device.rate) for device in devices if device.rate is not None]
    if not known:
        return None
    rates = [rate for _, rate in known]
    if here is not None:
        held = {holding.path: holding.only_nbytes for holding in here.holdings if holding.only_nbytes}
        only = [sum(held.pop(path, 0) for path in device.paths) for device, _ in known]
        if (sum(only) or here.shared_nbytes) and not held:
            return together(rates, only, here.shared_nbytes)
    room = [device.free_nbytes for device, _ in known]
    return together(rates, spread(nbytes, rates, room))


def _prompt(setting: _Setting, tokens: int) -> PromptPlan:
    try:
        memory = setting.memory(rows=tokens, tokens=tokens + NEW_TOKENS)
    except BadRequest:
        return PromptPlan(tokens, 0, None)
    return PromptPlan(tokens, -(-tokens // memory.rows), prompt_time(setting.shape, memory, setting.rates, tokens))


def _install(
    subject: Subject, shape: ModelShape, here: Present | None, devices: Sequence[_Device], line: float | None
) -> Install | None:
    if not subject.remote:
        return None
    hot = math.ceil(HOT_EXPERTS * shape.experts) * shape.expert_nbytes
    partial = shape.spine_nbytes + hot
    have_spine = here.spine_nbytes if here is not None else 0
    have_experts = here.experts * shape.expert_nbytes if here is not None else 0
    missing = shape.full_nbytes - have_spine - have_experts
    spine_missing = max(0, shape.spine_nbytes - have_spine)
    partial_missing = spine_missing + max(0, hot - have_experts)
    lines = LINES if line is None else (line,)
    room = [device.free_nbytes for device in devices]
    shares = spread(missing, [device.rate or 0.0 for device in devices], room)
    return Install(
        full_nbytes=shape.full_nbytes,
        partial_nbytes=partial,
        partial_reads=hit_share(HOT_EXPERTS, skewed=shape.published_skew),
        missing_nbytes=missing,
        partial_missing_nbytes=partial_missing,
        spine_missing_nbytes=spine_missing,
        free_nbytes=sum(room),
        line=line,
        full_s={rate: missing / rate for rate in lines},
        partial_s={rate: partial_missing / rate for rate in lines},
        shares={device.paths[0]: n for device, n in zip(devices, shares, strict=True) if n},
        fits=sum(room) >= missing,
        partial_fits=sum(room) >= partial_missing,
    )


def _streaming(shape: ModelShape, line: float | None) -> Streaming:
    lines = LINES if line is None else (line,)
    nbytes = shape.token_expert_nbytes
    return Streaming(nbytes, {rate: nbytes / rate for rate in lines}, round(shape.pool_nbytes / nbytes))


def _levers(subject: Subject, setting: _Setting, devices: Sequence[_Device], spine: str | None) -> list[Lever]:
    """What a warm token takes after each change alone."""
    found = []
    rates = setting.rates
    if not math.isinf(rates.drive):
        best = max((device.rate for device in devices if device.rate is not None), default=ASSUMED_DRIVE)
        more = replace(setting, rates=replace(rates, drive=rates.drive + best))
        found.append(Lever(f"one more drive of {best / 1e9:.1f} GB/s with all of it, too", more.warm().total_s))
    richer = replace(setting, budget=setting.budget + MORE_RAM)
    found.append(Lever("64 GB more of memory", richer.warm().total_s))
    for format in (PackFormat.BF12, PackFormat.INT8):
        if spine in (None, "released"):
            shape = model_shape(subject.catalog, foreseen=format, published_skew=subject.published_skew)
            packed = replace(setting, shape=shape)
            found.append(Lever(f"{_PACKED_AS} {format.label}", packed.warm().total_s, format.as_released))
    return found
