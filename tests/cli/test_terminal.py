"""What a person at a terminal sees: progress while it lasts, and in the end the text and nothing else."""

from __future__ import annotations

import fcntl
import io
import os
import pty
import re
import select
import shutil
import struct
import subprocess
import sys
import termios
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from deltafin.cli.chat_screen import ChatScreen
from deltafin.cli.progress import Progress
from deltafin.cli.watch import Watch
from deltafin.store import expert_items, open_store, remove

REPO = "org/demo"


class Screen:
    """As much of a terminal as our output needs: wrapping, carriage return, erasing, a saved cursor."""

    def __init__(self, columns: int) -> None:
        self.columns = columns
        self.rows: list[list[str]] = [[]]
        self.row = self.column = 0
        self._saved = (0, 0)

    def feed(self, text: str) -> None:
        for piece in re.findall(r"\x1b\[[0-9;]*[A-Za-z]|\x1b[78]|\r|\n|[^\x1b\r\n]", text):
            if piece == "\r":
                self.column = 0
            elif piece == "\n":
                self._down()
            elif piece == "\x1b7":
                self._saved = self.row, self.column
            elif piece == "\x1b8":
                self.row, self.column = self._saved
            elif piece == "\x1b[K":
                del self.rows[self.row][self.column :]
            elif piece == "\x1b[A":
                self.row = max(0, self.row - 1)
            elif piece.startswith("\x1b"):
                raise AssertionError(f"an unexpected sequence: {piece!r}")
            else:
                self._put(piece)

    def lines(self) -> list[str]:
        return ["".join(row).rstrip() for row in self.rows]

    def _put(self, character: str) -> None:
        if self.column == self.columns:
            self.column = 0
            self._down()
        row = self.rows[self.row]
        row.extend(" " * (self.column + 1 - len(row)))
        row[self.column] = character
        self.column += 1

    def _down(self) -> None:
        self.row += 1
        while len(self.rows) <= self.row:
            self.rows.append([])


def _on_terminal(args, cache, *, columns=80, out=True, err=True) -> tuple[int, str, bytes, bytes]:
    """Runs a command with stdout and/or stderr on a terminal: (status, what the terminal got, the other streams)."""
    ours, theirs = pty.openpty()
    attributes = termios.tcgetattr(theirs)
    attributes[1] &= ~termios.OPOST  # bytes as they are written
    termios.tcsetattr(theirs, termios.TCSANOW, attributes)
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    program = Path(sys.executable).with_name(args[0])
    env = {k: v for k, v in os.environ.items() if k not in ("COLUMNS", "LINES")}
    process = subprocess.Popen(
        [program, *map(str, args[1:])],
        stdin=subprocess.DEVNULL,
        stdout=theirs if out else subprocess.PIPE,
        stderr=theirs if err else subprocess.PIPE,
        env={**env, "DELTAFIN_CACHE": str(cache), "TERM": "xterm"},
    )
    os.close(theirs)
    seen = bytearray()
    end = time.monotonic() + 120
    while time.monotonic() < end:
        if not select.select([ours], [], [], 0.1)[0]:
            if process.poll() is not None:
                break
            continue
        try:
            piece = os.read(ours, 65536)
        except OSError:  # the other side is closed
            break
        if not piece:
            break
        seen += piece
    status = process.wait(timeout=60)
    os.close(ours)
    rest = process.stdout.read() if not out else b"", process.stderr.read() if not err else b""
    return status, seen.decode(), *rest


PROMPT = ["--prompt-ids", "437", "--max-new", "4"]
STATUS = re.compile(r"token \d+: layer \d+ of 13, \S+ [KM]?B")


@pytest.fixture(scope="module")
def expected(demo_dir, tmp_path_factory) -> str:
    """What a pipe gets."""
    program = Path(sys.executable).with_name("df-run")
    env = {**os.environ, "DELTAFIN_CACHE": str(tmp_path_factory.mktemp("cache"))}
    done = subprocess.run([program, "demo", *PROMPT], capture_output=True, text=True, timeout=60, env=env)
    assert len(done.stdout) > 8
    return done.stdout


@pytest.fixture(scope="module")
def slow_run(range_server, demo_dir, demo_cache, tmp_path_factory):
    """`slow_run(..)`: df-run on a terminal with its spine here and a hub that lets every expert wait."""

    def run(**keywords):
        cache = tmp_path_factory.mktemp("slow") / "cache"
        shutil.copytree(demo_cache, cache)
        with range_server.FaultServer(root=str(demo_dir)) as server, pytest.MonkeyPatch.context() as patch:
            patch.setenv("HF_ENDPOINT", server.url)
            with open_store(REPO, cache_dir=cache, offline=True) as store:
                items = expert_items(store.catalog, store.catalog.config.moe_layers, range(32))
                remove(store, items)
            server.set_mode("slow_drip", bytes=65536, every=0.09)
            return _on_terminal(["df-run", REPO, *PROMPT], cache, **keywords)

    return run


@pytest.fixture(scope="module", params=[80, 10])
def beside(request, slow_run):
    """(columns, what the terminal got) of a run whose text and status share it."""
    status, seen, _, _ = slow_run(columns=request.param)
    assert status == 0
    return request.param, seen


def test_beside_the_text_the_status_comes_and_goes_and_the_text_stays(beside, expected):
    columns, seen = beside
    assert len(re.findall(r"\x1b7", seen)) >= 3, "the status appeared, and moved"
    assert columns < 80 or STATUS.search(seen)
    screen = Screen(columns)
    screen.feed(seen)
    text = expected.rstrip("\n")
    assert "".join(line.ljust(columns) for line in screen.lines()).rstrip() == text.rstrip()
    assert len(screen.lines()) == -(-len(text) // columns) + 1


def test_the_text_itself_is_to_the_byte_what_a_pipe_gets(beside, expected):
    _, seen = beside
    assert re.sub(r"\x1b7.*?\x1b8", "", seen, flags=re.DOTALL).replace("\x1b[K", "") == expected


def test_while_it_is_shown_the_status_stands_behind_the_text(beside, expected):
    columns, seen = beside
    screen, moments = Screen(columns), 0
    text = ""
    for piece in re.split(r"(\x1b7.*?\x1b8)", seen, flags=re.DOTALL):
        screen.feed(piece)
        if not piece.startswith("\x1b7"):
            text += piece.replace("\x1b[K", "")
            continue
        moments += 1
        shown = "".join(line.ljust(columns) for line in screen.lines())
        assert shown.startswith(text)
        status = shown[len(text) :].strip()
        assert status and "token"[: len(status)] == status[:5], "as much of the status as there is room for"
        assert len(screen.lines()[screen.row]) < columns, "it never reaches the edge, where it would wrap"
        assert (screen.row, screen.column) == divmod(len(text), columns) or len(text) % columns == 0
    assert moments >= 3


def test_on_a_terminal_of_its_own_the_status_rewrites_one_line_and_is_wiped(slow_run, expected):
    status, seen, out, _ = slow_run(out=False)
    assert (status, out.decode()) == (0, expected)
    assert STATUS.search(seen)
    screen = Screen(80)
    screen.feed(seen)
    assert screen.lines() == [""]


class Stream(io.StringIO):
    """A standard stream; a terminal or not."""

    def __init__(self, tty: bool) -> None:
        super().__init__()
        self.isatty = lambda: tty


def test_beside_reasoning_on_stderr_the_status_leaves_it_alone(monkeypatch):
    """With the answer in a file, reasoning and status share the terminal: the one was wiped with the other."""
    monkeypatch.setattr(sys, "stdout", Stream(False))
    monkeypatch.setattr(sys, "stderr", error := Stream(True))
    monkeypatch.setattr("deltafin.cli.watch._QUIET_S", 0.0)
    monkeypatch.setattr("deltafin.cli.watch._TERMINAL_EVERY_S", 0.0)
    shown = ChatScreen(quiet=False, hide_thinking=False)
    watch = Watch(SimpleNamespace(stats=SimpleNamespace(read_nbytes=0), pause_left_s=0), None, shown)

    def compute(tokens: int) -> None:
        watch.rows([])
        watch.layer(0, 13)
        watch.token(tokens)

    compute(1)
    shown.reasoning("Japan: the cap")
    compute(2)
    shown.reasoning("ital is Tokyo.")
    compute(3)
    shown.content("Tokyo")
    compute(4)
    shown.end()
    screen = Screen(80)
    screen.feed(error.getvalue())
    assert error.getvalue().count("layer 1 of 13") == 4
    assert screen.lines() == ["Japan: the capital is Tokyo.", ""]
    assert sys.stdout.getvalue() == "Tokyo\n"


def test_a_fetch_shows_a_bar_with_rate_and_time_left(hub, tiny_dir, tmp_path, index_only):
    server = hub(tiny_dir)
    index_only(tmp_path / "cache", "org/tiny")
    server.set_mode("slow_drip", bytes=65536, every=0.06)
    status, seen, out, _ = _on_terminal(["df-fetch", "all", "org/tiny"], tmp_path / "cache", out=False)
    assert status == 0
    assert out.startswith(b"fetched 154 spans")
    assert re.search(r"org/tiny: +\d+%\|.*\| \S+/2\.87M \[\d\d:\d\d<(\d\d:\d\d|\?), +\S+B/s\]", seen)
    assert "100%" in seen


def test_a_warning_does_not_tear_the_bar(hub, tiny_dir, tmp_path, index_only):
    server = hub(tiny_dir)
    index_only(tmp_path / "cache", "org/tiny")
    server.set_mode("429_retry_after", seconds=1, times=1, after=20)
    status, seen, _, _ = _on_terminal(["df-fetch", "all", "org/tiny"], tmp_path / "cache", out=False)
    assert status == 0
    screen = Screen(80)
    screen.feed(seen)
    (line,) = [line for line in screen.lines() if "warning" in line]
    assert line == "df-fetch: warning: the server asks to wait 1 s (status 429)"


# ---- elsewhere than on a terminal -----------------------------------------------------------------------


@pytest.fixture
def clock(monkeypatch):
    """time.monotonic as the progress sees it."""
    import deltafin.cli.progress as module

    now = [1000.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    return now


def test_work_that_is_over_at_once_prints_nothing(clock, capsys):
    with Progress("fetching", 100) as progress:
        progress.add(100)
    assert capsys.readouterr().err == ""


def test_long_work_prints_a_line_now_and_then_with_rate_and_time_left(clock, capsys):
    with Progress("fetching", 10_000_000) as progress:
        for _ in range(10):
            clock[0] += 4
            progress.add(1_000_000)
    assert capsys.readouterr().err.splitlines() == [
        "fetching: 3 MB of 10 MB, 250 KB/s, 28 s left",
        "fetching: 6 MB of 10 MB, 250 KB/s, 16 s left",
        "fetching: 9 MB of 10 MB, 250 KB/s, 4 s left",
        "fetching: 10 MB of 10 MB, 250 KB/s, 0 s left",
    ]


def test_work_that_is_counted_in_other_things_says_so(clock, capsys):
    with Progress("indexing", 96, "shards") as progress:
        clock[0] += 12
        progress.set(24)
    assert capsys.readouterr().err.splitlines()[0] == "indexing: 24 of 96 shards, 36 s left"


def test_a_total_of_nothing_is_no_division_by_zero(clock, capsys):
    with Progress("verifying", 0) as progress:
        clock[0] += 12
        progress.add(0)
    assert "unknown left" in capsys.readouterr().err
