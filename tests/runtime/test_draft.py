"""Drafts: what every source of proposals must keep to, and what prompt lookup finds."""

from __future__ import annotations

import random
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deltafin.runtime.draft import LONGEST, MOST_PLACES, SHORTEST, Draft, NGram

few_ids = st.lists(st.integers(0, 3), max_size=60)


class DraftConformance:
    """What Generation relies on. A new implementation subclasses this and supplies `draft`."""

    @pytest.fixture
    def draft(self) -> Draft:
        raise NotImplementedError

    @staticmethod
    def check(draft: Draft, ids, most: int) -> list[int]:
        before = list(ids)
        proposed = list(draft.propose(ids, most))
        assert list(ids) == before
        assert len(proposed) <= max(0, most)
        assert all(type(token) is int and token >= 0 for token in proposed)
        return proposed

    def test_nothing_is_known_of_nothing(self, draft):
        assert self.check(draft, [], 4) == []

    @pytest.mark.parametrize("most", [0, -1, -100])
    def test_no_more_is_proposed_than_asked_for(self, draft, most):
        assert self.check(draft, [1, 2, 1, 2, 1], most) == []

    def test_a_list_that_grows_is_never_too_long_or_too_short(self, draft):
        ids: list[int] = []
        chance = random.Random(2)
        for _ in range(300):
            self.check(draft, ids, chance.randrange(10))
            ids += [chance.randrange(4) for _ in range(chance.randrange(4))]

    def test_any_other_list_may_follow(self, draft):
        chance = random.Random(3)
        for _ in range(300):
            ids = [chance.randrange(3) for _ in range(chance.randrange(30))]
            self.check(draft, ids, 5)
            ids[len(ids) // 2 :] = [7] * chance.randrange(3)  # the caller's own, to change
            self.check(draft, ids, 5)

    def test_a_tuple_will_do(self, draft):
        self.check(draft, (1, 2, 3, 1, 2), 3)

    def test_ids_of_a_large_vocabulary_will_do(self, draft):
        self.check(draft, [163_839, 0, 163_839, 0, 163_839], 3)

    def test_one_id_many_times_will_do(self, draft):
        self.check(draft, [5] * 3000, 16)


class TestNGram(DraftConformance):
    @pytest.fixture
    def draft(self) -> Draft:
        return NGram()


class _Echo:
    """The last id again: a draft of one line, to see that the suite asks for no more than the contract."""

    def propose(self, ids, most):
        return list(ids[-1:]) * most


class TestEcho(DraftConformance):
    @pytest.fixture
    def draft(self) -> Draft:
        return _Echo()


def specified(ids: list[int], most: int, longest: int = LONGEST, shortest: int = SHORTEST) -> list[int]:
    """The proposals by definition: every earlier place compared."""
    best, alike_best = 0, shortest - 1
    for place in range(len(ids) - 1, 0, -1):
        alike = 0
        while alike < min(longest, place) and ids[place - 1 - alike] == ids[len(ids) - 1 - alike]:
            alike += 1
        if alike > alike_best:
            best, alike_best = place, alike
    if not best:
        return []
    text = list(ids)
    for at in range(best, best + most):
        text.append(text[at])
    return text[len(ids) :]


@settings(max_examples=300, deadline=None)
@given(few_ids, st.integers(0, 9), st.integers(1, 4), st.integers(0, 6))
def test_the_place_most_like_the_end_is_found(ids, most, shortest, more):
    assert NGram(shortest + more, shortest).propose(ids, most) == specified(ids, most, shortest + more, shortest)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 60), few_ids), min_size=1, max_size=6))
def test_whatever_was_seen_before_a_list_is_looked_up_as_if_alone(steps):
    """Each step keeps some of the list, or all, and adds to it: grown, cut, changed or another."""
    draft = NGram()
    ids: list[int] = []
    for keep, new in steps:
        ids = ids[:keep] + new
        assert draft.propose(ids, 5) == specified(ids, 5)


def test_a_list_that_changes_in_place_is_looked_up_anew():
    ids = [1, 2, 3, 9, 1, 2]
    draft = NGram()
    assert draft.propose(ids, 2) == [3, 9]
    ids[2] = 4
    assert draft.propose(ids, 2) == [4, 9]
    del ids[1:]
    assert draft.propose(ids, 2) == []


def test_the_longest_match_wins_and_then_the_latest():
    assert NGram().propose([7, 1, 2, 50, 8, 1, 2, 60, 7, 1, 2], 1) == [50]
    assert NGram().propose([7, 1, 2, 50, 7, 1, 2, 60, 7, 1, 2], 1) == [60]
    assert NGram(longest=2).propose([7, 1, 2, 50, 8, 1, 2, 60, 7, 1, 2], 1) == [60]


def test_text_that_repeats_itself_is_continued_to_any_depth():
    assert NGram().propose([9, 1, 2, 3, 1, 2, 3, 1], 8) == [2, 3, 1, 2, 3, 1, 2, 3]
    assert NGram().propose([5, 5, 5], 4) == [5, 5, 5, 5]


def test_one_id_in_common_is_not_enough():
    assert NGram().propose([1, 2, 3, 1], 4) == []
    assert NGram().propose([4, 1, 2, 3, 4, 1], 2) == [2, 3]


def test_the_latest_places_are_looked_at_and_no_more():
    common = [1, 2, 3]
    better = [8, 1, 2, 99]
    ids = better + common * MOST_PLACES + [8, 1, 2]
    assert NGram().propose(ids, 1) == [3]
    assert NGram().propose(better + common * (MOST_PLACES - 2) + [8, 1, 2], 1) == [99]


def test_a_call_with_100_000_ids_is_short():
    """Measured at 0.4 ms; whoever learns everything again, or looks at every place, takes a hundred times as long."""
    chance = random.Random(1)
    ids = [chance.randrange(50) for _ in range(100_000)]  # two ids occur together 40 times
    draft = NGram()
    draft.propose(ids, 8)
    seconds = []
    for _ in range(50):
        ids.append(chance.randrange(50))
        begun = time.thread_time()
        draft.propose(ids, 8)
        seconds.append(time.thread_time() - begun)
    assert sorted(seconds)[25] < 0.01


def test_a_page_of_repetitive_text_takes_few_passes():
    """Records of one form, as tools answer: a pass brings two tokens and more beside its own."""
    chance = random.Random(4)
    text: list[int] = []
    for number in range(60):
        text += [1, 2, 3, 4, 5, 6, 100 + number + chance.randrange(40), 7, 8, 9, 10, 11]
    draft, at, passes = NGram(), 24, 0
    while at < len(text):
        accepted = 0
        for token in draft.propose(text[:at], 8):
            if at + accepted == len(text) or text[at + accepted] != token:
                break
            accepted += 1
        at += accepted + 1
        passes += 1
    assert (len(text) - 24) / passes > 3
