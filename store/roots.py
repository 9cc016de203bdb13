"""Roots: directories that hold objects, and directories of original shards read in place.

An object is a file named by the SHA-256 of its content, `objects/ab/ab12..`, so any checksum tool can
check a root. Nothing here depends on locks: writers use names of their own and rename, evicting is
unlinking, and a file that is gone or of the wrong size is a miss.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path

import xxhash

from deltafin.errors import BadCatalog, Corrupt, DiskError
from deltafin.indexer import Catalog, Span, clear_stale, discard, disk_error, make_directory, publish, temporary
from deltafin.store.arena import Slot
from deltafin.store.config import Limits
from deltafin.store.drive import Drive
from deltafin.store.objectlog import ObjectEntry, ObjectLog
from deltafin.store.packs import Packed
from deltafin.store.presence import Presence
from deltafin.store.space import Space

log = logging.getLogger(__name__)

_PREFIX_NBYTES = 8  # of a shard: the header length
_OBJECT_NAME = re.compile(r"[0-9a-f]{64}")


class Root:
    """A directory with objects and their log. Made on the first write if it is not there. Owns its drive."""

    def __init__(
        self,
        path: Path,
        *,
        writable: bool = False,
        drive: Drive | None = None,
        presence: Presence | None = None,
        limits: Limits | None = None,
    ) -> None:
        self.path = path
        self.writable = writable
        self.space = Space(path, limits or Limits()) if writable else None
        self.drive = drive or Drive(path)
        self.presence = presence or Presence(path)
        self._objects = str(path / "objects")
        if writable:
            clear_stale(path / "tmp")
        self.log = ObjectLog(path / "objects.log")
        self._checked: set[bytes] = set()  # digests whose files this process has compared with their content
        self._checked_packed: set[tuple[Path, int]] = set()  # pieces of packs likewise, by file and offset

    def find(self, key: bytes) -> ObjectEntry | None:
        """The object of a span if it is there in full length."""
        entry = self.log.entries.get(key)
        return entry if entry is not None and self.has(entry) else None

    def has(self, entry: ObjectEntry) -> bool:
        """Whether an object is there in full length."""
        name = entry.sha256.hex()
        try:
            # Of a link this is the length of its text: what lies elsewhere is no object of this root.
            return os.lstat(f"{self._objects}/{name[:2]}/{name}").st_size == entry.nbytes
        except OSError:
            return False

    def object_path(self, entry: ObjectEntry) -> Path:
        name = entry.sha256.hex()
        return self.path / "objects" / name[:2] / name

    def read(self, entry: ObjectEntry, slot: Slot) -> Slot:
        """A whole object as a part of `slot`; compared with its digest the first time. Raises Corrupt or DiskError."""
        content = self.drive.read(self.object_path(entry), 0, entry.nbytes, slot)
        self._check(entry, content.data)
        return content

    def read_packed(self, packed: Packed, slot: Slot) -> Slot:
        """A piece of a pack as a part of `slot`; compared with its digest the first time.

        Raises Corrupt or DiskError.
        """
        path, piece = packed.path, packed.piece
        content = self.drive.read(path, piece.offset, piece.nbytes, slot)
        if (path, piece.offset) not in self._checked_packed:
            if xxhash.xxh3_128(content.data).digest() != piece.xxh3:
                raise Corrupt(
                    f"{path}: damaged at byte {piece.offset}; go on with --spine released, or repair it: df-fetch "
                    "verify MODEL moves it aside, df-fetch spine MODEL --as .. makes it again"
                )
            self._checked_packed.add((path, piece.offset))
        return content

    def read_part(self, entry: ObjectEntry, at: int, view: memoryview) -> None:
        """Bytes of an object from `at` on; the whole object is checked the first time."""
        if entry.sha256 in self._checked:
            read_file(self.object_path(entry), at, view)
            return
        whole = memoryview(bytearray(entry.nbytes))
        read_file(self.object_path(entry), 0, whole)
        self._check(entry, whole)
        view[:] = whole[at : at + len(view)]

    def _check(self, entry: ObjectEntry, content: memoryview) -> None:
        if entry.sha256 not in self._checked:
            if xxhash.xxh3_128(content).digest() != entry.xxh3:
                raise Corrupt(f"{self.object_path(entry)}: the content does not match its digest")
            self._checked.add(entry.sha256)

    def is_checked(self, entry: ObjectEntry) -> bool:
        """Whether this process has compared the whole object with its digest."""
        return entry.sha256 in self._checked

    def doubt(self, entry: ObjectEntry) -> None:
        """Has the object compared with its digest once more, at its next use."""
        self._checked.discard(entry.sha256)

    def publish(self, key: bytes, view: memoryview) -> ObjectEntry:
        """Keeps the bytes of a span as an object. Raises NoSpace or DiskError, and then nothing has changed."""
        entry = ObjectEntry(hashlib.sha256(view).digest(), xxhash.xxh3_128(view).digest(), len(view))
        final = self.object_path(entry)
        self._refuse_links(self.path / "tmp", final.parent)
        try:
            if not self._holds(entry, view):
                self._write(view, final)
        except OSError as e:
            raise disk_error(e, final) from None
        try:
            self.log.append(key, entry)
        except OSError as e:
            raise disk_error(e, self.log.path) from None
        self._checked.add(entry.sha256)
        return entry

    def alias(self, keys: Iterable[bytes], entry: ObjectEntry) -> None:
        """Records that further spans hold the same bytes as an object that is here. Raises NoSpace or DiskError."""
        try:
            for key in keys:
                if self.log.entries.get(key) != entry:
                    self.log.append(key, entry)
        except OSError as e:
            raise disk_error(e, self.log.path) from None

    def _holds(self, entry: ObjectEntry, view: memoryview) -> bool:
        """Whether the object is there already. A name and a length prove nothing: a damaged one is replaced."""
        path = self.object_path(entry)
        if not _is_whole(path, entry.nbytes):
            return False
        if entry.sha256 in self._checked:
            return True
        held = bytearray(entry.nbytes)
        try:
            read_file(path, 0, memoryview(held))
        except DiskError:
            return False
        return held == view

    def _refuse_links(self, *folders: Path) -> None:
        """Nothing is written where a link leads to. Raises DiskError."""
        for folder in (self.path / "objects", *folders):
            if folder.is_symlink():
                raise DiskError(f"{folder}: a link, and nothing is written where it leads; put a folder in its place")

    def _write(self, view: memoryview, final: Path) -> None:
        tmp = self.path / "tmp"
        make_directory(tmp)
        make_directory(final.parent)
        part = temporary(tmp, final.name[:16])
        try:
            with open(part, "xb", buffering=0) as f:
                at = 0
                while at < len(view):
                    at += f.write(view[at:])
            publish(part, final)
        finally:
            discard(part)

    def quarantine(self, entry: ObjectEntry) -> Path:
        """Moves a damaged object aside, so that it is a miss from now on but can be looked at."""
        aside = self.path / "quarantine" / entry.sha256.hex()
        self._checked.discard(entry.sha256)
        self._refuse_links(aside.parent)
        try:
            make_directory(aside.parent)
            os.replace(self.object_path(entry), aside)
        except FileNotFoundError:
            pass
        except OSError as e:
            raise disk_error(e, self.object_path(entry), "cannot move the damaged object aside") from None
        return aside

    def remove(self, entry: ObjectEntry) -> bool:
        """Unlinks an object; readers that have it open are not disturbed. False if it was gone already."""
        self._checked.discard(entry.sha256)
        try:
            if self.space is not None:
                self.space.unlink(self.object_path(entry), entry.nbytes)
            else:
                os.unlink(self.object_path(entry))
        except FileNotFoundError:
            return False
        except OSError as e:
            raise disk_error(e, self.object_path(entry), "cannot remove") from None
        return True

    def object_files(self) -> Iterator[tuple[str, int]]:
        """(name, bytes) of every file that is named like an object and lies where one would, logged or not."""
        for folder in sorted((self.path / "objects").glob("[0-9a-f][0-9a-f]")):
            try:
                entries = sorted(os.scandir(folder), key=lambda e: e.name)
            except OSError as e:
                raise disk_error(e, folder, "cannot list") from None
            for entry in entries:
                named = _OBJECT_NAME.fullmatch(entry.name) and entry.name.startswith(folder.name)
                try:
                    if named and entry.is_file(follow_symlinks=False):
                        yield entry.name, entry.stat().st_size
                except FileNotFoundError:
                    continue  # removed meanwhile: a miss

    def sync(self) -> None:
        self.log.sync()


class ShardDirectory:
    """Original shards in a directory, read in place. A shard counts only if size and header are as indexed.

    Owns its drive.
    """

    def __init__(
        self,
        path: Path,
        catalog: Catalog,
        *,
        required: bool,
        drive: Drive | None = None,
        presence: Presence | None = None,
    ) -> None:
        self.path = path
        self.drive = drive or Drive(path)
        self.presence = presence or Presence(path)
        self._catalog = catalog
        self.required = required  # the catalog was built from here: a change is an error, not a miss
        self._lock = threading.Lock()
        self._usable: dict[int, bool] = {}
        self._checked: set[tuple[Span, bytes]] = set()  # spans that this process has compared with their digests

    def has(self, shard: int) -> bool:
        """Whether this directory holds the shard that was indexed; looked at once."""
        with self._lock:
            if shard not in self._usable:
                self._usable[shard] = self._look_at(shard)
            return self._usable[shard]

    def had(self, shard: int) -> bool:
        """Whether it was found to hold the shard, by what is known without looking."""
        return self.required or self._usable.get(shard, False)

    def shard_path(self, shard: int) -> Path:
        return self.path / self._catalog.shards[shard].name

    def read(self, span: Span, slot: Slot, known: ObjectEntry | None = None) -> Slot:
        """A span as a part of `slot`; compared with its digest, if that is known, the first time.

        Raises Corrupt or DiskError.
        """
        content = self.drive.read(self.shard_path(span.shard), span.offset, span.nbytes, slot)
        if known is not None:
            self._check(span, content.data, known)
        return content

    def read_part(self, span: Span, at: int, view: memoryview, known: ObjectEntry | None = None) -> None:
        """Bytes of a span from `at` on; the whole span is checked the first time, if its digest is known."""
        if known is None or self.is_checked(span, known):
            read_file(self.shard_path(span.shard), span.offset + at, view)
            return
        whole = memoryview(bytearray(span.nbytes))
        read_file(self.shard_path(span.shard), span.offset, whole)
        self._check(span, whole, known)
        view[:] = whole[at : at + len(view)]

    def is_checked(self, span: Span, known: ObjectEntry) -> bool:
        """Whether this process has compared all of a span with its digest."""
        return (span, known.xxh3) in self._checked

    def _check(self, span: Span, content: memoryview, known: ObjectEntry) -> None:
        if self.is_checked(span, known):
            return
        if xxhash.xxh3_128(content).digest() != known.xxh3:
            kind = "proven" if known.proven else "recorded"
            raise Corrupt(
                f"{self.shard_path(span.shard)}: bytes {span.offset} to {span.offset + span.nbytes - 1} contradict "
                f"their {kind} digest; df-fetch verify tells more"
            )
        self._checked.add((span, known.xxh3))

    def _look_at(self, number: int) -> bool:
        shard, path = self._catalog.shards[number], self.shard_path(number)
        try:
            nbytes = path.stat().st_size
        except OSError:
            return False
        same = nbytes == shard.nbytes
        if same:
            header = bytearray(_PREFIX_NBYTES + shard.header_nbytes)
            try:
                read_file(path, 0, memoryview(header))
            except DiskError as e:
                if self.required:
                    raise
                log.warning("%s; left alone", e)
                return False
            same = (
                int.from_bytes(header[:_PREFIX_NBYTES], "little") == shard.header_nbytes
                and hashlib.sha256(header[_PREFIX_NBYTES:]).hexdigest() == shard.header_sha256
            )
        if not same and self.required:
            raise BadCatalog(f"{path}: changed since it was indexed; rebuild the catalog with df-index build")
        if not same:
            log.warning("%s: not the shard that was indexed; left alone", path)
        return same


def read_file(path: Path, offset: int, view: memoryview) -> None:
    """Fills `view` from a file, through the page cache. An error names file and offset.

    One retry: some drives fail once.
    """
    for last_try in (False, True):
        try:
            fd = os.open(path, os.O_RDONLY)
            try:
                at = 0
                while at < len(view):
                    n = os.preadv(fd, [view[at:]], offset + at)
                    if n == 0:
                        raise OSError(5, f"the file ends at byte {offset + at}, {len(view) - at} bytes too early")
                    at += n
                return
            finally:
                os.close(fd)
        except OSError as e:
            if last_try:
                raise disk_error(e, path, f"cannot read {len(view)} bytes at {offset} (errno {e.errno})") from None


def _is_whole(path: Path, nbytes: int) -> bool:
    try:
        return os.lstat(path).st_size == nbytes  # a link is replaced, never followed
    except OSError:
        return False
