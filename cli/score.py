"""df-run score: log-probabilities and perplexity of given texts."""

from __future__ import annotations

import time
from array import array
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from deltafin.cli.options import (
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
    from deltafin.runtime.scorefiles import Line, ResultKeys, Sink, Totals


@click.command("score", context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("model")
@click.option(
    "-i",
    "--input",
    "lines_file",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help='Texts as JSON lines: {"text"}, {"prompt", "continuation"}, {"ids"} or {"prompt_ids", "ids"}, each with an '
    '"id" if you like; - is stdin.',
)
@click.option("--text", "text_file", type=click.Path(path_type=Path), metavar="FILE", help="One text; - is stdin.")
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Where the results go, pass by pass; the same command goes on after what is there (default: stdout).",
)
@click.option("--tokens", is_flag=True, help="Each scored token's id and log-probability, too.")
@click.option(
    "--rows", type=click.IntRange(1), metavar="N", help="Most rows of a pass (default: as many as fit into memory)."
)
@options(ram_option, threads_option, spine_option)
@options(
    json_option, revision_option, cache_option, root_option, mirror_option, offline_option, yes_option, verbose_option
)
def score(
    model: str,
    lines_file: Path | None,
    text_file: Path | None,
    output: Path | None,
    tokens: bool,
    rows: int | None,
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
    """Say how likely texts are to MODEL: a JSON line of each, in the order of the input.

    One pass over the weights serves as many texts as fit into memory. A continuation is scored after its prompt, of a
    text everything but the first token. All texts are checked before anything is computed. A summary goes to stderr,
    or with --json and -o as one object to stdout.

    Example: df-run score demo --text notes.txt --tokens
    """
    if (lines_file is None) == (text_file is None):
        raise BadRequest("give the texts once: -i FILE of JSON lines, or --text FILE with one text")
    if as_json and output is None:
        raise BadRequest("--json prints the summary where the results go; give these a file with -o")
    with ExitStack() as stack:
        store = stack.enter_context(
            opened_store(model, cache_dir=cache_dir, roots=roots, offline=offline, revision=revision, mirrors=mirrors)
        )
        store.claim_line()
        from deltafin.cli.progress import Progress
        from deltafin.runtime import Model, Want, load_tokenizer
        from deltafin.runtime.scorefiles import Input, Output, Printed, ResultKeys, Totals

        texts = Input(lines_file or text_file or Path(), whole=text_file is not None)
        tokenizer, config = load_tokenizer(store), store.catalog.config
        with Progress(f"checking {texts.name}", texts.nbytes) as progress:
            counts = array("q", (line.text.rows for line in texts.lines(tokenizer, config, progress.add)))
        if not counts:
            raise BadRequest(f"{texts.name}: no texts")
        want = Want(rows=min(sum(counts), rows or sum(counts)), tokens=max(counts) + 1, scoring=True)
        engine = stack.enter_context(
            Model(store, ram=ram, threads=threads, want=want, spine=spine, tokenizer=tokenizer)
        )
        if not engine.as_released:
            click.echo(f"df-run: spine {engine.spine_label}", err=True)
        lines, keys, totals = texts.lines(tokenizer, config), ResultKeys(engine), Totals()
        sink: Sink = Printed()
        if output is not None:
            sink = file = stack.enter_context(Output(output))
            file.resume(lines, keys, totals, tokens=tokens)
        before = totals.texts
        if left := counts[before:]:
            fetch_ahead(engine, sum(left), yes=yes)
        started = time.monotonic()
        try:
            _score(engine, lines, left, keys, totals, sink, tokens=tokens)
        finally:
            keep_heat(engine)
        total_s = time.monotonic() - started
        if as_json:
            print_json(_as_json(engine, totals, before, total_s))
            return
        _print_summary(engine, totals, before, output, total_s)


def _score(
    engine: Model,
    lines: Iterator[Line],
    left: array[int],
    keys: ResultKeys,
    totals: Totals,
    sink: Sink,
    *,
    tokens: bool,
) -> None:
    """Scores the rest of the lines, of which `left` are the rows."""
    from deltafin.cli.progress import Progress
    from deltafin.runtime.observer import LayerProgress
    from deltafin.runtime.score import groups, pass_count, rows_a_pass, score
    from deltafin.runtime.scorefiles import result

    most_rows = rows_a_pass(engine)
    passes = pass_count(left, most_rows)
    label = f"scoring {len(left)} text{'s' * (len(left) != 1)} in {passes} pass{'es' * (passes != 1)}"
    with Progress(label, passes * engine.config.num_layers, "layers") as progress:
        watch = LayerProgress(progress.set)
        for group in groups(lines, lambda line: line.text.rows, most_rows):
            scores = score(engine, [line.text for line in group], watch)
            sink.write([result(n, keys.of(n.text), s, tokens=tokens) for n, s in zip(group, scores, strict=True)])
            for found in scores:
                totals.add(len(found.log_probs), found.total, found.greedy)


def _as_json(engine: Model, totals: Totals, before: int, total_s: float) -> dict[str, object]:
    return {
        "model": engine.store.model,
        "identity": engine.store.catalog.identity,
        "texts": totals.texts,
        "texts_before": before,
        "tokens": totals.tokens,
        "logprob": totals.log_prob,
        "perplexity": totals.perplexity,
        "greedy": totals.greedy,
        "passes": engine.times.passes,
        "rows": engine.times.rows,
        "total_s": round(total_s, 6),
        "bytes": engine.store.stats.snapshot(),
        "requests": engine.store.requests,
        "spine": engine.spine_label or "released",
        "as_released": engine.as_released,
        "memory": None if engine.memory is None else engine.memory.as_json(),
        "seconds": asdict(engine.times),
    }


def _print_summary(engine: Model, totals: Totals, before: int, output: Path | None, total_s: float) -> None:
    from deltafin.cli.run_stats import engine_lines

    times = engine.times
    found = f", {before} of them were in {output}" if before else ""
    perplexity = "none" if totals.perplexity is None else f"{totals.perplexity:.4g}"
    lines = [
        f"texts     {totals.texts}{found}; {totals.greedy} as greedy generation would have them",
        f"tokens    {totals.tokens:,} scored, log-probability {totals.log_prob:,.3f}, perplexity {perplexity}",
        f"time      {total_s:.2f} s, {times.rows / total_s if total_s else 0:.1f} rows a second",
        *engine_lines(engine),
    ]
    click.echo("\n".join(lines), err=True)
