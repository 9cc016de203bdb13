"""The catalog: one file that says where every byte of a model lies. Format: docs/catalog.md.

An LMDB data file with a trailer of one page behind it that holds the LMDB part's length and SHA-256.
Written once, never changed, replaced by rename; so it is opened without locks, also from a read-only
place. The digest is checked by reading before LMDB maps anything: LMDB itself has no checksums, and a
mapped file that was cut short kills the process.
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
import threading
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

import lmdb
import numpy as np
import numpy.typing as npt

from deltafin.errors import BadCatalog, DeltafinError, NotFound, OldCatalog
from deltafin.indexer import roles
from deltafin.indexer.config import ModelConfig, parse_config
from deltafin.indexer.layout import Layout, Place, Shard
from deltafin.indexer.publish import discard, disk_error, publish, temporary
from deltafin.indexer.sources import Location

FORMAT = "deltafin-catalog"
VERSION = 2
_PAGE_NBYTES = 4096
_READ_NBYTES = 1 << 20
_EXPERT = struct.Struct("<HQ")  # shard number, offset
_EXPERT_KEY = struct.Struct(">cHH")  # b"e", layer, expert
_LMDB_MAGIC = 0xBEEFC0DE

# How the spine is cut into spans, the unit of fetching, caching, checking and streaming. A matrix is multiplied
# block by block as its spans arrive, so a span is rows of one matrix, or small tensors together. Two of them must fit
# where memory is small, and one is fetched again as a whole after a kill, so they must not be huge; nor so small that
# requests dominate.
SPINE_SPAN_NBYTES = 32 << 20
EMBEDDING_SPAN_NBYTES = 4 << 20
SMALL_TENSOR_NBYTES = 64 << 10  # up to here a matrix is read together with its neighbours

GLOBALS = -1  # the "layer" of final norms, in selections of the spine


@dataclass(frozen=True, slots=True)
class Span:
    """Bytes somewhere in a shard; `shard` indexes `Catalog.shards`."""

    shard: int
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class SpineGroup:
    """What is read in one visit: a layer's spine, or the small global tensors."""

    spans: tuple[Span, ...]  # in file order; consecutive ones may touch
    tensors: tuple[Place, ...]  # in file order, each inside one run of touching spans


@dataclass(frozen=True, slots=True)
class RowTable:
    """A [vocab, hidden] table that is read by rows: span i holds rows i*rows_per_span and following."""

    tensor: Place
    rows_per_span: int
    spans: tuple[Span, ...]


@dataclass(frozen=True, slots=True)
class Totals:
    """Sums over a catalog, for `show` and for planning."""

    shards: int
    file_nbytes: int
    tensors: int
    tensor_nbytes: int
    layers: int
    experts: int
    expert_nbytes: int  # of one expert
    spine_nbytes: int  # everything of the text model that is not a routed expert, embeddings included
    ignored_tensors: int
    ignored_nbytes: int


def write_catalog(path: Path, name: str, location: Location, layout: Layout, files: dict[str, bytes]) -> None:
    """Builds the catalog beside `path` and publishes it there. `files` holds config.json and the tokenizer's files."""
    records = dict(_records(name, location, layout, files))
    part = temporary(path.parent, path.stem)
    try:
        _write_lmdb(part, records)
        nbytes, digest = part.stat().st_size, _sha256(part)
        trailer = {
            "format": FORMAT,
            "version": VERSION,
            "lmdb_nbytes": nbytes,
            "sha256": digest,
            "records": len(records),
        }
        with open(part, "ab") as f:
            f.write(json.dumps(trailer).encode().ljust(_PAGE_NBYTES, b"\n"))
        publish(part, path)
    except OSError as e:
        raise disk_error(e, path) from None
    except lmdb.Error as e:
        raise DeltafinError(f"{path}: cannot write the catalog ({e}); is the disk full?") from None
    finally:
        discard(part)


class Catalog:
    """A finished catalog, open for reading. Several may be open on one file; close each."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._handle = _Handle.open(path)
        self._closed = False
        try:
            about = json.loads(self._get(b"a/about"))
            self.name: str = about["name"]
            self.location = Location(**about["location"])
            self.totals = Totals(**about["totals"])
            self.layout_sha256: str = about["layout_sha256"]
            self.config: ModelConfig = parse_config(self._get(b"f/config.json"), f"{path}: config.json")
            self.shards: tuple[Shard, ...] = tuple(
                Shard(**json.loads(self._get(b"h/%05d" % i))) for i in range(self.totals.shards)
            )
            self.expert_nbytes: int = self.totals.expert_nbytes
        except BaseException:
            self.close()
            raise

    @property
    def identity(self) -> str:
        """Short name of the weights: repository and commit, or a digest of the layout for a local directory."""
        where = self.location
        if where.repo and where.commit:
            return f"{where.repo}@{where.commit[:12]}"
        return f"{self.name}@{self.layout_sha256[:12]}"

    def __enter__(self) -> Catalog:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._handle.release()

    def expert_spans(self, layer: int, experts: Iterable[int]) -> list[Span]:
        """The spans of experts of one layer, in the order asked for."""
        nbytes = self.expert_nbytes
        spans = []
        with self._handle.env.begin() as txn:
            for expert in experts:
                if not (0 <= layer < 65536 and 0 <= expert < 65536):
                    raise NotFound(f"{self.name}: no expert {expert} in layer {layer}")
                record = txn.get(_EXPERT_KEY.pack(b"e", layer, expert))
                if record is None:
                    raise NotFound(f"{self.name}: no expert {expert} in layer {layer}")
                shard, offset = _EXPERT.unpack(record)
                spans.append(Span(shard, offset, nbytes))
        return spans

    def expert_table(self) -> npt.NDArray[np.int64]:
        """Every expert: layer, expert, shard, offset [experts, 4], by layer and number."""
        keys, values = [], []
        with self._handle.env.begin() as txn:
            cursor = txn.cursor()
            if cursor.set_range(b"e"):
                for key, value in cursor:
                    if key[:1] != b"e":
                        break
                    keys.append(key)
                    values.append(value)
        table = np.empty((len(keys), 4), np.int64)
        named = np.frombuffer(b"".join(keys), np.dtype([("e", "S1"), ("layer", ">u2"), ("expert", ">u2")]))
        placed = np.frombuffer(b"".join(values), np.dtype([("shard", "<u2"), ("offset", "<u8")]))
        table[:, 0], table[:, 1] = named["layer"], named["expert"]
        table[:, 2], table[:, 3] = placed["shard"], placed["offset"]
        return table

    def spine(self, layer: int) -> SpineGroup:
        """The spine of a layer, or the final norms for GLOBALS."""
        group = json.loads(self._get(b"s/final" if layer == GLOBALS else b"s/%05d" % layer))
        return SpineGroup(
            tuple(Span(*s) for s in group["spans"]),
            tuple(Place(t[0], t[1], tuple(t[2]), *t[3:]) for t in group["tensors"]),
        )

    def embedding(self) -> RowTable:
        return self._table(b"t/embedding")

    def head(self) -> RowTable:
        return self._table(b"t/head")

    def file(self, name: str) -> bytes | None:
        """A small file of the checkpoint as it was indexed, e.g. "tiktoken.model"."""
        with self._handle.env.begin() as txn:
            value: bytes | None = txn.get(b"f/" + name.encode())
            return value

    def _table(self, key: bytes) -> RowTable:
        table = json.loads(self._get(key))
        t = table["tensor"]
        place = Place(t[0], t[1], tuple(t[2]), *t[3:])
        return RowTable(place, table["rows_per_span"], tuple(Span(*s) for s in table["spans"]))

    def _get(self, key: bytes) -> bytes:
        with self._handle.env.begin() as txn:
            value: bytes | None = txn.get(key)
        if value is None:
            raise NotFound(f"{self.path}: the catalog has no record {key.decode(errors='replace')}")
        return value


class _Handle:
    """One LMDB environment per file and process: LMDB must not open the same file twice."""

    _open: dict[tuple[int, int], _Handle] = {}  # noqa: RUF012  (shared on purpose: it is the process's registry)
    _lock = threading.Lock()

    def __init__(self, key: tuple[int, int], env: lmdb.Environment) -> None:
        self.key = key
        self.env = env
        self.users = 1

    @classmethod
    def open(cls, path: Path) -> _Handle:
        with cls._lock:
            for _ in range(_OPENINGS):
                key = _identity(path)
                if handle := cls._open.get(key):
                    handle.users += 1
                    return handle
                try:
                    env = _map(path)
                except BadCatalog:
                    if _identity(path) == key:
                        raise
                    continue  # one file was checked, and another opened: a new one was published in between
                if _identity(path) == key:
                    cls._open[key] = handle = cls(key, env)
                    return handle
                env.close()
        raise BadCatalog(f"{path}: replaced by another again and again while it was being opened; run this again")

    def release(self) -> None:
        with self._lock:
            self.users -= 1
            if self.users == 0:
                del self._open[self.key]
                self.env.close()


_REBUILD = "rebuild it with df-index build or df-fetch verify --repair"
_OPENINGS = 5  # of a catalog that is replaced meanwhile


def _identity(path: Path) -> tuple[int, int]:
    try:
        stat = os.stat(path)
        if not path.is_file():
            raise BadCatalog(f"{path}: not a file; remove it and build the catalog with df-index build")
    except OSError as e:
        raise NotFound(f"{path}: no catalog ({e.strerror}); build one with df-index build") from None
    return stat.st_dev, stat.st_ino


def _map(path: Path) -> lmdb.Environment:
    records = _check_digest(path)
    try:
        env = lmdb.open(str(path), subdir=False, readonly=True, lock=False, create=False, readahead=False)
    except lmdb.Error as e:
        raise BadCatalog(f"{path}: LMDB cannot open the catalog ({e}); {_REBUILD}") from None
    if (found := env.stat()["entries"]) != records:
        env.close()
        raise BadCatalog(f"{path}: the catalog has {found} records, expected {records}; {_REBUILD}")
    return env


def _check_digest(path: Path) -> int:
    """Refuses a file that is not, to the byte, a catalog that this version wrote; returns its number of records."""
    try:
        nbytes = path.stat().st_size
        with open(path, "rb") as f:
            start = f.read(24)
            f.seek(max(0, nbytes - _PAGE_NBYTES))
            end = f.read()
    except OSError as e:
        raise BadCatalog(f"{path}: cannot read the catalog ({e.strerror})") from None
    try:
        trailer = json.loads(end)
        written_by, version = trailer["format"], trailer["version"]
        lmdb_nbytes, want, records = int(trailer["lmdb_nbytes"]), str(trailer["sha256"]), int(trailer["records"])
    except (ValueError, TypeError, KeyError, OverflowError, RecursionError):
        raise BadCatalog(f"{path}: this is no catalog, or it was cut short ({nbytes} bytes); {_REBUILD}") from None
    magic, lmdb_format = struct.unpack_from("<II", start, 16) if len(start) == 24 else (0, 0)
    if written_by != FORMAT or version != VERSION or (magic == _LMDB_MAGIC and lmdb_format != 1):
        raise OldCatalog(f"{path}: this catalog was written by another version of Deltafin or LMDB; {_REBUILD}")
    if lmdb_nbytes + _PAGE_NBYTES != nbytes:
        raise BadCatalog(f"{path}: the catalog has {nbytes} bytes, expected {lmdb_nbytes + _PAGE_NBYTES}; {_REBUILD}")
    if (got := _sha256(path, lmdb_nbytes)) != want:
        raise BadCatalog(f"{path}: the catalog is damaged (digest {got[:16]}.., expected {want[:16]}..); {_REBUILD}")
    return records


def _sha256(path: Path, nbytes: int | None = None) -> str:
    digest = hashlib.sha256()
    left = path.stat().st_size if nbytes is None else nbytes
    with open(path, "rb") as f:
        while left > 0 and (block := f.read(min(left, _READ_NBYTES))):
            digest.update(block)
            left -= len(block)
    return digest.hexdigest()


# ---- writing --------------------------------------------------------------------------------------


def _write_lmdb(path: Path, records: dict[bytes, bytes]) -> None:
    """One transaction with sorted keys: the smallest file, and the fastest."""
    room = sum(len(k) + len(v) + 64 for k, v in records.items())
    env = lmdb.open(str(path), subdir=False, lock=False, map_size=16 * (1 << 20) + 4 * room, sync=False)
    try:
        with env.begin(write=True) as txn:
            for key in sorted(records):
                txn.put(key, records[key], append=True)
    finally:
        env.close()


def _records(name: str, location: Location, layout: Layout, files: dict[str, bytes]) -> Iterable[tuple[bytes, bytes]]:
    about = {
        "name": name,
        "location": asdict(location),
        "totals": asdict(_totals(layout)),
        "layout_sha256": _layout_sha256(layout),
        "created": int(time.time()),
    }
    yield b"a/about", _json(about)
    for file, raw in files.items():
        yield b"f/" + file.encode(), raw
    for i, shard in enumerate(layout.shards):
        yield b"h/%05d" % i, _json(asdict(shard))
    for layer, places in layout.spine.items():
        yield b"s/%05d" % layer, _json(_group_record(spine_group(places)))
    final = sorted(
        (layout.globals[roles.FINAL_PREFIX + n] for n in roles.FINAL_NAMES), key=lambda p: (p.shard, p.offset)
    )
    yield b"s/final", _json(_group_record(spine_group(final)))
    yield b"t/embedding", _json(_table_record(row_table(layout.globals[roles.EMBEDDING], EMBEDDING_SPAN_NBYTES)))
    yield b"t/head", _json(_table_record(row_table(layout.globals[roles.HEAD], SPINE_SPAN_NBYTES)))
    for layer, spans in layout.experts.items():
        for expert, (shard, offset) in enumerate(spans.tolist()):
            yield _EXPERT_KEY.pack(b"e", layer, expert), _EXPERT.pack(shard, offset)


def spine_group(places: list[Place]) -> SpineGroup:
    """Tensors in file order as they are read: matrices cut at rows, and runs of touching small tensors."""
    return SpineGroup(tuple(Span(*span) for span in _spans(places)), tuple(places))


def row_table(place: Place, limit: int) -> RowTable:
    """A table cut at rows: as many to a span, a power of two, as fit into `limit` bytes."""
    rows, row_nbytes = place.shape[0], place.nbytes // place.shape[0]
    rows_per_span = 1
    while rows_per_span * 2 * row_nbytes <= limit and rows_per_span < rows:
        rows_per_span *= 2
    step = rows_per_span * row_nbytes
    spans = (Span(place.shard, place.offset + at, min(step, place.nbytes - at)) for at in range(0, place.nbytes, step))
    return RowTable(place, rows_per_span, tuple(spans))


def _group_record(group: SpineGroup) -> dict[str, object]:
    return {"spans": [_span(s) for s in group.spans], "tensors": [_place(p) for p in group.tensors]}


def _table_record(table: RowTable) -> dict[str, object]:
    spans = [_span(s) for s in table.spans]
    return {"tensor": _place(table.tensor), "rows_per_span": table.rows_per_span, "spans": spans}


def _spans(places: list[Place]) -> list[tuple[int, int, int]]:
    spans: list[tuple[int, int, int]] = []
    open_end: tuple[int, int] | None = None  # shard and offset at which a small tensor may join the last span
    for p in places:
        if len(p.shape) == 2 and p.nbytes > SMALL_TENSOR_NBYTES:
            spans += _row_spans(p)
            open_end = None
            continue
        if open_end == (p.shard, p.offset) and spans[-1][2] + p.nbytes <= SPINE_SPAN_NBYTES:
            spans[-1] = (p.shard, spans[-1][1], spans[-1][2] + p.nbytes)
        else:
            spans.append((p.shard, p.offset, p.nbytes))
        open_end = (p.shard, p.offset + p.nbytes)
    return spans


def _row_spans(place: Place) -> list[tuple[int, int, int]]:
    """A matrix in as few spans as its size asks for, all of nearly the same number of rows."""
    rows, row_nbytes = place.shape[0], place.nbytes // place.shape[0]
    pieces = min(rows, -(-place.nbytes // SPINE_SPAN_NBYTES))
    step = -(-rows // pieces) * row_nbytes
    return [(place.shard, place.offset + at, min(step, place.nbytes - at)) for at in range(0, place.nbytes, step)]


def _span(s: Span) -> tuple[int, int, int]:
    return s.shard, s.offset, s.nbytes


def _place(p: Place) -> tuple[str, str, tuple[int, ...], int, int, int]:
    return p.name, p.dtype, p.shape, p.shard, p.offset, p.nbytes


def _totals(layout: Layout) -> Totals:
    spine = sum(p.nbytes for places in layout.spine.values() for p in places)
    return Totals(
        shards=len(layout.shards),
        file_nbytes=sum(s.nbytes for s in layout.shards),
        tensors=sum(s.tensors for s in layout.shards),
        tensor_nbytes=sum(s.data_nbytes for s in layout.shards),
        layers=layout.config.num_layers,
        experts=sum(len(e) for e in layout.experts.values()),
        expert_nbytes=roles.expert_nbytes(layout.config),
        spine_nbytes=spine + sum(p.nbytes for p in layout.globals.values()),
        ignored_tensors=sum(s.ignored_tensors for s in layout.shards),
        ignored_nbytes=sum(s.ignored_nbytes for s in layout.shards),
    )


def _layout_sha256(layout: Layout) -> str:
    """Names, sizes and headers of all shards: equal for equal layouts, whatever source they were read from."""
    lines = [f"{s.name} {s.nbytes} {s.header_sha256}\n" for s in layout.shards]
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def _json(value: object) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()
