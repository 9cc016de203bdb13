"""df-bench."""

from __future__ import annotations

import json

import click
import pytest
from click.testing import CliRunner

from deltafin.cli.bench import bench
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
