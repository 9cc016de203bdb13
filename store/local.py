"""Spans that are on this machine: objects in roots, and original shards read in place."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import TypeVar

from deltafin.errors import Corrupt, DeltafinError, DiskError
from deltafin.indexer import Span
from deltafin.store.arena import Slot
from deltafin.store.digests import Digests
from deltafin.store.drive import Drive
from deltafin.store.objectlog import ObjectEntry
from deltafin.store.roots import Root, ShardDirectory
from deltafin.store.stats import StoreStats

log = logging.getLogger(__name__)

_Read = TypeVar("_Read", Slot, memoryview)


class Local:
    """Reads spans from whatever holds them here: objects first, then shards. Thread-safe.

    A copy that cannot be read or is damaged is passed over with a line.
    """

    def __init__(
        self, roots: Sequence[Root], directories: Sequence[ShardDirectory], digests: Digests, stats: StoreStats
    ) -> None:
        self.roots = tuple(roots)
        self.directories = tuple(directories)
        self._digests = digests
        self._stats = stats

    @property
    def drives(self) -> tuple[Drive, ...]:
        return (*(root.drive for root in self.roots), *(folder.drive for folder in self.directories))

    def has(self, span: Span) -> bool:
        """Whether a span is here, as an object or in an original shard."""
        key = self._digests.key(span)
        return any(root.find(key) for root in self.roots) or any(d.has(span.shard) for d in self.directories)

    def queue_of(self, span: Span) -> Drive | None:
        """Where a read waits. Only records are looked at: asking a busy disk about files would hold up the caller."""
        key = self._digests.key(span)
        for root in self.roots:
            if key in root.log.entries:
                return root.drive
        for directory in self.directories:
            if directory.has(span.shard):
                return directory.drive
        return None

    def read(self, span: Span, slot: Slot, *, last_resort: bool) -> Slot | None:
        """A whole span as a part of `slot`; None if nothing has it.

        Where every copy failed that is None as well, but the `last_resort` raises what the last one failed with:
        Corrupt or DiskError.
        """
        return self._first(span, lambda r, e: r.read(e, slot), lambda d: d.read(span, slot), last_resort)

    def read_part(self, span: Span, at: int, view: memoryview, *, last_resort: bool) -> bool:
        """Fills `view` with the bytes of a span from `at` on; False and errors as `read`'s None."""

        def of_object(root: Root, entry: ObjectEntry) -> memoryview:
            root.read_part(entry, at, view)
            return view

        def of_shard(directory: ShardDirectory) -> memoryview:
            directory.read_part(span, at, view)
            return view

        return self._first(span, of_object, of_shard, last_resort) is not None

    def _first(
        self,
        span: Span,
        of_object: Callable[[Root, ObjectEntry], _Read],
        of_shard: Callable[[ShardDirectory], _Read],
        last_resort: bool,
    ) -> _Read | None:
        key = self._digests.key(span)
        failure: DeltafinError | None = None
        for root in self.roots:
            if (entry := root.find(key)) is None:
                continue
            try:
                content = of_object(root, entry)
                self._stats.add(object_spans=1, object_nbytes=len(content))
                return content
            except Corrupt as e:
                failure = self._set_aside(root, entry, e)
            except DiskError as e:
                failure = self._note(e)
        for directory in self.directories:
            if not directory.has(span.shard):
                continue
            try:
                content = of_shard(directory)
                self._stats.add(shard_spans=1, shard_nbytes=len(content))
                return content
            except DiskError as e:
                failure = self._note(e)
        if failure is not None and last_resort:
            raise failure
        return None

    def _set_aside(self, root: Root, entry: ObjectEntry, error: Corrupt) -> Corrupt:
        self._stats.add(corrupt_objects=1)
        if not root.writable:
            log.warning("%s; passed over", error)
            return error
        try:
            aside = root.quarantine(entry)
        except DiskError as e:
            log.warning("%s; passed over (%s)", error, e)
            return error
        log.warning("%s; moved to %s", error, aside)
        return Corrupt(f"{error}; it was moved to {aside}; fetch it again with df-fetch")

    def _note(self, error: DiskError) -> DiskError:
        self._stats.add(disk_errors=1)
        log.warning("%s", error)
        return error
