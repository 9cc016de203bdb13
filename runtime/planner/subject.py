"""What is planned for: a model by any name, what is known of its shape, and what of it is on this machine already."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from deltafin.errors import Missing
from deltafin.indexer import (
    K3_REPO,
    ModelRef,
    Plannable,
    Sketch,
    Source,
    catalog_path,
    k3_config,
    parse_config,
    parse_model,
    source_of,
)
from deltafin.store import PackFormat, PackSet, RootSpec, Store, all_items, open_store

DEFAULT_MODEL = K3_REPO


@dataclass(frozen=True, slots=True)
class Holding:
    """What one directory has of a model."""

    path: str
    only_nbytes: int  # that no other has


@dataclass(slots=True)
class Subject:
    """A model to plan for. Close it."""

    model: str  # as commands are to call it
    identity: str
    catalog: Plannable
    store: Store | None  # None before anything is indexed
    indexed: bool
    remote: bool  # what is missing can be fetched
    published_skew: bool
    ref: ModelRef
    closing: ExitStack

    def __enter__(self) -> Subject:
        return self

    def __exit__(self, *exc: object) -> None:
        self.closing.close()

    def source(self) -> Source:
        """The server that has the model; asks it for its commit where none is known. Close it."""
        return source_of(self.store.catalog.location) if self.store is not None else self.ref.source()

    def packs(self, spine: str | None) -> PackSet | None:
        """The packs that df-run would use; None is the released bytes."""
        if self.store is None or spine == "released":
            return None
        formats = [PackFormat(spine)] if spine is not None else [PackFormat.BF12, PackFormat.BF16]
        found = max((self.store.packs(f) for f in formats), key=lambda packs: len(packs.packs))
        return found if found.packs else None


@dataclass(frozen=True, slots=True)
class Present:
    """Bytes of spans that are here, by what they are and where."""

    spine_nbytes: int
    experts: int
    holdings: tuple[Holding, ...]
    shared_nbytes: int  # that several directories have


def open_subject(model: str | None, *, cache: Path, roots: Sequence[RootSpec], revision: str | None) -> Subject:
    """Opens no socket and builds no catalog of a repository. A directory or the demo is indexed now if need be.

    Kimi K3's shape is known before it is indexed; of another repository it is not. Raises Missing and what
    `open_store` raises.
    """
    asked = model or DEFAULT_MODEL
    ref = parse_model(asked, cache, revision=revision)
    closing = ExitStack()
    if ref.path is not None or catalog_path(cache, ref.name).exists():
        store = closing.enter_context(open_store(asked, cache_dir=cache, roots=roots, offline=True, revision=revision))
        location = store.catalog.location
        skew = location.repo == K3_REPO
        remote = location.path is None and location.repo is not None
        return Subject(asked, store.catalog.identity, store.catalog, store, True, remote, skew, ref, closing)
    if ref.repo != K3_REPO:
        raise Missing(
            f"{asked} is not indexed on this machine, and only Kimi K3's shape is known before; run: df-index build "
            f"{_called(ref)}"
        )
    return Subject(_called(ref), _called(ref), Sketch(parse_config(k3_config())), None, False, True, True, ref, closing)


def present(store: Store) -> Present:
    """Looks for every span; a second or so for all of Kimi K3."""
    owners = [(str(root.path), root) for root in store.roots]
    folders = [(str(folder.path), folder) for folder in store.shard_directories]
    only = dict.fromkeys([path for path, _ in (*owners, *folders)], 0)
    spine = experts = shared = 0
    for item in all_items(store.catalog):
        key = store.key(item.span)
        have = [path for path, root in owners if root.find(key) is not None]
        have += [path for path, folder in folders if folder.has(item.span.shard)]
        if not have:
            continue
        if item.expert is None:
            spine += item.span.nbytes
        else:
            experts += 1
        if len(set(have)) == 1:
            only[have[0]] += item.span.nbytes
        else:
            shared += item.span.nbytes
    return Present(spine, experts, tuple(Holding(path, nbytes) for path, nbytes in only.items()), shared)


def _called(ref: ModelRef) -> str:
    return ref.asked if "@" in ref.asked or not ref.revision else f"{ref.asked}@{ref.revision}"
