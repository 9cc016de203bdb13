"""Looking at what is on disk and removing it: `df-fetch status` and `df-fetch rm`."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field

import numpy as np
import numpy.typing as npt

from deltafin.indexer import disk_error
from deltafin.store.objectlog import ObjectEntry
from deltafin.store.packcheck import PackStatus, pack_status
from deltafin.store.roots import Root
from deltafin.store.selection import Item
from deltafin.store.space import free_nbytes
from deltafin.store.spantable import SPINE, span_table
from deltafin.store.states import model_states
from deltafin.store.store import Store
from deltafin.store.verifystate import read_result

_NAME = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class RootStatus:
    """What one root holds, of whatever model."""

    path: str
    objects: int
    nbytes: int
    free_nbytes: int
    writable: bool
    budget: int | None
    room: int | None  # bytes that may still be written; None where nothing is


@dataclass(slots=True)
class Status:
    """How much of a model is on this machine. Bytes of spans, by whether they are here.

    `proven` counts those of them whose digest a published one or a manifest confirms; `unproven` the others.
    """

    model: str
    identity: str
    spine_nbytes: int = 0
    spine_present_nbytes: int = 0
    experts: int = 0
    experts_present: int = 0
    expert_nbytes: int = 0
    layers_whole: int = 0
    layers: int = 0
    proven_spans: int = 0
    proven_nbytes: int = 0
    unproven_spans: int = 0
    unproven_nbytes: int = 0
    cache_dir: str = ""
    cache_objects: int = 0
    cache_nbytes: int = 0
    free_nbytes: int = 0
    roots: list[RootStatus] = field(default_factory=list)
    shard_directories: list[str] = field(default_factory=list)
    packs: list[PackStatus] = field(default_factory=list)
    pinned_experts: int = 0
    states: int = 0  # kept beginnings of texts, in the cache
    states_nbytes: int = 0
    last_verify: dict[str, object] | None = None  # verify.json

    def as_json(self) -> dict[str, object]:
        return asdict(self)


def read_status(store: Store) -> Status:
    """Looks at records and names, and at no object: what has its name has its length, but for damage.

    Within a second for 82,432 experts, which asking for each file would not be.
    """
    catalog = store.catalog
    status = Status(
        store.model, catalog.identity, expert_nbytes=catalog.expert_nbytes, layers=catalog.config.num_layers
    )
    listed = [_object_names(root) for root in store.roots]
    table = span_table(catalog)
    here, proven = _presence(store, listed, table.keys(store.shard_ids))
    in_place = [any(d.has(number) for d in store.shard_directories) for number in range(len(catalog.shards))]
    here |= np.array(in_place, bool)[table.shard]
    spine = table.expert == SPINE
    status.spine_nbytes = int(table.nbytes[spine].sum())
    status.spine_present_nbytes = int(table.nbytes[spine & here].sum())
    status.experts, status.experts_present = int((~spine).sum()), int((~spine & here).sum())
    lacking = set(table.layer[~here].tolist())
    status.layers_whole = sum(layer not in lacking for layer in range(status.layers))
    status.proven_spans, status.proven_nbytes = int((here & proven).sum()), int(table.nbytes[here & proven].sum())
    status.unproven_spans, status.unproven_nbytes = int((here & ~proven).sum()), int(table.nbytes[here & ~proven].sum())
    status.roots = [_root_status(root, names) for root, names in zip(store.roots, listed, strict=True)]
    cache = status.roots[0]
    status.cache_dir, status.cache_objects, status.cache_nbytes = cache.path, cache.objects, cache.nbytes
    status.free_nbytes = cache.free_nbytes
    shards = range(len(catalog.shards))
    status.shard_directories = [str(d.path) for d in store.shard_directories if any(map(d.has, shards))]
    status.packs = pack_status(store)
    status.pinned_experts = len(store.pins.read())
    states = model_states(store)
    status.states, status.states_nbytes = len(states), sum(file.nbytes for file in states)
    status.last_verify = read_result(store.roots[0].path)
    return status


def _presence(
    store: Store, listed: list[set[str]], keys: list[bytes]
) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.bool_]]:
    """For each span whether an object of it is here, and whether its digest is proven [spans]."""
    here = np.zeros(len(keys), bool)
    found = [list(map(root.log.entries.get, keys)) for root in store.roots]
    proofs = {
        row: entry.sha256
        for entries in found
        for row, entry in enumerate(entries)
        if entry is not None and entry.proven
    }
    for entries, names in zip(found, listed, strict=True):
        here |= np.array(
            [
                # What a proof contradicts is never read, so it is not here.
                entry is not None and entry.sha256.hex() in names and proofs.get(row, entry.sha256) == entry.sha256
                for row, entry in enumerate(entries)
            ],
            bool,
        )
    return here, np.array([row in proofs for row in range(len(keys))], bool)


def removable(store: Store, items: Iterable[Item]) -> list[tuple[Root, ObjectEntry]]:
    """The objects that hold these spans and no others, in every root that is written to; each once a root."""
    chosen = {store.key(item.span) for item in items}
    doomed: dict[tuple[Root, bytes], ObjectEntry] = {}
    for root in store.writable_roots:
        kept = {entry.sha256 for key, entry in root.log.entries.items() if key not in chosen and root.find(key)}
        for key in chosen:
            if (entry := root.find(key)) is not None and entry.sha256 not in kept:
                doomed[root, entry.sha256] = entry
    return [(root, entry) for (root, _), entry in doomed.items()]


def remove(store: Store, items: Iterable[Item]) -> None:
    """Unlinks the objects that `removable` names, and forgets the digests of all these spans, but for proven ones.

    Forgotten, because a digest that was learnt from an altered transfer would refuse the right bytes for ever.
    """
    items = list(items)
    # In this order: of an object that is gone a record is harmless, but one without a record nothing would ever remove.
    for root, entry in removable(store, items):
        root.remove(entry)
    for root in store.writable_roots:
        try:
            for item in items:
                root.log.forget(store.key(item.span))
        except OSError as e:
            raise disk_error(e, root.log.path) from None


def _root_status(root: Root, names: set[str]) -> RootStatus:
    sizes = {entry.sha256.hex(): entry.nbytes for entry in root.log.entries.values()}
    logged = names & sizes.keys()
    others = [name for name in names - logged if _NAME.fullmatch(name)]
    nbytes = sum(map(sizes.__getitem__, logged)) + sum(_size(root, name) for name in others)
    space = root.space
    return RootStatus(
        path=str(root.path),
        objects=len(logged) + len(others),
        nbytes=nbytes,
        free_nbytes=free_nbytes(root.path),
        writable=root.writable,
        budget=None if space is None else space.limits.budget,
        room=None if space is None else space.room(),
    )


def _object_names(root: Root) -> set[str]:
    """The names of all files that lie where an object of that name would."""
    names: set[str] = set()
    try:
        for folder in os.scandir(root.path / "objects"):
            if len(folder.name) == 2 and folder.is_dir():
                names.update(
                    [
                        entry.name
                        for entry in os.scandir(folder.path)
                        if entry.name.startswith(folder.name) and entry.is_file(follow_symlinks=False)
                    ]
                )
    except FileNotFoundError:
        return names
    except OSError as e:
        raise disk_error(e, root.path / "objects", "cannot list") from None
    return names


def _size(root: Root, name: str) -> int:
    try:
        return os.stat(root.path / "objects" / name[:2] / name).st_size
    except OSError:
        return 0
