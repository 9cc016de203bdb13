"""Proving what was fetched: a shard's published SHA-256, out of its spans as they land or lie here.

Digests learnt from the network say only that bytes did not change since. A shard whose bytes, header and
ignored tensors included, hash to what its publisher says makes the digests of all its spans proven.
"""

from __future__ import annotations

import hashlib
import logging
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from types import TracebackType
from typing import Self

import xxhash

from deltafin.errors import Corrupt, DeltafinError
from deltafin.indexer import Span, disk_error
from deltafin.store.arena import Slot, own_slot
from deltafin.store.bulk import fetch
from deltafin.store.objectlog import ObjectEntry, Record
from deltafin.store.selection import Item
from deltafin.store.spantable import SPINE, SpanTable, span_table
from deltafin.store.store import Store

log = logging.getLogger(__name__)

# Spans that have landed before it was their turn wait in memory, up to so many; others are read from disk again.
_HELD = 8

Progress = Callable[[int], None]


@dataclass(frozen=True, slots=True)
class Verdict:
    """What hashing a whole shard came to."""

    shard: int
    proven: bool
    spans: int


class Prover:
    """Hashes shards in file order beside a fetch, in a thread of its own; `take` is told what lands.

    A shard is looked at if its SHA-256 is published, something of it is unproven, and all of it is an object here or
    among `coming`. What agrees is recorded as proven in the cache's log at once.
    """

    def __init__(self, store: Store, coming: Iterable[Span] = (), shards: Iterable[int] | None = None) -> None:
        self._store = store
        self._coming = set(coming)
        self._held: dict[Span, memoryview] = {}
        self._changed = threading.Condition()
        self._ended = self._stopped = False
        self._left_nbytes = 0
        self._progress: Progress | None = None
        self._verdicts: list[Verdict] = []
        self._failure: BaseException | None = None
        table = span_table(store.catalog).with_rest(store.catalog)
        numbers = range(len(store.catalog.shards)) if shards is None else shards
        self._pieces = {n: pieces for n in numbers if (pieces := self._due(table.of_shard(n), n))}
        self._left_nbytes = sum(span.nbytes for pieces in self._pieces.values() for span in pieces)
        self._thread = threading.Thread(target=self._run, name="prove", daemon=True)

    def _due(self, table: SpanTable, number: int) -> list[Span]:
        """The pieces of a shard that is to be proven; none if it cannot or need not be."""
        store = self._store
        if store.catalog.shards[number].sha256 is None:
            return []
        spans = [table.span(row) for row in range(len(table))]
        known = [store.known(span) for span in spans]
        if all(entry is not None and entry.proven for entry in known):
            return []
        if all(span in self._coming or store.object_of(span) is not None for span in spans):
            return spans
        return []

    @property
    def left_nbytes(self) -> int:
        """Bytes that are still to be hashed."""
        return self._left_nbytes

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._changed:
            self._stopped = True
            self._changed.notify_all()
        self._thread.join()

    def take(self, span: Span, view: memoryview) -> bool:
        """Notes that a span is an object now; True if its memory is kept, and must not be written to any more."""
        with self._changed:
            if span not in self._coming:
                return False
            self._coming.discard(span)
            # Of the shard at hand or the next: what lands early of a later one would keep the place of all others.
            keep = span.shard in islice(self._pieces, 2) and len(self._held) < _HELD
            if keep:
                self._held[span] = view
            self._changed.notify_all()
            return keep

    def finish(self, progress: Progress | None = None) -> list[Verdict]:
        """Waits until every shard that is complete has been hashed; what has not landed by now will not.

        Raises NoMemory.
        """
        with self._changed:
            self._ended, self._progress = True, progress
            self._changed.notify_all()
        while self._thread.is_alive():
            self._thread.join(0.2)  # in short waits: an interrupt is to be noticed
        if self._failure is not None:
            raise self._failure
        return self._verdicts

    # ---- the thread ----------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            slot = own_slot(max((span.nbytes for pieces in self._pieces.values() for span in pieces), default=1))
            for number, spans in list(self._pieces.items()):
                if (verdict := self._hash(number, spans, slot)) is not None:
                    self._verdicts.append(verdict)
                if self._stopped:
                    return
                self._forget(number)
        except BaseException as e:
            self._failure = e

    def _hash(self, number: int, spans: Sequence[Span], slot: Slot) -> Verdict | None:
        """None if a piece is missing, or cannot be read."""
        shard = self._store.catalog.shards[number]
        digest, entries = hashlib.sha256(), list[ObjectEntry]()
        for span in spans:
            if not self._landed(span):
                return None
            if (found := self._store.object_of(span)) is None:
                return None  # removed meanwhile
            root, entry = found
            content = self._held.pop(span, None)
            try:
                if content is None:
                    content = root.read(entry, slot).data
            except DeltafinError as e:
                log.warning("%s cannot be proven: %s", shard.name, e)
                return None
            # The record that is to be proven must be of these very bytes.
            if xxhash.xxh3_128(content).digest() != entry.xxh3:
                log.warning("%s cannot be proven: bytes at %d are not those on record", shard.name, span.offset)
                return None
            digest.update(content)
            entries.append(entry)
            self._left_nbytes -= span.nbytes
            if self._progress is not None:
                self._progress(span.nbytes)
        if (got := digest.hexdigest()) != shard.sha256:
            log.warning(
                "%s: the bytes here have SHA-256 %s.., published is %s..: some of them are wrong",
                *(shard.name, got[:16], str(shard.sha256)[:16]),
            )
            return Verdict(number, False, len(spans))
        try:
            record_proven(self._store, zip(spans, entries, strict=True))
        except DeltafinError as e:
            log.warning("%s is proven, but that cannot be recorded: %s", shard.name, e)
            return None
        log.info("%s: proven, its bytes have the published SHA-256", shard.name)
        return Verdict(number, True, len(spans))

    def _forget(self, number: int) -> None:
        """Lets go of a shard that is done with, also of what is held of it and was not needed."""
        with self._changed:
            del self._pieces[number]
            for span in [span for span in self._held if span.shard == number]:
                del self._held[span]

    def _landed(self, span: Span) -> bool:
        with self._changed:
            while span in self._coming and not self._ended and not self._stopped:
                self._changed.wait()
            return span not in self._coming and not self._stopped


def record_proven(store: Store, found: Iterable[tuple[Span, ObjectEntry]]) -> int:
    """Records digests as proven in the cache's log, in one write; returns how many are new.

    Raises NoSpace or DiskError.
    """
    root = store.roots[0]
    records: list[Record] = []
    for span, entry in found:
        key = store.key(span)
        own = root.log.entries.get(key)
        held = own is not None and own.held and own.sha256 == entry.sha256
        records.append((key, entry._replace(proven=True, held=held)))
    try:
        added = root.log.append_all(records)
    except OSError as e:
        raise disk_error(e, root.log.path) from None
    root.log.sync()
    return added


# ---- when a shard is not what its publisher says ------------------------------------------------------------


def settle(store: Store, verdict: Verdict, progress: Progress | None = None) -> None:
    """Deals with a shard that differs: everything unproven of it is fetched once more, and what differs is replaced.

    If it is still not the published one, nothing unproven of it is believed any longer: its objects go to
    quarantine, and Corrupt names the shard. Raises NetworkError and DiskError, too.
    """
    shard = store.catalog.shards[verdict.shard]
    doubtful = _unproven(store, verdict.shard)
    before = {item: store.known(item.span) for item in doubtful}
    log.warning("%s: fetching its %d unproven spans once more", shard.name, len(doubtful))

    def landed(item: Item) -> None:
        if progress is not None:
            progress(item.span.nbytes)

    fetch(store, doubtful, landed, anew=True)
    changed: list[ObjectEntry] = []
    for item, old in before.items():
        now = store.known(item.span)
        if old is not None and now is not None and now.sha256 != old.sha256:
            changed.append(old)
            log.warning("%s: %s came otherwise this time; the first is in quarantine", shard.name, item.label)
    set_aside(store, changed)
    with Prover(store, shards=[verdict.shard]) as prover:
        verdicts = prover.finish()
    if verdicts and verdicts[0].proven:
        return
    forgotten: list[ObjectEntry] = []
    for item in doubtful:
        key = store.key(item.span)
        for root in store.writable_roots:
            entry = root.log.entries.get(key)
            if entry is not None and not entry.proven:
                root.log.forget(key)
                forgotten.append(entry)
    set_aside(store, forgotten)
    raise Corrupt(
        f"{shard.name}: its bytes do not have the published SHA-256 ({str(shard.sha256)[:16]}..), although every span "
        f"was fetched twice ({len(changed)} came differently); its unproven objects were moved to quarantine; is the "
        "server or a proxy at fault? Run the same command again, or fetch from another place"
    )


def settle_all(store: Store, verdicts: Iterable[Verdict], progress: Progress | None = None) -> None:
    """`settle` for every shard that differs; raises Corrupt for the first that cannot be had once all were tried."""
    failure: Corrupt | None = None
    for verdict in verdicts:
        if verdict.proven:
            continue
        try:
            settle(store, verdict, progress)
        except Corrupt as e:
            failure = failure or e
    if failure is not None:
        raise failure


def set_aside(store: Store, doubted: Sequence[ObjectEntry]) -> None:
    """Moves objects to quarantine, wherever they may be written, but for those that a span on record still is."""
    if not doubted:
        return
    for root in store.writable_roots:
        still = {entry.sha256 for entry in root.log.entries.values()}
        for entry in doubted:
            if entry.sha256 not in still and root.has(entry):
                root.quarantine(entry)


def _unproven(store: Store, number: int) -> list[Item]:
    table = span_table(store.catalog).with_rest(store.catalog).of_shard(number)
    items = []
    for row in range(len(table)):
        span = table.span(row)
        known = store.known(span)
        if known is None or not known.proven:
            expert = int(table.expert[row])
            items.append(Item(span, int(table.layer[row]), None if expert == SPINE else expert))
    return items
