"""Writing packs: a layer's spine goes from wherever it is, over HTTP too, straight into its pack.

Layers are packed side by side, and within one the next span is on its way while the last is encoded, so
memory holds a few pieces for each. A pack appears whole or not at all; what a killed run finished stays
finished.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from contextlib import closing
from dataclasses import dataclass
from io import FileIO

import xxhash

from deltafin.errors import BadCatalog, Corrupt, Missing, NoSpace
from deltafin.indexer import Span, SpineGroup, discard, disk_error, make_directory, publish, temporary
from deltafin.store.arena import own_slot
from deltafin.store.encodings import (
    Bytes,
    Encoded,
    Encoding,
    Matrix,
    PackFormat,
    aligned,
    encode,
    encoding_for,
    matrices_of,
    parts_of,
    piece_nbytes,
    shape_of,
)
from deltafin.store.packs import (
    Pack,
    PackPiece,
    SourceShard,
    header_bytes,
    header_room,
    open_packs,
    pack_folder,
    pack_name,
    pages,
    source_mtime_ns,
)
from deltafin.store.space import free_nbytes
from deltafin.store.store import Store

_LAYERS_AT_ONCE = 3
_WEIGHTS_PER_EXCEPTION = 4096  # a generous guess for planning: of normally distributed weights one in 13,000 is one

Progress = Callable[[int], None]


@dataclass(frozen=True, slots=True)
class PackPlan:
    """What packing would do. `layers` have no sound pack of this format in any root."""

    format: PackFormat
    layers: tuple[int, ...]
    present: int  # of the layers asked for
    source_nbytes: int
    fetch_nbytes: int  # of them, over HTTP
    pack_nbytes: int  # expected; exact but for the exceptions of bf12


@dataclass(frozen=True, slots=True)
class PackTotals:
    """What packing did."""

    layers: int
    source_nbytes: int
    pack_nbytes: int


def plan_packs(store: Store, format: PackFormat, layers: Iterable[int]) -> PackPlan:
    """Keeps the layers without a pack, and says what packing them takes."""
    layers = list(layers)
    here = open_packs([root.path for root in store.roots], store.catalog, store.shard_ids, format).packs
    missing = tuple(layer for layer in layers if layer not in here)
    source = fetch = packed = 0
    for layer in missing:
        group = store.catalog.spine(layer)
        packed += _expected_nbytes(group, format)
        for span in group.spans:
            source += span.nbytes
            fetch += 0 if store.is_local(span) else span.nbytes
    return PackPlan(format, missing, len(layers) - len(missing), source, fetch, packed)


def _expected_nbytes(group: SpineGroup, format: PackFormat) -> int:
    total = header_room(len(group.spans))
    for span, matrix in zip(group.spans, matrices_of(group), strict=True):
        encoding = encoding_for(format, matrix)
        exceptions = span.nbytes // 2 // _WEIGHTS_PER_EXCEPTION if encoding is Encoding.BF12 else 0
        parts = parts_of(encoding, span.nbytes, shape_of(matrix), exceptions)
        total += pages(min(span.nbytes, piece_nbytes(parts)))
    return total


def write_packs(store: Store, plan: PackPlan, progress: Progress | None = None) -> PackTotals:
    """Writes the packs of a plan into the cache, several layers at once; `progress` is told bytes of the source.

    The first failure stops the rest; finished layers stay. Raises NoSpace before anything is read if the disk
    cannot hold them, Missing if the source is out of reach, Corrupt if a weight is no number that the format can say.
    """
    root = store.roots[0].path
    if plan.fetch_nbytes and not store.may_fetch:
        where = store.catalog.location.path
        lost = (
            f"not found at {where}; was the directory moved? rebuild with df-index build"
            if where
            else ("not on this machine and fetching is off; run again without --offline and HF_HUB_OFFLINE")
        )
        raise Missing(f"{plan.fetch_nbytes:,} bytes of the spine are {lost}")
    if plan.pack_nbytes > (free := free_nbytes(root)):
        raise NoSpace(
            f"{root}: packs of {plan.pack_nbytes:,} bytes are to be written, and {free:,} are free; free some space, "
            "choose another --cache-dir, or fewer --layers"
        )
    telling = threading.Lock()

    def tell(nbytes: int) -> None:
        if progress is not None:
            with telling:
                progress(nbytes)

    stop = threading.Event()
    with (
        ThreadPoolExecutor(_LAYERS_AT_ONCE, "read") as readers,
        ThreadPoolExecutor(_LAYERS_AT_ONCE, "pack") as packers,
    ):
        jobs: list[Future[Pack]] = []
        try:
            for layer in plan.layers:
                jobs.append(packers.submit(_LayerPacker(store, plan.format, layer, readers, stop, tell).write))
            wait(jobs, return_when=FIRST_EXCEPTION)
            failed = [e for job in jobs if job.done() and not job.cancelled() and (e := job.exception())]
            if failed:
                raise failed[0]
        finally:
            stop.set()
            packers.shutdown(wait=True, cancel_futures=True)
    written = [job.result() for job in jobs]
    return PackTotals(len(written), plan.source_nbytes, sum(pack.nbytes for pack in written))


class _Stopped(Exception):
    """Another layer failed, or the user wants no more."""


class _LayerPacker:
    """Writes the pack of one layer."""

    def __init__(
        self,
        store: Store,
        format: PackFormat,
        layer: int,
        readers: ThreadPoolExecutor,
        stop: threading.Event,
        progress: Progress,
    ) -> None:
        self._store = store
        self._format = format
        self._layer = layer
        self._readers = readers
        self._stop = stop
        self._progress = progress

    def write(self) -> Pack:
        root, catalog = self._store.roots[0].path, self._store.catalog
        final = pack_folder(root, self._store.shard_ids, self._format) / pack_name(self._layer)
        part = temporary(root / "tmp", final.stem)
        group = catalog.spine(self._layer)
        numbers = sorted({span.shard for span in group.spans})
        shards = {n: SourceShard(self._store.shard_ids[n], source_mtime_ns(catalog, n)) for n in numbers}
        try:
            make_directory(part.parent)
            make_directory(final.parent)
            with open(part, "xb", buffering=0) as f:
                pieces = self._write_pieces(f, group)
                nbytes = f.tell()
                pack = Pack(final, self._format, self._layer, catalog.identity, shards, pieces, nbytes)
                f.seek(0)
                _write_all(f, header_bytes(pack))
            for number, shard in shards.items():
                if source_mtime_ns(catalog, number) != shard.mtime_ns:
                    raise BadCatalog(f"{catalog.shards[number].name}: changed while it was being packed; run it again")
            publish(part, final)
        except OSError as e:
            raise disk_error(e, final) from None
        finally:
            discard(part)
        return pack

    def _write_pieces(self, f: FileIO, group: SpineGroup) -> tuple[PackPiece, ...]:
        pieces: list[PackPiece] = []
        room = aligned(max(span.nbytes for span in group.spans))
        f.seek(header_room(len(group.spans)))
        with closing(self._sources(group.spans)) as sources:
            for (span, source), matrix in zip(sources, matrices_of(group), strict=True):
                try:
                    encoded = encode(self._format, source, matrix, room)
                except ValueError as e:
                    raise Corrupt(f"layer {self._layer}: {e}; check the checkpoint, or pack it as bf12") from None
                pieces.append(_write_piece(f, span, matrix, encoded))
                self._progress(span.nbytes)
        return tuple(pieces)

    def _sources(self, spans: tuple[Span, ...]) -> Generator[tuple[Span, Bytes], None, None]:
        """Each span with its bytes while the next is read. The memory is used again two steps later."""
        buffers = [own_slot(max(span.nbytes for span in spans)) for _ in range(min(2, len(spans)))]
        ahead: Future[Bytes] = self._readers.submit(self._read, spans[0], buffers[0])
        try:
            for number, span in enumerate(spans):
                source = ahead.result()
                if self._stop.is_set():
                    raise _Stopped
                if number + 1 < len(spans):
                    ahead = self._readers.submit(self._read, spans[number + 1], buffers[(number + 1) % 2])
                yield span, source
        finally:
            ahead.cancel()
            wait([ahead])

    def _read(self, span: Span, buffer: Bytes) -> Bytes:
        source = self._store.read(span, buffer, keep=False)
        return source if source.ctypes.data % 2 == 0 else source.copy()  # words may not lie at odd places


def _write_piece(f: FileIO, span: Span, matrix: Matrix | None, encoded: Encoded) -> PackPiece:
    """Writes a piece at the file's position, which is a page's start, and zeros up to the next page."""
    at, nbytes = f.tell(), len(encoded.piece)
    digest = xxhash.xxh3_128(encoded.piece.data).digest()
    _write_all(f, encoded.piece.data)
    _write_all(f, bytes(pages(nbytes) - nbytes))
    return PackPiece(span, encoded.encoding, shape_of(matrix), encoded.exceptions, at, nbytes, digest, encoded.parts)


def _write_all(f: FileIO, data: bytes | memoryview) -> None:
    view = memoryview(data)
    while len(view):
        view = view[f.write(view) :]
