"""What every command promises of itself, and how soon it says so."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

import deltafin
from deltafin.cli.options import ByteSize
from deltafin.cli.progress import human_nbytes, human_seconds

NAMES = ["df-index", "df-fetch", "df-run", "df-serve", "df-bench", "df-plan"]


def _run(name: str, *args: str, **keywords) -> subprocess.CompletedProcess[str]:
    program = Path(sys.executable).with_name(name)
    return subprocess.run([program, *args], capture_output=True, text=True, timeout=60, **keywords)


@pytest.mark.parametrize("name", NAMES)
def test_help_is_there_in_half_a_second(name, record_property):
    times = []
    for _ in range(5):
        started = time.monotonic()
        done = _run(name, "--help")
        times.append(time.monotonic() - started)
        assert done.returncode == 0 and done.stdout.startswith(f"Usage: {name} ")
    record_property("figures", f"{name} --help: best of 5 {min(times):.2f} s")
    assert min(times) < 0.5


@pytest.mark.parametrize("name", NAMES)
def test_the_version_is_the_packages(name):
    assert _run(name, "--version").stdout == f"{name}, version {deltafin.__version__}\n"


def test_every_subcommand_has_help_with_an_example_and_says_what_its_options_do():
    from deltafin.cli.batch import batch
    from deltafin.cli.bench import bench
    from deltafin.cli.fetch import fetch
    from deltafin.cli.index import index
    from deltafin.cli.plan import plan
    from deltafin.cli.run import run
    from deltafin.cli.score import score
    from deltafin.cli.serve import serve

    commands = [
        run,
        serve,
        batch,
        score,
        *plan.commands.values(),
        *bench.commands.values(),
        *fetch.commands.values(),
        *index.commands.values(),
    ]
    for command in commands:
        text = command.help or ""
        assert "Example: df-" in text or command.name == "list", command.name
        for param in command.params:
            assert param.param_type_name == "argument" or param.help, f"{command.name} {param.name}"


def test_the_package_lists_its_commands():
    done = subprocess.run([sys.executable, "-m", "deltafin"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0
    for name in NAMES:
        assert name in done.stdout


@pytest.mark.parametrize(
    "args", [["df-fetch"], ["df-fetch", "nonsense"], ["df-fetch", "all"], ["df-run"], ["df-run", "demo", "--nonsense"]]
)
def test_wrong_usage_has_status_two_and_no_traceback(args):
    done = _run(*args)
    assert done.returncode == 2 and "Usage:" in done.stderr + done.stdout
    assert "Traceback" not in done.stderr


HEAVY = """
import sys
from deltafin import cli
sys.argv = ["df-fetch", *sys.argv[1:]]
try:
    cli.fetch_main()
except SystemExit as e:
    assert not e.code, e.code
heavy = {"torch", "huggingface_hub"} & set(sys.modules)
assert not heavy, heavy
"""


@pytest.mark.parametrize("words", [["status", "demo"], ["verify", "demo"], ["all", "demo"], ["rm", "demo", "--all"]])
def test_df_fetch_imports_neither_torch_nor_the_hub_client_for_what_is_here(words, tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", HEAVY, *words],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "DELTAFIN_CACHE": str(tmp_path)},
    )
    assert done.returncode == 0, done.stderr


def test_df_fetch_by_a_trace_imports_no_torch(tmp_path, open_model, demo_dir):
    from deltafin.runtime import TraceWriter

    with open_model(demo_dir) as model:
        TraceWriter(tmp_path / "trace", model.store.catalog).close()
    done = subprocess.run(
        [sys.executable, "-c", HEAVY, "warm", "demo", "--trace", tmp_path / "trace"],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "DELTAFIN_CACHE": str(tmp_path)},
    )
    assert done.returncode == 0, done.stderr


# ---- numbers as people write them -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("0", 0),
        ("500", 500),
        ("500B", 500),
        ("1KB", 1000),
        ("1k", 1000),
        ("1KiB", 1024),
        ("500MB", 500_000_000),
        ("500 MB", 500_000_000),
        ("1.5TB", 1_500_000_000_000),
        ("20GiB", 20 << 30),
        ("2g", 2_000_000_000),
        ("0.5kib", 512),
        (77, 77),
    ],
)
def test_a_size_is_read_as_drives_and_people_write_it(text, nbytes):
    assert ByteSize().convert(text, None, None) == nbytes


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1 KB"),
        (17_547_264, "17.5 MB"),
        (1_560_860_324_864, "1.56 TB"),
        (10**15, "1e+03 TB"),
    ],
)
def test_bytes_are_shown_in_powers_of_ten(nbytes, text):
    assert human_nbytes(nbytes) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0 s"), (89, "89 s"), (90, "2 min"), (3600, "60 min"), (7200, "2.0 h"), (86400 * 3, "3.0 days")],
)
def test_durations_are_shown_in_the_unit_that_suits(seconds, text):
    assert human_seconds(seconds) == text
