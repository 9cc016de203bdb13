"""Where fetched spans go: budgets, reserves, several roots, full ones, and eviction."""

from __future__ import annotations

import errno
import json
import os
import random
import shutil
from collections import namedtuple
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import numpy as np
import pytest

from deltafin.errors import BadRequest, DiskError, NoSpace
from deltafin.store import Limits, RootSpec, all_items, evict_objects, expert_items, fetch, plan_eviction, spine_items
from deltafin.store.eviction import candidates
from deltafin.store.heat import HALF_LIFE, Heat
from deltafin.store.pins import Pins
from deltafin.store.space import Space

LAYER = 3
ALL = range(16)


@pytest.fixture
def hub_roots(hub, opened, tiny_dir, full_cache, tmp_path):
    """`hub_roots(cache=Limits(..), a=Limits(..))`: a store with an empty cache and further writable roots."""

    def open_(cache: Limits | None = None, **limits: Limits):
        server = hub(tiny_dir)
        shutil.copytree(full_cache / "catalogs", tmp_path / "cache" / "catalogs", dirs_exist_ok=True)
        roots = []
        for name, limit in limits.items():
            (tmp_path / name).mkdir(exist_ok=True)
            roots.append(RootSpec(tmp_path / name, write=True, limits=limit))
        config = tmp_path / "config.toml"
        numbers = {} if cache is None else {"budget": cache.budget, "reserve": cache.reserve}
        config.write_text("[cache]\n" + "".join(f"{k} = {v}\n" for k, v in numbers.items() if v is not None))
        return opened(roots=roots, environ={**os.environ, "DELTAFIN_CONFIG": str(config)}), server

    return open_


def _used(root) -> int:
    return sum(nbytes for _, nbytes in root.object_files())


def _experts(store, layer=LAYER, numbers=ALL):
    return expert_items(store.catalog, [layer], numbers)


# ---- room -----------------------------------------------------------------------------------------------


def test_room_is_what_budget_and_reserve_leave(tmp_path, monkeypatch):
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(1000 * 10**9, 0, 50 * 10**9))
    (tmp_path / "objects" / "ab").mkdir(parents=True)
    (tmp_path / "objects" / "ab" / "x").write_bytes(bytes(300))
    (tmp_path / "packs").mkdir()
    (tmp_path / "packs" / "y").write_bytes(bytes(200))
    assert Space(tmp_path, Limits()).room() == 49 * 10**9  # 1 GB is the default reserve
    assert Space(tmp_path, Limits(reserve=20 * 10**9)).room() == 30 * 10**9
    assert Space(tmp_path, Limits(reserve=60 * 10**9)).room() == 0
    space = Space(tmp_path, Limits(budget=1000))
    assert (space.used_nbytes, space.room()) == (500, 500)
    assert space.take(400)
    assert space.room() == 100
    space.wrote(400)
    assert space.room() == 500  # after so much of the budget it is counted again, and nothing came
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(10**6, 0, 10**6))
    assert Space(tmp_path, Limits()).room() == 990_000  # a hundredth of a small disk


def test_a_budget_is_counted_again_before_a_root_is_called_full(tmp_path):
    space = Space(tmp_path, Limits(budget=1000, reserve=0))
    (tmp_path / "objects" / "ab").mkdir(parents=True)
    (tmp_path / "objects" / "ab" / "x").write_bytes(bytes(900))
    assert not space.take(200)
    (tmp_path / "objects" / "ab" / "x").unlink()  # another process evicted it
    assert space.take(200)


def test_a_budget_is_never_exceeded_and_the_next_root_takes_the_rest(hub_roots):
    store, _ = hub_roots(cache=Limits(budget=20_000, reserve=0), a=Limits(budget=30_000, reserve=0), b=Limits())
    fetch(store, _experts(store))
    cache, a, b = store.roots
    assert _used(cache) <= 20_000 and _used(a) <= 30_000
    assert _used(cache) + _used(a) + _used(b) == 16 * store.catalog.expert_nbytes
    assert all(store.is_local(item.span) for item in _experts(store))


def test_a_fetch_ends_cleanly_when_all_roots_are_full(hub_roots):
    store, _ = hub_roots(cache=Limits(budget=20_000, reserve=0), a=Limits(budget=9_000, reserve=0))
    with pytest.raises(NoSpace, match=r"full: .* bytes of its budget of .* are taken; free some space"):
        fetch(store, _experts(store))
    assert _used(store.roots[0]) <= 20_000 and _used(store.roots[1]) <= 9_000
    assert sum(store.is_local(item.span) for item in _experts(store)) == 6 + 2


def test_a_root_that_is_full_after_all_is_passed_over_with_one_line(hub_roots, monkeypatch, caplog):
    store, _ = hub_roots(a=Limits())
    cache = store.roots[0]
    monkeypatch.setattr(cache, "_write", lambda *_: (_ for _ in ()).throw(OSError(errno.ENOSPC, "No space left")))
    fetch(store, _experts(store))
    assert _used(store.roots[1]) == 16 * store.catalog.expert_nbytes
    lines = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
    assert len(lines) == 1 and str(cache.path) in lines[0] and lines[0].endswith("going on in the other roots")


def test_layers_are_spread_in_proportion_to_rates(hub_roots):
    store, _ = hub_roots(a=Limits(), b=Limits())
    for root, rate in zip(store.roots, (100e6, 100e6, 200e6), strict=True):
        root.drive.known_rate = rate
    for layer in (LAYER, LAYER + 1):
        fetch(store, _experts(store, layer))
    shares = [_used(root) / store.catalog.expert_nbytes for root in store.roots]
    assert shares == [8, 8, 16]


def test_what_is_asked_is_compared_with_the_room_of_all_roots(hub_roots):
    store, _ = hub_roots(cache=Limits(budget=20_000, reserve=0), a=Limits(budget=30_000, reserve=0))
    assert store.keeper.room() == 50_000


# ---- eviction -------------------------------------------------------------------------------------------


def _heat(store, hot, passes=1):
    store.heat.add({pair: 10 for pair in hot}, passes)


def _here(store, layer=LAYER):
    return {item.expert for item in _experts(store, layer) if store.is_local(item.span)}


def test_a_run_evicts_colder_experts_for_hotter_ones(hub_roots, tiny_truth):
    store, _ = hub_roots(cache=Limits(budget=16 * 3264 + 100, reserve=0))
    fetch(store, _experts(store, numbers=range(15)))
    fetch(store, _experts(store, numbers=[15]))  # now it is full
    _heat(store, [(LAYER, n) for n in range(14)])
    _heat(store, [(LAYER + 1, 7)])
    for expert, slot in store.experts(LAYER + 1, [7]):
        assert slot.tobytes() == tiny_truth.expert(LAYER + 1, expert)
    assert _here(store, LAYER + 1) == {7}
    assert _here(store) == set(ALL) - {14}  # of 14 and 15, equally cold, the older went
    assert _used(store.roots[0]) <= 16 * 3264 + 100
    assert store.stats.snapshot()["evicted_spans"] == 1


def test_a_newcomer_that_is_no_hotter_is_not_kept(hub_roots):
    store, _ = hub_roots(cache=Limits(budget=16 * 3264, reserve=0))
    fetch(store, _experts(store))
    _heat(store, [(LAYER, n) for n in ALL])
    list(store.experts(LAYER + 1, [7]))
    assert _here(store) == set(ALL) and _here(store, LAYER + 1) == set()
    assert store.stats.snapshot()["unkept_spans"] == 1


def test_pinned_experts_and_the_spine_stay(hub_roots):
    store, _ = hub_roots(cache=Limits(budget=3_000_000, reserve=0))
    fetch(store, spine_items(store.catalog) + _experts(store))
    store.roots[0].space.limits = Limits(budget=_used(store.roots[0]), reserve=0)
    store.pins.add([(LAYER, n) for n in ALL if n != 9])
    _heat(store, [(LAYER + 1, n) for n in ALL])
    list(store.experts(LAYER + 1, ALL))
    assert _here(store) == set(ALL) - {9} and len(_here(store, LAYER + 1)) == 1
    assert all(store.is_local(item.span) for item in spine_items(store.catalog))


def test_fetching_on_request_never_evicts(hub_roots):
    store, _ = hub_roots(cache=Limits(budget=16 * 3264, reserve=0))
    fetch(store, _experts(store))
    _heat(store, [(LAYER + 1, n) for n in ALL])
    with pytest.raises(NoSpace):
        fetch(store, _experts(store, LAYER + 1))
    assert _here(store) == set(ALL)


def test_an_evicted_expert_that_is_fetched_again_must_be_the_same(hub_roots, tiny_truth):
    store, _ = hub_roots(cache=Limits(budget=10**6))
    fetch(store, _experts(store))
    doomed, _ = plan_eviction(store, store.roots[0], 0)
    evict_objects(store.roots[0], doomed)
    assert _here(store) == set() and len(doomed) == 16
    assert store.known(_experts(store)[0].span) is not None
    assert dict((e, s.tobytes()) for e, s in store.experts(LAYER, ALL)) == {e: tiny_truth.expert(LAYER, e) for e in ALL}


def test_two_may_evict_the_same_at_once(hub_roots):
    store, _ = hub_roots()
    fetch(store, _experts(store))
    first, _ = plan_eviction(store, store.roots[0], 0)
    second, _ = plan_eviction(store, store.roots[0], 0)
    evict_objects(store.roots[0], first)
    evict_objects(store.roots[0], second)
    assert _here(store) == set()


def test_two_runs_stream_into_one_full_cache_and_only_right_bytes_come(hub_roots, tiny_truth):
    budget = 30 * 3264
    one, _ = hub_roots(cache=Limits(budget=budget, reserve=0))
    two, _ = hub_roots(cache=Limits(budget=budget, reserve=0))
    wrong: list[object] = []

    def run(store, seed: int) -> None:
        choose = random.Random(seed)
        for _ in range(40):
            layer = choose.randrange(1, 9)
            for expert, slot in store.experts(layer, choose.sample(ALL, 4)):
                if slot.tobytes() != tiny_truth.expert(layer, expert):
                    wrong.append((layer, expert))

    with ThreadPoolExecutor(2) as pool:
        for done in [pool.submit(run, store, seed) for seed, store in enumerate((one, two))]:
            done.result()
    assert wrong == []
    evicted = sum(store.stats.snapshot().get("evicted_spans", 0) for store in (one, two))
    assert evicted > 0
    assert _used(one.roots[0]) <= 1.05 * budget + 8 * 3264  # a twentieth and what was under way, for the second writer


def test_what_cannot_be_evicted_is_said_before_anything_goes(hub_roots):
    store, _ = hub_roots()
    fetch(store, _experts(store))
    store.pins.add([(LAYER, 2)])
    with pytest.raises(BadRequest, match="3264 bytes are the spine, pinned, or not of"):
        plan_eviction(store, store.roots[0], 100)
    assert _here(store) == set(ALL)


def test_objects_that_others_have_on_record_too_are_no_candidates(hub_roots):
    store, _ = hub_roots()
    fetch(store, _experts(store))
    root = store.roots[0]
    entry = root.log.entries[store.key(_experts(store)[4].span)]
    root.alias([bytes(48)], entry)
    found = {pair for c in candidates(root, store.key, store.catalog, set()) for pair in c.experts}
    assert found == {(LAYER, n) for n in ALL if n != 4}


# ---- pins -----------------------------------------------------------------------------------------------


def test_pins_are_added_removed_and_survive(hub_roots):
    store, _ = hub_roots()
    assert store.pins.add([(1, 2), (1, 3), (4, 0)]) == 3
    assert store.pins.add([(1, 2)]) == 0
    assert store.pins.remove([(1, 3), (5, 5)]) == 1
    assert Pins(store.roots[0].path, store.catalog).read() == {(1, 2), (4, 0)}


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", '{"version": 2}', '{"version": 1, "model": "other", "experts": {}}', "\xff", "[" * 100_000],
)
def test_damaged_pins_are_an_error_and_nothing_is_evicted(hub_roots, caplog, text):
    store, _ = hub_roots(cache=Limits(budget=16 * 3264, reserve=0))
    fetch(store, _experts(store))
    store.pins.path.parent.mkdir()
    store.pins.path.write_bytes(text.encode("latin-1"))
    with pytest.raises(DiskError, match=f"{store.pins.path}: damaged"):
        store.pins.read()
    _heat(store, [(LAYER + 1, 7)])
    list(store.experts(LAYER + 1, [7]))
    assert _here(store) == set(ALL)
    assert any("nothing is evicted" in r.getMessage() for r in caplog.records)


def test_pins_of_experts_that_the_model_does_not_have_are_damage(hub_roots):
    store, _ = hub_roots()
    store.pins.add([(1, 2)])
    known = json.loads(store.pins.path.read_text())
    known["experts"] = {"1": [99]}
    store.pins.path.write_text(json.dumps(known))
    with pytest.raises(DiskError, match="damaged"):
        store.pins.read()


# ---- heat -----------------------------------------------------------------------------------------------


def test_heat_adds_up_and_halves(hub_roots):
    store, _ = hub_roots()
    store.heat.add({(LAYER, 5): 100}, 10)
    store.heat.add({(LAYER, 6): 7}, HALF_LIFE)
    counts = Heat(store.roots[0].path, store.catalog).read()
    assert counts[LAYER, 5] == pytest.approx(50) and counts[LAYER, 6] == 7
    assert counts.sum() == pytest.approx(57)
    assert [p.name for p in store.heat.path.parent.iterdir()] == [store.heat.path.name]


def test_a_run_of_nothing_leaves_no_file(hub_roots):
    store, _ = hub_roots()
    store.heat.add({}, 0)
    assert not store.heat.path.exists()


@pytest.mark.parametrize("damage", ["empty", "short", "long", "flipped", "nan", "folder", "other"])
def test_damaged_heat_is_none_with_a_line_and_written_anew(hub_roots, caplog, damage):
    store, _ = hub_roots()
    store.heat.add({(LAYER, 5): 100}, 10)
    raw = bytearray(store.heat.path.read_bytes())
    if damage == "flipped":
        raw[len(raw) // 2] ^= 4
    if damage == "nan":
        import zlib

        raw[60:64] = np.float32("nan").tobytes()
        raw[-4:] = zlib.crc32(raw[:-4]).to_bytes(4, "little")
    content = {"empty": b"", "short": raw[:-1], "long": raw + b"x", "other": b"DfH2" + raw[4:]}.get(damage, raw)
    store.heat.path.unlink()
    if damage == "folder":
        store.heat.path.mkdir()
    else:
        store.heat.path.write_bytes(content)
    assert not store.heat.read().any()
    (line,) = (r.getMessage() for r in caplog.records)
    assert str(store.heat.path) in line and "cold" in line
    with suppress(DiskError):
        store.heat.add({(LAYER, 6): 1}, 1)
    assert store.heat.read()[LAYER, 6] == (0 if damage == "folder" else 1)


def test_every_item_of_a_model_fits_where_there_is_room(hub_roots):
    store, _ = hub_roots(cache=Limits(budget=10**6, reserve=0), a=Limits(budget=10**7, reserve=0))
    fetch(store, all_items(store.catalog))
    assert all(store.is_local(item.span) for item in all_items(store.catalog))
    assert _used(store.roots[0]) <= 10**6
