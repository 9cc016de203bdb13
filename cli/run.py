"""df-run: continue a prompt with a model."""

from __future__ import annotations

import io
import logging
import os
import re
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import click

from deltafin import __version__
from deltafin.cli.options import (
    cache_option,
    fetch_with_consent,
    json_option,
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
from deltafin.errors import BadRequest, DeltafinError, NotFound

if TYPE_CHECKING:
    from deltafin.runtime import Model, RunTimes, Tokenizer
    from deltafin.runtime.planner import Outcome as PlanOutcome

log = logging.getLogger(__name__)


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="df-run")
@click.argument("model")
@click.argument("stdin", required=False, metavar="[-]")
@click.option("--prompt", metavar="TEXT", help="The text to continue.")
@click.option(
    "--prompt-file", type=click.Path(path_type=Path), metavar="F", help="Read the prompt from a file; - is stdin."
)
@click.option("--prompt-ids", metavar="IDS", help="The prompt as token ids, separated by spaces or commas.")
@click.option(
    "--max-new", type=click.IntRange(min=1), default=128, show_default=True, metavar="N", help="Most new tokens."
)
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
    max_new: int,
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
    """Continue a prompt with MODEL, greedily, until it ends its text or --max-new tokens are there.

    What is missing of MODEL is indexed and fetched first: the spine at once, experts as the router asks
    for them. A last argument of - reads the prompt from stdin.

    Example: df-run demo --prompt "The capital of France is"
    """
    # torch's idle threads would spin. With the cores shared by another program that made a token of the
    # demo 10 times slower (1.1 s in place of 0.15 s); with the cores to itself it costs nothing.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(encoding="utf-8")  # a model writes what it likes, whatever the locale has letters for
    text = _prompt_text(stdin, prompt, prompt_file, prompt_ids)
    if as_json and as_ids:
        raise BadRequest("--ids has no effect with --json, which always has both")
    with opened_store(
        model, cache_dir=cache_dir, roots=roots, offline=offline, revision=revision, mirrors=mirrors
    ) as store:
        store.claim_line()
        from deltafin.runtime import Model, Want, load_tokenizer  # reading the options comes first: this imports much

        tokenizer = load_tokenizer(store)
        ids = _token_ids(tokenizer, text, prompt_ids)
        # More tokens than the model has positions are refused later, by what they are and not by what they would take.
        want = Want(rows=len(ids), tokens=min(len(ids) + max_new, store.catalog.config.max_positions))
        with Model(
            store, device=device, ram=ram, threads=threads, want=want, spine=spine, tokenizer=tokenizer
        ) as engine:
            if not engine.as_released:
                click.echo(f"df-run: spine {engine.spine_label}", err=True)
            printer = _Printer(engine, as_ids or engine.tokenizer is None, quiet=as_json)
            _fetch_ahead(engine, len(ids) + max_new, yes=yes)
            try:
                outcome = _generate(engine, ids, max_new, trace, printer)
            finally:
                _keep_heat(engine)
            plan = _compare(engine, len(ids), outcome)
            if as_json:
                print_json({**_as_json(engine, ids, outcome), "plan": None if plan is None else asdict(plan)})
            if stats:
                _print_stats(engine, len(ids), outcome, plan)


def _prompt_text(stdin: str | None, prompt: str | None, prompt_file: Path | None, prompt_ids: str | None) -> str | None:
    """The prompt from whichever option gives it; None if it is given as ids."""
    if stdin is not None and stdin != "-":
        raise BadRequest(f"unexpected argument {stdin!r}; give the prompt with --prompt")
    given = [prompt is not None, prompt_file is not None, prompt_ids is not None, stdin is not None]
    if sum(given) != 1:
        raise BadRequest("give the prompt once: --prompt TEXT, --prompt-file F, --prompt-ids IDS or - for stdin")
    if prompt is not None:
        return prompt
    if prompt_ids is not None:
        return None
    from_stdin = prompt_file is None or str(prompt_file) == "-"
    if from_stdin and sys.stdin is None:
        raise BadRequest("stdin is closed; give the prompt with --prompt or --prompt-file")
    try:
        raw = sys.stdin.buffer.read() if from_stdin or prompt_file is None else prompt_file.read_bytes()
        return raw.decode()
    except OSError as e:
        raise NotFound(f"{prompt_file}: cannot read the prompt ({e.strerror})") from None
    except UnicodeDecodeError as e:
        where = "stdin" if from_stdin else prompt_file
        raise BadRequest(f"{where}: the prompt is not UTF-8 (byte {e.start})") from None


def _token_ids(tokenizer: Tokenizer | None, text: str | None, prompt_ids: str | None) -> list[int]:
    if prompt_ids is not None:
        pieces = re.split(r"[\s,]+", prompt_ids.strip())
        if not all(re.fullmatch(r"\d{1,9}", p) for p in pieces):
            raise BadRequest(f"--prompt-ids {prompt_ids[:60]!r}: expected numbers separated by spaces or commas")
        return [int(p) for p in pieces]
    assert text is not None
    if tokenizer is None:
        raise BadRequest("this model has no tokenizer; give the prompt with --prompt-ids")
    ids = tokenizer.encode(text)
    if not ids:
        raise BadRequest("the prompt is empty; a model needs at least one token to continue")
    return ids


def _fetch_ahead(engine: Model, rows: int, *, yes: bool) -> None:
    """Fetches the missing spine, after saying how much may follow; does nothing for a local model.

    What is packed is here in another form.
    """
    from deltafin.store import expert_items, plan_fetch, spine_items

    store = engine.store
    if not store.may_fetch:
        return
    catalog, config = store.catalog, store.catalog.config
    plan = plan_fetch(store, [i for i in spine_items(catalog) if i.layer not in engine.packed_layers])
    also = 0
    if not yes:  # only an announcement needs to know; looking for every expert takes seconds on a slow disk
        most = rows * config.top_k * len(config.moe_layers) * catalog.expert_nbytes
        experts = expert_items(catalog, config.moe_layers, range(config.num_experts))
        also = plan_fetch(store, experts, limit_nbytes=most).nbytes
    if plan.items or also:
        fetch_with_consent(store, plan, f"spine of {store.model}", yes=yes, also_nbytes=also)


def _keep_heat(engine: Model) -> None:
    """Adds the experts that were used to the model's heat, also after a failure or Ctrl-C. Nothing depends on it."""
    store = engine.store
    if store.roots[0].presence.look():
        return  # the cache is gone, which was said; it must not be made anew in its place
    try:
        store.heat.add(store.stats.expert_reads, engine.times.passes)
    except DeltafinError as e:
        # Not a warning: a cache may be read-only on purpose.
        log.info("%s; the use of experts is not remembered", e)


# ---- generating ---------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Outcome:
    """What came out, and when."""

    ids: list[int] = field(default_factory=list)
    text: str = ""
    stopped: bool = False  # by a stop token, not by --max-new
    first_token_s: float = 0.0
    total_s: float = 0.0


def _generate(engine: Model, ids: Sequence[int], max_new: int, trace: Path | None, printer: _Printer) -> _Outcome:
    from deltafin.cli.watch import Watch
    from deltafin.runtime import TraceWriter

    outcome = _Outcome()
    with ExitStack() as stack:
        writer = stack.enter_context(TraceWriter(trace, engine.store.catalog)) if trace else None
        watch = Watch(engine.store, writer, printer)
        started = time.monotonic()
        try:
            for token in engine.generate(engine.sequence(), ids, max_new=max_new, observer=watch):
                outcome.ids.append(token)
                outcome.stopped = token in engine.stop_ids
                outcome.total_s = time.monotonic() - started
                outcome.first_token_s = outcome.first_token_s or outcome.total_s
                watch.token(len(outcome.ids))
                outcome.text += printer.push(token, last=outcome.stopped)
        finally:
            watch.clear()
            if outcome.ids:
                outcome.text += printer.finish()
    return outcome


class _Printer:
    """Streams text as complete characters, or ids. The stop token itself is not part of the text."""

    def __init__(self, engine: Model, as_ids: bool, *, quiet: bool) -> None:
        from deltafin.runtime import StreamDecoder

        self._as_ids, self._quiet = as_ids, quiet
        self._decoder = StreamDecoder(engine.tokenizer) if engine.tokenizer is not None else None
        self._count = 0
        self.column = 0  # where the cursor is, for a status beside the text

    def push(self, token: int, *, last: bool) -> str:
        text = "" if last or self._decoder is None else self._decoder.push(token)
        if self._as_ids:
            self._write((" " if self._count else "") + str(token))
        else:
            self._write(text)
        self._count += 1
        return text

    def finish(self) -> str:
        """Ends the output with a newline, also after an interruption."""
        rest = self._decoder.finish() if self._decoder is not None else ""
        self._write(("" if self._as_ids else rest) + "\n")
        return rest

    def _write(self, text: str) -> None:
        if not self._quiet and text:
            sys.stdout.write(text)
            sys.stdout.flush()
            line = text.rpartition("\n")[2]
            self.column = len(line) + (self.column if "\n" not in text else 0)


# ---- afterwards ---------------------------------------------------------------------------------------


def _compare(engine: Model, prompt_tokens: int, outcome: _Outcome) -> PlanOutcome | None:
    """What df-plan would have said of the tokens after the first, if it knows this machine; remembered for it."""
    later = len(outcome.ids) - 1
    if engine.memory is None or later < 1:
        return None
    from deltafin.runtime.planner import compare

    measured_s = (outcome.total_s - outcome.first_token_s) / later
    cache = engine.store.roots[0].path
    found = compare(engine, cache, "df-run", rows=prompt_tokens, tokens=later, measured_s=measured_s)
    return None if found is None else found[0]


def _as_json(engine: Model, prompt_ids: Sequence[int], outcome: _Outcome) -> dict[str, object]:
    return {
        "model": engine.store.model,
        "identity": engine.store.catalog.identity,
        "prompt_ids": list(prompt_ids),
        "ids": outcome.ids,
        "text": outcome.text if engine.tokenizer is not None else None,
        "stopped": outcome.stopped,
        "first_token_s": round(outcome.first_token_s, 6),
        "total_s": round(outcome.total_s, 6),
        "bytes": engine.store.stats.snapshot(),
        "requests": engine.store.requests,
        "passes": engine.times.passes,
        "spine": engine.spine_label or "released",
        "as_released": engine.as_released,
        "memory": None if engine.memory is None else engine.memory.as_json(),
        "seconds": asdict(engine.times),
    }


_TROUBLES = ("corrupt_objects", "disk_errors", "refused_spans", "unproven_spans", "unkept_spans", "evicted_spans")


def _print_stats(engine: Model, prompt_tokens: int, outcome: _Outcome, plan: PlanOutcome | None) -> None:
    from deltafin.cli.progress import human_nbytes
    from deltafin.store import SOURCES

    store, times = engine.store, engine.times
    counts = store.stats.snapshot()
    new = len(outcome.ids)
    later = (outcome.total_s - outcome.first_token_s) / max(1, new - 1)
    lines = [
        f"tokens    {prompt_tokens} given, {new} new",
        f"time      {outcome.first_token_s:.2f} s to the first token, then {later:.3f} s a token",
        f"visits    {counts['expert_visits']:,} experts{_hits(times)}, {counts['spine_visits']:,} spines",
    ]
    if times.passes:
        lines += _times_lines(times)
    if plan is not None:
        lines.append(
            f"plan      {plan.predicted_s:.3f} s a token after the first, as df-plan has it ({plan.error:+.0%})"
        )
    asked = counts["expert_visits"] * store.catalog.expert_nbytes + counts["spine_nbytes"] + counts["head_nbytes"]
    for source in SOURCES:
        spans, nbytes = counts[f"{source}_spans"], counts[f"{source}_nbytes"]
        if spans or source in ("object", "shard", "http"):
            share = f", {nbytes / asked:.0%} of what was used" if source == "ram" and asked else ""
            lines.append(f"{source:9} {spans:,} spans, {human_nbytes(nbytes)}{share}")
    if engine.spine_label is not None:
        lines.append(f"spine     {engine.spine_label}")
    if engine.memory is not None:
        lines += _memory_lines(engine)
    lines.append(f"requests  {store.requests:,}")
    for trouble in _TROUBLES:
        if counts.get(trouble):
            lines.append(f"{trouble.replace('_', ' '):9} {counts[trouble]:,}")
    click.echo("\n".join(lines), err=True)


def _hits(times: RunTimes) -> str:
    """How many experts were in memory when they were asked for."""
    experts, reads = times.layers.experts, times.layers.reads
    return f" ({(experts - reads) / experts:.0%} in memory)" if experts else ""


def _times_lines(times: RunTimes) -> list[str]:
    """Of an average pass: what was waited for, and what was computed."""
    passes, layers = times.passes, times.layers
    waits = layers.spine_wait_s + layers.expert_wait_s
    return [
        f"passes    {passes:,}, {times.rows:,} rows; of {times.total_s / passes:.3f} s a pass:",
        f"  waiting {waits / passes:.3f} s: spine {layers.spine_wait_s / passes:.3f}, "
        f"experts {layers.expert_wait_s / passes:.3f}",
        f"  compute {(times.total_s - waits) / passes:.3f} s: attention {layers.attention_s / passes:.3f}, shared "
        f"{layers.shared_s / passes:.3f}, experts {layers.expert_s / passes:.3f}, head {times.head_s / passes:.3f}",
    ]


def _memory_lines(engine: Model) -> list[str]:
    from deltafin.cli.progress import human_nbytes

    plan = engine.memory
    assert plan is not None
    kept, room = engine.store.resident_experts
    return [
        f"memory    {human_nbytes(plan.total)} planned of {human_nbytes(plan.budget)}: passes of up to {plan.rows:,} "
        "rows, "
        f"{len(plan.resident)} of {plan.spine_layers} layers, the head among them, resident "
        f"({human_nbytes(plan.resident_nbytes)}), {plan.slots} slots, {kept:,} of at most {room:,} experts",
    ]
