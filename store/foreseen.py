"""How long the pieces of a spine would be as packs that nobody has made yet."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from deltafin.store.encodings import Encoding, Matrix, PackFormat, encoding_for, parts_of, piece_nbytes
from deltafin.store.spine import LayerPieces, Piece

# Of bf12's weights, measured on normally distributed ones (docs/log.md).
EXCEPTIONS = 8e-5


def foreseen_packs(layers: Sequence[LayerPieces], format: PackFormat) -> list[LayerPieces]:
    """The layers, with every multiplied matrix as long as in a pack of this format; the globals are never packed."""
    return [*(_foreseen(layer, format) for layer in layers[:-1]), layers[-1]]


def piece_encoding(piece: Piece, format: PackFormat | None) -> Encoding:
    """What a matrix's piece is stored as: what its pack says, else what `format` would make of it."""
    if piece.packed is not None:
        return piece.packed.piece.encoding
    if format is None or piece.matrix is None:
        return Encoding.BF16
    return encoding_for(format, Matrix(piece.matrix, piece.first, (piece.rows, piece.k)))


def _foreseen(layer: LayerPieces, format: PackFormat) -> LayerPieces:
    return replace(layer, streamed=tuple(replace(p, nbytes=_nbytes(p, format)) for p in layer.streamed))


def _nbytes(piece: Piece, format: PackFormat) -> int:
    encoding = piece_encoding(piece, format)
    exceptions = int(EXCEPTIONS * piece.rows * piece.k) if encoding is Encoding.BF12 else 0
    return piece_nbytes(parts_of(encoding, piece.span.nbytes, (piece.rows, piece.k), exceptions))
