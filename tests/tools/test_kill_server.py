"""A server that is killed at random while it answers batches: the trial of tools/kill_server.py."""

from __future__ import annotations

import pytest


def test_a_kill_changes_nothing(kill_server, record_property):
    report = kill_server.try_kills(1, seed=2, count=6, words=("--parallel", "2"), short=True, share_s=0.05)
    record_property("figures", str(report))
    assert report.kills == 1


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2])
def test_ten_kills_of_64_requests_change_nothing(kill_server, record_property, seed):
    report = kill_server.try_kills(10, seed=seed, words=("--parallel", "8"))
    record_property("figures", str(report))
    assert report.kills == 10 and max(report.answered) > 0


def test_a_wrong_answer_or_a_file_too_many_would_be_noticed(kill_server, tmp_path):
    trial = kill_server.Trial.__new__(kill_server.Trial)
    trial.data, trial.expected, trial.batches = tmp_path, {"a": {"x": 1}}, ["one", "two"]
    for name in ("files", "batches"):
        (tmp_path / name).mkdir()
    for found in ({}, {"a": {"x": 2}}, {"a": {"x": 1}, "b": {}}):
        with pytest.raises(kill_server.Unexpected, match="another one"):
            trial.check(found)
    for name in "1234":
        (tmp_path / "files" / name).touch()
    trial.check({"a": {"x": 1}})
    (tmp_path / "batches" / "b.jsonl").touch()
    with pytest.raises(kill_server.Unexpected, match="was left"):
        trial.check({"a": {"x": 1}})
