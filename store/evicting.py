"""Evicting on request: `df-fetch evict`."""

from __future__ import annotations

from collections.abc import Iterable

from deltafin.errors import BadRequest
from deltafin.store.eviction import Candidate, candidates, coldest, evict
from deltafin.store.roots import Root
from deltafin.store.store import Store


def plan_eviction(store: Store, root: Root, most_nbytes: int) -> tuple[list[Candidate], int]:
    """What must go, coldest first, so that a root holds at most so many bytes; and what it holds now.

    Raises BadRequest where that cannot be, DiskError for damaged pins.
    """
    assert root.space is not None
    held = root.space.used_nbytes
    doomed: list[Candidate] = []
    excess = held - most_nbytes
    for candidate in coldest(candidates(root, store.key, store.catalog, store.pins.read()), store.heat.read()):
        if excess <= 0:
            break
        if root.has(candidate.entry):
            doomed.append(candidate)
            excess -= candidate.entry.nbytes
    if excess > 0:
        raise BadRequest(
            f"{root.path}: {most_nbytes + excess} bytes are the spine, pinned, or not of {store.model}; "
            "that is the least for --to (df-fetch unpin, df-fetch rm)"
        )
    return doomed, held


def evict_objects(root: Root, doomed: Iterable[Candidate]) -> None:
    """Unlinks them; what has gone meanwhile is no error. Raises NoSpace or DiskError."""
    for candidate in doomed:
        evict(root, candidate)
