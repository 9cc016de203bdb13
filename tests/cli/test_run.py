"""df-run: where the prompt comes from, and exactly what is printed where."""

from __future__ import annotations

import importlib.util
import io
import json
import os
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest

from deltafin.cli.answering import Screen, TextReader
from deltafin.runtime import Tokenizer, read_trace


def _one_line(done, status: int) -> str:
    assert (done.status, done.out) == (status, "")
    assert done.err.startswith("df-run: ")
    assert done.err.endswith("\n") and done.err.count("\n") == 1
    return done.err


# ---- prompts --------------------------------------------------------------------------------------------


PROMPT = "The capital of France is"


def test_a_prompt_on_the_command_line_is_continued(df):
    done = df("df-run", "demo", "--prompt", PROMPT, "--max-new", 4)
    assert (done.status, done.out, done.err) == (0, " Paris. The\n", "")


@pytest.mark.parametrize(
    "how", [["--prompt-file", "{file}"], ["--prompt-file", "-"], ["-"]], ids=["a file", "--prompt-file -", "-"]
)
def test_a_prompt_from_a_file_or_standard_input_is_the_same_prompt(df, tmp_path, how):
    file = tmp_path / "prompt.txt"
    file.write_bytes(PROMPT.encode())
    done = df("df-run", "demo", *(word.format(file=file) for word in how), "--max-new", 4, stdin=PROMPT.encode())
    assert (done.status, done.out, done.err) == (0, " Paris. The\n", "")


@pytest.mark.parametrize("separator", [" ", ",", ", ", "\n", "\t"])
def test_a_prompt_may_be_given_as_ids(df, capital, separator):
    ids = separator.join(map(str, capital["prompt_ids"]))
    assert df("df-run", "demo", "--prompt-ids", f" {ids} ", "--max-new", 4).out == " Paris. The\n"


def test_a_newline_at_the_end_of_a_file_belongs_to_the_prompt(df, tmp_path):
    (tmp_path / "file").write_bytes(b"1, 2, 3,\n")
    a = df("df-run", "demo", "--prompt-file", tmp_path / "file", "--max-new", 1, "--json").json
    b = df("df-run", "demo", "--prompt", "1, 2, 3,\n", "--max-new", 1, "--json").json
    c = df("df-run", "demo", "--prompt", "1, 2, 3,", "--max-new", 1, "--json").json
    assert a["prompt_ids"] == b["prompt_ids"] != c["prompt_ids"]


@pytest.mark.parametrize(
    "args",
    [
        [],
        ["--prompt", "a", "-"],
        ["--prompt", "a", "--prompt-ids", "1"],
        ["--prompt", "a", "--prompt-file", "f"],
        ["--prompt-file", "-", "-"],
        ["--prompt", "", "--prompt-ids", "1"],
    ],
)
def test_no_prompt_or_two_is_wrong_usage(df, args):
    assert "give the prompt once: --prompt TEXT, --prompt-file F" in _one_line(df("df-run", "demo", *args), 2)


def test_a_prompt_without_its_option_is_wrong_usage(df):
    assert "give the prompt with --prompt" in _one_line(df("df-run", "demo", PROMPT), 2)


@pytest.mark.parametrize("how", [["--prompt", ""], ["-"], ["--prompt-file", os.devnull]])
def test_an_empty_prompt_is_wrong_usage(df, how):
    assert "the prompt is empty; a model needs at least one token" in _one_line(df("df-run", "demo", *how), 2)


def test_a_prompt_that_is_not_utf8_is_wrong_usage_and_says_where(df, tmp_path):
    (tmp_path / "latin1").write_bytes("abcé".encode("latin-1"))
    line = _one_line(df("df-run", "demo", "--prompt-file", tmp_path / "latin1"), 2)
    assert f"{tmp_path / 'latin1'}: the prompt is not UTF-8 (byte 3)" in line
    assert "stdin: the prompt is not UTF-8 (byte 0)" in _one_line(df("df-run", "demo", "-", stdin=b"\xff"), 2)


def test_an_argument_that_is_not_utf8_is_wrong_usage(df):
    assert "no text" in _one_line(df("df-run", "demo", "--prompt", os.fsdecode(b"a\xffb")), 2)


def test_a_prompt_file_that_cannot_be_read_is_named(df, tmp_path):
    line = _one_line(df("df-run", "demo", "--prompt-file", tmp_path / "none"), 1)
    assert f"{tmp_path / 'none'}: cannot read the prompt (No such file or directory)" in line
    assert "Is a directory" in _one_line(df("df-run", "demo", "--prompt-file", tmp_path), 1)


@pytest.mark.parametrize("ids", ["", " ", "a", ",1", "-1", "1.5", "0x10", "1;2", "9" * 10])
def test_ids_that_are_no_numbers_are_wrong_usage(df, ids):
    assert "expected numbers separated by spaces or commas" in _one_line(df("df-run", "demo", f"--prompt-ids={ids}"), 2)


def test_an_id_that_the_model_does_not_have_is_wrong_usage(df):
    assert "id 2048 at 1 is outside the vocabulary" in _one_line(df("df-run", "demo", "--prompt-ids", "1 2048"), 2)


@pytest.mark.parametrize("value", ["0", "-1", "x", ""])
def test_a_number_of_new_tokens_below_one_is_wrong_usage(df, value):
    done = df("df-run", "demo", "--prompt", "a", f"--max-new={value}")
    assert done.status == 2 and "--max-new" in done.err


def test_more_tokens_than_the_model_has_positions_are_refused_before_any_is_made(df):
    line = _one_line(df("df-run", "demo", "--prompt", "a", "--max-new", 10**9), 2)
    assert "exceed the model's" in line


def test_a_model_without_a_tokenizer_takes_ids_and_prints_ids(df, tiny_dir, golden):
    import numpy as np

    arrays = np.load(golden / "tiny" / "golden.npz")
    ids = " ".join(map(str, arrays["p1_ids"]))
    done = df("df-run", tiny_dir, "--prompt-ids", ids, "--max-new", 4)
    assert done.out == " ".join(map(str, arrays["p1_greedy"][:4])) + "\n"
    assert df("df-run", tiny_dir, "--prompt-ids", ids, "--max-new", 1, "--json").json["text"] is None
    assert "no tokenizer; give the prompt with --prompt-ids" in _one_line(df("df-run", tiny_dir, "--prompt", "a"), 2)


def test_standard_input_that_is_closed_is_no_prompt_and_no_traceback(start):
    process = start("df-run", "demo", "-", preexec_fn=lambda: os.close(0))
    _, err = process.communicate(timeout=60)
    assert process.returncode == 2
    assert b"Traceback" not in err and err.count(b"\n") == 1


# ---- output ---------------------------------------------------------------------------------------------


def test_standard_output_is_exactly_the_golden_continuation_and_a_newline(df, capital):
    done = df("df-run", "demo", "--prompt", PROMPT, "--max-new", 40)
    assert (done.status, done.out, done.err) == (0, capital["text"] + "\n", "")


def test_ids_are_the_golden_ids_on_one_line(df, capital):
    done = df("df-run", "demo", "--prompt", PROMPT, "--max-new", 8, "--ids")
    assert done.out == " ".join(map(str, capital["ids"][:8])) + "\n"


def test_a_text_that_ends_by_itself_ends_there_without_its_stop_token(df, golden):
    case = next(c for c in json.loads((golden / "demo.json").read_text())["cases"] if c["name"] == "raw python")
    assert case["stopped"] and case["text"].endswith("[EOS]")
    text = case["text"].removesuffix("[EOS]")
    assert df("df-run", "demo", "--prompt", case["prompt"], "--max-new", 40).out == text + "\n"
    found = df("df-run", "demo", "--prompt", case["prompt"], "--max-new", 40, "--json").json
    assert (found["ids"], found["text"], found["stopped"]) == (case["ids"], text, True)


def test_json_is_one_object_with_everything_and_nothing_else_is_printed(df, capital):
    done = df("df-run", "demo", "--prompt", PROMPT, "--max-new", 5, "--json")
    assert (done.status, done.err, done.out.count("\n")) == (0, "", 1)
    found = done.json
    assert found.keys() == {
        "model", "identity", "prompt_ids", "ids", "text", "stopped", "finish", "logprobs", "sampling", "drafted",
        "accepted", "first_token_s", "total_s", "bytes", "requests", "passes", "spine", "as_released", "memory",
        "seconds", "plan",
    }  # fmt: skip
    assert (found["model"], found["prompt_ids"]) == ("demo", capital["prompt_ids"])
    assert (found["ids"], found["stopped"], found["requests"]) == (capital["ids"][:5], False, 0)
    assert capital["text"].startswith(found["text"])
    assert 0 < found["first_token_s"] <= found["total_s"] < 60
    counts = found["bytes"]
    assert counts["shard_spans"] > 0 and counts["shard_nbytes"] > 10**6
    assert counts["http_spans"] == counts["object_spans"] == 0
    assert counts["spine_visits"] == 5 * 14
    assert (found["passes"], found["seconds"]["passes"], found["seconds"]["rows"]) == (5, 5, 7 + 4)
    assert 0 < found["seconds"]["total_s"] <= found["total_s"]
    assert (found["spine"], found["as_released"]) == ("released", True)
    assert found["memory"]["total"] <= found["memory"]["budget"]


def test_json_and_ids_together_are_wrong_usage(df):
    assert "--ids has no effect with --json" in _one_line(df("df-run", "demo", "--prompt", "a", "--json", "--ids"), 2)


def test_statistics_go_to_standard_error_and_leave_the_output_as_it_is(df):
    done = df("df-run", "demo", "--prompt", PROMPT, "--max-new", 4, "--stats")
    assert done.out == " Paris. The\n"
    lines = done.err.splitlines()
    assert lines[0] == "tokens    7 given, 4 new"
    assert [line.split()[0] for line in lines] == [
        "tokens", "time", "drafts", "visits", "passes", "waiting", "compute", "ram", "object", "shard", "http",
        "memory", "requests",
    ]  # fmt: skip
    assert "s to the first token, then" in lines[1]
    assert lines[4].startswith("passes    4, 10 rows; of ")
    assert "of what was used" in lines[7], "what a pass leaves in memory the next one finds there"
    assert lines[8] == "object    0 spans, 0 B" and lines[10] == "http      0 spans, 0 B" and lines[12] == "requests  0"


def test_statistics_and_json_go_together(df):
    done = df("df-run", "demo", "--prompt", PROMPT, "--max-new", 1, "--stats", "--json")
    assert done.json["ids"] and done.err.startswith("tokens    7 given, 1 new")


def test_a_trace_has_every_layer_of_every_pass_with_every_row(df, tmp_path, demo_dir):
    done = df("df-run", "demo", "--prompt", PROMPT, "--max-new", 3, "--trace", tmp_path / "t", "--json")
    counts = done.json["bytes"]
    trace = read_trace(tmp_path / "t")
    config = json.loads((demo_dir / "config.json").read_text())["text_config"]
    assert trace.header.top_k == config["num_experts_per_token"]
    assert trace.header.model == done.json["identity"]
    lines = list(trace)
    assert not trace.torn
    assert [(line.number, line.layer) for line in lines] == [
        (number, layer) for number in range(3) for layer in trace.header.moe_layers
    ]
    assert [line.rows for line in lines if line.layer == 1] == [
        tuple((0, position) for position in range(7)),
        ((0, 7),),
        ((0, 8),),
    ]
    visits = Counter((line.number, line.layer, int(e)) for line in lines for e in set(line.ids.flatten().tolist()))
    assert len(visits) == counts["expert_visits"], "each chosen expert was read once a pass, and no other"


def test_a_trace_that_cannot_be_written_is_said_before_anything_is_computed(df, tmp_path):
    line = _one_line(df("df-run", "demo", "--prompt", "a", "--trace", tmp_path / "no" / "t"), 2)
    assert f"trace {tmp_path / 'no' / 't'}: cannot be written" in line


def test_a_device_that_does_not_exist_is_wrong_usage(df):
    done = df("df-run", "demo", "--prompt", "a", "--max-new", 1, "--device", "nonsense")
    assert done.status == 2
    assert done.err.startswith("df-run: ") and "nonsense" in done.err and "Traceback" not in done.err


def test_the_cache_option_wins_over_the_environment(df, tmp_path):
    df("df-run", "demo", "--prompt", "a", "--max-new", 1, "--cache-dir", tmp_path / "other")
    assert (tmp_path / "other" / "catalogs").is_dir()
    assert not (tmp_path / "cache").exists()


def test_the_example_of_the_help_runs(df):
    help_text = df("df-run", "--help").out
    assert 'Example: df-run demo --prompt "The capital of France is"' in help_text
    for option in ("--prompt-file", "--prompt-ids", "--max-new", "--ids", "--stats", "--trace", "--json", "--offline"):
        assert option in help_text


# ---- text in pieces -------------------------------------------------------------------------------------


def _stream_cases() -> list[dict]:
    path = Path(__file__).parents[1] / "faults" / "text_cases.py"
    spec = importlib.util.spec_from_file_location("text_cases", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.build()["stream"]


@pytest.fixture(scope="module")
def tokenizer(demo_dir) -> Tokenizer:
    vocab = json.loads((demo_dir / "config.json").read_text())["text_config"]["vocab_size"]
    return Tokenizer(
        (demo_dir / "tiktoken.model").read_bytes(), (demo_dir / "tokenizer_config.json").read_bytes(), vocab
    )


@pytest.fixture(scope="module")
def byte_token(tokenizer) -> dict[int, int]:
    """The token of each single byte."""
    return {raw[0]: token for token in range(tokenizer.vocab_size) if len(raw := tokenizer.token_bytes(token)) == 1}


@pytest.mark.parametrize("case", _stream_cases(), ids=lambda case: case["name"])
def test_characters_that_arrive_in_pieces_are_printed_whole(case, tokenizer, byte_token, monkeypatch, capsys):
    """Every single write is valid text; together they are the text."""
    writes: list[str] = []
    stdout = SimpleNamespace(write=writes.append, flush=lambda: None, isatty=lambda: False)
    monkeypatch.setattr("deltafin.cli.answering.sys", SimpleNamespace(stdout=stdout))
    reader = TextReader(tokenizer, (), Screen(quiet=False), as_ids=False)
    for byte in bytes.fromhex("".join(case["pieces"])):
        reader.push(byte_token[byte], last=False)
    pushed = reader.text
    reader.finish()
    text = reader.text
    assert "".join(writes) == text + "\n"
    if case["text"] is None:
        assert text == "ok\ufffd!"
    elif case["end"]:
        assert text in (case["text"], case["text"] + "\ufffd")
    else:
        assert text == case["text"]
        assert ("\ufffd" in pushed) == ("\ufffd" in case["text"])


@pytest.mark.parametrize(("tty", "shown"), [(True, "a\u241b]0;x\u2407b\u240d\n\tc"), (False, "a\x1b]0;x\x07b\r\n\tc")])
def test_a_terminal_is_not_made_to_obey_what_a_model_writes(monkeypatch, tty, shown):
    writes: list[str] = []
    stdout = SimpleNamespace(write=writes.append, flush=lambda: None, isatty=lambda: tty)
    monkeypatch.setattr("deltafin.cli.answering.sys", SimpleNamespace(stdout=stdout))
    Screen(quiet=False).write("a\x1b]0;x\x07b\r\n\tc")
    assert "".join(writes) == shown


def test_text_is_utf8_whatever_the_locale_has_letters_for(df, monkeypatch, tokenizer, byte_token):
    from deltafin.cli.run import run

    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding="ascii"))
    run.main(["demo", "--prompt", "a", "--max-new", "1"], standalone_mode=False)
    reader = TextReader(tokenizer, (), Screen(quiet=False), as_ids=False)
    for byte in "é漢".encode():
        reader.push(byte_token[byte], last=False)
    reader.finish()
    assert raw.getvalue().endswith("é漢\n".encode())
