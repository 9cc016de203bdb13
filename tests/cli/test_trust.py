"""df-fetch verify --repair and df-fetch manifest, as a user runs them."""

from __future__ import annotations

import os
import random
import signal
import threading
import time

import pytest

from deltafin.indexer import Catalog

REPO = "org/tiny"


def _one_line(done, status=1) -> str:
    assert (done.status, done.out) == (status, ""), done
    (line,) = done.err.splitlines()
    assert line.startswith("df-fetch: ")
    return line


def _flip(path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 16
    path.write_bytes(data)


@pytest.fixture
def proven(df, hub, tiny_dir, tmp_path, index_only):
    """The command's cache holds all of org/tiny, proven; and the hub."""
    server = hub(tiny_dir)
    index_only(tmp_path / "cache", REPO)
    done = df("df-fetch", "all", REPO, "-v")
    assert done.status == 0
    assert done.err.count("proven, its bytes have the published SHA-256") == 12
    server.set_mode("ok")
    return server


def test_status_says_what_is_proven_and_when_it_was_verified(df, proven):
    lines = df("df-fetch", "status", REPO).out.splitlines()
    assert "  proven   140 spans, 2.69 MB; unproven 0, 0 B" in lines
    assert lines[-1] == "  verified never; df-fetch verify does"
    assert df("df-fetch", "verify", REPO).out == "154 whole (2.87 MB), 0 damaged\n"
    last = df("df-fetch", "status", REPO).out.splitlines()[-1]
    assert last.startswith("  verified ") and last.endswith("ago (full, org/tiny): 154 whole, 0 damaged")
    result = df("df-fetch", "status", REPO, "--json").json["last_verify"]
    assert (result["mode"], result["proven"], result["sound"]) == ("full", 140, True)


def test_repair_brings_back_what_is_damaged_says_what_it_took_and_verifies_after(df, proven, tmp_path, ranges):
    cache = tmp_path / "cache"
    victims = random.Random(5).sample(sorted((cache / "objects").rglob("*/*")), 4)
    for path in victims[:3]:
        _flip(path, 40)
    victims[3].unlink()
    _flip(cache / "objects.log", 200 * 128 + 70)
    done = df("df-fetch", "verify", REPO, "--repair")
    assert done.status == 0, done
    assert done.out.count("damaged: ") == 3 and "150 whole" in done.out
    assert "corrected 1 records of which one bit was wrong" in done.out
    assert "fetched 4 spans again" in done.out
    assert f"in {proven.stats()['requests']} requests" in done.out
    assert len(ranges(proven)) == 4
    done = df("df-fetch", "verify", REPO, "--json")
    assert (done.status, done.json["whole"], done.json["damaged"]) == (0, 154, [])


def test_repair_builds_a_damaged_catalog_again(df, proven, tmp_path):
    (path,) = (tmp_path / "cache" / "catalogs").glob("*.catalog")
    with Catalog(path) as catalog:
        identity = catalog.identity
    _flip(path, 6000)
    assert "df-fetch verify --repair" in _one_line(df("df-fetch", "verify", REPO))
    line = df("df-fetch", "verify", REPO, "--repair", "--offline").err.splitlines()[-1]
    assert "its source is out of reach; run this again without --offline" in line
    done = df("df-fetch", "verify", REPO, "--repair", "--json")
    assert (done.status, done.json["repair"]["rebuilt_catalog"], done.json["repair"]["spans"]) == (0, True, 0)
    with Catalog(path) as catalog:
        assert catalog.identity == identity


def test_what_cannot_be_repaired_is_status_one(df, proven, tmp_path):
    victim = sorted((tmp_path / "cache" / "objects").rglob("*/*"))[9]
    _flip(victim, 3)
    done = df("df-fetch", "verify", REPO, "--repair", "--offline")
    assert done.status == 1 and "not repaired: 1 spans: " in done.out
    assert proven.stats()["requests"] == 0
    assert df("df-fetch", "status", REPO).out.splitlines()[-1].endswith("153 whole, 1 damaged")
    assert df("df-fetch", "verify", REPO, "--repair").status == 0


@pytest.mark.parametrize(
    "words, what",
    [
        (["--quick", "--full"], "choose one"),
        (["--quick", "--restart"], "no effect with --quick"),
        (["--offline"], "effect with --repair only"),
        (["--yes"], "effect with --repair only"),
    ],
)
def test_options_without_an_effect_are_refused(df, full_tiny, words, what):
    assert what in _one_line(df("df-fetch", "verify", REPO, *words), 2)


def test_quick_is_said_to_be_quick(df, full_tiny):
    assert df("df-fetch", "verify", REPO, "--quick").out == "140 of the right size (2.69 MB), 0 damaged\n"
    assert df("df-fetch", "verify", REPO, "--quick", "--json").json["mode"] == "quick"
    assert full_tiny.state.log == []


def test_ctrl_c_in_a_verification_leaves_it_to_be_gone_on_with(start, proven, tmp_path, df, monkeypatch):
    cache = tmp_path / "cache"
    names = sorted((cache / "objects").rglob("*/*"))
    for number in range(40):  # enough to be met in the middle
        (cache / "objects" / "ff").mkdir(exist_ok=True)
        with open(cache / "objects" / "ff" / f"ff{number:062x}", "wb") as f:
            f.truncate(100 << 20)
    process = start("df-fetch", "verify", REPO)
    end = time.monotonic() + 30
    while not (cache / "verify.state").exists() and time.monotonic() < end:
        time.sleep(0.01)
    time.sleep(0.7)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=30)
    assert (process.returncode, out) == (130, b"") and b"Traceback" not in err
    assert (cache / "verify.state").stat().st_size > 200 and not (cache / "verify.json").exists()
    for path in (cache / "objects" / "ff").glob("ff" + "0" * 40 + "*"):
        path.unlink()
    done = df("df-fetch", "verify", REPO, "-v")
    assert "files were found whole before the interruption" in done.err
    assert f"{len(names)} whole" in done.out
    assert not (cache / "verify.state").exists()


# ---- manifests -----------------------------------------------------------------------------------------------------


def test_a_manifest_goes_from_one_machine_to_another(df, proven, tmp_path, index_only):
    file, fresh = tmp_path / "tiny.manifest", tmp_path / "fresh"
    made = df("df-fetch", "manifest", "export", REPO, "-o", file)
    assert made.status == 0
    digest = made.out.split()[0]
    assert made.out == f"{digest}  {file}\n154 spans\n"
    shown = df("df-fetch", "manifest", "show", file)
    assert shown.out.splitlines()[1:] == [
        "  shards   12, 12 with a published SHA-256",
        "  spans    154, 2.87 MB; 154 proven",
    ]
    index_only(fresh, REPO)
    taken = df("df-fetch", "manifest", "import", REPO, file, "--sha256", digest, cache=fresh)
    assert (taken.status, taken.out, taken.err) == (0, "154 spans proven; 154 records are new\n", "")
    trusted = df("df-fetch", "manifest", "import", REPO, file, "--json", cache=fresh)
    assert trusted.json["new"] == 0 and "the file was trusted as it is" in trusted.err
    again = df("df-fetch", "manifest", "export", REPO, "-o", tmp_path / "two", "--json", cache=fresh)
    assert again.json == {"file": str(tmp_path / "two"), "sha256": digest, "spans": 154, "proven": 154}
    assert df("df-fetch", "manifest", "forget", REPO, cache=fresh).out == "154 spans are no longer proven\n"
    assert proven.state.log == []


def test_with_a_manifest_a_server_that_alters_bytes_gets_nowhere(df, proven, tmp_path, index_only):
    file, fresh = tmp_path / "tiny.manifest", tmp_path / "fresh"
    df("df-fetch", "manifest", "export", REPO, "-o", file)
    index_only(fresh, REPO)
    df("df-fetch", "manifest", "import", REPO, file, cache=fresh)
    proven.set_mode("corrupt_byte", at=5)
    done = df("df-fetch", "warm", REPO, "--layers", "2", "--experts", "3", cache=fresh)
    assert done.status == 1 and "contradict the proven digest on record" in done.err.splitlines()[-1]
    assert not list((fresh / "objects").rglob("*/*"))


def test_what_makes_no_manifest_is_one_line(df, full_tiny, tmp_path):
    file = tmp_path / "x"
    line = _one_line(df("df-fetch", "manifest", "export", REPO, "-o", file))
    assert "of the digests of 140 spans 140 are not proven" in line
    assert not file.exists()
    assert df("df-fetch", "manifest", "export", REPO, "-o", file, "--unproven").out.endswith("140 of them unproven\n")
    assert "expected 64 hexadecimal digits" in _one_line(
        df("df-fetch", "manifest", "import", REPO, file, "--sha256", "abc"), 2
    )
    assert "expected 000" in _one_line(df("df-fetch", "manifest", "import", REPO, file, "--sha256", "0" * 64))
    assert "no such file" in _one_line(df("df-fetch", "manifest", "show", tmp_path / "nowhere"))
    file.write_bytes(b"nonsense")
    assert "no manifest, or damaged" in _one_line(df("df-fetch", "manifest", "import", REPO, file))
    assert full_tiny.state.log == []


def test_a_manifest_written_to_a_pipe_or_a_device_leaves_it_what_it_is(df, proven, tmp_path):
    file, pipe = tmp_path / "tiny.manifest", tmp_path / "pipe"
    df("df-fetch", "manifest", "export", REPO, "-o", file)
    os.mkfifo(pipe)
    got = []
    reader = threading.Thread(target=lambda: got.append(pipe.read_bytes()))
    reader.start()
    assert df("df-fetch", "manifest", "export", REPO, "-o", pipe).status == 0
    reader.join(timeout=10)
    assert pipe.is_fifo() and got == [file.read_bytes()]
