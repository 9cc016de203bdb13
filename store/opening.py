"""Opens a store for what the user calls a model, building its catalog first if there is none."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from deltafin.errors import BadRequest, Missing, NotFound, OldCatalog
from deltafin.indexer import (
    Catalog,
    Location,
    ModelRef,
    Progress,
    RemoteFiles,
    RetryPolicy,
    build_catalog,
    catalog_path,
    check_files,
    hub_files,
    mirror_address,
    parse_model,
)
from deltafin.store.config import Limits, RootSpec, chosen_roots, parse_root, read_config
from deltafin.store.drive import Drive
from deltafin.store.presence import Presence
from deltafin.store.roots import Root, ShardDirectory
from deltafin.store.store import Store

log = logging.getLogger(__name__)


def open_store(
    model: str,
    *,
    cache_dir: Path | str | None = None,
    roots: Sequence[Path | str | RootSpec] = (),
    offline: bool = False,
    revision: str | None = None,
    policy: RetryPolicy | None = None,
    progress: Progress | None = None,
    rate: float | None = None,
    mirrors: Sequence[str] = (),
    environ: Mapping[str, str] = os.environ,
) -> Store:
    """A store for `model`: "demo", a directory of shards, a repository id or a catalog's name.

    What is fetched is kept in `cache_dir` (default: DELTAFIN_CACHE, else the user's cache directory);
    `roots` are further directories with objects or original shards, only read unless a RootSpec says otherwise; those
    of the user's configuration file join them (`read_config`). `offline`, or
    HF_HUB_OFFLINE in the environment, means that no socket is opened. `progress` counts shards while a
    missing catalog is built. `rate` holds every root to so many bytes a second, for comparisons of times.
    `mirrors` (default: DELTAFIN_MIRRORS, separated by spaces) are base addresses of servers of the same shards,
    asked in this order before the hub; {repo} and {commit} in them are filled in. Given where nothing can be fetched
    they are a BadRequest.
    Raises NotFound, Missing, BadCatalog, BadCheckpoint, NetworkError.
    """
    cache = Path(cache_dir).expanduser() if cache_dir is not None else default_cache(environ)
    offline = offline or is_offline(environ)
    if mirrors and offline:
        raise BadRequest("--mirror has no effect offline: leave out --mirror, or --offline and HF_HUB_OFFLINE")
    config = read_config(environ)
    limits, specs = config.cache, chosen_roots(config, [_as_spec(root) for root in roots], cache)
    ref = parse_model(model, cache, revision=revision)
    if mirrors and ref.path is not None:
        raise BadRequest(f"--mirror has no effect for {model}: its shards are on this machine")
    catalog = open_catalog(ref, cache, offline=offline, policy=policy, progress=progress)
    try:
        if mirrors and catalog.location.path is not None:
            raise BadRequest(f"--mirror has no effect for {model}: its shards are in {catalog.location.path}")
        mirrors = mirrors or environ.get("DELTAFIN_MIRRORS", "").split()
        return _assemble(catalog, cache, limits, specs, offline, policy, environ, model, rate, mirrors)
    except BaseException:
        catalog.close()
        raise


def open_catalog(
    ref: ModelRef, cache: Path, *, offline: bool, policy: RetryPolicy | None = None, progress: Progress | None = None
) -> Catalog:
    """The catalog of a model; built now if it is missing or of another version, and its source is within reach."""
    path = catalog_path(cache, ref.name)
    if (catalog := _current(path, rebuild=ref.indexable and not (offline and ref.remote))) is not None:
        if ref.path is None:
            return catalog
        if catalog.location.path == str(ref.path.resolve()) or _is_cache_folder(ref.path):
            try:
                check_files(catalog)
            except BaseException:
                catalog.close()
                raise
            return catalog
        catalog.close()  # the directory moved, e.g. the built-in demo with its environment
    if not ref.indexable:
        raise NotFound(f"{ref.asked}: there is no catalog of that name; see df-index list")
    if offline and ref.remote:
        raise Missing(f"{ref.asked} is not indexed on this machine; without --offline run: df-index build {ref.asked}")
    source = ref.source(policy)
    try:
        build_catalog(source, path, ref.name, progress, wait=True)
    finally:
        source.close()
    return Catalog(path)


def _current(path: Path, *, rebuild: bool) -> Catalog | None:
    """The finished catalog at `path`; None if there is none, or an old one that can be built anew."""
    if not _exists(path):
        return None
    try:
        return Catalog(path)
    except OldCatalog as e:
        if not rebuild:
            raise
        log.info("%s; building it anew", e)
        return None


def _exists(path: Path) -> bool:
    try:
        str(path).encode()
        return path.stat().st_size >= 0
    except FileNotFoundError:
        return False
    except (OSError, ValueError) as e:
        raise BadRequest(f"the cache directory {str(path.parent)!r} cannot be used ({e}); choose another") from None


def default_cache(environ: Mapping[str, str] = os.environ) -> Path:
    """DELTAFIN_CACHE, else `deltafin` in the user's cache directory."""
    if given := environ.get("DELTAFIN_CACHE"):
        return Path(given).expanduser()
    base = environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "deltafin"


def is_offline(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether HF_HUB_OFFLINE asks for no network, read as huggingface_hub reads it."""
    return environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE")


def _assemble(
    catalog: Catalog,
    cache: Path,
    limits: Limits,
    roots: Sequence[RootSpec],
    offline: bool,
    policy: RetryPolicy | None,
    environ: Mapping[str, str],
    model: str,
    rate: float | None,
    mirrors: Sequence[str],
) -> Store:
    location = catalog.location

    def shards(path: Path, *, required: bool) -> ShardDirectory:
        return ShardDirectory(path, catalog, required=required, drive=Drive(path, rate=rate))

    directories = [shards(Path(location.path), required=True)] if location.path else []
    readable = [Root(cache, writable=True, drive=Drive(cache, rate=rate), limits=limits)]
    # Those that are written to first: what was fetched anew counts before what a root that is only read has unproven.
    for spec in sorted(roots, key=lambda spec: not spec.write):  # with objects, shards or both: one drive for each
        drive, presence = Drive(spec.path, rate=rate), Presence(spec.path)
        readable.append(Root(spec.path, writable=spec.write, drive=drive, presence=presence, limits=spec.limits))
        directories.append(ShardDirectory(spec.path, catalog, required=False, drive=drive, presence=presence))
    if location.path is None and (snapshot := _hub_cache_snapshot(location, environ)) is not None:
        directories.append(shards(snapshot, required=False))

    remote = None
    if location.path is None and not offline:
        assert location.repo is not None and location.commit is not None
        repo, commit = location.repo, location.commit
        for mirror in mirrors:
            mirror_address(mirror, repo, commit)  # what is no address is said before anything is fetched

        def remote() -> RemoteFiles:
            return hub_files(repo, commit, policy, mirrors)

    return Store(catalog, readable, directories, remote, model)


def asked_roots(
    given: Sequence[RootSpec], cache: Path, environ: Mapping[str, str] = os.environ
) -> tuple[RootSpec, ...]:
    """All roots beside the cache: those that were given, and those of the configuration file. As `open_store`."""
    return chosen_roots(read_config(environ), given, cache)


def _as_spec(root: Path | str | RootSpec) -> RootSpec:
    return root if isinstance(root, RootSpec) else parse_root(str(root))


def _hub_cache_snapshot(location: Location, environ: Mapping[str, str]) -> Path | None:
    """The snapshot of this commit that huggingface_hub keeps, if there is one."""
    home = environ.get("HF_HOME") or str(Path(environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "huggingface")
    hub = Path(environ.get("HF_HUB_CACHE") or Path(home) / "hub").expanduser()
    assert location.repo is not None and location.commit is not None
    snapshot = hub / f"models--{location.repo.replace('/', '--')}" / "snapshots" / location.commit
    return snapshot if snapshot.is_dir() else None


def _is_cache_folder(path: Path) -> bool:
    return path.name.startswith("models--")
