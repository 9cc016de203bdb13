#!/usr/bin/env python3
"""What the server costs beside df-run, and what eight chats at once bring beside one.

`server_speed.py overhead [MODEL ..] [--tokens N] [--rounds N]` continues the same prompt by as many tokens with df-run
(the time of its engine, without its start) and with df-serve, streamed and not (the time that one client waits), in
turns. MODEL is anything that has a tokenizer; `k93` (the default, with `demo`) is a checkpoint made on the spot with
K3's 93 layers. The texts must be equal. df-run keeps no state of a text that it only continues, so the server is to
keep none either.

`server_speed.py together FOLDER [--clients LIST] [--tokens N] [--rounds N] [--ram SIZE]` serves the stand-in of a few
layers of true size in FOLDER (df-bench batch makes one) with so little memory that its spine streams, and lets 1 and 8
clients ask at once, in turns. A stand-in has no tokenizer: it gets one whose words are the first byte strings.
"""

from __future__ import annotations

import argparse
import base64
import importlib.util
import itertools
import json
import os
import random
import re
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.client import HTTPConnection
from pathlib import Path
from types import ModuleType
from typing import Any

import deltafin
from deltafin.errors import DeltafinError

ROOT = Path(deltafin.__file__).parent
SEED = 20261129
ARMS = ("df-run", "streamed", "whole")
PROMPT = "Story number {}: once upon a time there was a little fox"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    commands = parser.add_subparsers(dest="command", required=True)
    overhead = commands.add_parser("overhead")
    overhead.add_argument("models", nargs="*", default=["demo", "k93"], metavar="MODEL")
    overhead.add_argument("--tokens", type=int, default=200)
    overhead.add_argument("--rounds", type=int, default=5)
    together = commands.add_parser("together")
    together.add_argument("folder", type=Path)
    together.add_argument("--clients", type=lambda text: [int(n) for n in text.split(",")], default=[1, 8])
    together.add_argument("--tokens", type=int, default=5)
    together.add_argument("--rounds", type=int, default=2)
    together.add_argument("--ram", default="2.2GB")
    args = parser.parse_args()
    try:
        if args.command == "overhead":
            for model in args.models:
                measure_overhead(model, args.tokens, args.rounds)
        else:
            measure_together(args.folder, args.clients, args.tokens, args.rounds, args.ram)
    except (OSError, DeltafinError) as e:
        print(f"server_speed: {e}", file=sys.stderr)
        return 1
    return 0


# ---- one client beside df-run -----------------------------------------------------------------------------


def measure_overhead(model: str, tokens: int, rounds: int) -> None:
    """Prints a line a round, and the medians."""
    with tempfile.TemporaryDirectory() as scratch:
        where = _k93(Path(scratch) / "k93") if model == "k93" else model
        env = {**os.environ, "DELTAFIN_CACHE": str(Path(scratch) / "cache")}
        found: dict[str, list[float]] = {arm: [] for arm in ARMS}
        with _df_serve(where, env) as port:
            for number in range(-1, rounds):  # the first one warms up
                prompt = PROMPT.format(number)
                order = ARMS[number % 3 :] + ARMS[: number % 3]
                texts, rates = {}, {}
                for arm in order:
                    texts[arm], seconds = _one(arm, where, port, env, prompt, tokens)
                    rates[arm] = tokens / seconds
                if len(set(texts.values())) != 1:
                    raise DeltafinError(f"{model}: the arms wrote different texts: {texts}")
                if number >= 0:
                    for arm in ARMS:
                        found[arm].append(rates[arm])
                    print(f"{model} round {number + 1}: " + _in_words(rates), flush=True)
        medians = {arm: statistics.median(rates) for arm, rates in found.items()}
        ratios = {
            arm: statistics.median(a / b for a, b in zip(found[arm], found["df-run"], strict=True)) for arm in ARMS[1:]
        }
        shown = ", ".join(f"{arm} {ratio:.3f} of df-run" for arm, ratio in ratios.items())
        print(f"{model}, {tokens} tokens, medians of {rounds}: {_in_words(medians)}; by rounds {shown}")


def _in_words(rates: dict[str, float]) -> str:
    return ", ".join(f"{arm} {rates[arm]:.1f}" for arm in ARMS) + " tokens/s"


def _one(arm: str, model: str, port: int, env: dict[str, str], prompt: str, tokens: int) -> tuple[str, float]:
    """The text, and the seconds it took."""
    if arm == "df-run":
        words = ["--prompt", prompt, "--max-new", str(tokens), "--json", *_no_end(model)]
        done = subprocess.run([*_program("run"), model, *words], env=env, capture_output=True, text=True)
        if done.returncode != 0:
            raise DeltafinError(f"df-run failed: {done.stderr.strip()}")
        shown = json.loads(done.stdout)
        return shown["text"], shown["total_s"]
    body = {"model": "x", "prompt": prompt, "max_tokens": tokens, "logit_bias": {i: -100 for i in _stop_ids(model)}}
    began = time.monotonic()
    answer = ask(port, {**body, "stream": arm == "streamed"})
    seconds = time.monotonic() - began
    if answer.tokens != tokens:
        raise DeltafinError(f"the server wrote {answer.tokens} tokens, not {tokens}")
    return answer.text, seconds


def _stop_ids(model: str) -> list[int]:
    """What ends a text; forbidden, so that all arms write as much."""
    config = json.loads(((ROOT / "demo" if model == "demo" else Path(model)) / "config.json").read_text())
    vocab = config["text_config"]["vocab_size"]
    return [vocab - 255, vocab - 254]


def _no_end(model: str) -> list[str]:
    return [word for i in _stop_ids(model) for word in ("--logit-bias", f"{i}=-100")]


def _program(name: str) -> list[str]:
    return [sys.executable, "-c", f"from deltafin.cli import {name}_main; {name}_main()"]


@contextmanager
def _df_serve(model: str, env: dict[str, str]) -> Iterator[int]:
    """A server in a process of its own; its port."""
    words = [*_program("serve"), model, "--port", "0", "--name", "x", "--keep-states", "0"]
    server = subprocess.Popen(words, env=env, stderr=subprocess.PIPE, text=True)
    assert server.stderr is not None
    try:
        first = server.stderr.readline()
        address = re.search(r"http://127\.0\.0\.1:(\d+)$", first)
        if address is None:
            raise DeltafinError(f"df-serve did not start: {first.strip()}")
        threading.Thread(target=server.stderr.read, daemon=True).start()  # nobody is held up by a full pipe
        yield int(address[1])
    finally:
        server.terminate()
        server.wait()


@dataclass
class Answer:
    text: str = ""
    tokens: int = 0
    times: list[float] = field(default_factory=list)  # of its parts, by the monotonic clock


def ask(port: int, body: dict[str, object]) -> Answer:
    """A completion from a server on this machine, by the leanest client there is."""
    connection = HTTPConnection("127.0.0.1", port, timeout=600)
    stream = bool(body.get("stream"))
    sent = {**body, "stream_options": {"include_usage": True}} if stream else body
    connection.request("POST", "/v1/completions", json.dumps(sent), {"Content-Type": "application/json"})
    response = connection.getresponse()
    if response.status != 200:
        raise DeltafinError(f"the server answered {response.status}: {response.read()[:500]!r}")
    answer = Answer()
    objects = _events(response) if stream else iter([json.load(response)])
    for part in objects:
        answer.text += "".join(choice["text"] for choice in part["choices"])
        answer.times.append(time.monotonic())
        if part.get("usage"):
            answer.tokens = part["usage"]["completion_tokens"]
    connection.close()
    return answer


def _events(lines: Iterator[bytes]) -> Iterator[dict[str, Any]]:
    for line in lines:
        if line.startswith(b"data: {"):
            yield json.loads(line[6:])


# ---- several clients on layers of true size ---------------------------------------------------------------


def measure_together(folder: Path, clients: Sequence[int], tokens: int, rounds: int, ram: str) -> None:
    """Prints a line for each measurement, and the medians."""
    from deltafin.store import parse_nbytes

    nbytes = parse_nbytes(ram)
    if nbytes is None:
        raise DeltafinError(f"--ram {ram!r} is no size")
    rates: dict[int, list[float]] = {count: [] for count in clients}
    with _served_stand_in(folder, nbytes, max(clients)) as port:
        _at_once(port, 1, 1, -1)  # warms up
        for number in range(rounds):
            for count in clients if number % 2 == 0 else clients[::-1]:
                seconds = _at_once(port, count, tokens, number)
                rates[count].append(count * tokens / seconds)
                print(
                    f"round {number + 1}, {count} clients: {seconds:.1f} s, {rates[count][-1]:.3f} tokens/s", flush=True
                )
    medians = {count: statistics.median(found) for count, found in rates.items()}
    first = medians[clients[0]]
    for count in clients:
        print(f"{count} clients: {medians[count]:.3f} tokens/s, {medians[count] / first:.2f} x {clients[0]}")


def _at_once(port: int, clients: int, tokens: int, number: int) -> float:
    """Seconds until all of them have their last token; each has a prompt of its own, of four random tokens."""
    draw = random.Random(f"{number} {clients}")
    bodies = [
        {
            "model": "x",
            "prompt": [draw.randrange(1000, 100_000) for _ in range(4)],
            "max_tokens": tokens,
            "stream": True,
        }
        for _ in range(clients)
    ]
    written: list[int] = []
    threads = [threading.Thread(target=lambda body=body: written.append(ask(port, body).tokens)) for body in bodies]
    began = time.monotonic()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    seconds = time.monotonic() - began
    if written != [tokens] * clients:
        raise DeltafinError(f"{clients} clients got {written} tokens, not {tokens} each")
    return seconds


@contextmanager
def _served_stand_in(folder: Path, ram: int, parallel: int) -> Iterator[int]:
    """A server in this process on a stand-in, which has no tokenizer of its own; its port."""
    from dataclasses import replace

    import uvicorn

    from deltafin.cli.bench_model import few_layers
    from deltafin.runtime.openai import serving_of
    from deltafin.runtime.server import Engine, Starts, open_model
    from deltafin.runtime.server.addresses import Listeners, addresses_of
    from deltafin.runtime.server.app import create_app
    from deltafin.runtime.server.listening import uvicorn_config
    from deltafin.runtime.server.missing import MissingExperts
    from deltafin.runtime.server.services import Services
    from deltafin.runtime.server.settings import Settings
    from deltafin.runtime.states import PrefixStore
    from deltafin.runtime.tokenizer import Tokenizer
    from deltafin.store import open_store

    standin = few_layers(folder, None)
    with open_store(standin.model, cache_dir=standin.cache_dir, offline=True) as store:
        vocab = store.catalog.config.vocab_size
        serving = replace(serving_of(store, Tokenizer(*made_up_words(vocab), vocab), None, 16), name="x")
        model, size, serving = open_model(store, serving, ram=ram, parallel=parallel, context=256)
        plan = model.memory
        assert plan is not None
        print(
            f"{standin.model}: up to {size.sequences} at once in {ram / 1e9:.1f} GB; {len(plan.resident)} of "
            f"{plan.spine_layers} layers of the spine stay, and {plan.resident_experts} experts"
        )
        with model, Listeners("127.0.0.1", addresses_of("127.0.0.1"), 0) as listeners:
            engine = Engine(model, serving, size, starts=Starts(model, PrefixStore(0)))
            settings = Settings(port=listeners.port)
            app = create_app(Services(engine, serving, settings, MissingExperts(store)))
            engine.start()
            listeners.listen(64)
            server = uvicorn.Server(uvicorn_config(app, settings))
            thread = threading.Thread(target=server.run, kwargs={"sockets": listeners.sockets})
            thread.start()
            try:
                yield listeners.port
            finally:
                engine.close()
                server.should_exit = True
                thread.join()


# ---- words for models that have none ----------------------------------------------------------------------


def _k93(folder: Path) -> str:
    """K3's 93 layers in miniature, as the tests have them, with a tokenizer."""
    tool = _load(ROOT / "tools" / "make_checkpoint.py")
    tool.generate(folder, "k93", SEED)
    config = json.loads((folder / "config.json").read_text())
    ranks, names = made_up_words(config["text_config"]["vocab_size"])
    (folder / "tiktoken.model").write_bytes(ranks)
    (folder / "tokenizer_config.json").write_bytes(names)
    return str(folder)


def made_up_words(vocab: int) -> tuple[bytes, bytes]:
    """tiktoken.model and tokenizer_config.json: the shortest byte strings, and the special names of the demo."""
    count = vocab - 256
    words = (bytes(word) for length in (1, 2, 3) for word in itertools.product(range(256), repeat=length))
    ranks = b"".join(base64.b64encode(w) + b" %d\n" % rank for rank, w in enumerate(itertools.islice(words, count)))
    demo = json.loads((ROOT / "demo" / "tokenizer_config.json").read_text())["added_tokens_decoder"]
    first = min(map(int, demo))
    names = {str(count + int(key) - first): {"content": entry["content"]} for key, entry in demo.items()}
    return ranks, json.dumps({"added_tokens_decoder": names}).encode()


def _load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


if __name__ == "__main__":
    sys.exit(main())
