"""df-bench tokens: seconds a token of any model here, beside what df-plan would have said."""

from __future__ import annotations

import statistics
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import click

from deltafin.cli.options import (
    ByteSize,
    cache_option,
    json_option,
    options,
    print_json,
    ram_option,
    root_option,
    spine_option,
    threads_option,
    verbose_option,
)

if TYPE_CHECKING:
    from deltafin.runtime import Model, fullsize
    from deltafin.runtime.planner import Outcome, PassTime


@dataclass(frozen=True, slots=True)
class Compared:
    """What a plan would have said of a measurement's tokens after the first, beside what they took."""

    outcome: Outcome
    predicted: PassTime

    def as_json(self) -> dict[str, object]:
        return {**asdict(self.outcome), "error": self.outcome.error, "predicted": self.predicted.as_json()}


@click.command("tokens")
@click.argument("model", default="demo")
@options(ram_option, threads_option, spine_option)
@options(json_option, cache_option, root_option, verbose_option)
@click.option(
    "--rate", type=ByteSize(), metavar="SIZE", help="Bytes a second that each root is held to (default: not at all)."
)
@click.option("--tokens", type=click.IntRange(1), default=16, show_default=True, metavar="N", help="That count.")
@click.option(
    "--warm-up", type=click.IntRange(1), default=1, show_default=True, metavar="N", help="Tokens before them."
)
def bench_tokens(
    model: str,
    ram: int | None,
    threads: int | None,
    spine: str | None,
    as_json: bool,
    cache_dir: Path | None,
    roots: tuple[Path, ...],
    rate: int | None,
    tokens: int,
    warm_up: int,
) -> None:
    """Measure seconds a token of MODEL (default: demo), which must be on this machine.

    The first tokens fill what stays in memory; the others count, by cause as df-plan has them: their mean without the
    largest and smallest tenth. Where df-plan has measured this machine, its prediction stands beside it and is
    remembered. Asks no server.

    Example: df-bench tokens demo --rate 40MB --ram 150MB
    """
    from deltafin.cli.progress import Progress
    from deltafin.runtime import Model, Want, fullsize
    from deltafin.store import default_cache, open_store

    if rate == 0:
        raise click.BadParameter("nothing is read at a rate of 0", param_hint="--rate")
    with ExitStack() as stack:
        store = stack.enter_context(open_store(model, cache_dir=cache_dir, roots=roots, offline=True, rate=rate))
        want = Want(rows=1, tokens=warm_up + tokens + 1)
        engine = stack.enter_context(Model(store, ram=ram, threads=threads, want=want, spine=spine))
        with Progress("running", (warm_up + tokens) * engine.config.num_layers, "layers") as progress:
            report = fullsize.measure(engine, tokens=warm_up + tokens, progress=progress.set)
        plan = compared(engine, report, cache_dir or default_cache(), warm_up=warm_up)
    if as_json:
        print_json(_as_json(engine, report, warm_up, plan))
        return
    _print(engine, report, warm_up)
    print_compared(plan)


def compared(
    model: Model, report: fullsize.Report, cache: Path, *, warm_up: int = 1, drive: float | None = None
) -> Compared | None:
    """Compares and remembers, where something was measured of this machine; the first tokens do not count."""
    from deltafin.runtime import typical
    from deltafin.runtime.planner import compare

    walls = [cost.wall_s for cost in report.tokens[warm_up:]]
    if not walls:
        return None
    found = compare(model, cache, "df-bench", rows=warm_up, tokens=len(walls), measured_s=typical(walls), drive=drive)
    return None if found is None else Compared(*found)


def print_compared(plan: Compared | None) -> None:
    if plan is None:
        click.echo("plan     none: one token says nothing, or df-plan has not measured this machine and these drives")
        return
    outcome, parts = plan.outcome, plan.predicted
    click.echo(
        f"plan     {outcome.predicted_s:.3f} s a token, {abs(outcome.error):.0%} too "
        f"{'long' if outcome.error > 0 else 'short'}; waiting: spine {parts.spine_wait_s:.3f}, experts "
        f"{parts.expert_wait_s:.3f}; computing: {parts.compute_s:.3f}, of which the program {parts.program_s:.3f}"
    )


def _as_json(model: Model, report: fullsize.Report, warm_up: int, plan: Compared | None) -> dict[str, object]:
    from deltafin.runtime import typical

    return {
        "model": model.store.model,
        "identity": model.store.catalog.identity,
        **asdict(report),
        "token_s": typical([cost.wall_s for cost in report.tokens[warm_up:]]),
        "memory": None if model.memory is None else model.memory.as_json(),
        "spine": model.spine_label or "released",
        "plan": plan and plan.as_json(),
    }


def _print(model: Model, report: fullsize.Report, warm_up: int) -> None:
    from deltafin.cli.bench_model import causes
    from deltafin.cli.progress import human_nbytes
    from deltafin.runtime import LayerTimes, typical

    first, counted = report.tokens[0], report.tokens[warm_up:]
    walls = sorted(cost.wall_s for cost in counted)
    parts = LayerTimes()
    for cost in counted:
        parts.add(cost.parts)
    read = statistics.fmean(cost.read_nbytes for cost in counted)
    plan = model.memory
    if plan is not None:
        click.echo(
            f"{model.store.model}: {human_nbytes(plan.budget)} of memory, {len(plan.resident)} of {plan.spine_layers} "
            f"layers, the head among them, resident; spine {model.spine_label or 'released'}"
        )
    click.echo(
        f"token    {typical(walls):.3f} s (median {statistics.median(walls):.3f}, {walls[0]:.3f} to "
        f"{walls[-1]:.3f}, {len(walls)} tokens); the first {first.wall_s:.3f} s"
    )
    click.echo(f"causes   {causes(parts, len(counted))}; read {human_nbytes(read)} a token")
