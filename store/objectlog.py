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
from dataclasses import dataclass
from pathlib import Path

from deltafin.errors import DiskError
from deltafin.indexer import disk_error

RECORD_NBYTES = 128
_MAGIC = b"DfO1"
_BODY = struct.Struct("<4sBBHQ32sQQ32s16s12x")  # magic, kind, flags, reserved, time, key, digests
_CHECK = struct.Struct("<I")
_KIND_OBJECT = 1
_KIND_FORGOTTEN = 2
_KEY = struct.Struct("<32sQQ")


@dataclass(frozen=True, slots=True)
class ObjectEntry:
    """The content of one span as it was published."""

    sha256: bytes
    xxh3: bytes  # XXH3-128, big-endian: quick enough to check on every first use
    nbytes: int


def span_key(shard_id: bytes, offset: int, nbytes: int) -> bytes:
    """How the log names a span: the shard's identity (32 bytes), offset and length."""
    return _KEY.pack(shard_id, offset, nbytes)


def pack_record(key: bytes, entry: ObjectEntry, kind: int = _KIND_OBJECT) -> bytes:
    body = _BODY.pack(_MAGIC, kind, 0, 0, int(time.time()), *_KEY.unpack(key), entry.sha256, entry.xxh3)
    return body + _CHECK.pack(zlib.crc32(body))


class ObjectLog:
    """One root's log as it was when opened, and what this process appends. Later records replace earlier ones."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.entries: dict[bytes, ObjectEntry] = {}
        self.bad_records = 0
        self._read_nbytes = 0
        self._seen_nbytes = 0  # of the file when it was last looked at
        self.changes = 0  # goes up when it had grown and all of it was taken in
        self._lock = threading.Lock()
        self.refresh()

    def refresh(self) -> None:
        """Takes in what was appended since, by this process or another."""
        with self._lock:
            self._refresh()

    def refresh_if_grown(self) -> None:
        """`refresh`, if the file is longer than when it was last looked at: one stat. `changes` tells of it."""
        try:
            nbytes = os.stat(self.path).st_size
        except OSError:
            return
        with self._lock:
            if nbytes > self._seen_nbytes:
                self._seen_nbytes = nbytes
                self._refresh()
                self.changes += 1

    def _refresh(self) -> None:
        try:
            if self.path.exists() and not self.path.is_file():
                raise DiskError(f"{self.path}: not a file; move it away, it is made anew")
            with open(self.path, "rb") as f:
                f.seek(self._read_nbytes)
                data = f.read()
        except FileNotFoundError:
            return
        except OSError as e:
            raise disk_error(e, self.path, "cannot read the object log") from None
        self._read_nbytes += self._take(data)

    def append(self, key: bytes, entry: ObjectEntry) -> None:
        """Adds one record; it is durable together with the next sync of the file, which `sync` forces."""
        with self._lock:
            self._write(pack_record(key, entry))
            self.entries[key] = entry

    def forget(self, key: bytes) -> None:
        """Takes back what was recorded of a span, so that its next bytes are believed again."""
        with self._lock:
            if (entry := self.entries.get(key)) is not None:
                self._write(pack_record(key, entry, _KIND_FORGOTTEN))
                del self.entries[key]

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

    def _write(self, record: bytes) -> None:
        fd = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        try:
            # A torn record of a killed writer stays behind as garbage that readers step over.
            if os.write(fd, record) != RECORD_NBYTES:
                raise OSError(errno.ENOSPC, "no space left for a record")
        finally:
            os.close(fd)

    def _take(self, data: bytes) -> int:
        """Parses records from `data`; returns how many bytes are settled (a torn tail may still grow)."""
        at = 0
        while at + RECORD_NBYTES <= len(data):
            body = data[at : at + _BODY.size]
            if body[:4] == _MAGIC and zlib.crc32(body) == _CHECK.unpack_from(data, at + _BODY.size)[0]:
                _, kind, _, _, _, shard_id, offset, nbytes, sha256, xxh3 = _BODY.unpack(body)
                key = span_key(shard_id, offset, nbytes)
                if kind == _KIND_OBJECT:
                    self.entries[key] = ObjectEntry(sha256, xxh3, nbytes)
                elif kind == _KIND_FORGOTTEN:
                    self.entries.pop(key, None)
                at += RECORD_NBYTES
                continue
            self.bad_records += 1
            at = data.find(_MAGIC, at + 1)
            if at < 0:
                return max(0, len(data) - len(_MAGIC) + 1)
        return at
