"""`Store.experts` as an iterator: order, slots, early ends, and errors in the middle."""

from __future__ import annotations

import random
import threading
import time
from contextlib import closing
from itertools import islice

import numpy as np
import pytest

from deltafin.errors import BadRequest, DeltafinError, DiskError, Missing
from deltafin.store import drive, slot_nbytes
from deltafin.store.fetcher import WORKERS

LAYER = 3
ALL = list(range(16))  # twice as many as there are workers
PAGE = drive._io.PAGE


@pytest.fixture
def store(opened, tiny_dir):
    return opened(tiny_dir)


def _pages(store) -> set[int]:
    """Where the slots begin, when nobody reads."""
    return {slot.ctypes.data // PAGE for slot in store._slots}


def _check(store, truth, ids) -> None:
    found = {expert: slot.tobytes() for expert, slot in store.experts(LAYER, ids)}
    assert found == {expert: truth.expert(LAYER, expert) for expert in ids}


@pytest.mark.parametrize("seed", range(5))
def test_experts_asked_for_in_any_order_come_once_each(store, tiny_truth, seed):
    ids = random.Random(seed).sample(ALL, k=3 * seed + 4)
    landed = [(expert, slot.tobytes()) for expert, slot in store.experts(LAYER, ids)]
    assert sorted(landed) == sorted((expert, tiny_truth.expert(LAYER, expert)) for expert in ids)


def test_numbers_that_come_as_numpy_integers_are_fine(store, tiny_truth):
    _check(store, tiny_truth, np.array([3, 1, 2], np.int32).tolist())
    landed = {int(expert) for expert, _ in store.experts(LAYER, np.array([3, 1, 2], np.int32))}
    assert landed == {1, 2, 3}


def test_no_expert_asked_for_is_no_expert(store):
    assert list(store.experts(LAYER, [])) == []
    assert store.stats.snapshot()["expert_visits"] == 0


def test_an_expert_asked_for_twice_is_refused_before_anything_is_read(store):
    with pytest.raises(BadRequest, match=f"layer {LAYER}: an expert is asked for twice"):
        list(store.experts(LAYER, [1, 2, 1]))
    assert store.stats.snapshot()["expert_visits"] == 0


def test_no_more_slots_are_taken_than_there_are_workers(store):
    slots = {slot.ctypes.data // PAGE for _, slot in store.experts(LAYER, ALL)}  # where in a page depends on the span
    assert 1 <= len(slots) <= WORKERS < len(ALL)


def test_a_slot_keeps_its_content_until_the_next_step(store, tiny_truth):
    for expert, slot in store.experts(LAYER, ALL):
        before = slot.tobytes()
        time.sleep(0.003)  # whoever wrote into it would do so now
        assert slot.tobytes() == before == tiny_truth.expert(LAYER, expert)


def test_an_expert_is_handed_out_while_another_is_still_on_its_way(store, tiny_truth, monkeypatch):
    held, read = threading.Event(), store.read

    def slow(span, slot, *, expert=None, **keywords):
        if expert == (LAYER, 0):
            held.wait(10)
        return read(span, slot, expert=expert, **keywords)

    monkeypatch.setattr(store, "read", slow)
    landing = store.experts(LAYER, ALL)
    first = [(expert, slot.tobytes()) for expert, slot in islice(landing, len(ALL) - 1)]
    assert sorted(first) == [(expert, tiny_truth.expert(LAYER, expert)) for expert in ALL[1:]]
    held.set()
    assert [(expert, slot.tobytes()) for expert, slot in landing] == [(0, tiny_truth.expert(LAYER, 0))]


def test_a_caller_may_leave_early_and_nothing_goes_on_behind_its_back(store, tiny_truth):
    for steps in (0, 1, 5):
        landing = store.experts(LAYER, ALL)
        for _ in range(steps):
            next(landing)
        landing.close()
        counts = store.stats.snapshot()
        time.sleep(0.02)
        assert store.stats.snapshot() == counts
    assert counts["shard_spans"] < 3 * len(ALL) == counts["expert_visits"], "a visit counts when it is asked for"
    _check(store, tiny_truth, ALL)


def test_slots_come_back_from_a_caller_who_left_early(store):
    first = store.experts(LAYER, ALL)
    with closing(first):
        mine = {next(first)[1].ctypes.data // PAGE for _ in range(WORKERS)}
    later = {slot.ctypes.data // PAGE for _ in range(3) for _, slot in store.experts(LAYER, ALL)}
    assert mine | later <= _pages(store) and len(_pages(store)) == WORKERS


def test_a_store_may_be_closed_while_an_iterator_is_open(store, tiny_truth):
    """Reads that have not begun are dropped; what has landed is still handed out."""
    landing = store.experts(LAYER, ALL)
    next(landing)
    store.close()
    with pytest.raises(DeltafinError, match="the store was closed while"):
        for expert, slot in landing:
            assert slot.tobytes() == tiny_truth.expert(LAYER, expert)
    landing.close()


def test_who_waits_for_an_expert_is_told_that_the_store_was_closed(store, monkeypatch):
    """All workers are busy, so most reads have not begun; closing drops those and waits for the others."""
    begun, held, read = threading.Semaphore(0), threading.Event(), store.read

    def slow(*args, **keywords):
        begun.release()
        held.wait(10)
        return read(*args, **keywords)

    monkeypatch.setattr(store, "read", slow)
    first = store.experts(LAYER, ALL)  # takes all slots and all workers
    for _ in range(WORKERS):
        assert begun.acquire(timeout=10)
    second = store.experts(LAYER + 1, ALL)  # its only read waits in the queue
    failures = []

    def wait() -> None:
        try:
            next(second)
        except DeltafinError as e:
            failures.append(str(e))

    waiting, closing_ = threading.Thread(target=wait), threading.Thread(target=store.close)
    waiting.start()
    closing_.start()
    waiting.join(10)
    assert failures == ["the store was closed while experts were being read"]
    assert closing_.is_alive(), "reads under way write into slots: they are waited for"
    held.set()
    closing_.join(10)
    first.close()
    second.close()
    assert not closing_.is_alive()


def test_an_error_in_one_read_is_raised_once_all_reads_have_ended(store, tiny_truth, monkeypatch):
    read = store.read

    def failing(span, slot, *, expert=None, **keywords):
        if expert == (LAYER, 5):
            raise DiskError("this one fails")
        time.sleep(0.003)
        return read(span, slot, expert=expert, **keywords)

    monkeypatch.setattr(store, "read", failing)
    landed = []
    with pytest.raises(DiskError, match="this one fails"), closing(store.experts(LAYER, ALL)) as landing:
        for expert, slot in landing:
            landed.append(expert)
            assert slot.tobytes() == tiny_truth.expert(LAYER, expert)
    counts = store.stats.snapshot()
    assert 5 not in landed and len(landed) == len(set(landed))
    monkeypatch.undo()
    time.sleep(0.02)
    assert store.stats.snapshot() == counts, "no read goes on after the error"
    _check(store, tiny_truth, ALL)


def test_one_unreadable_expert_names_file_errno_and_offset(store, read_errors):
    span = store.catalog.expert_spans(LAYER, [5])[0]
    assert store.is_local(span)  # its header has been looked at
    read_errors.where, read_errors.times = "model-00004", 10**9
    with pytest.raises(DiskError, match=rf"model-00004.*at {span.offset} \(errno 5\).*Input/output error"):
        list(store.experts(LAYER, [5]))


def test_what_is_nowhere_says_which_expert_and_which_command_brings_it(hub_store, opened):
    hub_store()
    with pytest.raises(Missing, match=r"expert 5 of layer 3 .*df-fetch warm test/model --layers 3 --experts 5$"):
        list(opened(offline=True).experts(LAYER, [5]))


def test_iterators_of_several_threads_do_not_disturb_each_other(store, tiny_truth):
    failures = []

    def walk(layer: int) -> None:
        try:
            for _ in range(5):
                found = {expert: slot.tobytes() for expert, slot in store.experts(layer, ALL)}
                assert found == {expert: tiny_truth.expert(layer, expert) for expert in ALL}
        except BaseException as e:
            failures.append(e)

    threads = [threading.Thread(target=walk, args=(layer,)) for layer in range(1, 9)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert set(store.stats.expert_reads.values()) == {5}


def test_what_was_promised_to_one_iterator_is_not_replaced_by_another(tiny_dir, opened, tiny_truth):
    store = opened(tiny_dir)
    store.reserve(4, 2)
    for _ in range(3):
        list(store.experts(LAYER, [1, 2]))
    assert store.resident_experts == (2, 2)
    first = store.experts(LAYER, [1, 2])
    for _ in range(9):
        list(store.experts(LAYER, [3, 4, 5]))
    assert {e: s.tobytes() for e, s in first} == {e: tiny_truth.expert(LAYER, e) for e in (1, 2)}


def test_memory_of_its_own_that_an_iterator_needed_never_stays(tiny_dir, opened):
    store = opened(tiny_dir)
    store.reserve(1, 3)
    with closing(store.experts(LAYER, [7])):
        assert len(list(store.experts(LAYER, [1, 2, 3, 4]))) == 4
    assert store.shrink(1 << 30) == store.shrink(0) + 3 * slot_nbytes(store.catalog.expert_nbytes)
    assert len(list(store.experts(LAYER, [1, 2]))) == 2
