"""df-bench http: how the store fetches ranges."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

import click

from deltafin.cli.options import json_option, options, print_json, verbose_option

if TYPE_CHECKING:
    from deltafin.store import httpbench


@click.command("http")
@options(json_option, verbose_option)
def bench_http(as_json: bool) -> None:
    """Measure how the store fetches spans over HTTP.

    Whole experts from a small server on this machine, plain and over TLS, one and several at once. Beside the store's
    client stand the leanest there are: the standard library's, and a bare socket that checks nothing; the faster of
    the two is the limit. All take turns in one run, and the medians count. Nothing leaves this machine.

    Example: df-bench http --json
    """
    from deltafin.cli.progress import Progress
    from deltafin.store import httpbench

    with Progress("measuring", httpbench.turns(), "turns") as progress:
        report = httpbench.measure(progress.add)
    if as_json:
        print_json(_as_json(report))
        return
    click.echo(f"spans of {httpbench.SPAN_NBYTES:,} bytes over loopback, medians of {report.rounds} turns")
    if report.without_tls is not None:
        click.echo(f"TLS is left out: {report.without_tls}")
    head = f"{'at once':>7} {'GB/s':>6} {'least':>6} {'most':>6} {'limit':>6} {'ratio':>5} {'core-s/GB':>9}"
    click.echo(f"\n  {'client':30} {head}")
    for line in report.lines:
        rates = " ".join(f"{rate / 1e9:6.3f}" for rate in (line.rate, line.least, line.most, line.limit))
        name = f"{line.scheme}: {line.client}"
        click.echo(f"  {name:30} {line.at_once:7} {rates} {line.ratio:5.2f} {line.core_s_per_gb:9.3f}")


def _as_json(report: httpbench.Report) -> dict[str, object]:
    return {**asdict(report), "lines": [{**asdict(line), "ratio": line.ratio} for line in report.lines]}
