"""Two fetches and a run on one cache, killed at random: the trial of tools/kill_fetches.py, and that it can fail."""

from __future__ import annotations

import pytest


def _is_within_bounds(report) -> None:
    assert report.kills >= 2 * report.rounds, "most were still at work"
    assert report.model_nbytes < report.sent_nbytes <= report.tight_bound_nbytes <= report.bound_nbytes
    # What two fetch at once is no error, but claims make it rare.
    assert report.twice_nbytes <= 0.02 * report.model_nbytes


def test_a_few_kills_lose_nothing_and_cost_what_was_on_its_way(kill_fetches, tiny_dir, record_property):
    report = kill_fetches.try_kills(tiny_dir, 2, seed=5, share_nbytes=200_000)
    record_property("figures", str(report))
    _is_within_bounds(report)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2])
def test_fifty_rounds_of_kills_lose_nothing_and_cost_what_was_on_its_way(kill_fetches, demo_dir, record_property, seed):
    report = kill_fetches.try_kills(demo_dir, 50, seed=seed)
    record_property("figures", str(report))
    _is_within_bounds(report)


def test_a_torn_object_would_be_noticed(kill_fetches, tmp_path, range_server, tiny_dir):
    with range_server.FaultServer(root=str(tiny_dir)) as hub:
        trial = kill_fetches.Trial(hub, tmp_path / "cache", kill_fetches.random.Random(1))
        torn = tmp_path / "cache" / "objects" / "ab" / ("ab" * 32)
        torn.parent.mkdir(parents=True)
        torn.write_bytes(b"half")
        with pytest.raises(kill_fetches.Unexpected, match="torn"):
            trial.check_objects()
