"""Manifests: the digests of a model's spans in one small file. Format: docs/manifest.md.

Whoever has a manifest can prove what any mirror sends, span by span, before a whole shard is here. What is read is
believed only once its length, its checksum and every number in it were found good; it may come from anywhere.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import zstandard

from deltafin.errors import BadRequest, Corrupt, Missing, NotFound
from deltafin.indexer import discard, disk_error, make_directory, publish, temporary
from deltafin.store.objectlog import ObjectEntry, Record
from deltafin.store.proof import set_aside
from deltafin.store.roots import Root
from deltafin.store.spantable import SpanTable, span_table
from deltafin.store.store import Store

VERSION = 1
_MAGIC = b"DfManif\n"
_PREFIX = struct.Struct("<8sIII")  # magic, version, bytes of the head, spans
_DIGEST_NBYTES = 32
_MOST_FILE_NBYTES = 64 << 20
_MOST_HEAD_NBYTES = 4 << 20
_MOST_SPANS = 1 << 20
_LEVEL = 10
_PROVEN = 1
# One span; its offset follows from the one before, so that nearly all gaps are zeros.
_COLUMNS = (("shard", "<u2"), ("flags", "u1"), ("gap", "<u8"), ("nbytes", "<u8"), ("sha256", "V32"), ("xxh3", "V16"))
_SPAN_NBYTES = sum(np.dtype(kind).itemsize for _, kind in _COLUMNS)

Column = npt.NDArray[np.void] | npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class ManifestShard:
    """A shard that spans lie in. `id` is its published SHA-256, or what else names it (docs/store.md)."""

    name: str
    nbytes: int
    id: str
    published: bool


@dataclass(frozen=True, slots=True)
class Manifest:
    """What a manifest says. Columns [spans]; spans are in file order, and do not overlap."""

    repo: str | None
    commit: str | None
    shards: tuple[ManifestShard, ...]
    shard: npt.NDArray[np.int64]
    offset: npt.NDArray[np.int64]
    nbytes: npt.NDArray[np.int64]
    proven: npt.NDArray[np.bool_]
    sha256: tuple[bytes, ...]
    xxh3: tuple[bytes, ...]

    def __len__(self) -> int:
        return len(self.shard)


@dataclass(frozen=True, slots=True)
class ImportReport:
    """What an import changed. `replaced`: unproven digests that the manifest contradicts; the objects are set aside."""

    spans: int
    proven: int
    new: int
    replaced: int
    foreign: int  # spans that this catalog does not have

    def as_json(self) -> dict[str, int]:
        return asdict(self)


# ---- making one ---------------------------------------------------------------------------------------------


def make_manifest(store: Store, *, partial: bool = False, unproven: bool = False) -> Manifest:
    """The digests on record of a model's spans; of those that are proven, or of all with `unproven`.

    Raises Missing where that leaves out any span of the text model, unless `partial`.
    """
    catalog = store.catalog
    table = span_table(catalog)
    known = _on_record(store, table)
    lacking = sum(entry is None for entry in known)
    doubtful = sum(entry is not None and not entry.proven for entry in known)
    if not partial and (lacking or (doubtful and not unproven)):
        raise Missing(_too_few(store.model, len(table), lacking, doubtful))
    whole = table.with_rest(catalog)
    known = _on_record(store, whole)
    rows = [row for row, entry in enumerate(known) if entry is not None and (entry.proven or unproven)]
    if not rows:
        raise Missing(f"{store.model}: no digest is on record that could be exported")
    entries = [entry for row in rows if (entry := known[row]) is not None]
    shards = tuple(
        ManifestShard(shard.name, shard.nbytes, identity.hex(), shard.sha256 is not None)
        for shard, identity in zip(catalog.shards, store.shard_ids, strict=True)
    )
    return Manifest(
        catalog.location.repo,
        catalog.location.commit,
        shards,
        whole.shard[rows],
        whole.offset[rows],
        whole.nbytes[rows],
        np.array([entry.proven for entry in entries], bool),
        tuple(entry.sha256 for entry in entries),
        tuple(entry.xxh3 for entry in entries),
    )


def _on_record(store: Store, table: SpanTable) -> list[ObjectEntry | None]:
    """What is known of each span, rather what is proven."""
    known: list[ObjectEntry | None] = [None] * len(table)
    keys = table.keys(store.shard_ids)
    for root in store.roots:
        entries = root.log.entries
        for row, key in enumerate(keys):
            if (entry := entries.get(key)) is not None and ((old := known[row]) is None or entry.proven > old.proven):
                known[row] = entry
    return known


def _too_few(model: str, spans: int, lacking: int, doubtful: int) -> str:
    what = [f"{lacking:,} are not on record"] if lacking else []
    what += [f"{doubtful:,} are not proven"] if doubtful else []
    return (
        f"{model}: of the digests of {spans:,} spans {' and '.join(what)}; df-fetch all and verify prove them where "
        "the SHA-256 of shards are published; --partial leaves them out, --unproven exports what is not proven, marked"
    )


def write_manifest(manifest: Manifest, path: Path) -> str:
    """Writes a manifest, the same bytes for the same content; returns the SHA-256 of the file. Raises DiskError."""
    blob = _compressed(_packed(manifest))
    part = temporary(path.parent, path.name)
    try:
        if path.exists() and not path.is_file() and not path.is_dir():
            path.write_bytes(blob)  # a pipe or a device: what is replaced by a file would be lost to all others
            return hashlib.sha256(blob).hexdigest()
        make_directory(path.parent)
        part.write_bytes(blob)
        publish(part, path)
    except OSError as e:
        raise disk_error(e, path) from None
    finally:
        discard(part)
    return hashlib.sha256(blob).hexdigest()


def _compressed(data: bytes) -> bytes:
    return zstandard.ZstdCompressor(level=_LEVEL, write_checksum=True, write_content_size=True).compress(data)


def _packed(manifest: Manifest) -> bytes:
    head = {
        "repo": manifest.repo,
        "commit": manifest.commit,
        "shards": [[s.name, s.nbytes, s.id, s.published] for s in manifest.shards],
    }
    text = json.dumps(head, separators=(",", ":")).encode()
    ends = manifest.offset + manifest.nbytes
    before = np.concatenate([[0], ends[:-1]])
    before[np.concatenate([[True], manifest.shard[1:] != manifest.shard[:-1]])] = 0
    columns = (
        manifest.shard,
        manifest.proven * _PROVEN,
        manifest.offset - before,
        manifest.nbytes,
        np.frombuffer(b"".join(manifest.sha256), "V32"),
        np.frombuffer(b"".join(manifest.xxh3), "V16"),
    )
    body = b"".join(column.astype(kind).tobytes() for (_, kind), column in zip(_COLUMNS, columns, strict=True))
    data = _PREFIX.pack(_MAGIC, VERSION, len(text), len(manifest)) + text + body
    return data + hashlib.sha256(data).digest()


# ---- reading one --------------------------------------------------------------------------------------------


def read_manifest(path: Path, sha256: str | None = None) -> Manifest:
    """A manifest whose file has the given SHA-256, if one is given. Raises NotFound, BadRequest, Corrupt, DiskError."""
    try:
        if not path.is_file():
            raise NotFound(f"{path}: no such file")
        if path.stat().st_size > _MOST_FILE_NBYTES:
            raise BadRequest(f"{path}: larger than the {_MOST_FILE_NBYTES:,} bytes that a manifest may have")
        blob = path.read_bytes()
    except OSError as e:
        raise disk_error(e, path, "cannot read") from None
    if sha256 is not None and (got := hashlib.sha256(blob).hexdigest()) != sha256.lower():
        raise Corrupt(f"{path}: SHA-256 {got}, expected {sha256.lower()}; nothing of it was used")
    try:
        return _parse(_decompressed(blob))
    except (ValueError, TypeError, LookupError, OverflowError, RecursionError, zstandard.ZstdError) as e:
        raise Corrupt(f"{path}: no manifest, or damaged ({str(e)[:120]}); nothing of it was used") from None


def _decompressed(blob: bytes) -> bytes:
    """The content, which never takes more memory than a manifest may, whatever the file claims."""
    most = _PREFIX.size + _MOST_HEAD_NBYTES + _MOST_SPANS * _SPAN_NBYTES + _DIGEST_NBYTES
    claimed = zstandard.frame_content_size(blob)
    if not 0 <= claimed <= most:
        raise ValueError(f"it claims to hold {claimed} bytes")
    # Into exactly so many bytes, from all of the file.
    return zstandard.ZstdDecompressor(max_window_size=1 << 27).decompress(blob, allow_extra_data=False)


def _parse(data: bytes) -> Manifest:
    magic, version, head_nbytes, spans = _PREFIX.unpack_from(data) if len(data) >= _PREFIX.size else (b"", 0, 0, 0)
    if magic != _MAGIC:
        raise ValueError("it does not begin as one")
    if version != VERSION:
        raise ValueError(f"version {version}, expected {VERSION}")
    expected = _PREFIX.size + head_nbytes + spans * _SPAN_NBYTES + _DIGEST_NBYTES
    if head_nbytes > _MOST_HEAD_NBYTES or not 0 < spans <= _MOST_SPANS or len(data) != expected:
        raise ValueError(f"{len(data)} bytes, expected {expected}")
    if hashlib.sha256(data[:-_DIGEST_NBYTES]).digest() != data[-_DIGEST_NBYTES:]:
        raise ValueError("its checksum differs")
    head = json.loads(data[_PREFIX.size : _PREFIX.size + head_nbytes])
    shards = tuple(_shard(*fields) for fields in head["shards"])
    columns, at = {}, _PREFIX.size + head_nbytes
    for name, kind in _COLUMNS:
        columns[name] = np.frombuffer(data, kind, spans, at)
        at += columns[name].nbytes
    return _manifest(_text(head["repo"]), _text(head["commit"]), shards, columns)


def _shard(name: object, nbytes: object, identity: object, published: object) -> ManifestShard:
    if not (isinstance(name, str) and isinstance(nbytes, int) and isinstance(identity, str)):
        raise ValueError("a shard is described otherwise")
    if not 0 < nbytes < 1 << 62 or len(bytes.fromhex(identity)) != 32 or not isinstance(published, bool):
        raise ValueError(f"shard {name[:80]!r} cannot be")
    return ManifestShard(name, nbytes, identity, published)


def _text(value: object) -> str | None:
    if value is not None and not (isinstance(value, str) and value.isprintable()):
        raise ValueError("repository or commit is no text")
    return value


def _manifest(
    repo: str | None, commit: str | None, shards: tuple[ManifestShard, ...], columns: dict[str, npt.NDArray[np.void]]
) -> Manifest:
    """Offsets are summed up, and every span must lie in its shard, behind the one before."""
    number = columns["shard"].astype(np.int64)
    if number.max() >= len(shards) or (np.diff(number) < 0).any():
        raise ValueError("spans are of shards that it does not have, or out of order")
    limits = np.array([shard.nbytes for shard in shards], np.uint64)
    nbytes, gaps = columns["nbytes"].astype(np.uint64), columns["gap"].astype(np.uint64)
    if (nbytes == 0).any() or (nbytes > limits[number]).any() or (gaps > limits[number]).any():
        raise ValueError("spans have lengths that cannot be")
    # Each number is below 2^62 and at most 2^20 are summed: Python's integers hold what 64 bits may not.
    offsets, last, end = [], -1, 0
    for shard, gap, length in zip(number.tolist(), gaps.tolist(), nbytes.tolist(), strict=True):
        begin = gap + (end if shard == last else 0)
        last, end = shard, begin + length
        if end > shards[shard].nbytes:
            raise ValueError(f"a span ends at {end}, beyond {shards[shard].name[:80]!r}")
        offsets.append(begin)
    sha256, xxh3 = columns["sha256"].tobytes(), columns["xxh3"].tobytes()
    return Manifest(
        repo,
        commit,
        shards,
        number,
        np.array(offsets, np.int64),
        nbytes.astype(np.int64),
        columns["flags"].astype(np.int64) & _PROVEN == _PROVEN,
        tuple(sha256[at : at + 32] for at in range(0, len(sha256), 32)),
        tuple(xxh3[at : at + 16] for at in range(0, len(xxh3), 16)),
    )


# ---- taking one over ----------------------------------------------------------------------------------------


def import_manifest(store: Store, manifest: Manifest) -> ImportReport:
    """Records a manifest's digests in the cache's log, in one write: proven ones as proven.

    Where an unproven digest on record contradicts a proven one of the manifest, the manifest wins, and the object is
    moved to quarantine. Raises BadRequest, and changes nothing, if the manifest is of other shards, or contradicts what
    is proven already.
    """
    _check_shards(store, manifest)
    table = span_table(store.catalog).with_rest(store.catalog)
    ours = dict(zip(table.keys(store.shard_ids), _on_record(store, table), strict=True))
    root, named = store.roots[0], _span_keys(store.shard_ids, manifest)
    records: list[Record] = []
    replaced: list[ObjectEntry] = []
    elsewhere: list[tuple[Root, bytes]] = []  # records of other roots that it contradicts
    contradicted = foreign = 0
    present = {name for name, _ in root.object_files()}
    for key, sha256, xxh3, nbytes, proven in zip(
        named, manifest.sha256, manifest.xxh3, manifest.nbytes.tolist(), manifest.proven.tolist(), strict=True
    ):
        if key not in ours:
            foreign += 1
            continue
        known, own = ours[key], root.log.entries.get(key)
        differs = known is not None and known.sha256 != sha256
        if differs and known is not None and known.proven:
            contradicted += proven
            continue
        if not proven and known is not None:
            continue
        if own is not None and own.sha256 != sha256:
            replaced.append(own)
        for other in store.writable_roots[1:]:
            if (entry := other.log.entries.get(key)) is not None and entry.sha256 != sha256 and not entry.proven:
                replaced.append(entry)
                elsewhere.append((other, key))
        held = sha256.hex() in present or (own is not None and own.held and own.sha256 == sha256)
        records.append((key, ObjectEntry(sha256, xxh3, nbytes, proven=proven, held=held)))
    if contradicted:
        raise BadRequest(
            f"the manifest contradicts {contradicted:,} digests that are proven already; nothing was changed. One of "
            "the two is wrong: df-fetch manifest forget takes back what is proven, and df-fetch verify proves it from "
            "whole shards"
        )
    if foreign == len(manifest):
        raise BadRequest(
            "the manifest cuts the shards into other spans than this catalog; it was made by another version"
        )
    try:
        new = root.log.append_all(records)
    except OSError as e:
        raise disk_error(e, root.log.path) from None
    root.log.sync()
    for other, key in elsewhere:
        try:
            other.log.forget(key)
        except OSError as e:
            raise disk_error(e, other.log.path) from None
    set_aside(store, replaced)
    return ImportReport(len(manifest), int(manifest.proven.sum()), new, len(replaced), foreign)


def forget_proofs(store: Store) -> int:
    """Takes back that anything of this model is proven, in every root that is written to; returns how many records.

    A root that was copied here has brought its proofs along.
    """
    keys = span_table(store.catalog).with_rest(store.catalog).keys(store.shard_ids)
    count = 0
    for root in store.writable_roots:
        try:
            count += root.log.disprove(keys)
        except OSError as e:
            raise disk_error(e, root.log.path) from None
        root.log.sync()
    return count


def _check_shards(store: Store, manifest: Manifest) -> None:
    ours, theirs = store.shard_ids, [bytes.fromhex(shard.id) for shard in manifest.shards]
    of = f"{manifest.repo or 'a local directory'}@{(manifest.commit or 'no commit')[:12]}"
    for number, identity in enumerate(ours):
        if number >= len(theirs) or theirs[number] != identity:
            raise BadRequest(
                f"the manifest is of another model ({of}, here {store.catalog.identity}): "
                f"{store.catalog.shards[number].name} is not the shard that it means; nothing was changed"
            )
    if len(theirs) != len(ours):
        raise BadRequest(
            f"the manifest ({of}) is of {len(theirs)} shards, the model has {len(ours)}; nothing was changed"
        )


def _span_keys(shard_ids: Sequence[bytes], manifest: Manifest) -> list[bytes]:
    nothing = np.zeros(len(manifest), np.int64)
    table = SpanTable(manifest.shard, manifest.offset, manifest.nbytes, nothing, nothing)
    return table.keys(shard_ids)
