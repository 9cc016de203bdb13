"""A stand-in for Kimi K3 in bounded space: every span of the catalog, few distinct objects behind them.

Names, shapes, dtypes and the catalog are K3's own, so one token reads and multiplies as many bytes as with the real
weights; but the layers of a kind, the experts, the tiles of the head and the spans of the embedding table share
objects. What is in them is invented. It is for measuring: docs/standin.md says what may be concluded from it.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np

from deltafin.errors import BadCatalog, BadRequest, NoSpace, NotFound
from deltafin.indexer import (
    GLOBALS,
    LAYER_PREFIX,
    Blueprint,
    Catalog,
    Location,
    ModelConfig,
    RowTable,
    Span,
    SpineGroup,
    build_catalog,
    catalog_path,
    discard,
    disk_error,
    k3_config,
    k3_ignored,
    make_directory,
    publish,
    temporary,
)
from deltafin.store.encodings import PackFormat
from deltafin.store.invented import Invented, Inventor
from deltafin.store.objectlog import RECORD_NBYTES, ObjectEntry
from deltafin.store.opening import open_store
from deltafin.store.packing import plan_packs, write_packs
from deltafin.store.packs import Pack, PackSet
from deltafin.store.roots import Root
from deltafin.store.selection import expert_items
from deltafin.store.space import free_nbytes
from deltafin.store.store import Store

DISTINCT_EXPERTS = 200
_DISTINCT_LAYERS = 2  # of each kind
_OWN = "block_sparse_moe.gate.e_score_correction_bias"  # the tensor of which each layer has another
_DISTINCT_TILES = 4  # of the head
_DISTINCT_EMBEDDINGS = 16  # spans

_NAME = "k3-stand-in"
_LOCATION = Location(repo="deltafin/k3-stand-in", commit="0" * 40)  # nobody has it, and nobody is asked
_MARKER = "stand-in.json"
_VERSION = 1  # of the content; another one is made anew

Progress = Callable[[int, int], None]  # bytes of distinct objects done and in all


@dataclass(frozen=True, slots=True)
class Standin:
    """A finished stand-in: open `model` with `cache_dir`, offline."""

    cache_dir: Path
    model: str
    spans: int
    distinct_objects: int
    distinct_nbytes: int


@dataclass(frozen=True, slots=True)
class Piece:
    """Bytes of an invented tensor, from `begin` on."""

    tensor: Invented
    begin: int
    nbytes: int


Content = tuple[Piece, ...]  # of one object


@dataclass(frozen=True, slots=True)
class _Marker:
    """What a folder is to hold. Written before anything else, and again when all of it is there."""

    version: int
    config_sha256: str
    distinct_experts: int
    complete: bool = False
    spans: int = 0
    distinct_objects: int = 0
    distinct_nbytes: int = 0

    def is_of(self, other: _Marker) -> bool:
        mine = self.version, self.config_sha256, self.distinct_experts
        return mine == (other.version, other.config_sha256, other.distinct_experts)


def make_standin(
    folder: Path,
    *,
    distinct_experts: int = DISTINCT_EXPERTS,
    config_json: bytes | None = None,
    progress: Progress | None = None,
) -> Standin:
    """Makes a stand-in in a folder of its own, continues one that was interrupted, or finds it finished.

    `config_json` is for smaller ones; the default is K3. If spans are cut otherwise than when it was made, what still
    fits stays. Raises BadRequest for a folder with something else in it, NoSpace before the first object, DiskError.
    """
    if distinct_experts < 1:
        raise BadRequest(f"{distinct_experts} distinct experts; expected at least 1")
    raw = k3_config() if config_json is None else config_json
    wanted = _Marker(_VERSION, hashlib.sha256(raw).hexdigest(), distinct_experts)
    found = _read_marker(folder)
    if found is not None and found.is_of(wanted) and found.complete and _is_whole(folder, found):
        return _standin(folder, found)
    if found is not None and not found.is_of(wanted):
        _clear(folder)
    _write_marker(folder, wanted)
    blueprint = Blueprint(_LOCATION, raw, k3_ignored() if config_json is None else ())
    build_catalog(blueprint, catalog_path(folder, _NAME), _NAME, wait=True)
    with open_store(_NAME, cache_dir=folder, offline=True, environ={}) as store:
        plan = plan_standin(store.catalog, distinct_experts)
        _publish(store, plan, progress)
        _sweep(store, plan)
    done = _Marker(
        *(wanted.version, wanted.config_sha256, wanted.distinct_experts),
        complete=True,
        spans=sum(map(len, plan.values())),
        distinct_objects=len(plan),
        distinct_nbytes=sum(map(_nbytes, plan)),
    )
    _write_marker(folder, done)
    return _standin(folder, done)


def standin_packs(store: Store, format: PackFormat, progress: Callable[[int], None] | None = None) -> PackSet:
    """Packs for every layer of an open stand-in, of which one for each kind of layer is made and the others share it.

    `progress` is told bytes of the spine as they are packed. Small tensors are read as they are: each layer has its own
    router's bias. Raises NoSpace, DiskError.
    """
    variants = _variants(store.catalog.config)
    first = {variant: variants.index(variant) for variant in variants}
    write_packs(store, plan_packs(store, format, sorted(first.values())), progress)
    made = store.packs(format)
    return replace(made, packs={n: _shared(made.packs[first[v]], store, n) for n, v in enumerate(variants)})


def _shared(pack: Pack, store: Store, layer: int) -> Pack:
    """A layer of the same kind that reads its matrices from another one's pack."""
    spans = store.catalog.spine(layer).spans
    pieces = tuple(
        replace(piece, span=span) for piece, span in zip(pack.pieces, spans, strict=True) if piece.shape is not None
    )
    return replace(pack, layer=layer, pieces=pieces)


# ---- which spans share an object ------------------------------------------------------------------------


def plan_standin(catalog: Catalog, distinct_experts: int) -> dict[Content, list[Span]]:
    """Every span of a catalog under what it holds, whatever way the catalog is cut."""
    plan: dict[Content, list[Span]] = {}
    for content, span in _contents(catalog, distinct_experts):
        plan.setdefault(content, []).append(span)
    return plan


def _contents(catalog: Catalog, distinct_experts: int) -> Iterator[tuple[Content, Span]]:
    config = catalog.config
    yield from _of_group(catalog.spine(GLOBALS), "final", "", "final")
    for layer, variant in enumerate(_variants(config)):
        yield from _of_group(catalog.spine(layer), variant, f"{LAYER_PREFIX}{layer}.", f"layer {layer}")
    yield from _of_table(catalog.embedding(), _DISTINCT_EMBEDDINGS)
    yield from _of_table(catalog.head(), _DISTINCT_TILES)
    for layer in config.moe_layers:
        for item in expert_items(catalog, [layer], range(config.num_experts)):
            assert item.expert is not None
            number = (layer * config.num_experts + item.expert) % distinct_experts
            expert = Invented(str(number), "expert", "MXFP4", ())
            yield (Piece(expert, 0, item.span.nbytes),), item.span


def _variants(config: ModelConfig) -> list[str]:
    """What the spine of each layer holds: one of a few for each kind of layer, in turn."""
    seen: dict[str, int] = {}
    variants = []
    for layer in range(config.num_layers):
        kind = ("kda" if config.is_kda(layer) else "mla") + (" moe" if config.is_moe(layer) else " dense")
        seen[kind] = number = seen.get(kind, -1) + 1
        variants.append(f"{kind} {number % _DISTINCT_LAYERS}")
    return variants


def _of_group(group: SpineGroup, variant: str, prefix: str, own: str) -> Iterator[tuple[Content, Span]]:
    """The parts of tensors that lie in each span; layers of one variant have the same under the same short names.

    But for the router's bias, whose variant is `own`: of one bias, layers of one variant would choose mostly the same
    experts, because what they read is much alike.
    """
    for span in group.spans:
        pieces = []
        for place in group.tensors:
            begin = max(span.offset, place.offset)
            end = min(span.offset + span.nbytes, place.offset + place.nbytes)
            if place.shard == span.shard and begin < end:
                name = place.name.removeprefix(prefix)
                tensor = Invented(own if name == _OWN else variant, name, place.dtype, place.shape)
                pieces.append(Piece(tensor, begin - place.offset, end - begin))
        content = tuple(pieces)
        assert _nbytes(content) == span.nbytes, f"{variant}: a span holds bytes of no tensor"
        yield content, span


def _of_table(table: RowTable, distinct: int) -> Iterator[tuple[Content, Span]]:
    """Each span holds the first rows of one of a few tables."""
    for number, span in enumerate(table.spans):
        place = table.tensor
        yield (Piece(Invented(str(number % distinct), place.name, place.dtype, place.shape), 0, span.nbytes),), span


def _nbytes(content: Content) -> int:
    return sum(piece.nbytes for piece in content)


# ---- making them ------------------------------------------------------------------------------------------


def _publish(store: Store, plan: dict[Content, list[Span]], progress: Progress | None) -> None:
    """Makes the objects that are not there and records what every span is."""
    root = store.roots[0]
    held = {content: root.find(store.key(spans[0])) for content, spans in plan.items()}
    total = sum(map(_nbytes, plan))
    missing_nbytes = sum(_nbytes(content) for content, entry in held.items() if entry is None)
    need, free = missing_nbytes + RECORD_NBYTES * sum(map(len, plan.values())), free_nbytes(root.path)
    if need > free:
        raise NoSpace(
            f"{root.path}: the stand-in needs {need:,} more bytes and {free:,} are free; free some space or choose "
            "another folder"
        )
    inventor = Inventor(store.catalog.config)
    buffer = np.empty(max(map(_nbytes, plan)), np.uint8)
    done = total - missing_nbytes
    for content, spans in plan.items():
        keys = [store.key(span) for span in spans]
        if (entry := held[content]) is None:
            at = 0
            for piece in content:
                inventor.fill(buffer[at : at + piece.nbytes], piece.tensor, piece.begin)
                at += piece.nbytes
            entry = root.publish(keys[0], buffer[:at].data)
            done += at
            if progress is not None:
                progress(done, total)
        root.alias(keys[1:], entry)


def _sweep(store: Store, plan: dict[Content, list[Span]]) -> None:
    """Removes what an earlier cut of the spine left behind."""
    root = store.roots[0]
    keys = {store.key(span) for spans in plan.values() for span in spans}
    kept = {entry.sha256.hex() for key, entry in root.log.entries.items() if key in keys}
    try:
        for key in root.log.entries.keys() - keys:
            root.log.forget(key)
    except OSError as e:
        raise disk_error(e, root.log.path) from None
    for name, nbytes in list(root.object_files()):
        if name not in kept:
            root.remove(ObjectEntry(bytes.fromhex(name), b"", nbytes))


# ---- the folder -------------------------------------------------------------------------------------------


def _standin(folder: Path, marker: _Marker) -> Standin:
    return Standin(folder, _NAME, marker.spans, marker.distinct_objects, marker.distinct_nbytes)


def _is_whole(folder: Path, marker: _Marker) -> bool:
    """Whether the catalog is there and of this version, and every object in full length."""
    try:
        Catalog(catalog_path(folder, _NAME)).close()
    except (BadCatalog, NotFound):
        return False
    sizes = [nbytes for _, nbytes in Root(folder).object_files()]
    return (len(sizes), sum(sizes)) == (marker.distinct_objects, marker.distinct_nbytes)


def _read_marker(folder: Path) -> _Marker | None:
    """What a folder holds or was to hold; None for an empty or absent one. Raises BadRequest for any other."""
    try:
        fields: object = json.loads((folder / _MARKER).read_bytes())
        if isinstance(fields, dict):
            return _Marker(**fields)
    except FileNotFoundError:
        if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
            return None
    except (ValueError, TypeError):
        pass
    except OSError as e:
        raise disk_error(e, folder, "cannot be read") from None
    raise BadRequest(f"{folder}: holds something other than a stand-in; choose a new or an empty folder")


def _write_marker(folder: Path, marker: _Marker) -> None:
    path = folder / _MARKER
    try:
        make_directory(folder)
        part = temporary(folder, _MARKER)
        try:
            part.write_text(json.dumps(asdict(marker)) + "\n")
            publish(part, path)
        finally:
            discard(part)
    except OSError as e:
        raise disk_error(e, path) from None


def _clear(folder: Path) -> None:
    """Removes a stand-in with other parameters; its marker stays until the new one replaces it."""
    try:
        for entry in list(folder.iterdir()):
            if entry.name == _MARKER:
                continue
            if entry.is_dir() and not entry.is_symlink():
                shutil.rmtree(entry)
            else:
                entry.unlink()
    except OSError as e:
        raise disk_error(e, folder, "cannot remove the old stand-in") from None
