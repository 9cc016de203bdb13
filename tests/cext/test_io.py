"""Reads of spans at the door of C: every byte where it belongs, nothing else touched, nothing wrong let in."""

from __future__ import annotations

import errno
import mmap
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from deltafin.cext import _io

PAGE = _io.PAGE
NBYTES = 3 * PAGE + 1234
Slot = npt.NDArray[np.uint8]


@pytest.fixture(scope="module")
def content() -> bytes:
    return np.random.default_rng(1).bytes(NBYTES)


@pytest.fixture
def file(tmp_path, content) -> Path:
    path = tmp_path / "shard"
    path.write_bytes(content)
    return path


@pytest.fixture
def slot() -> Slot:
    """Full of what no file here holds a run of."""
    slot = np.frombuffer(mmap.mmap(-1, 6 * PAGE), np.uint8)
    slot[:] = 0xA5
    return slot


@pytest.fixture(params=[True, False], ids=["direct", "buffered"])
def read(request) -> Callable[..., tuple[int, bool]]:
    """`read(path, offset, nbytes, slot)` in one of the two modes: (start, direct)."""

    def run(path: Path, offset: int, nbytes: int, slot: Slot) -> tuple[int, bool]:
        fd, direct = _io.open(path, request.param)
        try:
            return _io.read(fd, offset, nbytes, slot, direct), direct
        finally:
            os.close(fd)

    return run


EDGES = sorted(
    {0, 1, 8, 511, 512, 3088, PAGE - 1, PAGE, PAGE + 1, 2 * PAGE, 3 * PAGE, 3 * PAGE + 1, NBYTES - 1, NBYTES}
)


def test_every_range_between_edges_lies_where_it_was_promised(read, file, content, slot):
    for i, begin in enumerate(EDGES):
        for end in EDGES[i:]:
            start, direct = read(file, begin, end - begin, slot)
            assert start == begin % PAGE
            assert slot[start : start + end - begin].tobytes() == content[begin:end], (begin, end)
            touched = -(-(start + end - begin) // PAGE) * PAGE if direct else start + end - begin
            assert (slot[touched:] == 0xA5).all() and (direct or (slot[:start] == 0xA5).all())
            slot[:] = 0xA5


def test_a_slot_of_just_enough_pages_is_enough(read, file, content, slot):
    start, _ = read(file, 3088, NBYTES - 3088, slot[: 4 * PAGE])
    assert slot[start : start + NBYTES - 3088].tobytes() == content[3088:]
    assert (slot[4 * PAGE :] == 0xA5).all()
    with pytest.raises(
        ValueError, match=f"slot has {4 * PAGE - 1} bytes; {NBYTES - 3088} bytes at 3088 need {4 * PAGE}"
    ):
        read(file, 3088, NBYTES - 3088, slot[: 4 * PAGE - 1])


@pytest.mark.parametrize(
    ("offset", "nbytes", "early"),
    [(0, NBYTES + 1, 1), (NBYTES - 1, 2, 1), (NBYTES, 1, 1), (3 * PAGE, PAGE, PAGE - 1234), (9 * PAGE + 5, 7, 0)],
)
def test_a_file_that_is_too_short_is_told_by_where_it_ends(read, file, slot, offset, nbytes, early):
    early = early or offset + nbytes - NBYTES
    with pytest.raises(OSError, match=f"the file ends at byte {NBYTES}, {early} bytes too early") as e:
        read(file, offset, nbytes, slot)
    assert e.value.errno == errno.EIO


def test_a_file_that_ends_with_a_page_ends_there(read, tmp_path, slot):
    path = tmp_path / "even"
    path.write_bytes(bytes(2 * PAGE))
    assert read(path, PAGE, PAGE, slot)[0] == 0
    with pytest.raises(OSError, match=f"the file ends at byte {2 * PAGE}, 1 bytes too early"):
        read(path, PAGE, PAGE + 1, slot)


def test_nothing_is_read_for_nothing(read, file, slot):
    assert read(file, 77, 0, slot[:PAGE])[0] == 77
    assert (slot == 0xA5).all()


@pytest.mark.parametrize("direct", [True, False])
def test_a_missing_file_is_an_error_with_its_name(tmp_path, direct):
    with pytest.raises(FileNotFoundError) as e:
        _io.open(tmp_path / "gone", direct)
    assert e.value.filename == tmp_path / "gone"


def test_a_descriptor_is_not_inherited(file):
    fd, _ = _io.open(str(file), True)
    assert not os.get_inheritable(fd)
    os.close(fd)


def test_a_name_of_bytes_that_are_no_text_can_be_opened(tmp_path, content, slot):
    path = os.fsencode(tmp_path) + b"/\xff\xfe"
    with open(path, "wb") as f:
        f.write(content)
    fd, direct = _io.open(Path(os.fsdecode(path)), True)
    assert slot[_io.read(fd, 0, 10, slot, direct) :][:10].tobytes() == content[:10]
    os.close(fd)


def test_a_name_with_a_null_is_refused():
    with pytest.raises(ValueError, match="null"):
        _io.open("a\0b", True)


def test_a_bad_descriptor_is_an_error(slot):
    for direct in (True, False):
        with pytest.raises(OSError) as e:
            _io.read(1 << 20, 0, 10, slot, direct)
        assert e.value.errno == errno.EBADF


def test_a_file_system_that_refuses_direct_reads_is_read_through_the_cache():
    fd, direct = _io.open("/proc/self/status", True)
    os.close(fd)
    assert not direct


@pytest.mark.parametrize(
    ("offset", "nbytes", "message"),
    [
        (-1, 1, "offset must be from 0"),
        (2**63, 1, "offset must be from 0"),
        (2**70, 1, "offset must be from 0"),
        (2**63 - PAGE, 1, "offset must be from 0"),
        (2**63 - PAGE - 1, 1, "nbytes must be from 0 to 0"),
        (0, -1, "nbytes must be from 0"),
        (1, 2**63 - PAGE - 1, "nbytes must be from 0"),
        (0, 2**63 - PAGE - 1, "slot has"),
        (0, 2**64 - 1, "nbytes must be from 0"),
    ],
)
def test_a_range_that_cannot_be_is_refused(read, file, slot, offset, nbytes, message):
    with pytest.raises(ValueError, match=message):
        read(file, offset, nbytes, slot)


def test_a_slot_that_cannot_be_is_refused(read, file, slot):
    with pytest.raises(ValueError, match="slot does not start on a page of 4096 bytes"):
        read(file, 0, 1, slot[8:])
    with pytest.raises(ValueError, match="slot is read-only"):
        read(file, 0, 1, np.frombuffer(bytes(2 * PAGE), np.uint8))
    with pytest.raises(TypeError, match="slot must be uint8"):
        read(file, 0, 1, slot.view(np.int32))
    with pytest.raises(ValueError, match="slot must be C-contiguous"):
        read(file, 0, 1, slot[::2])
    with pytest.raises(TypeError, match="slot must be an array"):
        read(file, 0, 1, None)
    with pytest.raises(TypeError, match="read takes 5 arguments, not 3"):
        _io.read(0, 1, slot)


SIGNALS = """
import mmap, os, signal, sys, time
import numpy as np
from deltafin.cext import _io
signal.signal(signal.SIGALRM, lambda *_: None)
signal.setitimer(signal.ITIMER_REAL, 0.001, 0.001)
slot = np.frombuffer(mmap.mmap(-1, 9 << 20), np.uint8)
wanted = np.fromfile(sys.argv[1], np.uint8)
end = time.monotonic() + 0.5
while time.monotonic() < end:
    fd, direct = _io.open(sys.argv[1], True)
    start = _io.read(fd, 3088, wanted.size - 3088, slot, direct)
    os.close(fd)
    assert (slot[start : start + wanted.size - 3088] == wanted[3088:]).all()
    slot[:] = 0
signal.setitimer(signal.ITIMER_REAL, 0)
"""


def test_signals_do_not_cut_a_read_short(tmp_path):
    path = tmp_path / "large"
    path.write_bytes(np.random.default_rng(2).bytes((8 << 20) + 77))
    done = subprocess.run([sys.executable, "-c", SIGNALS, path], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
