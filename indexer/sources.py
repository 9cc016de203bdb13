"""Where a checkpoint's shards are: a directory, a Hugging Face cache snapshot, or a repository on the hub."""

from __future__ import annotations

import hashlib
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from deltafin.errors import BadCheckpoint, BadRequest, DiskError, NotFound, Refused
from deltafin.indexer.answers import Answer, Expected, ShardFile
from deltafin.indexer.hub import hub_files, hub_listing
from deltafin.indexer.remote import RetryPolicy

K3_REPO = "moonshotai/Kimi-K3"
K3_REVISION = "f831ab66814297da540d832a5235f8e904f29d06"
_K3_REVISIONS = frozenset(
    {
        K3_REVISION,
        "c5d1dd4c428bd1ce8b88c5044f3b6ccde9e3b721",
        "9f62e4e9fffbd0a83ddd60e1c209d828994b3569",
        "cdd2e49a2c1cf8d4713b513955e415ed75405a72",
        "2496450e92e425c886db095102a52a6682ca3970",
    }
)
# What the known revisions of K3 hold; identical in all of them.
_K3_SHA256 = {
    "config.json": "9710e121a58d03ac92c8d6da287a19541994319afbbe6d6202af001ffd379213",
    "generation_config.json": "c6648c25e9705af7fba8847e243840d21b5cc63ddeb6297f750a7ddbb6a02836",
    "tiktoken.model": "b6c497a7469b33ced9c38afb1ad6e47f03f5e5dc05f15930799210ec050c5103",
}

_SHARD = re.compile(r"model-(\d{5})-of-(\d{6})\.safetensors")
_REPO = re.compile(r"[\w.-]+/[\w.-]+", re.ASCII)
_SNAPSHOT = re.compile(r"models--([\w.-]+)--([\w.-]+)/snapshots/([0-9a-f]{40})", re.ASCII)
_SHA256 = re.compile(r"[0-9a-f]{64}")
_COMMIT = re.compile(r"[0-9a-f]{40}")


@dataclass(frozen=True, slots=True)
class Location:
    """Where a catalog's bytes came from; recorded in it. `path` is for directories, the rest for the hub."""

    path: str | None = None
    repo: str | None = None
    revision: str | None = None  # as asked for
    commit: str | None = None


class Source(Protocol):
    """A place with shards. `read` raises rather than returning fewer bytes."""

    @property
    def location(self) -> Location: ...

    def shard_files(self) -> list[ShardFile]: ...

    def read(self, shard: ShardFile, offset: int, nbytes: int) -> tuple[bytes, Answer]:
        """Exactly `nbytes` bytes of a shard, or fewer only where the file ends before."""

    def read_file(self, name: str, max_nbytes: int) -> bytes | None:
        """A whole small file, None where the source has none of that name."""

    def close(self) -> None: ...


class DirectorySource:
    """Shards in a local directory. In a Hugging Face cache the links' names give repository, commit and digests."""

    def __init__(self, path: Path) -> None:
        if not path.is_dir():
            raise NotFound(f"{path}: no such directory")
        self._path = _snapshot_of(path)
        absolute = str(self._path.resolve())
        m = _SNAPSHOT.search(absolute)
        self._location = (
            Location(absolute, repo=f"{m[1]}/{m[2]}", revision=m[3], commit=m[3]) if m else Location(absolute)
        )

    @property
    def location(self) -> Location:
        return self._location

    def shard_files(self) -> list[ShardFile]:
        try:
            names = sorted(os.listdir(self._path))
        except OSError as e:
            raise DiskError(f"{self._path}: {e.strerror}") from None
        return [self._shard_file(name) for name in complete_set(names, str(self._path))]

    def _shard_file(self, name: str) -> ShardFile:
        path = self._path / name
        try:
            nbytes = path.stat().st_size
        except OSError as e:
            raise NotFound(f"{path}: {e.strerror}; a link into a cache that was cleaned?") from None
        blob = path.resolve().name if path.is_symlink() else ""
        return ShardFile(name, nbytes, sha256=blob if _SHA256.fullmatch(blob) else None)

    def read(self, shard: ShardFile, offset: int, nbytes: int) -> tuple[bytes, Answer]:
        try:
            with open(self._path / shard.name, "rb") as f:
                f.seek(offset)
                return f.read(nbytes), Answer()
        except OSError as e:
            raise DiskError(f"{self._path / shard.name}: cannot read at {offset}: {e.strerror}") from None

    def read_file(self, name: str, max_nbytes: int) -> bytes | None:
        path = self._path / name
        try:
            if path.exists() and not path.is_file():
                raise BadCheckpoint(f"{path}: not a file")
            with open(path, "rb") as f:
                raw = f.read(max_nbytes + 1)
        except FileNotFoundError:
            return None
        except OSError as e:
            raise DiskError(f"{path}: {e.strerror}") from None
        if len(raw) > max_nbytes:
            raise BadCheckpoint(f"{path}: larger than the {max_nbytes} bytes such a file may have")
        return raw

    def close(self) -> None:
        pass


class HubSource:
    """A repository at one commit. The commit is resolved once, when the source is made."""

    def __init__(self, repo: str, revision: str | None, policy: RetryPolicy | None = None) -> None:
        if not _REPO.fullmatch(repo):
            raise BadRequest(f"{repo!r} is not a repository id like {K3_REPO}")
        if revision is None and repo == K3_REPO:
            revision = K3_REVISION
        commit, self._listed = hub_listing(repo, revision, policy)
        self._location = Location(repo=repo, revision=revision, commit=commit)
        self.remote = hub_files(repo, commit, policy)

    @property
    def location(self) -> Location:
        return self._location

    def shard_files(self) -> list[ShardFile]:
        names = complete_set(sorted(self._listed), f"{self._location.repo}@{self._location.commit}")
        return [self._listed[name] for name in names]

    def read(self, shard: ShardFile, offset: int, nbytes: int) -> tuple[bytes, Answer]:
        buffer = bytearray(nbytes)
        expected = Expected(shard.nbytes, shard.sha256 or shard.etag, self._location.commit)
        answer = self.remote.read_into(shard.name, offset, memoryview(buffer), expected)
        known = answer.file_nbytes if answer.file_nbytes is not None else offset + nbytes
        return bytes(buffer[: max(0, known - offset)]), answer

    def read_file(self, name: str, max_nbytes: int) -> bytes | None:
        listed = self._listed.get(name)
        if listed is None:
            return None
        raw = self.remote.read_file(name, max_nbytes, Expected(commit=self._location.commit))
        self._check(name, raw, listed)
        return raw

    def _check(self, name: str, raw: bytes, listed: ShardFile) -> None:
        """A small file must be what its listing says, and for K3 what is known of the released files."""
        want = listed.sha256
        if self._location.repo == K3_REPO and self._location.commit in _K3_REVISIONS:
            want = _K3_SHA256.get(name, want)
        if want is not None:
            got = hashlib.sha256(raw).hexdigest()
        elif listed.etag is not None and _COMMIT.fullmatch(listed.etag):
            want, got = listed.etag, hashlib.sha1(b"blob %d\0" % len(raw) + raw, usedforsecurity=False).hexdigest()
        else:
            return
        if got != want:
            raise Refused(f"{name} from {self._location.repo}: digest {got}, expected {want}; nothing of it was used")

    def close(self) -> None:
        self.remote.close()


def complete_set(names: list[str], where: str) -> list[str]:
    """The shards among `names`; they must be numbered 1 to N of N without a gap."""
    shards = [m for m in map(_SHARD.fullmatch, names) if m]
    if not shards:
        raise NotFound(f"{where}: no files named model-00001-of-0000NN.safetensors")
    totals = sorted({m[2] for m in shards})
    if len(totals) > 1:
        raise BadCheckpoint(f"{where}: shards of several checkpoints lie together (of-{', of-'.join(totals)})")
    present = {int(m[1]) for m in shards}
    total = int(totals[0])
    missing = [i for i in range(1, total + 1) if i not in present] if total <= 99_999 else [0]
    if surplus := sorted(present - set(range(1, total + 1))):
        raise BadCheckpoint(f"{where}: model-{surplus[0]:05d}-of-{total:06d}.safetensors is no shard of {total}")
    if missing:
        shown = ", ".join(f"model-{i:05d}-of-{total:06d}.safetensors" for i in missing[:3])
        more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
        raise BadCheckpoint(f"{where}: {len(missing)} of {total} shards are missing: {shown}{more}")
    return sorted(m[0] for m in shards)


def _snapshot_of(path: Path) -> Path:
    """A cache folder `models--ORG--NAME` stands for the snapshot that its refs/main names."""
    main = path / "refs" / "main"
    if path.name.startswith("models--") and main.is_file():
        return path / "snapshots" / main.read_text().strip()
    return path
