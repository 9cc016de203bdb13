"""How many reads at once suit each drive: measured once on the model's own bytes, and remembered."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

from deltafin.errors import DeltafinError
from deltafin.store.arena import Arena, slot_nbytes
from deltafin.store.drive import DEPTHS, DIRECT_FROM_NBYTES, DepthReport, Drive, measure_depth
from deltafin.store.drivestate import STATE_FILE, KnownDrive, load_drive, store_drive
from deltafin.store.store import Store

log = logging.getLogger(__name__)

# Fewer experts than this of one drive say little, and are soon read anyway.
LEAST_SPANS = 64
_MOST_SPANS = 2048
_PROBE_LAYERS = 8

Read = tuple[Path, int, int]  # file, offset, bytes


def tune(store: Store, slots: int) -> None:
    """Sets the depth of every drive that holds a good part of a large model, and tells it its rate.

    Both are measured the first time that there are slots enough to try every depth.
    """
    if store.catalog.expert_nbytes < DIRECT_FROM_NBYTES:
        return
    state_file = store.roots[0].path / STATE_FILE
    for drive, reads in _reads_by_drive(store):
        if drive.rate is not None or len(reads) < LEAST_SPANS:
            continue
        try:
            known = load_drive(state_file, drive.path)
            if slots >= max(DEPTHS) and (known is None or known.rate is None):
                known = _measured(drive, reads, store.catalog.expert_nbytes, slots, state_file) or known
            if known is not None:
                drive.set_depth(known.depth)
                drive.known_rate = known.rate
        except DeltafinError as e:
            log.warning("%s; reading %d at once", e, drive.depth)


def _measured(drive: Drive, reads: list[Read], nbytes: int, slots: int, state_file: Path) -> KnownDrive | None:
    """Measures a drive and notes it; None where it cannot be known."""
    report = _measure(drive, reads, nbytes, slots)
    if report is None:
        return None
    store_drive(state_file, drive.path, report.depth, report.rates[report.depth])
    log.info("%s: %d reads at once suit this drive; noted in %s", drive.path, report.depth, state_file)
    return load_drive(state_file, drive.path)


def raw_rate(store: Store) -> float | None:
    """Bytes a second at which the drive with the most of a model brings whole experts, at its best depth.

    None where it cannot be known: through the page cache, or with nothing here.
    """
    if store.catalog.expert_nbytes < DIRECT_FROM_NBYTES:
        return None
    drive, reads = max(_reads_by_drive(store), key=lambda pair: len(pair[1]))
    report = _measure(drive, reads, store.catalog.expert_nbytes, max(DEPTHS)) if reads else None
    return None if report is None else max(report.rates.values())


def _measure(drive: Drive, reads: list[Read], nbytes: int, slots: int) -> DepthReport | None:
    size = slot_nbytes(nbytes)
    arena = Arena(slots * size)
    return measure_depth(drive, reads, [arena.take(size) for _ in range(slots)])


def _reads_by_drive(store: Store) -> list[tuple[Drive, list[Read]]]:
    """Some experts of each drive, from the first layers on, the files of objects each once."""
    found: dict[Drive, list[Read]] = {drive: [] for drive in store.drives}
    for drive, read in _experts(store):
        if len(found[drive]) < _MOST_SPANS and read not in found[drive][-64:]:
            found[drive].append(read)
    return list(found.items())


def _experts(store: Store) -> Iterator[tuple[Drive, Read]]:
    config = store.catalog.config
    for layer in list(config.moe_layers)[:_PROBE_LAYERS]:
        for span in store.catalog.expert_spans(layer, range(config.num_experts)):
            key = store.key(span)
            for root in store.roots:
                if (entry := root.find(key)) is not None:
                    yield root.drive, (root.object_path(entry), 0, entry.nbytes)
            for directory in store.shard_directories:
                if directory.has(span.shard):
                    yield directory.drive, (directory.shard_path(span.shard), span.offset, span.nbytes)
