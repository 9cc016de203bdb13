"""Looking at packs and removing them: their part of `df-fetch status`, `verify` and `rm`."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import xxhash

from deltafin.errors import Corrupt, DeltafinError, DiskError
from deltafin.indexer import disk_error, make_directory
from deltafin.store.arena import own_slot
from deltafin.store.encodings import Encoding, PackFormat, aligned, decode
from deltafin.store.packs import (
    Pack,
    PackPiece,
    model_key,
    odd_packs,
    open_pack,
    open_packs,
    pack_files,
    pack_folder,
    pages,
    read_header,
)
from deltafin.store.roots import Root, read_file
from deltafin.store.store import Store

_VERIFY_THREADS = 2  # each holds a piece, what it decodes to, and what it was made from

Progress = Callable[[int], None]


@dataclass(frozen=True, slots=True)
class PackStatus:
    """The packs of one format that this model can use."""

    format: str
    as_released: bool
    layers: int
    nbytes: int


def pack_status(store: Store) -> list[PackStatus]:
    """One entry for each format of which there is a pack; packs that do not fit are said in the log."""
    found = []
    for format in PackFormat:
        packs = open_packs([root.path for root in store.roots], store.catalog, store.shard_ids, format)
        if packs.packs:
            found.append(PackStatus(str(format), format.as_released, len(packs.packs), packs.nbytes))
    return found


@dataclass(slots=True)
class PackReport:
    whole: int = 0
    whole_nbytes: int = 0
    damaged: list[str] = field(default_factory=list)
    lost: list[tuple[PackFormat, int]] = field(default_factory=list)  # layers of this model whose pack was damaged


def verify_packs(store: Store, progress: Progress | None = None) -> PackReport:
    """Compares every pack of every root with its digests, and this model's exact ones with their source if it is here.

    Those of the cache that are damaged, or do not fit the model any more, are moved to its `quarantine` folder.
    """
    report = PackReport()

    def one(found: tuple[Root, Path, int]) -> tuple[int, str | None]:
        root, path, nbytes = found
        try:
            _verify(store, path, progress)
            return nbytes, None
        except DeltafinError as e:
            if not path.exists():
                return 0, None  # removed while it was being looked at
            note_lost(path)
            return nbytes, f"{e}{_moved_aside(root, path)}"

    def note_lost(path: Path) -> None:
        if path.parent.parent.name == model_key(store.shard_ids):
            report.lost.append((PackFormat(path.parent.name), int(path.stem.removeprefix("layer-"))))

    for root in store.roots:
        for path in odd_packs(root.path):
            note_lost(path)
            report.damaged.append(f"{path}: not a file{_moved_aside(root, path)}")
    every = [(root, path, nbytes) for root in store.roots for path, nbytes in pack_files(root.path)]
    with ThreadPoolExecutor(_VERIFY_THREADS, "verify") as pool:
        for nbytes, complaint in pool.map(one, every):
            if complaint is not None:
                report.damaged.append(complaint)
            elif nbytes:
                report.whole += 1
                report.whole_nbytes += nbytes
    return report


def removable_packs(store: Store, format: PackFormat) -> list[tuple[Path, int]]:
    """This model's packs of a format in the cache, sound or not, with their lengths."""
    root = store.roots[0].path
    folder = pack_folder(root, store.shard_ids, format)
    return [(path, nbytes) for path, nbytes in pack_files(root) if path.parent == folder]


def remove_packs(store: Store, format: PackFormat) -> None:
    """Unlinks what `removable_packs` names; readers that have one open are not disturbed."""
    for path, _ in removable_packs(store, format):
        try:
            path.unlink(missing_ok=True)
        except OSError as e:
            raise disk_error(e, path, "cannot remove") from None
    for folder in (pack_folder(store.roots[0].path, store.shard_ids, format), *_parents(store)):
        try:
            folder.rmdir()
        except OSError:
            return  # something else is in it, or it was never there


def _parents(store: Store) -> tuple[Path, Path]:
    packs = store.roots[0].path / "packs"
    return packs / model_key(store.shard_ids), packs


def _verify(store: Store, path: Path, progress: Progress | None) -> None:
    """Raises Corrupt or DiskError if a pack is not what it should be."""
    pack = read_header(path)
    ours = path.parent.parent.name == model_key(store.shard_ids)
    if ours:
        format, layer = PackFormat(path.parent.name), int(path.stem.removeprefix("layer-"))
        pack = open_pack(path, store.catalog, store.shard_ids, format, layer)
    for piece in pack.pieces:
        _verify_piece(store, pack, piece, ours)
        if progress is not None:
            progress(pages(piece.nbytes))
    if progress is not None:
        progress(pack.pieces[0].offset if pack.pieces else pack.nbytes)


def _verify_piece(store: Store, pack: Pack, piece: PackPiece, ours: bool) -> None:
    found = aligned(pages(piece.nbytes))
    read_file(pack.path, piece.offset, found.data)
    where = f"{pack.path}: the piece at {piece.offset} (layer {pack.layer}, {piece.encoding})"
    if xxhash.xxh3_128(found[: piece.nbytes].data).digest() != piece.xxh3 or found[piece.nbytes :].any():
        raise Corrupt(f"{where} does not match its digest")
    if not ours or piece.encoding is Encoding.INT8 or not store.is_local(piece.span):
        return
    try:
        source = store.read(piece.span, own_slot(piece.span.nbytes))
    except DeltafinError:
        return  # the source's own fault; it is looked at for itself
    try:
        same = (decode(piece.arrays(found)) == source).all()
    except ValueError as e:
        raise Corrupt(f"{where} cannot be decoded: {e}") from None
    if not same:
        raise Corrupt(f"{where} does not decode to the bytes it was made from")


def _moved_aside(root: Root, path: Path) -> str:
    if not root.writable:
        return ""
    try:
        return f"; moved to {_quarantine(root.path, path)}"
    except DiskError as e:
        return f" ({e})"


def _quarantine(root: Path, path: Path) -> Path:
    aside = root / "quarantine" / "-".join((*path.parts[-3:-1], path.name))
    try:
        make_directory(aside.parent)
        os.replace(path, aside)
    except FileNotFoundError:
        pass
    except OSError as e:
        raise disk_error(e, path, "cannot move the damaged pack aside") from None
    return aside
