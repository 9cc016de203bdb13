#!/usr/bin/env python3
"""Kill `df-serve` again and again while it answers batches: what they leave is what `df-run batch` leaves.

The requests are those of tools/kill_batches.py. `df-run batch` answers them once in peace. Then a server takes them as
two batches, one for each endpoint, is killed with SIGKILL at a random moment, and started again on the same folder;
after each kill every line of its results must be a whole answer, but for the last. At the end one server goes on until
both batches are complete: each request must have one answer, the same, to the last log-probability.

Exit status 0 means that all of this held; else one line says what did not, and the status is 1.
"""

import argparse
import importlib.util
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import ModuleType

HERE = Path(__file__).resolve().parent
SERVE = "from deltafin.cli import serve_main; serve_main()"
ENDPOINTS = ("/v1/chat/completions", "/v1/completions")
TIMEOUT_S = 600.0

Json = dict[str, object]


def _load(name: str) -> ModuleType:
    """A program beside this one: the folder is no package."""
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, HERE / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


kill_batches = _load("kill_batches")


class Unexpected(Exception):
    """A promise was broken."""


@dataclass(frozen=True, slots=True)
class Report:
    """What the kills came to."""

    requests: int
    kills: int
    answered: list[int]  # after each kill
    torn: int  # kills that left an unfinished line
    statuses: list[str]  # of both batches after each kill, as they were on the drive


class Server:
    """A `df-serve` of its own, on any free port."""

    def __init__(self, data: Path, cache: Path, words: Sequence[str]) -> None:
        environment = {k: v for k, v in os.environ.items() if not k.startswith("DELTAFIN_")}
        given = ["demo", "--port", "0", "--data", data, "--cache-dir", cache, *words]
        self.process = subprocess.Popen(
            [sys.executable, "-c", SERVE, *map(str, given)], env=environment, stderr=subprocess.PIPE, text=True
        )
        self._said: list[str] = []
        self._url: str | None = None
        self._listening = threading.Event()
        threading.Thread(target=self._listen, daemon=True).start()

    def url(self) -> str:
        """Waits until it serves. Raises Unexpected if it ends before."""
        self._listening.wait(TIMEOUT_S)
        if self._url is None:
            raise Unexpected(f"the server did not start: {''.join(self._said)[-300:]}")
        return self._url

    def ask(self, method: str, path: str, body: bytes | None = None, kind: str = "application/json") -> bytes:
        request = urllib.request.Request(f"{self.url()}{path}", body, {"Content-Type": kind}, method=method)
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        try:
            with opener.open(request, timeout=60) as answer:
                raw: bytes = answer.read()
                return raw
        except urllib.error.HTTPError as e:
            raise Unexpected(f"{method} {path}: {e.code} {e.read()[:300]!r}") from None

    def ask_json(self, method: str, path: str, body: Json | None = None) -> Json:
        found: Json = json.loads(self.ask(method, path, None if body is None else json.dumps(body).encode()))
        return found

    def kill(self) -> bool:
        """False if it had ended before."""
        lived = self.process.poll() is None
        self.process.kill()
        self.process.wait()
        return lived

    def stop(self) -> None:
        """As a service manager does it."""
        self.process.send_signal(signal.SIGTERM)
        status = self.process.wait(60)
        if status not in (0, 128 + signal.SIGTERM):
            raise Unexpected(f"the server ended with status {status}: {''.join(self._said)[-300:]}")

    def _listen(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self._said.append(line)
            if found := re.search(r" on (http://[0-9.]+:\d+)", line):
                self._url = found[1]
                self._listening.set()
        self._listening.set()


class Trial:
    """Two batches, and the server that is killed on them."""

    def __init__(self, work: Path, lines: Sequence[Json], words: Sequence[str], rng: random.Random) -> None:
        self.data, self.cache, self.words, self.rng = work / "data", work / "cache", words, rng
        self.count = len(lines)
        self.kills = self.torn = 0
        self.answered: list[int] = []
        self.statuses: list[str] = []
        peace = kill_batches.Trial(work, lines, ["--parallel", "4"], rng)
        self.expected: dict[str, Json] = peace.expected
        self.whole_s: float = peace.whole_s
        sorted_out = {url: [line for line in lines if line["url"] == url] for url in ENDPOINTS}
        self._first: Server | None = self._start()
        try:
            self.batches = [_begin(self._first, those, url) for url, those in sorted_out.items() if those]
        except BaseException:
            self._first.kill()
            raise

    def round(self, share_s: float, *, anywhere: bool = False) -> bool:
        """Starts a server and kills it; False if both batches were over.

        About `share_s` after its first pass, or `anywhere` from its start on.
        """
        if all(self._record(name)["status"] in ("completed", "failed") for name in self.batches):
            return False
        before = self._progress()
        server, self._first = self._first or self._start(), None  # the one that took the batches is killed first
        try:
            if not anywhere:
                server.url()
                end = time.monotonic() + TIMEOUT_S
                while self._progress() == before and server.process.poll() is None and time.monotonic() < end:
                    time.sleep(0.002)
            time.sleep(self.rng.uniform(0, 2 * share_s))
        finally:
            lived = server.kill()
        if not lived:
            raise Unexpected(f"the server ended by itself: {''.join(server._said)[-300:]}")
        self.kills += 1
        self._look()
        return True

    def finish(self) -> dict[str, Json]:
        """Lets a server complete both batches; all their answers."""
        server = self._start()
        try:
            end = time.monotonic() + TIMEOUT_S
            while (told := [server.ask_json("GET", f"/v1/batches/{name}") for name in self.batches]) and not all(
                batch["status"] == "completed" for batch in told
            ):
                wrong = [batch for batch in told if batch["status"] in ("failed", "cancelled") or batch["errors"]]
                if wrong or time.monotonic() > end:
                    raise Unexpected(f"a batch does not come to its end: {wrong or told}")
                time.sleep(0.05)
            found: dict[str, Json] = {}
            for batch in told:
                path = self.data.with_name("output.jsonl")
                path.write_bytes(server.ask("GET", f"/v1/files/{batch['output_file_id']}/content"))
                new = kill_batches.answers(path)
                counts = {"total": len(new), "completed": len(new), "failed": 0}
                if batch["error_file_id"] is not None or batch["request_counts"] != counts or found.keys() & new:
                    raise Unexpected(f"{batch['id']} counts otherwise than its answers: {batch['request_counts']}")
                found |= new
            server.stop()
        finally:
            server.kill()
        return found

    def check(self, found: dict[str, Json]) -> None:
        """Compares the answers with those of the undisturbed run, and looks for what may not be left."""
        if found != self.expected:
            wrong = [name for name in self.expected if found.get(name) != self.expected[name]]
            raise Unexpected(f"the answer to {(wrong or sorted(found.keys() - self.expected))[0]!r} is another one")
        files = sorted(path.name for path in (self.data / "files").iterdir() if not path.suffix)
        left = [path.name for path in (self.data / "batches").iterdir() if path.suffix != ".json"]
        if len(files) != 2 * len(self.batches) or left:
            raise Unexpected(f"more or less was left than an input and an output of each batch: {[*files, *left]}")

    def _start(self) -> Server:
        return Server(self.data, self.cache, self.words)

    def _record(self, name: str) -> Json:
        record: Json = json.loads((self.data / "batches" / f"{name}.json").read_bytes())
        return record

    def _progress(self) -> list[tuple[int, int]]:
        """Which files the journals are, and their lengths."""
        found = []
        for name in self.batches:
            try:
                journal = (self.data / "batches" / f"{name}.jsonl.journal").stat()
                found.append((journal.st_ino, journal.st_size))
            except FileNotFoundError:
                found.append((0, 0))
        return found

    def _look(self) -> None:
        """At what a kill has left."""
        records = [self._record(name) for name in self.batches]
        self.statuses.append(" ".join(str(record["status"]) for record in records))
        count = 0
        for name, record in zip(self.batches, records, strict=True):
            path = self.data / "batches" / f"{name}.jsonl"
            if not path.exists() or record["status"] == "completed":
                count += int(str(record["completed"]))
                continue
            whole, _, torn = path.read_bytes().rpartition(b"\n")
            self.torn += bool(torn)
            part = self.data.with_name("whole.jsonl")
            part.write_bytes(whole + b"\n" if whole else b"")
            count += len(kill_batches.answers(part))
        self.answered.append(count)


def _begin(server: Server, lines: Sequence[Json], url: str) -> str:
    """Uploads requests and starts a batch of them; its id."""
    raw = "".join(json.dumps(line) + "\n" for line in lines).encode()
    head = '--limit\r\nContent-Disposition: form-data; name="{}"{}\r\n\r\n'
    body = head.format("purpose", "").encode() + b"batch\r\n" + head.format("file", '; filename="a.jsonl"').encode()
    told = server.ask("POST", "/v1/files", body + raw + b"\r\n--limit--\r\n", "multipart/form-data; boundary=limit")
    given: Json = {"input_file_id": json.loads(told)["id"], "endpoint": url, "completion_window": "24h"}
    return str(server.ask_json("POST", "/v1/batches", given)["id"])


def try_kills(
    kills: int,
    seed: int,
    count: int = 64,
    words: Sequence[str] = (),
    *,
    short: bool = False,
    share_s: float | None = None,
) -> Report:
    """The whole trial, in a temporary directory. Raises Unexpected, this one's or that of kill_batches.

    Kills come about `share_s` after the first pass, by default such that they spread over the whole work.
    """
    rng = random.Random(seed)
    with tempfile.TemporaryDirectory(prefix="deltafin-kills-") as work:
        trial = Trial(Path(work), kill_batches.requests(count, short=short), words, rng)
        for number in range(kills):
            if not trial.round(share_s or trial.whole_s / (2 * kills), anywhere=number % 4 == 3):
                break
            if sys.stderr.isatty():
                print(f"\r{number + 1} of {kills}, {trial.answered[-1]} answered ", end="", file=sys.stderr)
        trial.check(trial.finish())
        return Report(count, trial.kills, trial.answered, trial.torn, trial.statuses)


def _lines(report: Report) -> Iterator[str]:
    yield f"killed     {report.kills} times; {report.torn} of them left an unfinished line"
    yield f"answered   {', '.join(map(str, report.answered))} of {report.requests} after each"
    yield f"the end    {report.requests} answers, each as without kills"


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--kills", type=int, default=10, help="how often it is killed (default 10)")
    parser.add_argument("--requests", type=int, default=64, help="how many requests there are (default 64)")
    parser.add_argument("--parallel", type=int, default=8, help="how many are answered at once (default 8)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    given = parser.parse_args(words)
    try:
        report = try_kills(given.kills, given.seed, given.requests, ("--parallel", str(given.parallel)))
        if report.kills < given.kills:
            raise Unexpected(f"all was answered after {report.kills} of {given.kills} kills; give more --requests")
    except (Unexpected, kill_batches.Unexpected) as e:
        print(f"kill_server: {e}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    print(json.dumps(asdict(report)) if given.json else "\n".join(_lines(report)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
