"""How the rows of a matrix lie in a pack: as they are, in 12 bits, or rounded to 8. Format: docs/packs.md.

bf12 loses nothing: the weights of a row lie within 16 powers of two of its largest, so four bits say the
exponent, and the few that do not fit lie apart. int8 is another model, and called so wherever it is shown.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache
from itertools import pairwise
from math import prod
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from deltafin.cext import _io
from deltafin.indexer import Place, Span, SpineGroup

Bytes = npt.NDArray[np.uint8]

PART_ALIGNMENT = 64  # a cache line, and the widest vector

_GROUP_COLUMNS, _GROUP_NBYTES = 32, 48
_MOST_COLUMNS = 1 << 16  # a column is 16 bits
_MOST_WEIGHTS = (1 << 32) - 1  # in one piece: exceptions are counted in 32 bits

# Not multiplied as a whole but used in slices, and the router, whose near ties int8 would decide otherwise.
_USED_IN_SLICES = "self_attn.kv_b_proj.weight"
_ROUTER = "block_sparse_moe.gate.weight"


class PackFormat(StrEnum):
    """What a pack was made for. Single pieces may be encoded less: small tensors, and where nothing is won."""

    BF16 = "bf16"
    BF12 = "bf12"
    INT8 = "int8"

    @property
    def as_released(self) -> bool:
        return self is not PackFormat.INT8

    @property
    def label(self) -> str:
        return str(self) if self.as_released else f"{self} (not as released)"


class Encoding(StrEnum):
    """Of one piece."""

    RAW = "raw"  # a span of small tensors, as it is
    BF16 = "bf16"
    BF12 = "bf12"
    INT8 = "int8"


@dataclass(frozen=True, slots=True)
class Raw:
    """Small tensors, as they lie in the shard."""

    bytes: Bytes


@dataclass(frozen=True, slots=True)
class Bf16:
    bits: npt.NDArray[np.uint16]  # [rows, columns]


@dataclass(frozen=True, slots=True)
class Bf12:
    codes: Bytes  # [rows, columns / 32 * 48]
    base: Bytes  # [rows]
    starts: npt.NDArray[np.uint32]  # [rows + 1]
    columns: npt.NDArray[np.uint16]  # [exceptions]
    values: npt.NDArray[np.uint16]  # [exceptions]


@dataclass(frozen=True, slots=True)
class Int8:
    q: npt.NDArray[np.int8]  # [rows, columns]
    scale: npt.NDArray[np.float32]  # [rows]


Arrays = Raw | Bf16 | Bf12 | Int8


@dataclass(frozen=True, slots=True)
class Matrix:
    """Rows of one BF16 matrix that a span holds, and nothing else."""

    name: str
    first_row: int
    shape: tuple[int, int]  # [rows, columns]


def matrices_of(group: SpineGroup) -> tuple[Matrix | None, ...]:
    """For each span of a group the matrix that it is rows of, if it is. One row is a vector, not multiplied by."""
    found: list[Matrix | None] = []
    places = iter(group.tensors)  # in file order, as the spans are
    place = next(places)
    for span in group.spans:
        while (place.shard, place.offset + place.nbytes) <= (span.shard, span.offset):
            place = next(places)
        found.append(_rows_of(place, span))
    return tuple(found)


def _rows_of(place: Place, span: Span) -> Matrix | None:
    if place.dtype != "BF16" or len(place.shape) != 2 or place.shape[0] == 1:
        return None
    row_nbytes, at = 2 * place.shape[1], span.offset - place.offset
    if at % row_nbytes or span.nbytes % row_nbytes or at + span.nbytes > place.nbytes:
        return None
    return Matrix(place.name, at // row_nbytes, (span.nbytes // row_nbytes, place.shape[1]))


def shape_of(matrix: Matrix | None) -> tuple[int, int] | None:
    return None if matrix is None else matrix.shape


def encoding_for(format: PackFormat, matrix: Matrix | None) -> Encoding:
    """What a piece is encoded as in a pack of this format, if that makes it smaller; else it stays bf16."""
    if matrix is None:
        return Encoding.RAW
    if format is PackFormat.BF16 or matrix.name.endswith(_USED_IN_SLICES):
        return Encoding.BF16
    if format is PackFormat.INT8:
        return Encoding.BF16 if matrix.name.endswith(_ROUTER) else Encoding.INT8
    return Encoding.BF12 if fits_bf12(*matrix.shape) else Encoding.BF16


def fits_bf12(rows: int, columns: int) -> bool:
    return columns % _GROUP_COLUMNS == 0 and 0 < columns <= _MOST_COLUMNS and rows * columns <= _MOST_WEIGHTS


class Part(NamedTuple):
    """One array of a piece. A tuple, because opening the packs of a model makes thousands at once."""

    name: str
    dtype: str  # as numpy calls it
    shape: tuple[int, ...]
    offset: int  # from the start of the piece
    nbytes: int

    def array(self, piece: Bytes) -> npt.NDArray[np.generic]:
        return piece[self.offset : self.offset + self.nbytes].view(self.dtype).reshape(self.shape)


def parts_of(encoding: Encoding, nbytes: int, shape: tuple[int, int] | None, exceptions: int = 0) -> tuple[Part, ...]:
    """The arrays of a piece that encodes a span of `nbytes`, rows of a matrix if it has a shape [rows, columns].

    Each starts on a multiple of 64, and the last one ends the piece. ValueError if there is no such piece.
    """
    fixed = _fixed_parts(encoding, nbytes, shape)
    if encoding is not Encoding.BF12:
        if exceptions:
            raise ValueError(f"{encoding} has no exceptions")
        return fixed
    columns = _after(fixed[-1], "columns", "<u2", (exceptions,), 2 * exceptions)
    return *fixed, columns, _after(columns, "values", "<u2", (exceptions,), 2 * exceptions)


@lru_cache(maxsize=1024)
def _fixed_parts(encoding: Encoding, nbytes: int, shape: tuple[int, int] | None) -> tuple[Part, ...]:
    """The arrays whose size follows from the matrix; a model has few matrices that differ."""
    if (shape is None) != (encoding is Encoding.RAW) or (shape is not None and 2 * prod(shape) != nbytes):
        raise ValueError(f"{nbytes} bytes of shape {shape} cannot be {encoding}")
    if shape is None:
        return (Part("bytes", "u1", (nbytes,), 0, nbytes),)
    rows, columns = shape
    if encoding is Encoding.BF16:
        return (Part("bits", "<u2", shape, 0, nbytes),)
    if encoding is Encoding.INT8:
        q = Part("q", "i1", shape, 0, rows * columns)
        return q, _after(q, "scale", "<f4", (rows,), 4 * rows)
    if not fits_bf12(rows, columns):
        raise ValueError(f"{rows} x {columns} weights are never bf12")
    row_nbytes = columns // _GROUP_COLUMNS * _GROUP_NBYTES
    codes = Part("codes", "u1", (rows, row_nbytes), 0, rows * row_nbytes)
    base = _after(codes, "base", "u1", (rows,), rows)
    return codes, base, _after(base, "starts", "<u4", (rows + 1,), 4 * (rows + 1))


def _after(part: Part, name: str, dtype: str, shape: tuple[int, ...], nbytes: int) -> Part:
    end = part.offset + part.nbytes
    return Part(name, dtype, shape, -(-end // PART_ALIGNMENT) * PART_ALIGNMENT, nbytes)


def piece_nbytes(parts: tuple[Part, ...]) -> int:
    return parts[-1].offset + parts[-1].nbytes


def arrays_of(encoding: Encoding, parts: tuple[Part, ...], piece: Bytes) -> Arrays:
    """The bytes of a piece as its arrays, nothing copied. `piece` starts on a multiple of 64."""
    assert piece.ctypes.data % PART_ALIGNMENT == 0
    return _KINDS[encoding](*(part.array(piece) for part in parts))


# Parts lie in the order of the fields.
_KINDS: dict[Encoding, Callable[..., Arrays]] = {
    Encoding.RAW: Raw,
    Encoding.BF16: Bf16,
    Encoding.BF12: Bf12,
    Encoding.INT8: Int8,
}


@dataclass(frozen=True, slots=True)
class Encoded:
    """A piece as it is written."""

    encoding: Encoding
    exceptions: int
    parts: tuple[Part, ...]
    piece: Bytes


def encode(format: PackFormat, source: Bytes, matrix: Matrix | None, room: Bytes) -> Encoded:
    """Encodes the bytes of a span. `room`, as long as they and on a multiple of 64, is memory for the result.

    ValueError if the format cannot say what is there.
    """
    encoding = encoding_for(format, matrix)
    if matrix is not None and encoding in (Encoding.BF12, Encoding.INT8):
        pack = _encode_bf12 if encoding is Encoding.BF12 else _encode_int8
        if (smaller := pack(source, matrix, room)) is not None:
            return smaller
        encoding = Encoding.BF16
    return Encoded(encoding, 0, parts_of(encoding, len(source), shape_of(matrix)), source)


def decode(arrays: Arrays) -> Bytes:
    """The bytes of the span that a piece was made from. ValueError if the arrays make no sense."""
    if isinstance(arrays, Raw):
        return arrays.bytes
    if isinstance(arrays, Bf16):
        return arrays.bits.reshape(-1).view(np.uint8)
    assert isinstance(arrays, Bf12), "int8 keeps less than it was given"
    rows, nbytes = arrays.codes.shape
    bits = np.empty((rows, nbytes // _GROUP_NBYTES * _GROUP_COLUMNS), np.uint16)
    _io.bf12_unpack(bits, arrays.codes, arrays.base, arrays.starts, arrays.columns, arrays.values)
    return bits.reshape(-1).view(np.uint8)


def _encode_bf12(source: Bytes, matrix: Matrix, room: Bytes) -> Encoded | None:
    bits = source.view(np.uint16).reshape(matrix.shape)
    base, starts = np.empty(len(bits), np.uint8), np.empty(len(bits) + 1, np.uint32)
    exceptions = _io.bf12_measure(base, starts, bits)
    parts = parts_of(Encoding.BF12, len(source), matrix.shape, exceptions)
    if piece_nbytes(parts) >= len(source):
        return None
    piece = _cleared(room, parts)
    arrays = arrays_of(Encoding.BF12, parts, piece)
    assert isinstance(arrays, Bf12)
    arrays.base[:], arrays.starts[:] = base, starts
    _io.bf12_pack(arrays.codes, arrays.columns, arrays.values, bits, base, starts)
    return Encoded(Encoding.BF12, exceptions, parts, piece)


def _encode_int8(source: Bytes, matrix: Matrix, room: Bytes) -> Encoded | None:
    bits = source.view(np.uint16).reshape(matrix.shape)
    parts = parts_of(Encoding.INT8, len(source), matrix.shape)
    if piece_nbytes(parts) >= len(source):
        return None
    piece = _cleared(room, parts)
    arrays = arrays_of(Encoding.INT8, parts, piece)
    assert isinstance(arrays, Int8)
    if (row := _io.int8_pack(arrays.q, arrays.scale, bits)) < len(bits):
        raise ValueError(f"{matrix.name}: row {matrix.first_row + row} holds an infinity or NaN, which int8 cannot say")
    return Encoded(Encoding.INT8, 0, parts, piece)


def _cleared(room: Bytes, parts: tuple[Part, ...]) -> Bytes:
    """The part of `room` that a piece takes, with zeros in its gaps."""
    piece = room[: piece_nbytes(parts)]
    for part, following in pairwise(parts):
        piece[part.offset + part.nbytes : following.offset] = 0
    return piece


def aligned(nbytes: int) -> Bytes:
    """Fresh memory that starts on a multiple of 64."""
    memory = np.empty(nbytes + PART_ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % PART_ALIGNMENT
    return memory[start : start + nbytes]
