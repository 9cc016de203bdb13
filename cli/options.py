"""What several commands share: options, an open store, and asking before something large."""

from __future__ import annotations

import dataclasses
import functools
import json
import logging
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, TypeVar

import click

from deltafin.errors import BadRequest, DeltafinError, NoSpace

if TYPE_CHECKING:
    from deltafin.runtime import Model
    from deltafin.store import FetchPlan, Idle, Item, Store, Take

log = logging.getLogger(__name__)

# Fetching or removing more than this is announced first.
ASK_ABOVE_NBYTES = 1_000_000_000

Command = TypeVar("Command", bound=Callable[..., object])


def _verbosity(ctx: click.Context, _param: click.Parameter, count: int) -> int:
    from deltafin.cli.progress import StderrHandler

    logger = logging.getLogger("deltafin")
    logger.handlers[:] = [StderrHandler(ctx.find_root().info_name or "deltafin")]
    logger.propagate = False
    logger.setLevel([logging.WARNING, logging.INFO, logging.DEBUG][min(count, 2)])
    return count


cache_option = click.option(
    "--cache-dir",
    type=click.Path(path_type=Path, file_okay=False),
    metavar="DIR",
    help="Where catalogs and fetched bytes are kept (default: DELTAFIN_CACHE, else ~/.cache/deltafin).",
)
root_option = click.option(
    "--root",
    "roots",
    type=click.Path(path_type=Path, file_okay=False),
    multiple=True,
    metavar="DIR",
    help="Another directory with objects or original shards, only read; with options like "
    "DIR,write,budget=500GB,reserve=20GB objects are kept there too. Repeatable.",
)
revision_option = click.option("--revision", metavar="REV", help="Commit, tag or branch of a repository.")
offline_option = click.option("--offline", is_flag=True, help="Open no socket; what is missing is an error.")
mirror_option = click.option(
    "--mirror",
    "mirrors",
    multiple=True,
    metavar="URL",
    help="Where the shards lie too, below this address; asked before the hub, without a token. {repo} and {commit} "
    "are filled in. Repeatable, in order (default: DELTAFIN_MIRRORS, separated by spaces).",
)
yes_option = click.option("--yes", "-y", is_flag=True, help="Do not ask before large transfers or removals.")
json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON object for programs.")
verbose_option = click.option(
    "--verbose", "-v", count=True, callback=_verbosity, expose_value=False, is_eager=True, help="Say more on stderr."
)


class ByteSize(click.ParamType[int]):
    """500MB, 1.5TB, 20GiB or a plain number."""

    name = "size"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> int:
        if isinstance(value, int):
            return value
        from deltafin.store import parse_nbytes

        if (nbytes := parse_nbytes(str(value))) is None:
            self.fail(f"{value!r} is no size; write 500MB, 1.5TB or a number of bytes", param, ctx)
        return nbytes


ram_option = click.option(
    "--ram",
    type=ByteSize(),
    metavar="SIZE",
    help="Most memory to take, like 16GB (default: a safe share of what is available).",
)
threads_option = click.option(
    "--threads", type=click.IntRange(1, 1024), metavar="N", help="Threads that compute (default: all cores)."
)
spine_option = click.option(
    "--spine",
    type=click.Choice(["released", "bf16", "bf12", "int8"]),
    help="What to take the spine from: the released bytes, or packs that df-fetch spine --as has made. "
    "int8 is not as released (default: packs of bf12 or bf16 where there are any).",
)


def options(*options: Callable[[Command], Command]) -> Callable[[Command], Command]:
    def apply(command: Command) -> Command:
        for option in reversed(options):
            command = option(command)
        return command

    return apply


def gathered(name: str, kind: type) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Hands a command the options that are fields of a dataclass as one argument `name`."""

    def apply(command: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(command)
        def gathering(**values: object) -> None:
            some = {f.name: values.pop(f.name) for f in dataclasses.fields(kind)}
            command(**values, **{name: kind(**some)})

        return gathering

    return apply


def print_json(value: object) -> None:
    click.echo(json.dumps(value, ensure_ascii=False))


@contextmanager
def opened_store(
    model: str,
    *,
    cache_dir: Path | None,
    roots: Sequence[Path],
    offline: bool,
    revision: str | None,
    mirrors: Sequence[str] = (),
) -> Iterator[Store]:
    """A store for a command; Ctrl-C ends its transfers at once. Builds a missing catalog, with progress."""
    from deltafin.cli.progress import Progress
    from deltafin.store import open_store

    progress: Progress | None = None

    def indexed(done: int, total: int) -> None:
        nonlocal progress
        progress = progress or Progress(f"indexing {model}", total, "shards")
        progress.set(done)
        if done == total:
            progress.__exit__(None, None, None)

    with (
        open_store(
            model,
            cache_dir=cache_dir,
            roots=roots,
            offline=offline,
            revision=revision,
            progress=indexed,
            mirrors=mirrors,
        ) as store,
        interruptible(store),
    ):
        yield store


@contextmanager
def interruptible(store: Store) -> Iterator[None]:
    """While inside, Ctrl-C also ends transfers that other threads wait for."""

    def interrupt(_signal: int, _frame: FrameType | None) -> None:
        store.interrupt()
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def fetch_with_consent(
    store: Store,
    plan: FetchPlan,
    label: str,
    *,
    yes: bool,
    also_nbytes: int = 0,
    idle: Idle | None = None,
    take: Take | None = None,
) -> None:
    """Fetches a plan with progress; announces it first if it is large, and then needs a yes.

    `also_nbytes` is what the command may fetch later on, beyond the plan. `idle` leaves the line to a run. `take` as
    for `store.fetch`.
    """
    from deltafin import store as room
    from deltafin.cli.progress import Progress, human_nbytes, human_seconds

    free, where = store.keeper.room(), " and ".join(str(root.path) for root in store.roots if root.writable)
    if plan.nbytes > free:
        together = "have together" if sum(root.writable for root in store.roots) > 1 else "has"
        raise NoSpace(
            f"{label}: {human_nbytes(plan.nbytes)} are missing, but {where} {together} {human_nbytes(free)} "
            "free; free some space, add a --root that may be written, choose another --cache-dir, or take less"
        )
    items = list(plan.items)
    with Progress(label, plan.nbytes) as progress:

        def landed(item: Item) -> None:
            progress.add(item.span.nbytes)

        if plan.nbytes + also_nbytes > ASK_ABOVE_NBYTES and not yes:
            if items:
                # The small ones first: they tell the rate sooner, and are needed anyway.
                by_size = sorted(items, key=lambda i: i.span.nbytes)
                rate, measured = room.measure_rate(store, by_size, landed, idle=idle, take=take)
                items = [i for i in items if i not in measured]
                speed = f"at the {human_nbytes(rate)}/s just measured"
                duration = f"about {human_seconds((plan.nbytes + also_nbytes) / rate)} {speed}"
            else:
                duration = "at a rate not measured yet"
            more = f" and up to {human_nbytes(also_nbytes)} of experts as they are needed" if also_nbytes else ""
            ask(
                f"{label}: {human_nbytes(plan.nbytes)} to fetch{more}, {duration}; {human_nbytes(free)} free in {where}"
            )
        room.fetch(store, items, landed, idle=idle, take=take)


def fetch_ahead(engine: Model, rows: int | None, *, yes: bool) -> None:
    """Fetches the missing spine, after saying how much may follow; does nothing for a local model.

    What may follow are the experts of so many rows, or all (None). What is packed is here in another form.
    """
    from deltafin.store import expert_items, plan_fetch, spine_items

    store = engine.store
    if not store.may_fetch:
        return
    catalog, config = store.catalog, store.catalog.config
    plan = plan_fetch(store, [i for i in spine_items(catalog) if i.layer not in engine.packed_layers])
    also = 0
    if not yes:  # only an announcement needs to know; looking for every expert takes seconds on a slow disk
        most = None if rows is None else rows * config.top_k * len(config.moe_layers) * catalog.expert_nbytes
        experts = expert_items(catalog, config.moe_layers, range(config.num_experts))
        also = plan_fetch(store, experts, limit_nbytes=most).nbytes
    if plan.items or also:
        fetch_with_consent(store, plan, f"spine of {store.model}", yes=yes, also_nbytes=also)


def keep_heat(engine: Model) -> None:
    """Adds the experts that were used to the model's heat, also after a failure or Ctrl-C. Nothing depends on it."""
    store = engine.store
    if store.roots[0].presence.look():
        return  # the cache is gone, which was said; it must not be made anew in its place
    try:
        store.heat.add(store.stats.expert_reads, engine.times.passes)
    except DeltafinError as e:
        # Not a warning: a cache may be read-only on purpose.
        log.info("%s; the use of experts is not remembered", e)


def ask(announcement: str) -> None:
    if sys.stdin is None or not sys.stdin.isatty():  # None: closed, as some schedulers leave it
        raise BadRequest(f"{announcement}. Add --yes to go on")
    click.echo(announcement, err=True)
    if not click.confirm("Go on?", err=True):
        raise click.Abort
