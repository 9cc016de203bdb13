"""Placing on real roots: what lies where, what a plan would change, and copying by it."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from deltafin.errors import Corrupt, DiskError
from deltafin.store.arena import Slot, own_slot
from deltafin.store.placement import CopyTo, Disk, Pair, expected_s, plan_copies, use_weights
from deltafin.store.roots import Root, ShardDirectory
from deltafin.store.store import Store


@dataclass(frozen=True, slots=True)
class RootPlan:
    """One directory that experts are read from, before and after."""

    path: str
    rate: float
    rate_known: bool
    writable: bool
    experts: int  # that are there
    copies: int  # that come
    copy_nbytes: int
    room: int | None  # bytes that may be written; None where nothing is written


@dataclass(frozen=True, slots=True)
class PlacePlan:
    copies: tuple[CopyTo, ...]  # `disk` counts `roots`
    roots: tuple[RootPlan, ...]
    before_s: float  # expected seconds that a token's reads of experts take
    after_s: float
    missing: int  # experts that are nowhere here
    heat_known: bool

    @property
    def nbytes(self) -> int:
        return sum(root.copy_nbytes for root in self.roots)


def plan_placement(store: Store, limit_nbytes: int | None = None) -> PlacePlan:
    """Which copies would make a token's reads shorter. Looks at records only. `tune` tells the rates before."""
    catalog, config = store.catalog, store.catalog.config
    places = _places(store)
    disks = [
        Disk(place.drive.expected_rate, _room(place) if isinstance(place, Root) and place.space else 0)
        for place in places
    ]
    holders = _holders(store, places)
    heat = store.heat.read()
    weights = use_weights(heat, config.moe_layers, config.top_k)
    nbytes = catalog.expert_nbytes
    copies = plan_copies(weights, holders, disks, nbytes, limit_nbytes)
    after = dict(holders)
    for copy in copies:
        after[copy.layer, copy.expert] = after[copy.layer, copy.expert] | {copy.disk}
    counts = [sum(copy.disk == number for copy in copies) for number in range(len(places))]
    roots = [
        RootPlan(
            path=str(place.path),
            rate=disk.rate,
            rate_known=place.drive.known_rate is not None or place.drive.rate is not None,
            writable=isinstance(place, Root) and place.writable,
            experts=sum(number in found for found in holders.values()),
            copies=counts[number],
            copy_nbytes=counts[number] * nbytes,
            room=disk.room if isinstance(place, Root) and place.writable else None,
        )
        for number, (place, disk) in enumerate(zip(places, disks, strict=True))
    ]
    return PlacePlan(
        copies=tuple(copies),
        roots=tuple(roots),
        before_s=expected_s(weights, holders, disks, nbytes, config.top_k),
        after_s=expected_s(weights, after, disks, nbytes, config.top_k),
        missing=len(config.moe_layers) * config.num_experts - len(holders),
        heat_known=bool(heat.any()),
    )


def apply_placement(store: Store, plan: PlacePlan, copied: Callable[[int], None] = lambda nbytes: None) -> int:
    """Makes the copies, each compared with its SHA-256 first; returns how many. What is there already is left.

    Interrupted, it is begun anew from a new plan. Never deletes. Raises NoSpace, DiskError, Corrupt, Missing.
    """
    paths = {str(root.path): root for root in store.roots}
    slot = own_slot(store.catalog.expert_nbytes)
    made = 0
    for copy in plan.copies:
        root = paths[plan.roots[copy.disk].path]
        made += _copy(store, (copy.layer, copy.expert), root, slot)
        copied(store.catalog.expert_nbytes)
    store.sync()
    return made


def _copy(store: Store, expert: Pair, root: Root, slot: Slot) -> bool:
    assert root.space is not None
    (span,) = store.catalog.expert_spans(expert[0], [expert[1]])
    if root.find(store.key(span)) is not None:
        return False
    if root.presence.look():  # written all the same, it would fill the disk below the mount
        raise DiskError(f"{root.path}: gone ({root.presence.gone}); bring it back and run this again")
    content = store.read(span, slot, expert=expert, keep=False).data
    known = store.known(span)
    if known is not None and hashlib.sha256(content).digest() != known.sha256:
        raise Corrupt(
            f"expert {expert[1]} of layer {expert[0]}: does not match its digest; nothing was copied; "
            "df-fetch verify finds the damaged copy"
        )
    if not root.space.take(span.nbytes):
        raise root.space.full()
    written = False
    try:
        root.publish(store.key(span), content)
        written = True
    finally:
        if written:
            root.space.wrote(span.nbytes)
        else:
            root.space.give_back(span.nbytes)
    return True


def _places(store: Store) -> list[Root | ShardDirectory]:
    """Every directory that may hold experts, each once: one that is a root and has shards is the root."""
    found: dict[Path, Root | ShardDirectory] = {}
    everything: list[Root | ShardDirectory] = [*store.roots, *store.shard_directories]
    for place in everything:
        found.setdefault(place.path, place)
    return list(found.values())


def _holders(store: Store, places: Sequence[Root | ShardDirectory]) -> dict[Pair, frozenset[int]]:
    """Where each expert lies; those that are nowhere here are not in it."""
    config, numbers = store.catalog.config, {place.path: number for number, place in enumerate(places)}
    holders: dict[Pair, frozenset[int]] = {}
    for layer in config.moe_layers:
        spans = store.catalog.expert_spans(layer, range(config.num_experts))
        for expert, span in enumerate(spans):
            if found := frozenset(numbers[copy.holder.path] for copy in store.copies(span)):
                holders[layer, expert] = found
    return holders


def _room(root: Root) -> int:
    return 0 if root.space is None or root.presence.look() else root.space.room()
