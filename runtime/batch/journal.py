"""The journal beside a batch's output: the tokens chosen so far of every answer under way. Format: docs/batch.md.

After a kill they are fed again, many in one pass, in place of being drawn again one by one; the text is the same either
way. So nothing depends on the journal, and it is believed only as far as its checksums hold: what comes after the
first bad record is cut off.
"""

from __future__ import annotations

import os
import struct
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Self

import numpy as np
import xxhash

from deltafin.indexer import discard, disk_error, publish, stale_files, temporary
from deltafin.runtime.sampling import Chosen

MAGIC = b"DfJ1"
SYNC_EVERY_S = 5.0  # a power cut costs this much; a kill costs nothing
_HEAD = struct.Struct("<4s16sIII")  # magic, key, index of the first token, tokens, alternatives + 1 (0: no logprobs)
_CHECK = struct.Struct("<Q")  # XXH3-64 of all before it
MOST_TOKENS, MOST_ALTERNATIVES, MOST_RECORD_NBYTES = 1 << 24, 1 << 20, 1 << 30  # of one record; more is no record
REWRITE_ABOVE_NBYTES = 16 << 20  # of records that nobody needs any more

News = tuple[bytes, int, Sequence[Chosen]]  # the key of a request, how many tokens it had, and those that are new


def pack_record(key: bytes, first: int, tokens: Sequence[Chosen]) -> bytes:
    """One record. Either all tokens have log-probabilities, with equally many alternatives, or none has."""
    with_logprobs = tokens[0].logprob is not None
    top = len(tokens[0].top) if with_logprobs else 0
    body = [_HEAD.pack(MAGIC, key, first, len(tokens), with_logprobs * (top + 1))]
    body.append(np.array([t.token for t in tokens], "<u4").tobytes())
    if with_logprobs:
        body.append(np.array([t.logprob for t in tokens], "<f4").tobytes())
        body.append(np.array([i for t in tokens for i, _ in t.top], "<u4").tobytes())
        body.append(np.array([p for t in tokens for _, p in t.top], "<f4").tobytes())
    raw = b"".join(body)
    return raw + _CHECK.pack(xxhash.xxh3_64_intdigest(raw))


def read_records(file: BinaryIO) -> Iterator[News]:
    """The records up to the first bad one; one at a time is in memory."""
    while len(head := file.read(_HEAD.size)) == _HEAD.size:
        magic, key, first, count, alternatives = _HEAD.unpack(head)
        if magic != MAGIC or not 0 < count <= MOST_TOKENS or alternatives > MOST_ALTERNATIVES:
            return
        nbytes = 4 * count + (4 * count + 8 * count * (alternatives - 1) if alternatives else 0)
        if nbytes > MOST_RECORD_NBYTES:
            return
        body, check = file.read(nbytes), file.read(_CHECK.size)
        if len(check) < _CHECK.size or _CHECK.unpack(check)[0] != xxhash.xxh3_64_intdigest(head + body):
            return
        yield key, first, _tokens(body, count, alternatives)


class Journal:
    """The journal at `path`, open for appending. One process at a time: whoever holds the output's lock."""

    def __init__(self, path: Path, wanted: Callable[[bytes], bool]) -> None:
        """Takes in what was left of the requests that are `wanted`, and drops the rest. Raises DiskError, NoSpace."""
        self.path = path
        self.pending: dict[bytes, list[Chosen]] = {}  # of requests that were not begun (again) yet
        self._fd = -1
        self._nbytes = self._live_nbytes = 0
        self._synced_at = time.monotonic()
        try:
            if path.is_file():
                with path.open("rb") as file:
                    self._take_in(file, wanted)
        except OSError as e:
            raise disk_error(e, path, "cannot read the journal") from None
        for left in stale_files(path.parent):
            if left.name.startswith(f".{path.name}."):
                discard(left)
        self.rewrite({})

    def take(self, key: bytes) -> list[Chosen]:
        """What was chosen of an answer in an earlier life. From now on `rewrite` is told of it."""
        return self.pending.pop(key, [])

    def put_back(self, key: bytes, tokens: Sequence[Chosen]) -> None:
        """An answer is under way no more, and goes on later; `rewrite` need not be told of it."""
        if tokens:
            self.pending[key] = list(tokens)

    def append(self, news: Iterable[News]) -> None:
        """Adds what one pass brought, by one write. Raises NoSpace or DiskError, and is as before then."""
        raw = b"".join(pack_record(*record) for record in news)
        if not raw:
            return
        try:
            append_whole(self._fd, raw, self._nbytes)
            self._nbytes += len(raw)
            if time.monotonic() - self._synced_at >= SYNC_EVERY_S:
                os.fsync(self._fd)
                self._synced_at = time.monotonic()
        except OSError as e:
            raise disk_error(e, self.path, "cannot write the journal") from None

    @property
    def is_long(self) -> bool:
        """Whether most of it is of answers that are finished, and it is worth rewriting."""
        return self._nbytes > REWRITE_ABOVE_NBYTES + 2 * self._live_nbytes

    def rewrite(self, under_way: dict[bytes, list[Chosen]]) -> None:
        """Drops what nobody needs: all but what is pending, and the answers under way."""
        records = [(key, tokens) for found in (self.pending, under_way) for key, tokens in found.items() if tokens]
        raw = b"".join(pack_record(key, 0, tokens) for key, tokens in records)
        part = temporary(self.path.parent, self.path.name)
        fd = -1
        try:
            fd = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o600)
            append_whole(fd, raw, 0)
            publish(part, self.path)
        except OSError as e:
            raise disk_error(e, self.path, "cannot write the journal") from None
        else:
            self._fd, fd = fd, self._fd
            self._nbytes = self._live_nbytes = len(raw)
        finally:
            discard(part)
            if fd >= 0:
                os.close(fd)

    def remove(self) -> None:
        """All is done."""
        self.close()
        try:
            self.path.unlink(missing_ok=True)
        except OSError as e:
            raise disk_error(e, self.path, "cannot remove the journal") from None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Keeps it for the next run."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _take_in(self, file: BinaryIO, wanted: Callable[[bytes], bool]) -> None:
        for key, first, tokens in read_records(file):
            known = self.pending.get(key, [])
            if wanted(key) and first == len(known):  # else it belongs to an answer that is there, or is no use
                known += tokens
                self.pending[key] = known


def journal_path(output: Path) -> Path:
    return output.parent / f"{output.name}.journal"


def append_whole(fd: int, raw: bytes, nbytes: int) -> None:
    """Appends to a file of `nbytes`, all or nothing: whatever happens, an interrupt too, takes a part back. OSError."""
    try:
        left = memoryview(raw)
        while left:
            left = left[os.write(fd, left) :]
    except BaseException:
        os.ftruncate(fd, nbytes)
        raise


def _tokens(body: bytes, count: int, alternatives: int) -> list[Chosen]:
    ids = np.frombuffer(body, "<u4", count).tolist()
    if not alternatives:
        return [Chosen(i, None, ()) for i in ids]
    top = alternatives - 1
    logprobs = np.frombuffer(body, "<f4", count, 4 * count).tolist()
    others = np.frombuffer(body, "<u4", count * top, 8 * count).reshape(count, top).tolist()
    values = np.frombuffer(body, "<f4", count * top, 8 * count + 4 * count * top).reshape(count, top).tolist()
    return [
        Chosen(i, p, tuple(zip(o, v, strict=True))) for i, p, o, v in zip(ids, logprobs, others, values, strict=True)
    ]
