"""What df-plan prints: one screen in plain words."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from deltafin.cli.progress import human_nbytes, human_seconds
from deltafin.runtime.planner import BF12_LEVER

if TYPE_CHECKING:
    from deltafin.runtime.planner import Changes, Figures, PassTime, Plan, Present, PromptPlan, Subject

BUSY = 0.75  # of the cores by other programs: what is measured then is slower than the machine
WORTH_PACKING = 0.95  # of a token's time: less than that is won by packing the spine without loss

_EXPLANATION = """\
model     for each layer: attention, router; then the longer of reading its experts and of the shared work with all
          experts; then what needs their sum. The spine that does not stay is read ahead as far as the ring has room.
          product   weights x seconds a weight, by format and rows; on a straight line between 1, 8 and 64 rows
          program   seconds a layer, an expert, a read and a pass that are neither, found with the demo model
          reads     bytes / the drives' rate; roots that hold the same bytes add up, else the largest share decides
          misses    1 - what is kept of the experts by the published skew; other models: even use
          prompts   union of experts under even routing, 896 x (1 - (1 - 16/896)^rows); real texts share more
                    (published: 96 % of that for 2 tokens, 67 % for 8, 52 % for 89), so less may be read"""


def screen(plan: Plan, subject: Subject, here: Present | None, figures: Figures, changes: Changes) -> str:
    """Everything but the explanation and the error."""
    lines = [_title(plan, subject, here)]
    lines += _machine(plan, figures, changes)
    lines += _memory(plan)
    lines += _tokens(plan)
    lines += [_prompt(prompt) for prompt in plan.prompts]
    lines += _download(plan)
    lines += _levers(plan)
    lines += _next(plan, subject, changes)
    return "\n".join(lines)


def _title(plan: Plan, subject: Subject, here: Present | None) -> str:
    if not subject.indexed:
        return f"{plan.model}, from its published shape; nothing of it is here yet"
    if here is None or not subject.remote:
        return f"{plan.model} ({plan.identity}), all of it here"
    config = subject.catalog.config
    experts = len(config.moe_layers) * config.num_experts
    return (
        f"{plan.model} ({plan.identity}): {human_nbytes(here.spine_nbytes)} of the spine and {here.experts:,} of "
        f"{experts:,} experts are here"
    )


def _machine(plan: Plan, figures: Figures, changes: Changes) -> list[str]:
    age = max(0.0, time.time() - figures.measured_at)
    when = "just now" if age < 60 else f"{human_seconds(age)} ago"
    if figures.load > BUSY:
        when += " beside other work, so all times are too long; --measure when that is done"
    changed = "; with the changes asked for" if changes.any else ""
    lines = [
        f"machine   {plan.threads} threads, {figures.kernels.isa}; {human_nbytes(plan.budget)} of memory to use; "
        f"measured {when}{changed}"
    ]
    for drive in figures.drives:
        found = drive.note if drive.rate is None else f"{human_nbytes(drive.rate)}/s from {drive.source}"
        lines.append(f"drive     {drive.path}: {drive.file_system}, {human_nbytes(drive.free_nbytes)} free, {found}")
    if plan.drive_assumed:
        assert plan.drive is not None
        lines.append(f"          so {human_nbytes(plan.drive)}/s are assumed; --what-if drives=7GB/s says otherwise")
    elif plan.drive is not None and (changes.drives or changes.more_drives or len(figures.drives) > 1):
        lines.append(f"          together {human_nbytes(plan.drive)}/s")
    return lines


def _memory(plan: Plan) -> list[str]:
    memory = plan.memory
    stays = f"{len(memory.resident)} of {memory.spine_layers} layers of the spine stay"
    if len(memory.resident) == memory.spine_layers:
        stays = "all of the spine stays"
    stays += f" ({human_nbytes(memory.resident_nbytes)})"
    kept = f", and {memory.resident_experts:,} experts ({human_nbytes(memory.resident_experts_nbytes)})"
    return [f"stays     {stays}{kept if memory.resident_experts else ', no experts'}; spine {plan.spine}"]


def _tokens(plan: Plan) -> list[str]:
    warm = plan.warm
    first = _seconds(plan.cold.total_s)
    return [
        f"token     {_seconds(warm.total_s)} warm, {warm.bound}-bound; {first} the first after a start",
        f"          waiting: spine {_seconds(warm.spine_wait_s)}, experts {_seconds(warm.expert_wait_s)}",
        f"          computing {_seconds(warm.compute_s)}: {_computing(warm)}",
    ]


def _computing(time: PassTime) -> str:
    parts = [
        ("attention", time.attention_s),
        ("shared", time.shared_s),
        ("experts", time.expert_s),
        ("head", time.head_s),
        ("program", time.program_s),
    ]
    return ", ".join(f"{name} {_seconds(seconds)}" for name, seconds in parts)


def _prompt(prompt: PromptPlan) -> str:
    name = "prompt" if prompt.tokens == 10 else ""
    if prompt.time is None:
        return f"{name:9} {prompt.tokens:,} tokens: too many for this memory"
    passes = f"{prompt.passes:,} passes" if prompt.passes > 1 else "1 pass"
    return (
        f"{name:9} {prompt.tokens:,} tokens: {_seconds(prompt.time.total_s)} to the first new one, "
        f"{prompt.time.bound}-bound, {passes}, reads {human_nbytes(prompt.time.read_nbytes)}"
    )


def _download(plan: Plan) -> list[str]:
    install, streaming = plan.install, plan.streaming
    if install is None or streaming is None or install.missing_nbytes == 0:
        return []
    fits = "" if install.fits else ", more than is free"
    partial_fits = "" if install.partial_fits else ", more than is free"
    reads = f"the experts that take {100 * install.partial_reads:.3g} % of the reads"
    lines = [
        f"install   everything: {human_nbytes(install.missing_nbytes)} to fetch{fits}: {_by_line(install.full_s)}",
        f"          the spine and {reads}: {human_nbytes(install.partial_missing_nbytes)}{partial_fits}: "
        f"{_by_line(install.partial_s)}",
    ]
    if len(install.shares) > 1:
        shares = ", ".join(f"{path} {human_nbytes(nbytes)}" for path, nbytes in install.shares.items() if nbytes)
        lines.append(f"          best spread: {shares}")
    nbytes = human_nbytes(streaming.token_nbytes)
    lines.append(f"stream    a token fetches up to {nbytes} of experts: {_by_line(streaming.token_s)}")
    lines.append(
        f"          {streaming.full_after_tokens} such tokens move as many bytes as all experts: it is a slow download "
        "that begins with what is used"
    )
    if install.line is None:
        lines.append("line      unknown; --probe-line measures it, --line 100Mbit/s states it")
    return lines


def _by_line(times: dict[float, float]) -> str:
    return ", ".join(f"{human_seconds(seconds)} at {_rate(rate)}" for rate, seconds in times.items())


def _rate(rate: float) -> str:
    """A line, as lines are sold."""
    bits = 8 * rate
    return f"{bits / 1e9:.3g} Gbit/s" if bits >= 1e9 else f"{bits / 1e6:.3g} Mbit/s"


def _levers(plan: Plan) -> list[str]:
    return [
        f"{'change' if number == 0 else '':9} {lever.name}: a warm token takes {_seconds(lever.token_s)}"
        for number, lever in enumerate(plan.levers)
    ]


def _next(plan: Plan, subject: Subject, changes: Changes) -> list[str]:
    """The commands to run here, in order; none for another machine."""
    if changes.any:
        return []
    model, install = plan.model, plan.install
    commands = [] if subject.indexed else [f"df-index build {model}"]
    if install is not None:
        if install.spine_missing_nbytes > install.free_nbytes:
            commands.append(
                f"first more space: the spine takes {human_nbytes(install.spine_missing_nbytes)} and "
                f"{human_nbytes(install.free_nbytes)} are free; --cache-dir DIR puts it on another drive"
            )
        if install.spine_missing_nbytes:
            commands.append(f"df-fetch spine {model}")
        if install.missing_nbytes > install.spine_missing_nbytes and install.fits:
            commands.append(f"df-fetch all {model}")
    packed = next((lever for lever in plan.levers if lever.name == BF12_LEVER), None)
    if packed is not None and packed.token_s < WORTH_PACKING * plan.warm.total_s:
        commands.append(f"df-fetch spine {model} --as bf12")
    commands.append(
        f'df-run {model} --ram {plan.budget // 10**6}MB --prompt "The capital of France is" --max-new 16 --stats'
    )
    return [f"{'next' if number == 0 else '':9} {command}" for number, command in enumerate(commands)]


def _seconds(seconds: float) -> str:
    if seconds < 0.1:
        return f"{seconds * 1000:.3g} ms"
    return f"{seconds:.3g} s" if seconds < 90 else human_seconds(seconds)


def explanation(figures: Figures) -> str:
    """The terms, and what they were found to be here."""
    kernels, add = figures.kernels, figures.overheads
    rates = ", ".join(
        f"{name} {seconds[0] * 1e12:.0f}/{seconds[1] * 1e12:.0f}/{seconds[2] * 1e12:.0f}"
        for name, seconds in kernels.seconds.items()
    )
    return "\n".join(
        [
            _EXPLANATION,
            f"found     seconds for 10^12 weights at 1/8/64 rows: {rates}",
            f"          memory {kernels.memory_rate / 1e9:.1f} GB/s, hash {kernels.hash_rate / 1e9:.1f} GB/s a core",
            f"          program, in us: KDA layer {add.kda_s * 1e6:.0f}, MLA {add.mla_s * 1e6:.0f}, MLP "
            f"{add.mlp_s * 1e6:.0f}; expert {add.expert_s * 1e6:.0f}; read {add.read_s * 1e6:.0f}, piece "
            f"{add.piece_s * 1e6:.0f}; pass {add.pass_s * 1e6:.0f}",
        ]
    )
