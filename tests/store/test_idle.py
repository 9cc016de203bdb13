"""An idle fetch uses what a run leaves free: it begins nothing while one fetches, and goes last for all else."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from deltafin.store import BusyLine, Idle, all_items, fetch


def mark_age(cache: Path, seconds: float) -> None:
    then = time.time() - seconds
    os.utime(cache / "line.busy", (then, then))


def test_a_line_that_nobody_marked_is_free(tmp_path):
    assert Idle(tmp_path).free
    assert Idle(tmp_path / "no such directory").free


def test_a_mark_holds_for_a_second(tmp_path):
    BusyLine(tmp_path).mark()
    assert not Idle(tmp_path).free
    mark_age(tmp_path, 0.9)
    assert not Idle(tmp_path).free
    mark_age(tmp_path, 1.1)
    assert Idle(tmp_path).free


def test_a_mark_of_a_wrong_clock_does_not_hold_for_ever(tmp_path):
    BusyLine(tmp_path).mark()
    mark_age(tmp_path, -3600)
    assert Idle(tmp_path).free


def test_the_file_is_touched_five_times_a_second_at_most(tmp_path, monkeypatch):
    touched = []
    now = [100.0]
    monkeypatch.setattr("deltafin.store.idle.time.monotonic", lambda: now[0])
    monkeypatch.setattr("deltafin.store.idle.os.utime", touched.append)
    busy = BusyLine(tmp_path)
    for _ in range(1000):
        busy.mark()
        now[0] += 0.01
    assert 45 <= len(touched) <= 51


def test_a_cache_that_cannot_be_written_does_not_stop_a_run(tmp_path):
    BusyLine(tmp_path / "no such directory").mark()


def test_waiting_is_said_once_and_ends_when_the_run_does(tmp_path):
    said = []
    idle = Idle(tmp_path, lambda: said.append(1))
    assert idle.wait(threading.Event()) and not said
    BusyLine(tmp_path).mark()
    begun = time.monotonic()
    assert idle.wait(threading.Event())
    assert 0.8 < time.monotonic() - begun < 10
    BusyLine(tmp_path).mark()
    assert not idle.free
    assert said == [1]


def test_waiting_ends_when_it_is_stopped(tmp_path):
    BusyLine(tmp_path).mark()
    stopped = threading.Event()
    stopped.set()
    assert not Idle(tmp_path).wait(stopped)


def test_an_idle_fetch_begins_nothing_while_a_run_marks_the_line(hub_store, at_once):
    store, server = hub_store("slow_drip", bytes=8192, every=0.02)
    cache = store.roots[0].path
    items, over = all_items(store.catalog)[:16], threading.Event()
    busy = BusyLine(cache)

    def run() -> None:
        while not over.wait(0.05):
            busy.mark()

    runner = threading.Thread(target=run)
    fetcher = threading.Thread(target=lambda: fetch(store, items, idle=Idle(cache)))
    busy.mark()
    runner.start()
    fetcher.start()
    time.sleep(0.6)
    assert len(server.state.log) == 0
    over.set()
    runner.join()
    while len(server.state.log) < 5:
        time.sleep(0.01)
    over.clear()
    runner = threading.Thread(target=run)
    busy.mark()
    runner.start()
    time.sleep(0.5)  # what was begun is finished
    asked = len(server.state.log)
    time.sleep(0.5)
    assert len(server.state.log) == asked < len(items)
    over.set()
    runner.join()
    fetcher.join(120)
    assert all(store.is_local(item.span) for item in items)
    assert max(at_once) == 2
    at_once.clear()
    fetch(store, all_items(store.catalog)[16:32])
    assert max(at_once) > 2, "what is not idle takes more"


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux says what goes first on its drives")
def test_everything_else_goes_first():
    code = (
        "import os, threading, psutil\n"
        "from deltafin.store import lower_priority\n"
        "lower_priority()\n"
        "print(os.nice(0), psutil.Process().ionice().ioclass == psutil.IOPRIO_CLASS_IDLE)\n"
        "threading.Thread(target=lambda: print(os.nice(0))).start()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.split() == ["19", "True", "19"], done.stderr
