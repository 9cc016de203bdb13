"""df-serve: answer requests of OpenAI's API with a model."""

from __future__ import annotations

import logging
import os
import resource
import signal
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from deltafin import __version__
from deltafin.cli.lines import one_line
from deltafin.cli.options import (
    ByteSize,
    cache_option,
    fetch_ahead,
    gathered,
    keep_heat,
    mirror_option,
    offline_option,
    opened_store,
    options,
    ram_option,
    revision_option,
    root_option,
    spine_option,
    threads_option,
    verbose_option,
    yes_option,
)
from deltafin.cli.progress import human_nbytes
from deltafin.cli.serve_settings import AccessOptions, access_options, name_of, settings_of
from deltafin.errors import BadRequest, DeltafinError, Missing

if TYPE_CHECKING:
    from deltafin.runtime import Model
    from deltafin.runtime.openai import Serving
    from deltafin.runtime.server import ServerSize
    from deltafin.runtime.server.addresses import Listeners
    from deltafin.runtime.server.missing import MissingExperts
    from deltafin.runtime.server.settings import Settings
    from deltafin.store import Store

MAX_NEW = 4096
_RESERVED_FILES = 24  # for transfers, batches, files of clients; the rest is for connections
_LEAST_CONNECTIONS = 8
_BACKLOG = 128  # connections that wait to be taken


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """How a model is opened for a server, as it was given."""

    name: str | None
    parallel: int | None
    context: int | None
    queue: int
    max_new: int
    keep_states: int | None
    data: Path | None
    draft: str | None
    allow_missing: bool
    ram: int | None
    threads: int | None
    spine: str | None


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="df-serve")
@click.argument("model")
@access_options
@click.option("--name", metavar="NAME", help="What requests call the model (default: the name of its catalog).")
@click.option(
    "--parallel",
    type=click.IntRange(min=1),
    metavar="N",
    help="Most answers at once (default: 8, or as many as memory holds).",
)
@click.option(
    "--context",
    type=click.IntRange(min=1),
    metavar="N",
    help="Most tokens of a prompt with its answer (default: as many as memory holds).",
)
@click.option(
    "--queue",
    type=click.IntRange(min=1),
    default=64,
    show_default=True,
    metavar="N",
    help="Most requests that wait; more are refused with 429.",
)
@click.option(
    "--max-new",
    type=click.IntRange(min=1),
    default=MAX_NEW,
    show_default=True,
    metavar="N",
    help="Most new tokens of a request that does not say how many.",
)
@click.option(
    "--keep-states",
    type=ByteSize(),
    metavar="SIZE",
    help="Most disk for states of prompts and chats, so that what begins alike is not computed again "
    "(default: a tenth of what is free; 0: none).",
)
@click.option(
    "--data",
    type=click.Path(path_type=Path, file_okay=False),
    metavar="DIR",
    help="Where uploaded files and batches are kept (default: a folder of the cache for each model).",
)
@click.option(
    "--draft",
    type=click.Choice(["ngram", "none"]),
    help="Guess tokens from what was said before while an answer is alone. It changes no token (default: ngram, but "
    "none where an expert is missing).",
)
@click.option(
    "--allow-missing", is_flag=True, help="With --offline: serve although experts are missing; some answers will fail."
)
@options(ram_option, threads_option, spine_option)
@options(revision_option, cache_option, root_option, mirror_option, offline_option, yes_option, verbose_option)
@gathered("engine", EngineOptions)
def serve(
    model: str,
    access: AccessOptions,
    engine: EngineOptions,
    revision: str | None,
    cache_dir: Path | None,
    roots: tuple[Path, ...],
    mirrors: tuple[str, ...],
    offline: bool,
    yes: bool,
) -> None:
    """Answer requests of OpenAI's API with MODEL, many at once, for as long as it takes.

    Clients find it at http://127.0.0.1:8000/v1. What is missing of MODEL is indexed and fetched first: the spine at
    once, experts as answers need them. Ctrl-C and SIGTERM end it at the next layer; files, batches and states are
    kept, and the same command goes on.

    Example: df-serve demo --port 8000
    """
    from deltafin.runtime.server.addresses import Listeners, addresses_of

    addresses = addresses_of(access.host)
    settings = settings_of(access, addresses)
    name_of(engine.name, model)
    with ExitStack() as stack:
        listeners = stack.enter_context(Listeners(access.host, addresses, access.port))
        store = stack.enter_context(
            opened_store(model, cache_dir=cache_dir, roots=roots, offline=offline, revision=revision, mirrors=mirrors)
        )
        store.claim_line()
        if engine.allow_missing and store.may_fetch:
            raise BadRequest("--allow-missing has no effect without --offline: what is missing is fetched")
        got = _serve(stack, store, engine, replace(settings, port=listeners.port), listeners, yes=yes)
    if got == signal.SIGINT:
        raise KeyboardInterrupt
    click.echo("df-serve: stopped", err=True)


def _serve(
    stack: ExitStack, store: Store, given: EngineOptions, settings: Settings, listeners: Listeners, *, yes: bool
) -> int:
    """Opens everything, in the order in which things may be refused, and serves until a signal, which it returns."""
    from deltafin.runtime import load_tokenizer
    from deltafin.runtime.native import choose_packs
    from deltafin.runtime.openai import serving_of
    from deltafin.runtime.server import Engine, Starts, open_model
    from deltafin.runtime.server.app import create_app
    from deltafin.runtime.server.batches import BatchService
    from deltafin.runtime.server.missing import MissingExperts
    from deltafin.runtime.server.running import serve
    from deltafin.runtime.server.services import Services
    from deltafin.runtime.states import PrefixStore

    packs = choose_packs(store, given.spine)
    serving = serving_of(store, load_tokenizer(store), packs, given.max_new)
    names = {serving.name, store.model}
    serving = replace(serving, name=name_of(given.name, serving.name))
    missing = MissingExperts(store)
    model, size, serving = open_model(
        store,
        serving,
        ram=given.ram,
        threads=given.threads,
        packs=packs,
        parallel=given.parallel,
        context=given.context,
    )
    stack.enter_context(model)
    stack.callback(missing.close)
    if not store.may_fetch:
        _refuse_missing(model, missing, allowed=given.allow_missing)
    # Reads of the drives, and of each prompt a state that is being written.
    most = most_connections(sum(drive.depth for drive in store.drives) + size.sequences)
    states = PrefixStore(given.keep_states)
    drafts = given.draft == "ngram" or (given.draft is None and not missing.count)
    engine = Engine(model, serving, size, starts=Starts(model, states), most_waiting=given.queue, drafting=drafts)
    folder = given.data or store.roots[0].path / "server" / store.catalog.name
    aliases = frozenset(names - {serving.name})
    batches = BatchService(folder, engine, serving, settings, states=states, aliases=aliases)
    stack.callback(batches.close)
    fetch_ahead(model, None, yes=yes)
    stack.callback(keep_heat, model)
    stack.callback(engine.close)
    engine.start(batches)
    services = Services(engine, serving, settings, missing, batches, aliases)
    listeners.listen(_BACKLOG)
    _say_what_is_served(listeners, serving, model, size, folder, missing, settings)
    _log_requests()
    return serve(
        create_app(services),
        services,
        listeners,
        most_connections=most,
        stopping=lambda: click.echo("df-serve: stopping; Ctrl-C again ends it at once", err=True),
    )


def _refuse_missing(model: Model, missing: MissingExperts, *, allowed: bool) -> None:
    """Offline, what is not here never comes."""
    from deltafin.store import plan_fetch, spine_items

    store = model.store
    spine = plan_fetch(store, [i for i in spine_items(store.catalog) if i.layer not in model.packed_layers])
    moved = store.catalog.location.path  # a directory of shards, which nothing can be fetched for
    if spine.items:
        what = f"{human_nbytes(spine.nbytes)} of the spine"
        raise Missing(_not_here(what, f"df-fetch spine {store.model}", moved, ""))
    if missing.count and not allowed:
        what = f"{missing.count:,} of {missing.total:,} experts ({human_nbytes(missing.nbytes)})"
        raise Missing(
            _not_here(what, f"df-fetch all {store.model}", moved, "; or serve what is here, with --allow-missing")
        )


def _not_here(what: str, command: str, moved: str | None, otherwise: str) -> str:
    if moved is not None:
        return f"{what} are not at {moved}; was the directory moved? rebuild with df-index build{otherwise}"
    return f"{what} are not on this machine; without --offline run: {command}{otherwise}"


def most_connections(engines: int) -> int:
    """As many as there may be open files besides so many of the engine's. Raises DeltafinError."""
    from deltafin.runtime.server.listening import MOST_CONNECTIONS

    allowed, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if allowed == resource.RLIM_INFINITY:
        return MOST_CONNECTIONS
    taken = len(os.listdir("/dev/fd")) + _RESERVED_FILES + engines
    if allowed < taken + _LEAST_CONNECTIONS:
        need = taken + _LEAST_CONNECTIONS
        raise DeltafinError(f"open files: {need} are needed, {allowed} allowed; run ulimit -n {need} first")
    return min(MOST_CONNECTIONS, allowed - taken)


def _say_what_is_served(
    listeners: Listeners,
    serving: Serving,
    model: Model,
    size: ServerSize,
    folder: Path,
    missing: MissingExperts,
    settings: Settings,
) -> None:
    """What whoever starts it should know, one thing a line."""
    one = f", {size.most_tokens:,} in one"
    if size.most_tokens > size.tokens:  # more than is planned for all
        one = f"; one that is alone may have {size.most_tokens:,}"
    lines = [
        f"serving {serving.name} on {' and '.join(listeners.urls)}",
        "" if model.as_released else f"spine {model.spine_label}",
        f"up to {size.sequences} answers at once, {size.tokens:,} tokens in all{one}",
        f"files and batches are kept in {folder}",
        missing.describe(),
        "requests need the key" if settings.api_key is not None else "no key is asked for",
    ]
    click.echo("\n".join(f"df-serve: {one_line(line)}" for line in lines if line), err=True)


def _log_requests() -> None:
    """Requests are logged unasked, with the time; and what the libraries below have to say, from warnings on."""
    ours = logging.getLogger("deltafin")
    logging.getLogger("deltafin.server").setLevel(min(logging.INFO, ours.level))
    for handler in ours.handlers:
        handler.setFormatter(logging.Formatter("%(asctime)s %(message)s"))
        for name in ("uvicorn.error", "asyncio"):
            logger = logging.getLogger(name)
            logger.handlers[:], logger.propagate = [handler], False
            logger.setLevel(logging.WARNING)
    # It has nothing to say but what is wrong with an upload, which its client is told.
    logging.getLogger("python_multipart").setLevel(logging.ERROR)
