"""The store: brings the bytes of spans from wherever they are, and keeps what it fetched."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import CancelledError, Future

import numpy as np
import numpy.typing as npt

from deltafin.errors import BadRequest, DeltafinError, Missing
from deltafin.indexer import (
    GLOBALS,
    LAYER_PREFIX,
    Catalog,
    RemoteFiles,
    RowTable,
    Span,
    SpineGroup,
)
from deltafin.store.arena import Arena, Slot, own_slot, slot_nbytes
from deltafin.store.digests import Digests
from deltafin.store.drive import Drive, wait_out
from deltafin.store.encodings import PackFormat
from deltafin.store.eviction import Evictor
from deltafin.store.fetcher import WORKERS, Fetcher
from deltafin.store.heat import Heat
from deltafin.store.keeping import Keeper
from deltafin.store.landing import Landing
from deltafin.store.layerreads import CLOSED, LayerReads, submit_read
from deltafin.store.local import Copy, Local
from deltafin.store.objectlog import ObjectEntry
from deltafin.store.packs import Packed, PackSet, open_packs
from deltafin.store.pins import Pins
from deltafin.store.roots import Root, ShardDirectory
from deltafin.store.spine import FINAL_PREFIX, tensor_of
from deltafin.store.stats import StoreStats
from deltafin.store.tier import ExpertTier


class Store:
    """One model's bytes. Thread-safe; owns its catalog, roots and connection, and closes them.

    Sources: objects in any root and original shards in any directory, whichever drive has the bytes soonest; then
    ranges over HTTP, which become objects in a writable root. `roots[0]` is the cache. `remote=None` means that no
    socket is ever opened.
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
        self._closed = False
        self._digests = Digests(catalog, self.roots)
        self._local = Local(self.roots, self.shard_directories, self._digests, self.stats)
        self.heat = Heat(self.roots[0].path, catalog)
        self.pins = Pins(self.roots[0].path, catalog)
        evictor = Evictor(catalog, self._digests.key, self.heat, self.pins, self.stats)
        self.keeper = Keeper(catalog, self.roots, self._digests, evictor)
        self._fetcher = Fetcher(catalog, self.keeper, self.roots[0].path, remote, self._digests, self.stats)
        self._arena: Arena | None = None  # of all slots
        self._slots: list[Slot] | None = None  # free ones; None until they are made
        self._tier = ExpertTier([])
        self._slots_lock = threading.RLock()  # of slots, tier and the number of open landings
        self._landings = 0
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
        self._fetcher.stop()
        for drive in self.drives:
            drive.close()
        self._fetcher.close()
        try:
            self.sync()
        finally:
            self.catalog.close()

    def sync(self) -> None:
        """Makes the records of all objects that were kept durable. Raises DiskError."""
        for root in self.roots:
            if root.writable and root.presence.gone is None:
                root.sync()

    def interrupt(self) -> None:
        """Ends transfers of all threads soon, for a command that was interrupted; then close it, or `resume`."""
        self._fetcher.stop()

    def resume(self) -> None:
        """Lets transfers begin again after an interruption that ended something smaller than the command."""
        self._fetcher.resume()

    @property
    def remote(self) -> RemoteFiles | None:
        """The connection, opened on first use; None when this store is local or offline."""
        return self._fetcher.remote

    @property
    def writable_roots(self) -> tuple[Root, ...]:
        """The roots that are written to, the cache first."""
        return tuple(root for root in self.roots if root.writable)

    @property
    def drives(self) -> tuple[Drive, ...]:
        """The readers of all roots and shard directories."""
        return self._local.drives

    @property
    def requests(self) -> int:
        """HTTP exchanges so far, redirects included."""
        return self._fetcher.requests

    @property
    def pause_left_s(self) -> float:
        """Seconds that the server has asked to wait before the next request."""
        return self._fetcher.pause_left_s

    def claim_line(self) -> None:
        """What this store fetches is for a run, and keeps idle fetches off the line. To be said before the first."""
        self._fetcher.claim()

    @property
    def may_fetch(self) -> bool:
        return self._fetcher.open

    # ---- what the runtime asks for ------------------------------------------------------------------

    def reserve(self, slots: int, resident: int) -> int:
        """Makes memory for experts: `slots` to read into, and `resident` that stay; returns its bytes.

        For the opener of the store, before the first expert is asked for. Without it there are a few slots.
        """
        assert self._slots is None, "experts have been read already"
        nbytes = slot_nbytes(self.catalog.expert_nbytes)
        self._arena = arena = Arena((slots + resident) * nbytes)
        self._slots = [arena.take(nbytes) for _ in range(slots)]
        self._tier = ExpertTier(arena.take(nbytes) for _ in range(resident))
        return arena.nbytes

    @property
    def sheddable_nbytes(self) -> int:
        """Memory that `shrink` could give back."""
        return self._tier.capacity * slot_nbytes(self.catalog.expert_nbytes)

    def shrink(self, nbytes: int) -> int:
        """Gives memory of resident experts back to the system, at least as much as is asked if there is; returns it."""
        slot = slot_nbytes(self.catalog.expert_nbytes)
        with self._slots_lock:
            given = self._tier.shrink(-(-nbytes // slot))
        for part in given:
            assert self._arena is not None
            self._arena.give_back(part)
        return len(given) * slot

    @property
    def resident_experts(self) -> tuple[int, int]:
        """How many experts stay in memory now, and how many could."""
        return len(self._tier), self._tier.capacity

    def packs(self, format: PackFormat) -> PackSet:
        """The packs of a format that fit this model, from all roots; damaged ones are passed over and said."""
        return open_packs([root.path for root in self.roots], self.catalog, self.shard_ids, format)

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
        return self._read_group(self.catalog.spine(GLOBALS), FINAL_PREFIX)

    def experts(self, layer: int, ids: Sequence[int]) -> Landing:
        """The experts `ids` of a layer as they land, in any order, each once; reading starts now.

        Yields (expert, bytes). The array lies in a slot that is used again: it is valid until the next
        step of the iterator. Close the iterator when leaving it early. Several may be open at once, but none then
        changes what stays in memory.
        """
        if len(set(ids)) != len(ids):
            raise BadRequest(f"experts of layer {layer}: an expert is asked for twice")
        spans = dict(zip(ids, self.catalog.expert_spans(layer, ids), strict=True))
        here: list[tuple[int, Slot]] = []
        away: list[int] = []
        with self._slots_lock:
            self._landings += 1
            for expert in ids:
                self.stats.visit_expert(layer, expert)
                resident = self._tier.use((layer, int(expert)))
                if resident is None:
                    away.append(expert)
                else:
                    here.append((expert, resident))
            free = self._free_slots()
            taken = [free.pop() for _ in range(min(len(free), len(away)))]
        own = [own_slot(self.catalog.expert_nbytes)] if away and not taken else []  # others have them all
        if here:
            self.stats.add(ram_spans=len(here), ram_nbytes=len(here) * self.catalog.expert_nbytes)

        reads = LayerReads(self._local, self._fetcher.drive, layer, spans, self.read)

        def spent(expert: int, slot: Slot, content: Slot) -> Slot:
            with self._slots_lock:
                if own or self._landings > 1:
                    return slot
                return self._tier.offer((layer, int(expert)), slot, content)

        def done(slots: list[Slot]) -> None:
            with self._slots_lock:
                self._landings -= 1
                if not own:
                    free.extend(slots)

        return Landing(here, reads.order(away), len(away), own or taken, reads.begin, spent, done)

    def _free_slots(self) -> list[Slot]:
        if self._slots is None:
            self.reserve(WORKERS, 0)
        assert self._slots is not None
        return self._slots

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
        self.stats.add(embedding_nbytes=len(where) * row_nbytes)
        return rows

    def head(self) -> Generator[tuple[int, npt.NDArray[np.uint16]], None, None]:
        """The output head in tiles: (first vocabulary row, BF16 bits [rows, hidden]), ascending, read one ahead.

        A tile is valid until the next but one is asked for.
        """
        table = self._table("head")
        hidden = table.tensor.shape[1]
        slots = [own_slot(max(s.nbytes for s in table.spans)) for _ in range(2)]

        def read(number: int) -> Future[Slot]:
            return self.submit(table.spans[number], slots[number % 2], urgent=False)

        ahead = read(0)
        for number in range(len(table.spans)):
            tile = _result(ahead)
            if number + 1 < len(table.spans):
                ahead = read(number + 1)
            yield number * table.rows_per_span, tile.view(np.uint16).reshape(-1, hidden)

    # ---- spans --------------------------------------------------------------------------------------

    def key(self, span: Span) -> bytes:
        """How object logs name a span: independent of catalogs, paths and hosts."""
        return self._digests.key(span)

    @property
    def shard_ids(self) -> tuple[bytes, ...]:
        """32 bytes for each shard of the catalog that name its content."""
        return self._digests.shard_ids

    def known(self, span: Span) -> ObjectEntry | None:
        """What is on record of a span's content, rather what is proven; the object need not be here."""
        return self._digests.known(span)

    def object_of(self, span: Span) -> tuple[Root, ObjectEntry] | None:
        """The object that a span would be read from, if there is one."""
        return self._local.object_of(span)

    def is_local(self, span: Span) -> bool:
        """Whether a span is on this machine, as an object or in an original shard."""
        return self._local.has(span)

    def is_claimed(self, span: Span) -> bool:
        """Whether a span is being fetched into the cache now, by this process or another."""
        return self._fetcher.is_claimed(span)

    def copies(self, span: Span) -> list[Copy]:
        """Where a span is on this machine, by the records."""
        return self._local.copies(span)

    def submit(
        self,
        span: Span,
        slot: Slot,
        *,
        urgent: bool,
        expert: tuple[int, int] | None = None,
        future: Future[Slot] | None = None,
    ) -> Future[Slot]:
        """`read` on a thread of the drive that has the span soonest, or of the line; urgent ones before all others.

        `future` as in `Drive.submit`.
        """
        copy = self._local.soonest(span, urgent=urgent)
        queue = self._fetcher.drive if copy is None else copy.drive
        return submit_read(queue, lambda: self.read(span, slot, expert=expert, first=copy), span.nbytes, urgent, future)

    def submit_piece(self, span: Span, packed: Packed | None, slot: Slot, future: Future[Slot]) -> None:
        """Like `submit` for a piece of the spine, as released or in its packed form."""
        if packed is None:
            self.submit(span, slot, urgent=False, future=future)
            return
        root = next(r for r in self.roots if packed.path.is_relative_to(r.path))

        def read() -> Slot:
            content = root.read_packed(packed, slot)
            self.stats.add(pack_spans=1, pack_nbytes=packed.piece.nbytes)
            return content

        submit_read(root.drive, read, packed.piece.nbytes, False, future)

    def read(
        self,
        span: Span,
        slot: Slot,
        *,
        expert: tuple[int, int] | None = None,
        keep: bool = True,
        first: Copy | None = None,
    ) -> Slot:
        """A whole span from the best source, as a part of `slot`, which starts on a page and has `slot_nbytes`.

        `expert` lets it judge bytes that nobody vouches for. Without `keep`, what comes over HTTP is checked as always
        but makes no object. `first` is a copy to try before all others.
        """
        content = self._local.read(span, slot, last_resort=not self.may_fetch, first=first)
        if content is None:
            content = slot[: span.nbytes]
            self._fetch(span, content.data, expert, keep=keep)
        return content

    def fetch(self, span: Span, view: memoryview, *, expert: tuple[int, int] | None = None, anew: bool = False) -> None:
        """Brings a span over HTTP and keeps it; unlike `read` it raises when it cannot be kept.

        `anew` believes it even if it contradicts an unproven digest.
        """
        self._fetch(span, view, expert, or_fail=True, anew=anew)

    def _read_part(self, span: Span, at: int, view: memoryview) -> None:
        if not self._local.read_part(span, at, view, last_resort=not self.may_fetch):
            whole = bytearray(span.nbytes)
            self._fetch(span, memoryview(whole), None)
            view[:] = memoryview(whole)[at : at + len(view)]

    def _fetch(
        self,
        span: Span,
        view: memoryview,
        expert: tuple[int, int] | None,
        *,
        keep: bool = True,
        or_fail: bool = False,
        anew: bool = False,
    ) -> None:
        if not self.may_fetch:
            raise Missing(self._how_to_get(span, expert))
        self._fetcher.fetch(span, view, expert, keep=keep, or_fail=or_fail, anew=anew)

    def _how_to_get(self, span: Span, expert: tuple[int, int] | None) -> str:
        if expert is not None:
            layer, number = expert
            what = f"expert {number} of layer {layer}"
            command = f"df-fetch warm {self.model} --layers {layer} --experts {number}"
        else:
            what = f"bytes {span.offset} to {span.offset + span.nbytes - 1} of {self.catalog.shards[span.shard].name}"
            command = f"df-fetch spine {self.model}"
        path = self.catalog.location.path
        gone = [str(place) for place in self._local.was_in(span) if str(place) != path]
        if gone:
            where = " and ".join(gone)
            return f"{what}: was in {where}, which is gone; bring it back and run the same command again"
        if path is not None:
            return f"{what}: not found at {path}; was the directory moved? rebuild with df-index build"
        return f"{what} is not on this machine; without --offline it is fetched, or run: {command}"

    # ---- groups of tensors ----------------------------------------------------------------------------

    def _read_group(self, group: SpineGroup, prefix: str) -> dict[str, npt.NDArray[np.generic]]:
        """All spans of a group in parallel, each into memory of its own."""
        reads = [self.submit(span, own_slot(span.nbytes), urgent=False) for span in group.spans]
        _wait_all(reads)
        contents = [(span, _result(read)) for span, read in zip(group.spans, reads, strict=True)]
        return {p.name.removeprefix(prefix): tensor_of(p, contents) for p in group.tensors}

    def _table(self, which: str) -> RowTable:
        if which not in self._tables:
            self._tables[which] = self.catalog.embedding() if which == "embedding" else self.catalog.head()
        return self._tables[which]


def _result(future: Future[Slot]) -> Slot:
    try:
        return future.result()
    except CancelledError:
        raise DeltafinError(CLOSED) from None


def _wait_all(futures: Sequence[Future[Slot]]) -> None:
    """Waits for every read. After a failure those not begun are dropped; raises the first failure."""
    try:
        for future in futures:
            _result(future)
    except BaseException:
        wait_out(futures)
        raise
