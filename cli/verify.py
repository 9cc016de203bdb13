"""df-fetch verify: look at every byte that is here, and bring back what is damaged."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING

import click

from deltafin.cli.lines import one_line
from deltafin.cli.options import (
    ASK_ABOVE_NBYTES,
    ask,
    cache_option,
    json_option,
    offline_option,
    opened_store,
    options,
    print_json,
    revision_option,
    root_option,
    verbose_option,
    yes_option,
)
from deltafin.errors import BadRequest

if TYPE_CHECKING:
    from deltafin.store import RepairReport, Store, VerifyReport


@click.command("verify")
@click.argument("model")
@click.option("--quick", is_flag=True, help="Only sizes, records and headers; no content.")
@click.option("--full", is_flag=True, help="Hash everything. The default.")
@click.option("--repair", "repairing", is_flag=True, help="Fetch what is damaged or lost again, and nothing else.")
@click.option("--restart", is_flag=True, help="Begin anew, also where a verification was interrupted.")
@options(json_option, revision_option, cache_option, root_option, offline_option, yes_option, verbose_option)
def verify(
    model: str,
    quick: bool,
    full: bool,
    repairing: bool,
    restart: bool,
    as_json: bool,
    revision: str | None,
    cache_dir: Path | None,
    roots: tuple[Path, ...],
    offline: bool,
    yes: bool,
) -> int:
    """Hash everything on disk and compare it with its digests. Without --repair it asks no server.

    Damaged objects and packs are moved to the cache's quarantine folder; the next fetch, or --repair, brings them
    again. Whole shards that have their published SHA-256 make the digests of their spans proven. Interrupted, it goes
    on where it was, within a week. Exit status 1 if anything was damaged and is not repaired.

    Example: df-fetch verify demo
    """
    if quick and full:
        raise BadRequest("--quick and --full: choose one")
    if quick and restart:
        raise BadRequest("--restart has no effect with --quick, which remembers nothing")
    if not repairing and (offline or yes):
        raise BadRequest("--offline and --yes have an effect with --repair only: verify itself asks no server")
    rebuilt = _rebuilt(model, cache_dir, revision, offline) if repairing else None
    with opened_store(
        model, cache_dir=cache_dir, roots=roots, offline=offline or not repairing, revision=revision
    ) as store:
        records = _mend(store) if repairing else 0
        report = _look(store, quick=quick, restart=restart)
        done = _repair(store, report, yes=yes) if repairing else None
        if done is not None:
            done.corrected_records = records
        _keep(store, report, done)
    sound = not report.damaged if done is None else not done.unrepaired
    if as_json:
        repaired = None if done is None else {**done.as_json(), "rebuilt_catalog": rebuilt is not None}
        print_json(report.as_json() if done is None else {**report.as_json(), "repair": repaired})
        return 0 if sound else 1
    if rebuilt is not None:
        click.echo(f"rebuilt the catalog {rebuilt}")
    _print(report)
    if done is not None:
        _print_repair(done)
    return 0 if sound else 1


def last_verify_line(result: dict[str, object] | None) -> str:
    """When the last verification ended and what it found, for `df-fetch status`."""
    from deltafin.cli.progress import human_seconds

    if result is None:
        return "never; df-fetch verify does"
    finished, damaged = result.get("finished"), result.get("damaged")
    ago = human_seconds(max(0.0, time.time() - finished)) if isinstance(finished, int) else "some time"
    bad = len(damaged) if isinstance(damaged, list) else 0
    repaired = " (repaired)" if bad and result.get("sound") is True else ""
    what = f"{result.get('mode')}, {result.get('model')}"
    return f"{ago} ago ({what}): {result.get('whole')} whole, {bad} damaged{repaired}"


def _rebuilt(model: str, cache_dir: Path | None, revision: str | None, offline: bool) -> Path | None:
    from deltafin.store import default_cache, is_offline, rebuild_catalog

    cache = cache_dir.expanduser() if cache_dir is not None else default_cache()
    return rebuild_catalog(model, cache, offline=offline or is_offline(), revision=revision)


def _mend(store: Store) -> int:
    from deltafin.store import mend_logs

    mended = mend_logs(store)
    if mended.dropped_nbytes:
        click.echo(f"df-fetch: {mended.dropped_nbytes:,} bytes of object logs were no records, and are gone", err=True)
    return mended.corrected


def _look(store: Store, *, quick: bool, restart: bool) -> VerifyReport:
    from deltafin.cli.progress import Progress
    from deltafin.store import nbytes_to_verify, quick_verify, verify

    if quick:
        return quick_verify(store)
    with Progress("verifying", nbytes_to_verify(store)) as progress:
        return verify(store, progress.add, restart=restart)


def _repair(store: Store, report: VerifyReport, *, yes: bool) -> RepairReport:
    from deltafin.cli.progress import Progress, human_nbytes
    from deltafin.store import plan_repair, repair

    plan = plan_repair(store, report)
    if plan.fetch_nbytes > ASK_ABOVE_NBYTES and store.may_fetch and not yes:
        ask(f"repair of {store.model}: {human_nbytes(plan.fetch_nbytes)} in {len(plan.fetch):,} spans to fetch again")
    with Progress("repairing", plan.fetch_nbytes) as progress:
        return repair(store, plan, progress.add)


def _keep(store: Store, report: VerifyReport, done: RepairReport | None) -> None:
    """Leaves behind what was found, for status."""
    from deltafin.store import read_status, write_result

    status = read_status(store)
    write_result(
        store.roots[0].path,
        {
            "model": store.model,
            "identity": status.identity,
            **report.as_json(),
            "sound": not report.damaged if done is None else not done.unrepaired,
            "proven": status.proven_spans,
            "unproven": status.unproven_spans,
            "repair": None if done is None else done.as_json(),
        },
    )


def _print(report: VerifyReport) -> None:
    from deltafin.cli.progress import human_nbytes

    for line in report.damaged:
        click.echo(f"damaged: {one_line(line)}")
    what = "of the right size" if report.mode == "quick" else "whole"
    click.echo(f"{report.whole:,} {what} ({human_nbytes(report.whole_nbytes)}), {len(report.damaged)} damaged")
    if report.proven_shards:
        click.echo(f"{report.proven_shards} shards have their published SHA-256: what is in them is proven now")
    if report.packs:
        click.echo(f"{report.packs:,} packs {what} ({human_nbytes(report.packs_nbytes)})")
    if report.vanished:
        click.echo(f"{report.vanished:,} objects on record are gone; they are fetched when needed")
    if report.unknown:
        click.echo(f"{report.unknown:,} whole objects that no record names")
    if report.bad_records:
        click.echo(f"{report.bad_records:,} damaged records in object logs were skipped")
    if report.unproven_shards:
        click.echo(f"{report.unproven_shards} local shards have no published digest to compare with")


def _print_repair(done: RepairReport) -> None:
    from deltafin.cli.progress import human_nbytes

    if done.corrected_records:
        click.echo(f"corrected {done.corrected_records:,} records of which one bit was wrong")
    if done.rerecorded:
        click.echo(f"recorded {done.rerecorded:,} objects again that another root knows")
    for line in done.changed:
        click.echo(f"changed: {one_line(line)}")
    click.echo(f"fetched {done.spans:,} spans again, {human_nbytes(done.nbytes)}, in {done.requests:,} requests")
    if done.packs:
        click.echo(f"made {done.packs:,} packs again")
    for line in done.unrepaired:
        click.echo(f"not repaired: {one_line(line)}")
