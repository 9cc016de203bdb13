#!/usr/bin/env python3
"""Kill two `df-fetch all` and a `df-run` on one cache, again and again: nothing is lost, nothing fetched twice.

A server on 127.0.0.1 stands in for the hub and sends slowly, so that every kill falls into transfers. All three
commands are started, killed with SIGKILL at a random moment and started again; after each kill every object must hash
to its name and every record must lead to a whole object. At the end one fetch runs to completion: then all must be
there, and the server must not have sent more than the model once plus what was on its way when processes were killed.

Exit status 0 means that all of this held; else one line says what did not, and the status is 1.
"""

import argparse
import hashlib
import importlib.util
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Protocol, TypedDict

from deltafin.store import all_items, open_store, rest_items
from deltafin.store.parallelism import MOST

ROOT = Path(__file__).resolve().parents[1]
SERVER = ROOT / "tests" / "faults" / "faulty_range_server.py"
REPO = "deltafin/killed"
PROMPT = ("--prompt-ids", "1 2 3 4", "--max-new", "40", "--ids")
TRANSFERS = MOST  # of one process at once, at most
# How the server sends: so slowly that few spans of one round are whole, so fast that some are.
SLOW = {"bytes": "8192", "every": "0.02"}
ROUND_LIMIT_S = 60.0

Range = tuple[str, int, int]  # shard, first byte, length


class Row(TypedDict):
    """One request as the server remembers it."""

    kind: str
    method: str
    path: str
    range: str | None
    status: int
    sent: int


class _State(Protocol):
    log: list[Row]

    def set_mode(self, mode: str, args: Mapping[str, str]) -> None: ...


class Hub(Protocol):
    url: str
    state: _State


class Unexpected(Exception):
    """A promise was broken."""


@dataclass(frozen=True, slots=True)
class Report:
    """What the kills cost. Bytes are bodies as the server sent them."""

    kills: int
    rounds: int
    model_nbytes: int
    sent_nbytes: int
    cut_nbytes: int  # sent for ranges that did not arrive whole
    lost_nbytes: int  # sent for ranges that had arrived, but were no object yet when their process was killed
    twice_nbytes: int  # sent for ranges that were an object already, or were one soon: two processes fetched them
    in_flight_nbytes: int  # length of all ranges that were asked for and no object yet, summed over the kills
    largest_nbytes: int  # of a span

    @property
    def bound_nbytes(self) -> int:
        """The model, and for each kill as many of the largest spans as one process fetches at once."""
        return self.model_nbytes + self.kills * TRANSFERS * self.largest_nbytes

    @property
    def tight_bound_nbytes(self) -> int:
        """The model and exactly what was on its way at the kills."""
        return self.model_nbytes + self.in_flight_nbytes


class Trial:
    """One hub, one cache, and the commands that are killed on it."""

    def __init__(self, hub: Hub, cache: Path, rng: random.Random) -> None:
        self.hub, self.cache, self.rng = hub, cache, rng
        self.environment = _environment(hub.url, cache)
        self._finish("df_index", "build", REPO)
        self.lengths = self._spans()
        self.model_nbytes = sum(self.lengths.values())
        self.kept: set[Range] = set()
        self.rounds = self.kills = self.cut = self.lost = self.in_flight = 0
        hub.state.set_mode("slow_drip", SLOW)
        hub.state.log.clear()

    def round(self, nbytes: int) -> None:
        """Starts all three, and kills them once the server has sent about so many bytes."""
        self.rounds += 1
        seen = len(self.hub.state.log)
        commands = [("df_fetch", "all", REPO), ("df_fetch", "all", REPO), ("df_run", REPO, *PROMPT)]
        running = [self._start(*words) for words in self.rng.sample(commands, len(commands))]
        end = time.monotonic() + ROUND_LIMIT_S
        while sum(row["sent"] for row in self.hub.state.log[seen:]) < nbytes:
            if all(process.poll() is not None for process in running) or time.monotonic() > end:
                break
            time.sleep(0.01)
        for process in self.rng.sample(running, len(running)):
            time.sleep(self.rng.uniform(0, 0.03))
            self._kill(process)
        self._settle(seen)

    def _kill(self, process: "subprocess.Popen[bytes]") -> None:
        if process.poll() is None:
            process.kill()
            self.kills += 1
        _, said = process.communicate()
        if process.returncode not in (0, -signal.SIGKILL):
            raise Unexpected(f"a command ended with status {process.returncode}: {said.decode()[-300:]}")

    def _settle(self, seen: int) -> None:
        """Looks at what the kills left, once the server has noticed that nobody listens."""
        time.sleep(0.1)
        self.check_objects()
        now = self.objects()
        for row in self.hub.state.log[seen:]:
            asked = _range(row)
            if asked is None:
                continue
            whole = row["sent"] >= asked[2]
            if asked not in now:
                self.in_flight += asked[2]
                if whole:
                    self.lost += row["sent"]
            elif not whole:
                self.in_flight += asked[2]  # another process had it, too, and finished
            if not whole:
                self.cut += row["sent"]
        self.kept = now

    def finish(self) -> Report:
        """Lets one fetch run to its end, checks that all is there, and adds up."""
        self.hub.state.set_mode("ok", {})
        self._finish("df_fetch", "all", REPO)
        found = json.loads(self._finish("df_fetch", "verify", REPO, "--json"))
        if found["damaged"] or found["vanished"] or found["bad_records"]:
            raise Unexpected(f"verify found {found}")
        status = json.loads(self._finish("df_fetch", "status", REPO, "--json"))
        if (status["layers_whole"], status["experts_present"]) != (status["layers"], status["experts"]):
            raise Unexpected(f"not all is there: {status}")
        self.check_objects()
        if left := [path for name in ("tmp", "claims") for path in (self.cache / name).glob("*")]:
            raise Unexpected(f"{len(left)} files were left behind, the first of them {left[0]}")
        whole = Counter(asked for row in self.hub.state.log if (asked := _range(row)) and row["sent"] >= asked[2])
        sent = sum(row["sent"] for row in self.hub.state.log if row["kind"] == "file")
        twice = sum(asked[2] * (times - 1) for asked, times in whole.items()) - self.lost
        return Report(
            kills=self.kills,
            rounds=self.rounds,
            model_nbytes=self.model_nbytes,
            sent_nbytes=sent,
            cut_nbytes=self.cut,
            lost_nbytes=self.lost,
            twice_nbytes=twice,
            in_flight_nbytes=self.in_flight,
            largest_nbytes=max(self.lengths.values()),
        )

    def check_objects(self) -> None:
        """Every file that has an object's name must hash to it."""
        for path in (self.cache / "objects").glob("*/*"):
            if hashlib.sha256(path.read_bytes()).hexdigest() != path.name:
                raise Unexpected(f"{path}: torn")

    def objects(self) -> set[Range]:
        """The spans that a process that starts now would find."""
        with open_store(REPO, cache_dir=self.cache, offline=True, environ=self.environment) as store:
            return {
                (store.catalog.shards[item.span.shard].name, item.span.offset, item.span.nbytes)
                for item in all_items(store.catalog) + rest_items(store.catalog)
                if store.is_local(item.span)
            }

    @property
    def missing_nbytes(self) -> int:
        return self.model_nbytes - sum(self.lengths[found] for found in self.kept)

    def _spans(self) -> dict[Range, int]:
        with open_store(REPO, cache_dir=self.cache, offline=True, environ=self.environment) as store:
            shards = store.catalog.shards
            spans = [item.span for item in all_items(store.catalog) + rest_items(store.catalog)]
            return {(shards[s.shard].name, s.offset, s.nbytes): s.nbytes for s in spans}

    def _start(self, module: str, *words: str) -> "subprocess.Popen[bytes]":
        program = f"from deltafin.cli import {module.removeprefix('df_')}_main; {module.removeprefix('df_')}_main()"
        command = [sys.executable, "-c", program, *words, "--cache-dir", str(self.cache)]
        return subprocess.Popen(command, env=self.environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE)

    def _finish(self, module: str, *words: str) -> bytes:
        process = self._start(module, *words)
        out, said = process.communicate()
        if process.returncode != 0:
            raise Unexpected(f"{module} {words[0]}: status {process.returncode}: {said.decode()[-300:]}")
        return out


def try_kills(directory: Path, rounds: int, seed: int, share_nbytes: int | None = None) -> Report:
    """The whole trial on the checkpoint in `directory`, in a temporary cache. Raises Unexpected.

    Kills come when the server has sent about `share_nbytes`, by default such that the rounds spread over the model.
    """
    rng = random.Random(seed)
    with tempfile.TemporaryDirectory(prefix="deltafin-kills-") as work, _hub(directory) as hub:
        trial = Trial(hub, Path(work) / "cache", rng)
        for number in range(rounds):
            share = share_nbytes or trial.missing_nbytes / (rounds - number)
            trial.round(int(share * rng.uniform(0.3, 1.7)) + 1)
            if sys.stderr.isatty():
                print(f"\r{number + 1} of {rounds}, {trial.missing_nbytes:,} bytes missing ", end="", file=sys.stderr)
        return trial.finish()


def _hub(directory: Path) -> AbstractContextManager[Hub]:
    spec = importlib.util.spec_from_file_location("faulty_range_server", SERVER)
    if spec is None or spec.loader is None:
        raise Unexpected(f"{SERVER} is missing")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.Handler.disable_nagle_algorithm = True  # it writes headers and body apart
    server: AbstractContextManager[Hub] = module.FaultServer(root=str(directory))
    return server


def _environment(endpoint: str, cache: Path) -> dict[str, str]:
    """Ours, less every setting of the hub or a proxy: nothing may reach another host or find a token."""
    names = ("HF_", "HUGGING", "DELTAFIN_")
    kept = {k: v for k, v in os.environ.items() if not k.startswith(names) and not k.lower().endswith("_proxy")}
    return kept | {"HF_ENDPOINT": endpoint, "HF_HOME": str(cache.parent / "hf"), "NO_PROXY": "127.0.0.1,localhost"}


def _range(row: Row) -> Range | None:
    """What a request for a span asked for; None for any other request."""
    if row["method"] != "GET" or row["status"] != 206 or row["range"] is None:
        return None
    first, last = map(int, row["range"].removeprefix("bytes=").split("-"))
    return row["path"].rpartition("/")[2], first, last - first + 1


def _lines(report: Report) -> Iterator[str]:
    extra = report.sent_nbytes - report.model_nbytes
    yield f"killed      {report.kills} processes in {report.rounds} rounds"
    yield f"model       {report.model_nbytes:14,} bytes"
    yield f"sent        {report.sent_nbytes:14,} bytes, {extra:,} more than the model"
    yield f"  cut short {report.cut_nbytes:14,}"
    yield f"  lost      {report.lost_nbytes:14,} had arrived and were no object yet"
    yield f"  twice     {report.twice_nbytes:14,} by two processes"
    yield f"bound       {report.tight_bound_nbytes:14,} the model and what was on its way at the kills"
    yield f"            {report.bound_nbytes:14,} the model and kills x {TRANSFERS} x the largest span"


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("directory", nargs="?", type=Path, default=ROOT / "demo", help="a checkpoint (default: demo)")
    parser.add_argument("--rounds", type=int, default=50, help="how often all three are killed (default 50)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    given = parser.parse_args(words)
    try:
        report = try_kills(given.directory, given.rounds, given.seed)
    except Unexpected as e:
        print(f"kill_fetches: {e}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    print(json.dumps(asdict(report)) if given.json else "\n".join(_lines(report)))
    return 0 if report.sent_nbytes <= min(report.bound_nbytes, report.tight_bound_nbytes) else 1


if __name__ == "__main__":
    sys.exit(main())
