"""The benchmark of several roots measures what it says and leaves nothing; and what drives know of their rates."""

from __future__ import annotations

import shutil
import threading
import time

import pytest

from deltafin.store import rootbench
from deltafin.store.drive import UNKNOWN_RATE, Drive
from deltafin.store.drivestate import load_drive, store_drive


def test_all_roots_share_a_layer_in_proportion_to_their_rates(tmp_path):
    if shutil.disk_usage(tmp_path).free < 500_000_000:
        pytest.skip("too little space")
    with rootbench.several_roots(tmp_path, (400e6, 800e6), distinct=1) as (store, places):
        report = rootbench.measure(store, layers=2)
        assert len(places) == 2 and all((place / "objects.log").exists() for place in places)
    assert sum(root.nbytes for root in report.roots) == 2 * report.layer_nbytes
    assert report.layer_nbytes == 16 * 17_547_264
    assert report.ideal_s == pytest.approx(report.layer_nbytes / 1.2e9)
    assert all(took >= 0.99 * report.ideal_s for took in report.layer_s)  # nothing is faster than the limit
    assert all(0.5 < root.ratio < 1.5 for root in report.roots)
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(bytes(40 << 20))
    return path


def test_a_drive_expects_what_it_was_measured_at_until_it_has_read_itself(tmp_path, file, new_slot):
    with Drive(tmp_path) as drive:
        assert drive.expected_rate == UNKNOWN_RATE
        drive.known_rate = 123e6
        assert drive.expected_rate == 123e6
        drive.rate = 400e6
        assert drive.expected_rate == 400e6
        slot = new_slot(40 << 20)
        drive.read(file, 0, 1 << 20, slot)  # too little to tell
        assert drive.expected_rate == 400e6
        drive.rate = 200e6  # it got slower than was expected
        drive._seen_rate = 400e6
        for _ in range(8):
            drive.read(file, 0, 40 << 20, slot)
        assert 190e6 < drive.expected_rate < 240e6


def test_what_waits_at_a_drive_is_known_in_seconds(tmp_path):
    gate = threading.Event()
    with Drive(tmp_path, depth=1) as drive:
        drive.known_rate = 100e6
        assert drive.queued_s(urgent=True) == 0
        drive.submit(lambda: gate.wait(5), urgent=False, nbytes=100_000_000)
        while not drive._running_nbytes:
            time.sleep(0.001)
        drive.submit(lambda: None, urgent=True, nbytes=200_000_000)
        last = drive.submit(lambda: None, urgent=False, nbytes=400_000_000)
        assert 2.5 < drive.queued_s(urgent=True) <= 3.0  # the one under way and the urgent one
        assert 6.5 < drive.queued_s(urgent=False) <= 7.0
        time.sleep(0.2)
        assert drive.queued_s(urgent=True) < 2.9  # of what is under way a part is through by now
        gate.set()
        last.result(5)
    assert drive.queued_s(urgent=False) == 0


def test_dropped_work_waits_no_more(tmp_path):
    gate = threading.Event()
    drive = Drive(tmp_path, depth=1)
    drive.submit(lambda: gate.wait(5), urgent=True, nbytes=10)
    drive.submit(lambda: None, urgent=True, nbytes=1 << 40)
    threading.Timer(0.05, gate.set).start()
    drive.close()
    assert drive.queued_s(urgent=True) == 0


def test_a_measured_rate_is_remembered_beside_the_depth(tmp_path):
    state = tmp_path / "drives.json"
    store_drive(state, tmp_path, 4, 1.5e9)
    assert (load_drive(state, tmp_path).depth, load_drive(state, tmp_path).rate) == (4, 1.5e9)
    state.write_text(state.read_text().replace("1500000000.0", "-1"))
    assert load_drive(state, tmp_path) is None
