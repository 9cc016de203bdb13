"""df-fetch place, pin, unpin and evict: what lies on which drive, and what may go."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from deltafin.cli.options import (
    ASK_ABOVE_NBYTES,
    ByteSize,
    ask,
    cache_option,
    json_option,
    opened_store,
    options,
    print_json,
    revision_option,
    root_option,
    verbose_option,
    yes_option,
)
from deltafin.errors import BadRequest

if TYPE_CHECKING:
    from deltafin.indexer import Catalog
    from deltafin.store import PlacePlan, Status, Store

Pair = tuple[int, int]  # layer, expert

_layers = click.option("--layers", metavar="LIST", help="Layers like 1-5,9 (default: all with experts).")
_experts = click.option("--experts", metavar="LIST", help="Expert numbers like 0-15 (default: all).")
_trace = click.option(
    "--trace", type=click.Path(path_type=Path, dir_okay=False), metavar="F", help="Those that a df-run trace used."
)
_hottest = click.option("--hottest", type=click.IntRange(1), metavar="N", help="The N most used in real runs.")


@click.command("place")
@click.argument("model")
@click.option("--dry-run", is_flag=True, help="Only show what would be done (default without --yes).")
@click.option("--copy-bytes", type=ByteSize(), metavar="SIZE", help="Copy at most so much.")
@options(json_option, revision_option, cache_option, root_option, yes_option, verbose_option)
def place(
    model: str,
    dry_run: bool,
    copy_bytes: int | None,
    as_json: bool,
    revision: str | None,
    cache_dir: Path | None,
    roots: tuple[Path, ...],
    yes: bool,
) -> None:
    """Copy hot experts to further roots, so that several drives share a layer's reads.

    Experts that are used most (in real runs of df-run) are copied from the drive that a layer waits for to one with
    time and room left, within budgets and reserves. Shows what it would do; --yes does it. Asks no server, and never
    deletes.

    Example: df-fetch place demo --root /mnt/second,write
    """
    from deltafin.cli.progress import Progress
    from deltafin.store import DEPTHS, apply_placement, plan_placement, tune

    if dry_run and yes:
        raise BadRequest("--dry-run and --yes contradict each other")
    with opened_store(model, cache_dir=cache_dir, roots=roots, offline=True, revision=revision) as store:
        tune(store, max(DEPTHS))
        plan = plan_placement(store, copy_bytes)
        if as_json:
            print_json({**asdict(plan), "nbytes": plan.nbytes, "applied": yes})
        else:
            _print_plan(plan, yes)
        if yes and plan.copies:
            with Progress("copying", plan.nbytes) as progress:
                made = apply_placement(store, plan, progress.add)
            click.echo(f"copied {made} experts", err=as_json)


def _print_plan(plan: PlacePlan, applied: bool) -> None:
    from deltafin.cli.progress import human_nbytes

    width = max(len(root.path) for root in plan.roots)
    click.echo(f"{'root':{width}} {'rate':>10} {'experts':>8} {'copies':>7} {'bytes':>9} {'room':>9}")
    for root in plan.roots:
        rate = human_nbytes(root.rate) + "/s" if root.rate_known else "unknown"
        room = "read only" if root.room is None else human_nbytes(root.room)
        click.echo(
            f"{root.path:{width}} {rate:>10} {root.experts:8,} {root.copies:7,} "
            f"{human_nbytes(root.copy_nbytes):>9} {room:>9}"
        )
    if not plan.heat_known:
        click.echo("no run has left any heat yet: all experts count alike")
    if plan.missing:
        click.echo(f"{plan.missing:,} experts are nowhere on this machine and are left out")
    click.echo(
        f"reading a token's experts: {plan.before_s:.3f} s now, {plan.after_s:.3f} s with {len(plan.copies):,} copies "
        f"({human_nbytes(plan.nbytes)})"
    )
    if plan.copies and not applied:
        click.echo("nothing was copied; add --yes")


@click.command("pin")
@click.argument("model")
@options(_layers, _experts, _trace, _hottest, revision_option, cache_option, verbose_option)
def pin(
    model: str,
    layers: str | None,
    experts: str | None,
    trace: Path | None,
    hottest: int | None,
    revision: str | None,
    cache_dir: Path | None,
) -> None:
    """Protect experts from eviction, whether they are here yet or not.

    Example: df-fetch pin demo --layers 1-3 --experts 0-7
    """
    with opened_store(model, cache_dir=cache_dir, roots=(), offline=True, revision=revision) as store:
        chosen = _chosen(store, layers, experts, trace, hottest, "pin")
        new = store.pins.add(chosen)
        click.echo(f"pinned {new:,} experts; {len(store.pins.read()):,} are pinned now")


@click.command("unpin")
@click.argument("model")
@click.option("--all", "everything", is_flag=True, help="All that are pinned.")
@options(_layers, _experts, _trace, _hottest, revision_option, cache_option, verbose_option)
def unpin(
    model: str,
    everything: bool,
    layers: str | None,
    experts: str | None,
    trace: Path | None,
    hottest: int | None,
    revision: str | None,
    cache_dir: Path | None,
) -> None:
    """Let experts be evicted again.

    Example: df-fetch unpin demo --all
    """
    if everything and any(option is not None for option in (layers, experts, trace, hottest)):
        raise BadRequest("--all leaves nothing to choose: give it alone")
    with opened_store(model, cache_dir=cache_dir, roots=(), offline=True, revision=revision) as store:
        chosen = store.pins.read() if everything else _chosen(store, layers, experts, trace, hottest, "unpin")
        gone = store.pins.remove(chosen)
        click.echo(f"unpinned {gone:,} experts; {len(store.pins.read()):,} are pinned now")


def _chosen(
    store: Store, layers: str | None, experts: str | None, trace: Path | None, hottest: int | None, verb: str
) -> list[Pair]:
    """The experts that the options name, which come in three ways of which one must be taken."""
    by_number = layers is not None or experts is not None
    if sum((by_number, trace is not None, hottest is not None)) != 1:
        raise BadRequest(f"say what to {verb}: --layers and --experts, or --trace, or --hottest")
    catalog = store.catalog
    if trace is not None:
        from deltafin.runtime import expert_uses

        return list(expert_uses(trace, catalog.config))
    if hottest is not None:
        return _hottest_of(store, hottest)
    return _numbered(catalog, layers, experts)


def _numbered(catalog: Catalog, layers: str | None, experts: str | None) -> list[Pair]:
    from deltafin.store import parse_numbers

    config = catalog.config
    in_layers = list(config.moe_layers) if layers is None else parse_numbers(layers, config.moe_layers, "--layers")
    every = range(config.num_experts)
    numbers = list(every) if experts is None else parse_numbers(experts, every, "--experts")
    return [(layer, expert) for layer in in_layers for expert in numbers]


def _hottest_of(store: Store, count: int) -> list[Pair]:
    import numpy as np

    heat = store.heat.read()
    if not heat.any():
        raise BadRequest(f"--hottest: no run of {store.model} has left any heat yet; df-run does")
    order = np.argsort(-heat, axis=None, kind="stable")[:count]
    pairs = np.stack(np.unravel_index(order, heat.shape), axis=1).tolist()
    return [(layer, expert) for layer, expert in pairs if heat[layer, expert] > 0]


@click.command("evict")
@click.argument("model")
@click.option("--to", "most", type=ByteSize(), required=True, metavar="SIZE", help="What the root may hold after.")
@click.option(
    "--root",
    "root",
    type=click.Path(path_type=Path, file_okay=False),
    metavar="DIR",
    help="The root to evict from (default: the cache).",
)
@click.option("--dry-run", is_flag=True, help="Only show what would go.")
@options(revision_option, cache_option, yes_option, verbose_option)
def evict(
    model: str,
    most: int,
    root: Path | None,
    dry_run: bool,
    revision: str | None,
    cache_dir: Path | None,
    yes: bool,
) -> None:
    """Remove MODEL's coldest experts from a root until it holds no more than SIZE.

    Never a pinned expert, the spine, or what another model has on record there too. Digests stay on record.

    Example: df-fetch evict demo --to 2MB --dry-run
    """
    from deltafin.cli.progress import human_nbytes
    from deltafin.store import default_cache, evict_objects, parse_root, plan_eviction

    if root is not None:
        root = parse_root(str(root)).path
    if root is not None and root.resolve() == (cache_dir or default_cache()).expanduser().resolve():
        root = None
    roots = () if root is None else (Path(f"{root},write"),)
    with opened_store(model, cache_dir=cache_dir, roots=roots, offline=True, revision=revision) as store:
        where = store.roots[0] if root is None else next(r for r in store.roots if r.path == root)
        doomed, held = plan_eviction(store, where, most)
        nbytes = sum(candidate.entry.nbytes for candidate in doomed)
        what = f"{len(doomed):,} experts, {human_nbytes(nbytes)}, of {human_nbytes(held)} in {where.path}"
        if dry_run:
            click.echo(f"would evict {what}")
            return
        if nbytes > ASK_ABOVE_NBYTES and not yes:
            ask(f"{model}: {what}, will be evicted")
        evict_objects(where, doomed)
        click.echo(f"evicted {what}")


def root_lines(status: Status) -> list[str]:
    """What df-fetch status says of the roots beside the cache, of budgets and of pins."""
    from deltafin.cli.progress import human_nbytes

    lines = []
    for number, root in enumerate(status.roots):
        held = f"{root.objects:,} objects, {human_nbytes(root.nbytes)}"
        if root.room is None:
            lines.append(f"  root     {held} in {root.path}, read only")
        elif number or root.budget is not None:
            most = "" if root.budget is None else f" of at most {human_nbytes(root.budget)}"
            lines.append(f"  root     {held}{most} in {root.path}, room for {human_nbytes(root.room)}")
    if status.pinned_experts:
        lines.append(f"  pinned   {status.pinned_experts:,} experts")
    return lines
