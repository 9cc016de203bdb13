"""How many experts are not here: right at once, and soon right again after some have come or gone."""

from __future__ import annotations

import threading
import time

import pytest

from deltafin.runtime.server import missing as missing_module
from deltafin.runtime.server.missing import MissingExperts
from deltafin.store import expert_items, fetch, open_store, remove


@pytest.fixture
def store(hub, tiny_dir, tmp_path):
    hub(tiny_dir)
    with open_store("org/tiny", cache_dir=tmp_path / "cache") as store:
        yield store


def _experts(store, layers=None):
    config = store.catalog.config
    return expert_items(store.catalog, layers or config.moe_layers, range(config.num_experts))


def _until(condition):
    end = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_a_local_model_lacks_nothing(demo_store):
    missing = MissingExperts(demo_store)
    assert (missing.count, missing.nbytes, missing.describe()) == (0, 0, "")


def test_of_an_empty_cache_every_expert_is_missing_and_may_be_fetched(store):
    missing = MissingExperts(store)
    experts = _experts(store)
    assert missing.count == missing.total == len(experts)
    assert missing.nbytes == sum(item.span.nbytes for item in experts)
    assert missing.may_fetch
    assert missing.describe().endswith("are not on this machine; each is fetched when it is first needed")


def test_what_is_fetched_is_seen_without_anybody_waiting_for_the_look(store, monkeypatch):
    monkeypatch.setattr(missing_module, "_LEAST_S", 0.0)
    missing = MissingExperts(store)
    first = _experts(store)[:5]
    fetch(store, first)
    _until(lambda: missing.count == missing.total - 5)


def test_nothing_is_looked_at_while_nothing_is_fetched(store, monkeypatch):
    monkeypatch.setattr(missing_module, "_LEAST_S", 0.0)
    missing = MissingExperts(store)
    asked = []
    monkeypatch.setattr(store, "is_local", asked.append)
    for _ in range(50):
        assert missing.count == missing.total
    assert asked == []


def test_a_second_look_asks_only_for_what_was_missing(store, monkeypatch):
    missing = MissingExperts(store)
    fetch(store, _experts(store)[:7])
    missing.look()
    asked = []
    is_local = store.is_local
    monkeypatch.setattr(store, "is_local", lambda span: asked.append(span) or is_local(span))
    missing.look()
    assert len(asked) == missing.total - 7 == missing.count


def test_looks_are_rare_however_much_is_fetched(store, monkeypatch):
    missing = MissingExperts(store)
    looks = []
    monkeypatch.setattr(missing, "look", lambda: looks.append(threading.current_thread()))
    for number in range(20):
        store.stats.add(http_spans=1)
        assert missing.count == missing.total, number
    assert looks == [], "the first look was less than a second ago"


def test_what_is_evicted_is_missing_again(store):
    missing = MissingExperts(store)
    items = _experts(store)[:9]
    fetch(store, items)
    missing.look()
    assert missing.count == missing.total - 9
    remove(store, items[:3])
    store.stats.add(evicted_spans=3)
    missing.look()
    assert missing.count == missing.total - 6


def test_after_its_end_it_asks_the_store_for_nothing(store, monkeypatch):
    monkeypatch.setattr(missing_module, "_LEAST_S", 0.0)
    missing = MissingExperts(store)
    missing.close()
    monkeypatch.setattr(store, "is_local", lambda span: pytest.fail("asked"))
    store.stats.add(http_spans=1)
    missing.look()
    assert missing.count == missing.total
