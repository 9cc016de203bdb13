"""df-run batch: answer a file of requests, many at once."""

from __future__ import annotations

import os
from contextlib import ExitStack, suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from deltafin.cli.lines import one_line
from deltafin.cli.options import (
    ByteSize,
    cache_option,
    fetch_ahead,
    json_option,
    keep_heat,
    mirror_option,
    offline_option,
    opened_store,
    options,
    print_json,
    ram_option,
    revision_option,
    root_option,
    spine_option,
    threads_option,
    verbose_option,
    yes_option,
)
from deltafin.errors import BadRequest

if TYPE_CHECKING:
    from deltafin.runtime import Model
    from deltafin.runtime.batch import Batch, Counts, Requests

_SHOWN = 100  # characters of a name that is not ours


@click.command("batch", context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("model")
@click.option(
    "--input", "-i", "source", required=True, type=click.Path(path_type=Path), metavar="F", help="The requests, JSONL."
)
@click.option(
    "--output",
    "-o",
    "target",
    required=True,
    type=click.Path(path_type=Path),
    metavar="F",
    help="The answers, appended as they finish; what is there already is not done again.",
)
@click.option(
    "--parallel",
    type=click.IntRange(min=1),
    metavar="N",
    help="Most answers at once (default: as many as memory holds).",
)
@click.option(
    "--max-new",
    type=click.IntRange(min=1),
    default=4096,
    show_default=True,
    metavar="N",
    help="Most new tokens of a request that does not say how many.",
)
@click.option(
    "--keep-states",
    type=ByteSize(),
    metavar="SIZE",
    help="Most disk for the states of instructions that requests share, so that a later run need not compute them "
    "(default: a tenth of what is free; 0: none).",
)
@click.option("--stats", is_flag=True, help="Print times and bytes by source to stderr at the end.")
@options(ram_option, threads_option, spine_option)
@options(
    json_option, revision_option, cache_option, root_option, mirror_option, offline_option, yes_option, verbose_option
)
def batch(
    model: str,
    source: Path,
    target: Path,
    parallel: int | None,
    max_new: int,
    keep_states: int | None,
    stats: bool,
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
    """Answer a file of requests with MODEL, as many at once as memory holds.

    Each line of the input is a request as OpenAI's batches have it, {"custom_id", "method": "POST", "url":
    "/v1/chat/completions" or "/v1/completions", "body"}; each line of the output is an answer. Interrupted or killed at
    any moment, the same command goes on where it was. An answer depends on its request alone.

    Example: df-run batch demo -i requests.jsonl -o answers.jsonl
    """
    _check_files(source, target)
    with ExitStack() as stack:
        store = stack.enter_context(
            opened_store(model, cache_dir=cache_dir, roots=roots, offline=offline, revision=revision, mirrors=mirrors)
        )
        store.claim_line()
        from deltafin.cli.progress import Progress
        from deltafin.runtime import load_tokenizer
        from deltafin.runtime.batch import (
            Batch,
            Counts,
            Journal,
            Requests,
            Results,
            StoredBeginnings,
            answer_refused,
            journal_path,
            open_model,
        )
        from deltafin.runtime.native import choose_packs
        from deltafin.runtime.openai import serving_of
        from deltafin.runtime.states import PrefixStore

        packs = choose_packs(store, spine)
        tokenizer = load_tokenizer(store)
        serving = serving_of(store, tokenizer, packs, max_new)
        results = stack.enter_context(Results(target))
        requests = stack.enter_context(Requests(source, serving))
        with Progress(f"checking {source}", requests.nbytes) as progress:
            requests.scan(results, progress.set)
        _say_what_was_found(requests, {model, serving.name}, serving.name)
        counts = Counts(len(requests), requests.answered, refused=answer_refused(requests, results))
        if not requests.open:
            with suppress(OSError):  # it may be left of a run that was killed at its very end
                os.unlink(journal_path(target))
            _finish(None, counts, serving.name, target, as_json=as_json, stats=stats)
            return
        engine, size = open_model(store, serving, requests, ram=ram, threads=threads, packs=packs, most=parallel)
        stack.enter_context(engine)
        if not engine.as_released:
            click.echo(f"df-run: spine {engine.spine_label}", err=True)
        fetch_ahead(engine, sum(requests.lengths), yes=yes)
        journal = stack.enter_context(Journal(journal_path(target), requests.is_open))
        stored = StoredBeginnings(engine, PrefixStore(keep_states))
        work = Batch(engine, serving, requests, results, journal, size, beginnings=stored, counts=counts)
        try:
            _run(work)
        finally:
            keep_heat(engine)
        _finish(engine, counts, serving.name, target, as_json=as_json, stats=stats)


def _check_files(source: Path, target: Path) -> None:
    from deltafin.runtime.batch import journal_path

    if str(source) == "-":
        raise BadRequest("the requests are read more than once, so they cannot come from stdin; give a file with -i")
    if str(target) == "-":
        raise BadRequest("answers on stdout could not be gone on with after an interruption; give a file with -o")
    if os.path.exists(source) and os.path.exists(target) and os.path.samefile(source, target):
        raise BadRequest(f"{target} is the input, too; choose another output")
    journal = journal_path(target)  # is written anew, and goes in the end
    if os.path.exists(source) and os.path.exists(journal) and os.path.samefile(source, journal):
        raise BadRequest(f"{source} has the name of the journal of {target}; choose another output, or rename it")


def _say_what_was_found(requests: Requests, own_names: set[str], name: str) -> None:
    """What a user may not expect, before hours go by."""
    if named := requests.named_models - own_names:
        asked = one_line(" and ".join(n if len(n) <= _SHOWN else f"{n[:_SHOWN]}.." for n in sorted(named)))
        click.echo(f"df-run: requests name the model {asked}; {one_line(name)} answers them", err=True)
    if requests.refused:
        first = requests.read(requests.refused[0])
        click.echo(
            f"df-run: {len(requests.refused):,} of {len(requests):,} requests get an error for an answer; the first is "
            f"line {first.line}: {one_line(str(requests.complaint(first)))}",
            err=True,
        )
    if requests.answered:
        click.echo(f"df-run: {requests.answered:,} of {len(requests):,} requests are answered already", err=True)


def _run(work: Batch) -> None:
    from deltafin.cli.batch_progress import BatchProgress

    progress = BatchProgress(work)
    try:
        work.run(progress, progress.update)
    finally:
        progress.clear()


def _finish(engine: Model | None, counts: Counts, name: str, target: Path, *, as_json: bool, stats: bool) -> None:
    """The summary; `engine` is None if nothing was left to do."""
    if as_json:
        print_json({"model": name, "output": str(target), **counts.as_json(), **_engine_json(engine)})
    else:
        click.echo(f"df-run: {_summary(counts, target)}", err=True)
    if stats and engine is not None:
        _print_stats(engine, counts)


def _summary(counts: Counts, target: Path) -> str:
    done = f"{counts.answers + counts.refused:,} answers"
    before = f", {counts.before:,} were there" if counts.before else ""
    errors = f", {counts.refused:,} of them errors" if counts.refused else ""
    rate = (
        f"; {counts.tokens:,} tokens in {counts.total_s:.1f} s, {counts.tokens_per_s:.3g} a second"
        if counts.tokens
        else ""
    )
    return one_line(f"{target}: {done}{errors}{before}{rate}")


def _engine_json(engine: Model | None) -> dict[str, object]:
    if engine is None:
        return {}
    return {
        "identity": engine.store.catalog.identity,
        "bytes": engine.store.stats.snapshot(),
        "requests_sent": engine.store.requests,
        "spine": engine.spine_label or "released",
        "as_released": engine.as_released,
        "memory": None if engine.memory is None else engine.memory.as_json(),
        "seconds": asdict(engine.times),
    }


def _print_stats(engine: Model, work: Counts) -> None:
    from deltafin.cli.run_stats import engine_lines

    lines = [
        f"batch     up to {work.together} at once; {work.shared:,} of {work.prompt_tokens:,} tokens of prompts shared, "
        f"{work.recovered:,} tokens from the journal",
        *engine_lines(engine),
    ]
    click.echo("\n".join(lines), err=True)
