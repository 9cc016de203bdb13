#!/usr/bin/env python3
"""Show Deltafin's whole path on the demo model, with nothing but loopback: index, fetch, run, run again offline.

A server on 127.0.0.1 stands in for the Hugging Face Hub and, on a second port, for its CDN: every file is reached
through a redirect to a signed link, as on the real one. The commands are the installed ones (beside this Python), the
cache is a fresh temporary folder, and the environment is cleared of whatever could lead elsewhere: tokens, proxies,
endpoints.

Exit status 0 means: every command succeeded, both answers are the expected one, the second was made without a request,
no byte range was asked for twice and no token was sent. Otherwise one line says what differed, and the status is 1.
"""

import argparse
import importlib.util
import json
import os
import shlex
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypedDict, cast

ROOT = Path(__file__).resolve().parents[1]
MODEL_FOLDER = ROOT / "demo"
SERVER = ROOT / "tests" / "faults" / "faulty_range_server.py"
GOLDEN = ROOT / "tests" / "golden" / "demo.json"

REPO = "deltafin/demo-k3"
PROMPT = "The capital of France is"
MAX_NEW = 40
LINK_LIFE_S = 3600
COMMAND_LIMIT_S = 600


class Row(TypedDict):
    """One request as the server remembers it."""

    host: str
    kind: str
    method: str
    path: str
    range: str | None
    status: int
    sent: int
    auth: bool


class _State(Protocol):
    log: list[Row]


class Hub(Protocol):
    url: str
    state: _State


class Unexpected(Exception):
    """Something differs from what the demo promises."""


@dataclass(frozen=True, slots=True)
class Step:
    title: str
    answer: str  # what the command wrote to stdout
    requests: int
    nbytes: int
    seconds: float


class Demo:
    """Runs commands against one Hub stand-in and one cache, and counts what each asked of the network."""

    def __init__(self, hub: Hub, cache: Path, bin_folder: Path, environment: Mapping[str, str]) -> None:
        self.hub, self.cache, self.bin_folder, self.environment = hub, cache, bin_folder, environment
        self.steps: list[Step] = []

    def run(self, title: str, program: str, *arguments: str) -> Step:
        command = [str(self.bin_folder / program), *arguments, "--cache-dir", str(self.cache)]
        _say(f"\n== {title}\n$ {shlex.join([program, *command[1:]])}")
        seen = len(self.hub.state.log)
        start = time.monotonic()
        answer, status = _run_echoing(command, self.environment)
        seconds = time.monotonic() - start
        rows = self.hub.state.log[seen:]
        step = Step(title, answer, len(rows), sum(row["sent"] for row in rows), seconds)
        self.steps.append(step)
        if status != 0:
            raise Unexpected(f"{program} {arguments[0]}: exit status {status}, expected 0")
        return step


def _run_echoing(command: list[str], environment: Mapping[str, str]) -> tuple[str, int]:
    """Stdout as it comes, also returned whole; stderr stays on ours, so that progress is drawn where it can be."""
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment) as process:
        assert process.stdout is not None
        limit = threading.Timer(COMMAND_LIMIT_S, process.kill)
        limit.start()
        try:
            written = bytearray()
            while piece := os.read(process.stdout.fileno(), 65536):
                written += piece
                sys.stdout.buffer.write(piece)
                sys.stdout.buffer.flush()
            status = process.wait()
        finally:
            limit.cancel()
            process.kill()  # does nothing to one that has ended
    return written.decode("utf-8", "replace"), status


def _say(text: str) -> None:
    print(text, flush=True)


def find_bin_folder() -> Path:
    """The folder of this Python, unresolved: in a virtual environment the link is the one that has our commands."""
    folder = Path(sys.executable).absolute().parent
    missing = [name for name in ("df-index", "df-fetch", "df-run") if not (folder / name).exists()]
    if missing:
        raise Unexpected(f"{', '.join(missing)} not found in {folder}: run `make dev` first")
    return folder


def clean_environment(endpoint: str, home: Path) -> dict[str, str]:
    """Ours, less every Hugging Face and proxy setting: nothing may reach another host, find a token or go offline."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("HF_", "HUGGING", "DELTAFIN_")) and not name.lower().endswith("_proxy")
    }
    return kept | {
        "HF_ENDPOINT": endpoint,
        "HF_HOME": str(home),
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "HF_HUB_DISABLE_IMPLICIT_TOKEN": "1",
        "NO_PROXY": "127.0.0.1,localhost",
        "PYTHONUNBUFFERED": "1",
    }


@contextmanager
def loopback_hub(folder: Path) -> Iterator[Hub]:
    spec = importlib.util.spec_from_file_location("faulty_range_server", SERVER)
    if spec is None or spec.loader is None:
        raise Unexpected(f"{SERVER} is missing")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    server: AbstractContextManager[Hub] = module.FaultServer(
        root=str(folder), mode="redirect_cross_host_expiring", args={"life": str(LINK_LIFE_S)}
    )
    with server as hub:
        yield hub


def expected_answer() -> str | None:
    """The golden text for our prompt, or None where the golden file is not there."""
    if not GOLDEN.exists():
        return None
    for case in json.loads(GOLDEN.read_text("utf-8"))["cases"]:
        if case.get("prompt") == PROMPT and len(case["ids"]) == MAX_NEW:
            return cast(str, case["text"])
    return None


def ranges_asked_twice(rows: list[Row]) -> list[str]:
    asked = Counter((row["path"], row["range"]) for row in rows if row["host"] == "cdn" and row["status"] == 206)
    return [f"{path.rsplit('/', 1)[-1]} {span}" for (path, span), times in asked.items() if times > 1]


def show(hub: Hub, work: Path) -> None:
    demo = Demo(hub, work / "cache", find_bin_folder(), clean_environment(hub.url, work / "hf-home"))
    _say(f"{REPO} is served by {hub.url}; the cache is empty.")
    demo.run("Index: where is every byte? Only headers are read.", "df-index", "build", REPO)
    demo.run("Fetch the spine: all but the routed experts.", "df-fetch", "spine", REPO)
    question = (REPO, "--prompt", PROMPT, "--max-new", str(MAX_NEW), "--stats")
    first = demo.run("Run: experts are fetched when a token needs them.", "df-run", *question)
    second = demo.run("Run again, offline: everything comes from the cache.", "df-run", *question, "--offline")

    rows = list(hub.state.log)
    twice = ranges_asked_twice(rows)
    summarise(demo.steps, rows)
    expected = expected_answer()
    if not first.answer.strip():
        raise Unexpected("the first run answered nothing")
    if first.answer != second.answer:
        raise Unexpected(f"the two answers differ: {first.answer!r}, then offline {second.answer!r}")
    if expected is not None and first.answer.strip() != expected.strip():
        raise Unexpected(f"the answer is {first.answer.strip()!r}, expected {expected.strip()!r}")
    if second.requests:
        raise Unexpected(f"the offline run sent {second.requests} requests, expected none")
    if not first.requests:
        raise Unexpected("the first run sent no request: its experts did not come through the loopback server")
    if twice:
        raise Unexpected(f"{len(twice)} ranges were fetched twice, the first of them {twice[0]}")
    if any(row["auth"] for row in rows):
        raise Unexpected("a token was sent although none was given")
    _say("Both answers are equal" + (" and as expected." if expected is not None else "."))


def summarise(steps: list[Step], rows: list[Row]) -> None:
    _say("\n== Summary\n  requests       bytes  seconds")
    for step in steps:
        _say(f"  {step.requests:8,} {step.nbytes:11,} {step.seconds:8.1f}  {step.title.partition(':')[0]}")
    spans = [row for row in rows if row["host"] == "cdn" and row["status"] == 206]
    total = sum(path.stat().st_size for path in MODEL_FOLDER.glob("*.safetensors"))
    _say(f"{len(spans):,} ranges, {sum(row['sent'] for row in spans):,} bytes, of {total:,} in the shards.")


def main() -> int:
    argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0]).parse_args()
    try:
        with tempfile.TemporaryDirectory(prefix="deltafin-demo-") as work, loopback_hub(MODEL_FOLDER) as hub:
            show(hub, Path(work))
    except Unexpected as e:
        print(f"demo: {e}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
