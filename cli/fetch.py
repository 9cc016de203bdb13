"""df-fetch: bring a model's bytes to this machine, look at them, remove them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from deltafin import __version__
from deltafin.cli.manifest import manifest
from deltafin.cli.options import (
    ASK_ABOVE_NBYTES,
    ByteSize,
    ask,
    cache_option,
    fetch_with_consent,
    json_option,
    mirror_option,
    offline_option,
    opened_store,
    options,
    print_json,
    revision_option,
    root_option,
    verbose_option,
    yes_option,
)
from deltafin.cli.place import evict, pin, place, root_lines, unpin
from deltafin.cli.verify import last_verify_line, verify
from deltafin.errors import BadRequest, NoSpace

if TYPE_CHECKING:
    from deltafin.indexer import Catalog
    from deltafin.store import FetchPlan, Item, PackFormat, Store


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="df-fetch")
def fetch() -> None:
    """Bring a model's bytes to this machine, look at them, remove them.

    Whatever was fetched stays usable when a command is interrupted; run it again to go on.

    Example: df-fetch status demo
    """


fetch.add_command(manifest)
fetch.add_command(verify)

_fetching = options(
    revision_option, cache_option, root_option, mirror_option, offline_option, yes_option, verbose_option
)
_looking = options(json_option, revision_option, cache_option, root_option, verbose_option)
_layers = click.option("--layers", metavar="LIST", help="Layers like 1-5,9 (default: all with experts).")
_WAITING = "df-fetch: a run is using the line; going on whenever it leaves it free"
_experts = click.option("--experts", metavar="LIST", help="Expert numbers like 0-15 (default: all).")


@fetch.command("warm")
@click.argument("model")
@_layers
@_experts
@click.option(
    "--trace", type=click.Path(path_type=Path, dir_okay=False), help="Most used experts of a df-run trace first."
)
@click.option("--bytes", "limit", type=ByteSize(), metavar="SIZE", help="Stop before more than this is fetched.")
@_fetching
def fetch_warm(
    model: str,
    layers: str | None,
    experts: str | None,
    trace: Path | None,
    limit: int | None,
    revision: str | None,
    cache_dir: Path | None,
    roots: tuple[Path, ...],
    mirrors: tuple[str, ...],
    offline: bool,
    yes: bool,
) -> None:
    """Fetch experts by layer and number, or those that a trace used.

    Example: df-fetch warm demo --layers 1-5 --experts 0-7
    """
    from deltafin.store import plan_fetch

    with opened_store(
        model, cache_dir=cache_dir, roots=roots, offline=offline, revision=revision, mirrors=mirrors
    ) as store:
        items = _wanted_experts(store.catalog, layers, experts, trace)
        plan = plan_fetch(store, items, limit)
        fetch_with_consent(store, plan, f"experts of {model}", yes=yes)
        _report(plan)


def _wanted_experts(catalog: Catalog, layers: str | None, experts: str | None, trace: Path | None) -> list[Item]:
    """The experts that the options select; with a trace only the used ones, the most used first."""
    from deltafin.store import expert_items, pair_items, parse_numbers

    config = catalog.config
    wanted_layers, wanted_experts = list(config.moe_layers), list(range(config.num_experts))
    if layers is not None:
        wanted_layers = parse_numbers(layers, config.moe_layers, "--layers")
    if experts is not None:
        wanted_experts = parse_numbers(experts, range(config.num_experts), "--experts")
    if trace is None:
        return expert_items(catalog, wanted_layers, wanted_experts)
    from deltafin.runtime import expert_uses

    uses = expert_uses(trace, config)
    in_layers, in_experts = set(wanted_layers), set(wanted_experts)
    ranked = sorted(uses, key=lambda pair: (-uses[pair], pair))
    return list(pair_items(catalog, [(la, e) for la, e in ranked if la in in_layers and e in in_experts]))


def _report(plan: FetchPlan) -> None:
    from deltafin.cli.progress import human_nbytes

    click.echo(
        f"fetched {len(plan.items)} spans, {human_nbytes(plan.nbytes)}; "
        f"{plan.present} spans, {human_nbytes(plan.present_nbytes)} were here already"
    )


@fetch.command("spine")
@click.argument("model")
@click.option(
    "--as",
    "pack_format",
    type=click.Choice(["bf16", "bf12", "int8"]),
    help="Write the layers as packs instead: bf16 as it is, bf12 without loss in 3/4 of the bytes, "
    "int8 rounded to half of them (not as released).",
)
@click.option("--layers", metavar="LIST", help="Only layers like 0-5,9 (default: all, and the tables beside them).")
@_fetching
def fetch_spine(
    model: str,
    pack_format: str | None,
    layers: str | None,
    revision: str | None,
    cache_dir: Path | None,
    roots: tuple[Path, ...],
    mirrors: tuple[str, ...],
    offline: bool,
    yes: bool,
) -> None:
    """Fetch everything that is no routed expert: what every token needs.

    With --as, each layer goes into a pack, one file that is read from front to back, straight from where it is: what
    comes over the network is not kept twice. Vocabulary tables and final norms are fetched as they are.

    Example: df-fetch spine demo --as bf12
    """
    from deltafin.store import PackFormat, parse_numbers, plan_fetch, spine_items

    with opened_store(
        model, cache_dir=cache_dir, roots=roots, offline=offline, revision=revision, mirrors=mirrors
    ) as store:
        every = range(store.catalog.config.num_layers)
        chosen = list(every) if layers is None else parse_numbers(layers, every, "--layers")
        items = spine_items(store.catalog)
        in_layers = [item for item in items if item.layer in chosen]
        beside = [item for item in items if item.layer not in every] if layers is None else []
        if pack_format is not None:
            _pack_spine(store, PackFormat(pack_format), chosen, plan_fetch(store, beside), yes=yes)
            return
        plan = plan_fetch(store, in_layers + beside)
        fetch_with_consent(store, plan, f"spine of {model}", yes=yes)
        _report(plan)


def _pack_spine(store: Store, format: PackFormat, layers: list[int], beside: FetchPlan, *, yes: bool) -> None:
    """Packs layers, and fetches what lies beside them and is never packed; one question for both."""
    from deltafin.cli.progress import Progress, human_nbytes
    from deltafin.store import free_nbytes, plan_packs, write_packs

    plan = plan_packs(store, format, layers)
    label, cache = f"spine of {store.model} as {format.label}", store.roots[0].path
    written = plan.pack_nbytes + beside.nbytes
    free = free_nbytes(cache) if (space := store.roots[0].space) is None else space.room()
    if written > free:
        raise NoSpace(
            f"{label}: about {human_nbytes(written)} are to be written, but {cache} has {human_nbytes(free)} free; "
            "free some space, choose another --cache-dir, or take fewer --layers"
        )
    if max(written, plan.fetch_nbytes) > ASK_ABOVE_NBYTES and not yes:
        ask(
            f"{label}: {human_nbytes(plan.fetch_nbytes + beside.nbytes)} to fetch, about {human_nbytes(written)} to "
            f"write; {human_nbytes(free)} free in {cache}"
        )
    if beside.items:
        fetch_with_consent(store, beside, f"tables of {store.model}", yes=True)
        _report(beside)
    with Progress(label, plan.source_nbytes) as progress:
        done = write_packs(store, plan, progress.add)
    ratio = f" ({done.pack_nbytes / done.source_nbytes:.3f})" if done.source_nbytes else ""
    click.echo(
        f"packed {done.layers} layers as {format.label}: {human_nbytes(done.source_nbytes)} became "
        f"{human_nbytes(done.pack_nbytes)}{ratio}; {plan.present} layers were here already"
    )


@fetch.command("all")
@click.argument("model")
@click.option("--idle", is_flag=True, help="Use only what a run leaves free: wait while one fetches, and go last.")
@_fetching
def fetch_all(
    model: str,
    idle: bool,
    revision: str | None,
    cache_dir: Path | None,
    roots: tuple[Path, ...],
    mirrors: tuple[str, ...],
    offline: bool,
    yes: bool,
) -> None:
    """Fetch the whole text model, shard by shard in file order, and prove it.

    What the shards hold besides (headers, vision parts) is fetched too where their SHA-256 is published: each shard
    is compared with it as it comes, and from then on every span of it is proven.

    With --idle it may run beside df-run all the time: no span is begun while a run on the same cache fetches, two are
    fetched at once, and every other program on the machine goes first.

    Example: df-fetch all demo
    """
    from deltafin.cli.progress import Progress
    from deltafin.store import Idle, Prover, all_items, lower_priority, plan_fetch, rest_items, settle_all

    if idle:
        lower_priority()
    with opened_store(
        model, cache_dir=cache_dir, roots=roots, offline=offline, revision=revision, mirrors=mirrors
    ) as store:
        if idle and store.catalog.location.path is not None:
            raise BadRequest(f"--idle has no effect for {model}: its shards are on this machine")
        items = [*all_items(store.catalog), *rest_items(store.catalog)]
        plan = plan_fetch(store, sorted(items, key=lambda item: (item.span.shard, item.span.offset)))
        behind = Idle(store.roots[0].path, lambda: click.echo(_WAITING, err=True)) if idle else None
        with Prover(store, (item.span for item in plan.items)) as prover:
            fetch_with_consent(store, plan, model, yes=yes, idle=behind, take=prover.take)
            with Progress("comparing with the published SHA-256", prover.left_nbytes) as progress:
                verdicts = prover.finish(progress.add)
        settle_all(store, verdicts)
        _report(plan)
        unpublished = sum(shard.sha256 is None for shard in store.catalog.shards)
        if plan.items and unpublished:
            click.echo(
                f"df-fetch: the source publishes no SHA-256 of {unpublished} shards: what was fetched of them stays "
                "unproven until a manifest confirms it",
                err=True,
            )


@fetch.command("status")
@click.argument("model")
@_looking
def fetch_status(
    model: str, as_json: bool, revision: str | None, cache_dir: Path | None, roots: tuple[Path, ...]
) -> None:
    """Show how much of MODEL is on this machine. Asks no server.

    Example: df-fetch status demo --json
    """
    from deltafin.cli.progress import human_nbytes
    from deltafin.store import read_status

    with opened_store(model, cache_dir=cache_dir, roots=roots, offline=True, revision=revision) as store:
        s = read_status(store)
    if as_json:
        print_json(s.as_json())
        return
    expert_total, expert_here = s.experts * s.expert_nbytes, s.experts_present * s.expert_nbytes
    click.echo(f"{s.model} ({s.identity})")
    click.echo(f"  spine    {human_nbytes(s.spine_present_nbytes)} of {human_nbytes(s.spine_nbytes)}")
    click.echo(
        f"  experts  {s.experts_present:,} of {s.experts:,} "
        f"({human_nbytes(expert_here)} of {human_nbytes(expert_total)})"
    )
    click.echo(f"  layers   {s.layers_whole} of {s.layers} whole")
    click.echo(f"  cache    {s.cache_objects:,} objects, {human_nbytes(s.cache_nbytes)} in {s.cache_dir}")
    click.echo(f"  free     {human_nbytes(s.free_nbytes)}")
    click.echo(
        f"  proven   {s.proven_spans:,} spans, {human_nbytes(s.proven_nbytes)}; "
        f"unproven {s.unproven_spans:,}, {human_nbytes(s.unproven_nbytes)}"
    )
    for line in root_lines(s):
        click.echo(line)
    for directory in s.shard_directories:
        click.echo(f"  shards   in place in {directory}")
    for packs in s.packs:
        note = "" if packs.as_released else " (not as released)"
        click.echo(
            f"  packs    {packs.format}{note}: {packs.layers} of {s.layers} layers, {human_nbytes(packs.nbytes)}"
        )
    if s.states:
        click.echo(f"  states   {s.states:,} kept, {human_nbytes(s.states_nbytes)}")
    click.echo(f"  verified {last_verify_line(s.last_verify)}")


@fetch.command("rm")
@click.argument("model")
@_layers
@_experts
@click.option("--spine", is_flag=True, help="The spine too; alone, only the spine.")
@click.option("--packs", "pack_format", type=click.Choice(["bf16", "bf12", "int8"]), help="Only the packs so encoded.")
@click.option(
    "--states", is_flag=True, help="Only saved states: what conversations go on from without computing again."
)
@click.option("--all", "everything", is_flag=True, help="Everything of MODEL.")
@options(revision_option, cache_option, yes_option, verbose_option)
def fetch_rm(
    model: str,
    layers: str | None,
    experts: str | None,
    spine: bool,
    pack_format: str | None,
    states: bool,
    everything: bool,
    revision: str | None,
    cache_dir: Path | None,
    yes: bool,
) -> None:
    """Remove fetched objects, packs and saved states of MODEL from the cache. Original shards are never touched.

    Example: df-fetch rm demo --layers 3 --experts 0-7
    """
    from deltafin.cli.progress import human_nbytes
    from deltafin.store import (
        PackFormat,
        all_items,
        model_states,
        removable,
        removable_packs,
        remove,
        remove_packs,
        remove_states,
        rest_items,
        spine_items,
    )

    chosen = layers is not None or experts is not None
    if not (chosen or spine or everything or pack_format or states):
        raise BadRequest("say what to remove: --layers, --experts, --spine, --packs, --states or --all")
    if everything and (chosen or spine or pack_format or states):
        raise BadRequest("--all leaves nothing to choose: give it alone")
    if pack_format and (chosen or spine or states):
        raise BadRequest("--packs removes all packs of one format: give it alone")
    if states and (chosen or spine):
        raise BadRequest("--states removes all saved states: give it alone")
    with opened_store(model, cache_dir=cache_dir, roots=(), offline=True, revision=revision) as store:
        catalog = store.catalog
        if everything:
            items = all_items(catalog) + rest_items(catalog)
        else:
            items = spine_items(catalog) if spine else []
            if chosen:
                items += _wanted_experts(catalog, layers, experts, None)
        formats = list(PackFormat) if everything else [PackFormat(pack_format)] if pack_format else []
        doomed = removable(store, items)
        packs = [pack for format in formats for pack in removable_packs(store, format)]
        kept = model_states(store) if states or everything else []
        nbytes, packs_nbytes = sum(entry.nbytes for _, entry in doomed), sum(nbytes for _, nbytes in packs)
        states_nbytes = sum(file.nbytes for file in kept)
        parts = [f"{len(doomed)} objects, {human_nbytes(nbytes)}"] if items else []
        if packs or pack_format:
            parts.append(f"{len(packs)} packs, {human_nbytes(packs_nbytes)}")
        if kept or states:
            parts.append(f"{len(kept)} states, {human_nbytes(states_nbytes)}")
        if nbytes + packs_nbytes + states_nbytes > ASK_ABOVE_NBYTES and not yes:
            ask(f"{model}: {', '.join(parts)}, will be removed")
        remove(store, items)
        for format in formats:
            remove_packs(store, format)
        if states or everything:
            remove_states(store)
        click.echo(f"removed {', '.join(parts)}")


for command in (place, pin, unpin, evict):
    fetch.add_command(command)
