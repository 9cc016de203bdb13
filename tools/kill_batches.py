#!/usr/bin/env python3
"""Kill `df-run batch` again and again: the file that it leaves in the end is the one of a run that nobody disturbed.

The requests are those of the demo's golden conversations, greedy and drawn, some with log-probabilities. They are
answered once in peace. Then the same command is started on another output, killed with SIGKILL at a random moment,
and started again; after each kill every line of the output must be a whole answer, but for the last. At the end one
run goes to completion: each request must have one answer, the same, to the last log-probability, as without kills.

Exit status 0 means that all of this held; else one line says what did not, and the status is 1.
"""

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CASES = ROOT / "tests" / "golden" / "demo.json"
BATCH = "from deltafin.cli import run_main; run_main()"
TIMEOUT_S = 600.0

Json = dict[str, object]


class Unexpected(Exception):
    """A promise was broken."""


@dataclass(frozen=True, slots=True)
class Report:
    """What the kills came to."""

    requests: int
    kills: int
    answered: list[int]  # after each kill
    torn: int  # kills that left an unfinished line
    tokens: int  # of all answers
    recovered: int  # taken from the journal by the last run
    last_tokens: int  # drawn by the last run


def requests(count: int, *, short: bool = False) -> list[Json]:
    """The golden conversations in turn; every third is drawn, every fourth has log-probabilities."""
    cases = json.loads(CASES.read_text())["cases"]
    return [_request(number, cases[number % len(cases)], short) for number in range(count)]


def _request(number: int, case: Json, short: bool) -> Json:
    body: Json = {"model": "demo", "max_tokens": 12 if short else 80, "return_token_ids": True}
    chat = case["kind"] == "chat"
    if chat:
        body |= {"messages": case["messages"], "reasoning_effort": case.get("effort", "low")}
        if not case["thinking"]:
            body["reasoning_effort"] = "none"
        if "tools" in case:
            body["tools"] = case["tools"]
    else:
        body["prompt"] = case["prompt"]
    if number % 3 == 1:
        body["temperature"] = 1.5
    if number % 4 == 2:
        body |= {"logprobs": True, "top_logprobs": 3} if chat else {"logprobs": 3}
    url = "/v1/chat/completions" if chat else "/v1/completions"
    return {"custom_id": f"{number}: {case['name']}", "method": "POST", "url": url, "body": body}


class Trial:
    """One file of requests, and the command that is killed on it."""

    def __init__(self, work: Path, lines: Sequence[Json], words: Sequence[str], rng: random.Random) -> None:
        self.source, self.target = work / "requests.jsonl", work / "answers.jsonl"
        self.source.write_text("".join(json.dumps(line) + "\n" for line in lines))
        self.words, self.rng = words, rng
        self.cache = work / "cache"
        self.count = len(lines)
        self.kills = self.torn = 0
        self.answered: list[int] = []
        begun = time.monotonic()
        self.finish(work / "undisturbed.jsonl")
        self.whole_s = time.monotonic() - begun
        self.expected = answers(work / "undisturbed.jsonl")
        if len(self.expected) != self.count:
            raise Unexpected(f"an undisturbed run answered {len(self.expected)} of {self.count} requests")

    def round(self, share_s: float, *, anywhere: bool = False) -> bool:
        """Starts the command and kills it; False if it was done before.

        `share_s` after its first pass, on average, or `anywhere` from its start on.
        """
        before = self._journal()
        process = self._start(self.target)
        end = time.monotonic() + TIMEOUT_S
        first = before  # the journal as this process has begun it
        while not anywhere and process.poll() is None and time.monotonic() < end:
            now = self._journal()
            if first == before:
                first = now
            elif now != first:
                break
            time.sleep(0.002)
        time.sleep(self.rng.uniform(0, 2 * share_s))
        killed = process.poll() is None
        process.send_signal(signal.SIGKILL)
        _, said = process.communicate()
        if process.returncode not in (0, -signal.SIGKILL):
            raise Unexpected(f"the command ended with status {process.returncode}: {said.decode()[-300:]}")
        if killed:
            self.kills += 1
            self._look()
        return killed

    def finish(self, target: Path) -> Json:
        """Lets the command run to its end; its summary."""
        process = self._start(target)
        out, said = process.communicate(timeout=TIMEOUT_S)
        if process.returncode != 0:
            raise Unexpected(f"the command ended with status {process.returncode}: {said.decode()[-300:]}")
        summary: Json = json.loads(out)
        return summary

    def check(self) -> None:
        """Compares the file with that of the undisturbed run."""
        found = answers(self.target)
        if found != self.expected:
            wrong = next(k for k in self.expected if found.get(k) != self.expected[k])
            raise Unexpected(f"the answer to {wrong!r} is another one than without kills")
        if left := sorted(p.name for p in self.target.parent.iterdir() if "answers.jsonl." in p.name):
            raise Unexpected(f"{left[0]} was left behind")

    def _look(self) -> None:
        if not self.target.exists():
            self.answered.append(0)
            return
        raw = self.target.read_bytes()
        whole, _, torn = raw.rpartition(b"\n")
        self.torn += bool(torn)
        part = self.target.with_name("whole.jsonl")
        part.write_bytes(whole + b"\n" if whole else b"")
        self.answered.append(len(answers(part)))
        part.unlink()

    def _journal(self) -> tuple[int, int]:
        """Which file the journal is, and its length."""
        try:
            found = self.target.with_name(self.target.name + ".journal").stat()
        except FileNotFoundError:
            return 0, 0
        return found.st_ino, found.st_size

    def _start(self, target: Path) -> "subprocess.Popen[bytes]":
        words = ["batch", "demo", "-i", self.source, "-o", target, "--cache-dir", self.cache, "--json", *self.words]
        environment = {k: v for k, v in os.environ.items() if not k.startswith("DELTAFIN_")}
        return subprocess.Popen(
            [sys.executable, "-c", BATCH, *map(str, words)],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )


def answers(path: Path) -> dict[str, Json]:
    """All lines of an output by custom_id, without the time. Raises Unexpected if one is no answer, or there twice."""
    found: dict[str, Json] = {}
    for number, line in enumerate(path.read_bytes().splitlines(keepends=True), start=1):
        try:
            answer = json.loads(line)
            name, response = answer["custom_id"], answer["response"]
            del response["body"]["created"]
        except (ValueError, KeyError, TypeError) as e:
            raise Unexpected(f"{path.name}: line {number} is no answer ({type(e).__name__})") from None
        if not line.endswith(b"\n") or response["status_code"] != 200:
            raise Unexpected(f"{path.name}: line {number} is not whole, or an error")
        if name in found:
            raise Unexpected(f"{path.name}: {name!r} is answered twice")
        found[name] = answer
    return found


def try_kills(
    kills: int,
    seed: int,
    count: int = 64,
    words: Sequence[str] = (),
    *,
    short: bool = False,
    share_s: float | None = None,
) -> Report:
    """The whole trial, in a temporary directory. Raises Unexpected.

    Kills come about `share_s` after the first pass, by default such that they spread over the whole work.
    """
    rng = random.Random(seed)
    with tempfile.TemporaryDirectory(prefix="deltafin-kills-") as work:
        trial = Trial(Path(work), requests(count, short=short), words, rng)
        for number in range(kills):
            if not trial.round(share_s or trial.whole_s / (kills + 1), anywhere=number % 4 == 3):
                break
            if sys.stderr.isatty():
                print(f"\r{number + 1} of {kills}, {trial.answered[-1]} answered ", end="", file=sys.stderr)
        summary = trial.finish(trial.target)
        trial.check()
        tokens = sum(_tokens(answer) for answer in trial.expected.values())
        return Report(
            requests=count,
            kills=trial.kills,
            answered=trial.answered,
            torn=trial.torn,
            tokens=tokens,
            recovered=int(str(summary["recovered"])),
            last_tokens=int(str(summary["tokens"])),
        )


def _tokens(answer: Json) -> int:
    response = answer["response"]
    assert isinstance(response, dict)
    return int(response["body"]["usage"]["completion_tokens"])


def _lines(report: Report) -> Iterator[str]:
    yield f"killed     {report.kills} times; {report.torn} of them left an unfinished line"
    yield f"answered   {', '.join(map(str, report.answered))} of {report.requests} after each"
    yield f"last run   {report.recovered:,} tokens taken from the journal, {report.last_tokens:,} drawn"
    yield f"the end    {report.requests} answers of {report.tokens:,} tokens, each as without kills"


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--kills", type=int, default=10, help="how often it is killed (default 10)")
    parser.add_argument("--requests", type=int, default=64, help="how many requests there are (default 64)")
    parser.add_argument("--parallel", type=int, default=16, help="how many are answered at once (default 16)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    given = parser.parse_args(words)
    try:
        report = try_kills(given.kills, given.seed, given.requests, ("--parallel", str(given.parallel)))
        if report.kills < given.kills:
            raise Unexpected(f"all was answered after {report.kills} of {given.kills} kills; give more --requests")
    except Unexpected as e:
        print(f"kill_batches: {e}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    print(json.dumps(asdict(report)) if given.json else "\n".join(_lines(report)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
