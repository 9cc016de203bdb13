"""Copies of hot experts: which ones, where to, and made without harm."""

from __future__ import annotations

import hashlib
import shutil

import numpy as np
import pytest

from deltafin.errors import Corrupt, NoSpace
from deltafin.store import Limits, RootSpec, apply_placement, plan_placement
from deltafin.store.placement import Disk, expected_s, plan_copies, use_weights

MB = 1e6
NBYTES = 17_547_264
PLENTY = 10**15


def _case(rates, rooms, held_by, layers=2, experts=64, skew=1.5, seed=3):
    """Zipf-like heat, and every expert on one disk."""
    choose = np.random.default_rng(seed)
    heat = np.stack([choose.permutation(1000.0 / np.arange(1, experts + 1) ** skew) for _ in range(layers)])
    weights = use_weights(heat.astype(np.float32), range(layers), 8)
    holders = {(la, e): frozenset({held_by(la, e)}) for la in range(layers) for e in range(experts)}
    return weights, holders, [Disk(rate, room) for rate, room in zip(rates, rooms, strict=True)]


def _after(holders, copies):
    after = dict(holders)
    for copy in copies:
        assert copy.disk not in after[copy.layer, copy.expert]
        after[copy.layer, copy.expert] |= {copy.disk}
    return after


def _gain(weights, holders, disks, copies, top_k=8):
    before = expected_s(weights, holders, disks, NBYTES, top_k, samples=40)
    return before / expected_s(weights, _after(holders, copies), disks, NBYTES, top_k, samples=40)


def test_copies_on_an_empty_second_disk_nearly_double_the_rate():
    weights, holders, disks = _case([100 * MB, 100 * MB], [0, PLENTY], lambda la, e: 0)
    copies = plan_copies(weights, holders, disks, NBYTES)
    assert _gain(weights, holders, disks, copies) > 1.7


def test_few_copies_of_the_hottest_gain_much_of_it():
    weights, holders, disks = _case([100 * MB, 100 * MB], [0, PLENTY], lambda la, e: 0)
    copies = plan_copies(weights, holders, disks, NBYTES, limit_nbytes=16 * NBYTES)
    assert len(copies) == 16
    hottest = {(la, int(e)) for la in weights for e in np.argsort(-weights[la])[:16]}
    assert {(c.layer, c.expert) for c in copies} <= hottest
    assert _gain(weights, holders, disks, copies) > 1.3


def test_room_and_limit_are_respected_and_read_only_disks_are_left_alone():
    weights, holders, disks = _case([100 * MB, 50 * MB, 200 * MB], [0, 3 * NBYTES + 5, 0], lambda la, e: 0)
    copies = plan_copies(weights, holders, disks, NBYTES)
    assert [c.disk for c in copies] == [1, 1, 1]
    assert plan_copies(weights, holders, disks, NBYTES, limit_nbytes=NBYTES - 1) == []
    assert len(plan_copies(weights, holders, disks, NBYTES, limit_nbytes=2 * NBYTES)) == 2


def test_what_lies_everywhere_already_is_left_as_it_is():
    weights = use_weights(np.ones((1, 64), np.float32), [0], 8)
    holders = {(0, e): frozenset({0, 1}) for e in range(64)}
    assert plan_copies(weights, holders, [Disk(100 * MB, PLENTY)] * 2, NBYTES) == []


def test_a_slow_disk_gets_few():
    weights, holders, disks = _case([1000 * MB, 50 * MB], [0, PLENTY], lambda la, e: 0, skew=0.3)
    copies = plan_copies(weights, holders, disks, NBYTES)
    moved = sum(weights[c.layer][c.expert] for c in copies) / sum(w.sum() for w in weights.values())
    assert 0 < moved < 0.12  # it can take a twentieth


def test_experts_that_are_nowhere_are_left_out():
    weights, holders, disks = _case([100 * MB, 100 * MB], [0, PLENTY], lambda la, e: 0)
    for expert in range(0, 64, 2):
        del holders[0, expert]
    copies = plan_copies(weights, holders, disks, NBYTES)
    assert copies and all((c.layer, c.expert) in holders for c in copies)


def test_without_heat_all_experts_count_alike():
    assert use_weights(np.zeros((1, 8), np.float32), [0], 2)[0] == pytest.approx(0.25)


def test_nothing_is_asked_for_more_than_once_a_token():
    weights = use_weights(np.array([[1000, 10, 10, 0]], np.float32), [0], 2)[0]
    assert weights.max() == 1 and weights.sum() == pytest.approx(2)


# ---- on real roots --------------------------------------------------------------------------------------


@pytest.fixture
def placed(full_cache, opened, tmp_path):
    """`placed(limits)`: an offline store with everything in its cache, and a second root that may be written."""

    def open_(limits: Limits = Limits()):  # noqa: B008 - frozen
        if not (tmp_path / "cache").exists():
            shutil.copytree(full_cache, tmp_path / "cache")
        (tmp_path / "second").mkdir(exist_ok=True)
        store = opened(roots=[RootSpec(tmp_path / "second", write=True, limits=limits)], offline=True)
        store.heat.add({(la, e): 100 // (1 + e) for la in range(1, 9) for e in range(16)}, 10)
        return store

    return open_


def test_copies_are_whole_named_by_their_content_and_read_from_there(placed, tiny_truth, tmp_path):
    store = placed()
    plan = plan_placement(store, 20 * store.catalog.expert_nbytes)
    assert len(plan.copies) == 20 and plan.after_s < plan.before_s
    assert apply_placement(store, plan) == 20
    files = [p for p in (tmp_path / "second" / "objects").rglob("*") if p.is_file()]
    assert len(files) == 20
    assert all(hashlib.sha256(p.read_bytes()).hexdigest() == p.name for p in files)
    shutil.rmtree(tmp_path / "cache" / "objects")
    again = placed()
    for copy in plan.copies:
        ((_, slot),) = [(e, s.tobytes()) for e, s in again.experts(copy.layer, [copy.expert])]
        assert slot == tiny_truth.expert(copy.layer, copy.expert)


def test_an_interrupted_placing_goes_on_where_it_stopped(placed):
    store = placed()
    plan = plan_placement(store, 20 * store.catalog.expert_nbytes)
    done = 0

    def stop(_: int) -> None:
        nonlocal done
        done += 1
        if done == 7:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        apply_placement(store, plan, stop)
    assert apply_placement(placed(), plan) == 13


def test_a_budget_is_kept_to(placed):
    store = placed(Limits(budget=5 * 3264 + 10, reserve=0))
    plan = plan_placement(store)
    assert len(plan.copies) == 5
    apply_placement(store, plan)
    small = placed(Limits(budget=5 * 3264 - 1, reserve=0))
    assert plan_placement(small).copies == ()
    wide = plan_placement(placed(Limits(budget=8 * 3264, reserve=0)))
    with pytest.raises(NoSpace, match="full"):
        apply_placement(small, wide)


def test_damaged_bytes_are_not_copied(placed, tmp_path):
    store = placed()
    plan = plan_placement(store, store.catalog.expert_nbytes)
    (copy,) = plan.copies
    (span,) = store.catalog.expert_spans(copy.layer, [copy.expert])
    path = store.roots[0].object_path(store.known(span))
    path.write_bytes(bytes(len(path.read_bytes())))
    with pytest.raises(Corrupt):
        apply_placement(store, plan)
    assert not list((tmp_path / "second").rglob("objects/*/*"))
