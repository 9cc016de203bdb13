"""Drives: the right bytes in every mode, the order of reads, what fails and what ends early, rates and depths."""

from __future__ import annotations

import errno
import json
import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, wait
from functools import partial
from itertools import cycle, islice
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from deltafin.cext import _io
from deltafin.errors import DiskError, NoSpace
from deltafin.store import drive as room
from deltafin.store.arena import Arena, Slot, slot_nbytes
from deltafin.store.drive import Drive, measure_depth
from deltafin.store.drivestate import load_drive, store_drive

PAGE = _io.PAGE
NBYTES = 300_001  # of the test file
SPANS = [(0, NBYTES), (0, 1), (NBYTES - 1, 1), (3088, 100_000), (PAGE - 8, 16), (NBYTES - 5000, 5000), (123_456, 8)]


@pytest.fixture(scope="module")
def content() -> bytes:
    return np.random.default_rng(5).bytes(NBYTES)


@pytest.fixture
def file(tmp_path, content) -> Path:
    path = tmp_path / "shard"
    path.write_bytes(content)
    return path


@pytest.fixture
def slots() -> Iterator[list[Slot]]:
    with Arena(16 * slot_nbytes(NBYTES)) as arena:
        yield [arena.take(slot_nbytes(NBYTES)) for _ in range(16)]


@pytest.fixture
def drive(tmp_path) -> Iterator[Drive]:
    with Drive(tmp_path, depth=2) as drive:
        yield drive


@pytest.fixture(autouse=True)
def small_reads_are_direct_too(monkeypatch) -> None:
    """The spans of these tests are small; that small reads are buffered is tested for itself."""
    monkeypatch.setattr(room, "DIRECT_FROM_NBYTES", 0)


@pytest.fixture
def calls(monkeypatch) -> SimpleNamespace:
    """What goes through the door of C: `calls.fail[name]` lists what its next calls raise, None for none."""
    calls = SimpleNamespace(opened=[], read=[], fail={"open": [], "read": []}, grants=True)
    real_open, real_read = _io.open, _io.read

    def may_fail(name: str) -> None:
        number = calls.fail[name].pop(0) if calls.fail[name] else None
        if number is not None:
            raise OSError(number, os.strerror(number))

    def open_(path, direct):
        calls.opened.append(direct)
        may_fail("open")
        return real_open(path, direct and calls.grants)

    def read(fd, offset, nbytes, slot, direct):
        calls.read.append(direct)
        may_fail("read")
        return real_read(fd, offset, nbytes, slot, direct)

    monkeypatch.setattr(room, "_io", SimpleNamespace(open=open_, read=read, PAGE=PAGE))
    return calls


def test_small_reads_go_through_the_page_cache_and_large_ones_past_it(drive, file, slots, content, calls, monkeypatch):
    monkeypatch.setattr(room, "DIRECT_FROM_NBYTES", 5000)
    for nbytes in (4999, 5000):
        assert drive.read(file, 8, nbytes, slots[0]).tobytes() == content[8 : 8 + nbytes]
    assert calls.read == [False, True]
    assert drive.direct


# ---- bytes ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("direct", [True, False])
def test_every_span_is_what_a_plain_read_gives(tmp_path, file, content, slots, direct):
    with Drive(tmp_path, direct=direct) as drive:
        for offset, nbytes in SPANS:
            got = drive.read(file, offset, nbytes, slots[0])
            assert got.tobytes() == content[offset : offset + nbytes]
            assert got.base is not None and np.shares_memory(got, slots[0])
        assert drive.stats.reads == len(SPANS)
        assert drive.stats.nbytes == sum(nbytes for _, nbytes in SPANS)
        assert drive.direct is direct


def test_spans_read_by_many_threads_are_not_mixed_up(tmp_path, file, content, slots):
    with Drive(tmp_path, depth=8) as drive:
        futures = {}
        for slot in slots:
            offset, nbytes = SPANS[len(futures) % len(SPANS)]
            work = partial(drive.read, file, offset, nbytes, slot)
            futures[drive.submit(work, urgent=True)] = content[offset : offset + nbytes]
        for future, wanted in futures.items():
            assert future.result().tobytes() == wanted


def test_no_descriptor_stays_open(drive, file, slots, calls):
    before = os.listdir("/proc/self/fd")
    calls.fail["read"] = [None, errno.EINVAL, None, errno.EIO, errno.EIO]
    drive.read(file, 0, 10, slots[0])
    drive.read(file, 0, 10, slots[0])
    with pytest.raises(DiskError):
        drive.read(file, 0, 10, slots[0])
    assert os.listdir("/proc/self/fd") == before


# ---- where direct reads are refused ----------------------------------------------------------------------


def _notices(caplog) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def test_a_file_system_without_direct_reads_is_read_through_the_cache_with_one_notice(
    drive, tmp_path, file, content, slots, calls, caplog
):
    calls.grants = False
    for offset, nbytes in SPANS:
        assert drive.read(file, offset, nbytes, slots[0]).tobytes() == content[offset : offset + nbytes]
    assert calls.opened == [True] + [False] * (len(SPANS) - 1)
    assert not drive.direct
    (notice,) = _notices(caplog)
    assert notice.startswith(f"{tmp_path}: direct reads are refused") and "page cache" in notice


def test_a_direct_read_that_is_refused_only_when_it_is_made_falls_back_too(
    drive, tmp_path, file, content, slots, calls, caplog
):
    calls.fail["read"] = [None, errno.EINVAL]
    for offset, nbytes in SPANS:
        assert drive.read(file, offset, nbytes, slots[0]).tobytes() == content[offset : offset + nbytes]
    assert calls.read == [True, True] + [False] * (len(SPANS) - 1)
    (notice,) = _notices(caplog)
    assert str(tmp_path) in notice and "errno 22" in notice
    assert drive.stats.reads == len(SPANS)


def test_many_threads_that_find_out_together_say_it_once(tmp_path, file, slots, calls, caplog):
    calls.fail["read"] = [errno.EINVAL] * 4
    with Drive(tmp_path, depth=4) as drive:
        wait([drive.submit(lambda s=slot: drive.read(file, 0, NBYTES, s), urgent=True) for slot in slots[:4]])
    assert len(_notices(caplog)) <= 1


def test_refusing_a_buffered_read_is_an_error(tmp_path, file, slots, calls):
    calls.fail["read"] = [errno.EINVAL, errno.EINVAL]
    with Drive(tmp_path, direct=False) as drive, pytest.raises(DiskError, match="errno 22"):
        drive.read(file, 0, 10, slots[0])


# ---- drives that fail ------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["open", "read"])
def test_a_drive_that_fails_once_is_asked_again(drive, file, content, slots, calls, caplog, where):
    calls.fail[where] = [errno.EIO]
    assert drive.read(file, 3088, 100, slots[0]).tobytes() == content[3088:3188]
    assert drive.direct and _notices(caplog) == []
    assert drive.stats.reads == 1


def test_a_drive_that_goes_on_failing_is_an_error_with_errno_file_and_offset(drive, file, slots, calls):
    calls.fail["read"] = [errno.EIO, errno.EIO]
    with pytest.raises(DiskError) as e:
        drive.read(file, 3088, 100, slots[0])
    assert str(e.value) == f"{file}: cannot read 100 bytes at 3088 (errno 5): Input/output error"
    assert len(calls.read) == 2
    assert (drive.stats.reads, drive.stats.nbytes) == (0, 0)


def test_a_file_that_ended_early_or_is_gone_is_an_error(drive, tmp_path, file, slots):
    with pytest.raises(
        DiskError, match=f"cannot read 2 bytes at {NBYTES - 1} .errno 5.: the file ends at byte {NBYTES}"
    ):
        drive.read(file, NBYTES - 1, 2, slots[0])
    with pytest.raises(DiskError, match="errno 2"):
        drive.read(tmp_path / "gone", 0, 1, slots[0])


def test_an_error_of_a_work_is_its_futures(drive, tmp_path, slots):
    future = drive.submit(lambda: drive.read(tmp_path / "gone", 0, 1, slots[0]), urgent=False)
    with pytest.raises(DiskError):
        future.result()
    assert drive.submit(lambda: 3, urgent=False).result() == 3


# ---- order, cancelling, closing ---------------------------------------------------------------------------


@pytest.fixture
def gate(tmp_path) -> Iterator[SimpleNamespace]:
    """A drive with one thread that is held until `open` is set; `log` gets what ran."""
    gate = SimpleNamespace(open=threading.Event(), begun=threading.Event(), log=[])
    with Drive(tmp_path, depth=1) as drive:
        gate.drive = drive

        def hold() -> str:
            gate.begun.set()
            gate.open.wait(30)
            return "held"

        gate.held = drive.submit(hold, urgent=False)
        assert gate.begun.wait(30)
        yield gate
        gate.open.set()


def test_urgent_works_go_first_and_each_kind_in_order(gate):
    futures = [gate.drive.submit(lambda n=n: gate.log.append(n), urgent=n % 3 == 0) for n in range(12)]
    gate.open.set()
    wait(futures)
    assert gate.log == [0, 3, 6, 9, 1, 2, 4, 5, 7, 8, 10, 11]


def test_a_cancelled_work_never_runs_and_the_others_do(gate):
    futures = [gate.drive.submit(lambda n=n: gate.log.append(n), urgent=False) for n in range(6)]
    assert futures[1].cancel() and futures[4].cancel()
    assert not gate.held.cancel()
    gate.open.set()
    wait(futures)
    assert gate.log == [0, 2, 3, 5]
    with pytest.raises(CancelledError):
        futures[1].result()


def test_closing_waits_for_what_has_begun_and_drops_the_rest(gate):
    futures = [gate.drive.submit(lambda n=n: gate.log.append(n), urgent=True) for n in range(3)]
    closed = threading.Thread(target=gate.drive.close)
    closed.start()
    assert len(wait(futures, timeout=30).done) == 3  # before the held one is through
    assert all(future.cancelled() for future in futures)
    assert closed.is_alive() and not gate.held.done()
    gate.open.set()
    closed.join(30)
    assert gate.held.result(0) == "held" and gate.log == []
    gate.drive.close()
    with pytest.raises(RuntimeError, match="closed"):
        gate.drive.submit(lambda: None, urgent=True)


def test_no_more_works_run_at_once_than_the_depth(tmp_path):
    running = most = 0
    lock = threading.Lock()

    def work() -> None:
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        time.sleep(0.01)
        with lock:
            running -= 1

    with Drive(tmp_path, depth=3) as drive:
        wait([drive.submit(work, urgent=False) for _ in range(20)])
    assert most == 3


def test_threads_are_started_for_work_and_gone_when_closed(tmp_path):
    before = threading.active_count()
    drive = Drive(tmp_path, depth=4)
    assert threading.active_count() == before
    drive.submit(lambda: None, urgent=True).result()
    assert threading.active_count() == before + 1
    drive.close()
    assert threading.active_count() == before


def test_ctrl_c_reaches_who_waits_for_a_drive_to_close(gate):
    def raise_(_number: int, _frame: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, raise_)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        with pytest.raises(KeyboardInterrupt):
            gate.drive.close()
    finally:
        signal.signal(signal.SIGALRM, before)
    threading.Timer(0.1, gate.open.set).start()
    gate.drive.close()
    assert gate.held.done()


def test_a_program_that_forgets_to_close_its_drive_ends(python):
    done = python("from pathlib import Path; from deltafin.store.drive import Drive; "
                  "d = Drive(Path('.')); print(d.submit(lambda: 3, urgent=True).result())")  # fmt: skip
    assert (done.returncode, done.stdout, done.stderr) == (0, "3\n", "")


# ---- rates and counts -------------------------------------------------------------------------------------


def _reads(drive: Drive, file: Path, slots: list[Slot], times: int) -> float:
    start = time.monotonic()
    works = [partial(drive.read, file, 0, NBYTES, slot) for slot in islice(cycle(slots), times)]
    wait([drive.submit(work, urgent=True) for work in works])
    return time.monotonic() - start


def test_a_limited_drive_is_as_slow_as_it_should_be_at_any_depth(tmp_path, file, slots):
    rate = 20 * NBYTES  # a second
    for depth in (1, 4):
        with Drive(tmp_path, depth=depth, rate=rate) as drive:
            took = _reads(drive, file, slots, 10)
        assert 0.5 <= took < 5  # never faster; slower only where the machine is


def test_a_limited_drive_has_not_saved_up_what_it_could_have_read(tmp_path, file, slots):
    with Drive(tmp_path, depth=2, rate=20 * NBYTES) as drive:
        _reads(drive, file, slots, 1)
        time.sleep(0.3)
        assert _reads(drive, file, slots, 4) >= 0.2


def test_busy_time_counts_once_for_reads_side_by_side(tmp_path, file, slots):
    with Drive(tmp_path, depth=4, rate=20 * NBYTES) as drive:
        took = _reads(drive, file, slots, 8)
        stats = drive.stats
        assert 0.4 <= stats.busy_s <= took + 0.05
        time.sleep(0.05)
        assert drive.stats == stats
        assert (stats.reads, stats.nbytes) == (8, 8 * NBYTES)


def test_busy_time_grows_while_a_read_is_under_way(tmp_path, file, slots):
    with Drive(tmp_path, rate=4 * NBYTES) as drive:
        future = drive.submit(lambda: drive.read(file, 0, NBYTES, slots[0]), urgent=True)
        time.sleep(0.1)
        assert 0 < drive.stats.busy_s < 10 and not future.done()


# ---- depth ------------------------------------------------------------------------------------------------


@pytest.fixture
def slow_reads(monkeypatch) -> Callable[[Callable[[int], float]], None]:
    """`slow_reads(seconds)`: a read that starts as the n-th of those under way takes seconds(n)."""
    under_way = 0
    lock = threading.Lock()

    def install(seconds: Callable[[int], float]) -> None:
        def read(self: Drive, path: Path, offset: int, nbytes: int, slot: Slot) -> Slot:
            nonlocal under_way
            with lock:
                under_way += 1
                mine = under_way
            time.sleep(seconds(mine))
            with lock:
                under_way -= 1
            return slot[:nbytes]

        monkeypatch.setattr(Drive, "read", read)

    return install


def _measured(drive: Drive, slots: list[Slot], **keywords) -> room.DepthReport:
    report = measure_depth(drive, [(Path("x"), 0, 100)], slots, **keywords)
    assert report is not None
    return report


def test_a_drive_that_gains_by_more_reads_at_once_is_given_them(drive, slots, slow_reads):
    slow_reads(lambda n: 0.01 if n <= 4 else 0.01 * n / 4)  # four at once, then each waits for the others
    report = _measured(drive, slots, seconds=1.0)
    assert list(report.rates) == [1, 2, 4, 8, 16]
    assert report.depth > 1
    assert report.rates[1] < report.rates[4]


def test_a_drive_that_gains_nothing_is_read_one_by_one(drive, slots, monkeypatch):
    rates = {1: 97.0, 2: 100.0, 4: 99.0, 8: 60.0, 16: 10.0}
    monkeypatch.setattr(room, "_turn", lambda drive, spans, slots, seconds: rates[drive.depth])
    assert _measured(drive, slots).depth == 1
    rates[4] = 102.2
    assert _measured(drive, slots).depth == 2


def test_a_disturbed_turn_does_not_decide(drive, slots, monkeypatch):
    turns: dict[int, list[float]] = {1: [90, 90, 400, 90, 90], 2: [100, 100, 1, 100, 2]}
    monkeypatch.setattr(room, "_turn", lambda drive, spans, slots, seconds: turns[drive.depth].pop())
    assert _measured(drive, slots, depths=(2, 1)).rates == {1: 90, 2: 100}


def test_no_depth_is_tried_without_slots_for_it(drive, slots, slow_reads):
    slow_reads(lambda n: 0.001)
    assert list(_measured(drive, slots[:5], seconds=0.05).rates) == [1, 2, 4]


def test_a_depth_is_not_measured_on_the_page_cache(drive, file, slots, calls):
    calls.grants = False
    assert measure_depth(drive, [(file, 0, NBYTES)], slots, seconds=0.05) is None


def test_measuring_reads_real_spans(drive, file, slots):
    spans = [(file, offset, nbytes) for offset, nbytes in SPANS]
    report = measure_depth(drive, spans, slots, seconds=0.1)
    if report is None:
        pytest.skip("no direct reads here")
    assert report.depth in report.rates and all(rate > 0 for rate in report.rates.values())


def test_an_error_while_measuring_is_an_error(drive, tmp_path, slots):
    with pytest.raises(DiskError, match="gone"):
        measure_depth(drive, [(tmp_path / "gone", 0, 10)], slots, seconds=0.05)


def test_a_depth_is_remembered_by_directory_and_device(tmp_path, monkeypatch):
    state, a, b = tmp_path / "cache" / "drives.json", tmp_path / "a", tmp_path / "b"
    a.mkdir(), b.mkdir()
    assert load_drive(state, a) is None
    store_drive(state, a, 4)
    store_drive(state, b, 16)
    store_drive(state, a, 2)
    assert [load_drive(state, root).depth for root in (a, b)] == [2, 16]
    monkeypatch.chdir(tmp_path)
    assert load_drive(state, Path("a")).depth == 2
    assert [p.name for p in state.parent.iterdir()] == ["drives.json"]
    os.rmdir(b)
    assert load_drive(state, b) is None
    with pytest.raises(DiskError, match="cannot look at it"):
        store_drive(state, b, 2)
    known = json.loads(state.read_text())
    known[str(a)]["device"] += 1  # another drive was mounted there then
    state.write_text(json.dumps(known))
    assert load_drive(state, a) is None


@pytest.mark.parametrize(
    "text",
    [
        "", "{", "[1]", "3", "null", '{"/a": 4}', '{"/a": {"device": 1}}', '{"/a": {"device": 1, "depth": 0}}',
        '{"/a": {"device": 1, "depth": 65}}', '{"/a": {"device": "x", "depth": 4}}', "\xff", "[" * 100_000,
    ],
)  # fmt: skip
def test_a_damaged_file_of_depths_is_ignored_with_one_notice_and_written_anew(tmp_path, caplog, text):
    state = tmp_path / "drives.json"
    state.write_bytes(text.encode("latin-1"))
    assert load_drive(state, tmp_path) is None
    (notice,) = _notices(caplog)
    assert notice == f"{state}: damaged; depths are measured again"
    store_drive(state, tmp_path, 8)
    assert load_drive(state, tmp_path).depth == 8
    assert json.loads(state.read_text()).keys() == {str(tmp_path)}


@pytest.mark.parametrize("kind", ["pipe", "folder", "huge"])
def test_what_is_no_small_file_of_depths_is_not_read(tmp_path, caplog, kind):
    state = tmp_path / "drives.json"
    if kind == "pipe":
        os.mkfifo(state)
    elif kind == "folder":
        state.mkdir()
    else:
        with open(state, "wb") as f:
            f.truncate(1 << 40)
    assert load_drive(state, tmp_path) is None
    assert _notices(caplog) == [f"{state}: not a small file; depths are measured again"]


def test_depths_that_cannot_be_kept_are_an_error_and_leave_nothing(tmp_path, monkeypatch):
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("deltafin.store.drivestate.publish", full)
    with pytest.raises(NoSpace):
        store_drive(tmp_path / "drives.json", tmp_path, 8)
    assert list(tmp_path.iterdir()) == []


def test_depths_cannot_be_kept_below_a_file(tmp_path, file):
    with pytest.raises(DiskError, match="cannot write"):
        store_drive(file / "drives.json", tmp_path, 8)
    assert load_drive(file / "drives.json", tmp_path) is None
