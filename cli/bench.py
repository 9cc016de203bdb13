"""df-bench: measure what df-plan predicts."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

import click

from deltafin import __version__
from deltafin.cli.bench_batch import bench_batch
from deltafin.cli.bench_http import bench_http
from deltafin.cli.bench_io import bench_io
from deltafin.cli.bench_model import bench_fullsize, bench_pass, bench_prefill
from deltafin.cli.bench_roots import bench_roots
from deltafin.cli.bench_tokens import bench_tokens
from deltafin.cli.options import json_option, options, print_json, verbose_option

if TYPE_CHECKING:
    from deltafin.runtime.bench import Rate, Report


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="df-bench")
def bench() -> None:
    """Measure this machine.

    Example: df-bench kernels
    """


@bench.command("kernels")
@options(json_option, verbose_option)
@click.option("--isa", metavar="NAME", help="Instruction set: scalar, avx2, avx512 or neon (default: the best).")
@click.option("--threads", type=click.IntRange(1, 1024), metavar="N", help="Beside one thread (default: all).")
@click.option("--turns", type=click.IntRange(1), default=15, show_default=True, metavar="N", help="The best counts.")
def bench_kernels(as_json: bool, isa: str | None, threads: int | None, turns: int) -> None:
    """Measure the matrix kernels on K3's shapes.

    One row reads weights: GB/s of stored bytes, beside what the same threads can read. More rows compute:
    GFLOP/s, beside the peak of multiply-adds in registers. All in one run, one thread by its CPU time, more by
    the clock on the wall. The ratio is rate by limit, and scaling is the ratio by that of one thread.

    Example: df-bench kernels --threads 4
    """
    from deltafin.cli.progress import Progress
    from deltafin.runtime.bench import case_count, kernels

    with Progress("measuring", case_count(threads), "cases") as progress:
        report = kernels(isa=isa, threads=threads, turns=turns, progress=progress.set)
    if as_json:
        print_json(_as_json(report))
        return
    click.echo(f"{report.isa}, best of {report.turns}, {report.arena_nbytes >> 20} MiB of weights")
    for count in sorted({rate.threads for rate in report.rates}):
        click.echo(f"\n{count} thread{'s' * (count > 1)}")
        click.echo(f"  {'matrix':34} {'rows':>4} {'rate':>9} {'limit':>9} {'unit':8} {'ratio':>5} {'scaling':>7}")
        for rate in report.rates:
            if rate.threads == count:
                click.echo(_line(rate))


def _line(rate: Rate) -> str:
    m = rate.matrix
    name = f"{m.format:5} {m.n:5} x {m.k:<5} {m.tensor}"
    scaling = f" {rate.scaling:7.2f}" if rate.threads > 1 else ""
    return f"  {name:34} {rate.rows:4} {rate.rate:9.1f} {rate.limit:9.1f} {rate.unit:8} {rate.ratio:5.2f}{scaling}"


def _as_json(report: Report) -> dict[str, object]:
    rates = [
        {**asdict(rate.matrix), **asdict(rate), "ratio": rate.ratio, "scaling": rate.scaling} for rate in report.rates
    ]
    for rate in rates:
        del rate["matrix"]
    return {"isa": report.isa, "turns": report.turns, "arena_nbytes": report.arena_nbytes, "rates": rates}


for command in (
    bench_io,
    bench_http,
    bench_roots,
    bench_pass,
    bench_prefill,
    bench_batch,
    bench_tokens,
    bench_fullsize,
):
    bench.add_command(command)
