"""A batch that is killed at random: the trial of tools/kill_batches.py, and that it can fail."""

from __future__ import annotations

import json

import pytest


def test_a_few_kills_change_nothing(kill_batches, record_property):
    report = kill_batches.try_kills(2, seed=3, count=4, words=("--parallel", "2"), short=True, share_s=0.05)
    record_property("figures", str(report))
    assert report.kills == 2


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2])
def test_ten_kills_of_64_requests_change_nothing(kill_batches, record_property, seed):
    report = kill_batches.try_kills(10, seed=seed, words=("--parallel", "16"))
    record_property("figures", str(report))
    assert report.kills == 10 and max(report.answered) > 0


@pytest.mark.parametrize(
    ("lines", "why"),
    [
        ([{"custom_id": "a"}], "line 1 is no answer"),
        (["a", "b", "a"], "'a' is answered twice"),
        (["a", 400], "line 2 is not whole, or an error"),
    ],
)
def test_a_broken_output_would_be_noticed(kill_batches, tmp_path, lines, why):
    def answer(name):
        status = name if isinstance(name, int) else 200
        return {"custom_id": str(name), "response": {"status_code": status, "body": {"created": 1}}}

    path = tmp_path / "out.jsonl"
    path.write_text("".join(json.dumps(n if isinstance(n, dict) else answer(n)) + "\n" for n in lines))
    with pytest.raises(kill_batches.Unexpected, match=why):
        kill_batches.answers(path)


def test_fewer_kills_than_asked_for_are_no_success(kill_batches, monkeypatch, capsys):
    def done_early(kills, seed, count, words):
        return kill_batches.Report(count, 3, [1, 2, count], 0, 100, 50, 10)

    monkeypatch.setattr(kill_batches, "try_kills", done_early)
    assert kill_batches.main(["--kills", "4"]) == 1
    assert capsys.readouterr() == ("", "kill_batches: all was answered after 3 of 4 kills; give more --requests\n")
    assert kill_batches.main(["--kills", "3"]) == 0
