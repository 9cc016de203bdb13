"""Ctrl-C, a reader that leaves, and kills: what was finished is kept, and nobody sees a traceback."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from deltafin.store import all_items, open_store, rest_items
from deltafin.store.parallelism import MOST

REPO = "org/demo"
STORY = ["--prompt", "Once upon a time there was a little fox", "--max-new", "60"]


def _finish(process, timeout: float = 60.0) -> tuple[int, bytes, bytes]:
    out, err = process.communicate(timeout=timeout)
    return process.returncode, out, err


# ---- while generating -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def story(golden) -> bytes:
    cases = json.loads((golden / "demo.json").read_text())["cases"]
    return next(case["text"] for case in cases if case["name"] == "raw story").encode()


def test_ctrl_c_while_generating_leaves_what_was_said_and_a_newline(start, story):
    process = start("df-run", "demo", *STORY)
    first = process.stdout.read(12)
    process.send_signal(signal.SIGINT)
    status, rest, err = _finish(process)
    assert status == 130
    out = first + rest
    assert out.endswith(b"\n") and story.startswith(out[:-1])
    assert err.lstrip(b"\n") == b"df-run: interrupted; what was finished is kept\n"


def test_ctrl_c_before_the_first_token_prints_nothing(start, hub, demo_dir, tmp_path, index_only, until, df):
    server = hub(demo_dir)
    index_only(tmp_path / "cache", REPO)
    assert df("df-fetch", "spine", REPO).status == 0
    server.set_mode("slow_drip", bytes=4096, every=0.2)
    process = start("df-run", REPO, *STORY)
    until(lambda: len(server.state.log) > 10)
    process.send_signal(signal.SIGINT)
    started = time.monotonic()
    status, out, err = _finish(process)
    assert time.monotonic() - started < 5
    assert (status, out) == (130, b"")
    assert err.lstrip(b"\n") == b"df-run: interrupted; what was finished is kept\n"
    server.set_mode("ok")
    assert df("df-fetch", "verify", REPO, "--json").json["damaged"] == []


def test_ctrl_c_during_a_trace_leaves_a_trace_of_whole_passes(start, tmp_path):
    from deltafin.runtime import read_trace

    process = start("df-run", "demo", *STORY, "--trace", tmp_path / "trace", "--ids")
    process.stdout.read(12)
    process.send_signal(signal.SIGINT)
    assert _finish(process)[0] == 130
    trace = read_trace(tmp_path / "trace")
    lines = list(trace)
    assert not trace.torn
    assert len(lines) % len(trace.header.moe_layers) == 0 and len(lines) > 0


# ---- while fetching -------------------------------------------------------------------------------------


def _whole(cache, repo) -> set[tuple[str, int, int]]:
    """The spans that are whole in a cache now."""
    with open_store(repo, cache_dir=cache, offline=True) as store:
        return {
            (store.catalog.shards[i.span.shard].name, i.span.offset, i.span.nbytes)
            for i in all_items(store.catalog) + rest_items(store.catalog)
            if store.is_local(i.span)
        }


@pytest.mark.parametrize(
    ("mode", "args"),
    [
        ("slow_drip", {"bytes": 4096, "every": 0.1}),
        ("stall", {"keep": 0.5, "hold": 20, "after": 40}),
        ("stall", {"keep": 0, "hold": 20, "after": 40}),
        ("429_retry_after", {"seconds": 20, "times": 10**6, "after": 40}),
        ("503_burst", {"times": 10**6, "after": 40}),
    ],
    ids=["slow", "silent in the middle", "silent after the header", "asking to wait", "failing"],
)
def test_ctrl_c_while_fetching_ends_at_once_and_a_second_run_goes_on(
    start, hub, tiny_dir, tmp_path, index_only, until, df, ranges, mode, args
):
    repo = "org/tiny"
    server = hub(tiny_dir)
    index_only(tmp_path / "cache", repo)
    server.set_mode(mode, **args)
    process = start("df-fetch", "all", repo)
    until(lambda: len(server.state.log) > 40)
    time.sleep(0.3)
    process.send_signal(signal.SIGINT)
    started = time.monotonic()
    status, out, err = _finish(process)
    took = time.monotonic() - started
    assert (status, out) == (130, b"")
    assert err.endswith(b"\ndf-fetch: interrupted; what was finished is kept\n")
    assert b"Traceback" not in err and took < 4
    assert list((tmp_path / "cache" / "tmp").iterdir()) == []

    whole = _whole(tmp_path / "cache", repo)
    assert whole
    server.set_mode("ok")
    assert df("df-fetch", "verify", repo).status == 0
    assert df("df-fetch", "all", repo).out.startswith(f"fetched {154 - len(whole)} spans")
    assert not whole & ranges(server).keys()


def test_ctrl_c_while_indexing_leaves_no_catalog_and_a_second_run_builds_it(start, hub, tiny_dir, tmp_path, until, df):
    server = hub(tiny_dir, "slow_drip", bytes=1024, every=0.2)
    process = start("df-fetch", "all", "org/tiny")
    until(lambda: any("safetensors" in row["path"] for row in server.state.log))
    time.sleep(0.3)
    process.send_signal(signal.SIGINT)
    status, out, err = _finish(process)
    assert (status, out) == (130, b"")
    assert b"Traceback" not in err and err.endswith(b"interrupted; what was finished is kept\n")
    assert list((tmp_path / "cache").rglob("*.catalog")) == list((tmp_path / "cache").rglob("*.part")) == []
    server.set_mode("ok")
    assert df("df-fetch", "all", "org/tiny").out.startswith("fetched 154 spans")


# ---- a reader that leaves -------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [[], ["--json"]], ids=["text", "json"])
def test_a_reader_that_leaves_ends_df_run_without_a_word(start, options):
    process = start("df-run", "demo", *STORY[:2], "--max-new", "300", *options)
    if options != ["--json"]:
        process.stdout.read(1)
    process.stdout.close()
    err = process.stderr.read()
    assert process.wait(timeout=60) == 1
    assert err == b""


def test_a_reader_that_leaves_ends_df_fetch_without_a_word(start, tmp_path):
    process = start("df-fetch", "status", "demo", "--json")
    process.stdout.close()
    err = process.stderr.read()
    assert process.wait(timeout=60) == 1
    assert err == b""


@pytest.mark.parametrize("args", [["df-run", "demo", *STORY], ["df-fetch", "status", "demo"]], ids=["run", "fetch"])
def test_output_that_finds_no_room_is_one_line(start, args):
    if not Path("/dev/full").exists():
        pytest.skip("there is no /dev/full here")
    with open("/dev/full", "wb") as full:
        process = start(*args, stdout=full)
        err = process.stderr.read()
    assert process.wait(timeout=60) == 1
    assert err == f"{args[0]}: cannot write the output: No space left on device\n".encode()


@pytest.mark.parametrize("stream", [1, 2])
@pytest.mark.parametrize(
    "args",
    [["df-run", "demo", "--prompt", "a", "--max-new", "2"], ["df-fetch", "status", "demo"]],
    ids=["run", "fetch"],
)
def test_a_stream_that_the_caller_closed_is_nobodys_trouble(start, args, stream):
    process = start(*args, preexec_fn=lambda: os.close(stream))
    out, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (0, b"")
    assert bool(out) == (stream == 2)


# ---- kills ----------------------------------------------------------------------------------------------


def _kill_rounds(rounds, repo, cache, server, start, until, ranges, df, most) -> int:
    """Kills `df-fetch all` after 1 to `most` requests, again and again; returns how many spans were asked for."""
    rng, asked, before = random.Random(rounds), 0, set()
    for number in range(rounds):
        server.set_mode(server.state.mode, **server.state.args)  # forgets its log
        process = start("df-fetch", "all", repo)
        enough = rng.randint(1, most)
        until(lambda: len(server.state.log) >= enough or process.poll() is not None)  # noqa: B023
        time.sleep(rng.uniform(0, 0.02))
        assert process.poll() is None, f"round {number}: it had finished before the kill"
        process.kill()
        assert process.wait() == -signal.SIGKILL

        now = ranges(server)
        assert not before & now.keys(), f"round {number}: what was whole was fetched again"
        asked += now.total()
        done = df("df-fetch", "verify", repo, "--json")
        assert done.status == 0, f"round {number}: {done.out}"
        found = done.json
        assert (found["damaged"], found["vanished"]) == ([], 0)
        assert found["unknown"] <= MOST, "objects whose record was not written yet"
        whole = _whole(cache, repo)
        assert whole >= before
        before = whole
        assert list((cache / "tmp").iterdir()) == [], "verify clears what the killed writer left"
    return asked


@pytest.mark.parametrize(
    ("name", "rounds", "most"),
    [("demo", 6, 30), *(pytest.param(*case, marks=pytest.mark.slow) for case in (("demo", 20, 30), ("k93", 40, 80)))],
)
def test_a_fetch_killed_at_random_moments_never_loses_or_spoils_anything(
    start, hub, request, tmp_path, index_only, until, df, ranges, record_property, name, rounds, most
):
    """Rounds of kill -9 in the middle, then one run to the end: only whole objects, and hardly a byte twice."""
    repo, cache = f"org/{name}", tmp_path / "cache"
    server = hub(request.getfixturevalue(f"{name}_dir"))
    index_only(cache, repo)
    server.set_mode("slow_drip", bytes=65536, every="0.02")
    asked = _kill_rounds(rounds, repo, cache, server, start, until, ranges, df, most)

    whole = _whole(cache, repo)
    server.set_mode("ok")
    done = df("df-fetch", "all", repo)
    assert done.status == 0
    with open_store(repo, cache_dir=cache, offline=True) as store:
        items = all_items(store.catalog) + rest_items(store.catalog)
    assert 0.1 * len(items) < len(whole) < 0.95 * len(items), "the kills fell into the middle"
    assert not whole & ranges(server).keys()
    twice = asked + ranges(server).total() - len(items)
    figures = f"{rounds} kills, {len(whole)} of {len(items)} spans whole after them, {twice} asked for again"
    record_property("figures", figures)
    assert twice <= rounds * MOST, "a kill costs what was on its way, and no more"
    found = df("df-fetch", "verify", repo, "--json").json
    assert (found["whole"], found["damaged"], found["unknown"]) == (len(items), [], 0)
    status = df("df-fetch", "status", repo, "--json").json
    assert status["layers_whole"] == status["layers"]


@pytest.mark.slow
def test_a_fetch_may_be_frozen_and_woken(start, hub, tiny_dir, tmp_path, index_only, until, df):
    """A machine that sleeps: connections are dead or late when it wakes."""
    server = hub(tiny_dir)
    index_only(tmp_path / "cache", "org/tiny")
    server.set_mode("slow_drip", bytes=4096, every=0.02)
    process = start("df-fetch", "all", "org/tiny")
    until(lambda: len(server.state.log) > 30)
    process.send_signal(signal.SIGSTOP)
    time.sleep(1.0)
    process.send_signal(signal.SIGCONT)
    assert _finish(process)[0] == 0
    assert df("df-fetch", "verify", "org/tiny", "--json").json["whole"] == 154


def test_a_df_run_killed_while_it_streams_leaves_only_whole_objects(
    start, hub, demo_dir, tmp_path, index_only, until, df
):
    server = hub(demo_dir)
    index_only(tmp_path / "cache", REPO)
    assert df("df-fetch", "spine", REPO).status == 0
    server.set_mode("slow_drip", bytes=65536, every=0.01)
    process = start("df-run", REPO, *STORY)
    until(lambda: len(server.state.log) > 60)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    server.set_mode("ok")
    found = df("df-fetch", "verify", REPO, "--json").json
    assert (found["damaged"], found["vanished"]) == ([], 0) and found["whole"] > 40


@pytest.mark.slow
def test_interrupted_pieces_add_up_to_the_whole(hub, tiny_dir, tmp_path, index_only, command):
    """run_limited.py kills, and checks after each kill with df-fetch verify."""
    server = hub(tiny_dir)
    index_only(tmp_path / "cache", "org/tiny")
    server.set_mode("slow_drip", bytes=65536, every=0.02)
    tool = Path(__file__).parents[1] / "faults" / "run_limited.py"
    program = Path(sys.executable).with_name("df-fetch")
    where = ["--cache-dir", tmp_path / "cache"]
    done = subprocess.run(
        [sys.executable, tool, "--kill-after", "0.3:0.5", "--rounds", "4", "--check",
         f"{program} verify org/tiny --cache-dir {tmp_path / 'cache'}", "--", program, "all", "org/tiny", *where],
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert done.returncode == 0, rows
    assert [row["check_rc"] for row in rows] == [0] * 4
    assert not any(row["traceback"] for row in rows)
    assert command("df-fetch", "all", "org/tiny").returncode == 0
