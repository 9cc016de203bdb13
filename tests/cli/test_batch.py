"""df-run batch: what it prints where, what it refuses, and that it goes on after whatever stopped it."""

from __future__ import annotations

import io
import json
import os
import shutil
import signal
import subprocess
import sys

import pytest

from deltafin.cli import batch_progress


def request(name, prompt="The capital of France is", **body):
    body = {"prompt": prompt, "max_tokens": 4, **body}
    return {"custom_id": name, "method": "POST", "url": "/v1/completions", "body": body}


@pytest.fixture
def files(tmp_path):
    """`files(*requests)` writes an input; returns the words that name it and the output."""
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"

    def write(*requests):
        if requests:
            source.write_text("".join(json.dumps(r) + "\n" for r in requests))
        return "-i", source, "-o", target

    return write


@pytest.fixture(scope="module")
def catalogs(tmp_path_factory):
    return tmp_path_factory.mktemp("catalogs")


@pytest.fixture
def batch(df, catalogs):
    """`batch(..)` is df-run batch, with a cache that all these tests share."""
    return lambda *words: df("df-run", "batch", *words, cache=catalogs)


def answers(tmp_path):
    lines = (tmp_path / "out.jsonl").read_text().splitlines()
    found = {a["custom_id"]: a["response"] for a in map(json.loads, lines)}
    assert len(found) == len(lines)
    return found


def text(response):
    return response["body"]["choices"][0]["text"]


def one_line(done, status):
    assert (done.status, done.out) == (status, "")
    assert done.err.startswith("df-run: ") and done.err.count("\n") == 1
    return done.err


# ---- answering ----------------------------------------------------------------------------------------


def test_answers_go_to_the_file_and_a_summary_to_stderr(batch, files, tmp_path):
    chat = {"messages": [{"role": "user", "content": "What is the capital of Portugal?"}], "reasoning_effort": "low"}
    asked = {"custom_id": "b", "method": "POST", "url": "/v1/chat/completions", "body": chat}
    done = batch("demo", *files(request("a"), asked))
    assert (done.status, done.out) == (0, "")
    assert f"df-run: {tmp_path / 'out.jsonl'}: 2 answers; 38 tokens in " in done.err and done.err.count("\n") == 1
    found = answers(tmp_path)
    assert text(found["a"]) == " Paris. The"
    (choice,) = found["b"]["body"]["choices"]
    assert choice["message"]["content"] == "The capital of Portugal is Lisbon." and choice["finish_reason"] == "stop"
    assert sorted(p.name for p in tmp_path.iterdir() if p.is_file()) == ["in.jsonl", "out.jsonl"]


def test_the_same_command_again_has_nothing_to_do(batch, files, tmp_path):
    words = files(request("a"), request("b", n=2))
    batch("demo", *words)
    before = (tmp_path / "out.jsonl").read_bytes()
    done = batch("demo", *words, "--json")
    assert done.status == 0 and (tmp_path / "out.jsonl").read_bytes() == before
    assert {k: done.json[k] for k in ("requests", "before", "answers", "passes")} == {
        "requests": 2, "before": 2, "answers": 0, "passes": 0,
    }  # fmt: skip


def test_json_is_one_object_about_the_run(batch, files):
    done = batch("demo", *files(request("a"), request("b")), "--json", "--parallel", 1, "--stats")
    found = done.json
    assert (found["requests"], found["answers"], found["refused"], found["tokens"]) == (2, 2, 0, 8)
    assert found["passes"] == 8 == found["seconds"]["passes"] and found["memory"]["total"] > 0 and found["as_released"]
    assert [n.split()[0] for n in done.err.splitlines()][:3] == ["batch", "visits", "passes"] and "memory" in done.err


def test_requests_that_are_refused_are_announced_and_do_not_fail_the_run(batch, files, tmp_path):
    done = batch("demo", *files(request("a"), request("b", n=3), request("c", echo=True)))
    assert done.status == 0
    assert "df-run: 2 of 3 requests get an error for an answer; the first is line 2: n is 3; " in done.err
    assert "3 answers, 2 of them errors" in done.err
    found = answers(tmp_path)
    assert {name: r["status_code"] for name, r in found.items()} == {"a": 200, "b": 400, "c": 400}
    assert found["c"]["body"]["error"]["param"] == "echo"


def test_errors_alone_need_no_model(batch, files, tmp_path):
    done = batch("demo", *files(request("a", n=2), request("b", best_of=2)), "--json", "--ram", "10MB")
    assert (done.status, done.json["refused"], done.json["requests"]) == (0, 2, 2) and "memory" not in done.json
    assert [r["status_code"] for r in answers(tmp_path).values()] == [400, 400]


def test_another_model_by_name_is_said_and_the_answer_tells_the_truth(batch, files, tmp_path):
    done = batch("demo", *files(request("a", model="gpt-x"), request("b", model="demo")))
    assert "df-run: requests name the model gpt-x; demo answers them\n" in done.err
    assert {r["body"]["model"] for r in answers(tmp_path).values()} == {"demo"}


def test_a_name_of_any_length_is_said_in_a_few_words(batch, files):
    done = batch("demo", *files(request("a", model="m" * 100_000), request("b", model="\ud800\n")))
    assert done.status == 0 and len(done.err) < 1000
    assert f"requests name the model {'m' * 100}.. and \\ud800; demo answers them" in done.err


def test_requests_that_say_no_limit_get_that_of_the_command(batch, files, tmp_path):
    batch("demo", *files(request("a", max_tokens=None)), "--max-new", 3)
    assert answers(tmp_path)["a"]["body"]["usage"]["completion_tokens"] == 3


# ---- what is refused ----------------------------------------------------------------------------------


def test_standard_input_and_output_are_refused(batch, files, tmp_path):
    _, source, _, target = files(request("a"))
    assert "they cannot come from stdin" in one_line(batch("demo", "-i", "-", "-o", target), 2)
    assert "could not be gone on with" in one_line(batch("demo", "-i", source, "-o", "-"), 2)
    assert "is the input, too" in one_line(batch("demo", "-i", source, "-o", source), 2)
    assert not target.exists()


def test_an_input_with_the_name_of_the_journal_is_refused_and_stays(batch, files, tmp_path):
    _, source, _, target = files(request("a"))
    journal = source.rename(tmp_path / "out.jsonl.journal")
    content = journal.read_bytes()
    assert "has the name of the journal of" in one_line(batch("demo", "-i", journal, "-o", target), 2)
    assert journal.read_bytes() == content and not target.exists()


@pytest.mark.parametrize("target", ["", ".", "/"])
def test_an_output_without_a_name_is_refused_in_one_line(batch, files, target):
    assert "cannot open the output" in one_line(batch("demo", *files(request("a"))[:2], "-o", target), 1)


@pytest.mark.parametrize(
    "words", [["batch"], ["batch", "demo"], ["batch", "demo", "-i", "x"], ["batch", "--parallel", "0"]], ids=" ".join
)
def test_wrong_usage_names_the_command(df, words):
    done = df("df-run", *words)
    assert done.status == 2 and "Usage: df-run batch [OPTIONS] MODEL" in done.err


def test_an_unusable_input_is_one_line_and_leaves_no_output(batch, files, tmp_path):
    words = files(request("a"), request("a"))
    assert "lines 1 and 2 have the same custom_id" in one_line(batch("demo", *words), 2)
    (tmp_path / "in.jsonl").write_text("hello\n")
    assert "line 1: not JSON" in one_line(batch("demo", *words), 2)
    assert "cannot read the requests" in one_line(batch("demo", "-i", tmp_path / "x", *words[2:]), 1)
    assert not (tmp_path / "out.jsonl").exists()


def test_an_output_of_another_input_is_one_line_and_stays_as_it_is(batch, files, tmp_path):
    batch("demo", *files(request("a")))
    before = (tmp_path / "out.jsonl").read_bytes()
    line = one_line(batch("demo", *files(request("other"))), 2)
    assert "out.jsonl: line 1 answers a request that is not in" in line
    assert "; remove that line, or choose another output" in line
    assert "another model or setting" in one_line(batch("demo", *files(request("a")), "--max-new", 9), 2)
    assert (tmp_path / "out.jsonl").read_bytes() == before


def test_a_model_without_a_tokenizer_cannot_answer(batch, files, tiny_dir):
    assert "has no tokenizer" in one_line(batch(tiny_dir, *files(request("a"))), 2)


def test_too_little_memory_says_how_much_is_needed(batch, files, tmp_path):
    line = one_line(batch("demo", *files(request("a")), "--ram", "10MB"), 2)
    assert "are needed at least" in line and not (tmp_path / "out.jsonl").exists()


# ---- beside df-run MODEL ------------------------------------------------------------------------------


def test_help_of_df_run_names_the_commands_below_it(df):
    done = df("df-run", "--help")
    assert done.out.startswith("Usage: df-run [OPTIONS] MODEL")
    assert "df-run batch" in done.out and "df-run score" in done.out
    assert df("df-run", "batch", "--help").out.startswith("Usage: df-run batch [OPTIONS] MODEL")


def test_a_model_named_batch_is_reached_by_its_path(df, demo_dir, tmp_path, monkeypatch):
    shutil.copytree(demo_dir, tmp_path / "batch")
    monkeypatch.chdir(tmp_path)
    done = df("df-run", "./batch", "--prompt", "The capital of France is", "--max-new", 2)
    assert (done.status, done.out) == (0, " Paris\n")
    assert df("df-run", "batch", "--prompt", "x").status == 2


# ---- instructions that requests share -----------------------------------------------------------------


def test_shared_instructions_are_kept_on_disk_for_a_later_run(df, files, tmp_path):
    def asked(name):
        messages = [{"role": "system", "content": "Be kind. " * 60}, {"role": "user", "content": name}]
        body = {"messages": messages, "max_tokens": 3, "reasoning_effort": "none"}
        return {"custom_id": name, "method": "POST", "url": "/v1/chat/completions", "body": body}

    names = ["a", "b", "c"]
    words = files(*map(asked, names))
    found = []
    for keep in ("0", "1GB", "1GB"):
        found.append(df("df-run", "batch", "demo", *words, "--json", "--keep-states", keep).json["shared"])
        (tmp_path / "out.jsonl").rename(tmp_path / f"{len(found)}.jsonl")
    assert found[0] == found[1] > 0 and found[2] == found[1] // 3 * 4
    runs = [(tmp_path / f"{n}.jsonl").read_text().splitlines() for n in (1, 2, 3)]
    texts = [{a["custom_id"]: a["response"]["body"]["choices"] for a in map(json.loads, run)} for run in runs]
    assert texts[0] == texts[1] == texts[2] and sorted(texts[0]) == names


# ---- stopped in the middle ----------------------------------------------------------------------------


def many(count):
    return [request(f"r{n}", f"Once upon a time there were {n}", max_tokens=40, temperature=0.7) for n in range(count)]


def test_ctrl_c_ends_at_once_and_the_same_command_goes_on(start, files, tmp_path, until, batch):
    words = files(*many(3))
    process = start("df-run", "batch", "demo", *words)
    journal = tmp_path / "out.jsonl.journal"
    until(lambda: journal.exists() and journal.stat().st_size > 0)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (130, b"")
    assert err.lstrip(b"\n") == b"df-run: interrupted; what was finished is kept\n"
    found = batch("demo", *words, "--json").json
    assert found["recovered"] > 0 and found["before"] + found["answers"] == 3 and not journal.exists()
    once = answers(tmp_path)
    (tmp_path / "out.jsonl").unlink()
    batch("demo", *words)
    assert {n: text(r) for n, r in answers(tmp_path).items()} == {n: text(r) for n, r in once.items()}


def test_a_server_that_says_no_stops_the_run_and_what_was_drawn_is_kept(df, files, tmp_path, hub, demo_dir, index_only):
    server = hub(demo_dir)
    index_only(tmp_path / "cache", "org/demo")
    assert df("df-fetch", "spine", "org/demo").status == 0
    words = files(*[request(f"r{n}", prompt, max_tokens=30) for n, prompt in enumerate(["Gold is", "2 + 2 =", "The"])])
    server.set_mode("gone_404", after=290)
    done = df("df-run", "batch", "org/demo", *words)
    assert (done.status, done.out) == (1, "") and done.err.count("\n") == 1 and "404" in done.err
    drawn = (tmp_path / "out.jsonl.journal").stat().st_size
    assert drawn > 0
    server.set_mode("ok")
    found = df("df-run", "batch", "org/demo", *words, "--json").json
    assert found["recovered"] > 0 and found["before"] + found["answers"] == 3


def test_a_full_disk_is_one_line_and_what_fits_later_is_answered_later(batch, files, tmp_path, small_disk):
    disk = small_disk(64 << 10, "disk")
    filler = disk / "filler"
    filler.write_bytes(b"x" * (48 << 10))
    _, source, _, _ = files(*[request(f"r{n}", logprobs=5, max_tokens=8) for n in range(12)])
    words = "-i", source, "-o", disk / "out.jsonl"
    line = one_line(batch("demo", *words), 1)
    assert "No space left on device; free some space" in line
    filler.unlink()
    assert batch("demo", *words).status == 0
    lines = (disk / "out.jsonl").read_text().splitlines()
    assert len({json.loads(n)["custom_id"] for n in lines}) == len(lines) == 12


# ---- memory -------------------------------------------------------------------------------------------

MEASURED = """
import sys
from pathlib import Path
from deltafin.cli import run_main
try:
    run_main()
except SystemExit as e:
    assert not e.code, e.code
status = Path("/proc/self/status").read_text()
print(1024 * int(status.partition("VmHWM:")[2].split()[0]), file=sys.stderr)
"""


@pytest.mark.slow
@pytest.mark.parametrize("megabytes", [130, 200, 400])
def test_more_memory_is_more_answers_at_once_and_the_peak_stays_below_it(
    kill_batches, tmp_path, catalogs, megabytes, record_property
):
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("".join(json.dumps(r) + "\n" for r in kill_batches.requests(64, short=True)))
    words = ["batch", "demo", "-i", source, "-o", target, "--ram", f"{megabytes}MB", "--json", "--cache-dir", catalogs]
    done = subprocess.run([sys.executable, "-c", MEASURED, *words], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    found, peak = json.loads(done.stdout), int(done.stderr.splitlines()[-1])
    record_property("figures", f"{megabytes} MB: {found['together']} together, peak {peak / 1e6:.0f} MB")
    assert peak <= megabytes * 10**6 and found["answers"] == 64
    assert {130: 4, 200: 30, 400: 64}[megabytes] <= found["together"]


# ---- progress -----------------------------------------------------------------------------------------


class Terminal(io.StringIO):
    def isatty(self):
        return True


class Work:
    """As much of a batch as is shown."""

    def __init__(self):
        from deltafin.runtime.batch import Counts

        self.counts = Counts(64, before=2, answers=10, tokens=500, total_s=250.0)
        self.under_way = 8

    def left_s(self):
        return 7200.0 if self.counts.answers else None


def test_off_a_terminal_a_line_comes_now_and_then(monkeypatch):
    err = io.StringIO()
    monkeypatch.setattr(sys, "stderr", err)
    shown = batch_progress.BatchProgress(Work())
    shown.layer(3, 93)
    assert err.getvalue() == ""
    monkeypatch.setattr(batch_progress, "_LINE_EVERY_S", 0.0)
    shown.layer(4, 93)
    shown.clear()
    assert err.getvalue() == "12 of 64 answered, 8 under way, 2 tokens/s, about 2.0 h left, layer 5 of 93\n"


def test_on_a_terminal_one_line_is_rewritten_and_wiped(monkeypatch):
    err, work = Terminal(), Work()
    monkeypatch.setattr(sys, "stderr", err)
    monkeypatch.setattr(batch_progress, "_TERMINAL_EVERY_S", 0.0)
    monkeypatch.setattr(shutil, "get_terminal_size", lambda: os.terminal_size((200, 24)))
    shown = batch_progress.BatchProgress(work)
    work.counts.answers = work.counts.tokens = 0
    shown.layer(4, 93)
    assert err.getvalue() == "\r\x1b[K2 of 64 answered, 8 under way, no token yet, layer 5 of 93"
    shown.clear()
    assert err.getvalue().endswith("\r\x1b[K") and "\n" not in err.getvalue()
