"""df-index: find out where every byte of a model lies."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from deltafin import __version__
from deltafin.cli.options import cache_option, json_option, options, print_json, revision_option, verbose_option
from deltafin.errors import BadRequest, DeltafinError

if TYPE_CHECKING:
    from deltafin.indexer import Catalog


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="df-index")
def index() -> None:
    """Find out where every byte of a model lies.

    MODEL is `demo` (built in), a directory of shards, a Hugging Face cache snapshot, a repository id with
    an optional @revision, or the name of a catalog.

    Example: df-index build demo && df-index show demo
    """


@index.command("build")
@click.argument("model")
@options(revision_option, cache_option, verbose_option)
@click.option("--name", metavar="NAME", help="Name of the catalog (default: derived from MODEL).")
def index_build(model: str, revision: str | None, cache_dir: Path | None, name: str | None) -> None:
    """Read all shard headers of MODEL, check them, and publish its catalog.

    Over HTTP only headers are read, about 76 MB for Kimi K3. An older catalog of the same name stays in
    use until the new one is complete.

    Example: df-index build moonshotai/Kimi-K3
    """
    from deltafin.cli.progress import Progress
    from deltafin.indexer import Catalog, build_catalog, catalog_path, parse_model
    from deltafin.store import default_cache, is_offline

    cache = cache_dir or default_cache()
    ref = parse_model(model, cache, revision=revision, name=name)
    if not ref.indexable:
        with Catalog(catalog_path(cache, ref.name)) as old:
            raise BadRequest(
                f"{model} is the name of a catalog; build it from its source: {old.location.path or old.location.repo}"
            )
    if ref.remote and is_offline():
        raise BadRequest(f"HF_HUB_OFFLINE is set, and indexing {model} needs the network")
    source = ref.source()
    try:
        with Progress(f"indexing {model}", 0, "shards") as progress:
            path = catalog_path(cache, ref.name)
            build_catalog(source, path, ref.name, lambda done, _total: progress.set(done))
    finally:
        source.close()
    with Catalog(path) as catalog:
        click.echo(f"{catalog.name}: {_summary(catalog)}")


def _summary(catalog: Catalog) -> str:
    from deltafin.cli.progress import human_nbytes

    t = catalog.totals
    return (
        f"{t.layers} layers, {t.experts:,} experts, {t.tensors:,} tensors, {human_nbytes(t.tensor_nbytes)} "
        f"in {t.shards} shards ({catalog.identity})"
    )


@index.command("show")
@click.argument("model")
@options(json_option, cache_option, verbose_option)
def index_show(model: str, as_json: bool, cache_dir: Path | None) -> None:
    """Print what the catalog of MODEL says.

    Example: df-index show demo --json
    """
    from deltafin.cli.progress import human_nbytes

    with _existing_catalog(model, cache_dir) as catalog:
        facts = _facts(catalog)
        if as_json:
            print_json(facts)
            return
        t = catalog.totals
        click.echo(f"{catalog.name}: {_summary(catalog)}")
        click.echo(f"  source         {facts['source']}")
        click.echo(f"  experts        {t.experts:,} of {t.expert_nbytes:,} bytes")
        click.echo(f"  spine          {human_nbytes(t.spine_nbytes)} (all that is no routed expert)")
        click.echo(f"  files          {human_nbytes(t.file_nbytes)} in all")
        click.echo(f"  ignored        {t.ignored_tensors} vision tensors, {human_nbytes(t.ignored_nbytes)}")
        click.echo(f"  layout digest  {catalog.layout_sha256}")
        click.echo(f"  catalog        {catalog.path}")


def _facts(catalog: Catalog) -> dict[str, object]:
    where = catalog.location
    return {
        "name": catalog.name,
        "identity": catalog.identity,
        "source": where.path or f"{where.repo}@{where.commit}",
        **asdict(catalog.totals),
        "layout_sha256": catalog.layout_sha256,
        "hidden_size": catalog.config.hidden_size,
        "vocab_size": catalog.config.vocab_size,
        "kda_layers": len(catalog.config.kda_layers),
        "mla_layers": catalog.config.num_layers - len(catalog.config.kda_layers),
        "experts_per_layer": catalog.config.num_experts,
        "experts_per_token": catalog.config.top_k,
        "catalog": str(catalog.path),
        "catalog_nbytes": catalog.path.stat().st_size,
        "shards_with_published_sha256": sum(s.sha256 is not None for s in catalog.shards),
    }


@index.command("check")
@click.argument("model")
@options(json_option, cache_option, verbose_option)
@click.option("--index", "against_index", is_flag=True, help="Also compare with model.safetensors.index.json.")
def index_check(model: str, as_json: bool, cache_dir: Path | None, against_index: bool) -> int:
    """Read all headers of MODEL's source again and compare them with its catalog.

    Exit status 1 if anything differs; each difference is one line.

    Example: df-index check demo --index
    """
    from deltafin.cli.progress import Progress
    from deltafin.indexer import check_catalog, source_of
    from deltafin.store import is_offline

    with _existing_catalog(model, cache_dir) as catalog:
        if catalog.location.path is None and is_offline():
            raise BadRequest(f"HF_HUB_OFFLINE is set, and checking {model} needs the network")
        source = source_of(catalog.location)
        try:
            with Progress(f"checking {model}", catalog.totals.shards, "shards") as progress:
                problems = check_catalog(
                    catalog, source, index=against_index, progress=lambda done, _total: progress.set(done)
                )
        finally:
            source.close()
        if as_json:
            print_json({"name": catalog.name, "ok": not problems, "problems": problems})
        elif problems:
            click.echo("\n".join(problems))
        else:
            click.echo(f"{catalog.name}: as indexed")
    return 1 if problems else 0


@index.command("list")
@options(json_option, cache_option, verbose_option)
def index_list(as_json: bool, cache_dir: Path | None) -> int:
    """List all catalogs on this machine. Exit status 1 if one cannot be read."""
    from deltafin.indexer import Catalog, catalog_names, catalog_path
    from deltafin.store import default_cache

    cache = cache_dir or default_cache()
    facts, damaged = [], False
    for name in catalog_names(cache):
        try:
            with Catalog(catalog_path(cache, name)) as catalog:
                facts.append(_facts(catalog))
                if not as_json:
                    click.echo(f"{name}: {_summary(catalog)}")
        except DeltafinError as e:
            facts.append({"name": name, "error": str(e)})
            damaged = True
            if not as_json:
                click.echo(f"{name}: {e}", err=True)
    if as_json:
        print_json(facts)
    return 1 if damaged else 0


def _existing_catalog(model: str, cache_dir: Path | None) -> Catalog:
    from deltafin.indexer import Catalog, catalog_path, parse_model
    from deltafin.store import default_cache

    cache = cache_dir or default_cache()
    path = catalog_path(cache, parse_model(model, cache).name)
    if not path.exists():
        raise BadRequest(f"{model} is not indexed on this machine; run: df-index build {model}")
    return Catalog(path)
