"""The tier of resident experts: what is used most stays, one pass over everything moves nothing, no slot is lost."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deltafin.store.tier import ExpertTier


def _slots(count):
    return [np.full(4, n, np.uint8) for n in range(count)]


class Reader:
    """Reads experts through a tier as a landing does, with one slot of its own."""

    def __init__(self, capacity):
        self.slots = _slots(capacity + 1)
        self.tier = ExpertTier(self.slots[:capacity])
        self.free = self.slots[capacity]

    def use(self, number):
        """Whether it was here; its bytes must be its own either way."""
        key = (1, number)
        found = self.tier.use(key)
        if found is not None:
            assert found.tolist() == [number % 251] * 4
            return True
        self.free[:] = number % 251
        self.free = self.tier.offer(key, self.free, self.free)
        return False


def test_free_slots_are_filled_first():
    reader = Reader(3)
    assert [reader.use(n) for n in (1, 2, 3)] == [False] * 3
    assert [reader.use(n) for n in (1, 2, 3)] == [True] * 3
    assert len(reader.tier) == 3


def test_one_pass_over_everything_replaces_nothing_that_was_used_twice():
    reader = Reader(8)
    for _ in range(2):
        for n in range(8):
            reader.use(n)
    for n in range(100, 1000):
        assert not reader.use(n)
    assert all(reader.use(n) for n in range(8))


def test_what_becomes_hot_gets_in_and_the_coldest_goes():
    reader = Reader(2)
    for n, uses in ((1, 5), (2, 2)):
        for _ in range(uses):
            reader.use(n)
    for _ in range(3):
        reader.use(3)
    assert reader.use(3) and reader.use(1) and not reader.use(2)


def test_yesterdays_favourites_go_in_the_end():
    reader = Reader(2)
    for _ in range(1000):
        reader.use(1)
    for step in range(2000):
        reader.use(10 + step % 2)
    assert reader.use(10) and reader.use(11) and not reader.use(1)


def test_a_skewed_stream_hits_more_often_than_the_share_that_fits():
    rng = np.random.default_rng(4)
    reader = Reader(100)
    draws = np.minimum(rng.zipf(1.3, 20_000), 1000)  # of 1,000 experts
    hits = [reader.use(int(n)) for n in draws]
    assert np.mean(hits[10_000:]) > 0.5  # a tenth of them fits


def test_without_slots_it_keeps_nothing():
    tier = ExpertTier([])
    slot = np.zeros(4, np.uint8)
    assert tier.use((1, 1)) is None
    assert tier.offer((1, 1), slot, slot) is slot


@given(st.integers(1, 6), st.lists(st.integers(0, 12), max_size=300), st.integers(0, 8))
def test_no_slot_is_lost_or_used_twice(capacity, numbers, shrink):
    reader = Reader(capacity)
    for n in numbers:
        reader.use(n)
    given_back = reader.tier.shrink(shrink)
    assert len(given_back) == min(shrink, capacity)
    assert reader.tier.capacity == capacity - len(given_back)
    assert not {s.ctypes.data for s in given_back} & {reader.free.ctypes.data}
    for n in numbers:
        reader.use(n)
    assert len(reader.tier) <= reader.tier.capacity


@pytest.mark.parametrize("times", [1, 3])
def test_shrinking_takes_free_slots_first_and_then_the_coldest(times):
    reader = Reader(4)
    for n, uses in ((1, 3), (2, 2), (3, 1)):
        for _ in range(uses):
            reader.use(n)
    for _ in range(times):
        reader.tier.shrink(1)
    assert [reader.tier.use((1, n)) is not None for n in (1, 2, 3)] == [True, times < 3, times < 2]
