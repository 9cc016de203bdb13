"""Spans that are on this machine: objects in roots, and original shards read in place."""

from __future__ import annotations

import errno
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import xxhash

from deltafin.cext import _io
from deltafin.errors import Corrupt, DeltafinError, DiskError
from deltafin.indexer import Span
from deltafin.store.arena import Slot
from deltafin.store.balance import Place, Want, plan_reads
from deltafin.store.digests import Digests
from deltafin.store.drive import Drive
from deltafin.store.objectlog import ObjectEntry
from deltafin.store.roots import Root, ShardDirectory
from deltafin.store.stats import StoreStats

log = logging.getLogger(__name__)

Holder = Root | ShardDirectory
_Read = TypeVar("_Read", Slot, memoryview)


@dataclass(frozen=True, slots=True)
class Copy:
    """A span in one place, by its records. `entry` is that of an object; None is a part of a shard."""

    holder: Holder
    span: Span
    entry: ObjectEntry | None

    @property
    def drive(self) -> Drive:
        return self.holder.drive

    @property
    def offset(self) -> int:
        """Where in its file it begins."""
        return self.span.offset if self.entry is None else 0

    def read_piece(self, begin: int, end: int, slot: Slot) -> None:
        """Bytes `begin` to `end` of the span to where they belong in `slot`, compared with nothing. Raises DiskError.

        Other pieces may be on their way to the same slot: `begin` lies on a page of the file, and so does `end`,
        unless they are the span's.
        """
        holder = self.holder
        if isinstance(holder, Root):
            assert self.entry is not None
            path = holder.object_path(self.entry)
        else:
            path = holder.shard_path(self.span.shard)
        at = self.offset % _io.PAGE + begin if begin else 0
        self.drive.read(path, self.offset + begin, end - begin, slot[at:])


@dataclass(frozen=True, slots=True)
class Piece:
    """Bytes `begin` to `end` of a span, from one copy."""

    copy: Copy
    begin: int
    end: int


class Local:
    """Reads spans from whatever holds them here: objects first, then shards. Thread-safe.

    A copy that cannot be read or is damaged is passed over, with a line for the first of each directory; a directory
    that is gone is left alone from then on, with a line.
    """

    def __init__(
        self, roots: Sequence[Root], directories: Sequence[ShardDirectory], digests: Digests, stats: StoreStats
    ) -> None:
        self.roots = tuple(roots)
        self.directories = tuple(directories)
        self._holders: tuple[Holder, ...] = (*self.roots, *self.directories)
        self._digests = digests
        self._stats = stats
        self._damaged: dict[tuple[Holder, bytes], Corrupt] = {}  # copies that could not be moved aside
        self._lost: set[tuple[Holder, bytes]] = set()  # that are on record as held, and were not there
        self._said: set[object] = set()
        self._lock = threading.Lock()  # of what was said

    @property
    def drives(self) -> tuple[Drive, ...]:
        return tuple(dict.fromkeys(holder.drive for holder in self._holders))

    def has(self, span: Span) -> bool:
        """Whether a span is here, as an object or in an original shard."""
        return self.object_of(span) is not None or any(
            d.has(span.shard) for d in self.directories if d.presence.gone is None
        )

    def object_of(self, span: Span) -> tuple[Root, ObjectEntry] | None:
        """The object that a span would be read from: the first in full length that nothing proven contradicts."""
        key = self._digests.key(span)
        for root in self.roots:
            if root.presence.gone is not None or (entry := root.find(key)) is None:
                continue
            if not self._digests.disproves(span, entry):
                return root, entry
        return None

    def was_in(self, span: Span) -> list[Path]:
        """Directories that have gone and had a span."""
        key = self._digests.key(span)
        had = [root.path for root in self.roots if root.presence.gone is not None and key in root.log.entries] + [
            d.path for d in self.directories if d.presence.gone is not None and d.had(span.shard)
        ]
        return list(dict.fromkeys(had))

    # ---- where to read from ----------------------------------------------------------------------------

    def copies(self, span: Span) -> list[Copy]:
        """Where a span is by the records: asking a busy disk about files would hold up the caller.

        All of one content: if roots contradict each other the first one counts, and no part of another is mixed in.
        """
        key = self._digests.key(span)
        found: list[Copy] = []
        for root in self.roots:
            entry = root.log.entries.get(key)
            usable = root.presence.gone is None and not ((root, key) in self._damaged or (root, key) in self._lost)
            if entry is not None and entry.held and usable and not self._digests.disproves(span, entry):
                first = found[0].entry if found else None
                if first is None or first.sha256 == entry.sha256:
                    found.append(Copy(root, span, entry))
        for directory in self.directories:
            usable = directory.presence.gone is None and (directory, key) not in self._damaged
            if usable and directory.has(span.shard):
                found.append(Copy(directory, span, None))
        return found

    def soonest(self, span: Span, *, urgent: bool) -> Copy | None:
        """The copy whose drive would have read all of a span first, were it asked now."""
        copies = self.copies(span)
        if len(copies) < 2:
            return copies[0] if copies else None
        return min(copies, key=lambda c: c.drive.queued_s(urgent=urgent) + span.nbytes / c.drive.expected_rate)

    def plan(self, spans: Sequence[Span]) -> Iterator[tuple[int, tuple[Piece, ...]]]:
        """Each span's number and where to read it, in the order in which to begin; nothing where it is not here."""
        copies = [self.copies(span) for span in spans]
        drives = list(dict.fromkeys(copy.drive for found in copies for copy in found))
        if len(drives) < 2:
            for number, (span, found) in enumerate(zip(spans, copies, strict=True)):
                yield number, tuple(Piece(copy, 0, span.nbytes) for copy in found[:1])
            return
        numbers = {drive: number for number, drive in enumerate(drives)}
        here, wants = [], list[Want]()
        where: list[dict[int, Copy]] = []
        for number, (span, found) in enumerate(zip(spans, copies, strict=True)):
            if not found:
                yield number, ()  # the line is slower than any drive
                continue
            by_drive: dict[int, Copy] = {}
            for copy in found:
                by_drive.setdefault(numbers[copy.drive], copy)
            here.append(number)
            where.append(by_drive)
            wants.append(Want(span.nbytes, tuple(Place(d, c.offset % _io.PAGE) for d, c in by_drive.items())))
        plan = plan_reads(wants, [d.queued_s(urgent=True) for d in drives], [d.expected_rate for d in drives])
        for want in plan.order:
            yield here[want], tuple(Piece(where[want][p.drive], p.begin, p.end) for p in plan.parts[want])

    # ---- reading ---------------------------------------------------------------------------------------

    def read(self, span: Span, slot: Slot, *, last_resort: bool, first: Copy | None = None) -> Slot | None:
        """A whole span as a part of `slot`; None if nothing has it. `first` is tried before all others.

        Where every copy failed that is None as well, but the `last_resort` raises what the last one failed with:
        Corrupt or DiskError.
        """
        known = self._digests.known(span)
        return self._first(span, lambda r, e: r.read(e, slot), lambda d: d.read(span, slot, known), last_resort, first)

    def read_part(self, span: Span, at: int, view: memoryview, *, last_resort: bool) -> bool:
        """Fills `view` with the bytes of a span from `at` on; False and errors as `read`'s None."""

        def of_object(root: Root, entry: ObjectEntry) -> memoryview:
            root.read_part(entry, at, view)
            return view

        def of_shard(directory: ShardDirectory) -> memoryview:
            directory.read_part(span, at, view, self._digests.known(span))
            return view

        return self._first(span, of_object, of_shard, last_resort, None) is not None

    def joined(self, span: Span, pieces: Sequence[Piece], slot: Slot) -> Slot | None:
        """A span whose pieces are all in `slot`; None if they contradict a digest: the damaged copy was looked for."""
        start = pieces[0].copy.offset % _io.PAGE
        content = slot[start : start + span.nbytes]
        expected = {entry.xxh3 for piece in pieces if (entry := self._unchecked(piece.copy)) is not None}
        if expected and expected != {xxhash.xxh3_128(content.data).digest()}:
            for piece in pieces:
                if isinstance(piece.copy.holder, Root) and piece.copy.entry is not None:
                    piece.copy.holder.doubt(piece.copy.entry)
            self.examine(span, pieces, slot)
            return None
        kind = "shard" if pieces[0].copy.entry is None else "object"
        self._stats.add(**{f"{kind}_spans": 1, f"{kind}_nbytes": span.nbytes, "split_spans": 1})
        for piece in pieces:
            piece.copy.holder.presence.worked()
        return content

    def _unchecked(self, copy: Copy) -> ObjectEntry | None:
        """What a copy of which a part was read must be compared with; None if all of it was compared before."""
        if isinstance(copy.holder, Root) and copy.entry is not None:
            return None if copy.holder.is_checked(copy.entry) else copy.entry
        known = self._digests.known(copy.span)
        if known is None or (isinstance(copy.holder, ShardDirectory) and copy.holder.is_checked(copy.span, known)):
            return None
        return known

    def examine(self, span: Span, pieces: Sequence[Piece], slot: Slot) -> None:
        """Reads the copies that pieces came from whole, so that a damaged one is found and passed over from now on."""
        for piece in pieces:
            self.read(span, slot, last_resort=False, first=piece.copy)

    def failed_piece(self, copy: Copy, error: DiskError) -> None:
        """As `failed`, for a part. A copy that is not there is planned with no more: it would be for every token."""
        if error.errno == errno.ENOENT:
            self._lost.add((copy.holder, self._digests.key(copy.span)))
        self.failed(copy.holder, error)

    def failed(self, holder: Holder, error: DiskError) -> None:
        """Takes note of a read that failed. What was removed meanwhile is a miss and no failure."""
        if not holder.presence.failed(error.errno) and error.errno != errno.ENOENT:
            self._stats.add(disk_errors=1)
            self._say_once((holder, error.errno), "%s", error)

    def _first(
        self,
        span: Span,
        of_object: Callable[[Root, ObjectEntry], _Read],
        of_shard: Callable[[ShardDirectory], _Read],
        last_resort: bool,
        first: Copy | None,
    ) -> _Read | None:
        key = self._digests.key(span)
        failure: DeltafinError | None = None
        for _ in range(2):
            before = self._changes()
            for holder in self._in_order(first):
                try:
                    if (content := self._from(holder, span, key, of_object, of_shard)) is not None:
                        holder.presence.worked()
                        return content
                except Corrupt as e:
                    failure = self._set_aside(holder, key, e)
                except DiskError as e:
                    self.failed(holder, e)
                    failure = e if holder.presence.gone is None else failure
            self._look_around()
            if self._changes() == before:
                break
        if failure is not None and last_resort:
            raise failure
        return None

    def _in_order(self, first: Copy | None) -> Iterator[Holder]:
        if first is not None and first.holder.presence.gone is None:
            yield first.holder
        for holder in self._holders:
            if holder.presence.gone is None and (first is None or holder is not first.holder):
                yield holder

    def _from(
        self,
        holder: Holder,
        span: Span,
        key: bytes,
        of_object: Callable[[Root, ObjectEntry], _Read],
        of_shard: Callable[[ShardDirectory], _Read],
    ) -> _Read | None:
        if isinstance(holder, Root):
            if (entry := holder.find(key)) is None:
                if key in holder.log.entries:  # evicted, or the whole root is away
                    holder.presence.look()
                return None
            if self._digests.disproves(span, entry):
                return None
            if (known := self._damaged.get((holder, key))) is not None:
                raise known
            content = of_object(holder, entry)
            self._stats.add(object_spans=1, object_nbytes=len(content))
            return content
        if not holder.has(span.shard):
            return None
        if (known := self._damaged.get((holder, key))) is not None:
            raise known
        content = of_shard(holder)
        self._stats.add(shard_spans=1, shard_nbytes=len(content))
        return content

    def _look_around(self) -> None:
        """After a miss: finds out what is gone, and what another process has brought meanwhile."""
        for holder in self._holders:
            if not holder.presence.look() and isinstance(holder, Root):
                try:
                    holder.log.refresh_if_grown()
                except DiskError as e:
                    self.failed(holder, e)

    def _changes(self) -> int:
        """Another thread may take in what has come: then it is here for this one, too."""
        return sum(root.log.changes for root in self.roots)

    def _set_aside(self, holder: Holder, key: bytes, error: Corrupt) -> Corrupt:
        if (holder, key) in self._damaged:
            return error
        self._stats.add(corrupt_objects=1)
        entry = holder.log.entries.get(key) if isinstance(holder, Root) else None
        if not isinstance(holder, Root) or entry is None or not holder.writable:
            self._damaged[holder, key] = error
            log.warning("%s; passed over", error)
            return error
        try:
            aside = holder.quarantine(entry)
        except DiskError as e:
            self._damaged[holder, key] = error
            log.warning("%s; passed over (%s)", error, e)
            return error
        log.warning("%s; moved to %s", error, aside)
        return Corrupt(f"{error}; it was moved to {aside}; fetch it again with df-fetch")

    def _say_once(self, about: object, message: str, *values: object) -> None:
        """A drive that fails does so for every span; only the first is a warning."""
        with self._lock:
            first = about not in self._said
            self._said.add(about)
        log.log(logging.WARNING if first else logging.INFO, message, *values)
