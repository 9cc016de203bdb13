"""Builds a catalog from a source, and checks a finished one against its source again."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path

from deltafin.errors import BadCatalog, BadCheckpoint, DeltafinError, NotFound
from deltafin.indexer.answers import ShardFile
from deltafin.indexer.catalog import Catalog, write_catalog
from deltafin.indexer.config import parse_config
from deltafin.indexer.headers import HeaderTensor, show
from deltafin.indexer.layout import read_layout
from deltafin.indexer.publish import clear_stale, disk_error, make_directory
from deltafin.indexer.sources import DirectorySource, Source

Progress = Callable[[int, int], None]  # shards done, shards in all

INDEX_FILE = "model.safetensors.index.json"
# Kept in the catalog, so that a model runs from the catalog and the store alone. Name -> largest size.
_FILES = {
    "config.json": 1 << 20,
    "generation_config.json": 1 << 20,
    "tokenizer_config.json": 4 << 20,
    "tiktoken.model": 64 << 20,
}


def build_catalog(
    source: Source, path: Path, name: str, progress: Progress | None = None, *, wait: bool = False
) -> None:
    """Indexes `source` and publishes the catalog at `path`; until then an older one there stays in use.

    If another process is building it, that is an error, or with `wait` its catalog is waited for and taken.
    """
    _make_directory(path.parent)
    before = _version(path)
    with _only_writer(path, wait) as waited:
        if waited and _version(path) not in (None, before):
            return  # the other one may as well have failed, and left an older catalog
        clear_stale(path.parent)
        files = _read_files(source)
        config = parse_config(files["config.json"])
        layout = read_layout(source, config, progress)
        write_catalog(path, name, source.location, layout, files)


def check_catalog(catalog: Catalog, source: Source, *, index: bool, progress: Progress | None = None) -> list[str]:
    """Reads all headers again; returns what differs from the catalog, and with `index` from the index JSON too."""
    shard_of: dict[str, str] = {}

    def note(file: ShardFile, tensors: list[HeaderTensor]) -> None:
        shard_of.update((t.name, file.name) for t in tensors)

    problems = []
    files = _read_files(source)
    for name in _FILES:
        if files.get(name) != catalog.file(name):
            problems.append(f"{name} differs from the one that was indexed")
    try:
        layout = read_layout(source, catalog.config, progress, note if index else None)
    except BadCheckpoint as e:
        return [*problems, str(e)]
    old = {s.name: s for s in catalog.shards}
    for shard in layout.shards:
        known = old.pop(shard.name, None)
        if known is None:
            problems.append(f"{shard.name} is not in the catalog")
        elif (shard.nbytes, shard.header_sha256) != (known.nbytes, known.header_sha256):
            problems.append(f"{shard.name}: header or size differs from the one that was indexed")
        elif shard.sha256 and known.sha256 and shard.sha256 != known.sha256:
            problems.append(f"{shard.name}: the published SHA-256 differs from the one that was indexed")
    problems += [f"{name} is in the catalog, but not at its source any more" for name in old]
    if index:
        problems += _compare_index(source, shard_of, catalog.totals.tensor_nbytes)
    return problems


def check_files(catalog: Catalog) -> None:
    """Compares config.json and the tokenizer's files of a local directory with what was indexed.

    Raises BadCatalog at the first difference: a model must not answer from settings that its directory no
    longer has.
    """
    assert catalog.location.path is not None
    directory = Path(catalog.location.path)
    if not directory.is_dir():
        return  # what is missing is said when it is read
    source = DirectorySource(directory)
    for name, limit in _FILES.items():
        if source.read_file(name, limit) != catalog.file(name):
            raise BadCatalog(
                f"{directory / name}: changed since it was indexed; rebuild the catalog with df-index build {directory}"
            )


def _compare_index(source: Source, shard_of: dict[str, str], tensor_nbytes: int) -> list[str]:
    raw = source.read_file(INDEX_FILE, 1 << 30)
    if raw is None:
        raise NotFound(f"{INDEX_FILE}: the source has no index file to check against")
    try:
        index = json.loads(raw)
        weight_map, total = index["weight_map"], index["metadata"]["total_size"]
        listed = {str(name): str(shard) for name, shard in weight_map.items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return [f"{INDEX_FILE} is damaged: no weight_map and metadata.total_size can be read"]
    problems = []
    if total != tensor_nbytes:
        problems.append(f"{INDEX_FILE} says {show(total)} tensor bytes, the shards hold {tensor_nbytes}")
    for name, shard in shard_of.items():
        if listed.pop(name, None) != shard:
            problems.append(f"{INDEX_FILE} does not place tensor {show(name)} in {shard}")
    problems += [f"{INDEX_FILE} names tensor {show(name)}, which no shard holds" for name in listed]
    return problems


def _read_files(source: Source) -> dict[str, bytes]:
    files = {name: raw for name, limit in _FILES.items() if (raw := source.read_file(name, limit)) is not None}
    if "config.json" not in files:
        raise NotFound(f"{source.location.path or source.location.repo}: there is no config.json")
    return files


def _make_directory(directory: Path) -> None:
    try:
        make_directory(directory)
    except OSError as e:
        raise disk_error(e, directory, "cannot make the directory") from None


def _version(path: Path) -> tuple[int, int] | None:
    """Tells one catalog from its successor."""
    try:
        stat = os.stat(path)
    except OSError:
        return None
    return stat.st_ino, stat.st_mtime_ns


@contextlib.contextmanager
def _only_writer(path: Path, wait: bool) -> Iterator[bool]:
    """Keeps a second process from doing the same work; True if another had begun and was waited for.

    Correctness does not rest on it: publishing is a rename.
    """
    waited = False
    try:
        lock = open(path.with_suffix(".lock"), "wb")  # noqa: SIM115
    except OSError as e:
        raise disk_error(e, path) from None
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as e:
            if e.errno in (errno.EWOULDBLOCK, errno.EACCES):
                if not wait:
                    raise DeltafinError(
                        f"{path}: busy, another process is building this catalog; wait for it and run this again"
                    ) from None
                waited = True
                fcntl.flock(lock, fcntl.LOCK_EX)
        yield waited
