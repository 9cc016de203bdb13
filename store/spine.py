"""The spine on its way: layers in the order of use, resident, ahead of the computation, or in pieces.

A piece is one span of the catalog, or its packed form. Pieces with rows of one matrix are used once, in a known order,
and pass through a ring; everything else of a layer is small and is held while the layer is computed, in one of two
buffers. Resident layers have memory of their own and are read once. All three are one walk: reads are issued in the
order of use as soon as there is memory for them, over the borders of layers, so that the drive never idles.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from deltafin.errors import DeltafinError
from deltafin.indexer import GLOBALS, LAYER_PREFIX, Place, Plannable, Span
from deltafin.store.arena import Arena, slot_nbytes
from deltafin.store.drive import wait_out
from deltafin.store.encodings import Bf12, Bf16, Encoding, Int8, Raw, decode, matrices_of
from deltafin.store.packs import Packed, PackSet
from deltafin.store.ring import Ring
from deltafin.store.stats import StoreStats

Bytes = npt.NDArray[np.uint8]
Stored = npt.NDArray[np.generic]
# Starts reading a span, or its packed form, into a slot; the future's result will be where in the slot it lies.
Submit = Callable[[Span, Packed | None, Bytes, Future[Bytes]], None]
# The matrices of a layer that are each multiplied once in a pass, by short name, in that order.
Uses = Callable[[int], Sequence[str]]

HEAD = "lm_head.weight"
FINAL_PREFIX = "language_model.model."
_DTYPES: dict[str, type[np.generic]] = {"BF16": np.uint16, "F32": np.float32, "U8": np.uint8}


Weights = Bf16 | Bf12 | Int8


@dataclass(frozen=True, slots=True)
class Block:
    """Some rows of a matrix, from row `first` on."""

    first: int
    weights: Weights


@dataclass(frozen=True, slots=True)
class Piece:
    """What one read brings: rows of the matrix `matrix`, or, where that is None, small tensors."""

    span: Span
    nbytes: int  # that are read
    matrix: str | None = None
    first: int = 0
    rows: int = 0
    k: int = 0
    packed: Packed | None = None

    def weights(self, content: Bytes) -> Weights:
        if self.packed is None:
            return Bf16(content.view(np.uint16).reshape(-1, self.k))
        arrays = self.packed.piece.arrays(content)
        assert isinstance(arrays, Bf16 | Bf12 | Int8), "rows of a matrix are no small tensors"
        return arrays

    def released(self, content: Bytes) -> Bytes:
        """What is held is never encoded but only laid out anew."""
        if self.packed is None:
            return content
        arrays = self.packed.piece.arrays(content)
        assert isinstance(arrays, Raw | Bf16), f"{self.packed.path}: {self.span} is encoded, but used as released"
        return decode(arrays)


@dataclass(frozen=True, slots=True)
class LayerPieces:
    """A layer's spine in the order in which it is used; the globals and the head are the last "layer"."""

    number: int
    held: tuple[Piece, ...]
    streamed: tuple[Piece, ...]
    tensors: tuple[Place, ...]  # that lie in held pieces
    prefix: str

    @property
    def held_nbytes(self) -> int:
        """Memory for what is held."""
        return sum(slot_nbytes(p.nbytes) for p in self.held)

    @property
    def slots_nbytes(self) -> int:
        """Memory for all of it."""
        return sum(slot_nbytes(p.nbytes) for p in (*self.held, *self.streamed))


def spine_pieces(catalog: Plannable, uses: Uses, packs: PackSet | None = None) -> list[LayerPieces]:
    """Every layer's pieces, and the globals with the head after them."""
    layers = [
        _layer_pieces(catalog, n, f"{LAYER_PREFIX}{n}.", uses(n), packs.layer(n) if packs is not None else None)
        for n in range(catalog.config.num_layers)
    ]
    final = _layer_pieces(catalog, GLOBALS, FINAL_PREFIX, (), None)
    table = catalog.head()
    hidden = table.tensor.shape[1]
    head = tuple(
        Piece(span, span.nbytes, HEAD, number * table.rows_per_span, span.nbytes // (2 * hidden), hidden)
        for number, span in enumerate(table.spans)
    )
    return [*layers, LayerPieces(GLOBALS, final.held, head, final.tensors, final.prefix)]


def _layer_pieces(
    catalog: Plannable, number: int, prefix: str, uses: Sequence[str], packed: Mapping[Span, Packed] | None
) -> LayerPieces:
    group = catalog.spine(number)
    streamed: dict[str, list[Piece]] = {name: [] for name in uses}
    held: list[Piece] = []
    for span, matrix in zip(group.spans, matrices_of(group), strict=True):
        pack = packed.get(span) if packed is not None else None
        name = "" if matrix is None else matrix.name.removeprefix(prefix)
        if matrix is None or name not in streamed:
            if pack is not None and pack.piece.encoding not in (Encoding.RAW, Encoding.BF16):
                pack = None  # what is not multiplied as a whole is used as released
            held.append(Piece(span, span.nbytes if pack is None else pack.piece.nbytes, packed=pack))
            continue
        rows, k = matrix.shape
        nbytes = span.nbytes if pack is None else pack.piece.nbytes
        streamed[name].append(Piece(span, nbytes, name, matrix.first_row, rows, k, pack))
    tensors = tuple(t for t in group.tensors if not streamed.get(t.name.removeprefix(prefix)))
    return LayerPieces(number, tuple(held), tuple(p for name in uses for p in streamed[name]), tensors, prefix)


# ---- reading -----------------------------------------------------------------------------------------------


@dataclass(slots=True, eq=False)
class _Load:
    """A piece on its way in one walk."""

    piece: Piece
    layer: int  # index in the reader's list
    slot: Bytes | None = None
    future: Future[Bytes] | None = None
    content: Bytes | None = None


class SpineReader:
    """Memory for the spine and what stays in it from pass to pass. One walk at a time."""

    def __init__(
        self,
        layers: Sequence[LayerPieces],
        submit: Submit,
        stats: StoreStats,
        *,
        resident: Collection[int] = (),
        ring_nbytes: int = 0,
    ) -> None:
        """`resident` are indices into `layers`; the others need `ring_nbytes`, at least `least_ring_nbytes(layers)`."""
        self.layers = tuple(layers)
        self.resident = frozenset(resident)
        self.submit = submit
        self.stats = stats
        self.under_way: SpineWalk | None = None
        away = [layer for n, layer in enumerate(layers) if n not in self.resident]
        held_nbytes = max((layer.held_nbytes for layer in away), default=0)
        ring_nbytes = max(ring_nbytes, least_ring_nbytes(away))
        kept_nbytes = sum(layers[n].slots_nbytes for n in self.resident)
        self.nbytes = ring_nbytes + 2 * held_nbytes + kept_nbytes
        self._arena = Arena(self.nbytes)
        self.ring = Ring(self._arena.take(ring_nbytes))
        self.buffers = (self._arena.take(held_nbytes), self._arena.take(held_nbytes))
        self.kept: dict[tuple[int, int], Bytes] = {}  # (layer, offset of the span): what was read for good
        self._kept_slots = {
            (n, piece.span.offset): self._arena.take(slot_nbytes(piece.nbytes))
            for n in sorted(self.resident)
            for piece in (*layers[n].held, *layers[n].streamed)
        }

    def kept_slot(self, load: _Load) -> Bytes:
        return self._kept_slots[load.layer, load.piece.span.offset]

    def walk(self, *, head: bool) -> SpineWalk:
        """Begins to read for one pass; without `head` only the globals come at the end. Close it."""
        if self.under_way is not None:
            self.under_way.close()  # an interrupt came before whoever began it could
        return SpineWalk(self, head=head)

    def close(self) -> None:
        """Gives the memory back; nothing read through this reader may be used after."""
        self.kept.clear()
        self._kept_slots.clear()
        self.buffers = (self.buffers[0][:0], self.buffers[1][:0])
        self.ring = Ring(self.buffers[0])
        self._arena.close()


def least_ring_nbytes(layers: Sequence[LayerPieces]) -> int:
    """So that the largest piece fits, and one more can be on its way while it is used."""
    sizes = sorted(slot_nbytes(p.nbytes) for layer in layers for p in layer.streamed)
    return sum(sizes[-2:])


@dataclass(slots=True)
class _Buffer:
    """One of the two for what is held: whose it is, and how full."""

    memory: Bytes
    layer: int | None = None
    taken: int = 0


class SpineWalk:
    """One pass's way through the spine. Layers are asked for in their order, and their matrices in theirs."""

    def __init__(self, reader: SpineReader, *, head: bool) -> None:
        self._reader = reader
        self._buffers = [_Buffer(memory) for memory in reader.buffers]
        self._of: list[tuple[list[_Load], dict[str, list[_Load]]]] = []
        self._queue: deque[_Load] = deque()
        self._begun: list[_Load] = []
        self._closed = False
        self.wait_s = 0.0  # that the caller had to wait
        for n, layer in enumerate(reader.layers):
            held = [_Load(piece, n) for piece in layer.held]
            streamed: dict[str, list[_Load]] = {}
            if head or layer.number != GLOBALS:
                for piece in layer.streamed:
                    assert piece.matrix is not None
                    streamed.setdefault(piece.matrix, []).append(_Load(piece, n))
            self._of.append((held, streamed))
            self._queue += held
            for loads in streamed.values():
                self._queue += loads
        reader.under_way = self
        try:
            self._advance()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> SpineWalk:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def layer(self, number: int) -> SpineLayer:
        """A layer whose held tensors are here; waits for them. The layer before is done with."""
        self._free_before(number)
        self._advance()
        layer = self._reader.layers[number]
        held, streamed = self._of[number]
        loads = [*held, *(load for loads in streamed.values() for load in loads)]
        nbytes = sum(load.piece.nbytes for load in loads if load.piece.matrix != HEAD)
        self._reader.stats.visit_spine(layer.number)
        self._reader.stats.add(spine_nbytes=nbytes, head_nbytes=sum(load.piece.nbytes for load in loads) - nbytes)
        contents = [(load.piece, load.piece.released(self._content(load))) for load in held]
        return SpineLayer(_tensors(layer, contents), streamed, self)

    def blocks(self, loads: Sequence[_Load]) -> Iterator[Block]:
        """A matrix's rows as they come; a block is valid until the next is asked for."""
        for load in loads:
            content = self._content(load)
            yield Block(load.piece.first, load.piece.weights(content))
            if load.layer not in self._reader.resident:
                assert load.slot is not None
                load.content = None
                self._reader.ring.release(load.slot)
                self._advance()

    def close(self) -> None:
        """Drops what has not begun and waits for what has, which writes into memory of the next walk's."""
        if self._closed:
            return
        self._queue.clear()
        flying = {load: load.future for load in self._begun if load.future is not None}
        try:
            wait_out(list(flying.values()))
        finally:
            self._closed = True
            for load, future in flying.items():
                whole = future.done() and not future.cancelled() and future.exception() is None
                if whole and load.layer in self._reader.resident:
                    self._settle(load)
            self._reader.ring.clear()
            self._reader.under_way = None

    def _content(self, load: _Load) -> Bytes:
        if load.content is None:
            if load.future is None:
                self._advance()
            assert load.future is not None, f"{load.piece} is asked for out of its order"
            begun = time.perf_counter()
            try:
                self._settle(load)
            except CancelledError:
                raise DeltafinError("the store was closed while the spine was being read") from None
            finally:
                self.wait_s += time.perf_counter() - begun
        assert load.content is not None
        return load.content

    def _settle(self, load: _Load) -> None:
        assert load.future is not None
        load.content = load.future.result()
        load.future = None
        if load.layer in self._reader.resident:
            self._reader.kept[load.layer, load.piece.span.offset] = load.content

    def _advance(self) -> None:
        """Issues reads in order for as long as there is memory for the next one."""
        reader = self._reader
        while self._queue:
            load = self._queue[0]
            kept = reader.kept.get((load.layer, load.piece.span.offset)) if load.layer in reader.resident else None
            if kept is not None:
                load.content = kept
                reader.stats.add(ram_spans=1, ram_nbytes=load.piece.nbytes)
            else:
                load.slot = self._place(load)
                if load.slot is None:
                    return
                load.future = Future()
                self._begun.append(load)  # before the read can be under way: closing waits for what is in this list
                reader.submit(load.piece.span, load.piece.packed, load.slot, load.future)
            self._queue.popleft()

    def _place(self, load: _Load) -> Bytes | None:
        if load.layer in self._reader.resident:
            return self._reader.kept_slot(load)
        nbytes = slot_nbytes(load.piece.nbytes)
        if load.piece.matrix is not None:
            return self._reader.ring.take(nbytes)
        buffer = next((b for b in self._buffers if b.layer == load.layer), None)
        if buffer is None:
            buffer = next((b for b in self._buffers if b.layer is None), None)
            if buffer is None:
                return None
            buffer.layer, buffer.taken = load.layer, 0
        start, buffer.taken = buffer.taken, buffer.taken + nbytes
        return buffer.memory[start : buffer.taken]

    def _free_before(self, number: int) -> None:
        for buffer in self._buffers:
            if buffer.layer is not None and buffer.layer < number:
                buffer.layer = None
        if self._begun and self._begun[0].layer < number:
            self._begun = [load for load in self._begun if load.layer >= number]


@dataclass(frozen=True, slots=True)
class SpineLayer:
    """One layer while it is computed."""

    tensors: Mapping[str, Stored]  # what is held, by short name
    streamed: Mapping[str, Sequence[_Load]] = field(default_factory=dict)
    walk: SpineWalk | None = None

    def rows(self, name: str) -> int:
        """Of a matrix."""
        if (loads := self.streamed.get(name)) is not None:
            return sum(load.piece.rows for load in loads)
        return len(self.tensors[name])

    def blocks(self, name: str) -> Iterator[Block]:
        """The rows of a matrix, ascending; once a pass for those that stream past, in the order of use."""
        if (loads := self.streamed.get(name)) is not None:
            assert self.walk is not None
            return self.walk.blocks(loads)
        held = self.tensors[name]
        assert held.dtype == np.uint16, name
        return iter((Block(0, Bf16(held.view(np.uint16))),))


def _tensors(layer: LayerPieces, contents: Sequence[tuple[Piece, Bytes]]) -> dict[str, Stored]:
    return {t.name.removeprefix(layer.prefix): tensor_of(t, [(p.span, c) for p, c in contents]) for t in layer.tensors}


def tensor_of(place: Place, contents: Sequence[tuple[Span, Bytes]]) -> Stored:
    """One tensor out of the spans that hold it: a view of one, or, of several or unaligned, a copy."""
    dtype = np.dtype(_DTYPES[place.dtype])
    parts = []
    for span, content in contents:
        begin, end = max(place.offset, span.offset), min(place.offset + place.nbytes, span.offset + span.nbytes)
        if span.shard == place.shard and begin < end:
            parts.append(content[begin - span.offset : end - span.offset])
    joined = parts[0] if len(parts) == 1 else np.concatenate(parts)
    array = joined.view(dtype).reshape(place.shape)
    return array if array.flags.aligned else array.copy()
