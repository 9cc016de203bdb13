"""Spans that lie in several roots: read in parts, from copies that may be damaged, vanish or appear meanwhile."""

from __future__ import annotations

import errno
import os
import shutil
import threading
import time
from collections import Counter
from concurrent.futures import Future
from contextlib import closing
from itertools import islice
from pathlib import Path

import pytest

from deltafin.cext import _io
from deltafin.errors import DeltafinError, DiskError, Missing
from deltafin.store import fetch, local, open_store
from deltafin.store.arena import own_slot
from deltafin.store.balance import Part, ReadPlan
from deltafin.store.drive import Drive
from deltafin.store.parts import PartedRead, PartRead
from deltafin.store.selection import expert_items

REPO = "test/model"
LAYER = 3
ALL = range(16)


def split_everything(wants, queued_s, rates) -> ReadPlan:
    """Every span in as many parts as it has copies of one phase, cut on pages."""
    parts = []
    for want in wants:
        places = [place for place in want.places if place.phase == want.places[0].phase]
        cuts = [0]
        for number in range(1, len(places)):
            cuts.append(number * want.nbytes // len(places) // _io.PAGE * _io.PAGE - places[0].phase)
        ends = [*cuts[1:], want.nbytes]
        assert all(begin < end for begin, end in zip(cuts, ends, strict=True))
        parts.append(tuple(Part(p.drive, b, e) for p, b, e in zip(places, cuts, ends, strict=True)))
    return ReadPlan(tuple(parts), tuple(range(len(wants))), 0.0)


@pytest.fixture
def split(monkeypatch) -> None:
    monkeypatch.setattr(local, "plan_reads", split_everything)


@pytest.fixture(scope="module")
def wide_dir(tmp_path_factory, make_checkpoint) -> Path:
    """Like tiny, with experts of several pages."""
    out = tmp_path_factory.mktemp("wide") / "ckpt"
    make_checkpoint.generate(out, "tiny", overrides={"latent": 128, "inter": 96})
    return out


@pytest.fixture(scope="module")
def wide_cache(tmp_path_factory, range_server, wide_dir, policy) -> Path:
    cache = tmp_path_factory.mktemp("wide") / "cache"
    with range_server.FaultServer(root=str(wide_dir)) as server, pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_ENDPOINT", server.url)
        with open_store(REPO, cache_dir=cache, policy=policy) as store:
            fetch(store, expert_items(store.catalog, store.catalog.config.moe_layers, ALL))
    return cache


@pytest.fixture(scope="module")
def wide_truth(truth, wide_dir):
    return truth(wide_dir)


@pytest.fixture
def two_roots(wide_cache, opened, tmp_path):
    """An offline store whose cache is empty but for the catalog, and two roots with copies of all experts."""
    shutil.copytree(wide_cache / "catalogs", tmp_path / "cache" / "catalogs")
    for name in ("a", "b"):
        shutil.copytree(wide_cache, tmp_path / name)
        shutil.rmtree(tmp_path / name / "catalogs")
    return opened(roots=[tmp_path / "a", tmp_path / "b"], offline=True)


def _layer(store, experts=ALL, layer: int = LAYER) -> dict[int, bytes]:
    return {expert: slot.tobytes() for expert, slot in store.experts(layer, list(experts))}


def _right(truth, experts=ALL, layer: int = LAYER) -> dict[int, bytes]:
    return {expert: truth.expert(layer, expert) for expert in experts}


def _warnings(caplog) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]


# ---- in parts -----------------------------------------------------------------------------------------


def test_spans_read_in_parts_are_the_same_bytes(two_roots, split, wide_truth):
    assert _layer(two_roots) == _right(wide_truth)
    counts = two_roots.stats.snapshot()
    assert counts["split_spans"] == counts["object_spans"] == 16
    assert counts["object_nbytes"] == 16 * two_roots.catalog.expert_nbytes
    read = [root.drive.stats.nbytes for root in two_roots.roots]
    assert read[0] == 0 < read[1] and read[1] + read[2] == counts["object_nbytes"]


def test_shards_are_read_in_parts_where_they_begin_within_a_page(
    wide_cache, opened, tmp_path, wide_dir, wide_truth, split
):
    shutil.copytree(wide_cache / "catalogs", tmp_path / "cache" / "catalogs")
    for name in ("a", "b"):
        shutil.copytree(wide_dir, tmp_path / name)
    store = opened(roots=[tmp_path / "a", tmp_path / "b"], offline=True)
    assert any(span.offset % _io.PAGE for span in store.catalog.expert_spans(LAYER, ALL))
    assert _layer(store) == _right(wide_truth)
    assert store.stats.snapshot()["split_spans"] == store.stats.snapshot()["shard_spans"] == 16


@pytest.mark.parametrize("which", ["a", "b"])
def test_a_damaged_copy_is_found_although_only_a_part_of_it_was_read(two_roots, split, wide_truth, caplog, which):
    root = two_roots.roots[1 if which == "a" else 2]
    path = root.object_path(root.log.entries[two_roots.key(two_roots.catalog.expert_spans(LAYER, [5])[0])])
    content = bytearray(path.read_bytes())
    content[10 if which == "a" else -10] ^= 1
    path.write_bytes(content)
    for _ in range(3):
        assert _layer(two_roots) == _right(wide_truth)
    (line,) = _warnings(caplog)
    assert str(path) in line and "passed over" in line
    assert two_roots.stats.snapshot()["corrupt_objects"] == 1


def test_a_part_is_no_first_use_of_the_whole_object(two_roots, split, wide_truth):
    """Damage in the part that was not read is found when the object is read whole, though parts were read before."""
    root = two_roots.roots[1]
    path = root.object_path(root.log.entries[two_roots.key(two_roots.catalog.expert_spans(LAYER, [5])[0])])
    content = bytearray(path.read_bytes())
    content[-10] ^= 1  # the second half comes from the other root
    path.write_bytes(content)
    assert _layer(two_roots, [5]) == _right(wide_truth, [5])
    shutil.rmtree(two_roots.roots[2].path)
    with pytest.raises(DeltafinError):
        _layer(two_roots, [5])


def test_a_part_that_fails_has_the_span_read_whole_from_elsewhere(two_roots, split, wide_truth, read_errors, caplog):
    read_errors.where, read_errors.times = str(two_roots.roots[2].path), 2
    assert _layer(two_roots, [5]) == _right(wide_truth, [5])
    (line,) = _warnings(caplog)
    assert "errno 5" in line
    assert two_roots.stats.snapshot()["disk_errors"] == 1


def test_leaving_early_waits_for_all_parts_and_gives_every_slot_back(two_roots, split, wide_truth, monkeypatch):
    read, under_way = Drive.read, Counter()

    def slow(self, *args):
        under_way["now"] += 1
        time.sleep(0.02)
        try:
            return read(self, *args)
        finally:
            under_way["now"] -= 1

    monkeypatch.setattr(Drive, "read", slow)
    for _ in range(3):
        with closing(two_roots.experts(LAYER, ALL)) as landing:
            next(landing)
        assert under_way["now"] == 0
        slots = [slot.ctypes.data for slot in two_roots._slots]
        assert len(slots) == len(set(slots)) == 8
    assert _layer(two_roots) == _right(wide_truth)


def test_closing_the_store_ends_a_landing_that_others_wait_for(two_roots, split, monkeypatch):
    read = Drive.read
    monkeypatch.setattr(Drive, "read", lambda self, *args: time.sleep(0.05) or read(self, *args))
    for drive in two_roots.drives:
        drive.set_depth(1)
    landing = two_roots.experts(LAYER, ALL)
    closer = threading.Timer(0.08, two_roots.close)
    closer.start()
    with pytest.raises(DeltafinError, match="closed"), closing(landing):
        for _ in islice(landing, 16):
            pass
    closer.join()


# ---- one future for several parts -----------------------------------------------------------------------


@pytest.fixture
def drives(tmp_path):
    with Drive(tmp_path, depth=1) as one, Drive(tmp_path, depth=1) as two:
        yield one, two


def _parted(drives, works, future=None):
    future = future or Future()
    failures = []

    def finish(failure):
        failures.append(failure)
        return "whole" if failure is None else "read anew"

    parts = [PartRead(drive, 1, work) for drive, work in zip(drives, works, strict=True)]
    return PartedRead(future, parts, finish), future, failures


def test_the_last_part_ends_it_whichever_it_is(drives):
    gate = threading.Event()
    parted, future, failures = _parted(drives, [gate.wait, lambda: None])
    parted.submit()
    time.sleep(0.02)
    assert future.running() and not failures and not future.cancel()
    gate.set()
    assert future.result(5) == "whole"
    assert failures == [None]


def test_a_failure_is_told_after_all_parts_have_ended(drives):
    gate, ended = threading.Event(), []

    def fail() -> None:
        raise DiskError("this one fails")

    parted, future, failures = _parted(drives, [fail, lambda: gate.wait() and ended.append(1)])
    parted.submit()
    time.sleep(0.02)
    assert not future.done()
    gate.set()
    assert future.result(5) == "read anew"
    assert ended == [1] and isinstance(failures[0], DiskError)


def test_cancelled_before_it_began_no_part_is_read(drives):
    gate, read = threading.Event(), []
    for drive in drives:
        drive.submit(gate.wait, urgent=True)
    parted, future, failures = _parted(drives, [lambda: read.append(1), lambda: read.append(2)])
    parted.submit()
    assert future.cancel()
    gate.set()
    for drive in drives:
        drive.submit(lambda: None, urgent=True).result(5)
    assert read == failures == [] and future.cancelled()


def test_an_interrupt_between_two_parts_drops_the_second_and_the_future_still_ends(drives, monkeypatch):
    gate = threading.Event()
    parted, future, failures = _parted(drives, [gate.wait, lambda: None])

    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(drives[1], "submit", interrupted)
    with pytest.raises(KeyboardInterrupt):
        parted.submit()
    gate.set()
    with pytest.raises(BaseException):  # noqa: B017 - CancelledError is no Exception in some versions
        future.result(5)
    assert future.done() and failures == []


def test_a_drive_that_closes_drops_its_part(drives):
    gate = threading.Event()
    drives[1].submit(gate.wait, urgent=True)
    parted, future, failures = _parted(drives, [lambda: None, lambda: None])
    parted.submit()
    threading.Timer(0.05, gate.set).start()
    drives[1].close()
    with pytest.raises(BaseException):  # noqa: B017
        future.result(5)
    assert failures == []


# ---- roots that go --------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["whole", "parts"])
def test_a_root_that_is_renamed_away_is_dropped_with_one_line(two_roots, wide_truth, caplog, monkeypatch, mode):
    if mode == "parts":
        monkeypatch.setattr(local, "plan_reads", split_everything)
    gone = two_roots.roots[1].path
    assert _layer(two_roots) == _right(wide_truth)
    gone.rename(gone.with_name("elsewhere"))
    for layer in range(1, 9):
        assert _layer(two_roots, layer=layer) == _right(wide_truth, layer=layer)
    assert _warnings(caplog) == [f"{gone} is gone (No such file or directory); going on without it"]
    before = two_roots.roots[1].drive.stats.reads
    assert _layer(two_roots) == _right(wide_truth)
    assert two_roots.roots[1].drive.stats.reads == before


def test_an_unmounted_root_is_dropped_though_its_directory_is_there(
    full_cache, opened, tmp_path, small_disk, tiny_truth, caplog
):
    mount = small_disk(16_000_000, "mounted")
    shutil.copytree(full_cache / "catalogs", tmp_path / "cache" / "catalogs")
    shutil.copytree(full_cache, tmp_path / "b")
    for name in ("objects", "objects.log"):
        source = full_cache / name
        (shutil.copytree if source.is_dir() else shutil.copy)(source, mount / name)
    store = opened(roots=[mount, tmp_path / "b"], offline=True)
    assert _layer(store) == _right(tiny_truth)
    os.system(f"umount -l '{mount}'")
    try:
        for layer in range(1, 9):
            assert _layer(store, layer=layer) == _right(tiny_truth, layer=layer)
    finally:
        os.system(f"mount -t tmpfs tmpfs '{mount}'")  # small_disk ends it
    (line,) = _warnings(caplog)
    assert line.startswith(f"{mount} is gone (another directory is there now")


@pytest.mark.parametrize("number", [errno.ENODEV, errno.ESTALE, errno.ENOTCONN, errno.EIO])
def test_a_drive_that_fails_is_dropped_with_one_line(two_roots, wide_truth, monkeypatch, caplog, number):
    bad, real = str(two_roots.roots[1].path), local._io.read

    def failing(fd, *args):
        if bad in os.readlink(f"/proc/self/fd/{fd}"):
            raise OSError(number, os.strerror(number))
        return real(fd, *args)

    monkeypatch.setattr(local._io, "read", failing)
    for layer in range(1, 9):
        assert _layer(two_roots, layer=layer) == _right(wide_truth, layer=layer)
    lines = _warnings(caplog)
    assert lines[-1].startswith(f"{bad} is gone (") and lines[-1].endswith("; going on without it")
    # EIO may be one bad sector: the first failure is said as such, before it is clear that the drive is gone.
    assert len(lines) == (2 if number == errno.EIO else 1)


def test_what_was_only_in_a_root_that_is_gone_is_named_with_its_place(opened, full_cache, tmp_path):
    shutil.copytree(full_cache / "catalogs", tmp_path / "cache" / "catalogs")
    shutil.copytree(full_cache, tmp_path / "only")
    store = opened(roots=[tmp_path / "only"], offline=True)
    (tmp_path / "only").rename(tmp_path / "elsewhere")
    with pytest.raises(Missing, match=f"expert 5 of layer 3: was in {tmp_path / 'only'}, which is gone; bring it back"):
        _layer(store, [5])


def test_a_root_that_was_unplugged_is_not_made_anew_on_the_disk_below(hub_store, tmp_path, tiny_truth, caplog):
    store, _ = hub_store()
    cache = store.roots[0].path
    cache.rename(tmp_path / "elsewhere")
    assert _layer(store) == _right(tiny_truth)
    assert not cache.exists()
    lines = _warnings(caplog)
    assert len(lines) == 2 and "is gone" in lines[0] and "going on without keeping what is fetched" in lines[1]


# ---- objects that come ----------------------------------------------------------------------------------


def test_a_running_store_sees_what_another_process_fetched(hub_store, opened, tiny_dir, tiny_truth):
    """It asks the server for nothing that came after it was opened."""
    reader, server = hub_store()
    assert _layer(reader, [0]) == _right(tiny_truth, [0])
    fetcher = opened()
    fetch(fetcher, expert_items(fetcher.catalog, [LAYER], ALL[1:]))
    before = server.stats()["requests"]
    assert _layer(reader) == _right(tiny_truth)
    assert server.stats()["requests"] == before
    assert reader.stats.snapshot()["http_spans"] == 1


def test_an_offline_store_sees_objects_that_come_to_a_root_that_was_empty(opened, full_cache, tmp_path, tiny_truth):
    shutil.copytree(full_cache / "catalogs", tmp_path / "cache" / "catalogs")
    (tmp_path / "root").mkdir()
    store = opened(roots=[tmp_path / "root"], offline=True)
    with pytest.raises(Missing):
        _layer(store, [5])
    for name in ("objects", "objects.log"):
        source = full_cache / name
        (shutil.copytree if source.is_dir() else shutil.copy)(source, tmp_path / "root" / name)
    assert _layer(store) == _right(tiny_truth)


def test_a_full_speed_read_looks_at_no_log(two_roots, monkeypatch, wide_truth):
    looked: list[Path] = []
    log = type(two_roots.roots[0].log)
    monkeypatch.setattr(log, "refresh_if_grown", lambda self: looked.append(self.path))
    assert _layer(two_roots) == _right(wide_truth)
    assert looked == []


def test_no_parts_are_mixed_where_roots_contradict_each_other(two_roots, split, wide_truth):
    """The second root has other bytes on record, and has them: the first counts, whole."""
    second = two_roots.roots[2]
    (span,) = two_roots.catalog.expert_spans(LAYER, [5])
    second.publish(two_roots.key(span), memoryview(bytes(span.nbytes)))
    two_roots.roots[1].read(two_roots.known(span), own_slot(span.nbytes))  # both are compared with their own digests
    for _ in range(2):
        assert _layer(two_roots, [5]) == _right(wide_truth, [5])
    assert second.drive.stats.reads == 0
