"""df-run score: texts in, a line of each out, and an output that goes on where it stood."""

from __future__ import annotations

import json
import math
import random
import re
import signal

import numpy as np
import pytest

from deltafin.errors import DiskError
from deltafin.runtime import Segment
from deltafin.runtime.scorefiles import Output

TEXTS = [
    {"id": "whole", "text": "The capital of France is Paris."},
    {"id": 7, "prompt": "The capital of France is", "continuation": " Paris"},
    {"prompt": "The capital of France is", "continuation": " Rome"},
    {"ids": [5, 6, 7, 8]},
    {"prompt_ids": [5, 6], "ids": [7, 8], "id": None},
]


@pytest.fixture
def texts(tmp_path):
    """`texts(objects)` writes them as JSON lines."""

    def write(objects=TEXTS, name="in.jsonl"):
        path = tmp_path / name
        path.write_text("".join(json.dumps(o) + "\n" for o in objects))
        return path

    return write


def _lines(text):
    return [json.loads(line) for line in text.splitlines()]


def _refused(done) -> str:
    assert (done.status, done.out) == (2, "")
    assert done.err.startswith("df-run: ") and done.err.count("\n") == 1
    return done.err


def test_every_text_gets_a_line_with_what_forward_says(df, texts, open_model, demo_dir):
    done = df("df-run", "score", "demo", "-i", texts(), "--tokens")
    assert done.status == 0
    found = _lines(done.out)
    assert [(one["line"], one["id"]) for one in found] == [(1, "whole"), (2, 7), (3, None), (4, None), (5, None)]
    with open_model(demo_dir) as model:
        encode = model.tokenizer.encode
        prompt = encode("The capital of France is")
        pairs = [
            ([], encode(TEXTS[0]["text"])),
            (prompt, encode(" Paris")),
            (prompt, encode(" Rome")),
            ([], [5, 6, 7, 8]),
            ([5, 6], [7, 8]),
        ]
        for one, (before, after) in zip(found, pairs, strict=True):
            ids = before + after
            first = len(before) or 1
            values = model.forward([Segment(model.sequence(), ids[:-1], ids[1:])], logits="targets")[first - 1 :]
            assert np.array(one["logprobs"], np.float32).tobytes() == values.tobytes()
            assert one["ids"] == ids[first:] and one["tokens"] == len(ids) - first
            assert one["logprob"] == sum(map(float, values[1:]), float(values[0]))
            assert one["perplexity"] == math.exp(-one["logprob"] / one["tokens"])
    assert [one["greedy"] for one in found] == [False, True, False, False, False]
    assert "tokens    17 scored" in done.err and "passes    1, 30 rows" in done.err


def test_one_file_is_one_text(df, tmp_path):
    (tmp_path / "notes.txt").write_bytes(b"The capital of France is Paris.")
    [one] = _lines(df("df-run", "score", "demo", "--text", tmp_path / "notes.txt").out)
    assert one["tokens"] == 9 and "logprobs" not in one
    piped = df("df-run", "score", "demo", "--text", "-", stdin=b"The capital of France is Paris.")
    assert _lines(piped.out) == [one]
    for content, complaint in ((b"", "0 tokens: the first has"), (b"a\xff", "no UTF-8 (byte 1)")):
        said = _refused(df("df-run", "score", "demo", "--text", "-", stdin=content))
        assert said.startswith(f"df-run: stdin: {complaint}")


def test_lines_may_come_from_stdin_and_empty_ones_count_but_are_passed_over(df):
    done = df("df-run", "score", "demo", "-i", "-", stdin=b'\n{"ids": [1, 2]}\r\n\n{"ids": [1, 2]}')
    assert [one["line"] for one in _lines(done.out)] == [2, 4]


def test_the_summary_is_one_object_where_the_results_go_to_a_file(df, texts, tmp_path):
    done = df("df-run", "score", "demo", "-i", texts(), "-o", tmp_path / "out.jsonl", "--rows", 9, "--json")
    assert (done.status, done.err) == (0, "")
    found = _lines((tmp_path / "out.jsonl").read_text())
    assert done.json["texts"] == len(found) == 5
    assert (done.json["tokens"], done.json["rows"], done.json["passes"]) == (17, 30, 4)
    total = sum(one["logprob"] for one in found)
    assert done.json["logprob"] == pytest.approx(total)
    assert done.json["perplexity"] == pytest.approx(math.exp(-total / 17))
    assert done.json["memory"]["rows"] == 9
    assert "give these a file with -o" in _refused(df("df-run", "score", "demo", "-i", texts(), "--json"))


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        (b"{", "no JSON object"),
        (b"[" * 100_000, "no JSON object"),
        (b'"text"', "no JSON object"),
        (b'\xef\xbb\xbf{"ids": [1, 2]}', "no JSON object: a byte order mark stands before it"),
        (b'{"text": "a b", "text": "c d"}', "no JSON object: 'text' is twice in one object"),
        (b'{"ids": [1, 2], "id": NaN}', "no JSON object: not JSON (NaN is no number there)"),
        (b'{"text": "\xff"}', "no UTF-8 (byte 10)"),
        (b"{}", "it has nothing; expected"),
        (b'{"text": "a b", "weight": 2}', "it has 'text', 'weight'; expected"),
        (b'{"prompt": "a"}', "it has 'prompt'; expected"),
        (b'{"text": 5}', "text is no string"),
        (b'{"prompt": "a", "continuation": null}', "continuation is no string"),
        (b'{"text": ""}', "0 tokens: the first has no log-probability"),
        (b'{"ids": [5]}', "1 token: the first has no log-probability"),
        (b'{"prompt": "", "continuation": "a"}', "the prompt has no tokens"),
        (b'{"prompt": "a", "continuation": ""}', "the continuation has no tokens"),
        (b'{"ids": {}}', "ids is no list"),
        (b'{"ids": [1, 2048]}', "ids: entry 1 is no token id from 0 to 2047"),
        (b'{"ids": [1, true]}', "ids: entry 1 is no token id"),
        (b'{"ids": [1, 2.0]}', "ids: entry 1 is no token id"),
        (b'{"ids": [1, 2], "id": [1]}', "id is no string and no integer"),
        (b'{"ids": [1, 2], "id": true}', "id is no string and no integer"),
        (b'{"text": "\\ud800 x"}', "character 0 of the text is U+D800, half of a surrogate pair"),
    ],
)
def test_a_line_that_is_no_text_is_named_before_anything_is_computed(df, tmp_path, line, complaint):
    (tmp_path / "in.jsonl").write_bytes(b'{"ids": [1, 2]}\n' + line + b"\n")
    said = _refused(df("df-run", "score", "demo", "-i", tmp_path / "in.jsonl", "-o", tmp_path / "out.jsonl"))
    assert f"{tmp_path / 'in.jsonl'}, line 2: {complaint}" in said
    assert not (tmp_path / "out.jsonl").exists()


def test_a_text_longer_than_the_model_has_positions_is_named(df, tmp_path, tiny_dir, texts):
    config = json.loads((tiny_dir / "config.json").read_text())
    config["text_config"]["max_position_embeddings"] = 6
    short = tmp_path / "short"
    short.mkdir()
    for file in tiny_dir.iterdir():
        (short / file.name).symlink_to(file)
    (short / "config.json").unlink()
    (short / "config.json").write_text(json.dumps(config))
    path = texts([{"ids": [1] * 7}, {"ids": [1] * 8}])
    said = _refused(df("df-run", "score", short, "-i", path))
    assert f"{path}, line 2: 8 tokens; the model has positions for 6 and one after them: cut it" in said
    assert len(_lines(df("df-run", "score", short, "-i", texts([{"ids": [1] * 7}])).out)) == 1


@pytest.mark.parametrize("words", [[], ["-i", "a", "--text", "b"]])
def test_texts_are_given_once(df, words):
    assert "give the texts once" in _refused(df("df-run", "score", "demo", *words))


def test_a_file_that_is_not_there_and_one_without_texts(df, tmp_path):
    done = df("df-run", "score", "demo", "-i", tmp_path / "none")
    assert (done.status, done.out) == (1, "") and "none: cannot be read (No such file or directory)" in done.err
    (tmp_path / "empty").write_bytes(b"\n")
    assert "empty: no texts" in _refused(df("df-run", "score", "demo", "-i", tmp_path / "empty"))


def test_what_is_missing_is_fetched_once_for_all_texts(df, hub, tiny_dir, texts, tmp_path, ranges):
    server = hub(tiny_dir)
    path = texts([{"ids": [n, n + 1, n + 2]} for n in range(20)])
    first = df("df-run", "score", "org/tiny", "-i", path, "-o", tmp_path / "a", "--json")
    assert first.status == 0 and first.json["bytes"]["http_spans"] > first.json["bytes"]["expert_visits"] > 32
    assert set(ranges(server).values()) == {1}
    again = df("df-run", "score", "org/tiny", "-i", path, "-o", tmp_path / "b", "--json", "--offline")
    assert again.json["bytes"]["http_spans"] == 0
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


# ---- going on ------------------------------------------------------------------------------------------------


@pytest.fixture
def many(texts):
    """Enough texts for many passes of few rows."""
    rng = random.Random(4)
    return texts([{"id": n, "ids": rng.choices(range(2048), k=rng.randint(2, 9))} for n in range(30)])


def test_a_torn_line_is_cut_off_and_what_is_there_is_not_computed_again(df, many, tmp_path):
    whole, part = tmp_path / "whole.jsonl", tmp_path / "part.jsonl"
    assert df("df-run", "score", "demo", "-i", many, "-o", whole).status == 0
    expected = whole.read_bytes()
    lines = expected.splitlines(keepends=True)
    for kept, torn in ((0, 12), (17, 30), (29, len(lines[29]) - 1), (30, 0)):
        part.write_bytes(b"".join(lines[:kept]) + b"".join(lines[kept : kept + 1])[:torn])
        done = df("df-run", "score", "demo", "-i", many, "-o", part, "--rows", 50, "--json")
        assert part.read_bytes() == expected
        said = done.json
        assert (said["texts"], said["texts_before"]) == (30, kept)
        assert said["rows"] == sum(json.loads(line)["tokens"] for line in lines[kept:])
        assert said["logprob"] == sum((json.loads(line)["logprob"] for line in lines), 0.0)


def test_results_of_something_else_are_left_alone(df, texts, tmp_path):
    out = tmp_path / "out.jsonl"
    assert df("df-run", "score", "demo", "-i", texts(), "-o", out).status == 0
    before = out.read_bytes()
    other = [*TEXTS[:2], {"ids": [5, 6, 7, 9]}]
    for words in (["-i", texts(other, "other")], ["-i", texts(), "--tokens"], ["-i", texts(TEXTS[:3], "fewer")]):
        assert "is not the result of this input, model and options" in _refused(
            df("df-run", "score", "demo", *words, "-o", out)
        )
        assert out.read_bytes() == before
    for value in (b"NaN", b"1e999", b'"-1"', b"true"):
        damaged = re.sub(rb'"logprob": [^,]*', b'"logprob": ' + value, before, count=1)
        out.write_bytes(damaged)
        assert "line 1 is not the result" in _refused(df("df-run", "score", "demo", "-i", texts(), "-o", out))
        assert out.read_bytes() == damaged
    for content in (b"\0" * 100, b"my only notes", b'{"ids": [1, 2]}', before + b"{", b"\n" + before):
        out.write_bytes(content)
        done = df("df-run", "score", "demo", "-i", texts(), "-o", out)
        if content.endswith(b"{"):  # may be the beginning of a result
            assert "is not the result" in _refused(
                df("df-run", "score", "demo", "-i", texts(TEXTS[:4], "f"), "-o", out)
            )
        else:
            assert "is not the result" in _refused(done)
            assert out.read_bytes() == content


def test_an_output_that_is_no_file_or_is_being_written_is_refused(df, texts, tmp_path):
    import fcntl

    assert "no regular file; leave -o out" in _refused(df("df-run", "score", "demo", "-i", texts(), "-o", "/dev/null"))
    with (tmp_path / "out").open("wb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        done = df("df-run", "score", "demo", "-i", texts(), "-o", tmp_path / "out")
        assert done.status == 1 and "another process is writing to it" in done.err
    done = df("df-run", "score", "demo", "-i", texts(), "-o", tmp_path / "none" / "out")
    assert done.status == 1 and "none/out: cannot write: No such file or directory" in done.err


def test_zeros_after_a_power_cut_are_an_unfinished_line(df, texts, tmp_path):
    out = tmp_path / "out"
    assert df("df-run", "score", "demo", "-i", texts(), "-o", out).status == 0
    whole = out.read_bytes()
    for tail in (b"\0" * 5000, b'{"line": 5, "id"' + b"\0" * 5000):
        out.write_bytes(whole[: whole.rindex(b'{"line"')] + tail)
        assert df("df-run", "score", "demo", "-i", texts(), "-o", out).status == 0
        assert out.read_bytes() == whole


def test_an_output_that_was_taken_away_is_noticed(tmp_path):
    with Output(tmp_path / "out") as output:
        output.write([{"line": 1}])
        (tmp_path / "out").rename(tmp_path / "elsewhere")
        with pytest.raises(DiskError, match="was moved or removed"):
            output.write([{"line": 2}])
        (tmp_path / "out").write_bytes(b"of another")
        with pytest.raises(DiskError, match="was moved or removed"):
            output.write([{"line": 2}])
    assert (tmp_path / "elsewhere").read_bytes().count(b"\n") == 1


def test_a_full_disk_keeps_whole_lines_and_the_next_run_goes_on(df, many, tmp_path, small_disk):
    whole = tmp_path / "whole.jsonl"
    df("df-run", "score", "demo", "-i", many, "-o", whole)
    disk = small_disk(4096, "disk")
    done = df("df-run", "score", "demo", "-i", many, "-o", disk / "out", "--rows", 20)
    assert done.status == 1 and "No space left" in done.err and done.err.count("\n") <= 2
    kept = (disk / "out").read_bytes()
    assert whole.read_bytes().startswith(kept[: kept.rindex(b"\n") + 1])
    (tmp_path / "out").write_bytes(kept)
    assert df("df-run", "score", "demo", "-i", many, "-o", tmp_path / "out").status == 0
    assert (tmp_path / "out").read_bytes() == whole.read_bytes()


def _end_and_go_on(start, until, many, out, with_signal, after_lines) -> int:
    """Ends a run once so many lines are there; returns its status."""
    process = start("df-run", "score", "demo", "-i", many, "-o", out, "--rows", 8)
    until(lambda: (out.exists() and out.read_bytes().count(b"\n") >= after_lines) or process.poll() is not None)
    process.send_signal(with_signal)
    _, said = process.communicate()
    if with_signal == signal.SIGINT and process.returncode:
        assert said.decode().splitlines()[-1] == "df-run: interrupted; what was finished is kept"
    return process.returncode


def test_an_interrupted_run_ends_with_130_and_is_gone_on_with(df, start, until, many, tmp_path):
    out, whole = tmp_path / "out.jsonl", tmp_path / "whole.jsonl"
    assert _end_and_go_on(start, until, many, out, signal.SIGINT, 1) == 130
    assert 0 < out.read_bytes().count(b"\n") < 30
    for path in (out, whole):
        assert df("df-run", "score", "demo", "-i", many, "-o", path).status == 0
    assert out.read_bytes() == whole.read_bytes()


@pytest.mark.slow
def test_ten_kills_lose_no_line_and_make_none_twice(df, start, until, many, tmp_path):
    out, whole = tmp_path / "out.jsonl", tmp_path / "whole.jsonl"
    for number in range(10):
        assert _end_and_go_on(start, until, many, out, signal.SIGKILL, 2 * number + 1) in (-signal.SIGKILL, 0)
    for path in (out, whole):
        assert df("df-run", "score", "demo", "-i", many, "-o", path).status == 0
    assert out.read_bytes() == whole.read_bytes()
