"""Mirrors and idle fetches with a real store: wrong bytes are asked of the next source, and a run marks the line."""

from __future__ import annotations

import shutil
import threading
import time

import pytest

from deltafin.errors import Corrupt
from deltafin.store import Idle, expert_items, fetch

LAYER = 3


@pytest.fixture
def mirrored(hub_store, opened, range_server, tiny_dir):
    """`mirrored(mode, ..)` is a store with a mirror for each mode, and the servers: the hub's is the last."""
    running = []

    def start(*modes: str):
        first, hub = hub_store()
        first.close()
        for mode in modes:
            running.append(range_server.FaultServer(root=str(tiny_dir)))
            running[-1].__enter__()
            running[-1].set_mode(mode)
        return opened(mirrors=[s.url for s in running]), [*running, hub]

    yield start
    for server in running:
        server.__exit__(None, None, None)


def test_an_expert_that_a_mirror_spoils_comes_from_the_next_and_costs_no_attempt(mirrored, tiny_truth, caplog):
    """More bad mirrors than a span has attempts."""
    store, servers = mirrored(*["zero_tail"] * 4)
    assert [s.tobytes() for _, s in store.experts(LAYER, [5])] == [tiny_truth.expert(LAYER, 5)]
    assert [len(s.state.log) for s in servers] == [1, 1, 1, 1, 1]
    assert store.stats.snapshot()["refused_spans"] == 4
    said = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
    assert len(said) == 4 and all("all zeros" in line for line in said)


def test_bytes_that_contradict_the_record_are_asked_of_the_next(mirrored, full_cache, tmp_path):
    """One flipped bit, which only the digest on record can tell."""
    (tmp_path / "cache").mkdir()
    shutil.copy(full_cache / "objects.log", tmp_path / "cache" / "objects.log")
    store, servers = mirrored("corrupt_byte", "ok")
    (item,) = expert_items(store.catalog, [LAYER], [5])
    fetch(store, [item])
    assert store.is_local(item.span)
    assert [len(s.state.log) for s in servers] == [1, 1, 0]


def test_when_the_hub_is_wrong_too_it_is_an_error_after_three_of_its_own(mirrored):
    store, servers = mirrored("zero_tail")
    servers[-1].set_mode("zero_tail")
    with pytest.raises(Corrupt, match="in 3 transfers"):
        list(store.experts(LAYER, [5]))
    assert [len(s.state.log) for s in servers] == [1, 3]


def test_a_run_marks_the_line_while_bytes_arrive_and_not_before(hub_store, monkeypatch):
    store, _ = hub_store("slow_drip", bytes=512, every=0.02)
    cache = store.roots[0].path
    store.claim_line()
    assert Idle(cache).free
    list(store.experts(LAYER, range(4)))
    with monkeypatch.context() as patch:
        patch.setattr("deltafin.store.idle._FRESH_S", 60.0)  # on a busy machine it may be a second ago
        assert not Idle(cache).free
    time.sleep(1.1)
    assert Idle(cache).free


def test_an_ordinary_fetch_does_not_mark_it(hub_store):
    store, _ = hub_store()
    fetch(store, expert_items(store.catalog, [LAYER], range(4)))
    assert Idle(store.roots[0].path).free


def test_a_run_and_an_idle_fetch_on_one_cache(hub_store, opened, tiny_truth, monkeypatch):
    """The run gets its experts while the idle fetch, in a store of its own, asks for nothing."""
    run, server = hub_store("slow_drip", bytes=2048, every=0.01)
    run.claim_line()
    other = opened()
    items = expert_items(other.catalog, [1, 2], range(16))
    with monkeypatch.context() as patch:
        patch.setattr("deltafin.store.idle._FRESH_S", 60.0)  # a busy machine stops a run for longer than a second
        list(run.experts(LAYER, [0]))
        fetcher = threading.Thread(target=lambda: fetch(other, items, idle=Idle(other.roots[0].path)))
        fetcher.start()
        for expert in range(1, 16):
            assert [s.tobytes() for _, s in run.experts(LAYER, [expert])] == [tiny_truth.expert(LAYER, expert)]
        shards = {row["path"].rpartition("/")[2] for row in list(server.state.log)}
        assert shards == {"model-00004-of-000012.safetensors"}
    fetcher.join(120)
    assert all(other.is_local(item.span) for item in items)
