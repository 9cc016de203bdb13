"""One piece of memory, cut into slots that start on pages."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from deltafin.cext import _io
from deltafin.errors import DeltafinError, NoMemory
from deltafin.store.arena import HUGE_PAGE, Arena, slot_nbytes

PAGE = _io.PAGE


def test_a_slot_holds_a_span_wherever_in_a_page_it_starts():
    for nbytes in (1, PAGE - 1, PAGE, PAGE + 1, 17_547_264, 32 << 20):
        for offset in (0, 1, 8, 3088, PAGE - 1):
            assert -(-(offset + nbytes) // PAGE) * PAGE <= slot_nbytes(nbytes)
    assert slot_nbytes(17_547_264) == 17_547_264 + PAGE


def test_slots_start_on_pages_and_share_nothing():
    with Arena(10 * PAGE) as arena:
        slots = [arena.take(PAGE + 1), arena.take(1), arena.take(3 * PAGE), arena.take(0), arena.take(4 * PAGE)]
        assert [slot.size for slot in slots] == [PAGE + 1, 1, 3 * PAGE, 0, 4 * PAGE]
        assert all(slot.ctypes.data % PAGE == 0 and slot.flags.writeable for slot in slots)
        assert slots[0].ctypes.data % HUGE_PAGE == 0
        for number, slot in enumerate(slots, 1):
            assert not slot.any()
            slot[:] = number
        assert [int(slot.sum()) for slot in slots] == [PAGE + 1, 2, 9 * PAGE, 0, 20 * PAGE]


def test_an_arena_gives_what_it_has_and_says_what_is_left():
    with Arena(2 * PAGE + 1) as arena:
        assert arena.nbytes == arena.left_nbytes == 3 * PAGE
        arena.take(2 * PAGE)
        with pytest.raises(NoMemory, match=f"{PAGE + 1} bytes .* of {3 * PAGE} only {PAGE} are left"):
            arena.take(PAGE + 1)
        arena.take(PAGE)
        assert arena.left_nbytes == 0
        with pytest.raises(DeltafinError):
            arena.take(1)


def test_more_memory_than_there_can_be_is_refused_in_one_line():
    for nbytes in (1 << 60, 1 << 70):
        with pytest.raises(NoMemory, match=f"cannot get {nbytes} bytes of memory for slots"):
            Arena(nbytes)


def test_arrays_outlive_a_closed_arena():
    arena = Arena(PAGE)
    slot = arena.take(PAGE)
    slot[:] = 7
    arena.close()
    arena.close()
    assert (slot == 7).all()
    with pytest.raises(NoMemory):
        arena.take(1)


def _mapped() -> int:
    with open("/proc/self/statm") as f:
        return int(f.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")


def test_memory_goes_back_when_arena_and_arrays_are_gone():
    before = _mapped()
    arena = Arena(1 << 30)
    slot = arena.take(PAGE)
    assert _mapped() >= before + (1 << 30)
    arena.close()
    del slot
    assert _mapped() < before + (1 << 29)
    Arena(1 << 30).close()
    assert _mapped() < before + (1 << 29)


def test_an_arena_lies_on_huge_pages_if_the_system_gives_them():
    setting = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    if not setting.exists() or "[never]" in setting.read_text():
        pytest.skip("no huge pages here")
    with Arena(8 * HUGE_PAGE) as arena:
        slot = arena.take(8 * HUGE_PAGE)
        slot[:] = 1
        flags = _smaps(slot.ctypes.data)
        assert {"hg", "dc"} <= set(flags["VmFlags"].split())  # advised, and not copied to children
        assert flags["THPeligible"].strip() == "1"


def _smaps(address: int) -> dict[str, str]:
    found: dict[str, str] = {}
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        name, _, rest = line.partition(":")
        if "-" in name and " " in name:
            begin, end = (int(part, 16) for part in name.split()[0].split("-"))
            inside = begin <= address < end
        elif inside:
            found[name] = rest
    return found


def test_direct_reads_reach_slots(tmp_path):
    content = np.random.default_rng(0).bytes(3 * PAGE)
    (tmp_path / "a").write_bytes(content)
    with Arena(slot_nbytes(3 * PAGE)) as arena:
        slot = arena.take(arena.nbytes)
        fd, direct = _io.open(tmp_path / "a", True)
        assert _io.read(fd, 5, 3 * PAGE - 5, slot, direct) == 5
        os.close(fd)
        assert slot[5 : 3 * PAGE].tobytes() == content[5:]
