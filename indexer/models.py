"""What a user may call a model, and where its catalog lies.

`demo`, a directory of shards, a repository id with an optional `@revision`, or the name that a catalog
was given when it was built.
"""

from __future__ import annotations

import hashlib
import os
import re
from dataclasses import dataclass
from pathlib import Path

from deltafin.errors import BadRequest, NotFound
from deltafin.indexer.remote import RetryPolicy
from deltafin.indexer.sources import K3_REPO, DirectorySource, HubSource, Location, Source

_SUFFIX = ".catalog"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@-]{0,127}")
_REPO = re.compile(r"(?P<repo>[A-Za-z0-9][\w.-]{0,95}/[\w.-]{1,96})(?:@(?P<revision>[\w./-]+))?", re.ASCII)
DEMO = "demo"


@dataclass(frozen=True, slots=True)
class ModelRef:
    """A model as asked for: the catalog's name and, unless only that is known, where to index it from."""

    asked: str
    name: str
    path: Path | None = None
    repo: str | None = None
    revision: str | None = None

    @property
    def indexable(self) -> bool:
        return self.path is not None or self.repo is not None

    @property
    def remote(self) -> bool:
        return self.repo is not None

    def source(self, policy: RetryPolicy | None = None) -> Source:
        """Opens the place to index from; for a repository this asks the hub for its commit."""
        if self.path is not None:
            return DirectorySource(self.path)
        if self.repo is not None:
            return HubSource(self.repo, self.revision, policy)
        raise NotFound(f"{self.asked}: a catalog's name says nothing of where the model is")


def parse_model(text: str, cache_dir: Path, *, revision: str | None = None, name: str | None = None) -> ModelRef:
    """The model that `text` means. An existing directory or catalog name wins over a repository id."""
    if name is not None and not _NAME.fullmatch(name):
        raise BadRequest(
            f"--name {name!r}: use letters, digits, '.', '_', '@' and '-', starting with a letter or digit"
        )
    if text == DEMO:
        _no_revision(text, revision)
        return ModelRef(text, name or DEMO, path=Path(__file__).resolve().parent.parent / "demo")
    if os.path.isdir(text):  # unlike Path.is_dir it takes text of any length
        _no_revision(text, revision)
        path = Path(text).resolve()
        tag = hashlib.sha256(os.fsencode(path)).hexdigest()[:8]
        base = re.sub(r"[^A-Za-z0-9._-]+", "-", path.name).strip("-._") or "model"
        return ModelRef(text, name or f"{base[:80]}-{tag}", path=path)
    if name is None and _NAME.fullmatch(text) and catalog_path(cache_dir, text).exists():
        _no_revision(text, revision)
        return ModelRef(text, text)
    m = _REPO.fullmatch(text)
    if m is None or text.startswith(("./", "../", "/", "~")):
        known = ", ".join(catalog_names(cache_dir)) or "none yet"
        raise NotFound(
            f"{text}: no such directory or catalog, and no repository id like {K3_REPO} "
            f"(catalogs here: {known}; the built-in model is called demo)"
        )
    if m["revision"] and revision and m["revision"] != revision:
        raise BadRequest(f"two revisions: {m['revision']} in the model's name and --revision {revision}")
    revision = m["revision"] or revision
    default = m["repo"].replace("/", "--")
    if revision:
        default += "@" + re.sub(r"[^A-Za-z0-9._-]+", "-", revision)
    return ModelRef(text, name or default[:128], repo=m["repo"], revision=revision)


def catalog_path(cache_dir: Path, name: str) -> Path:
    return cache_dir / "catalogs" / (name + _SUFFIX)


def catalog_names(cache_dir: Path) -> list[str]:
    """Names of all catalogs built so far."""
    return sorted(p.name.removesuffix(_SUFFIX) for p in (cache_dir / "catalogs").glob("*" + _SUFFIX))


def source_of(location: Location, policy: RetryPolicy | None = None) -> Source:
    """The place a catalog was built from, at the same commit."""
    if location.path is not None:
        return DirectorySource(Path(location.path))
    assert location.repo is not None and location.commit is not None
    return HubSource(location.repo, location.commit, policy)


def _no_revision(text: str, revision: str | None) -> None:
    if revision is not None:
        raise BadRequest(f"--revision has no effect for {text}: only a repository has revisions")
