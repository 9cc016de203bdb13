"""Commands under what goes wrong for people: few files, damaged shards and catalogs, read-only and vanishing disks."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

TOOLS = Path(__file__).parents[1] / "faults"
REPO, TINY = "org/demo", "org/tiny"
RUN = ("df-run", "--prompt-ids", "1 2 3", "--max-new", "2", "--ids")
MODEL_COMMANDS = [("df-fetch", "all"), ("df-fetch", "spine", "--as", "bf12"), RUN]


def _with_model(words, model):
    """Where a command wants its model: behind the subcommand, if there is one."""
    at = 1 if words[0] == "df-run" else 2
    return [*words[:at], model, *words[at:]]


def _limited(cache: Path, *words: str) -> dict:
    """What run_limited.py says of a command under limits; `words` are its options, "--", and the command."""
    at = words.index("--") + 1
    program = str(Path(sys.executable).with_name(words[at]))
    done = subprocess.run(
        [sys.executable, TOOLS / "run_limited.py", *words[:at], program, *words[at + 1 :], "--cache-dir", cache],
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    return json.loads(done.stdout.splitlines()[-1])


def _one_line(done, *says: str) -> None:
    """Failed, with nothing on stdout and one line on stderr that says all of this."""
    assert (done.status, done.out) == (1, ""), done
    assert done.err.count("\n") == 1 and "Traceback" not in done.err, done.err
    for text in says:
        assert text in done.err, done.err


# ---- open files (CA-07) --------------------------------------------------------------------------------


@pytest.mark.parametrize("most", [64, *(pytest.param(most, marks=pytest.mark.slow) for most in (32, 256))])
def test_sixty_four_open_files_are_enough_for_every_command(hub, tiny_dir, tmp_path, most):
    hub(tiny_dir)
    for words in (["df-fetch", "all", TINY], _with_model(RUN, TINY)):
        row = _limited(tmp_path / "cache", "--nofile", str(most), "--", *words)
        assert (row["rc"], row["stderr_end"]) == (0, "")


# ---- damaged shards (ST) -------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def bad_shards(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("bad")
    subprocess.run([sys.executable, TOOLS / "bad_safetensors.py", out], check=True, capture_output=True)
    return out


def _stops_at(df, words, model: Path, bad: Path) -> None:
    """One line names the shard whose place `bad` takes, and nothing is kept."""
    shard = model / "model-00003-of-000012.safetensors"
    shutil.copy(bad, shard)
    _one_line(df(*_with_model(words, model)), shard.name)
    kept = [path for path in Path(os.environ["DELTAFIN_CACHE"]).rglob("*") if path.is_file()]
    assert [path.name for path in kept if path.suffix != ".lock"] == []


@pytest.mark.parametrize("words", MODEL_COMMANDS, ids=["fetch", "pack", "run"])
def test_a_damaged_shard_stops_every_command_with_one_line_that_names_it(df, tiny_dir, tmp_path, bad_shards, words):
    """A few kinds; df-index is tried with all of them."""
    model = Path(shutil.copytree(tiny_dir, tmp_path / "model"))
    for name in ("file_header_only", "is_html", "all_overlap", "set_missing_scale"):
        _stops_at(df, words, model, bad_shards / f"{name}.safetensors")


@pytest.mark.slow
@pytest.mark.parametrize("words", MODEL_COMMANDS, ids=["fetch", "pack", "run"])
def test_every_damaged_shard_stops_every_command(df, tiny_dir, tmp_path, bad_shards, words):
    model = Path(shutil.copytree(tiny_dir, tmp_path / "model"))
    bad = [row["file"] for row in json.loads((bad_shards / "manifest.json").read_text()) if row["expect"] == "reject"]
    assert len(bad) == 35
    for name in bad:
        _stops_at(df, words, model, bad_shards / name)


def test_a_missing_shard_is_counted_in_experts_and_nothing_runs(df, tiny_dir, tmp_path):
    """ST-04: never a part of a model."""
    model = Path(shutil.copytree(tiny_dir, tmp_path / "model"))
    (model / "model-00003-of-000012.safetensors").unlink()
    for words in MODEL_COMMANDS:
        _one_line(df(*_with_model(words, model)), "model-00003-of-000012.safetensors")


# ---- damaged catalogs (DB-06) --------------------------------------------------------------------------

DAMAGE = ["empty_file", "cut_mid_page", "noise_start", "noise_pages", "bad_magic", "other_format", "one_meta", "gone"]


@pytest.fixture(scope="session")
def damaged_catalogs(tmp_path_factory, tiny_cache) -> Path:
    out = tmp_path_factory.mktemp("catalogs")
    catalog = next((tiny_cache / "catalogs").glob("*.catalog"))
    words = [sys.executable, TOOLS / "damage_catalog.py", catalog, out]
    subprocess.run(words, check=True, capture_output=True)
    return out


@pytest.mark.parametrize("name", ["half", *(pytest.param(name, marks=pytest.mark.slow) for name in DAMAGE)])
def test_a_damaged_catalog_is_one_line_for_every_command_and_no_signal(
    command, tiny_cache, damaged_catalogs, tmp_path, name
):
    """In processes of their own: LMDB would end them with a signal."""
    cache = Path(shutil.copytree(tiny_cache, tmp_path / "cache"))
    catalog = next((cache / "catalogs").glob("*.catalog"))
    catalog.unlink()
    if (damaged := damaged_catalogs / name / catalog.name).exists():
        shutil.copy(damaged, catalog)
    objects = len(list((cache / "objects").glob("*/*")))
    for words in (["df-fetch", "status", TINY], [*_with_model(RUN, TINY), "--offline"], ["df-index", "show", TINY]):
        done = command(*words, env={"HF_HUB_OFFLINE": "1"})
        assert done.returncode in (1, 2) and done.stdout == "", done
        assert done.stderr.count("\n") == 1, done.stderr
        assert "df-index build" in done.stderr
    assert len(list((cache / "objects").glob("*/*"))) == objects


def test_a_rebuilt_catalog_finds_everything_that_was_fetched(df, full_tiny, tmp_path):
    catalog = next((tmp_path / "cache" / "catalogs").glob("*.catalog"))
    os.truncate(catalog, catalog.stat().st_size // 2)
    _one_line(df("df-fetch", "all", TINY), "df-index build")
    assert df("df-index", "build", TINY).status == 0
    assert df("df-fetch", "all", TINY).out.startswith("fetched 14 spans"), "headers and the like, for the proof"
    asked = full_tiny.stats()["bytes_sent"]
    done = df("df-fetch", "all", TINY)
    assert done.status == 0 and done.out.startswith("fetched 0 spans")
    assert full_tiny.stats()["bytes_sent"] == asked


# ---- disks that cannot be written, or go away (DB-05, IO-03) -------------------------------------------


@pytest.fixture
def read_only(tmp_path):
    """`read_only(folder)` is that folder on a mount that cannot be written, even by root; skips where nobody may."""
    mounted = []

    def mount(folder: Path) -> Path:
        where = tmp_path / "read-only"
        where.mkdir()
        try:
            subprocess.run(["mount", "--bind", folder, where], check=True, capture_output=True)
            mounted.append(where)
            subprocess.run(["mount", "-o", "remount,ro,bind", where], check=True, capture_output=True)
        except (OSError, subprocess.CalledProcessError):
            pytest.skip("nothing can be mounted here")
        return where

    yield mount
    for where in mounted:
        subprocess.run(["umount", "-l", where], check=True)


def test_a_full_cache_on_a_read_only_mount_is_used_and_writing_is_one_line(df, full_tiny, tmp_path, read_only):
    df("df-fetch", "all", TINY)
    cache = read_only(tmp_path / "cache")
    for words in (["df-index", "show", TINY], ["df-fetch", "status", TINY], ["df-fetch", "all", TINY]):
        done = df(*words, cache=cache)
        assert (done.status, done.err) == (0, ""), done
    done = df("df-fetch", "verify", TINY, "--json", cache=cache)
    assert (done.status, done.json["whole"]) == (0, 154)
    assert df(*_with_model(RUN, TINY), cache=cache).status == 0
    for words in (
        ["df-index", "build", TINY],
        ["df-fetch", "rm", TINY, "--all", "--yes"],
        ["df-fetch", "spine", TINY, "--as", "bf12"],
    ):
        _one_line(df(*words, cache=cache), "Read-only file system", str(cache))


def test_what_a_read_only_cache_lacks_is_streamed_with_one_warning(df, full_tiny, tmp_path, read_only):
    expected = df(*_with_model(RUN, TINY)).out
    for path in sorted((tmp_path / "cache" / "objects").glob("*/*")):
        if path.stat().st_size == 3264:  # an expert
            path.unlink()
    cache = read_only(tmp_path / "cache")
    done = df(*_with_model(RUN, TINY), cache=cache)
    assert (done.status, done.out) == (0, expected)
    assert done.err.count("\n") == 1 and "going on without keeping what is fetched" in done.err
    _one_line(df("df-fetch", "all", TINY, cache=cache), "Read-only file system")


@pytest.mark.parametrize(
    ("how", "network"),
    [
        ("unmount", True),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (("remove", True), ("remove", False), ("unmount", False))
        ),
    ],
)
def test_a_drive_taken_away_during_a_run_costs_no_wrong_token(
    start, hub, demo_dir, demo_cache, tmp_path, small_disk, command, how, network
):
    """With a server the run goes on; without one it ends with one line, and what it said before is right."""
    story = ("--prompt", "Once upon a time", "--max-new", "60", "--ids", "--ram", "120MB")
    server = hub(demo_dir)
    disk = small_disk(60 << 20, "disk")
    shutil.copytree(demo_cache, disk / "cache")
    expected = command("df-run", REPO, *story, cache=disk / "cache").stdout
    assert len(expected.split()) > 30
    words = [REPO, *story, *([] if network else ["--offline"])]
    process = start("df-run", *words, cache=disk / "cache")
    said = process.stdout.read1(1)  # it has begun to answer
    if how == "unmount":
        subprocess.run(["umount", "-l", disk], check=True)
        subprocess.run(["mount", "-t", "tmpfs", "tmpfs", disk], check=True)  # for the fixture to unmount
    else:
        shutil.rmtree(disk / "cache")
    out, err = process.communicate(timeout=60)
    said = (said + out).decode()
    if network:
        assert (process.returncode, said) == (0, expected), err
        assert server.stats()["requests"] > 0
    else:
        assert process.returncode == 1 and err.count(b"\n") == 1, err
        ids, right = said.split(), expected.split()
        assert ids == right[: len(ids)] and len(ids) < len(right)


# ---- kills (CA-01) -------------------------------------------------------------------------------------


def test_a_removal_killed_anywhere_leaves_a_store_that_verifies_and_can_be_filled_again(
    start, df, full_tiny, tmp_path, until
):
    """Kills during eviction: an object is there or not, whatever the log says of it."""

    def records() -> int:
        return (tmp_path / "cache" / "objects.log").stat().st_size

    for step in (1, 2, 3):
        before = records()
        process = start("df-fetch", "rm", TINY, "--all", "--yes")
        until(lambda: records() > before + 20 * step * 128 or process.poll() is not None)  # noqa: B023
        process.kill()
        process.wait()
        found = df("df-fetch", "verify", TINY, "--json")
        assert (found.status, found.json["damaged"]) == (0, [])
        assert df("df-fetch", "all", TINY).status == 0
        assert df("df-fetch", "verify", TINY, "--json").json["whole"] == 154
