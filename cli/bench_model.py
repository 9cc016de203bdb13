"""df-bench pass, prefill, fullsize: what passes cost, on models of the true dimensions with invented weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from deltafin.cli.options import (
    ByteSize,
    json_option,
    options,
    print_json,
    ram_option,
    spine_option,
    threads_option,
    verbose_option,
)
from deltafin.errors import BadRequest

if TYPE_CHECKING:
    from deltafin.runtime import LayerTimes, Model, fullsize
    from deltafin.runtime.passbench import PassCost, PrefillCost
    from deltafin.store import PackSet, Standin, Store

# Enough for both kinds of attention, for what one layer reads ahead of another, and for a block of residuals' end.
LAYERS = 6
RELEASED = "released"
DISTINCT_EXPERTS = 96

folder_option = click.option(
    "--dir",
    "folder",
    type=click.Path(path_type=Path, file_okay=False),
    metavar="DIR",
    help="Where the stand-in is or will be (default: in the cache directory).",
)
layers_option = click.option(
    "--layers", type=click.IntRange(1, 93), metavar="N", help=f"How many layers of true size (default: {LAYERS})."
)


@click.command("pass")
@options(folder_option, layers_option, threads_option, json_option, verbose_option)
@click.option(
    "--rate",
    type=ByteSize(),
    default="800MB",
    show_default=True,
    metavar="SIZE",
    help="Bytes a second that the root is held to; less than the drive can do.",
)
@click.option("--tokens", type=click.IntRange(1), default=3, show_default=True, metavar="N", help="That count.")
def bench_pass(
    folder: Path | None, layers: int | None, threads: int | None, as_json: bool, rate: int, tokens: int
) -> None:
    """Measure how near a pass is to its critical path.

    That is, layer by layer, attention, then the longer of reading the experts and the work that needs none, then one
    expert; and at least the time in which the drive reads everything. Once with a spine that streams past, once with
    one that stays in memory, on a stand-in with a few layers of Kimi K3's dimensions.

    Example: df-bench pass --dir /data/k3-few --rate 1GB
    """
    from deltafin.runtime import Model, Want
    from deltafin.runtime.passbench import measure_passes, resident_plan, streamed_plan
    from deltafin.store import open_store

    standin = few_layers(folder, layers)
    want = Want(rows=1, tokens=tokens + 2)
    costs = []
    for plan in (streamed_plan, resident_plan):
        with (
            open_store(standin.model, cache_dir=standin.cache_dir, offline=True, rate=rate) as store,
            Model(store, threads=threads, plan=plan(store, want), spine=RELEASED) as model,
            _layers_bar(model, tokens + 1) as bar,
        ):
            costs.append(measure_passes(model, rate, tokens, bar))
    if as_json:
        print_json({**about(standin), "rate": rate, "passes": [{**asdict(c), "ratio": c.ratio} for c in costs]})
        return
    click.echo(describe(standin) + f"; root held to {size(rate)}/s, {tokens} passes of one row each")
    for cost in costs:
        _print_pass(cost)


@click.command("prefill")
@click.argument("model", default="demo")
@options(folder_option, layers_option, ram_option, threads_option, json_option, verbose_option)
@click.option(
    "--rows", type=click.IntRange(1), default=512, show_default=True, metavar="N", help="Tokens of the prompt."
)
@click.option("--counts-only", is_flag=True, help="Leave out the layers of true size and their times.")
def bench_prefill(
    model: str,
    folder: Path | None,
    layers: int | None,
    ram: int | None,
    threads: int | None,
    as_json: bool,
    rows: int,
    counts_only: bool,
) -> None:
    """Count what a long prompt reads, and time it.

    Counts are of MODEL (default: demo): experts asked for beside those that any row chose, visits of each layer. Times
    are of a stand-in with a few layers of Kimi K3's dimensions, beside the limits of the drive and of multiply-adds.

    Example: df-bench prefill demo --rows 512 --counts-only
    """
    from deltafin.runtime import Model, Want
    from deltafin.runtime.passbench import measure_prefill
    from deltafin.store import open_store, raw_rate

    if counts_only and (folder is not None or layers is not None):
        raise BadRequest("--dir and --layers have no effect with --counts-only; leave them out")
    want = Want(rows=rows, tokens=rows)
    found: dict[str, tuple[PrefillCost, float | None]] = {}

    def measure(name: str, store: Store) -> None:
        rate = raw_rate(store)  # before the model is there: it takes memory of its own
        with Model(store, ram=ram, threads=threads, want=want) as engine:
            found[name] = _prefill(engine, rows, measure_prefill), rate

    with open_store(model) as store:
        measure(model, store)
    if not counts_only:
        standin = few_layers(folder, layers)
        with open_store(standin.model, cache_dir=standin.cache_dir, offline=True) as store:
            measure(f"{layers or LAYERS} layers of Kimi K3's dimensions", store)
    if as_json:
        print_json(
            {name: {**asdict(cost), "excess": cost.excess, "raw_rate": rate} for name, (cost, rate) in found.items()}
        )
        return
    for name, (cost, rate) in found.items():
        _print_prefill(name, cost, rate)


@click.command("fullsize")
@options(folder_option, ram_option, threads_option, spine_option, json_option, verbose_option)
@click.option(
    "--rate", type=ByteSize(), metavar="SIZE", help="Bytes a second that the root is held to (default: not at all)."
)
@click.option("--tokens", type=click.IntRange(1), default=2, show_default=True, metavar="N", help="How many passes.")
def bench_fullsize(
    folder: Path | None,
    ram: int | None,
    threads: int | None,
    spine: str | None,
    as_json: bool,
    rate: int | None,
    tokens: int,
) -> None:
    """Run tokens through Kimi K3's full shape.

    The weights are a stand-in: all 93 layers and 82,432 experts, but few distinct bytes behind them, made in DIR on the
    first run (10.3 GB, a minute or two) and used again. A token reads and multiplies as much as with the real weights.

    Example: df-bench fullsize --dir /data/k3-stand-in --ram 4GB
    """
    from deltafin.cli.bench_tokens import compared, print_compared
    from deltafin.runtime import Model, Want, fullsize
    from deltafin.store import default_cache, open_store, raw_rate

    if rate == 0:
        raise click.BadParameter("nothing is read at a rate of 0", param_hint="--rate")
    standin = _standin(folder or default_cache() / "stand-in")
    want = Want(rows=1, tokens=tokens + 1)
    with open_store(standin.model, cache_dir=standin.cache_dir, offline=True, rate=rate) as store:
        packs = RELEASED if spine in (None, RELEASED) else _standin_packs(store, spine)
        limits = [raw_rate(store)]  # not while the model is there: it takes memory of its own
        with Model(store, ram=ram, threads=threads, want=want, spine=packs) as model, _layers_bar(model, tokens) as bar:
            report = fullsize.measure(model, tokens=tokens, progress=bar)
            plan = compared(model, report, default_cache(), drive=rate or limits[0])
    with open_store(standin.model, cache_dir=standin.cache_dir, offline=True, rate=rate) as store:
        limits.append(raw_rate(store))
    limit = max((rate for rate in limits if rate is not None), default=None)
    if as_json:
        memory = model.memory.as_json() if model.memory is not None else None
        print_json({**about(standin), **asdict(report), "raw_rate": limit, "memory": memory,
                    "spine": model.spine_label or "released", "plan": plan and plan.as_json()})  # fmt: skip
        return
    _print_fullsize(standin, model, report, limit)
    print_compared(plan)


# ---- stand-ins -------------------------------------------------------------------------------------------


def few_layers(folder: Path | None, layers: int | None) -> Standin:
    from deltafin.indexer import k3_config
    from deltafin.store import default_cache

    layers = layers or LAYERS
    folder = folder or default_cache() / f"stand-in-{layers}-layers"
    return _standin(folder, config_json=k3_config(layers), distinct_experts=DISTINCT_EXPERTS)


def _standin(folder: Path, *, config_json: bytes | None = None, distinct_experts: int = 200) -> Standin:
    from deltafin.cli.progress import Progress
    from deltafin.store import make_standin

    bar: Progress | None = None

    def made(done: int, total: int) -> None:
        nonlocal bar
        bar = bar or Progress(f"making a stand-in in {folder}", total)
        bar.set(done)

    try:
        return make_standin(folder, distinct_experts=distinct_experts, config_json=config_json, progress=made)
    finally:
        if bar is not None:
            bar.__exit__(None, None, None)


@contextmanager
def _layers_bar(model: Model, passes: int) -> Iterator[Callable[[int], None]]:
    from deltafin.cli.progress import Progress

    with Progress("running", passes * model.config.num_layers, "layers") as progress:
        yield progress.set


def _prefill(engine: Model, rows: int, measure: Callable[..., PrefillCost]) -> PrefillCost:
    import numpy as np

    # No text, but every expert gets some of it; the same on every machine.
    ids = np.random.default_rng(512).integers(0, engine.config.vocab_size, rows).tolist()
    with _layers_bar(engine, 1) as bar:
        return measure(engine, ids, bar)


def _standin_packs(store: Store, spine: str) -> PackSet:
    from deltafin.cli.progress import Progress
    from deltafin.store import PackFormat, standin_packs

    nbytes = store.catalog.totals.spine_nbytes // store.catalog.config.num_layers
    with Progress(f"packing a layer of each kind as {spine}", 5 * nbytes) as progress:
        return standin_packs(store, PackFormat(spine), progress.add)


# ---- tables ----------------------------------------------------------------------------------------------


def about(standin: Standin) -> dict[str, object]:
    return {**asdict(standin), "cache_dir": str(standin.cache_dir)}


def describe(standin: Standin) -> str:
    return (
        f"{standin.model} in {standin.cache_dir}: {standin.spans:,} spans in {standin.distinct_objects:,} objects, "
        f"{size(standin.distinct_nbytes)}"
    )


def size(nbytes: float) -> str:
    from deltafin.cli.progress import human_nbytes

    return human_nbytes(nbytes)


def _print_pass(cost: PassCost) -> None:
    click.echo(
        f"\n{cost.resident_layers} of {cost.spine_layers} layers, the head among them, resident "
        f"({size(cost.ram)} of memory): "
        f"{cost.wall_s:.3f} s a pass, critical path {cost.critical_s:.3f} s, ratio {cost.ratio:.3f}"
    )
    click.echo(
        f"  drive {cost.drive_s:.3f} s for {size(cost.read_nbytes)}, compute {cost.compute_s:.3f} s; "
        + causes(cost.parts, cost.passes)
    )


def causes(parts: LayerTimes, passes: int) -> str:
    return (
        f"waiting: spine {parts.spine_wait_s / passes:.3f}, experts {parts.expert_wait_s / passes:.3f}; "
        f"computing: attention {parts.attention_s / passes:.3f}, shared {parts.shared_s / passes:.3f}, "
        f"experts {parts.expert_s / passes:.3f}"
    )


def _print_prefill(name: str, cost: PrefillCost, rate: float | None) -> None:
    at_most = f", at the drive's best rate {cost.read_nbytes / rate:.2f} s" if rate else ""
    click.echo(
        f"{name}: {cost.rows} rows in {cost.passes} pass{'es' * (cost.passes > 1)}, {cost.wall_s:.2f} s\n"
        f"  experts  {cost.expert_visits:,} asked for ({size(cost.expert_nbytes)}), {cost.unique_experts:,} chosen: "
        f"{cost.excess:.3f} of what is needed\n"
        f"  layers   {cost.spine_visits:,} visits of {cost.layers + 1} with the globals\n"
        f"  reading  {size(cost.read_nbytes)} from drives{at_most}\n"
        f"  compute  {cost.flop / 1e12:.2f} TFLOP, at the peak {cost.flop_limit_s:.2f} s\n"
        f"  {causes(cost.parts, 1)}"
    )


def _print_fullsize(standin: Standin, model: Model, report: fullsize.Report, limit: float | None) -> None:
    click.echo(describe(standin))
    plan = model.memory
    if plan is not None:
        click.echo(
            f"{size(plan.budget)} of memory: {len(plan.resident)} of {plan.spine_layers} layers, the head among them, "
            f"resident ({size(plan.resident_nbytes)}), ring {size(plan.ring_nbytes)}, {plan.slots} slots; "
            f"spine {model.spine_label or 'released'}; read at most here: {size(limit) + '/s' if limit else 'unknown'}"
        )
    click.echo(
        f"{'token':>8} {'s':>8} {'limit':>8} {'ratio':>6} {'experts':>16} {'spine':>16} {'head':>14} {'row':>7} "
        f"{'device':>10}"
    )
    for cost in report.tokens:
        device = "unknown" if cost.device_nbytes is None else size(cost.device_nbytes)
        limit_s = cost.read_nbytes / limit if limit else float("nan")
        ratio = cost.wall_s / limit_s if limit_s else float("nan")
        click.echo(
            f"{cost.id:8} {cost.wall_s:8.2f} {limit_s:8.2f} {ratio:6.2f} {cost.expert_nbytes:16,} "
            f"{cost.spine_nbytes:16,} {cost.head_nbytes:14,} {cost.row_nbytes:7,} {device:>10}"
        )
        click.echo(f"         {causes(cost.parts, 1)}, head {cost.head_s:.3f}")
    click.echo(f"peak memory {size(report.peak_rss_nbytes)}")
