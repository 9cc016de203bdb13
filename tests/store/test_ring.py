"""The ring: parts never overlap, and an empty ring takes whatever fits its memory."""

from __future__ import annotations

from collections import deque

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deltafin.store.ring import Ring


@given(st.integers(1, 200), st.lists(st.tuples(st.booleans(), st.integers(1, 120)), max_size=200))
def test_parts_lie_inside_and_never_share_a_byte(size, steps):
    memory = np.zeros(size, np.uint8)
    ring, live = Ring(memory), deque()
    for take, nbytes in steps:
        if not take:
            if live:
                ring.release(live.popleft())
            continue
        part = ring.take(nbytes)
        if part is None:
            assert live or nbytes > size, "an empty ring has room for whatever is not larger than it"
            continue
        assert len(part) == nbytes
        begin = part.ctypes.data - memory.ctypes.data
        assert 0 <= begin <= size - nbytes
        assert not any(np.shares_memory(part, other) for other in live)
        live.append(part)


def test_two_parts_of_half_the_ring_can_follow_each_other_for_ever():
    ring = Ring(np.zeros(100, np.uint8))
    first, second = ring.take(50), ring.take(50)
    for _ in range(10):
        assert ring.take(1) is None
        ring.release(first)
        first, second = second, ring.take(50)
        assert second is not None


def test_parts_are_given_back_in_their_order():
    ring = Ring(np.zeros(100, np.uint8))
    ring.take(10)
    second = ring.take(10)
    with pytest.raises(AssertionError, match="out of order"):
        ring.release(second)
