"""Memory that is taken, kept and lent, never negative and never more than there is; and estimates of time."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deltafin.runtime.batch.sizing import blocks
from deltafin.runtime.server import Room
from deltafin.runtime.server.pace import Pace, PassClock
from deltafin.runtime.server.queueing import place_of
from deltafin.runtime.server.recent import Recent
from deltafin.runtime.server.room import LentRoom


class Seq:
    """As much of a sequence as is kept."""

    count = 0

    def __init__(self, ids) -> None:
        self.ids = list(ids)
        Seq.count += 1
        self.number = Seq.count


def bounded(room) -> None:
    assert 0 <= room.taken_sequences <= room.sequences
    assert room.taken_sequences or room.taken_tokens == 0
    assert room.taken_tokens >= 0
    # One that is longer than what is planned for many rides by itself.
    assert room.taken_tokens <= room.tokens or room.taken_sequences == 1


STEPS = st.lists(
    st.tuples(st.sampled_from(["request", "company", "end", "keep", "take", "drop"]), st.integers(1, 2000)),
    max_size=60,
)


@given(sequences=st.integers(1, 5), tokens=st.integers(1, 12).map(lambda n: n * 256), steps=STEPS)
def test_room_is_never_negative_and_never_more_than_there_is(sequences, tokens, steps):
    room = Room(sequences, tokens)
    recent = Recent(room)
    lent = LentRoom(room, recent.drop_oldest)
    riding = []
    for what, number in steps:
        own = lent if what == "company" else room
        if what in ("request", "company") and own.fits(number):
            riding.append((own, own.take(number)))
        elif what == "end" and riding:
            own, taken = riding.pop(number % len(riding))
            own.give(taken)
        elif what == "keep":
            recent.keep(Seq(range(number % 700)))
        elif what == "take":
            recent.take(range(number))
        elif what == "drop":
            recent.drop_oldest(range(number))
        bounded(room)
        assert lent.taken_sequences == sum(own is lent for own, _ in riding)
    lent.give_all()
    recent.clear()
    assert room.taken_sequences == sum(own is room for own, _ in riding)
    assert room.taken_tokens == sum(taken for own, taken in riding if own is room)


def test_the_longest_beginning_is_taken_and_what_it_contains_makes_way():
    room = Room(4, 4096)
    recent = Recent(room)
    for ids in ([1, 2], [1, 2, 3, 4], [9, 9]):
        recent.keep(Seq(ids))
    assert len(recent) == 2  # the first is the beginning of the second
    assert recent.longest([1, 2, 3, 4]) == 0  # not all of it: there must be something to compute
    assert recent.longest([1, 2, 3, 4, 5]) == 4
    assert recent.longest([1, 2, 9]) == 0
    assert recent.drop_oldest([1, 2, 3, 4, 5])
    assert [seq.ids for seq in recent] == [[1, 2, 3, 4]]
    assert not recent.drop_oldest([1, 2, 3, 4, 5])
    assert recent.take([1, 2, 3, 4, 5]).ids == [1, 2, 3, 4]
    assert (room.taken_sequences, room.taken_tokens) == (0, 0)


def test_what_cannot_be_kept_drops_nothing():
    room = Room(2, 512)
    recent = Recent(room)
    recent.keep(Seq([1, 2]))
    room.take(200)
    recent.keep(Seq(range(300)))
    assert [seq.ids for seq in recent] == [[1, 2]]
    recent.keep(Seq([3, 4]))
    assert [seq.ids for seq in recent] == [[3, 4]]


# ---- time ---------------------------------------------------------------------------------------------------

MOST_ROWS = 256


@given(st.lists(st.tuples(st.integers(1, 512), st.floats(0, 1e5)), max_size=50))
def test_pace_is_a_number_once_there_was_a_pass(passes):
    pace = Pace()
    assert pace.of_pass(1) is None
    for rows, seconds in passes:
        pace.saw_pass(rows, seconds)
        for asked in (0, 1, 7, 512):
            expected = pace.of_pass(asked)
            assert expected is not None and math.isfinite(expected) and expected >= 0
        assert pace.of_pass(512) >= pace.of_pass(1)


@pytest.mark.parametrize(("fixed", "row"), [(10.0, 0.5), (0.02, 0.001), (5.0, 0.0), (0.0, 1.0)])
def test_pace_finds_what_a_pass_and_a_row_take(fixed, row):
    """Prompts and answers in turn, with passes that take half as long again or half as long now and then."""
    pace = Pace()
    for turn in range(120):
        rows = (1, 4, 256, 1, 60)[turn % 5]
        noise = (1, 1.5, 0.5, 1)[turn % 4]
        pace.saw_pass(rows, noise * (fixed + row * rows))
    for rows in (1, 4, 60, 256):
        if (true := fixed + row * rows) > 0.05 * (fixed + 256 * row):
            assert true / 3 <= pace.of_pass(rows) <= 3 * true


class Fake(SimpleNamespace):
    """Is equal to itself only, as a job is."""

    __eq__ = object.__eq__
    __hash__ = object.__hash__


def job(prompt=10, new=20, state="waiting", chosen=0, waiting=0, taken=None):
    generation = None
    if state == "running":
        generation = SimpleNamespace(chosen=[0] * chosen, waiting=waiting or 1)
    task = SimpleNamespace(ids=range(prompt), max_new=new, tokens=prompt + new)
    taken = blocks(task.tokens) if taken is None else taken
    return Fake(task=task, state=state, generation=generation, taken=taken)


def paced(pass_s=2.0, row_s=0.01, answer_tokens=8.0):
    pace = Pace()
    pace.pass_s, pace.row_s, pace.answer_tokens = pass_s, row_s, answer_tokens
    return pace


def test_who_waits_is_told_when_there_will_be_room():
    running = [job(state="running", chosen=2), job(state="running", chosen=5)]
    waiting = [job(), job(), job(prompt=600)]
    room, pace = Room(2, 4096), paced()
    two = pace.of_pass(2)
    places = [place_of(w, waiting, running, room, pace, 0.5, MOST_ROWS) for w in waiting]
    assert [p.ahead for p in places] == [0, 1, 2]
    own = pace.of_pass(10)
    assert places[0].first_token_s == pytest.approx(3 * two + own)  # the second of them has 3 of 8 tokens left
    assert places[1].first_token_s == pytest.approx(6 * two + own)
    assert places[2].first_token_s == pytest.approx((3 + 8) * two + 3 * pace.of_pass(256))


def test_who_rides_is_told_how_long_the_prompt_takes_and_then_that_it_is_there():
    room, pace = Room(2, 4096), paced()

    def first_token_s(rider, left_s):
        return place_of(rider, [], [rider], room, pace, left_s, MOST_ROWS).first_token_s

    assert first_token_s(job(state="running", chosen=1), 5.0) == 0.0
    assert first_token_s(job(state="over"), 5.0) == 0.0
    prompt = job(prompt=600, state="running", waiting=600)
    assert first_token_s(prompt, 1.5) == pytest.approx(1.5 + 2 * pace.of_pass(256))  # 256 of it are in the pass
    assert first_token_s(prompt, 0.0) == pytest.approx(3 * pace.of_pass(256))  # between two passes
    assert first_token_s(prompt, None) is None


def test_nothing_is_said_where_nothing_is_known():
    waiting, room = [job()], Room(1, 4096)
    assert place_of(waiting[0], waiting, [], room, Pace(), None, MOST_ROWS).first_token_s is None
    assert place_of(waiting[0], waiting, [], room, Pace(), None, MOST_ROWS).ahead == 0


def test_the_clock_tells_what_is_left_of_a_pass(monkeypatch):
    now = [100.0]
    monkeypatch.setattr("deltafin.runtime.server.pace.time.monotonic", lambda: now[0])
    clock = PassClock(10)
    assert (clock.left_s(7.0), clock.still_s, clock.elapsed_s) == (0.0, 0.0, 0.0)
    clock.begin(3)
    clock.at(0)
    now[0] += 2
    assert (clock.left_s(7.0), clock.left_s(None), clock.left_s(1.0)) == (5.0, None, 0.0)
    clock.at(1)
    now[0] += 2
    assert clock.left_s(7.0) == 36.0  # a layer has taken 4 s
    assert (clock.elapsed_s, clock.still_s) == (4.0, 2.0)
    clock.end()
    now[0] += 3
    assert (clock.left_s(7.0), clock.still_s) == (0.0, 3.0)
    clock.rest()
    assert clock.still_s == 0.0
