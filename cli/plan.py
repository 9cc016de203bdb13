"""df-plan: what this machine will do with a model, before it is downloaded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from deltafin import __version__
from deltafin.cli.options import (
    cache_option,
    json_option,
    offline_option,
    options,
    print_json,
    ram_option,
    revision_option,
    root_option,
    spine_option,
    threads_option,
    verbose_option,
)
from deltafin.errors import BadRequest, DeltafinError

if TYPE_CHECKING:
    from deltafin.runtime.planner import Figures, Plan, Subject
    from deltafin.store import RootSpec

_NO_COMMAND = ("-h", "--help", "--version")


class _Plan(click.Group):
    """`df-plan MODEL` is short for `df-plan show MODEL`."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if not args or args[0] not in (*self.commands, *_NO_COMMAND):
            args = ["show", *args]
        return super().parse_args(ctx, args)


@click.group(cls=_Plan, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="df-plan")
def plan() -> None:
    """Say what this machine will do with a model, before anything is downloaded.

    df-plan MODEL is short for df-plan show MODEL, and MODEL is Kimi K3 if it is left out.

    Example: df-plan --line 100Mbit/s
    """


@plan.command("show")
@click.argument("model", required=False)
@options(ram_option, threads_option, spine_option)
@click.option("--line", "line_text", metavar="RATE", help="What the line brings, like 100Mbit/s.")
@click.option("--probe-line", is_flag=True, help="Measure the line with a few seconds of the model's own bytes.")
@click.option(
    "--what-if",
    "what_if",
    multiple=True,
    metavar="CHANGES",
    help="Another machine: ram=128GB (as --ram), drive=7GB/s (one more, with all of it, too), drives=7GB/s (all "
    "together, in place of what was measured), cores=16, line=1Gbit/s, spine=bf12. With commas, or repeated.",
)
@click.option("--measure", is_flag=True, help="Measure again, even if there are figures of the last 7 days.")
@click.option("--explain", is_flag=True, help="Print what was measured, and how a time is computed from it.")
@options(json_option, revision_option, cache_option, root_option, offline_option, verbose_option)
def plan_show(
    model: str | None,
    ram: int | None,
    threads: int | None,
    spine: str | None,
    line_text: str | None,
    probe_line: bool,
    what_if: tuple[str, ...],
    measure: bool,
    explain: bool,
    as_json: bool,
    revision: str | None,
    cache_dir: Path | None,
    roots: tuple[Path, ...],
    offline: bool,
) -> None:
    """Plan for MODEL (default: Kimi K3): memory, seconds a token, the download, what would change them.

    Measures the kernels, the program and each root's drive in a few seconds, and remembers it. Opens no socket
    without --probe-line. Where there is nothing to read yet, a temporary file of 561 MB is written and removed.

    Example: df-plan --line 100Mbit/s --what-if ram=64GB,drive=7GB/s
    """
    from deltafin.cli.plan_text import explanation, screen
    from deltafin.runtime import default_budget
    from deltafin.runtime.planner import (
        load_outcomes,
        make_plan,
        median_error,
        open_subject,
        parse_changes,
        parse_rate,
        present,
    )
    from deltafin.store import asked_roots, default_cache, is_offline, parse_root

    if line_text is not None and probe_line:
        raise BadRequest("--probe-line has no effect beside --line; leave one out")
    if probe_line and (offline or is_offline()):
        raise BadRequest("--probe-line asks a server, and --offline forbids it; give the rate with --line")
    changes = parse_changes(what_if)
    line = parse_rate(line_text, "--line") if line_text is not None else None
    cache = cache_dir or default_cache()
    given = [parse_root(str(root)) for root in roots]
    every = asked_roots(given, cache)
    with open_subject(model, cache=cache, roots=given, revision=revision) as subject:
        figures = _figures(subject, cache, every, threads, measure)
        if probe_line:
            line = _line(subject)
        here = present(subject.store) if subject.store is not None else None
        budget = default_budget() if ram is None else ram
        made = make_plan(subject, here, figures, budget=budget, line=line, spine=spine, changes=changes)
        error = median_error(load_outcomes(cache))
        runs = len(load_outcomes(cache))
        if as_json:
            print_json(_as_json(made, figures, error, runs))
            return
        click.echo(screen(made, subject, here, figures, changes))
        click.echo(explanation(figures) if explain else "model     " + _SHORT)
        click.echo(_error_line(error, runs))


_SHORT = "reads and products as measured, walked in the engine's order: df-plan --explain, docs/plan.md"


def _error_line(error: float | None, runs: int) -> str:
    if error is None:
        return "error     unknown until df-run or df-bench tokens has been compared with it"
    return (
        f"error     {error:.0%} in the median of the last {runs} runs here"
        if runs > 1
        else f"error     {error:.0%} in the one run here so far"
    )


def _figures(subject: Subject, cache: Path, roots: Sequence[RootSpec], threads: int | None, measure: bool) -> Figures:
    """What is remembered of this machine and of the drives that the model comes from, or measured now and remembered.

    A small model's files stay in the page cache, whatever their drive.
    """
    from dataclasses import replace

    from deltafin.cext import _math
    from deltafin.runtime.planner import load_figures, probe, save_figures
    from deltafin.store import device_of, free_nbytes, probe_drive

    def say(what: str) -> None:
        click.echo(f"df-plan: measuring {what}", err=True)

    known = load_figures(cache, isa=_math.isa(), threads=threads or _math.threads())
    if known is None or measure:
        known = replace(probe(threads=threads, progress=say), drives=() if known is None else known.drives)
    there = {drive.path: drive for drive in known.drives if drive.direct is not None and not measure}
    drives = []
    for directory, ours in _directories(subject, cache, roots).items():
        drive = there.get(str(directory))
        if drive is None or drive.device != device_of(directory):
            say(f"reads from {directory}")
            drive = probe_drive(directory, may_write=ours)
        drives.append(replace(drive, free_nbytes=free_nbytes(directory)))
    asked = {drive.path for drive in drives}
    others = [drive for drive in known.drives if drive.path not in asked]
    try:
        save_figures(cache, replace(known, drives=(*drives, *others)))
    except DeltafinError as e:
        click.echo(f"df-plan: {e}; what was measured is not remembered", err=True)
    return replace(known, drives=tuple(drives))


def _directories(subject: Subject, cache: Path, roots: Sequence[RootSpec]) -> dict[Path, bool]:
    """Where the model's bytes are or will be, and whether a test file may be written there."""
    from deltafin.store import DIRECT_FROM_NBYTES

    if subject.catalog.expert_nbytes < DIRECT_FROM_NBYTES:
        return {}
    found = {cache.absolute(): True}
    for root in roots:
        found.setdefault(root.path.absolute(), root.write)
    for folder in subject.store.shard_directories if subject.store is not None else ():
        found.setdefault(folder.path.absolute(), False)
    return found


def _line(subject: Subject) -> float:
    from deltafin.store import probe_line

    if not subject.remote:
        raise BadRequest(f"--probe-line has no effect for {subject.model}, which comes from no server; leave it out")
    click.echo("df-plan: measuring the line", err=True)
    source = subject.source()
    try:
        return probe_line(source)
    finally:
        source.close()


def _as_json(made: Plan, figures: Figures, error: float | None, runs: int) -> dict[str, object]:
    def finite(value: object) -> object:
        if isinstance(value, dict):
            return {str(name): finite(one) for name, one in value.items()}
        if isinstance(value, list | tuple):
            return [finite(one) for one in value]
        return None if value == float("inf") else value

    times = {name: getattr(made, name).as_json() for name in ("warm", "cold")}
    prompts = [{**asdict(one), "time": one.time and one.time.as_json()} for one in made.prompts]
    whole = {
        **asdict(made),
        **times,
        "prompts": prompts,
        "memory": made.memory.as_json(),
        "figures": asdict(figures),
        "error": {"median": error, "runs": runs},
    }
    found = finite(whole)
    assert isinstance(found, dict)
    return found


@plan.command("doctor")
@click.argument("model", required=False)
@options(json_option, revision_option, cache_option, root_option, verbose_option)
def plan_doctor(
    model: str | None, as_json: bool, revision: str | None, cache_dir: Path | None, roots: tuple[Path, ...]
) -> int:
    """Look for whatever is wrong here: versions, kernels, memory, limits, roots, MODEL's catalog, logs, packs.

    Asks no server and repairs nothing; each finding says what to do. Exit status 1 if something needs attention.

    Example: df-plan doctor demo
    """
    from deltafin.runtime.planner import DEFAULT_MODEL, examine
    from deltafin.store import default_cache, parse_root

    given = [parse_root(str(root)) for root in roots]
    report = examine(model or DEFAULT_MODEL, cache=cache_dir or default_cache(), roots=given, revision=revision)
    if as_json:
        print_json({"fine": report.fine, **asdict(report)})
    else:
        for fact in report.facts:
            click.echo(f"{fact.topic:9} {fact.text}")
        for finding in report.findings:
            click.echo(f"attention {finding.topic}: {finding.what}; {finding.do}")
        click.echo("fine" if report.fine else f"{len(report.findings)} things need attention")
    return 0 if report.fine else 1
