"""Saved states in a cache: where they lie, how much they take, removing them. What is in one is the runtime's.

    states/KEY/CLASS/LENGTH-HASH.state

KEY names the model as it does for packs, CLASS whatever else a state depends on. Nothing here follows a link.
"""

from __future__ import annotations

import hashlib
import os
import re
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from deltafin.errors import DiskError
from deltafin.indexer import disk_error
from deltafin.store.packs import model_key, source_mtime_ns
from deltafin.store.store import Store

FOLDER = "states"
_KEY = re.compile(r"[0-9a-f]{32}")
_NAME = re.compile(r"[0-9]{1,9}-[0-9a-f]{32}\.state")


@dataclass(frozen=True, slots=True)
class StateFile:
    """One state as it lies in the cache."""

    path: Path
    nbytes: int
    used_ns: int  # when it was last written or restored, unix time


@dataclass(frozen=True, slots=True)
class Weights:
    """What tells the weights that a state was computed with from all others."""

    model: str  # the catalog's identity, for people
    shards: str  # SHA-256 of the identities of all shards
    # Of when local shards without a published digest were last changed: their identities do not tell what is in them.
    changed: str | None
    config: str  # SHA-256 of config.json


def weights_of(store: Store) -> Weights:
    """Looks at no content; a stat for each local shard whose digest is not published."""
    catalog = store.catalog
    times = [source_mtime_ns(catalog, number) for number in range(len(catalog.shards))]
    local = any(time is not None for time in times)
    return Weights(
        model=catalog.identity,
        shards=hashlib.sha256(b"deltafin shards\n" + b"".join(store.shard_ids)).hexdigest(),
        changed=hashlib.sha256(repr(times).encode()).hexdigest() if local else None,
        config=hashlib.sha256(catalog.file("config.json") or b"").hexdigest(),
    )


def state_folder(store: Store) -> Path:
    """Where all states of a model lie in the cache."""
    return store.roots[0].path / FOLDER / model_key(store.shard_ids)


def state_files(cache: Path) -> list[StateFile]:
    """The states of all models in a cache. Raises DiskError."""
    return [file for model in _folders(cache / FOLDER) for file in _of_model(model)]


def model_states(store: Store) -> list[StateFile]:
    """The states of one model, whatever else they depend on. Raises DiskError."""
    folder = state_folder(store)
    return [] if os.path.islink(folder.parent) or os.path.islink(folder) else _of_model(folder)


def states_in(folder: Path) -> list[StateFile]:
    """The states in one folder. Raises DiskError."""
    return [
        StateFile(Path(entry.path), found.st_size, found.st_mtime_ns)
        for entry, found in _entries(folder)
        if _NAME.fullmatch(entry.name) and stat.S_ISREG(found.st_mode)
    ]


def remove_states(store: Store) -> None:
    """Unlinks what `model_states` names; whoever reads one is not disturbed. Raises DiskError."""
    for file in model_states(store):
        try:
            file.path.unlink(missing_ok=True)
        except OSError as e:
            raise disk_error(e, file.path, "cannot remove") from None
    folder = state_folder(store)
    for empty in (*_folders(folder), folder, folder.parent):
        try:
            empty.rmdir()
        except OSError:
            continue  # something else is in it, or it was never there


def refuse_links(cache: Path, folder: Path) -> None:
    """Nothing is read or written where a link leads to from the cache. Raises DiskError."""
    for part in (cache / "tmp", cache / FOLDER, folder.parent, folder):
        if os.path.islink(part):
            raise DiskError(f"{part}: a link, and states never lie where it leads; put a folder in its place")


def _of_model(folder: Path) -> list[StateFile]:
    return [file for each in _folders(folder) for file in states_in(each)]


def _folders(folder: Path) -> list[Path]:
    return [
        Path(entry.path)
        for entry, found in _entries(folder)
        if _KEY.fullmatch(entry.name) and stat.S_ISDIR(found.st_mode)
    ]


def _entries(folder: Path) -> Iterator[tuple[os.DirEntry[str], os.stat_result]]:
    """What lies in a folder that is no link; what is removed meanwhile is left out."""
    if os.path.islink(folder):
        return
    try:
        with os.scandir(folder) as entries:
            for entry in sorted(entries, key=lambda entry: entry.name):
                try:
                    yield entry, entry.stat(follow_symlinks=False)
                except FileNotFoundError:
                    continue
    except (FileNotFoundError, NotADirectoryError):
        return
    except OSError as e:
        raise disk_error(e, folder, "cannot list") from None
