"""df-run: continue a prompt with a model, or hold a conversation with it."""

from __future__ import annotations

import io
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from deltafin import __version__
from deltafin.cli.chat_options import ChatOptions, chat_options, refuse_chat_options
from deltafin.cli.choosing import ChoosingOptions, check_for, choose, choosing_options
from deltafin.cli.options import (
    cache_option,
    fetch_ahead,
    json_option,
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
from deltafin.cli.prompts import prompt_text
from deltafin.cli.run_settings import RunSettings, StateOptions, state_options
from deltafin.cli.run_text import TextJob
from deltafin.cli.subcommands import WithSubcommands
from deltafin.errors import BadRequest

if TYPE_CHECKING:
    from deltafin.cli.chat import ChatJob

MAX_NEW, CHAT_MAX_NEW = 128, 4096


@click.command(cls=WithSubcommands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="df-run")
@click.argument("model")
@click.argument("stdin", required=False, metavar="[-]")
@click.option("--prompt", metavar="TEXT", help="The text to continue, or the question of a chat.")
@click.option(
    "--prompt-file", type=click.Path(path_type=Path), metavar="F", help="Read the prompt from a file; - is stdin."
)
@click.option("--prompt-ids", metavar="IDS", help="The prompt as token ids, separated by spaces or commas.")
@click.option(
    "--max-new",
    type=click.IntRange(min=1),
    metavar="N",
    help=f"Most new tokens (default: {MAX_NEW}; of an answer in a chat {CHAT_MAX_NEW}).",
)
@choosing_options
@click.option("--chat", is_flag=True, help="Answer in the model's chat format; without a prompt, converse.")
@chat_options
@state_options
@click.option("--ids", "as_ids", is_flag=True, help="Print token ids in place of text.")
@click.option("--stats", is_flag=True, help="Print times and bytes by source to stderr at the end.")
@click.option(
    "--trace", type=click.Path(path_type=Path, dir_okay=False), metavar="FILE", help="Write router choices to FILE."
)
@click.option(
    "--device",
    default="cpu",
    show_default=True,
    metavar="NAME",
    help="What computes: cpu (native kernels), torch, or a torch device.",
)
@options(ram_option, threads_option, spine_option)
@options(
    json_option, revision_option, cache_option, root_option, mirror_option, offline_option, yes_option, verbose_option
)
def run(
    model: str,
    stdin: str | None,
    prompt: str | None,
    prompt_file: Path | None,
    prompt_ids: str | None,
    max_new: int | None,
    choosing: ChoosingOptions,
    chat: bool,
    talk: ChatOptions,
    states: StateOptions,
    as_ids: bool,
    stats: bool,
    trace: Path | None,
    device: str,
    ram: int | None,
    threads: int | None,
    spine: str | None,
    as_json: bool,
    revision: str | None,
    cache_dir: Path | None,
    roots: tuple[Path, ...],
    mirrors: tuple[str, ...],
    offline: bool,
    yes: bool,
) -> None:
    """Continue a prompt with MODEL until it ends its text or --max-new tokens are there; with --chat, answer it.

    What is missing of MODEL is indexed and fetched first: the spine at once, experts as the router asks
    for them. A last argument of - reads the prompt from stdin. `df-run batch` and `df-run score` do many at once.

    Example: df-run demo --prompt "The capital of France is"

    Example: df-run demo --chat --effort low --prompt "What is the capital of Japan?"
    """
    # torch's idle threads would spin. With the cores shared by another program that made a token of the
    # demo 10 times slower (1.1 s in place of 0.15 s); with the cores to itself it costs nothing.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(encoding="utf-8")  # a model writes what it likes, whatever the locale has letters for
    given = [prompt is not None, prompt_file is not None, prompt_ids is not None, stdin is not None]
    if sum(given) > 1 or not (any(given) or chat or states.load_state):
        raise BadRequest("give the prompt once: --prompt TEXT, --prompt-file F, --prompt-ids IDS or - for stdin")
    if as_json and as_ids:
        raise BadRequest("--ids has no effect with --json, which always has both")
    how = choose(choosing, as_json=as_json, traced=trace is not None)
    new = max_new or (CHAT_MAX_NEW if chat else MAX_NEW)
    settings = RunSettings(states, max_new=new, as_json=as_json, stats=stats, trace=trace)
    job: TextJob | ChatJob
    if chat:
        from deltafin.cli.chat import ChatJob

        job = ChatJob(settings, talk, prompt_text(stdin, prompt, prompt_file), prompt_ids=prompt_ids, as_ids=as_ids)
    else:
        refuse_chat_options(talk, states)
        job = TextJob(settings, prompt_text(stdin, prompt, prompt_file), prompt_ids, as_ids=as_ids)
    with opened_store(
        model, cache_dir=cache_dir, roots=roots, offline=offline, revision=revision, mirrors=mirrors
    ) as store:
        store.claim_line()
        from deltafin.runtime import Model, Want, load_tokenizer  # reading the options comes first: this imports much

        tokenizer = load_tokenizer(store)
        how = how.beside(store, device)
        rows = job.read(tokenizer)
        # More tokens than the model has positions are refused later, by what they are and not by what they would take.
        tokens = min(rows + new, store.catalog.config.max_positions)
        want = Want(rows=max(rows, 1 + how.depth), tokens=tokens, drafts=how.depth) if device == "cpu" else None
        with Model(
            store, device=device, ram=ram, threads=threads, want=want, spine=spine, tokenizer=tokenizer
        ) as engine:
            if not engine.as_released:
                click.echo(f"df-run: spine {engine.spine_label}", err=True)
            check_for(how, engine)
            if states.save_state is not None:
                from deltafin.runtime.states import check_place

                check_place(states.save_state, engine)
            fetch_ahead(engine, rows + new, yes=yes)
            try:
                job.run(engine, how)
            finally:
                keep_heat(engine)
