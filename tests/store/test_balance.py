"""Plans of reads over several drives: every byte once, from where it lies, and ending about as soon as can be."""

from __future__ import annotations

from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deltafin.cext import _io
from deltafin.store.balance import LEAST_PART_NBYTES, Place, Want, plan_reads

EXPERT = 17_547_264
MB = 1e6


@st.composite
def cases(draw, phases: tuple[int, ...] = (0, 3088)):
    drives = draw(st.integers(1, 4))
    rates = [draw(st.floats(20.0, 7000.0)) * MB for _ in range(drives)]
    queued = [draw(st.sampled_from([0.0, 0.0, 0.01, 0.3])) for _ in range(drives)]
    wants = []
    for _ in range(draw(st.integers(1, 24))):
        where = draw(st.sets(st.integers(0, drives - 1), min_size=1))
        nbytes = draw(st.sampled_from([EXPERT, EXPERT, 3 << 20, 70_000, 5]))
        wants.append(Want(nbytes, tuple(Place(drive, draw(st.sampled_from(phases))) for drive in sorted(where))))
    return wants, queued, rates


def best_end(wants, queued, rates) -> float:
    """When the last byte could be there if bytes were a fluid: no set of drives can be given more than it can bring."""
    drives = range(len(rates))
    only = {
        some: sum(w.nbytes for w in wants if {p.drive for p in w.places} <= set(some))
        for n in range(1, len(rates) + 1)
        for some in combinations(drives, n)
    }
    low, high = 0.0, max(queued) + sum(w.nbytes for w in wants) / min(rates)
    for _ in range(60):
        end = (low + high) / 2
        fits = all(sum(rates[d] * max(0.0, end - queued[d]) for d in some) >= n for some, n in only.items())
        low, high = (low, end) if fits else (end, high)
    return high


@settings(max_examples=150, deadline=None)
@given(cases())
def test_every_byte_is_read_once_from_a_drive_that_has_it(case):
    wants, queued, rates = case
    plan = plan_reads(wants, queued, rates)
    assert sorted(plan.order) == list(range(len(wants)))
    for want, parts in zip(wants, plan.parts, strict=True):
        phases = {place.drive: place.phase for place in want.places}
        assert [part.begin for part in parts] == [0, *(part.end for part in parts[:-1])]
        assert parts[-1].end == want.nbytes
        assert len({part.drive for part in parts}) == len(parts)
        (phase,) = {phases[part.drive] for part in parts}
        for part in parts[1:]:
            assert (phase + part.begin) % _io.PAGE == 0
        assert len(parts) == 1 or all(part.end - part.begin >= LEAST_PART_NBYTES for part in parts)


@settings(max_examples=150, deadline=None)
@given(cases(phases=(0,)))
def test_the_last_drive_ends_about_as_soon_as_the_bytes_could_be_there(case):
    wants, queued, rates = case
    plan = plan_reads(wants, queued, rates)
    ends = list(queued)
    for part in (part for parts in plan.parts for part in parts):
        ends[part.drive] += (part.end - part.begin) / rates[part.drive]
    used = {part.drive for parts in plan.parts for part in parts}
    end = max(ends[drive] for drive in used)
    assert end == pytest.approx(plan.end_s, rel=1e-3, abs=1e-3)
    # What cannot be cut finer: a part of the least size on the slowest drive that a span may come from.
    finest = 2 * LEAST_PART_NBYTES / min(rates) + 0.004
    assert end <= 1.02 * best_end(wants, queued, rates) + finest


def test_a_layer_of_full_copies_ends_within_a_hundredth_of_the_ideal_split():
    rates = [150 * MB, 300 * MB, 600 * MB]
    wants = [Want(EXPERT, tuple(Place(d) for d in range(3)))] * 16
    plan = plan_reads(wants, [0.0] * 3, rates)
    assert plan.end_s <= 1.01 * 16 * EXPERT / sum(rates)
    assert sum(len(parts) - 1 for parts in plan.parts) <= 4  # few spans are cut


def test_bytes_are_handed_on_through_a_drive_in_between():
    """The first drive shares spans only with the second, and the second with the third."""
    rates = [100 * MB] * 3
    wants = [Want(EXPERT, (Place(0), Place(1)))] * 6 + [Want(EXPERT, (Place(1), Place(2)))] * 3
    plan = plan_reads(wants, [0.0] * 3, rates)
    assert plan.end_s <= 1.02 * 9 * EXPERT / sum(rates)


def test_a_drive_with_work_of_its_own_is_spared():
    wants = [Want(EXPERT, (Place(0), Place(1)))]
    assert [part.drive for part in plan_reads(wants, [10.0, 0.0], [1000 * MB, 100 * MB]).parts[0]] == [1]


def test_spans_of_other_phases_are_not_cut_but_moved_whole():
    wants = [Want(EXPERT, (Place(0, 0), Place(1, 3088)))] * 5
    plan = plan_reads(wants, [0.0, 0.0], [100 * MB, 100 * MB])
    assert all(len(parts) == 1 for parts in plan.parts)
    assert sorted(part.drive for (part,) in plan.parts) in ([0, 0, 0, 1, 1], [0, 0, 1, 1, 1])


def test_what_begins_first_comes_first():
    """With fewer slots than spans each drive must have work from the start."""
    wants = [Want(EXPERT, tuple(Place(d) for d in range(3)))] * 16
    plan = plan_reads(wants, [0.0] * 3, [150 * MB, 300 * MB, 600 * MB])
    first = {part.drive for number in plan.order[:5] for part in plan.parts[number]}
    assert first == {0, 1, 2}


def test_nothing_wanted_is_a_plan_too():
    assert plan_reads([], [0.0], [1.0]).order == ()
