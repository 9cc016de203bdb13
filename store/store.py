"""The store: brings the bytes of spans from wherever they are, and keeps what it fetched."""

from __future__ import annotations

import hashlib
import logging
import threading
from collections.abc import Callable, Generator, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait

import numpy as np
import numpy.typing as npt

from deltafin.errors import BadRequest, Corrupt, DeltafinError, DiskError, Missing, NoSpace
from deltafin.indexer import (
    GLOBALS,
    LAYER_PREFIX,
    Catalog,
    Expected,
    Place,
    RemoteFiles,
    RowTable,
    Span,
    SpineGroup,
    expert_layout,
)
from deltafin.store.landing import Landing
from deltafin.store.objectlog import ObjectEntry, span_key
from deltafin.store.plausible import implausible
from deltafin.store.roots import Root, ShardDirectory
from deltafin.store.stats import StoreStats

log = logging.getLogger(__name__)

Bytes = npt.NDArray[np.uint8]

WORKERS = 8
_FINAL_PREFIX = "language_model.model."
_DTYPES: dict[str, type[np.generic]] = {"BF16": np.uint16, "F32": np.float32, "U8": np.uint8}
_FETCH_ATTEMPTS = 3  # of a span whose bytes arrive complete but cannot be right


class Store:
    """One model's bytes. Thread-safe; owns its catalog, roots and connection, and closes them.

    Sources in order: objects in any root, original shards in any directory, ranges over HTTP, which then
    become objects in `roots[0]`. `remote=None` means that no socket is ever opened.
    """

    def __init__(
        self,
        catalog: Catalog,
        roots: Sequence[Root],
        shard_directories: Sequence[ShardDirectory],
        remote: Callable[[], RemoteFiles] | None,
        model: str,
    ) -> None:
        self.catalog = catalog
        self.model = model  # as the user calls it, for messages
        self.roots = tuple(roots)
        self.shard_directories = tuple(shard_directories)
        self.stats = StoreStats()
        self._open_remote = remote
        self._remote: RemoteFiles | None = None
        self._remote_lock = threading.Lock()
        self._closed = False
        self._keeps = True  # False once the disk is full
        self._keeping_lock = threading.Lock()
        self._layout = expert_layout(catalog.config)
        self._shard_ids = [_shard_id(catalog, i) for i in range(len(catalog.shards))]
        self._pool = ThreadPoolExecutor(WORKERS, "store")
        self._tables: dict[str, RowTable] = {}

    def __enter__(self) -> Store:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Stops transfers, waits for reads under way, and closes everything. Closing again does nothing."""
        if self._closed:
            return
        self._closed = True
        if self._remote is not None:
            self._remote.stop()
        # Not cancelled: whoever left an iterator of experts open still waits for the reads it asked for.
        self._pool.shutdown(wait=True)
        if self._remote is not None:
            self._remote.close()
        try:
            for root in self.roots:
                if root.writable:
                    root.sync()
        finally:
            self.catalog.close()

    def interrupt(self) -> None:
        """Ends transfers of all threads soon, for a command that was interrupted; only closing makes sense after."""
        if self._remote is not None:
            self._remote.stop()

    @property
    def remote(self) -> RemoteFiles | None:
        """The connection, opened on first use; None when this store is local or offline."""
        with self._remote_lock:
            if self._remote is None and self._open_remote is not None:
                self._remote = self._open_remote()
            return self._remote

    @property
    def requests(self) -> int:
        """HTTP exchanges so far, redirects included."""
        return self._remote.stats.requests if self._remote is not None else 0

    @property
    def pause_left_s(self) -> float:
        """Seconds that the server has asked to wait before the next request."""
        return self._remote.pause_left_s if self._remote is not None else 0.0

    @property
    def may_fetch(self) -> bool:
        return self._open_remote is not None

    # ---- what the runtime asks for ------------------------------------------------------------------

    def spine(self, layer: int) -> dict[str, npt.NDArray[np.generic]]:
        """Every tensor of a layer that is no routed expert, by short name, in fresh memory.

        BF16 comes as its raw bits in uint16, F32 as float32, each in its shape. Like every read here it raises
        Missing (nowhere within reach), Corrupt, NetworkError, DiskError, or BadCatalog (a shard has changed).
        """
        self.stats.visit_spine(layer)
        return self._read_group(self.catalog.spine(layer), f"{LAYER_PREFIX}{layer}.")

    def final(self) -> dict[str, npt.NDArray[np.generic]]:
        """The global norms by short name, like `spine`."""
        self.stats.visit_spine(GLOBALS)
        return self._read_group(self.catalog.spine(GLOBALS), _FINAL_PREFIX)

    def experts(self, layer: int, ids: Sequence[int]) -> Landing:
        """The experts `ids` of a layer as they land, in any order, each once; reading starts now.

        Yields (expert, bytes). The array lies in a slot that is used again: it is valid until the next
        step of the iterator. Close the iterator when leaving it early.
        """
        if len(set(ids)) != len(ids):
            raise BadRequest(f"experts of layer {layer}: an expert is asked for twice")
        spans = dict(zip(ids, self.catalog.expert_spans(layer, ids), strict=True))

        def read(expert: int, slot: Bytes) -> int:
            self.stats.visit_expert(layer, expert)
            self.read(spans[expert], slot.data, expert=(layer, expert))
            return expert

        slots = [np.empty(self.catalog.expert_nbytes, np.uint8) for _ in range(min(WORKERS, len(ids)))]
        return Landing(ids, slots, lambda expert, slot: self._pool.submit(read, expert, slot))

    def embedding(self, ids: Sequence[int]) -> npt.NDArray[np.uint16]:
        """Rows of the embedding table as BF16 bits [len(ids), hidden]."""
        table = self._table("embedding")
        vocab, hidden = table.tensor.shape
        rows = np.empty((len(ids), hidden), np.uint16)
        row_nbytes = 2 * hidden
        where: dict[int, int] = {}
        for i, token in enumerate(ids):
            if not 0 <= token < vocab:
                raise BadRequest(f"token id {token} lies outside the vocabulary of {vocab}")
            if token in where:
                rows[i] = rows[where[token]]
                continue
            where[token] = i
            number, row = divmod(token, table.rows_per_span)
            self._read_part(table.spans[number], row * row_nbytes, rows[i].data.cast("B"))
        return rows

    def head(self) -> Generator[tuple[int, npt.NDArray[np.uint16]], None, None]:
        """The output head in tiles: (first vocabulary row, BF16 bits [rows, hidden]), ascending, read one ahead."""
        table = self._table("head")
        hidden = table.tensor.shape[1]

        def read(span: Span) -> npt.NDArray[np.uint16]:
            tile = np.empty((span.nbytes // (2 * hidden), hidden), np.uint16)
            self.read(span, tile.data.cast("B"))
            return tile

        ahead = self._pool.submit(read, table.spans[0])
        for number in range(len(table.spans)):
            tile = ahead.result()
            if number + 1 < len(table.spans):
                ahead = self._pool.submit(read, table.spans[number + 1])
            yield number * table.rows_per_span, tile

    # ---- spans --------------------------------------------------------------------------------------

    def key(self, span: Span) -> bytes:
        """How object logs name a span: independent of catalogs, paths and hosts."""
        return span_key(self._shard_ids[span.shard], span.offset, span.nbytes)

    def is_local(self, span: Span) -> bool:
        """Whether a span is on this machine, as an object or in an original shard."""
        key = self.key(span)
        return any(root.find(key) for root in self.roots) or any(d.has(span.shard) for d in self.shard_directories)

    def read(self, span: Span, view: memoryview, *, expert: tuple[int, int] | None = None) -> None:
        """Fills `view` with a whole span from the best source; `expert` lets it judge bytes nobody vouches for."""
        if not self._read_local(span, 0, view, whole=True):
            self._fetch(span, view, expert)

    def fetch(self, span: Span, view: memoryview, *, expert: tuple[int, int] | None = None) -> None:
        """Brings a span over HTTP and keeps it; unlike `read` it raises when it cannot be kept."""
        self._fetch(span, view, expert, keep_or_fail=True)

    def _read_part(self, span: Span, at: int, view: memoryview) -> None:
        if not self._read_local(span, at, view, whole=False):
            whole = bytearray(span.nbytes)
            self._fetch(span, memoryview(whole), None)
            view[:] = memoryview(whole)[at : at + len(view)]

    def _read_local(self, span: Span, at: int, view: memoryview, *, whole: bool) -> bool:
        """Tries objects, then shards in place. A source that fails is passed over if another is left."""
        key = self.key(span)
        failure: DeltafinError | None = None
        for root in self.roots:
            if (entry := root.find(key)) is None:
                continue
            try:
                if whole:
                    root.read(entry, view)
                else:
                    root.read_part(entry, at, view)
                self.stats.add(object_spans=1, object_nbytes=len(view))
                return True
            except Corrupt as e:
                failure = self._set_aside(root, entry, e)
            except DiskError as e:
                failure = self._note(e)
        for directory in self.shard_directories:
            if not directory.has(span.shard):
                continue
            try:
                directory.read(span, at, view)
                self.stats.add(shard_spans=1, shard_nbytes=len(view))
                return True
            except DiskError as e:
                failure = self._note(e)
        if failure is not None and not self.may_fetch:
            raise failure
        return False

    def _set_aside(self, root: Root, entry: ObjectEntry, error: Corrupt) -> Corrupt:
        self.stats.add(corrupt_objects=1)
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
        self.stats.add(disk_errors=1)
        log.warning("%s", error)
        return error

    def _fetch(
        self, span: Span, view: memoryview, expert: tuple[int, int] | None, *, keep_or_fail: bool = False
    ) -> None:
        remote = self.remote
        if remote is None:
            raise Missing(self._how_to_get(span, expert))
        shard = self.catalog.shards[span.shard]
        expected = Expected(shard.nbytes, shard.sha256 or shard.etag, self.catalog.location.commit)
        complaint = None
        for _ in range(_FETCH_ATTEMPTS):
            remote.read_into(shard.name, span.offset, view, expected)
            self.stats.add(http_spans=1, http_nbytes=span.nbytes)
            complaint = self._complaint(span, view, expert)
            if complaint is None:
                break
            self.stats.add(refused_spans=1)
            log.warning("%s at %d: %s; fetching again", shard.name, span.offset, complaint)
        else:
            what = "" if expert is None else f" (expert {expert[1]} of layer {expert[0]})"
            raise Corrupt(
                f"{shard.name}: bytes {span.offset} to {span.offset + span.nbytes - 1}{what}: {complaint}, "
                f"in {_FETCH_ATTEMPTS} transfers; nothing of it was kept; is the server or a proxy at fault?"
            )
        if self._keeps or keep_or_fail:
            try:
                self.roots[0].publish(self.key(span), view)
            except (NoSpace, DiskError) as e:
                if keep_or_fail:
                    raise
                self._stop_keeping(e)
                self.stats.add(unkept_spans=1)
        else:
            self.stats.add(unkept_spans=1)

    def _stop_keeping(self, error: DeltafinError) -> None:
        """Several threads may find the disk full at once; it is said once."""
        with self._keeping_lock:
            first, self._keeps = self._keeps, False
        if first:
            log.warning("%s; going on without keeping what is fetched", error)

    def _complaint(self, span: Span, view: memoryview, expert: tuple[int, int] | None) -> str | None:
        """Why fetched bytes cannot be right: they contradict a digest on record, or cannot be an expert."""
        key = self.key(span)
        for root in self.roots:
            known = root.log.entries.get(key)
            if known is not None and hashlib.sha256(view).digest() != known.sha256:
                return f"the bytes contradict the digest on record in {root.log.path} (df-fetch rm forgets it)"
        if expert is not None:
            return implausible(np.frombuffer(view, np.uint8), self._layout)
        return None

    def _how_to_get(self, span: Span, expert: tuple[int, int] | None) -> str:
        if expert is not None:
            layer, number = expert
            what = f"expert {number} of layer {layer}"
            command = f"df-fetch warm {self.model} --layers {layer} --experts {number}"
        else:
            what = f"bytes {span.offset} to {span.offset + span.nbytes - 1} of {self.catalog.shards[span.shard].name}"
            command = f"df-fetch spine {self.model}"
        if (path := self.catalog.location.path) is not None:
            return f"{what}: not found at {path}; was the directory moved? rebuild with df-index build"
        return f"{what} is not on this machine; without --offline it is fetched, or run: {command}"

    # ---- groups of tensors ----------------------------------------------------------------------------

    def _read_group(self, group: SpineGroup, prefix: str) -> dict[str, npt.NDArray[np.generic]]:
        """All spans of a group in parallel into one buffer, where touching spans touch again."""
        buffer = np.empty(sum(s.nbytes for s in group.spans) + _ALIGNMENT * len(group.spans), np.uint8)
        starts = _arrange(group.spans)
        view = buffer.data
        reads = [
            self._pool.submit(self.read, span, view[at : at + span.nbytes])
            for span, at in zip(group.spans, starts, strict=True)
        ]
        _wait_all(reads)
        where = [(s.shard, s.offset, s.offset + s.nbytes, at) for s, at in zip(group.spans, starts, strict=True)]
        return {p.name.removeprefix(prefix): _array(buffer, p, where) for p in group.tensors}

    def _table(self, which: str) -> RowTable:
        if which not in self._tables:
            self._tables[which] = self.catalog.embedding() if which == "embedding" else self.catalog.head()
        return self._tables[which]


_ALIGNMENT = 64


def _arrange(spans: Iterable[Span]) -> list[int]:
    """Where each span starts in the buffer: right behind its neighbour if they touch, else aligned."""
    starts: list[int] = []
    end, previous = 0, None
    for span in spans:
        touches = previous is not None and (previous.shard, previous.offset + previous.nbytes) == (
            span.shard,
            span.offset,
        )
        if not touches:
            end = -(-end // _ALIGNMENT) * _ALIGNMENT
        starts.append(end)
        end += span.nbytes
        previous = span
    return starts


def _array(buffer: Bytes, place: Place, where: list[tuple[int, int, int, int]]) -> npt.NDArray[np.generic]:
    """One tensor as a view of the buffer; copied only if it lies there unaligned."""
    at = next(
        at + place.offset - begin
        for shard, begin, end, at in where
        if shard == place.shard and begin <= place.offset < end
    )
    dtype = np.dtype(_DTYPES[place.dtype])
    array = np.frombuffer(buffer, dtype, place.nbytes // dtype.itemsize, at).reshape(place.shape)
    return array if array.flags.aligned else array.copy()


def _wait_all(futures: Sequence[Future[None]]) -> None:
    """Waits for every read: they write into shared memory. After a failure those not begun are dropped.

    Raises the first failure.
    """
    try:
        for future in futures:
            future.result()
    except BaseException:
        for future in futures:
            future.cancel()
        wait(futures)
        raise


def _shard_id(catalog: Catalog, number: int) -> bytes:
    """32 bytes that name a shard's content: its published SHA-256, else where and what it is."""
    shard, location = catalog.shards[number], catalog.location
    if shard.sha256 is not None:
        return bytes.fromhex(shard.sha256)
    parts = (location.repo or "", location.commit or "", shard.name, str(shard.nbytes), shard.header_sha256)
    return hashlib.sha256("\n".join(("deltafin shard", *parts, shard.etag or "")).encode()).digest()
