"""Before something large, a command says how large, and waits for a yes."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import shutil
import subprocess
import sys
import termios
from collections import namedtuple

import pytest

from deltafin.cli.options import ASK_ABOVE_NBYTES

REPO = "org/tiny"
TOTAL = 2_874_040  # bytes of tiny, with the headers and vision parts of its shards


@pytest.fixture
def indexed(hub, tiny_dir, tmp_path, index_only):
    server = hub(tiny_dir)
    index_only(tmp_path / "cache", REPO)
    server.set_mode("ok")
    return server


@pytest.fixture
def low_threshold(monkeypatch):
    """As if tiny were large. One batch of spans is enough to measure the line."""
    monkeypatch.setattr("deltafin.cli.options.ASK_ABOVE_NBYTES", 100_000)
    monkeypatch.setattr("deltafin.cli.fetch.ASK_ABOVE_NBYTES", 100_000)
    monkeypatch.setattr("deltafin.store.bulk._PROBE_NBYTES", 1)


def _one_line(done, status: int) -> str:
    assert (done.status, done.out) == (status, "")
    assert done.err.endswith("\n") and done.err.count("\n") == 1
    return done.err


def test_a_gigabyte_is_where_asking_begins():
    assert ASK_ABOVE_NBYTES == 1_000_000_000


def test_a_small_fetch_is_not_announced(df, indexed):
    done = df("df-fetch", "all", REPO)
    assert (done.status, done.err) == (0, "")


def test_without_a_terminal_a_large_fetch_is_refused_with_its_size_time_and_free_space(
    df, indexed, low_threshold, tmp_path
):
    line = _one_line(df("df-fetch", "all", REPO), 2)
    assert line.startswith(f"df-fetch: {REPO}: 2.87 MB to fetch, about ")
    assert re.search(r"about \d+ s at the \S+ [KMG]B/s just measured; \S+ [GT]B free in ", line)
    assert str(tmp_path / "cache") in line
    assert line.endswith("Add --yes to go on\n")
    assert indexed.stats()["requests"] <= 8, "only what it took to measure the line"


def test_what_was_fetched_to_measure_the_line_is_not_fetched_again(df, indexed, low_threshold, ranges):
    df("df-fetch", "all", REPO)
    measured = len(ranges(indexed))
    assert 1 <= measured <= 8
    done = df("df-fetch", "all", REPO, "--yes")
    assert (done.status, done.err) == (0, "")
    assert done.out.startswith(f"fetched {154 - measured} spans")
    assert max(ranges(indexed).values()) == 1 and len(ranges(indexed)) == 154


@pytest.mark.parametrize("option", ["--yes", "-y"])
def test_with_a_yes_on_the_command_line_nothing_is_asked(df, indexed, low_threshold, option):
    done = df("df-fetch", "all", REPO, option)
    assert (done.status, done.err) == (0, "")
    assert done.out.startswith("fetched 154 spans")


def test_on_a_terminal_a_yes_goes_on(df, indexed, low_threshold):
    done = df("df-fetch", "all", REPO, stdin=b"y\n", tty=True)
    assert done.status == 0
    assert "2.87 MB to fetch" in done.err and "Go on? [y/N]" in done.err
    assert done.out.startswith("fetched 154 spans")


@pytest.mark.parametrize("answer", [b"n\n", b"\n", b""])
def test_on_a_terminal_anything_else_stops_and_what_was_measured_stays(df, indexed, low_threshold, answer):
    done = df("df-fetch", "all", REPO, stdin=answer, tty=True)
    assert (done.status, done.out) == (130, "")
    assert "Traceback" not in done.err
    assert 1 <= indexed.stats()["requests"] <= 8
    assert df("df-fetch", "status", REPO, "--json").json["cache_objects"] == indexed.stats()["requests"]


def test_a_closed_standard_input_is_no_terminal(start, indexed, tmp_path):
    """As under cron: the command must not trip over it."""
    process = start("df-fetch", "warm", REPO, "--layers", "1", preexec_fn=lambda: os.close(0))
    out, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (0, b"")
    assert out.startswith(b"fetched 16 spans")


def test_a_closed_standard_input_is_refused_like_no_terminal(df, indexed, low_threshold, monkeypatch):
    monkeypatch.setattr("deltafin.cli.options.sys", namedtuple("Sys", "stdin stderr")(None, None))
    assert _one_line(df("df-fetch", "all", REPO), 2).endswith("Add --yes to go on\n")


LOW = """
import sys
from deltafin import cli
from deltafin.cli import options
options.ASK_ABOVE_NBYTES = 100_000
sys.argv = ["df-fetch", "all", "org/tiny"]
cli.fetch_main()
"""


@pytest.mark.parametrize(("answer", "status"), [(b"y\n", 0), (b"n\n", 130), (b"\x03", 130), (b"\x04", 130)])
def test_a_real_terminal_is_asked_and_its_answer_taken(indexed, tmp_path, until, answer, status):
    """Also Ctrl-C and Ctrl-D as answers."""
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-c", LOW],
        stdin=theirs,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "DELTAFIN_CACHE": str(tmp_path / "cache")},
        start_new_session=True,
        preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
    )
    os.close(theirs)
    os.set_blocking(process.stderr.fileno(), False)
    said = b""

    def asked() -> bool:
        nonlocal said
        said += process.stderr.read() or b""
        return b"Go on?" in said

    until(asked)
    assert b"2.87 MB to fetch" in said
    os.write(ours, answer)
    assert process.wait(timeout=30) == status
    said += process.stderr.read() or b""
    assert b"Traceback" not in said
    assert (b"fetched 154 spans" in process.stdout.read()) == (status == 0)
    os.close(ours)


def test_rm_of_much_asks_too(df, full_tiny, low_threshold):
    line = _one_line(df("df-fetch", "rm", REPO, "--all"), 2)
    assert "140 objects, 2.69 MB, will be removed. Add --yes to go on" in line
    done = df("df-fetch", "rm", REPO, "--all", stdin=b"n\n", tty=True)
    assert done.status == 130
    assert df("df-fetch", "status", REPO, "--json").json["cache_objects"] == 140
    assert df("df-fetch", "rm", REPO, "--layers", "1").status == 0, "little is not asked about"
    assert df("df-fetch", "rm", REPO, "--all", "--yes").out == "removed 124 objects, 2.64 MB\n"


def test_df_run_says_how_many_experts_may_follow(df, indexed, low_threshold):
    line = _one_line(df("df-run", REPO, "--prompt-ids", "1 2 3", "--max-new", "1"), 2)
    assert "spine of org/tiny: 2.27 MB to fetch and up to 418 KB of experts as they are needed, about" in line
    assert line.endswith("Add --yes to go on\n")


def test_df_run_with_its_spine_here_asks_only_about_experts(df, indexed, low_threshold):
    df("df-fetch", "spine", REPO, "--yes")
    line = _one_line(df("df-run", REPO, "--prompt-ids", "1 2 3", "--max-new", "1"), 2)
    assert "0 B to fetch and up to 418 KB of experts as they are needed, at a rate not measured yet" in line
    done = df("df-run", REPO, "--prompt-ids", "1 2 3", "--max-new", "1", "--yes")
    assert done.status == 0


def test_df_run_with_everything_here_asks_nothing(df, full_tiny, low_threshold):
    done = df("df-run", REPO, "--prompt-ids", "1 2 3", "--max-new", "1")
    assert (done.status, done.err) == (0, "")


# ---- room on the disk -----------------------------------------------------------------------------------


@pytest.mark.parametrize("command", ["all", "spine", "warm"])
def test_without_enough_free_space_nothing_is_begun(df, indexed, monkeypatch, tmp_path, command):
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(10**6, 10**6, 410_000))
    line = _one_line(df("df-fetch", command, REPO, "--yes"), 1)
    assert "are missing" in line and "has 400 KB free" in line and str(tmp_path / "cache") in line
    assert "--cache-dir" in line
    assert indexed.stats()["requests"] == 0


def test_a_part_that_fits_is_still_fetched(df, indexed, monkeypatch):
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(10**6, 10**6, 410_000))
    assert df("df-fetch", "warm", REPO, "--bytes", "300KB").status == 0
