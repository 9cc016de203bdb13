"""`objects.log`: which span is which object. Format: docs/store.md.

Fixed records of 128 bytes with a checksum, appended by one write each. A bad record is skipped and the
next good one is searched byte by byte, so a torn append or a flipped bit costs that record and no other.
A record promises nothing about the disk: an object that is gone is a miss.
"""

from __future__ import annotations

import errno
import os
import struct
import threading
import time
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from deltafin.errors import DiskError
from deltafin.indexer import disk_error

RECORD_NBYTES = 128
BODY_NBYTES = 124  # what the checksum behind it covers
MAGIC = b"DfO1"
_BODY = struct.Struct("<4sBBHQ48s32s16s12x")  # magic, kind, flags, reserved, time, key, digests
_RECORD = struct.Struct("<4sBBHQ48s32s16s12xI")
_CHECK = struct.Struct("<I")
_KIND_OBJECT = 1
_KIND_FORGOTTEN = 2
_FLAG_PROVEN = 1
_FLAG_NOT_HELD = 2
_KEY = struct.Struct("<32sQQ")


class ObjectEntry(NamedTuple):  # not a dataclass: 82,432 of these are made within 0.1 s when a full log is read
    """What is on record of one span's content.

    `proven`: a published digest or a manifest confirms it; until then it is what once arrived. `held`: the root has
    had an object of it that nobody removed; a digest may be on record of bytes that never came.
    """

    sha256: bytes
    xxh3: bytes  # XXH3-128, big-endian: quick enough to check on every first use
    nbytes: int
    proven: bool = False
    held: bool = True


Record = tuple[bytes, ObjectEntry]  # the key of a span, and what is to be known of it


def span_key(shard_id: bytes, offset: int, nbytes: int) -> bytes:
    """How the log names a span: the shard's identity (32 bytes), offset and length."""
    return _KEY.pack(shard_id, offset, nbytes)


def key_parts(key: bytes) -> tuple[bytes, int, int]:
    """What `span_key` was made of."""
    shard_id, offset, nbytes = _KEY.unpack(key)
    return shard_id, offset, nbytes


def pack_record(key: bytes, entry: ObjectEntry, kind: int = _KIND_OBJECT) -> bytes:
    flags = _FLAG_PROVEN * entry.proven | _FLAG_NOT_HELD * (not entry.held)
    body = _BODY.pack(MAGIC, kind, flags, 0, int(time.time()), key, entry.sha256, entry.xxh3)
    return body + _CHECK.pack(zlib.crc32(body))


def is_record(data: bytes | memoryview) -> bool:
    """Whether these 128 bytes are a record, by their checksum."""
    return (
        len(data) == RECORD_NBYTES
        and bytes(data[:4]) == MAGIC
        and zlib.crc32(data[:BODY_NBYTES]) == _CHECK.unpack_from(data, BODY_NBYTES)[0]
    )


class ObjectLog:
    """One root's log as it was when opened, and what this process appends. Later records replace earlier ones.

    But nothing unproven replaces what is proven.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.entries: dict[bytes, ObjectEntry] = {}
        self.bad_records = 0
        self.garbage: list[tuple[int, int]] = []  # (offset, bytes) of stretches that are no record, ascending
        self._read_nbytes = 0
        self._seen: tuple[int, int] | None = None  # inode and bytes of the file when it was last looked at
        self.changes = 0  # goes up when it had changed and all of it was taken in
        self._file: tuple[int, int] | None = None  # device and inode of what was read
        self._lock = threading.Lock()
        self.refresh()

    def refresh(self) -> None:
        """Takes in what was appended since, by this process or another; all of it if the file was replaced."""
        with self._lock:
            self._refresh()

    def refresh_if_grown(self) -> None:
        """`refresh`, if the file is not as when it was last looked at: one stat. `changes` tells of it."""
        try:
            found = os.stat(self.path)
        except OSError:
            return
        with self._lock:
            if (found.st_ino, found.st_size) != self._seen:
                self._seen = found.st_ino, found.st_size
                self._refresh()
                self.changes += 1

    def _refresh(self) -> None:
        try:
            if self.path.exists() and not self.path.is_file():
                raise DiskError(f"{self.path}: not a file; move it away, it is made anew")
            with open(self.path, "rb") as f:
                stat = os.fstat(f.fileno())
                entries = self.entries
                if self._file not in (None, (stat.st_dev, stat.st_ino)) or stat.st_size < self._read_nbytes:
                    entries, self.garbage = {}, []
                    self.bad_records = self._read_nbytes = 0
                self._file = stat.st_dev, stat.st_ino
                f.seek(self._read_nbytes)
                data = f.read()
        except FileNotFoundError:
            return
        except OSError as e:
            raise disk_error(e, self.path, "cannot read the object log") from None
        self._read_nbytes += self._take(data, entries)
        self.entries = entries  # of a replaced log only now: others look things up meanwhile

    def append(self, key: bytes, entry: ObjectEntry) -> None:
        """Adds one record; it is durable together with the next sync of the file, which `sync` forces."""
        self.append_all([(key, entry)])

    def append_all(self, records: Iterable[Record]) -> int:
        """Adds records by one write, but for those that say nothing new; returns how many. Raises OSError."""
        with self._lock:
            news = [(k, e) for k, e in records if (old := self.entries.get(k)) is None or _merged(old, e) != old]
            if news:
                self._write(b"".join(pack_record(key, entry) for key, entry in news))
            for key, entry in news:
                old = self.entries.get(key)
                self.entries[key] = entry if old is None else _merged(old, entry)
            return len(news)

    def forget(self, key: bytes) -> None:
        """Takes back what was recorded of a span, so that its next bytes are believed again.

        A proven digest stays; only that the object is here is taken back.
        """
        with self._lock:
            if (entry := self.entries.get(key)) is None:
                return
            if not entry.proven:
                self._write(pack_record(key, entry, _KIND_FORGOTTEN))
                del self.entries[key]
            elif entry.held:
                gone = entry._replace(held=False)
                self._write(pack_record(key, gone))
                self.entries[key] = gone

    def release(self, keys: Iterable[bytes]) -> int:
        """Records that objects were removed on purpose; their digests stay. Returns how many were held."""
        with self._lock:
            gone = [
                (key, entry._replace(held=False))
                for key in keys
                if (entry := self.entries.get(key)) is not None and entry.held
            ]
            if gone:
                self._write(b"".join(pack_record(key, entry) for key, entry in gone))
                self.entries.update(gone)
            return len(gone)

    def disprove(self, keys: Iterable[bytes]) -> int:
        """Takes proofs back: what is held stays as unproven, of the rest nothing is known; returns how many."""
        with self._lock:
            records, doubted = [], []
            for key in keys:
                if (entry := self.entries.get(key)) is None or not entry.proven:
                    continue
                doubted.append(key)
                records.append(pack_record(key, entry, _KIND_FORGOTTEN))
                if entry.held:
                    records.append(pack_record(key, entry._replace(proven=False)))
            if doubted:
                self._write(b"".join(records))
            for key in doubted:
                entry = self.entries.pop(key)
                if entry.held:
                    self.entries[key] = entry._replace(proven=False)
            return len(doubted)

    def sync(self) -> None:
        """Makes all appended records durable. Raises DiskError."""
        try:
            fd = os.open(self.path, os.O_RDONLY)
            try:
                os.fsync(fd)
            finally:
                os.close(fd)
        except FileNotFoundError:
            return
        except OSError as e:
            raise disk_error(e, self.path, "cannot sync the object log") from None

    def _write(self, records: bytes) -> None:
        fd = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o644)
        try:
            # A torn record of a killed writer stays behind as garbage that readers step over.
            if os.write(fd, records) != len(records):
                raise OSError(errno.ENOSPC, "no space left for a record")
        finally:
            os.close(fd)

    def _take(self, data: bytes, entries: dict[bytes, ObjectEntry]) -> int:
        """Parses records from `data`; returns how many bytes are settled (a torn tail may still grow)."""
        at = 0
        unpack, crc32, new = _RECORD.unpack_from, zlib.crc32, tuple.__new__
        while at + RECORD_NBYTES <= len(data):
            magic, kind, flags, _, _, key, sha256, xxh3, check = unpack(data, at)
            if magic == MAGIC and crc32(data[at : at + BODY_NBYTES]) == check:
                old = entries.get(key)
                if kind == _KIND_OBJECT:
                    nbytes = int.from_bytes(key[40:], "little")
                    # The plain constructor would take as long again as all the rest.
                    proven, held = flags & _FLAG_PROVEN != 0, flags & _FLAG_NOT_HELD == 0
                    entry = new(ObjectEntry, (sha256, xxh3, nbytes, proven, held))
                    entries[key] = entry if old is None else _merged(old, entry)
                elif kind == _KIND_FORGOTTEN and old is not None and (not old.proven or flags & _FLAG_PROVEN):
                    del entries[key]
                at += RECORD_NBYTES
                continue
            self.bad_records += 1
            found = data.find(MAGIC, at + 1)
            start, at = at, found if found >= 0 else max(at, len(data) - len(MAGIC) + 1)
            self._note_garbage(self._read_nbytes + start, at - start)
            if found < 0:
                break
        return at

    def _note_garbage(self, offset: int, nbytes: int) -> None:
        if self.garbage and sum(self.garbage[-1]) == offset:
            offset, before = self.garbage.pop()
            nbytes += before
        if nbytes:
            self.garbage.append((offset, nbytes))


def _merged(old: ObjectEntry, new: ObjectEntry) -> ObjectEntry:
    """What is known once `new` was recorded after `old`."""
    if not old.proven or new.proven:
        return new
    if new.sha256 != old.sha256:
        return old
    return old._replace(held=new.held)


def split_records(data: bytes) -> Iterator[tuple[int, bytes]]:
    """Every good record in `data` as it is, with where it lies; what is none is stepped over."""
    at = 0
    while 0 <= at <= len(data) - RECORD_NBYTES:
        record = data[at : at + RECORD_NBYTES]
        if is_record(record):
            yield at, record
            at += RECORD_NBYTES
        else:
            at = data.find(MAGIC, at + 1)
