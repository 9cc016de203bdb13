"""df-bench roots: how well reads are spread over several drives."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path

import click

from deltafin.cli.options import json_option, options, print_json, verbose_option
from deltafin.errors import BadRequest


@click.command("roots")
@options(json_option, verbose_option)
@click.option(
    "--dir",
    "directory",
    type=click.Path(path_type=Path, file_okay=False),
    metavar="DIR",
    help="Where the test roots lie for the moment (default: the cache directory).",
)
@click.option(
    "--rates",
    default="100MB,200MB,400MB",
    show_default=True,
    metavar="LIST",
    help="What each root is held to, a second; together less than the drive below gives.",
)
@click.option("--layers", type=click.IntRange(1), default=40, show_default=True, metavar="N", help="Layers to read.")
def bench_roots(as_json: bool, directory: Path | None, rates: str, layers: int) -> None:
    """Measure how near reads from several roots come to the ideal split.

    Test roots with full copies of K3-sized experts, each held to a rate; a layer's 16 reads are planned together, and
    what they take is set beside their bytes at the sum of the rates. The roots are removed at the end.

    Example: df-bench roots --rates 200MB,400MB
    """
    import os

    from deltafin.cli.progress import Progress, human_nbytes
    from deltafin.store import default_cache, parse_nbytes, rootbench

    numbers = [parse_nbytes(part) for part in rates.split(",")]
    wanted = [float(number) for number in numbers if number]
    if len(wanted) != len(numbers):
        raise BadRequest(f"--rates {rates!r}: expected sizes like 150MB,300MB")
    with ExitStack() as stack:
        store, _ = stack.enter_context(rootbench.several_roots(directory or default_cache(os.environ), wanted))
        with Progress("reading", layers, "layers") as progress:
            report = rootbench.measure(store, layers, measured=progress.add)
    if as_json:
        print_json({**asdict(report), "median": report.median, "worst": report.worst})
        return
    click.echo(
        f"{layers} layers of {rootbench.EXPERTS} experts, {human_nbytes(report.layer_nbytes)} each; "
        f"{report.split_spans / layers:.1f} of them read in parts"
    )
    click.echo(f"\n  {'root held to':>14} {'bytes':>10} {'ideal':>10} {'ratio':>6}")
    for root in report.roots:
        click.echo(
            f"  {human_nbytes(root.rate) + '/s':>14} {human_nbytes(root.nbytes):>10} "
            f"{human_nbytes(root.ideal_nbytes):>10} {root.ratio:6.2f}"
        )
    click.echo(
        f"\n  a layer: ideal {1e3 * report.ideal_s:.0f} ms; median {report.median:.3f} x, worst {report.worst:.3f} x"
    )
