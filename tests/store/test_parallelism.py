"""How many transfers at once: found on simulated lines, where time is a number and nothing sleeps."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from deltafin.store.parallelism import LEAST, MOST, START, Parallelism

STEP_S = 0.2


class Line:
    """A line that carries `capacity` bytes a second, each transfer at most `each`; above `limit` it answers 429."""

    def __init__(self, capacity: float, each: float, *, limit: int = 10**6, noise: float = 0.0) -> None:
        self.capacity, self.each, self.limit, self.noise = capacity, each, limit, noise
        self.now = self.nbytes = 0.0
        self.throttled = 0
        self.counts: list[int] = []
        self.choose = Parallelism(0.0)
        self._random = random.Random(1)

    def run(self, seconds: float, disturbed: Callable[[float], bool] = lambda now: False) -> list[int]:
        """The number of transfers at every step."""
        start = len(self.counts)
        for _ in range(round(seconds / STEP_S)):
            count = self.choose.transfers
            rate = min(self.capacity, count * self.each) * self._random.uniform(1 - self.noise, 1 + self.noise)
            self.now += STEP_S
            self.nbytes += rate * STEP_S
            self.throttled += count > self.limit
            if disturbed(self.now):
                self.choose.disturbed(self.now, int(self.nbytes))
            self.counts.append(self.choose.observe(self.now, int(self.nbytes), self.throttled))
        return self.counts[start:]


def mostly(counts: list[int]) -> int:
    return max(set(counts), key=counts.count)


@pytest.mark.parametrize(
    ("each", "settled"),
    [
        (100.0, 1),  # one transfer fills the line
        (55.0, 2),
        (30.0, 4),
        (25.0, 4),
        (12.5, 8),
        (6.25, 16),
        (1.0, MOST),  # and more would be better still
    ],
)
def test_it_settles_on_the_fewest_that_fill_the_line(each, settled):
    line = Line(100.0, each)
    line.run(60)
    assert mostly(line.run(600)) == settled


@pytest.mark.parametrize("noise", [0.1, 0.3])
def test_noise_does_not_lead_it_far_astray(noise):
    line = Line(100.0, 12.5, noise=noise)
    line.run(60)
    assert set(line.run(1800)) <= {4, 8, 16}
    assert line.nbytes > 0.85 * line.now * 100


def test_it_starts_with_few_and_stays_within_bounds():
    line = Line(1e9, 1.0)
    assert line.choose.transfers == START
    counts = line.run(3600)
    assert min(counts) >= LEAST and max(counts) == MOST
    assert counts[0] == START


def test_trying_costs_little():
    """Over an hour, against always having the best number."""
    for each in (100.0, 25.0, 12.5, 6.25):
        line = Line(100.0, each)
        line.run(3600)
        assert line.nbytes > 0.96 * 3600 * 100, each


def test_between_trials_it_rests_for_a_minute():
    line = Line(100.0, 25.0)
    line.run(30)
    changes = [i for i, (a, b) in enumerate(zip(line.run(600), line.counts[-2999:], strict=False)) if a != b]
    assert len(changes) <= 4 * 600 / 60 + 4


def test_a_line_that_changes_is_found_again():
    line = Line(100.0, 25.0)
    line.run(120)
    line.each = 6.25
    line.run(240)
    assert mostly(line.run(300)) == 16
    line.each = 100.0
    line.run(600)
    assert mostly(line.run(600)) <= 2


def test_a_server_that_throttles_is_given_half_at_once_and_rest():
    line = Line(1000.0, 10.0, limit=6)
    counts = line.run(30)
    first = next(i for i, count in enumerate(counts) if i and counts[i - 1] == 8 and count == 4)
    assert counts[first - 1] == 8
    assert set(line.run(25)) == {4}, "nothing is tried until it has rested"


def test_a_server_that_throttles_whatever_is_asked_gets_one_at_a_time():
    line = Line(1000.0, 10.0, limit=0)
    assert line.run(30)[-1] == LEAST
    assert set(line.run(600)) == {LEAST}


def test_what_happens_during_a_pause_is_not_measured():
    """The line stands still for a while during the first trial: that says nothing of eight transfers."""
    line = Line(1000.0, 10.0)
    line.run(4.4)
    assert line.choose.transfers == 8
    line.capacity = 0.0
    line.run(20, disturbed=lambda now: True)
    line.capacity = 1000.0
    assert line.run(5)[-1] == 16


def test_it_is_the_same_every_time():
    assert Line(100.0, 12.5, noise=0.2).run(600) == Line(100.0, 12.5, noise=0.2).run(600)
