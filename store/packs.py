"""Packs: the spine of a layer re-encoded in one file whose pieces start on pages. Format: docs/packs.md.

A pack is derived and disposable. It is used only if its header is sound to the last byte, the file has
the length that the header calls for, and every span in it is one of the catalog's, of the same shards;
otherwise it is passed over. Opening reads headers, never data: whoever reads a piece compares its digest.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypedDict

from deltafin.errors import Corrupt, DiskError
from deltafin.indexer import Catalog, Span, disk_error
from deltafin.store.encodings import (
    Arrays,
    Bytes,
    Encoding,
    PackFormat,
    Part,
    arrays_of,
    encoding_for,
    matrices_of,
    parts_of,
    piece_nbytes,
    shape_of,
)

log = logging.getLogger(__name__)

PAGE_NBYTES = 4096
VERSION = 1
_MAGIC = b"DfPack\r\n"
_PREFIX = struct.Struct("<8sIIQ32s")  # magic, version, bytes of the header, of its JSON, SHA-256 of the JSON
_MOST_HEADER_NBYTES = 64 << 20
# What the JSON of one piece may take, and of everything else; the header's room is fixed before the digests are known.
_PIECE_JSON_NBYTES, _OTHER_JSON_NBYTES = 640, 4096


@dataclass(frozen=True, slots=True)
class PackPiece:
    """One span of the layer in its pack."""

    span: Span
    encoding: Encoding
    shape: tuple[int, int] | None  # [rows, columns] if the span is rows of a matrix
    exceptions: int  # of bf12
    offset: int  # in the file, a multiple of a page
    nbytes: int  # without the zeros up to the next page
    xxh3: bytes  # XXH3-128 of these bytes, big-endian
    parts: tuple[Part, ...]

    def arrays(self, piece: Bytes) -> Arrays:
        """The piece's bytes as arrays, nothing copied; `piece` may go on behind them and starts on a multiple of 64."""
        return arrays_of(self.encoding, self.parts, piece)


@dataclass(frozen=True, slots=True)
class Packed:
    """A piece and the file it lies in: all that reading it takes."""

    path: Path
    piece: PackPiece


@dataclass(frozen=True, slots=True)
class SourceShard:
    """A shard that a pack was made from. `mtime_ns` stands in where no digest of the whole shard is published."""

    id: bytes
    mtime_ns: int | None


@dataclass(frozen=True, slots=True)
class Pack:
    """One layer's file; `pieces` are in the order of the catalog's spans."""

    path: Path
    format: PackFormat
    layer: int
    model: str  # the catalog's identity, for people
    shards: Mapping[int, SourceShard]  # by their number in the catalog
    pieces: tuple[PackPiece, ...]
    nbytes: int


@dataclass(frozen=True, slots=True)
class PackSet:
    """The packs of one format that fit a catalog, by layer."""

    format: PackFormat
    packs: Mapping[int, Pack]
    complaints: tuple[str, ...]  # a line for each pack that was passed over
    passed_over: tuple[int, ...] = ()  # layers whose packs are unusable in every root

    @property
    def nbytes(self) -> int:
        return sum(pack.nbytes for pack in self.packs.values())

    def layer(self, number: int) -> Mapping[Span, Packed]:
        """A layer's pieces by the spans that they stand for; empty if it is not packed."""
        pack = self.packs.get(number)
        return {} if pack is None else {piece.span: Packed(pack.path, piece) for piece in pack.pieces}


def open_packs(roots: Sequence[Path], catalog: Catalog, shard_ids: Sequence[bytes], format: PackFormat) -> PackSet:
    """Looks for each layer's pack in the roots in order; a damaged or unfitting one is passed over, and said."""
    packs: dict[int, Pack] = {}
    complaints: list[str] = []
    unusable: set[int] = set()
    for root in roots:
        folder = pack_folder(root, shard_ids, format)
        try:
            there = set(os.listdir(folder))
        except (FileNotFoundError, NotADirectoryError):
            continue
        except OSError as e:
            complaints.append(f"{folder}: cannot be read ({e.strerror}); passed over")
            continue
        for layer in range(catalog.config.num_layers):
            path = folder / pack_name(layer)
            if layer in packs or path.name not in there:
                continue
            try:
                packs[layer] = open_pack(path, catalog, shard_ids, format, layer)
            except (Corrupt, DiskError) as e:
                unusable.add(layer)
                complaints.append(f"{e}; passed over: write it again with df-fetch spine {catalog.name} --as {format}")
    if complaints:
        others = len(complaints) - 1
        more = f" (and {others} more pack{'s' * (others > 1)})" if others else ""
        log.warning("%s%s", complaints[0], more)
    return PackSet(format, packs, tuple(complaints), tuple(sorted(unusable - packs.keys())))


def open_pack(path: Path, catalog: Catalog, shard_ids: Sequence[bytes], format: PackFormat, layer: int) -> Pack:
    """A pack that is the catalog's layer in this format. Raises Corrupt or DiskError; the message names the file."""
    pack = read_header(path)
    if (pack.format, pack.layer) != (format, layer):
        raise Corrupt(f"{path}: this is layer {pack.layer} as {pack.format}, expected layer {layer} as {format}")
    for number, shard in pack.shards.items():
        if number >= len(shard_ids) or shard.id != shard_ids[number]:
            raise Corrupt(f"{path}: this pack was made from another model")
        if shard.mtime_ns is not None and shard.mtime_ns != (source_mtime_ns(catalog, number) or shard.mtime_ns):
            raise Corrupt(f"{path}: {catalog.shards[number].name} was changed after this pack was made from it")
    group = catalog.spine(layer)
    if tuple(piece.span for piece in pack.pieces) != group.spans:
        raise Corrupt(f"{path}: this pack was made for a catalog that cuts the spine otherwise")
    if not pack.shards.keys() >= {span.shard for span in group.spans}:
        raise Corrupt(f"{path}: the header does not say which shards this pack was made from")
    for piece, matrix in zip(pack.pieces, matrices_of(group), strict=True):
        wanted = encoding_for(format, matrix)
        # What would not have become smaller stays bf16.
        right = piece.encoding is wanted or (piece.encoding is Encoding.BF16 and matrix is not None)
        if not right or piece.shape != shape_of(matrix):
            raise Corrupt(f"{path}: bytes from {piece.span.offset} are {piece.encoding}, expected {wanted}")
    return pack


def source_mtime_ns(catalog: Catalog, shard: int) -> int | None:
    """When a local shard without a published digest was last changed: its identity cannot tell what is in it."""
    if catalog.location.path is None or catalog.shards[shard].sha256 is not None:
        return None
    try:
        return os.stat(Path(catalog.location.path) / catalog.shards[shard].name).st_mtime_ns
    except OSError:
        return None


# ---- where packs lie ----------------------------------------------------------------------------------


def model_key(shard_ids: Sequence[bytes]) -> str:
    """Names a model by all its shards, so that another commit's packs lie elsewhere."""
    return hashlib.sha256(b"deltafin packs\n" + b"".join(shard_ids)).hexdigest()[:32]


def pack_folder(root: Path, shard_ids: Sequence[bytes], format: PackFormat) -> Path:
    return root / "packs" / model_key(shard_ids) / format


_PACK_NAME = re.compile(r"layer-\d{5}\.pack")


def pack_name(layer: int) -> str:
    return f"layer-{layer:05}.pack"


def odd_packs(root: Path) -> list[Path]:
    """What is named as a pack but is no file."""
    return [
        path
        for path in sorted((root / "packs").glob("*/*/layer-*.pack"))
        if _PACK_NAME.fullmatch(path.name) and path.parent.name in list(PackFormat) and not path.is_file()
    ]


def pack_files(root: Path) -> Iterator[tuple[Path, int]]:
    """Every file that lies and is named as a pack would be, with its length, whichever model it is of."""
    for path in sorted((root / "packs").glob("*/*/layer-*.pack")):
        if _PACK_NAME.fullmatch(path.name) is None or path.parent.name not in list(PackFormat):
            continue
        try:
            if path.is_file():
                yield path, path.stat().st_size
        except FileNotFoundError:
            continue  # removed meanwhile
        except OSError as e:
            raise disk_error(e, path, "cannot look at the pack") from None


# ---- the header ---------------------------------------------------------------------------------------


def header_room(pieces: int) -> int:
    """Bytes kept for the header of a pack: where its first piece starts."""
    return pages(_PREFIX.size + _OTHER_JSON_NBYTES + pieces * _PIECE_JSON_NBYTES)


def pages(nbytes: int) -> int:
    return -(-nbytes // PAGE_NBYTES) * PAGE_NBYTES


def header_bytes(pack: Pack) -> bytes:
    """The header of a pack, up to its first piece."""
    about = {
        "format": pack.format,
        "layer": pack.layer,
        "model": pack.model,
        "shards": {
            str(number): {"id": shard.id.hex(), "mtime_ns": shard.mtime_ns} for number, shard in pack.shards.items()
        },
        "pieces": [_piece_json(piece) for piece in pack.pieces],
    }
    text = json.dumps(about, separators=(",", ":")).encode()
    room = header_room(len(pack.pieces))
    assert _PREFIX.size + len(text) <= room
    prefix = _PREFIX.pack(_MAGIC, VERSION, room, len(text), hashlib.sha256(text).digest())
    return (prefix + text).ljust(room, b"\0")


class _PieceJson(TypedDict):
    """A piece in the header; what was read is believed only once it has been checked."""

    span: list[int]  # shard, offset, length
    encoding: str
    shape: list[int] | None
    exceptions: int
    offset: int
    nbytes: int
    xxh3: str
    parts: dict[str, list[int]]  # offset in the piece, length


def _piece_json(piece: PackPiece) -> _PieceJson:
    return {
        "span": [piece.span.shard, piece.span.offset, piece.span.nbytes],
        "encoding": piece.encoding,
        "shape": None if piece.shape is None else list(piece.shape),
        "exceptions": piece.exceptions,
        "offset": piece.offset,
        "nbytes": piece.nbytes,
        "xxh3": piece.xxh3.hex(),
        "parts": _parts_json(piece.parts),
    }


def _parts_json(parts: tuple[Part, ...]) -> dict[str, list[int]]:
    return {part.name: [part.offset, part.nbytes] for part in parts}


def read_header(path: Path) -> Pack:
    """A pack as its header describes it, checked against itself and the file's length. Raises Corrupt, DiskError."""
    try:
        if not path.is_file():  # a pipe would wait for a writer
            raise Corrupt(f"{path}: not a file")
        with open(path, "rb") as f:
            nbytes = os.fstat(f.fileno()).st_size
            prefix = f.read(_PREFIX.size)
            rest = b""
            if len(prefix) == _PREFIX.size:
                rest = f.read(max(0, min(_PREFIX.unpack(prefix)[2], _MOST_HEADER_NBYTES) - _PREFIX.size))
    except OSError as e:
        raise disk_error(e, path, "cannot read the pack") from None
    try:
        return _parse(path, nbytes, prefix, rest)
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError, struct.error) as e:
        raise Corrupt(f"{path}: the header of this pack is damaged ({e})") from None


def _parse(path: Path, nbytes: int, prefix: bytes, rest: bytes) -> Pack:
    if len(prefix) < _PREFIX.size:
        raise ValueError(f"it ends after {nbytes} bytes")
    magic, version, room, text_nbytes, digest = _PREFIX.unpack(prefix)
    if magic != _MAGIC:
        raise ValueError("it does not begin like one")
    if version != VERSION:
        raise ValueError(f"version {version}, expected {VERSION}")
    text = rest[:text_nbytes]
    if hashlib.sha256(text).digest() != digest:
        raise ValueError("its digest differs")
    about = json.loads(text)
    pieces: list[PackPiece] = []
    at = header_room(len(about["pieces"]))
    if room != at or len(prefix) + len(rest) != room or rest.count(0, text_nbytes) != len(rest) - text_nbytes:
        raise ValueError("it has the wrong length")
    for found in about["pieces"]:
        pieces.append(_parse_piece(found, at))
        at = pages(at + pieces[-1].nbytes)
    if at != nbytes:
        raise ValueError(f"the file has {nbytes} bytes, expected {at}")
    shards = {
        _whole(int(number)): SourceShard(_hex(shard["id"], 32), shard["mtime_ns"] and _whole(shard["mtime_ns"]))
        for number, shard in about["shards"].items()
    }
    layer, model = _whole(about["layer"]), str(about["model"])
    return Pack(path, PackFormat(about["format"]), layer, model, shards, tuple(pieces), nbytes)


def _parse_piece(found: _PieceJson, at: int) -> PackPiece:
    """A piece that starts at byte `at`; everything that follows from its kind and size must be as it follows."""
    span, encoding, exceptions = Span(*found["span"]), Encoding(found["encoding"]), found["exceptions"]
    shape = None
    if found["shape"] is not None:
        rows, columns = found["shape"]
        shape = _whole(rows), _whole(columns)
    _whole(span.shard), _whole(span.offset), _whole(span.nbytes), _whole(exceptions)
    parts = parts_of(encoding, span.nbytes, shape, exceptions)
    nbytes = piece_nbytes(parts)
    if found["parts"] != _parts_json(parts) or found["offset"] != at or found["nbytes"] != nbytes:
        raise ValueError(f"the piece at {at} does not lie as it should")
    return PackPiece(span, encoding, shape, exceptions, at, nbytes, _hex(found["xxh3"], 16), parts)


def _whole(value: object) -> int:
    if type(value) is not int or not 0 <= value < 1 << 63:
        raise ValueError(f"{value!r:.40} is no number of something")
    return value


def _hex(value: object, nbytes: int) -> bytes:
    digest = bytes.fromhex(value) if isinstance(value, str) else b""
    if len(digest) != nbytes:
        raise ValueError(f"{value!r:.40} is no digest")
    return digest
