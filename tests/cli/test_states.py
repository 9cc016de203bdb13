"""df-fetch and saved states: what is shown, what is removed, what is left alone."""

from __future__ import annotations

import os
import shutil

import pytest

import deltafin
from deltafin.runtime.states import PrefixStore, load_state, save_state
from deltafin.store import Store

REPO = "org/tiny"


@pytest.fixture
def kept(full_tiny, demo_dir, tmp_path):
    """Two states of org/tiny in the command's cache and one of the demo; their files, the demo's last."""
    for model, prompts in ((REPO, ([1, 2, 3], [4, 5])), (demo_dir, ([6, 7],))):
        with deltafin.open(model, cache_dir=tmp_path / "cache", offline=True) as opened:
            for ids in prompts:
                seq = opened.sequence()
                opened.forward([deltafin.Segment(seq, ids)], logits="none")
                assert PrefixStore(1 << 30).keep(opened, seq)
            folder = next((tmp_path / "cache" / "states").glob("*/*")).parent
            if model == REPO:
                ours = sorted(folder.rglob("*.state"))
    every = sorted((tmp_path / "cache" / "states").rglob("*.state"))
    return [*ours, *(path for path in every if path not in ours)]


def test_status_shows_how_much_saved_states_of_the_model_take(df, full_tiny, kept):
    nbytes = sum(path.stat().st_size for path in kept[:2])
    status = df("df-fetch", "status", REPO, "--json").json
    assert (status["states"], status["states_nbytes"]) == (2, nbytes)
    (line,) = [line for line in df("df-fetch", "status", REPO).out.splitlines() if "states" in line]
    assert line.startswith("  states   2 kept, ")
    for path in kept:
        path.unlink()
    assert df("df-fetch", "status", REPO, "--json").json["states"] == 0
    assert "states" not in df("df-fetch", "status", REPO).out


def test_rm_removes_the_states_of_one_model_and_nothing_else(df, kept, tmp_path):
    notes = kept[0].parent / "notes.txt"
    notes.write_text("mine")
    outside = tmp_path / "outside"
    outside.mkdir()
    shutil.copy(kept[0], outside)
    kept[0].parent.with_name("f" * 32).symlink_to(outside)
    done = df("df-fetch", "rm", REPO, "--states")
    assert done.status == 0 and done.out.startswith("removed 2 states, ")
    assert [path.exists() for path in kept] == [False, False, True]
    assert notes.exists() and os.listdir(outside) == [kept[0].name]
    assert df("df-fetch", "rm", REPO, "--states").out == "removed 0 states, 0 B\n"
    assert df("df-fetch", "status", REPO, "--json").json["cache_objects"] == 140


def test_rm_of_all_removes_states_too_and_their_folders(df, kept, tmp_path):
    assert "140 objects, 2.69 MB, 2 states, " in df("df-fetch", "rm", REPO, "--all").out
    assert [path.exists() for path in kept] == [False, False, True]
    assert len(os.listdir(tmp_path / "cache" / "states")) == 1


def test_rm_of_many_states_asks(df, kept, monkeypatch):
    monkeypatch.setattr("deltafin.cli.fetch.ASK_ABOVE_NBYTES", 1000)
    done = df("df-fetch", "rm", REPO, "--states")
    assert done.status == 2 and "2 states, " in done.err and "will be removed. Add --yes" in done.err
    assert all(path.exists() for path in kept)


@pytest.mark.parametrize("args", [["--spine"], ["--all"], ["--packs", "bf12"], ["--layers", "1"]])
def test_rm_of_states_and_something_else_is_wrong_usage(df, full_tiny, args):
    done = df("df-fetch", "rm", REPO, "--states", *args)
    assert done.status == 2 and done.err.count("\n") == 1


def test_a_state_is_one_of_the_repository_wherever_its_bytes_come_from(full_tiny, tmp_path, tiny_dir):
    """Published digests name the shards: a state made while streaming fits the run from another cache."""
    one, two = tmp_path / "cache", tmp_path / "two"
    with deltafin.open(REPO, cache_dir=one) as model:
        seq = model.sequence()
        model.forward([deltafin.Segment(seq, [1, 2, 3])], logits="none")
        save_state(tmp_path / "a.state", model, seq)
        expected = model.forward([deltafin.Segment(seq, [4, 5])])
    shutil.copytree(one, two)
    with deltafin.open(REPO, cache_dir=two, roots=[tiny_dir]) as model:
        assert isinstance(model.store, Store)
        found = model.forward([deltafin.Segment(load_state(tmp_path / "a.state", model).seq, [4, 5])])
        assert found.tobytes() == expected.tobytes()
