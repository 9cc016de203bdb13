"""df-fetch manifest: the digests of a model's spans in one small file."""

from __future__ import annotations

import re
from pathlib import Path

import click

from deltafin.cli.options import (
    cache_option,
    json_option,
    opened_store,
    options,
    print_json,
    revision_option,
    root_option,
    verbose_option,
)
from deltafin.errors import BadRequest

_SHA256 = re.compile(r"[0-9a-fA-F]{64}")
_file = click.Path(path_type=Path, dir_okay=False)
_common = options(json_option, revision_option, cache_option, root_option, verbose_option)


@click.group("manifest")
def manifest() -> None:
    """Write, take over and show manifests: the digests of all spans of a model, a few megabytes.

    With a manifest from somebody you trust, whatever any server or mirror sends is proven span by span as it comes.

    Example: df-fetch manifest export demo -o demo.manifest --partial
    """


@manifest.command("export")
@click.argument("model")
@click.option("-o", "--output", type=_file, required=True, metavar="FILE", help="Where to write it.")
@click.option("--partial", is_flag=True, help="Leave out spans whose digest is not known, or not proven.")
@click.option("--unproven", is_flag=True, help="Also digests that nothing has proven, marked as such.")
@_common
def manifest_export(
    model: str,
    output: Path,
    partial: bool,
    unproven: bool,
    as_json: bool,
    revision: str | None,
    cache_dir: Path | None,
    roots: tuple[Path, ...],
) -> None:
    """Write the digests of MODEL's spans to a file. Asks no server.

    The same digests give the same bytes. Prints the file's SHA-256, for --sha256 of import.

    Example: df-fetch manifest export demo -o demo.manifest
    """
    from deltafin.store import make_manifest, write_manifest

    with opened_store(model, cache_dir=cache_dir, roots=roots, offline=True, revision=revision) as store:
        made = make_manifest(store, partial=partial, unproven=unproven)
        digest = write_manifest(made, output)
    proven = int(made.proven.sum())
    if as_json:
        print_json({"file": str(output), "sha256": digest, "spans": len(made), "proven": proven})
        return
    note = "" if proven == len(made) else f", {len(made) - proven:,} of them unproven"
    click.echo(f"{digest}  {output}")
    click.echo(f"{len(made):,} spans{note}")


@manifest.command("import")
@click.argument("model")
@click.argument("file", type=_file)
@click.option("--sha256", metavar="HEX", help="What the file's SHA-256 must be; without it the file itself is trusted.")
@_common
def manifest_import(
    model: str,
    file: Path,
    sha256: str | None,
    as_json: bool,
    revision: str | None,
    cache_dir: Path | None,
    roots: tuple[Path, ...],
) -> None:
    """Take over the digests in FILE as proven, if it is a manifest of MODEL's shards. Asks no server.

    Objects that contradict it are moved to quarantine, and fetched again when needed. What contradicts digests that
    are proven already is refused as a whole.

    Example: df-fetch manifest import demo demo.manifest
    """
    from deltafin.store import import_manifest, read_manifest

    if sha256 is not None and not _SHA256.fullmatch(sha256):
        raise BadRequest(f"--sha256 {sha256[:80]!r}: expected 64 hexadecimal digits")
    found = read_manifest(file, sha256)
    with opened_store(model, cache_dir=cache_dir, roots=roots, offline=True, revision=revision) as store:
        report = import_manifest(store, found)
    if sha256 is None:
        click.echo("df-fetch: without --sha256 the file was trusted as it is", err=True)
    if as_json:
        print_json(report.as_json())
        return
    click.echo(f"{report.proven:,} spans proven; {report.new:,} records are new")
    if report.spans > report.proven:
        click.echo(f"{report.spans - report.proven:,} unproven digests, which prove nothing")
    if report.replaced:
        click.echo(f"{report.replaced:,} unproven digests on record were wrong; their objects are in quarantine")
    if report.foreign:
        click.echo(f"{report.foreign:,} spans that this catalog does not have were left out")


@manifest.command("show")
@click.argument("file", type=_file)
@options(json_option, verbose_option)
def manifest_show(file: Path, as_json: bool) -> None:
    """Say what a manifest is of.

    Example: df-fetch manifest show demo.manifest
    """
    from deltafin.cli.progress import human_nbytes
    from deltafin.store import read_manifest

    found = read_manifest(file)
    proven, nbytes = int(found.proven.sum()), int(found.nbytes.sum())
    facts = {
        "repo": found.repo,
        "commit": found.commit,
        "shards": len(found.shards),
        "published_shards": sum(shard.published for shard in found.shards),
        "spans": len(found),
        "proven": proven,
        "nbytes": nbytes,
    }
    if as_json:
        print_json(facts)
        return
    click.echo(f"{found.repo or 'a local directory'}@{found.commit or 'no commit'}")
    click.echo(f"  shards   {len(found.shards)}, {facts['published_shards']} with a published SHA-256")
    click.echo(f"  spans    {len(found):,}, {human_nbytes(nbytes)}; {proven:,} proven")


@manifest.command("forget")
@click.argument("model")
@options(revision_option, cache_option, verbose_option)
def manifest_forget(model: str, revision: str | None, cache_dir: Path | None) -> None:
    """Take back that anything of MODEL is proven, after a manifest that was wrong.

    What is here stays, unproven; df-fetch verify proves it from whole shards.

    Example: df-fetch manifest forget demo
    """
    from deltafin.store import forget_proofs

    with opened_store(model, cache_dir=cache_dir, roots=(), offline=True, revision=revision) as store:
        count = forget_proofs(store)
    click.echo(f"{count:,} spans are no longer proven")
