"""The object log survives whatever happens to a file that is only ever appended to."""

from __future__ import annotations

import hashlib
import itertools
import struct
import subprocess
import sys
import time
import zlib
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deltafin.store.objectlog import RECORD_NBYTES, ObjectEntry, ObjectLog, pack_record, span_key


def _key(i: int) -> bytes:
    return span_key(hashlib.sha256(b"shard %d" % i).digest(), 1000 * i, 100 + i)


def _entry(i: int, text: bytes = b"content") -> ObjectEntry:
    content = text + b" %d" % i
    return ObjectEntry(hashlib.sha256(content).digest(), hashlib.blake2b(content, digest_size=16).digest(), 100 + i)


def _expected(*numbers: int) -> dict[bytes, ObjectEntry]:
    return {_key(i): _entry(i) for i in numbers}


def _bytes(count: int) -> bytes:
    return b"".join(pack_record(_key(i), _entry(i)) for i in range(count))


def _read(data: bytes) -> dict[bytes, ObjectEntry]:
    with TemporaryDirectory() as folder:
        path = Path(folder, "objects.log")
        path.write_bytes(data)
        return ObjectLog(path).entries


def test_what_was_appended_is_found_by_the_next_reader(tmp_path):
    log = ObjectLog(tmp_path / "objects.log")
    for i in range(20):
        log.append(_key(i), _entry(i))
    log.sync()
    assert log.entries == ObjectLog(log.path).entries == _expected(*range(20))
    assert log.path.stat().st_size == 20 * RECORD_NBYTES


def test_a_record_lies_as_the_format_says():
    """Other programs and later versions read these 128 bytes: they may not move."""
    record, entry = pack_record(_key(7), _entry(7)), _entry(7)
    fields = struct.unpack("<4sBBHQ32sQQ32s16s12xI", record)
    assert fields[:4] == (b"DfO1", 1, 0, 0)
    assert abs(fields[4] - time.time()) < 60
    assert fields[5:8] == (hashlib.sha256(b"shard 7").digest(), 7000, 107)
    assert fields[8:10] == (entry.sha256, entry.xxh3)
    assert record[112:124] == bytes(12)
    assert fields[10] == zlib.crc32(record[:124])


def test_without_a_file_nothing_is_known_and_nothing_is_written(tmp_path):
    log = ObjectLog(tmp_path / "objects.log")
    assert log.entries == {}
    log.sync()
    assert not log.path.exists()


def test_the_later_record_of_a_span_replaces_the_earlier(tmp_path):
    log = ObjectLog(tmp_path / "objects.log")
    log.append(_key(1), _entry(1, b"old"))
    log.append(_key(2), _entry(2))
    log.append(_key(1), _entry(1, b"new"))
    expected = {_key(1): _entry(1, b"new"), _key(2): _entry(2)}
    assert log.entries == ObjectLog(log.path).entries == expected


def test_what_is_forgotten_is_unknown_to_every_later_reader_until_it_is_recorded_again(tmp_path):
    log = ObjectLog(tmp_path / "objects.log")
    for i in range(3):
        log.append(_key(i), _entry(i))
    follower = ObjectLog(log.path)
    log.forget(_key(1))
    log.forget(_key(7))  # never known
    follower.refresh()
    assert log.entries == follower.entries == ObjectLog(log.path).entries == _expected(0, 2)
    assert log.path.stat().st_size == 4 * RECORD_NBYTES
    log.append(_key(1), _entry(1, b"new"))
    follower.refresh()
    expected = _expected(0, 2) | {_key(1): _entry(1, b"new")}
    assert log.entries == follower.entries == ObjectLog(log.path).entries == expected


def test_a_record_of_another_kind_is_stepped_over():
    body = bytearray(pack_record(_key(0), _entry(0))[:-4])
    body[4] = 77
    assert _read(bytes(body) + struct.pack("<I", zlib.crc32(body)) + _bytes(2)) == _expected(0, 1)


def test_a_log_cut_at_any_byte_keeps_every_record_before_the_cut():
    whole = _bytes(3)
    for cut in range(len(whole) + 1):
        assert _read(whole[:cut]) == _expected(*range(cut // RECORD_NBYTES))


def test_a_torn_record_costs_neither_what_came_before_nor_what_comes_after(tmp_path):
    path = tmp_path / "objects.log"
    for cut in range(1, RECORD_NBYTES):
        path.write_bytes(_bytes(3)[: 2 * RECORD_NBYTES + cut])
        follower, writer = ObjectLog(path), ObjectLog(path)
        writer.append(_key(5), _entry(5))
        follower.refresh()
        assert follower.entries == ObjectLog(path).entries == _expected(0, 1, 5)


def test_a_record_that_was_torn_for_one_reader_is_taken_once_it_is_whole(tmp_path):
    path = tmp_path / "objects.log"
    whole = _bytes(2)
    path.write_bytes(whole[:200])
    log = ObjectLog(path)
    assert log.entries == _expected(0)
    path.write_bytes(whole)
    log.refresh()
    assert log.entries == _expected(0, 1)


# ---- damage -------------------------------------------------------------------------------------------

COUNT = 12
_spots = st.integers(0, COUNT * RECORD_NBYTES - 1)


@settings(max_examples=300, deadline=None)
@given(st.dictionaries(_spots, st.integers(1, 255), max_size=12))
def test_flipped_bits_cost_at_most_the_records_they_are_in_and_never_yield_a_wrong_one(flips):
    data = bytearray(_bytes(COUNT))
    for at, bits in flips.items():
        data[at] ^= bits
    damaged = {at // RECORD_NBYTES for at in flips}
    assert _read(bytes(data)) == _expected(*(set(range(COUNT)) - damaged))


def test_any_single_flipped_bit_is_noticed():
    """CRC-32 misses no burst of up to 32 bits: this is certain, not merely likely."""
    data = bytearray(_bytes(3))
    for bit in range(RECORD_NBYTES * 8):
        at, mask = RECORD_NBYTES + bit // 8, 1 << bit % 8
        data[at] ^= mask
        assert _read(bytes(data)) == _expected(0, 2)
        data[at] ^= mask


@settings(max_examples=300, deadline=None)
@given(
    begin=_spots,
    length=st.integers(0, 3 * RECORD_NBYTES),
    rubbish=st.one_of(st.binary(max_size=300), st.binary(max_size=40).map(lambda b: b + b"DfO1")),
)
def test_bytes_lost_or_put_in_anywhere_cost_only_the_records_they_touch(begin, length, rubbish):
    whole = _bytes(COUNT)
    data = whole[:begin] + rubbish + whole[begin + length :]
    end = begin + length
    intact = {i for i in range(COUNT) if (i + 1) * RECORD_NBYTES <= begin or end <= i * RECORD_NBYTES}
    found = _read(data)
    assert found.items() <= _expected(*range(COUNT)).items()
    assert found.keys() >= _expected(*intact).keys()


@settings(max_examples=200, deadline=None)
@given(st.dictionaries(_spots, st.integers(1, 255), max_size=6), st.lists(_spots, max_size=12))
def test_a_reader_that_follows_a_growing_log_ends_with_what_a_late_reader_finds(flips, cuts):
    data = bytearray(_bytes(COUNT))
    for at, bits in flips.items():
        data[at] ^= bits
    with TemporaryDirectory() as folder:
        path = Path(folder, "objects.log")
        path.write_bytes(b"")
        log = ObjectLog(path)
        edges = [0, *sorted(cuts), len(data)]
        for begin, end in itertools.pairwise(edges):
            with open(path, "ab") as f:
                f.write(data[begin:end])
            log.refresh()
        assert log.entries == _read(bytes(data))


# ---- several processes ----------------------------------------------------------------------------------

WRITER = """
import sys
from pathlib import Path
from deltafin.store.objectlog import ObjectEntry, ObjectLog, span_key
log, first = ObjectLog(Path(sys.argv[1])), int(sys.argv[2])
sys.stdin.readline()
for i in range(first, first + 500):
    log.append(span_key(i.to_bytes(32, "big"), i, 1 + i), ObjectEntry(i.to_bytes(32, "little"), bytes(16), 1 + i))
"""


def test_two_processes_append_at_once_and_a_third_reader_follows_without_a_gap(tmp_path):
    path = tmp_path / "objects.log"
    writers = [
        subprocess.Popen([sys.executable, "-c", WRITER, str(path), str(first)], stdin=subprocess.PIPE)
        for first in (0, 500)
    ]
    reader = ObjectLog(path)
    for writer in writers:
        writer.stdin.write(b"go\n")
        writer.stdin.flush()
    while any(writer.poll() is None for writer in writers):
        reader.refresh()
    assert [writer.wait() for writer in writers] == [0, 0]
    for writer in writers:
        writer.stdin.close()
    reader.refresh()
    expected = {
        span_key(i.to_bytes(32, "big"), i, 1 + i): ObjectEntry(i.to_bytes(32, "little"), bytes(16), 1 + i)
        for i in range(1000)
    }
    assert reader.entries == ObjectLog(path).entries == expected


LIMITED = """
import resource, sys
from pathlib import Path
from deltafin.store.objectlog import ObjectEntry, ObjectLog, span_key
resource.setrlimit(resource.RLIMIT_FSIZE, (200, 200))
log = ObjectLog(Path(sys.argv[1]))
for i in range(2):
    log.append(span_key(bytes(32), i, 1), ObjectEntry(bytes(32), bytes(16), 1))
"""


def test_a_record_that_the_disk_has_no_room_for_is_an_error_and_spoils_nothing(tmp_path):
    path = tmp_path / "objects.log"
    done = subprocess.run([sys.executable, "-c", LIMITED, str(path)], capture_output=True, text=True)
    assert "OSError" in done.stderr
    assert path.stat().st_size == 200  # the second record is torn
    log = ObjectLog(path)
    log.append(_key(3), _entry(3))
    assert ObjectLog(path).entries == {
        span_key(bytes(32), 0, 1): ObjectEntry(bytes(32), bytes(16), 1),
        **_expected(3),
    }


@pytest.mark.parametrize("rubbish", [b"", b"D", b"DfO1", b"\0" * 5000, b"DfO1" * 100, b"<html>nothing here</html>"])
def test_rubbish_in_place_of_a_log_is_no_record_and_no_obstacle(tmp_path, rubbish):
    path = tmp_path / "objects.log"
    path.write_bytes(rubbish)
    log = ObjectLog(path)
    assert log.entries == {}
    log.append(_key(1), _entry(1))
    assert ObjectLog(path).entries == _expected(1)
