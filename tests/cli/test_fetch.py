"""df-fetch: what the selections mean, what is printed, and what is refused."""

from __future__ import annotations

import json
import os
import random
import shutil

import pytest

from deltafin.store import all_items, expert_items, open_store, rest_items
from deltafin.store.fetcher import WORKERS

EXPERT = 3264  # bytes of an expert of tiny
REPO = "org/tiny"


@pytest.fixture
def indexed(hub, tiny_dir, tmp_path, index_only):
    """tiny on a hub, indexed, nothing fetched."""
    server = hub(tiny_dir)
    index_only(tmp_path / "cache", REPO)
    server.set_mode("ok")
    return server


@pytest.fixture
def here(tmp_path):
    """`here()`: the (layer, expert) pairs in the cache now."""

    def pairs() -> set[tuple[int, int]]:
        with open_store(REPO, cache_dir=tmp_path / "cache", offline=True) as store:
            items = expert_items(store.catalog, range(1, 9), range(16))
            return {(i.layer, i.expert) for i in items if store.is_local(i.span)}

    return pairs


def _one_line(done, status: int = 1) -> str:
    assert (done.status, done.out) == (status, "")
    assert done.err.endswith("\n") and done.err.count("\n") == 1
    return done.err


def _check_order(found: list, expected: list) -> None:
    """The order, but for those that several workers ask for at the same time."""
    place = {item: number for number, item in enumerate(expected)}
    assert max(abs(place[item] - number) for number, item in enumerate(found)) < 2 * WORKERS


# ---- warm -----------------------------------------------------------------------------------------------


def test_warm_fetches_the_experts_of_the_layers_and_numbers_given(df, indexed, here):
    done = df("df-fetch", "warm", REPO, "--layers", "2-3,5", "--experts", "0,14-15")
    assert (done.status, done.err) == (0, "")
    assert done.out == "fetched 9 spans, 29.4 KB; 0 spans, 0 B were here already\n"
    assert here() == {(layer, expert) for layer in (2, 3, 5) for expert in (0, 14, 15)}
    assert indexed.stats()["requests"] == 9


def test_warm_fetches_only_what_is_not_here_yet(df, indexed, here):
    df("df-fetch", "warm", REPO, "--layers", "2", "--experts", "3-6")
    done = df("df-fetch", "warm", REPO, "--layers", "2", "--experts", "5-9")
    assert done.out == "fetched 3 spans, 9.79 KB; 2 spans, 6.53 KB were here already\n"
    assert here() == {(2, expert) for expert in range(3, 10)}
    done = df("df-fetch", "warm", REPO, "--layers", "2", "--experts", "5-9", "--offline")
    assert done.status == 0, "nothing is missing"
    assert indexed.stats()["requests"] == 7


def test_a_selection_left_out_means_all_of_that_kind(df, indexed, here):
    df("df-fetch", "warm", REPO, "--layers", "8")
    assert here() == {(8, expert) for expert in range(16)}
    df("df-fetch", "warm", REPO, "--experts", "1")
    assert here() == {(8, expert) for expert in range(16)} | {(layer, 1) for layer in range(1, 9)}
    df("df-fetch", "warm", REPO)
    assert len(here()) == 128


MALFORMED = ["", " ", ",", "1,", "1-", "-1", "1--2", "a", "1 2", "1.5", "1-2-3", "0x1"]


@pytest.mark.parametrize("option", ["--layers", "--experts"])
@pytest.mark.parametrize("text", MALFORMED)
def test_a_malformed_selection_is_wrong_usage_and_fetches_nothing(df, indexed, option, text):
    line = _one_line(df("df-fetch", "warm", REPO, f"{option}={text}"), 2)
    assert line.startswith(f"df-fetch: {option} {text!r}: expected numbers and ranges like 1-5,9")
    assert indexed.stats()["requests"] == 0


@pytest.mark.parametrize(
    ("option", "text", "complaint"),
    [
        ("--layers", "0", "this model has 1 to 8"),
        ("--layers", "9", "this model has 1 to 8"),
        ("--layers", "7-99", "this model has 1 to 8"),
        ("--experts", "16", "this model has 0 to 15"),
        ("--layers", "5-2", "5-2 runs backwards"),
    ],
)
def test_a_selection_that_the_model_does_not_have_is_wrong_usage(df, indexed, option, text, complaint):
    assert complaint in _one_line(df("df-fetch", "warm", REPO, option, text), 2)
    assert indexed.stats()["requests"] == 0


@pytest.mark.parametrize(
    ("limit", "fetched"),
    [("0", 0), ("3263", 0), ("3264", 1), ("10KB", 3), ("9.792KB", 3), ("9.6KiB", 3), ("16kib", 5), ("1TB", 16)],
)
def test_no_more_is_fetched_than_a_limit_allows(df, indexed, here, limit, fetched):
    done = df("df-fetch", "warm", REPO, "--layers", "4", "--bytes", limit)
    assert done.status == 0
    assert len(here()) == fetched


def test_a_limit_counts_only_what_is_missing_so_that_a_second_run_goes_on(df, indexed, here):
    for expected in (3, 6, 9):
        df("df-fetch", "warm", REPO, "--layers", "4", "--bytes", "10KB")
        assert here() == {(4, expert) for expert in range(expected)}


@pytest.mark.parametrize("limit", ["", "x", "-1", "1 000", "10XB", "1e9", "KB", "1,5GB", "9" * 400, "10MBit"])
def test_a_limit_that_is_no_size_is_wrong_usage(df, indexed, limit):
    done = df("df-fetch", "warm", REPO, f"--bytes={limit}")
    assert done.status == 2
    assert "--bytes" in done.err and "Traceback" not in done.err
    assert indexed.stats()["requests"] == 0


# ---- warm by a trace ------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def trace(tmp_path_factory, open_model, tiny_dir, golden):
    """A trace of five tokens, and how often it used each (layer, expert)."""
    import numpy as np

    from deltafin.runtime import Segment, TraceWriter, expert_uses

    path = tmp_path_factory.mktemp("trace") / "trace"
    with open_model(tiny_dir) as model:
        with TraceWriter(path, model.store.catalog) as writer:
            ids = np.load(golden / "tiny" / "golden.npz")["p2_ids"]
            model.forward([Segment(model.sequence(), ids)], logits="none", observer=writer)
        return path, expert_uses(path, model.config)


def test_a_trace_brings_the_experts_it_used_the_most_used_first(df, indexed, here, trace):
    path, uses = trace
    ranked = sorted(uses, key=lambda pair: (-uses[pair], pair))
    for count in (5, 10):
        df("df-fetch", "warm", REPO, "--trace", path, "--bytes", 5 * EXPERT)
        assert here() == set(ranked[:count])
    done = df("df-fetch", "warm", REPO, "--trace", path)
    assert here() == set(ranked)
    assert done.out.startswith(f"fetched {len(ranked) - 10} spans")


def test_a_trace_is_narrowed_by_layers_and_experts(df, indexed, here, trace):
    path, uses = trace
    df("df-fetch", "warm", REPO, "--trace", path, "--layers", "2-3", "--experts", "0-7")
    assert here() == {(layer, expert) for layer, expert in uses if layer in (2, 3) and expert < 8}


def test_a_large_fetch_by_a_trace_keeps_the_most_used_first(df, indexed, trace, monkeypatch, ranges, tmp_path):
    """Also when the line is measured before it is asked for consent: an interrupted fetch must have the best part."""
    path, uses = trace
    monkeypatch.setattr("deltafin.cli.options.ASK_ABOVE_NBYTES", 1000)
    monkeypatch.setattr("deltafin.store.bulk._PROBE_NBYTES", 1)  # one span for each worker
    assert df("df-fetch", "warm", REPO, "--trace", path).status == 2
    measured = len(ranges(indexed))
    assert 0 < measured < 20
    assert df("df-fetch", "warm", REPO, "--trace", path, tty=True, stdin=b"y\n").status == 0
    with open_store(REPO, cache_dir=tmp_path / "cache", offline=True) as store:
        shards = store.catalog.shards
        where = {}
        for item in expert_items(store.catalog, range(1, 9), range(16)):
            where[shards[item.span.shard].name, item.span.offset, item.span.nbytes] = (item.layer, item.expert)
    order = [where[span] for span in ranges(indexed)]
    ranked = sorted(uses, key=lambda pair: (-uses[pair], pair))
    assert sorted(order) == sorted(ranked)
    _check_order(order, ranked)


def test_a_trace_of_another_model_or_no_trace_at_all_is_wrong_usage(df, full_demo, trace, tmp_path):
    path, _ = trace
    assert "of a model with 8 MoE layers" in _one_line(df("df-fetch", "warm", "org/demo", "--trace", path), 2)
    assert "cannot be read" in _one_line(df("df-fetch", "warm", "org/demo", "--trace", tmp_path / "none"), 2)
    (tmp_path / "text").write_text("no trace")
    assert "not a trace" in _one_line(df("df-fetch", "warm", "org/demo", "--trace", tmp_path / "text"), 2)


# ---- spine and all --------------------------------------------------------------------------------------


def test_spine_and_warm_and_all_together_fetch_everything_once(df, indexed, ranges, tmp_path):
    assert df("df-fetch", "spine", REPO).out.startswith("fetched 12 spans, 2.27 MB; 0 spans")
    assert df("df-fetch", "warm", REPO, "--layers", "1").out.startswith("fetched 16 spans")
    done = df("df-fetch", "all", REPO)
    assert done.out.startswith("fetched 126 spans") and "28 spans" in done.out
    assert df("df-fetch", "all", REPO).out.startswith("fetched 0 spans, 0 B; 154 spans")
    counts = ranges(indexed)
    with open_store(REPO, cache_dir=tmp_path / "cache", offline=True) as store:
        spans = [item.span for item in all_items(store.catalog) + rest_items(store.catalog)]
        assert counts == {(store.catalog.shards[s.shard].name, s.offset, s.nbytes): 1 for s in spans}


def test_all_goes_through_the_shards_in_file_order(df, indexed, ranges):
    df("df-fetch", "all", REPO)
    asked = list(ranges(indexed))
    assert len(asked) == 154
    _check_order(asked, sorted(asked))


def test_a_model_in_a_local_directory_needs_no_fetching(df, tiny_dir):
    done = df("df-fetch", "all", tiny_dir)
    assert (done.status, done.err) == (0, "")
    assert done.out == "fetched 0 spans, 0 B; 140 spans, 2.69 MB were here already\n"


def test_a_model_that_is_not_indexed_is_indexed_first(df, hub, tiny_dir, tmp_path, here):
    hub(tiny_dir)
    assert df("df-fetch", "warm", REPO, "--layers", "1", "--experts", "0").status == 0
    assert here() == {(1, 0)}


def test_a_revision_is_another_catalog(df, hub, tiny_dir, tmp_path):
    hub(tiny_dir)
    one = ["--layers", "1", "--experts", "0"]
    assert df("df-fetch", "warm", f"{REPO}@main", *one).out.startswith("fetched 1 spans")
    assert df("df-fetch", "warm", REPO, "--revision", "main", *one).out.startswith("fetched 0 spans")
    assert [p.name for p in (tmp_path / "cache/catalogs").glob("*.catalog")] == ["org--tiny@main.catalog"]
    assert "two revisions" in _one_line(df("df-fetch", "all", f"{REPO}@main", "--revision", "v1"), 2)


def test_offline_what_is_missing_is_one_line_with_its_size(df, indexed):
    line = _one_line(df("df-fetch", "all", REPO, "--offline"))
    assert "154 spans (2,874,040 bytes) are not on this machine" in line and "--offline" in line
    assert indexed.stats()["requests"] == 0


def test_a_server_that_says_no_is_one_line_that_names_the_file(df, indexed):
    indexed.set_mode("gone_404", path="model-00004*")
    line = _one_line(df("df-fetch", "all", REPO))
    assert "model-00004-of-000012.safetensors from 127.0.0.1: no such file on the server (status 404)" in line
    assert "Traceback" not in line


@pytest.mark.parametrize(
    ("mode", "args"),
    [("truncate", {"times": 3}), ("reset_midway", {"times": 3}), ("short_206", {"times": 5}), ("503_burst", {})],
)
def test_a_server_that_stumbles_is_not_even_mentioned(df, indexed, here, mode, args):
    indexed.set_mode(mode, **args)
    done = df("df-fetch", "warm", REPO, "--layers", "3-4")
    assert (done.status, done.err) == (0, "")
    assert len(here()) == 32


def test_more_words_say_what_is_going_on(df, indexed):
    indexed.set_mode("truncate", times=1, keep=0)
    done = df("df-fetch", "warm", REPO, "--layers", "3", "-v")
    assert done.status == 0
    assert "df-fetch: info: model-00004-of-000012.safetensors: the connection broke off; trying again" in done.err


def test_a_server_that_asks_to_wait_is_mentioned(df, indexed):
    indexed.set_mode("429_retry_after", seconds=1, times=1)
    done = df("df-fetch", "warm", REPO, "--layers", "3")
    assert done.status == 0
    assert done.err == "df-fetch: warning: the server asks to wait 1 s (status 429)\n"


# ---- status ---------------------------------------------------------------------------------------------


def test_status_says_how_much_is_here_and_asks_nobody(df, indexed, tmp_path):
    df("df-fetch", "warm", REPO, "--layers", "2")
    df("df-fetch", "spine", REPO)
    indexed.set_mode("ok")
    status = df("df-fetch", "status", REPO, "--json").json
    assert status["free_nbytes"] == pytest.approx(shutil.disk_usage(tmp_path).free, rel=0.1)
    del status["free_nbytes"]
    (root,) = status.pop("roots")
    assert (root["path"], root["objects"], root["budget"]) == (str(tmp_path / "cache"), 28, None)
    assert root["nbytes"] == 2_273_248 + 16 * EXPERT
    assert root["writable"] and 0 < root["room"] <= root["free_nbytes"]
    assert (status.pop("pinned_experts"), status.pop("states"), status.pop("states_nbytes")) == (0, 0, 0)
    assert status == {
        "model": REPO,
        "identity": f"{REPO}@{'a' * 12}",
        "spine_nbytes": 2_273_248,
        "spine_present_nbytes": 2_273_248,
        "experts": 128,
        "experts_present": 16,
        "expert_nbytes": EXPERT,
        "layers_whole": 2,
        "layers": 9,
        "cache_dir": str(tmp_path / "cache"),
        "cache_objects": 28,
        "cache_nbytes": 2_273_248 + 16 * EXPERT,
        "proven_spans": 0,
        "proven_nbytes": 0,
        "unproven_spans": 28,
        "unproven_nbytes": 2_273_248 + 16 * EXPERT,
        "last_verify": None,
        "shard_directories": [],
        "packs": [],
    }
    assert indexed.stats()["requests"] == 0


def test_status_in_words_has_the_same_numbers(df, indexed, tmp_path):
    df("df-fetch", "warm", REPO, "--layers", "2")
    out = df("df-fetch", "status", REPO).out
    assert f"{REPO} ({REPO}@{'a' * 12})" in out
    assert "spine    0 B of 2.27 MB" in out
    assert "experts  16 of 128 (52.2 KB of 418 KB)" in out
    assert "layers   0 of 9 whole" in out
    assert f"cache    16 objects, 52.2 KB in {tmp_path / 'cache'}" in out


def test_status_of_the_demo_finds_it_in_place(df, demo_dir):
    status = df("df-fetch", "status", "demo", "--json").json
    assert (status["experts_present"], status["layers_whole"]) == (status["experts"], status["layers"])
    assert status["shard_directories"] == [str(demo_dir)]
    assert "shards   in place in" in df("df-fetch", "status", "demo").out


def test_status_counts_what_lies_in_other_roots(df, full_tiny, tmp_path, index_only):
    index_only(tmp_path / "new", REPO)
    status = df("df-fetch", "status", REPO, "--json", "--root", tmp_path / "cache", cache=tmp_path / "new").json
    assert (status["experts_present"], status["cache_objects"]) == (128, 0)


@pytest.mark.parametrize("command", ["status", "verify", "rm"])
def test_looking_at_a_model_that_is_not_indexed_asks_nobody_and_says_what_to_run(df, hub, tiny_dir, command):
    server = hub(tiny_dir)
    line = _one_line(df("df-fetch", command, REPO, *(["--all"] if command == "rm" else [])))
    assert f"df-index build {REPO}" in line
    assert server.state.log == []


# ---- verify ---------------------------------------------------------------------------------------------


def test_verify_of_a_whole_cache_succeeds_in_words_and_numbers(df, full_tiny):
    done = df("df-fetch", "verify", REPO)
    assert (done.status, done.out, done.err) == (0, "140 whole (2.69 MB), 0 damaged\n", "")
    assert df("df-fetch", "verify", REPO, "--json").json == {
        "whole": 140, "whole_nbytes": 2_691_040, "damaged": [], "vanished": 0, "unknown": 0, "bad_records": 0,
        "mode": "full", "proven_shards": 0, "unproven_shards": 0, "packs": 0, "packs_nbytes": 0,
    }  # fmt: skip
    assert full_tiny.state.log == []


def test_verify_fails_and_names_exactly_the_flipped_ones_and_a_fetch_repairs_them(df, full_tiny, tmp_path):
    objects = sorted((tmp_path / "cache" / "objects").rglob("*/*"))
    flipped = random.Random(3).sample(objects, 10)
    for path in flipped:
        data = bytearray(path.read_bytes())
        data[random.Random(str(path)).randrange(len(data))] ^= 1 << 3
        path.write_bytes(data)
    done = df("df-fetch", "verify", REPO)
    assert (done.status, done.err) == (1, "")
    lines = done.out.splitlines()
    assert lines[-1].startswith("130 whole") and lines[-1].endswith("10 damaged")
    named = [line for line in lines if line.startswith("damaged: ")]
    assert len(named) == 10
    assert {str(path) for path in flipped} == {line.split(": ")[1] for line in named}

    done = df("df-fetch", "verify", REPO)
    assert done.status == 0 and "10 objects on record are gone; they are fetched when needed" in done.out
    assert df("df-fetch", "all", REPO).out.startswith("fetched 24 spans")  # the shards' headers and vision parts too
    assert df("df-fetch", "verify", REPO, "--json").json["whole"] == 154


def test_verify_as_json_has_status_one_and_the_names(df, full_tiny, tmp_path):
    path = next((tmp_path / "cache" / "objects").rglob("*/*"))
    os.truncate(path, 1)
    done = df("df-fetch", "verify", REPO, "--json")
    assert done.status == 1
    (line,) = done.json["damaged"]
    assert str(path) in line
    assert json.loads(done.out)["whole"] == 139


# ---- rm -------------------------------------------------------------------------------------------------


def test_rm_removes_what_is_named_and_says_how_much(df, full_tiny, here):
    done = df("df-fetch", "rm", REPO, "--layers", "3", "--experts", "0-7")
    assert (done.status, done.out, done.err) == (0, f"removed 8 objects, {8 * EXPERT / 1000:.3g} KB\n", "")
    assert {(layer, e) for layer in range(1, 9) for e in range(16)} - here() == {(3, e) for e in range(8)}
    assert df("df-fetch", "rm", REPO, "--layers", "3", "--experts", "0-7").out == "removed 0 objects, 0 B\n"


def test_rm_of_the_spine_leaves_the_experts_unless_they_are_named_too(df, full_tiny, here):
    assert df("df-fetch", "rm", REPO, "--spine").out == "removed 12 objects, 2.27 MB\n"
    assert len(here()) == 128
    assert df("df-fetch", "rm", REPO, "--spine", "--experts", "2").out.startswith("removed 8 objects")


def test_rm_of_everything_leaves_the_catalog(df, full_tiny, tmp_path):
    assert df("df-fetch", "rm", REPO, "--all").out == "removed 140 objects, 2.69 MB\n"
    assert df("df-fetch", "status", REPO, "--json").json["cache_nbytes"] == 0


def test_rm_of_one_model_leaves_another(df, full_tiny, tmp_path, hub, demo_dir):
    hub(demo_dir)
    df("df-fetch", "warm", "org/demo", "--layers", "1", "--experts", "0-3")
    df("df-fetch", "rm", REPO, "--all")
    status = df("df-fetch", "status", "org/demo", "--json").json
    assert (status["experts_present"], status["cache_objects"]) == (4, 4)


def test_rm_never_touches_original_shards(df, tmp_path, tiny_dir):
    shutil.copytree(tiny_dir, tmp_path / "model")
    before = {p.name: p.stat().st_mtime_ns for p in (tmp_path / "model").iterdir()}
    assert df("df-fetch", "rm", tmp_path / "model", "--all").out == "removed 0 objects, 0 B\n"
    assert {p.name: p.stat().st_mtime_ns for p in (tmp_path / "model").iterdir()} == before


@pytest.mark.parametrize("args", [[], ["--layers="], ["--experts="], ["--all", "--spine"], ["--all", "--layers", "1"]])
def test_rm_that_does_not_say_what_or_says_too_much_is_wrong_usage(df, full_tiny, here, args):
    _one_line(df("df-fetch", "rm", REPO, *args), 2)
    assert len(here()) == 128


def test_rm_with_an_empty_selection_beside_another_removes_nothing(df, full_tiny, here):
    """`--layers "$UNSET"` must not mean every layer."""
    _one_line(df("df-fetch", "rm", REPO, "--layers=", "--experts", "1"), 2)
    _one_line(df("df-fetch", "rm", REPO, "--layers", "1", "--experts="), 2)
    assert len(here()) == 128


# ---- usage ----------------------------------------------------------------------------------------------


def test_a_root_that_is_no_directory_is_refused(df, full_tiny, tmp_path):
    assert "no such directory" in _one_line(df("df-fetch", "status", REPO, "--root", tmp_path / "nowhere"))


def test_a_cache_that_is_a_file_is_refused_without_a_traceback(df, tmp_path):
    (tmp_path / "file").write_text("")
    done = df("df-fetch", "status", "demo", "--cache-dir", tmp_path / "file")
    assert done.status == 2 and "--cache-dir" in done.err
    done = df("df-fetch", "status", "demo", cache=tmp_path / "file")
    assert done.status == 2 and done.err.count("\n") == 1 and str(tmp_path / "file") in done.err


def test_what_is_no_model_is_one_line_with_what_there_is(df, full_tiny):
    line = _one_line(df("df-fetch", "status", "nonsense"))
    assert "nonsense: no such directory or catalog" in line and "org--tiny" in line
