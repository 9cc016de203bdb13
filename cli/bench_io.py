"""df-bench io: how the store reads from a drive."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from deltafin.cli.options import ByteSize, json_option, options, print_json, verbose_option

if TYPE_CHECKING:
    from deltafin.store import iobench


@click.command("io")
@options(json_option, verbose_option)
@click.option(
    "--dir",
    "directory",
    type=click.Path(path_type=Path, file_okay=False),
    metavar="DIR",
    help="On the drive to measure (default: the cache directory).",
)
@click.option(
    "--rate", type=ByteSize(), metavar="SIZE", help="Of the limited root, a second (default: half of the drive's)."
)
@click.option("--seconds", type=click.FloatRange(0.1), default=40.0, show_default=True, metavar="S", help="To read.")
@click.option("--size", type=ByteSize(), default="4GB", show_default=True, metavar="SIZE", help="Of the test files.")
def bench_io(as_json: bool, directory: Path | None, rate: int | None, seconds: float, size: int) -> None:
    """Measure how the store reads spans from a drive.

    Whole experts, read as the store reads them: past the page cache, several at once, from files of their own
    and from within a shard; through the page cache for comparison; and from a root that is held to a known rate,
    which shows what the program itself costs. Beside them stands the best of several plain sequential ways. All take
    turns in one run, and the medians count. The test files are removed at the end.

    Example: df-bench io --dir /mnt/nvme --seconds 20
    """
    import os

    from deltafin.cli.progress import Progress
    from deltafin.store import default_cache, iobench

    if rate == 0:
        raise click.BadParameter("nothing is read at a rate of 0", param_hint="--rate")

    where = directory or default_cache(os.environ)
    with ExitStack() as stack:
        with Progress("test files", size) as progress:
            files = stack.enter_context(iobench.span_files(where, nbytes=size, written=progress.add))
        with Progress("reading", iobench.TURNS, "turns") as progress:
            report = iobench.measure(files, rate=rate, seconds=seconds, measured=progress.add)
    if as_json:
        print_json(_io_as_json(report))
        return
    click.echo(_io_conditions(report))
    click.echo(f"\n  {'reads':36} {'GB/s':>6} {'least':>6} {'most':>6} {'limit':>6} {'ratio':>5} {'core-s/GB':>9}")
    click.echo(_io_line("raw: ", report.raw[0]))
    for line in report.spans:
        click.echo(_io_line("spans: ", line))


def _io_conditions(report: iobench.Report) -> str:
    past = "past the page cache" if report.direct else "through the page cache: direct reads are refused"
    if report.in_memory:
        past = "in memory: this proves nothing of any drive"
    files = "objects and a test file" if report.objects else "test files"
    return (
        f"{report.directory}, {report.file_system}, {past}; {report.set_nbytes / 1e9:.2f} GB of {files}, "
        f"depth {report.depth}, medians of {report.rounds} turns of {report.turn_s:.2f} s"
    )


def _io_line(kind: str, line: iobench.Line) -> str:
    rates = " ".join(f"{rate / 1e9:6.3f}" for rate in (line.rate, line.least, line.most, line.limit))
    return f"  {kind + line.name:36} {rates} {line.ratio:5.2f} {line.core_s_per_gb:9.3f}"


def _io_as_json(report: iobench.Report) -> dict[str, object]:
    def lines(found: tuple[iobench.Line, ...]) -> list[dict[str, object]]:
        return [{**asdict(line), "ratio": line.ratio} for line in found]

    return {**asdict(report), "in_memory": report.in_memory, "raw": lines(report.raw), "spans": lines(report.spans)}
