"""Commands that may have little: memory, threads, open files. One line says what is lacking."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

LIMITED = Path(__file__).parents[1] / "faults" / "run_limited.py"


def _limited(cache: Path, *words: object) -> dict:
    program = Path(sys.executable)
    at = words.index("--") + 1
    code = f"from deltafin.cli import {words[at][3:]}_main; {words[at][3:]}_main()"
    command = [sys.executable, LIMITED, *words[:at], program, "-c", code, *words[at + 1 :], "--cache-dir", cache]
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, timeout=60)
    return json.loads(done.stdout.splitlines()[-1])


COMMANDS = [
    ("df-index", "build"),
    ("df-fetch", "all"),
    ("df-fetch", "verify"),
    ("df-run", "--prompt-ids", "1", "--max-new", "2", "--ids"),
]


def _at(words, model):
    at = 1 if words[0] == "df-run" else 2
    return [*words[:at], model, *words[at:]]


@pytest.mark.parametrize("words", COMMANDS[1::2], ids=["fetch", "run"])
@pytest.mark.parametrize("most", [8, 63])
def test_too_few_open_files_are_said_at_once_with_both_numbers(tiny_dir, tmp_path, most, words):
    row = _limited(tmp_path, "--nofile", most, "--", *_at(words, tiny_dir))
    assert row["rc"] == 1 and row["seconds"] < 5
    assert row["stderr_end"] == f"{words[0]}: open files: 64 are needed, {most} allowed; run ulimit -n 64 first\n"


@pytest.mark.slow
@pytest.mark.parametrize("nbytes", [60, 80, 100, 120, 140, 160, 180, 200, 220, 240, 260, 300, 400, 500, 600])
def test_too_little_memory_is_one_line_wherever_it_runs_out(tiny_dir, tmp_path, nbytes):
    for words in COMMANDS:
        row = _limited(tmp_path, "--memory", nbytes * 1_000_000, "--", *_at(words, tiny_dir))
        if row["rc"] != 0:
            assert not row["traceback"] and row["stderr_end"].count("\n") == 1, (words, row)
            assert row["rc"] == 1 or (words[0] == "df-run" and row["rc"] == 2), row
            assert row["stderr_end"].startswith(f"{words[0]}: ")
