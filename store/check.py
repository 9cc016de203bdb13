"""Looking at what is on disk: `df-fetch status` and `df-fetch verify`."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path

from deltafin.errors import DeltafinError
from deltafin.indexer import disk_error
from deltafin.store.bulk import free_nbytes
from deltafin.store.objectlog import ObjectEntry
from deltafin.store.packcheck import PackStatus, pack_status, verify_packs
from deltafin.store.packs import pack_files
from deltafin.store.roots import Root
from deltafin.store.selection import Item, all_items
from deltafin.store.store import Store

_READ_NBYTES = 4 << 20
_VERIFY_THREADS = 4


@dataclass(slots=True)
class Status:
    """How much of a model is on this machine. Bytes of spans, by whether they are here."""

    model: str
    identity: str
    spine_nbytes: int = 0
    spine_present_nbytes: int = 0
    experts: int = 0
    experts_present: int = 0
    expert_nbytes: int = 0
    layers_whole: int = 0
    layers: int = 0
    cache_dir: str = ""
    cache_objects: int = 0
    cache_nbytes: int = 0
    free_nbytes: int = 0
    shard_directories: list[str] = field(default_factory=list)
    packs: list[PackStatus] = field(default_factory=list)

    def as_json(self) -> dict[str, object]:
        return asdict(self)


def read_status(store: Store) -> Status:
    catalog = store.catalog
    status = Status(
        store.model, catalog.identity, expert_nbytes=catalog.expert_nbytes, layers=catalog.config.num_layers
    )
    lacking: set[int] = set()
    for item in all_items(catalog):
        here = store.is_local(item.span)
        if not here:
            lacking.add(item.layer)
        if item.expert is None:
            status.spine_nbytes += item.span.nbytes
            status.spine_present_nbytes += item.span.nbytes * here
        else:
            status.experts += 1
            status.experts_present += here
    status.layers_whole = sum(layer not in lacking for layer in range(status.layers))
    root = store.roots[0]
    for _, nbytes in root.object_files():
        status.cache_objects += 1
        status.cache_nbytes += nbytes
    status.cache_dir = str(root.path)
    status.free_nbytes = free_nbytes(root.path)
    status.shard_directories = [str(d.path) for d in store.shard_directories]
    status.packs = pack_status(store)
    return status


@dataclass(slots=True)
class VerifyReport:
    """What `verify` found. `damaged` names each bad object, shard or pack; everything else is whole."""

    whole: int = 0
    whole_nbytes: int = 0
    damaged: list[str] = field(default_factory=list)
    vanished: int = 0  # logged, but the file is gone: a miss, no fault
    unknown: int = 0  # files among the objects that no record names
    bad_records: int = 0  # damaged records in object logs, skipped
    unproven_shards: int = 0  # original shards without a published digest to compare with
    packs: int = 0  # whole ones
    packs_nbytes: int = 0

    def as_json(self) -> dict[str, object]:
        return asdict(self)


def verify(store: Store, progress: Callable[[int], None] | None = None) -> VerifyReport:
    """Hashes every object and pack of every root, whichever model it is of, and local shards with a published digest.

    Damaged objects and packs of the cache are moved to its `quarantine` folder, so that they are fetched again
    when next needed. `progress` is told bytes as they are read.
    """
    report = VerifyReport()
    labels = {store.key(item.span): item.label for item in all_items(store.catalog)}
    for root in store.roots:
        _verify_root(root, labels, report, progress)
    for directory in store.shard_directories:
        for number, shard in enumerate(store.catalog.shards):
            if not directory.has(number):
                if directory.required:
                    report.damaged.append(f"{directory.shard_path(number)}: missing")
                continue
            if shard.sha256 is None:
                report.unproven_shards += 1
            elif _file_sha256(directory.shard_path(number), progress) == shard.sha256:
                report.whole += 1
                report.whole_nbytes += shard.nbytes
            else:
                report.damaged.append(f"{directory.shard_path(number)}: SHA-256 differs from the published one")
    packs = verify_packs(store, progress)
    report.packs, report.packs_nbytes = packs.whole, packs.whole_nbytes
    report.damaged += packs.damaged
    return report


def nbytes_to_verify(store: Store) -> int:
    objects = sum(nbytes for root in store.roots for _, nbytes in root.object_files())
    shards = sum(
        shard.nbytes
        for directory in store.shard_directories
        for number, shard in enumerate(store.catalog.shards)
        if shard.sha256 is not None and directory.has(number)
    )
    packs = sum(nbytes for root in store.roots for _, nbytes in pack_files(root.path))
    return objects + shards + packs


def removable(store: Store, items: Iterable[Item]) -> list[ObjectEntry]:
    """The cache's objects that hold these spans and no others; each object once."""
    log = store.roots[0].log.entries
    chosen = {store.key(item.span) for item in items}
    kept = {entry.sha256 for key, entry in log.items() if key not in chosen and store.roots[0].find(key)}
    doomed = {
        entry.sha256: entry
        for key in chosen
        if (entry := store.roots[0].find(key)) is not None and entry.sha256 not in kept
    }
    return list(doomed.values())


def remove(store: Store, items: Iterable[Item]) -> None:
    """Unlinks the objects that `removable` names, and forgets the digests of all these spans.

    Forgotten, because a digest that was learnt from an altered transfer would refuse the right bytes for ever.
    """
    root, items = store.roots[0], list(items)
    doomed = removable(store, items)
    try:
        for item in items:
            root.log.forget(store.key(item.span))
    except OSError as e:
        raise disk_error(e, root.log.path) from None
    for entry in doomed:
        root.remove(entry)


def _verify_root(
    root: Root, labels: dict[bytes, str], report: VerifyReport, progress: Callable[[int], None] | None
) -> None:
    owners: dict[str, tuple[ObjectEntry, str]] = {}
    report.bad_records += root.log.bad_records
    for key, entry in root.log.entries.items():
        owners[entry.sha256.hex()] = (entry, labels.get(key, "a span of another model"))
    files = dict(root.object_files())
    report.vanished += sum(name not in files for name in owners)

    def one(name: str) -> tuple[str, str | None]:
        path = root.path / "objects" / name[:2] / name
        try:
            got = _file_sha256(path, progress)
        except DeltafinError as e:
            return name, str(e)
        if got == name:
            return name, None
        label = owners[name][1] if name in owners else "named by no record"
        return name, f"{path}: {label}: content has SHA-256 {got[:16]}.., {files[name]} bytes"

    with ThreadPoolExecutor(_VERIFY_THREADS, "verify") as pool:
        for name, complaint in pool.map(one, files):
            if complaint is None:
                report.whole += 1
                report.whole_nbytes += files[name]
                report.unknown += name not in owners
                continue
            if not (root.path / "objects" / name[:2] / name).exists():
                report.vanished += name in owners  # removed while it was being looked at
                continue
            if root.writable:
                entry = owners[name][0] if name in owners else ObjectEntry(bytes.fromhex(name), b"", files[name])
                complaint += f"; moved to {root.quarantine(entry)}"
            report.damaged.append(complaint)


def _file_sha256(path: Path, progress: Callable[[int], None] | None) -> str:
    digest = hashlib.sha256()
    try:
        with open(path, "rb") as f:
            while block := f.read(_READ_NBYTES):
                digest.update(block)
                if progress is not None:
                    progress(len(block))
    except OSError as e:
        raise disk_error(e, path, "cannot read") from None
    return digest.hexdigest()
