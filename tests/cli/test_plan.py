"""df-plan and its doctor, as a user meets them."""

from __future__ import annotations

import json
import os
import re
import resource
import shutil
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from deltafin.cext import _io, _math
from deltafin.indexer import parse_model
from deltafin.indexer.publish import this_host
from deltafin.runtime.planner import Figures, Kernels, Outcome, Overheads, Subject, load_outcomes, probe, save_figures
from deltafin.runtime.planner.remembered import FIGURES_FILE, OUTCOMES_FILE, add_outcome
from deltafin.store import DriveProbe

FIELDS = {
    *("model", "identity", "threads", "budget", "spine", "as_released", "drive", "drive_assumed", "memory", "warm"),
    *("cold", "prompts", "install", "streaming", "levers", "figures", "error"),
}


@pytest.fixture
def cache(tmp_path) -> Path:
    """A cache directory in which this machine has been measured."""
    cache = tmp_path / "cache"
    cache.mkdir()
    save_figures(cache, replace(FIGURES, measured_at=time.time(), drives=(_drive(cache),)))
    return cache


SECONDS = {
    "mxfp4": (40e-12, 200e-12, 1300e-12),
    "bf16": (80e-12, 300e-12, 1400e-12),
    "bf12": (60e-12, 300e-12, 1400e-12),
    "int8": (40e-12, 200e-12, 1300e-12),
}
KERNELS = Kernels(_math.isa(), _math.threads(), SECONDS, 20e9, 20e9)
FIGURES = Figures(1.0, KERNELS, Overheads(2e-4, 2e-4, 1e-4, 4e-5, 5e-4, 6e-5, 8e-5))


def _drive(path: Path) -> DriveProbe:
    device = os.stat(path).st_dev if path.exists() else 0
    return DriveProbe(str(path), device, "ext4", 10**11, True, True, 8, 2e9, "objects", "")


def _line(done, status: int, command: str = "df-plan") -> str:
    assert done.status == status and done.out == "" and done.err.count("\n") == 1, done
    assert done.err.startswith(f"{command}: ")
    return done.err


# ---- the plan -------------------------------------------------------------------------------------------


def test_a_plan_for_kimi_k3_is_one_screen_before_anything_is_here(df, cache):
    done = df("df-plan", "--ram", "16GB", cache=cache)
    assert done.status == 0 and done.err == ""
    lines = done.out.splitlines()
    assert lines[0] == "moonshotai/Kimi-K3, from its published shape; nothing of it is here yet"
    assert len(lines) <= 40 and all(len(line) <= 160 for line in lines)
    topics = [line.split()[0] for line in lines if line[:1].strip()]
    assert topics[1:] == [
        "machine", "drive", "stays", "token", "prompt", "install", "stream", "line", "change", "next", "model", "error"
    ]  # fmt: skip
    assert "read-bound" in done.out and "df-index build moonshotai/Kimi-K3" in done.out
    assert "unknown; --probe-line measures it" in done.out
    assert "64 GB more of memory" in done.out and "int8 (not as released)" in done.out
    assert sorted(p.name for p in cache.iterdir()) == [FIGURES_FILE], "no catalog, no object, no test file"


def test_the_demo_is_planned_with_what_is_here(df, cache):
    done = df("df-plan", "demo", "--explain", cache=cache)
    assert done.status == 0
    assert re.match(r"demo \(demo@\w+\), all of it here\n", done.out)
    assert "install" not in done.out and "all of the spine stays" in done.out
    assert "union of experts under even routing" in done.out and "program, in us" in done.out


def test_figures_from_beside_other_work_are_marked(df, cache):
    assert "beside other work" not in df("df-plan", "demo", cache=cache).out
    save_figures(cache, replace(FIGURES, measured_at=time.time(), load=2.0))
    assert "beside other work" in df("df-plan", "demo", cache=cache).out


def test_json_has_everything_and_no_infinity(df, cache):
    for model in ("demo", "moonshotai/Kimi-K3"):
        done = df("df-plan", model, "--ram", "16GB", "--json", cache=cache)
        found = json.loads(done.out, parse_constant=lambda name: pytest.fail(name))
        assert {*found} == FIELDS
        assert {"total_s", "bound", "spine_wait_s", "expert_wait_s", "read_nbytes"} < {*found["warm"]}
        assert [p["tokens"] for p in found["prompts"]] == [10, 500, 5000]
        assert {p["time"]["bound"] for p in found["prompts"]} <= {"read", "compute"}
        assert found["memory"]["total"] <= found["budget"] == 16_000_000_000
        assert found["error"] == {"median": None, "runs": 0}
    assert found["install"]["full_s"].keys() == {"12500000.0", "125000000.0"}


def test_what_if_and_line_change_the_plan(df, cache):
    here = df("df-plan", "--ram", "16GB", "--json", cache=cache).json
    words = ["--ram", "16GB", "--line", "100Mbit/s", "--what-if", "ram=128GB,drive=7GB/s", "--what-if", "spine=bf12"]
    there = df("df-plan", *words, "--json", cache=cache).json
    assert (there["budget"], there["drive"], there["spine"]) == (128_000_000_000, 9e9, "bf12, to be packed")
    assert there["warm"]["total_s"] < here["warm"]["total_s"] / 3
    assert there["install"]["line"] == 12.5e6 and list(there["install"]["full_s"]) == ["12500000.0"]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--what-if", "ram=lots"], "ram 'lots' is no size"),
        (["--what-if", "disk=1"], "expected ram=SIZE"),
        (["--what-if", "drive=7"], "is no rate"),
        (["--line", "fast"], "--line 'fast' is no rate"),
        (["--line", "1MB/s", "--probe-line"], "no effect beside --line"),
        (["--probe-line", "--offline"], "--offline forbids it"),
        (["demo", "--probe-line"], "comes from no server"),
        (["--ram", "100MB"], "too little"),
    ],
)
def test_what_makes_no_sense_is_one_line_and_status_two(df, cache, words, says):
    assert says in _line(df("df-plan", *words, cache=cache), 2)


@pytest.mark.parametrize(("model", "says"), [("org/other", "df-index build org/other"), ("./nowhere", "no such")])
def test_a_model_whose_shape_nobody_knows_is_one_line(df, cache, model, says):
    assert says in _line(df("df-plan", model, cache=cache), 1)


def test_nothing_is_asked_of_a_server_without_permission_and_the_line_is_measured_with_it(df, cache, hub, tmp_path):
    shards = tmp_path / "it"
    shards.mkdir()
    (shards / "model-00001-of-000001.safetensors").write_bytes(os.urandom(1 << 20) * 32)
    server = hub(shards)
    assert df("df-plan", cache=cache).status == 0
    assert server.stats()["requests"] == 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Subject, "source", lambda self: parse_model("org/it", cache).source())
        patch.setattr("deltafin.store.lineprobe.SECONDS", 0.2)
        found = df("df-plan", "--probe-line", "--json", cache=cache)
    assert found.json["install"]["line"] > 1e6 and server.stats()["requests"] > 0
    assert "measuring the line" in found.err


def test_a_machine_is_measured_once_and_then_remembered(df, tmp_path, monkeypatch):
    calls = []

    def quick(*, threads=None, progress):
        calls.append(threads)
        kernels = replace(FIGURES.kernels, threads=threads or 2)
        return replace(FIGURES, measured_at=time.time(), kernels=kernels)

    probed = []

    def read(path, *, may_write):
        probed.append((path, may_write))
        return _drive(path)

    monkeypatch.setattr("deltafin.runtime.planner.probe", quick)
    monkeypatch.setattr("deltafin.store.probe_drive", read)
    monkeypatch.setattr(_math, "threads", lambda: 2)
    cache, other = tmp_path / "cache", tmp_path / "other"
    other.mkdir()
    assert df("df-plan", "demo", cache=cache).status == 0
    assert (calls, probed) == ([None], []), "a small model comes from no drive"
    for _ in range(2):
        assert df("df-plan", cache=cache).status == 0
    assert (calls, probed) == ([None], [(cache, True)])
    for _ in range(2):  # a root that was not there before is measured alone
        found = df("df-plan", "--root", f"{other},write", "--json", cache=cache)
        assert [d["path"] for d in found.json["figures"]["drives"]] == [str(cache), str(other)]
    assert (calls, probed) == ([None], [(cache, True), (other, True)])
    assert df("df-plan", "--measure", cache=cache).status == 0
    assert df("df-plan", "--threads", "1", cache=cache).status == 0, "other threads are another machine"
    assert (calls, probed[2:]) == ([None, None, 1], [(cache, True), (cache, True)])


@pytest.mark.slow
def test_measuring_for_real_takes_seconds():
    started = time.monotonic()
    figures = probe()
    assert time.monotonic() - started < 60
    assert figures.kernels.threads == _math.threads()
    assert all(0 < t[0] <= t[1] <= t[2] < 1e-6 for t in figures.kernels.seconds.values())
    assert figures.overheads.kda_s > 0 and figures.overheads.expert_s > 0


# ---- its error ------------------------------------------------------------------------------------------


def test_a_run_is_compared_with_its_plan_and_the_plan_says_how_far_it_was_off(df, cache):
    words = ["demo", "--prompt", "The capital of France is", "--max-new", "4"]
    ran = df("df-run", *words, "--json", "--stats", cache=cache)
    assert ran.status == 0
    (outcome,) = load_outcomes(cache)
    assert outcome.command == "df-run" and outcome.tokens == 3
    assert ran.json["plan"] == json.loads(json.dumps(ran.json["plan"])) and ran.json["plan"]["at"] == outcome.at
    assert "plan      " in ran.err and "as df-plan has it" in ran.err
    assert outcome.measured_s == pytest.approx((ran.json["total_s"] - ran.json["first_token_s"]) / 3, abs=1e-5)
    benched = df("df-bench", "tokens", "demo", "--tokens", "3", "--json", cache=cache)
    assert benched.json["plan"]["tokens"] == 3
    assert benched.json["plan"]["error"] == pytest.approx(
        benched.json["plan"]["predicted_s"] / benched.json["token_s"] - 1
    )
    assert len(load_outcomes(cache)) == 2
    found = df("df-plan", "demo", "--json", cache=cache).json["error"]
    assert found["runs"] == 2 and found["median"] > 0
    assert "in the median of the last 2 runs here" in df("df-plan", "demo", cache=cache).out


def test_without_figures_nothing_is_remembered(df, tmp_path):
    ran = df("df-run", "demo", "--prompt", "x", "--max-new", "3", "--json", cache=tmp_path / "fresh")
    assert ran.status == 0 and ran.json["plan"] is None
    done = df("df-bench", "tokens", "demo", "--tokens", "2", cache=tmp_path / "fresh")
    assert "df-plan has not measured this machine" in done.out
    assert not (tmp_path / "fresh" / OUTCOMES_FILE).exists()


def test_damaged_memory_of_runs_is_one_warning(df, cache):
    add_outcome(cache, Outcome(1.0, "df-run", "it", 3, 2.0, 1.0))
    assert "100% in the one run here" in df("df-plan", "demo", cache=cache).out
    (cache / OUTCOMES_FILE).write_text("{")
    done = df("df-plan", "demo", cache=cache)
    assert done.status == 0 and "damaged, ignored" in done.err and "unknown until" in done.out


def test_tokens_are_measured_at_a_rate_with_a_table_of_causes(df, cache):
    done = df("df-bench", "tokens", "demo", "--tokens", "2", "--rate", "200MB", "--threads", "1", cache=cache)
    assert done.status == 0, done.err
    first, token, causes, plan = done.out.splitlines()
    assert first.startswith("demo: ") and token.startswith("token ") and "waiting: spine" in causes
    assert plan.startswith("plan ")
    assert df("df-bench", "tokens", "demo", "--rate", "0", cache=cache).status == 2


# ---- the doctor -----------------------------------------------------------------------------------------


def _topics(found: dict) -> list[str]:
    return [f["topic"] for f in found["findings"]]


def _doctor(df, *words, cache: Path):
    done = df("df-plan", "doctor", *words, "--json", cache=cache)
    assert done.status == (0 if done.json["fine"] else 1)
    assert done.json["fine"] == (not done.json["findings"])
    assert all(f["do"] for f in done.json["findings"]), "each says what to do"
    return done.json


def test_a_sound_installation_is_fine_and_nothing_is_written(df, tmp_path):
    found = _doctor(df, cache=tmp_path / "none")
    assert found["findings"] == []
    assert {f["topic"] for f in found["facts"]} == {
        "version", "library", "kernels", "memory", "limits", "root", "catalog", "network"
    }  # fmt: skip
    assert not (tmp_path / "none").exists()
    shown = df("df-plan", "doctor", cache=tmp_path / "none")
    assert shown.out.endswith("fine\n") and len(shown.out.splitlines()) < 25


def test_a_damaged_record_a_torn_write_and_a_quarantine_are_found(df, tmp_path, demo_cache):
    cache = shutil.copytree(demo_cache, tmp_path / "full")
    assert _topics(_doctor(df, "org/demo", cache=cache)) == []
    log = bytearray((cache / "objects.log").read_bytes())
    log[128 * 3 + 60] ^= 1
    (cache / "objects.log").write_bytes(log)
    (cache / "quarantine").mkdir()
    (cache / "quarantine" / "x").write_bytes(b"damaged")
    (cache / "tmp").mkdir(exist_ok=True)
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    left = cache / "tmp" / f".x.{this_host()}.{gone.pid}.0.part"
    left.write_bytes(b"half")
    found = _doctor(df, "org/demo", cache=cache)
    assert sorted(_topics(found)) == ["log", "root", "root"]
    text = " ".join(f["what"] for f in found["findings"])
    assert "1 damaged records" in text and "1 temporary files" in text and "1 files that were found damaged" in text


def test_a_small_limit_of_open_files_is_found(df, tmp_path, monkeypatch):
    """One that cannot be raised: commands raise what they may."""
    real, few = resource.getrlimit, {resource.RLIMIT_NOFILE: (128, 128)}
    monkeypatch.setattr(resource, "getrlimit", lambda which: few.get(which) or real(which))
    monkeypatch.setattr(resource, "setrlimit", lambda which, limits: None)
    found = _doctor(df, cache=tmp_path / "none")
    (finding,) = found["findings"]
    assert finding["what"] == "open files: need 256, have 128" and "ulimit -n" in finding["do"]


def test_refused_direct_reads_are_found_with_why(df, tmp_path, monkeypatch):
    real = _io.open
    monkeypatch.setattr(_io, "open", lambda path, direct: real(path, False))
    (finding,) = _doctor(df, cache=tmp_path / "none")["findings"]
    assert "direct reads are refused" in finding["what"] and "page cache" in finding["what"]
    assert not (tmp_path / "none").exists()


def test_a_damaged_catalog_is_found(df, tmp_path, demo_cache):
    cache = shutil.copytree(demo_cache, tmp_path / "full")
    (catalog,) = (cache / "catalogs").glob("*.catalog")
    catalog.write_bytes(catalog.read_bytes()[: catalog.stat().st_size // 2])
    (finding,) = _doctor(df, "org/demo", cache=cache)["findings"]
    assert finding["topic"] == "catalog" and finding["do"] == "run: df-index build org/demo"


SOUND = {"finished": 1, "mode": "full", "model": "org/demo", "whole": 5, "damaged": [], "sound": True}


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"finished": time.time() - 86400}, "1 days ago, full, org/demo: 0 damaged"),
        ({"finished": time.time(), "damaged": ["one"]}, "0 days ago, full, org/demo: 1 damaged, repaired"),
        ({"finished": "yesterday"}, "unreadable, ignored"),
        ({"finished": 10**300}, "unreadable, ignored"),
        ({"model": "\x1b[31m"}, "unreadable, ignored"),
        ({"damaged": 3}, "unreadable, ignored"),
    ],
)
def test_the_last_verify_is_told(df, tmp_path, changes, says):
    found = _after_verify(df, tmp_path / "cache", SOUND | {key: _whole(value) for key, value in changes.items()})
    assert found["fine"] and any(f["topic"] == "verify" and says in f["text"] for f in found["facts"])


def test_an_old_verify_and_one_that_found_damage_need_attention(df, tmp_path):
    old = _after_verify(df, tmp_path / "a", SOUND)
    assert [f["do"] for f in old["findings"]] == ["run: df-fetch verify org/demo"]
    bad = SOUND | {"finished": int(time.time()), "damaged": ["one", "two"], "sound": False}
    (finding,) = _after_verify(df, tmp_path / "b", bad)["findings"]
    assert "found 2 damaged" in finding["what"] and finding["do"] == "run: df-fetch verify org/demo --repair"


def test_what_a_real_verify_found_is_told(df, tmp_path, demo_cache):
    cache = shutil.copytree(demo_cache, tmp_path / "full")
    victim = next(path for path in (cache / "objects").glob("*/*"))
    victim.write_bytes(bytes(victim.stat().st_size))
    assert df("df-fetch", "verify", "org/demo", cache=cache).status == 1
    findings = _doctor(df, "org/demo", cache=cache)["findings"]
    assert any(f["topic"] == "verify" and "found 1 damaged" in f["what"] for f in findings)


def _after_verify(df, cache: Path, record: dict) -> dict:
    cache.mkdir()
    (cache / "verify.json").write_text(json.dumps(record))
    return _doctor(df, cache=cache)


def _whole(value: object) -> object:
    return int(value) if isinstance(value, float) else value


def test_what_verify_leaves_behind_is_understood(df, tmp_path, demo_cache):
    cache = tmp_path / "cache"
    shutil.copytree(demo_cache, cache)
    assert df("df-fetch", "verify", "demo", "--cache-dir", cache).status == 0
    assert any(
        f["topic"] == "verify" and ", full, demo: 0 damaged" in f["text"] for f in _doctor(df, cache=cache)["facts"]
    )


def test_a_root_that_is_not_there_and_one_that_is_a_file_are_found(df, tmp_path):
    (tmp_path / "file").write_text("")
    missing = _doctor(df, "--root", tmp_path / "gone", cache=tmp_path / "none")["findings"]
    assert [f["what"] for f in missing] == [f"--root {tmp_path / 'gone'}: no such directory"]
    assert "is not a directory" in _doctor(df, cache=tmp_path / "file")["findings"][0]["what"]


def test_roots_with_options_and_those_of_the_configuration_file_are_looked_at(df, tmp_path, monkeypatch):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    config = tmp_path / "config.toml"
    config.write_text(f"[[root]]\npath = '{tmp_path / 'b'}'\n")
    monkeypatch.setenv("DELTAFIN_CONFIG", str(config))
    found = _doctor(df, "--root", f"{tmp_path / 'a'},write,budget=1GB", cache=tmp_path / "none")
    seen = [f["text"].partition(": ")[0] for f in found["facts"] if f["topic"] == "root"]
    assert seen == [str(tmp_path / name) for name in ("none", "a", "b")] and found["fine"]
    config.write_text("typo = 1\n")
    (finding,) = _doctor(df, cache=tmp_path / "none")["findings"]
    assert finding["topic"] == "config" and "unknown key 'typo'" in finding["what"]
    assert "unknown key 'typo'" in _line(df("df-plan", "demo", cache=tmp_path / "none"), 2)


def test_evict_takes_a_root_with_its_options(df, tmp_path, demo_cache):
    other = tmp_path / "other"
    other.mkdir()
    done = df("df-fetch", "evict", "org/demo", "--to", "1GB", "--root", f"{other},write", cache=demo_cache)
    assert done.status == 0 and str(other) in done.out, done


def test_plain_kernels_are_found(df, tmp_path, monkeypatch):
    monkeypatch.setattr(_math, "isa", lambda: "scalar")
    (finding,) = _doctor(df, cache=tmp_path / "none")["findings"]
    assert finding["topic"] == "kernels"


def test_no_token_password_or_address_is_shown(df, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_abcxyz")
    monkeypatch.setenv("HTTPS_PROXY", "http://joe:abcxyz@far.test:3128")
    monkeypatch.setenv("HF_ENDPOINT", "http://joe:abcxyz@far.test")
    for words in ([], ["--json"], ["-v", "-v"]):
        done = df("df-plan", "doctor", *words, cache=tmp_path / "none")
        shown = done.out + done.err
        assert "abcxyz" not in shown and "far.test" not in shown
        assert "HTTPS_PROXY" in shown and "token set" in shown
