"""Awkward surroundings: changed directories, company at the first start, closed and full outputs."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.fixture
def model(demo_dir, tmp_path) -> Path:
    return shutil.copytree(demo_dir, tmp_path / "model")


@pytest.mark.parametrize("change", ["edit", "remove"])
def test_a_config_that_changed_since_indexing_is_not_ignored(command, model, change):
    assert command("df-run", model, "--prompt", "Hi", "--max-new", 2).returncode == 0
    config = model / "config.json"
    if change == "edit":
        config.write_text(config.read_text().replace('"routed_scaling_factor": 1.0', '"routed_scaling_factor": 9.0'))
    else:
        config.unlink()
    done = command("df-run", model, "--prompt", "Hi", "--max-new", 2)
    assert (done.returncode, done.stdout) == (1, "")
    assert "config.json: changed since it was indexed; rebuild" in done.stderr
    assert done.stderr.count("\n") == 1


def test_a_shard_whose_length_word_changed_is_not_used(command, model):
    assert command("df-run", model, "--prompt", "Hi", "--max-new", 2).returncode == 0
    shard = next(model.glob("model-00003-*"))
    with open(shard, "r+b") as f:
        f.write(b"\xff" * 8)
    done = command("df-run", model, "--prompt", "Hi", "--max-new", 2)
    assert done.returncode == 1
    assert "changed since it was indexed" in done.stderr


def test_a_missing_shard_of_an_indexed_directory_fails_verification(command, model):
    assert command("df-index", "build", model).returncode == 0
    shard = next(model.glob("model-00003-*"))
    shard.unlink()
    done = command("df-fetch", "verify", model)
    assert done.returncode == 1
    assert f"{shard.name}: missing" in done.stdout


def test_three_first_runs_at_once_on_an_empty_cache_all_answer(hub, demo_dir, tmp_path):
    hub(demo_dir, "redirect_cross_host_expiring", life=600)
    program = Path(sys.executable).with_name("df-run")
    env = {**os.environ, "DELTAFIN_CACHE": str(tmp_path / "cache")}
    words = [str(program), "some/model", "--prompt", "47 + 38 =", "--max-new", "3"]
    runs = [subprocess.Popen(words, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE) for _ in range(3)]
    for run in runs:
        out, err = run.communicate(timeout=120)
        assert (run.returncode, out) == (0, b" 85\n"), err


@pytest.mark.parametrize(
    ("redirection", "status"),
    [
        ("2>&-", 0),
        (">&-", 0),
        (">&- 2>&-", 0),
        (">/dev/full", 1),
    ],
)
def test_closed_and_full_outputs_end_without_a_traceback(tmp_path, redirection, status):
    program = Path(sys.executable).with_name("df-run")
    env = {**os.environ, "DELTAFIN_CACHE": str(tmp_path / "cache")}
    script = f"{program} demo --prompt Hi --max-new 2 {redirection}"
    done = subprocess.run(["bash", "-c", script], env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == status
    assert "Traceback" not in done.stdout + done.stderr


@pytest.mark.parametrize("endpoint", ["http://me:hunter2@127.0.0.1:99999", "ftp://me:hunter2@x", "http://[::1"])
def test_a_malformed_endpoint_is_one_line_without_its_password(command, endpoint):
    done = command("df-index", "build", "some/model", env={"HF_ENDPOINT": endpoint})
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "HF_ENDPOINT" in done.stderr
    assert "hunter2" not in done.stderr


def test_a_certificate_bundle_that_is_not_there_is_named(command, demo_dir, hub):
    hub(demo_dir)
    assert command("df-index", "build", "some/model").returncode == 0
    env = {"REQUESTS_CA_BUNDLE": "/nowhere.pem", "HF_ENDPOINT": os.environ["HF_ENDPOINT"].replace("http:", "https:")}
    done = command("df-run", "some/model", "--prompt", "Hi", env=env)
    assert done.returncode == 1
    assert "/nowhere.pem" in done.stderr
    assert done.stderr.count("\n") == 1


def test_a_full_disk_under_a_trace_is_one_line(command):
    done = command("df-run", "demo", "--prompt", "Hi", "--max-new", 2, "--trace", "/dev/full")
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert "trace /dev/full: write failed" in done.stderr
