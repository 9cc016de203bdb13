"""Promise 1 with several roots: no bit depends on which drive brought what part, or on what is lost meanwhile."""

from __future__ import annotations

import heapq
import shutil
import threading
from types import SimpleNamespace

import pytest

from deltafin.cext import _io
from deltafin.runtime import Observer, Segment
from deltafin.store import drive, expert_items, local, open_store
from deltafin.store.balance import Part, ReadPlan
from deltafin.store.roots import Root

IDS = [3, 141, 59, 26, 5]
CUT = 2 * _io.PAGE


@pytest.fixture(scope="module")
def copies(tmp_path_factory):
    """A cache with the demo's catalog, and two roots with all experts as objects."""
    folder = tmp_path_factory.mktemp("roots")
    with open_store("demo", cache_dir=folder / "cache", offline=True) as store:
        config, root = store.catalog.config, Root(folder / "a", writable=True)
        for item in expert_items(store.catalog, config.moe_layers, range(config.num_experts)):
            with open(store.shard_directories[0].shard_path(item.span.shard), "rb") as file:
                file.seek(item.span.offset)
                root.publish(store.key(item.span), memoryview(file.read(item.span.nbytes)))
        root.drive.close()
    shutil.copytree(folder / "a", folder / "b")
    return folder


@pytest.fixture
def model(copies, open_model, nothing_stays, monkeypatch):
    """The demo, which keeps nothing in memory and reads every expert in two parts."""

    def plan(wants, queued_s, rates) -> ReadPlan:
        parts = []
        for want in wants:
            one, two = want.places[:2]  # the roots, which come before the shards, while both are there
            whole = (Part(one.drive, 0, want.nbytes),)
            halves = Part(one.drive, 0, CUT), Part(two.drive, CUT, want.nbytes)
            parts.append(halves if one.phase == two.phase else whole)
        return ReadPlan(tuple(parts), tuple(range(len(wants))), 0.0)

    monkeypatch.setattr(local, "plan_reads", plan)
    with open_model("demo", cache_dir=copies / "cache", roots=[copies / "a", copies / "b"]) as model:
        yield model


def forward(model, observer=None) -> bytes:
    return model.forward([Segment(model.sequence(), IDS)], logits="all", observer=observer).tobytes()


@pytest.fixture(scope="module")
def wanted(open_model) -> bytes:
    with open_model("demo") as model:
        return forward(model)


def test_logits_do_not_depend_on_parts(model, wanted):
    assert forward(model) == wanted
    counts = model.store.stats.snapshot()
    assert counts["split_spans"] > 50 and counts["split_spans"] == counts["expert_visits"] - counts["ram_spans"]


def test_a_root_that_goes_in_the_middle_of_a_pass_changes_no_bit_and_is_one_line(model, wanted, copies, caplog):
    away = copies / "elsewhere"

    class Unplug(Observer):
        def layer(self, layer: int, num_layers: int) -> None:
            if layer == num_layers // 2:
                (copies / "a").rename(away)

    try:
        assert forward(model, Unplug()) == wanted
        assert forward(model) == wanted
    finally:
        away.rename(copies / "a")
    lines = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
    assert lines == [f"{copies / 'a'} is gone (No such file or directory); going on without it"]


@pytest.mark.parametrize("at", [0, 1, 2, 3, 8, 21, 40, 90])
def test_after_an_interrupt_when_a_part_was_just_queued_all_is_right(model, wanted, monkeypatch, at):
    """No read outlives the pass, no slot has two owners, and what is lent is given back."""
    left = at

    def heappush(heap, item):
        nonlocal left
        heapq.heappush(heap, item)
        left -= 1
        if left == -1 and threading.current_thread() is threading.main_thread():
            raise KeyboardInterrupt

    slots = len(model.store._slots)
    with monkeypatch.context() as patch:
        patch.setattr(drive, "heapq", SimpleNamespace(heappush=heappush, heappop=heapq.heappop))
        with pytest.raises(KeyboardInterrupt):
            forward(model)
    assert forward(model) == wanted
    assert len({slot.ctypes.data for slot in model.store._slots}) == len(model.store._slots) >= slots - 1
