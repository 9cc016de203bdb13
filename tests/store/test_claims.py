"""Claims between processes: who fetches what now; and that nothing is lost where they cannot be kept."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from deltafin.errors import DeltafinError
from deltafin.indexer import this_host
from deltafin.store import all_items, claims, expert_items, fetch, rest_items
from deltafin.store.claims import STALE_S, Claims
from deltafin.store.store import WORKERS

KEY, OTHER = bytes(range(48)), bytes(48)


@pytest.fixture
def root(tmp_path):
    (tmp_path / "root").mkdir()
    return tmp_path / "root"


@pytest.fixture
def held(root):
    """Claims whose files say that they are another process's, one that lives."""
    other = Claims(root)
    other._mine = f"{this_host()} {os.getppid()}\n".encode()
    yield other
    other.close()


def _write(root, text: str, *, key: bytes = KEY, age_s: float = 0.0):
    path = root / "claims" / key.hex()
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    os.utime(path, (time.time() - age_s,) * 2)
    return path


def _dead_pid() -> int:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def test_a_span_is_claimed_once_until_it_is_given_back(root, held):
    mine = Claims(root)
    assert held.take(KEY)
    assert mine.is_taken(KEY) and not mine.take(KEY)
    assert mine.take(OTHER) and not held.take(OTHER)
    held.release(KEY)
    assert not mine.is_taken(KEY) and mine.take(KEY) and not held.take(KEY)
    mine.close()
    assert held.take(KEY) and held.take(OTHER)


def test_two_threads_of_a_process_do_not_claim_the_same_span(root):
    mine = Claims(root)
    with ThreadPoolExecutor(8) as pool:
        taken = list(pool.map(lambda _: mine.take(KEY), range(64)))
    assert sum(taken) == 1


def test_closing_gives_everything_back_and_leaves_no_thread(root):
    before = threading.active_count()
    with ThreadPoolExecutor(1) as pool:
        mine = pool.submit(Claims, root).result()
    mine.take(KEY), mine.take(OTHER)
    mine.close()
    assert list((root / "claims").iterdir()) == []
    assert threading.active_count() == before


def test_the_claim_of_a_dead_process_is_taken_over(root):
    mine = Claims(root)
    path = _write(root, f"{this_host()} {_dead_pid()}\n")
    assert not mine.is_taken(KEY)
    assert mine.take(KEY)
    assert path.read_text() == f"{this_host()} {os.getpid()}\n"
    assert [p.name for p in path.parent.iterdir()] == [KEY.hex()], "nothing is left of the old one"


@pytest.mark.parametrize("writer", ["{here} {parent}", "elsewhere-1 7", "", "no claim at all", "{here} " + "9" * 30])
def test_a_claim_that_nobody_touches_for_a_minute_is_stale_whoever_wrote_it(root, writer):
    text = writer.format(here=this_host(), parent=os.getppid())
    mine = Claims(root)
    _write(root, text, age_s=STALE_S - 10)
    assert mine.is_taken(KEY) and not mine.take(KEY)
    _write(root, text, age_s=STALE_S + 1)
    assert not mine.is_taken(KEY) and mine.take(KEY)
    _write(root, text, key=OTHER, age_s=-STALE_S - 5)
    assert mine.take(OTHER), "touched in the future: that clock tells nothing"


def test_claims_in_use_are_touched(root, monkeypatch):
    monkeypatch.setattr(claims, "_TOUCH_S", 0.01)
    mine = Claims(root)
    mine.take(KEY)
    path = root / "claims" / KEY.hex()
    os.utime(path, (0, 0))
    end = time.monotonic() + 5
    while path.stat().st_mtime == 0:
        assert time.monotonic() < end, "nobody touched it"
        time.sleep(0.01)
    mine.close()


def test_what_killed_processes_left_is_cleared_when_a_cache_is_opened(root):
    dead, alive = _write(root, f"{this_host()} {_dead_pid()}\n"), _write(root, f"{this_host()} 1\n", key=OTHER)
    Claims(root)
    assert (dead.exists(), alive.exists()) == (False, True)


def test_of_many_who_find_a_stale_claim_one_takes_it(root):
    """Eight at once, a hundred times."""
    dead, others = _dead_pid(), [Claims(root) for _ in range(8)]
    for number, one in enumerate(others):
        one._mine = f"elsewhere-1 {number}\n".encode()
    with ThreadPoolExecutor(8) as pool:
        for _ in range(100):
            _write(root, f"{this_host()} {dead}\n")
            start = threading.Barrier(8)

            def take(one, start=start):
                start.wait()
                return one.take(KEY)

            assert sum(pool.map(take, others)) == 1
            for one in others:
                one.release(KEY)
            assert list((root / "claims").iterdir()) == []


def test_who_was_killed_while_taking_a_claim_over_holds_nobody_up(root):
    path = _write(root, f"{this_host()} {_dead_pid()}\n")
    beside = path.with_name(path.name + ".next")
    beside.write_text(f"{this_host()} {_dead_pid()}\n")
    mine = Claims(root)  # clears both
    assert list(path.parent.iterdir()) == []
    _write(root, f"{this_host()} {_dead_pid()}\n")
    beside.write_text(f"{this_host()} {_dead_pid()}\n")
    assert [mine.take(KEY), mine.take(KEY)] == [False, True]


def test_who_slept_while_its_claim_was_taken_over_does_not_give_back_the_new_one(root, held):
    mine = Claims(root)
    assert mine.take(KEY)
    os.utime(root / "claims" / KEY.hex(), (0, 0))
    assert held.take(KEY)
    mine.release(KEY)
    assert mine.is_taken(KEY)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS, errno.EACCES, errno.EIO, errno.EMFILE])
@pytest.mark.parametrize("where", ["open", "write"])
def test_where_no_claim_can_be_written_everybody_goes_ahead(root, monkeypatch, code, where):
    def fail(*_args):
        raise OSError(code, os.strerror(code))

    one, two = Claims(root), Claims(root)
    two.take(OTHER), two.release(OTHER)  # the folder is there
    with monkeypatch.context() as patch:
        patch.setattr(os, where, fail)
        assert one.take(KEY) and two.take(KEY)
        one.release(KEY), two.release(KEY)
    assert list((root / "claims").iterdir()) == []


def test_a_stale_claim_that_cannot_be_removed_holds_nobody_up(root, monkeypatch):
    def fail(*_args):
        raise PermissionError(errno.EACCES, "Permission denied")

    mine = Claims(root)
    _write(root, f"{this_host()} {_dead_pid()}\n")
    monkeypatch.setattr(os, "replace", fail)
    assert mine.take(KEY)


def test_a_root_that_was_taken_away_is_not_made_anew(root):
    mine = Claims(root)
    root.rmdir()
    assert mine.take(KEY)
    assert not root.exists()


def test_a_mount_point_without_its_drive_is_left_empty(root):
    """The drive goes away between two claims; what is below its mount point is another disk."""
    mine = Claims(root)
    assert mine.take(OTHER)
    os.rename(root, root.with_name("drive"))
    root.mkdir()
    assert mine.take(KEY)
    mine.close()
    assert list(root.iterdir()) == []


def test_a_file_or_a_link_in_place_of_claims_is_no_obstacle_and_is_not_followed(root, tmp_path):
    (root / "claims").write_text("something else")
    assert Claims(root).take(KEY)
    (root / "claims").unlink()
    outside = tmp_path / "outside"
    outside.write_text("precious")
    (root / "claims").mkdir()
    (root / "claims" / KEY.hex()).symlink_to(outside)
    mine = Claims(root)
    assert mine.take(KEY)
    assert outside.read_text() == "precious"


# ---- in a store -----------------------------------------------------------------------------------------


def _elsewhere(cache, store, item):
    """As if a process on another machine had begun to fetch a span."""
    return _write(cache, "elsewhere-1 7\n", key=store.key(item.span))


def test_a_fetch_takes_what_others_fetch_last(hub_store, tmp_path, ranges):
    """As many are claimed as could be on their way at once; they are given back when all else is here."""
    store, server = hub_store()
    items = expert_items(store.catalog, [1, 2], range(16))
    claimed = [_elsewhere(tmp_path / "cache", store, item) for item in items[:WORKERS]]

    def give_back() -> None:
        for path in claimed:
            path.unlink(missing_ok=True)

    order = []

    def landed(item) -> None:
        order.append(item)
        if len(order) == len(items) - WORKERS:
            give_back()

    in_the_end = threading.Timer(5, give_back)  # so that it fails, and does not wait for ever
    in_the_end.start()
    fetch(store, items, landed)
    in_the_end.cancel()
    assert set(order[-WORKERS:]) == set(items[:WORKERS]) and len(order) == len(items)
    assert sum(ranges(server).values()) == len(items)


def test_what_another_process_brings_meanwhile_is_not_fetched(hub_store, opened, tmp_path, tiny_truth, ranges):
    store, server = hub_store()
    (item,) = expert_items(store.catalog, [1], [3])
    path = _elsewhere(tmp_path / "cache", store, item)

    def bring() -> None:
        opened(cache_dir=tmp_path / "cache").roots[0].publish(store.key(item.span), memoryview(tiny_truth.expert(1, 3)))
        path.unlink()

    threading.Timer(0.3, bring).start()
    assert [bytes(content) for _, content in store.experts(1, [3])] == [tiny_truth.expert(1, 3)]
    assert not ranges(server)
    assert store.stats.snapshot()["object_spans"] == 1


def test_who_waits_for_another_process_says_so_once_and_can_be_interrupted(hub_store, tmp_path, caplog):
    caplog.set_level("INFO", "deltafin")
    store, _ = hub_store()
    items = expert_items(store.catalog, [1], range(4))
    for item in items:
        _elsewhere(tmp_path / "cache", store, item)
    threading.Timer(0.2, store.interrupt).start()
    began = time.monotonic()
    with pytest.raises(DeltafinError, match="another process"):
        fetch(store, items)
    assert time.monotonic() - began < 3
    assert [r.getMessage() for r in caplog.records if "waiting for it" in r.getMessage()] == [
        "another process is fetching what is needed here, too; waiting for it"
    ]


def test_two_fetches_at_once_fetch_everything_once(start, hub, tiny_dir, tmp_path, opened, ranges):
    server = hub(tiny_dir)
    opened().close()
    server.set_mode("slow_drip", bytes=4096, every=0.01)
    writers = [start("df-fetch", "all", "test/model") for _ in range(2)]
    outcomes = [writer.communicate(timeout=100) for writer in writers]
    assert [writer.returncode for writer in writers] == [0, 0], outcomes
    store = opened(offline=True)
    assert all(store.is_local(item.span) for item in all_items(store.catalog))
    assert sum(ranges(server).values()) <= len(all_items(store.catalog) + rest_items(store.catalog)) + 1
    assert list((tmp_path / "cache" / "claims").iterdir()) == []
