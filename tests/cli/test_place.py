"""df-fetch place, pin, unpin and evict, roots with budgets, and heat that runs leave."""

from __future__ import annotations

import json
import re
import shutil
import signal

import pytest

from deltafin.store import open_store

REPO = "org/tiny"
EXPERT = 3264


@pytest.fixture
def full_tiny(tiny_cache, tmp_path, monkeypatch):
    """A cache that holds all of tiny; nobody is asked."""
    shutil.copytree(tiny_cache, tmp_path / "cache")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    return tmp_path / "cache"


def _run(df, *args):
    return df("df-run", REPO, "--prompt-ids", "5 17 200", "--max-new", "3", "--ids", *args)


def test_runs_leave_heat_and_place_follows_it(df, full_tiny, tmp_path):
    assert _run(df).status == 0
    (tmp_path / "second").mkdir()
    root = f"{tmp_path / 'second'},write,budget=40KB,reserve=0"
    plan = df("df-fetch", "place", REPO, "--root", root, "--json").json
    assert plan["heat_known"] and not plan["applied"] and plan["after_s"] < plan["before_s"]
    assert 0 < plan["nbytes"] <= 40_000
    shown = df("df-fetch", "place", REPO, "--root", root, "--dry-run")
    assert "nothing was copied; add --yes" in shown.out and not list((tmp_path / "second").iterdir())
    done = df("df-fetch", "place", REPO, "--root", root, "--yes")
    assert done.status == 0 and f"copied {len(plan['copies'])} experts" in done.out
    assert df("df-fetch", "verify", REPO, "--root", str(tmp_path / "second")).status == 0
    status = df("df-fetch", "status", REPO, "--root", root).out
    assert re.search(rf"root     \d+ objects, \S+ KB of at most 40 KB in {tmp_path / 'second'}, room for ", status)


def test_a_run_that_is_interrupted_leaves_its_heat(full_tiny, start_run):
    process = start_run("df-run", REPO, "--prompt-ids", "5 17 200", "--max-new", "100000", "--ids")
    process.stdout.read(8)
    process.send_signal(signal.SIGINT)
    assert process.wait(30) == 130
    with open_store(REPO, cache_dir=full_tiny, offline=True) as store:
        assert store.heat.read().sum() > 0


@pytest.fixture
def start_run(tmp_path):
    import os
    import subprocess
    import sys
    from pathlib import Path

    running = []

    def begin(name, *args):
        env = {**os.environ, "DELTAFIN_CACHE": str(tmp_path / "cache")}
        words = [str(Path(sys.executable).with_name(name)), *args]
        running.append(subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=env))
        return running[-1]

    yield begin
    for process in running:
        process.kill()
        process.communicate()


def test_pins_are_made_shown_and_taken_back(df, full_tiny):
    assert df("df-fetch", "pin", REPO, "--layers", "1-2", "--experts", "0-3").out == (
        "pinned 8 experts; 8 are pinned now\n"
    )
    assert "pinned   8 experts" in df("df-fetch", "status", REPO).out
    assert df("df-fetch", "unpin", REPO, "--layers", "2").out == "unpinned 4 experts; 4 are pinned now\n"
    assert df("df-fetch", "unpin", REPO, "--all").out == "unpinned 4 experts; 0 are pinned now\n"


def test_the_hottest_and_those_of_a_trace_can_be_pinned(df, full_tiny, tmp_path):
    trace = tmp_path / "t.trace"
    shutil.rmtree(tmp_path / "cache" / "heat", ignore_errors=True)  # of other tests' runs
    assert "has left any heat yet" in df("df-fetch", "pin", REPO, "--hottest", "5").err
    _run(df, "--trace", trace)
    assert df("df-fetch", "pin", REPO, "--hottest", "5").out.startswith("pinned 5 experts")
    assert df("df-fetch", "pin", REPO, "--trace", trace).status == 0
    assert json.loads(df("df-fetch", "status", REPO, "--json").out)["pinned_experts"] > 5


@pytest.mark.parametrize(
    "args",
    [
        ("pin", REPO),
        ("pin", REPO, "--hottest", "3", "--layers", "1"),
        ("unpin", REPO, "--all", "--layers", "1"),
        ("evict", REPO),
        ("place", REPO, "--dry-run", "--yes"),
    ],
)
def test_what_says_too_little_or_too_much_is_wrong_usage(df, full_tiny, args):
    assert df("df-fetch", *args).status == 2


def test_evicting_takes_the_coldest_and_never_what_is_pinned(df, full_tiny):
    _run(df)
    df("df-fetch", "pin", REPO, "--layers", "1")
    before = df("df-fetch", "status", REPO, "--json").json
    most = before["cache_nbytes"] - 10 * EXPERT
    assert df("df-fetch", "evict", REPO, "--to", most, "--dry-run").out.startswith("would evict 10 experts, 32.6 KB")
    assert df("df-fetch", "status", REPO, "--json").json["experts_present"] == 128
    assert df("df-fetch", "evict", REPO, "--to", most).out.startswith("evicted 10 experts")
    after = df("df-fetch", "status", REPO, "--json").json
    assert (after["experts_present"], after["cache_nbytes"]) == (118, most)
    refused = df("df-fetch", "evict", REPO, "--to", "1KB")
    assert refused.status == 2 and "that is the least for --to" in refused.err
    assert df("df-fetch", "status", REPO, "--json").json["experts_present"] == 118
    with open_store(REPO, cache_dir=full_tiny, offline=True) as store:
        spans = store.catalog.expert_spans(1, range(16))
        assert all(store.is_local(span) for span in spans)


def test_a_mistake_in_the_configuration_is_one_line(df, full_tiny, tmp_path, monkeypatch):
    config = tmp_path / "config.toml"
    config.write_text(f"[[root]]\npath = '{tmp_path}/none'\n")
    monkeypatch.setenv("DELTAFIN_CONFIG", str(config))
    done = df("df-fetch", "status", REPO)
    assert (done.status, done.out) == (1, "")
    assert done.err == f"df-fetch: {config}: [[root]] number 1: path {tmp_path}/none: no such directory\n"
    config.write_text("[[root]]\npath = '/'\nbugdet = 3\n")
    done = df("df-run", REPO, "--prompt-ids", "1")
    assert done.status == 2 and done.err.count("\n") == 1 and "unknown key 'bugdet'" in done.err
