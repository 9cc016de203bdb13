"""What can be saved of a damaged object log, without asking anybody.

CRC-32 over 124 bytes does more than find an error of one bit: each of the 1,024 places where it can be has a
syndrome of its own, so the bit is known and is turned back. What else is no record is left out, and the log is
replaced by rename.
"""

from __future__ import annotations

import os
import time
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from deltafin.indexer import discard, disk_error, make_directory, publish, temporary
from deltafin.store.objectlog import BODY_NBYTES, MAGIC, RECORD_NBYTES, ObjectLog, is_record, split_records

# Beyond this a stretch of garbage is no damaged record but something else's data.
_MOST_GARBAGE_NBYTES = 1 << 20
_LATE_S = 0.05  # for writers that had opened the old file when it was replaced


@dataclass(frozen=True, slots=True)
class Mended:
    """What `mend_log` did."""

    corrected: int = 0  # records of which one bit was turned back
    dropped_nbytes: int = 0  # garbage that is gone


@cache
def syndromes() -> dict[int, int]:
    """Which bit of a record is wrong (byte * 8 + bit, counted from 0), by the XOR of both checksums."""
    table = {}
    nothing = zlib.crc32(bytes(BODY_NBYTES))
    for bit in range(BODY_NBYTES * 8):
        table[zlib.crc32(_with_bit(bytes(BODY_NBYTES), bit)) ^ nothing] = bit
    for bit in range(32):
        table[1 << bit] = BODY_NBYTES * 8 + bit
    return table


def corrected(record: bytes) -> bytes | None:
    """The record that these 128 bytes are but for one wrong bit; None if it must be more."""
    stored = int.from_bytes(record[BODY_NBYTES:], "little")
    bit = syndromes().get(zlib.crc32(record[:BODY_NBYTES]) ^ stored)
    if bit is None:
        return None
    found = _with_bit(record, bit)
    # A stretch of noise has one of the 1,024 syndromes once in four million times; its fields then make no sense.
    sensible = found[4] in (1, 2) and found[5] < 4 and found[6:8] == bytes(2) and found[112:BODY_NBYTES] == bytes(12)
    return found if sensible and is_record(found) else None


def _with_bit(data: bytes, bit: int) -> bytes:
    changed = bytearray(data)
    changed[bit // 8] ^= 1 << bit % 8
    return bytes(changed)


def mend_log(log: ObjectLog) -> Mended:
    """Corrects what can be and drops what is no record; a log without damage is left alone. Raises NoSpace, DiskError.

    Other processes may go on appending: what they write while the file is replaced is carried over.
    """
    path = log.path
    try:
        with open(path, "rb") as old:
            data = old.read()
            records, mended = _salvage(data)
            if mended == Mended():
                return mended
            _replace(path, b"".join(records))
            # Records that were appended to the old file meanwhile, and by those that had opened it before.
            for pause_s in (0.0, _LATE_S):
                time.sleep(pause_s)
                if late := old.read():
                    _append(path, b"".join(record for _, record in split_records(late)))
    except FileNotFoundError:
        return Mended()
    except OSError as e:
        raise disk_error(e, path, "cannot repair the object log") from None
    log.refresh()
    return mended


def _salvage(data: bytes) -> tuple[list[bytes], Mended]:
    """Every record in its order, damaged ones corrected."""
    records: list[bytes] = []
    count = dropped = end = 0
    for at, record in [*split_records(data), (len(data), b"")]:
        found = list(_in_garbage(data[end:at]))
        count += len(found)
        dropped += at - end - RECORD_NBYTES * len(found)
        records += [*found, record]
        end = at + len(record)
    return records, Mended(count, dropped)


def _in_garbage(garbage: bytes) -> Iterator[bytes]:
    at = 0
    while at + RECORD_NBYTES <= len(garbage) <= _MOST_GARBAGE_NBYTES:
        found = corrected(garbage[at : at + RECORD_NBYTES])
        if found is not None and found[:4] == MAGIC:
            yield found
            at += RECORD_NBYTES
        else:
            at += 1


def _replace(path: Path, data: bytes) -> None:
    folder = path.parent / "tmp"
    make_directory(folder)
    part = temporary(folder, path.name)
    try:
        part.write_bytes(data)
        publish(part, path)
    finally:
        discard(part)


def _append(path: Path, records: bytes) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_APPEND)
    try:
        if os.write(fd, records) != len(records):
            raise OSError(28, "no space left for a record")
        os.fsync(fd)
    finally:
        os.close(fd)
