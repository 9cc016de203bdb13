"""Commands, in this process where many are run and in one of their own where signals and terminals matter."""

from __future__ import annotations

import io
import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from deltafin.store import all_items, fetch, open_store

REPO = "org/demo"


@pytest.fixture(scope="session")
def capital(golden) -> dict:
    """The golden continuation of "The capital of France is"."""
    cases = json.loads((golden / "demo.json").read_text())["cases"]
    return next(case for case in cases if case["name"] == "raw capital")


class Input(io.TextIOWrapper):
    """Standard input with this content; a terminal or not."""

    def __init__(self, content: bytes, tty: bool) -> None:
        super().__init__(io.BytesIO(content), encoding="utf-8")
        self._tty = tty

    def isatty(self) -> bool:
        return self._tty


@dataclass(frozen=True)
class Done:
    status: int
    out: str
    err: str

    @property
    def json(self):
        return json.loads(self.out)


@pytest.fixture
def df(monkeypatch, capfdbinary, tmp_path) -> Iterator[Callable[..., Done]]:
    """`df("df-run", "demo", ..)`: a command as its console script runs it, but in this process."""
    from deltafin import cli

    mains = {
        "df-bench": cli.bench_main,
        "df-fetch": cli.fetch_main,
        "df-index": cli.index_main,
        "df-plan": cli.plan_main,
        "df-run": cli.run_main,
        "df-serve": cli.serve_main,
    }
    logger = logging.getLogger("deltafin")
    before = logger.handlers[:], logger.propagate, logger.level
    sigint = signal.getsignal(signal.SIGINT)

    def run(name: str, *args: object, cache: Path | None = None, stdin: bytes = b"", tty: bool = False) -> Done:
        monkeypatch.setenv("DELTAFIN_CACHE", str(cache or tmp_path / "cache"))
        monkeypatch.setattr(sys, "argv", [name, *map(str, args)])
        monkeypatch.setattr(sys, "stdin", Input(stdin, tty))
        capfdbinary.readouterr()
        with pytest.raises(SystemExit) as ended:
            mains[name]()
        out, err = capfdbinary.readouterr()
        status = ended.value.code
        assert signal.getsignal(signal.SIGINT) is sigint, "the command left its own handler"
        return Done(0 if status is None else status, out.decode(), err.decode())

    yield run
    logger.handlers[:], logger.propagate = before[0], before[1]
    logger.setLevel(before[2])


@pytest.fixture(scope="session")
def tiny_cache(tmp_path_factory, range_server, tiny_dir) -> Path:
    """A cache with all of tiny as org/tiny. Copy it."""
    return _filled(tmp_path_factory.mktemp("tiny") / "cache", range_server, tiny_dir, "org/tiny")


@pytest.fixture(scope="session")
def demo_cache(tmp_path_factory, range_server, demo_dir) -> Path:
    """A cache with all of the demo as org/demo. Copy it."""
    return _filled(tmp_path_factory.mktemp("demo") / "cache", range_server, demo_dir, REPO)


def _filled(cache: Path, range_server, directory: Path, repo: str) -> Path:
    with range_server.FaultServer(root=str(directory)) as server, pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_ENDPOINT", server.url)
        with open_store(repo, cache_dir=cache) as store:
            fetch(store, all_items(store.catalog))
    return cache


@pytest.fixture
def full_tiny(tiny_cache, hub, tiny_dir, tmp_path):
    """The command's cache holds all of org/tiny; the hub that nobody has asked yet."""
    shutil.copytree(tiny_cache, tmp_path / "cache")
    return hub(tiny_dir)


@pytest.fixture
def full_demo(demo_cache, hub, demo_dir, tmp_path):
    """The command's cache holds all of org/demo; the hub that nobody has asked yet."""
    shutil.copytree(demo_cache, tmp_path / "cache")
    return hub(demo_dir)


@pytest.fixture(scope="session")
def index_only(tiny_cache, demo_cache) -> Callable[[Path, str], None]:
    """`index_only(cache, repo)` leaves a model's catalog and nothing else in a cache."""
    known = {"org/tiny": tiny_cache, REPO: demo_cache}

    def index(cache: Path, repo: str) -> None:
        if repo in known:
            shutil.copytree(known[repo] / "catalogs", cache / "catalogs")
        else:
            open_store(repo, cache_dir=cache).close()

    return index


@pytest.fixture(scope="session")
def ranges() -> Callable[[object], Counter[tuple[str, int, int]]]:
    """How often the server was asked for each (shard, first byte, length) and answered well."""

    def count(server) -> Counter[tuple[str, int, int]]:
        seen: Counter[tuple[str, int, int]] = Counter()
        for row in list(server.state.log):
            if row["status"] == 206 and row["method"] == "GET":
                first, last = map(int, row["range"].removeprefix("bytes=").split("-"))
                seen[row["path"].rpartition("/")[2], first, last - first + 1] += 1
        return seen

    return count


@pytest.fixture
def start(tmp_path) -> Iterator[Callable[..., subprocess.Popen[bytes]]]:
    """`start("df-run", ..)` starts an installed command and leaves it running; killed when the test ends."""
    running: list[subprocess.Popen[bytes]] = []

    def begin(
        name: str,
        *args: object,
        cache: Path | None = None,
        env: dict[str, str] | None = None,
        prefix: Sequence[str] = (),
        **keywords,
    ):
        words = [*prefix, str(Path(sys.executable).with_name(name)), *map(str, args)]
        around = {**os.environ, "DELTAFIN_CACHE": str(cache or tmp_path / "cache"), **(env or {})}
        streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **keywords}
        running.append(subprocess.Popen(words, env=around, **streams))
        return running[-1]

    yield begin
    for process in running:
        process.kill()
        process.wait()


@pytest.fixture(scope="session")
def until() -> Callable[..., None]:
    """`until(condition)` waits for it, and fails after a while."""

    def wait(condition: Callable[[], object], timeout_s: float = 60.0) -> None:
        end = time.monotonic() + timeout_s
        while not condition():
            assert time.monotonic() < end, "it never happened"
            time.sleep(0.002)

    return wait
