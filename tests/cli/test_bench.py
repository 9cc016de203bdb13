"""df-bench."""

from __future__ import annotations

import json

import click
import pytest
from click.testing import CliRunner

from deltafin.cli.bench import bench
from deltafin.errors import NoMemory
from deltafin.store import make_standin


@pytest.fixture
def small(monkeypatch, tiny_dir) -> None:
    """The stand-in that the command makes is one of tiny."""
    config = (tiny_dir / "config.json").read_bytes()

    def make(folder, *, distinct_experts, config_json, progress):
        return make_standin(folder, distinct_experts=12, config_json=config, progress=progress)

    monkeypatch.setattr("deltafin.store.make_standin", make)


@pytest.mark.usefixtures("small")
def test_fullsize_makes_a_stand_in_runs_tokens_and_says_what_each_took(tmp_path):
    for _ in range(2):  # made, then found
        done = CliRunner().invoke(bench, ["fullsize", "--dir", str(tmp_path / "s"), "--tokens", "3", "--json"])
        assert done.exit_code == 0, done.output
        said = json.loads(done.stdout)
        assert (said["model"], said["cache_dir"]) == ("k3-stand-in", str(tmp_path / "s"))
        assert said["distinct_objects"] < said["spans"]
        assert len(said["tokens"]) == 3
        token = said["tokens"][0]
        assert token["expert_nbytes"] == 8 * 4 * 3264
        assert token["parts"]["experts"] == 8 * 4
        assert token["read_nbytes"] > token["expert_nbytes"] + token["head_nbytes"] > 0
        assert said["memory"]["total"] <= said["memory"]["budget"]
        assert said["spine"] == "released"


@pytest.mark.usefixtures("small")
def test_fullsize_runs_packs_of_which_the_layers_of_a_kind_share_one(tmp_path):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("deltafin.indexer.catalog.SMALL_TENSOR_NBYTES", 2_000)
        words = ["fullsize", "--dir", str(tmp_path / "s"), "--tokens", "2", "--json"]
        released, packed = (
            json.loads(CliRunner().invoke(bench, [*words, *more]).stdout) for more in ([], ["--spine", "bf12"])
        )
    assert packed["spine"] == "bf12"
    assert [t["id"] for t in packed["tokens"]] == [t["id"] for t in released["tokens"]]
    assert packed["tokens"][0]["spine_nbytes"] < released["tokens"][0]["spine_nbytes"]
    assert 1 < len(list((tmp_path / "s" / "packs").rglob("*.pack"))) < 8, "one for each kind of layer"


@pytest.mark.usefixtures("small")
def test_pass_compares_a_streamed_and_a_resident_spine_with_their_critical_paths(tmp_path):
    words = ["pass", "--dir", str(tmp_path / "s"), "--tokens", "2", "--rate", "20MB", "--json"]
    done = CliRunner().invoke(bench, words)
    assert done.exit_code == 0, done.output
    streamed, resident = json.loads(done.stdout)["passes"]
    assert streamed["resident_layers"] < resident["resident_layers"] == resident["spine_layers"]
    for cost in (streamed, resident):
        assert cost["ratio"] > 0.9, "no schedule beats what has to follow on each other"
        assert cost["passes"] == 2


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("rows", [1, 130])
def test_prefill_asks_for_each_chosen_expert_once(tmp_path, monkeypatch, rows):
    monkeypatch.setenv("DELTAFIN_CACHE", str(tmp_path / "cache"))
    words = ["prefill", "demo", "--rows", str(rows), "--dir", str(tmp_path / "s"), "--json"]
    done = CliRunner().invoke(bench, words)
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert len(found) == 2
    for cost in found.values():
        assert cost["expert_visits"] == cost["unique_experts"] > 0
        assert cost["excess"] == 1.0
        assert cost["passes"] == 1
        assert cost["spine_visits"] == cost["layers"] + 1


@pytest.mark.usefixtures("small")
def test_fullsize_prints_a_line_a_token(tmp_path, monkeypatch):
    monkeypatch.setenv("DELTAFIN_CACHE", str(tmp_path / "cache"))
    done = CliRunner().invoke(bench, ["fullsize", "--tokens", "2"])
    assert done.exit_code == 0, done.output
    first, memory, head, *tokens, last, plan = done.stdout.splitlines()
    assert first.startswith(f"k3-stand-in in {tmp_path / 'cache' / 'stand-in'}: 140 spans in ")
    assert "layers, the head among them, resident" in memory and "spine released" in memory
    assert head.split()[:5] == ["token", "s", "limit", "ratio", "experts"]
    assert len(tokens) == 4, "each with a line of causes"
    assert "waiting: spine" in tokens[1] and "computing: attention" in tokens[1]
    assert last.startswith("peak memory ")
    assert plan.startswith("plan     none")


def test_every_measurement_has_help_with_an_example():
    for command in bench.commands.values():
        assert "Example: df-bench" in (command.help or "")
        assert all(isinstance(p, click.Argument) or p.help for p in command.params), (
            "arguments are explained in the text"
        )


@pytest.mark.usefixtures("small")
def test_batch_counts_what_passes_of_several_sequences_read(tmp_path):
    words = ["batch", "--dir", str(tmp_path / "s"), "--sequences", "8,1,3", "--rounds", "2", "--json"]
    done = CliRunner().invoke(bench, words)
    assert done.exit_code == 0, done.output
    spines = json.loads(done.stdout)["spines"]
    assert list(spines) == ["streamed", "resident"]
    for spine, costs in spines.items():
        assert [cost["sequences"] for cost in costs] == [1, 3, 8]
        for cost in costs:
            assert len(cost["passes"]) == 2 and cost["walls_s"] == sorted(cost["walls_s"])
            for one in cost["passes"]:
                assert one["expert_nbytes"] == sum(one["unions"]) * 3264
                assert len(one["unions"]) == 8
                assert (one["spine_nbytes"] > 2 * 128 * one["sequences"]) == (spine == "streamed")
            assert 4 <= cost["union"] <= min(4 * cost["sequences"], 16)
        assert costs[0]["union"] == costs[0]["uniform_union"] == 4


@pytest.mark.usefixtures("small")
def test_batch_prints_a_line_for_each_number_of_sequences(tmp_path):
    words = ["batch", "--dir", str(tmp_path / "s"), "--sequences", "1,4", "--rounds", "1"]
    done = CliRunner().invoke(bench, words)
    assert done.exit_code == 0, done.output
    lines = done.stdout.splitlines()
    for spine in ("streamed", "resident"):
        [at] = [n for n, line in enumerate(lines) if line.startswith(f"spine {spine}, ")]
        assert lines[at + 1].split()[0] == "sequences"
        assert [line.split()[0] for line in lines[at + 2 : at + 4]] == ["1", "4"]
        assert "waiting: spine" in lines[at + 5]


@pytest.mark.usefixtures("small")
def test_batch_leaves_out_what_does_not_fit_into_memory_and_says_so(tmp_path, monkeypatch):
    words = ["batch", "--dir", str(tmp_path / "s"), "--sequences", "2", "--rounds", "1"]
    monkeypatch.setattr("deltafin.cli.bench_batch._fits", lambda plan: len(plan.resident) < plan.spine_layers)
    done = CliRunner().invoke(bench, words)
    assert done.exit_code == 0 and "only the streamed one is measured" in done.stderr
    assert "spine streamed" in done.stdout and "spine resident" not in done.stdout
    monkeypatch.setattr("deltafin.cli.bench_batch._fits", lambda plan: False)
    done = CliRunner().invoke(bench, words)
    assert isinstance(done.exception, NoMemory) and "give fewer --sequences or --layers" in str(done.exception)


@pytest.mark.parametrize("numbers", ["", "0", "1,,2", "1,x", "-1", "10000"])
def test_batch_refuses_numbers_that_are_none(numbers):
    done = CliRunner().invoke(bench, ["batch", "--sequences", numbers])
    assert done.exit_code == 2 and "expected numbers from 1 to 9999" in done.stderr
