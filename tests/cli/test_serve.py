"""df-serve as a user runs it: what it says and refuses, how it ends, and what it does while weights are missing."""

from __future__ import annotations

import json
import os
import re
import resource
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import pytest

from deltafin.cli.serve import most_connections
from deltafin.errors import DeltafinError
from deltafin.runtime import read_trace
from deltafin.store import open_store, pair_items, remove, spine_items

REPO = "org/demo"
PROGRAM = (sys.executable, "-c", "from deltafin.cli import serve_main; serve_main()")
CAPITAL = {"model": "demo", "prompt": "The capital of France is", "max_tokens": 12}
STORY = {**CAPITAL, "prompt": "Once upon a time there was a little fox", "max_tokens": 60}


@dataclass
class Serving:
    """A df-serve in a process of its own."""

    process: subprocess.Popen[str]
    lines: list[str] = field(default_factory=list)  # of stderr
    headers: dict[str, str] = field(default_factory=dict)  # of requests to it

    def __post_init__(self) -> None:
        self.thread = threading.Thread(target=self._read)
        self.thread.start()

    @property
    def port(self) -> int:
        found = re.search(r"df-serve: serving .+ on http://127\.0\.0\.1:(\d+)\n", "".join(self.lines))
        assert found is not None, self.lines
        return int(found[1])

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def err(self) -> str:
        return "".join(self.lines)

    def _read(self) -> None:
        assert self.process.stderr is not None
        self.lines.extend(self.process.stderr)

    def post(self, body: dict, path: str = "/v1/completions", **keywords) -> httpx.Response:
        return httpx.post(self.url + path, json=body, timeout=60, **{"headers": self.headers, **keywords})

    def end(self, sig: int = signal.SIGINT, timeout_s: float = 20.0) -> int:
        self.process.send_signal(sig)
        return self.process.wait(timeout_s)


@pytest.fixture
def serving(tmp_path, until) -> Iterator[Callable[..., Serving]]:
    """`serving("demo", ..)` starts df-serve on a free port and waits until it answers; killed when the test ends."""
    running: list[Serving] = []

    def begin(*args: object, cache: Path | None = None, env: dict[str, str] | None = None, prefix=()):
        words = [*prefix, *PROGRAM, *map(str, args), "--threads", "1", *([] if "--port" in args else ["--port", "0"])]
        around = {**os.environ, "DELTAFIN_CACHE": str(cache or tmp_path / "cache"), **(env or {})}
        served = Serving(subprocess.Popen(words, env=around, stderr=subprocess.PIPE, text=True))
        running.append(served)
        until(lambda: re.search("key( is asked for)?\n", served.err) or served.process.poll() is not None)
        assert served.process.poll() is None, served.err
        return served

    yield begin
    for served in running:
        served.process.kill()
        served.process.wait()
        served.thread.join()


# ---- what it says, and how it ends ------------------------------------------------------------------------


def test_it_says_what_may_be_expected_asks_for_the_key_and_tells_whoever_waits_when_it_ends(serving, tmp_path, capital):
    key = "k3y-that-nobody-may-see"
    more = ("--name", "my model", "--parallel", 3, "--context", 500, "-v", "-v")
    served = serving("demo", *more, env={"DELTAFIN_API_KEY": key})
    said = [line for line in served.lines if ": debug: " not in line]
    assert said[0] == f"df-serve: serving my model on {served.url}\n"
    assert said[1].startswith("df-serve: up to 3 answers at once, ") and said[1].endswith(", 500 in one\n")
    assert said[2] == f"df-serve: files and batches are kept in {tmp_path}/cache/server/demo\n"
    assert said[3] == "df-serve: requests need the key\n"
    assert served.post(CAPITAL).status_code == 401
    assert served.post(CAPITAL, headers={"Authorization": "Bearer wr0ng"}).status_code == 401
    served.headers["Authorization"] = f"Bearer {key}"
    for name in ("my model", "demo"):  # its own name goes on being understood
        answer = served.post({**CAPITAL, "model": name})
        assert answer.status_code == 200
        assert capital["text"].startswith(answer.json()["choices"][0]["text"])
        assert answer.json()["model"] == "my model"
    form = {**served.headers, "Content-Type": "multipart/form-data; boundary=x"}
    assert httpx.post(f"{served.url}/v1/files", content=b"no form", headers=form).status_code == 400
    with _long_stream(served, max_tokens=400) as lines:
        while '"text"' not in next(lines):
            pass
        began = time.monotonic()
        served.process.send_signal(signal.SIGINT)
        told = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
        assert served.process.wait(20) == 130
    assert time.monotonic() - began < 5
    assert told[-1]["error"]["code"] == "stopped"
    served.thread.join()
    assert served.err.endswith("\ndf-serve: interrupted; what was finished is kept\n") and "Traceback" not in served.err
    assert len([line for line in served.lines if "POST /v1/completions 200" in line]) == 3
    assert all(line.startswith("df-serve: ") for line in served.lines if line != "\n"), "no library speaks for itself"
    for secret in (key, "wr0ng", "capital", "fox", "Paris"):
        assert secret not in served.err, "requests are logged; prompts, answers and keys are not"


def test_a_second_ctrl_c_waits_for_nobody(serving, until):
    """A client that never sends the rest of its request would hold up the end for ten seconds."""
    served = serving("demo")
    with socket.create_connection(("127.0.0.1", served.port)) as client:
        head = b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
        client.sendall(head + b"Content-Length: 100\r\n\r\n{")
        time.sleep(0.3)
        served.process.send_signal(signal.SIGINT)
        until(lambda: "df-serve: stopping" in served.err)
        time.sleep(0.3)
        assert served.process.poll() is None
        began = time.monotonic()
        assert served.end() == 130
        assert time.monotonic() - began < 2


@contextmanager
def _long_stream(served: Serving, **changes: object) -> Iterator[Iterator[str]]:
    """Lines of a stream that would go on for long."""
    body = {**STORY, "stream": True, "logit_bias": {"1793": -100, "1794": -100}, **changes}
    with (
        httpx.Client(timeout=60, headers=served.headers) as client,
        client.stream("POST", f"{served.url}/v1/completions", json=body) as response,
    ):
        yield response.iter_lines()


# ---- what it refuses --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "status", "line"),
    [
        (["--host", "0.0.0.0"], 2, r"--host 0\.0\.0\.0 can be reached from other machines: set DELTAFIN_API_KEY .*"),
        (["--host", "::"], 2, r"--host :: can be reached from other machines: .*"),
        (["--host", "nowhere.invalid"], 1, r"--host nowhere\.invalid: not known .*"),
        (["--host", "192.0.2.7", "--api-key", "k"], 1, r"--host 192\.0\.2\.7 is no address of this machine; .*"),
        (["--host", ""], 2, r"--host '': give a name or an address, .*"),
        (["--api-key", ""], 2, "--api-key is empty; give a key, or leave it out"),
        (["--api-key", "s3cr t"], 2, "--api-key: a key has letters, digits and signs of ASCII only, and no blanks"),
        (["--api-key", "schlüssel"], 2, "--api-key: a key has .*"),
        (["--cors", "*"], 2, r"--cors '\*': an origin is a scheme and a host, .*"),
        (["--cors", "https://chat.example/path"], 2, "--cors .*: an origin is .*"),
        (["--name", ""], 2, "--name '': give 1 to 256 printable characters"),
        (["--name", "a\nb"], 2, r"--name .*: give 1 to 256 printable characters"),
        (["--max-body", "10"], 2, "--max-body 10: no request is so short; give 1KiB or more"),
        (["--allow-missing"], 2, "--allow-missing has no effect without --offline: what is missing is fetched"),
    ],
)
def test_what_makes_no_sense_is_one_line_before_anything_is_opened(df, words, status, line, full_tiny):
    done = df("df-serve", "org/tiny", "--port", 0, *words)
    assert done.status == status and done.out == ""
    assert re.fullmatch(f"df-serve: {line}\n", done.err), done.err
    assert not any(secret in done.err for secret in ("s3cr", "schl"))
    assert full_tiny.state.log == []


@pytest.mark.parametrize("key", ["", "with blank", "tab\tin it", "schlüssel"])
def test_a_key_of_the_environment_is_checked_too_and_never_shown(df, monkeypatch, key):
    monkeypatch.setenv("DELTAFIN_API_KEY", key)
    done = df("df-serve", "demo", "--port", 0)
    assert done.status == 2 and done.err.startswith("df-serve: DELTAFIN_API_KEY")
    assert not key or key not in done.err


def test_a_port_in_use_is_refused_before_the_model_is_opened(df):
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        done = df("df-serve", "no/such-model", "--port", port)
    assert done.status == 1
    assert done.err == (
        f"df-serve: port {port} of 127.0.0.1 is in use, maybe by another server; stop it, or choose another --port "
        "(0: any)\n"
    )


def test_a_model_without_a_tokenizer_cannot_be_served(df, tiny_dir):
    done = df("df-serve", tiny_dir, "--port", 0)
    assert done.status == 2 and done.err.count("\n") == 1
    assert "has no tokenizer, so it cannot answer requests, which are text" in done.err


def test_too_little_memory_is_refused_with_what_would_do(df):
    done = df("df-serve", "demo", "--port", 0, "--parallel", 1000, "--ram", "300MB")
    assert done.status == 2
    assert re.fullmatch(r"df-serve: --parallel 1000: there is memory for \d+ answers of .*\n", done.err), done.err


# ---- limits -----------------------------------------------------------------------------------------------


def test_with_few_open_files_some_clients_are_told_to_come_again_and_none_hangs(serving):
    served = serving("demo", prefix=["sh", "-c", 'ulimit -n 64; exec "$@"', "sh"])
    with ExitStack() as stack:
        clients = [stack.enter_context(socket.create_connection(("127.0.0.1", served.port), 20)) for _ in range(50)]
        answers = [_exchange(client, b"GET /v1/models HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n") for client in clients]
        well = [a for a in answers if a.startswith(b"HTTP/1.1 200")]
        busy = [a for a in answers if a.startswith(b"HTTP/1.1 503")]
        assert len(well) >= 8 and len(busy) == 8
        assert len(well) + len(busy) + answers.count(b"") == 50
        assert b"\r\nretry-after: 5\r\n" in busy[0] and b"too_many_connections" in busy[0]
    assert served.post(CAPITAL).status_code == 200
    assert served.end() == 130
    assert "open files" not in served.err and "out of system resource" not in served.err


def _exchange(client: socket.socket, request: bytes) -> bytes:
    """The answer, as soon as its body has come; empty if the connection was closed without one."""
    answer = b""
    try:
        client.sendall(request)
        while b"\r\n\r\n{" not in answer:
            piece = client.recv(4096)
            if not piece:
                break
            answer += piece
    except ConnectionError:
        pass
    return answer


def test_too_few_open_files_are_said_with_both_numbers(monkeypatch):
    taken = len(os.listdir("/dev/fd"))
    monkeypatch.setattr(resource, "getrlimit", lambda which: (taken + 20, taken + 20))
    with pytest.raises(DeltafinError) as e:
        most_connections(16)
    found = re.fullmatch(r"open files: (\d+) are needed, (\d+) allowed; run ulimit -n \1 first", str(e.value))
    assert found is not None and int(found[1]) > int(found[2]) == taken + 20


# ---- weights that are missing -----------------------------------------------------------------------------


def test_on_an_empty_cache_it_fetches_what_answers_need_and_says_what_is_missing(
    serving, hub, demo_dir, capital, until
):
    server = hub(demo_dir)
    served = serving(REPO, "--yes")
    said = re.search(r": ([\d,]+) of ([\d,]+) experts \(.*\) are not on this machine; each is fetched when", served.err)
    assert said is not None, served.err
    before, total = (int(number.replace(",", "")) for number in said.groups())
    assert before == total

    server.set_mode("gone_404")
    lost = served.post({**CAPITAL, "model": REPO})
    assert (lost.status_code, lost.json()["error"]["code"]) == (503, "network"), "the answer fails, not the server"
    server.set_mode("ok")
    answer = served.post({**CAPITAL, "model": REPO})
    assert capital["text"].startswith(answer.json()["choices"][0]["text"])
    assert answer.headers["X-Deltafin-Missing-Experts"] == f"{total} of {total}"

    def missing() -> int:
        return int(httpx.get(f"{served.url}/v1/models").headers["X-Deltafin-Missing-Experts"].split()[0])

    until(lambda: 0 < missing() < total)
    assert served.end(signal.SIGTERM) == 0
    served.thread.join()
    assert served.err.endswith("df-serve: stopped\n")


def test_without_a_yes_nothing_large_is_fetched(df, hub, demo_dir, monkeypatch):
    server = hub(demo_dir)
    monkeypatch.setattr("deltafin.cli.options.ASK_ABOVE_NBYTES", 1000)
    done = df("df-serve", REPO, "--port", 0)
    assert done.status == 2 and "Add --yes to go on" in done.err
    assert "of experts as they are needed" in done.err
    assert server is not None


@pytest.mark.parametrize("how", ["--offline", "HF_HUB_OFFLINE"])
def test_offline_with_experts_missing_it_says_how_many_and_which_command_brings_them(
    df, full_demo, tmp_path, how, monkeypatch
):
    _remove(tmp_path / "cache", [(12, 0), (12, 1), (12, 5)])
    if how == "HF_HUB_OFFLINE":
        monkeypatch.setenv(how, "1")
    done = df("df-serve", REPO, "--port", 0, *(["--offline"] if how == "--offline" else []))
    assert done.status == 1
    assert re.fullmatch(
        rf"df-serve: 3 of 384 experts \(.* KB\) are not on this machine; without --offline run: df-fetch all {REPO}; "
        r"or serve what is here, with --allow-missing\n",
        done.err,
    ), done.err
    assert full_demo.state.log == []


def test_offline_without_all_of_the_spine_nothing_can_be_served(df, full_demo, tmp_path):
    _remove(tmp_path / "cache", [], spine=True)
    done = df("df-serve", REPO, "--port", 0, "--offline", "--allow-missing")
    assert done.status == 1
    assert re.fullmatch(
        rf"df-serve: [0-9.]+ KB of the spine are not on this machine; without --offline run: df-fetch spine {REPO}",
        done.err.removesuffix("\n"),
    ), done.err
    assert full_demo.state.log == []


def test_offline_with_an_expert_missing_only_answers_that_need_it_fail_and_no_other_socket_is_opened(
    serving, full_demo, tmp_path, df
):
    """A pair of asyncio's own, and one with which urllib3 finds out about IPv6, do not count: they reach nobody."""
    used, text = _experts_of(df, CAPITAL, tmp_path / "capital")
    more, _ = _experts_of(df, STORY, tmp_path / "story")
    layer, number = min(more - used)
    _remove(tmp_path / "cache", [(layer, number)])
    trace = tmp_path / "calls"
    watch = [
        "strace",
        "-f",
        "--seccomp-bpf",
        "-e",
        "trace=connect,bind,listen,sendto,sendmsg,sendmmsg",
        "-o",
        str(trace),
    ]
    can_watch = (
        shutil.which("strace") is not None and subprocess.run([*watch, "true"], capture_output=True).returncode == 0
    )
    served = serving(REPO, "--offline", "--allow-missing", prefix=watch if can_watch else ())
    assert "; an answer that needs one fails\n" in served.err
    answers: list[httpx.Response] = []
    threads = [
        threading.Thread(target=lambda body=body: answers.append(served.post({**body, "model": REPO})))
        for body in (STORY, CAPITAL, CAPITAL)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    failed, *good = sorted(answers, key=lambda answer: -answer.status_code)
    assert failed.status_code == 503
    assert failed.json()["error"]["code"] == "missing_weights"
    assert f"expert {number} of layer {layer} is not on this machine" in failed.json()["error"]["message"]
    assert [answer.json()["choices"][0]["text"] for answer in good] == [text] * 2
    assert full_demo.state.log == []
    if not can_watch:
        pytest.skip("strace is not here or may not trace; the rest was tested")
    os.kill(int(trace.read_text().split()[0]), signal.SIGTERM)
    assert served.process.wait(20) == 0
    calls = [line.split(maxsplit=1)[1] for line in trace.read_text().splitlines() if re.match(r"\d+ +[a-z]+\(", line)]
    probe = r'bind\(\d+, .*sin6_port=htons\(0\).*"::1"'
    calls = [call for call in calls if not re.match(probe, call)]
    others = [call for call in calls if not call.startswith(("send", "listen"))]
    assert len(others) == 1 and re.match(r'bind\(.*"127\.0\.0\.1"', others[0]), calls
    assert not any("sin_addr" in call or "sin6_addr" in call for call in calls if call.startswith("send")), calls


def _experts_of(df, body: dict, trace: Path) -> tuple[set[tuple[int, int]], str]:
    """What a completion needs, and its text."""
    done = df("df-run", REPO, "--prompt", body["prompt"], "--max-new", body["max_tokens"], "--trace", trace)
    return {(line.layer, int(e)) for line in read_trace(trace) for e in line.ids.flatten()}, done.out.removesuffix("\n")


def _remove(cache: Path, experts: list[tuple[int, int]], *, spine: bool = False) -> None:
    with open_store(REPO, cache_dir=cache, offline=True) as store:
        items = list(pair_items(store.catalog, experts))
        remove(store, [*items, spine_items(store.catalog)[0]] if spine else items)
