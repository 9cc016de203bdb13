"""Building a catalog while something goes wrong: another builder, a kill at any step, a full disk, an interrupt."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from deltafin.errors import BadCheckpoint
from deltafin.indexer import Catalog, clear_stale, publish, temporary

DF_INDEX = Path(sys.executable).with_name("df-index")


def start(*words: object, cache: Path, **keywords) -> subprocess.Popen[str]:
    env = {**os.environ, "DELTAFIN_CACHE": str(cache)}
    return subprocess.Popen(
        [DF_INDEX, *map(str, words)], env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **keywords
    )


def parts(folder: Path) -> list[str]:
    return [p.name for p in folder.iterdir() if p.name.endswith(".part")]


# ---- several builders -----------------------------------------------------------------------------


def test_a_second_builder_of_the_same_catalog_is_told_that_the_first_is_busy(tiny_dir, hub, tmp_path, df_index):
    server = hub(tiny_dir, "slow_drip", bytes=512, every=0.05)
    first = start("build", "some/model", cache=tmp_path / "cache")
    try:
        while not any("safetensors" in row["path"] for row in server.state.log):
            time.sleep(0.01)
            assert first.poll() is None
        second = df_index("build", "some/model")
        assert second.status == 1
        assert "busy, another process is building this catalog" in second.line
        other = df_index("build", tiny_dir)  # under another name
        assert other.status == 0
    finally:
        first.kill()
        first.communicate()
    server.set_mode("ok")
    assert df_index("build", "some/model").status == 0  # the lock of a dead builder holds nobody up


def test_builders_at_once_end_with_one_whole_catalog(tiny_dir, tmp_path):
    builders = [start("build", tiny_dir, "--name", "one", cache=tmp_path) for _ in range(4)]
    ends = [(b.communicate(), b.returncode) for b in builders]
    assert 0 in [status for _, status in ends]
    for (_, err), status in ends:
        assert (status, err) == (0, "") or (status == 1 and err.count("\n") == 1 and "busy" in err)
    with Catalog(tmp_path / "catalogs" / "one.catalog") as catalog:
        assert catalog.totals.experts == 128
    assert parts(tmp_path / "catalogs") == []


# ---- kills ----------------------------------------------------------------------------------------


def test_a_kill_at_any_step_leaves_the_old_catalog_or_the_new_one_whole(tiny_copy, build):
    """A step is a call of anything built in, so of all that touches a file: each of the last 40, and 20 before."""
    old = build(tiny_copy.folder, "it")
    folder, digests = old.path.parent, [old.layout_sha256]
    tiny_copy.edit(9, lambda tensors: sorted(tensors, key=lambda t: ".experts." in t.name))
    digests.append(build(tiny_copy.folder, "other").layout_sha256)
    script = """
import json, os, signal, sys
from pathlib import Path
from deltafin.indexer import Catalog, build_catalog, parse_model

model, path, digests = sys.argv[1], Path(sys.argv[2]), sys.argv[3:]
kept = path.read_bytes()
writers = "indexer/build.py", "indexer/catalog.py", "indexer/publish.py", "shutil.py"

def in_a_fork(work):
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.write(write, work().encode())
        os._exit(0)
    os.close(write)
    with open(read, "rb") as pipe:
        said = pipe.read().decode()
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), said

def build(deadly):
    steps = 0
    def count(frame, event, arg):
        nonlocal steps
        if event != "c_call" or not frame.f_code.co_filename.endswith(writers):
            return
        steps += 1
        if steps == deadly:
            os.kill(os.getpid(), signal.SIGKILL)
    source = parse_model(model, path.parent).source()
    sys.setprofile(count)
    build_catalog(source, path, "it")
    sys.setprofile(None)
    return str(steps)

def which():
    with Catalog(path) as catalog:
        assert len(catalog.expert_spans(8, range(16))) == 16
        return str(digests.index(catalog.layout_sha256))

total = int(in_a_fork(lambda: build(0))[1])
results = []
for step in [*range(1, total - 40, max(1, total // 20)), *range(total - 40, total + 1), 0]:
    path.write_bytes(kept)
    status, _ = in_a_fork(lambda: build(step))
    opened, found = in_a_fork(which)
    left = [n for n in os.listdir(path.parent) if n.endswith(".part")]
    results.append([status, opened, found, left])
print(json.dumps(results))
"""
    words = [sys.executable, "-c", script, tiny_copy.folder, old.path, *digests]
    done = subprocess.run(words, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    results = json.loads(done.stdout)
    assert len(results) > 55
    assert {status for status, *_ in results[:-1]} == {-signal.SIGKILL}
    assert {opened for _, opened, *_ in results} == {0}
    assert {found for _, _, found, _ in results} == {"0", "1"}
    assert (results[0][2], results[-1]) == ("0", [0, 0, "1", []])
    leftovers = [left for *_, left in results if left]
    assert len(leftovers) > 10
    assert {len(left) for left in leftovers} == {1}  # each builder clears what the one before it left
    assert len({left[0] for left in leftovers}) == len(leftovers)  # and never writes into it
    assert parts(folder) == []


def test_a_killed_command_leaves_a_whole_catalog_and_the_next_one_clears_up(tiny_copy, tmp_path):
    rng = random.Random(5)
    catalogs = tmp_path / "cache" / "catalogs"
    start("build", tiny_copy.folder, "--name", "it", cache=tmp_path / "cache").communicate()
    whole = (catalogs / "it.catalog").stat().st_size
    for _ in range(4):
        builder = start("build", tiny_copy.folder, "--name", "it", cache=tmp_path / "cache")
        time.sleep(rng.uniform(0.2, 0.45))
        builder.kill()
        builder.communicate()
        with Catalog(catalogs / "it.catalog") as catalog:
            assert catalog.totals.experts == 128
            assert catalog.path.stat().st_size == whole
    # What a writer that died long ago left, and one that lives.
    dead = subprocess.Popen(["true"])
    dead.wait()
    host = temporary(catalogs, "x").name.split(".")[2]
    (catalogs / f".it.{host}.{dead.pid}.0.part").write_bytes(b"half")
    (catalogs / f".it.{host}.{os.getpid()}.0.part").write_bytes(b"half")
    start("build", tiny_copy.folder, "--name", "it", cache=tmp_path / "cache").communicate()
    assert parts(catalogs) == [f".it.{host}.{os.getpid()}.0.part"]


def test_only_temporary_files_of_the_dead_are_cleared(tmp_path):
    mine = temporary(tmp_path, "x")
    host = mine.name.split(".")[2]
    dead = subprocess.Popen(["true"])
    dead.wait()
    kept = [
        mine.name, f".x.elsewhere.{dead.pid}.0.part", f".x.{host}.1.0.part", "x.part", "a.b.part",
        f".x.{host}.{dead.pid}.0.party", f".x.{host}.pid.0.part", "x.catalog",
    ]  # fmt: skip
    gone = [f".x.{host}.{dead.pid}.0.part", f".x.y.z.{host}.{dead.pid}.12.part", ".x.elsewhere.1.0.part"]
    for name in kept + gone:
        (tmp_path / name).write_bytes(b"x")
    os.utime(tmp_path / gone[-1], (time.time() - 2 * 24 * 3600,) * 2)
    assert clear_stale(tmp_path) == len(gone)
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted(kept)
    assert clear_stale(tmp_path / "no such folder") == 0


def test_temporary_names_are_never_the_same_twice_and_fit_a_file_system(tmp_path):
    names = {temporary(tmp_path, "n" * 128).name for _ in range(100)}
    assert len(names) == 100
    assert max(map(len, names)) < 255


def test_a_small_file_is_replaced_as_a_whole(tmp_path):
    path = tmp_path / "file"

    def write(data: bytes) -> None:
        part = temporary(tmp_path, "file")
        part.write_bytes(data)
        publish(part, path)

    write(b"old")
    with open(path, "rb") as reader:
        write(b"new and longer")
        assert (reader.read(), path.read_bytes()) == (b"old", b"new and longer")
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


def test_a_catalog_is_synced_before_it_is_renamed_and_its_directory_after(tiny_dir, tmp_path):
    """Otherwise a power cut could leave the name of a catalog with nothing behind it."""
    strace = subprocess.run(["which", "strace"], capture_output=True, text=True).stdout.strip()
    if not strace:
        pytest.skip("strace is not installed")
    trace = tmp_path / "trace"
    words = [strace, "-f", "-e", "trace=fsync,fdatasync,rename,renameat,renameat2", "-y", "-o", trace]
    done = subprocess.run(
        [*words, DF_INDEX, "build", tiny_dir, "--name", "it", "--cache-dir", tmp_path / "cache"],
        capture_output=True, text=True,
    )  # fmt: skip
    if "ptrace" in done.stderr or done.returncode != 0:
        pytest.skip(f"cannot trace here: {done.stderr[-200:]}")
    calls = [line.split(" ", 1)[1].strip() for line in trace.read_text().splitlines() if "(" in line]
    calls = [call for call in calls if "catalogs" in call]
    renamed = next(i for i, call in enumerate(calls) if call.startswith("rename"))
    assert "it.catalog" in calls[renamed]
    assert any(call.startswith("fsync") and ".part>" in call for call in calls[:renamed])
    assert any(call.startswith("fsync") and call.endswith("catalogs>) = 0") for call in calls[renamed:])


# ---- disks ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("limit", [0, 1, 20_000, 45_100])
def test_a_full_disk_is_one_line_and_leaves_no_catalog(tiny_dir, tmp_path, fault_tool, limit):
    command = [
        sys.executable, fault_tool("run_limited").__file__, "--fsize", str(limit), "--",
        DF_INDEX, "build", tiny_dir, "--cache-dir", tmp_path, "--name", "it",
    ]  # fmt: skip
    row = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    assert (row["rc"], row["traceback"]) == (1, False)
    assert row["stderr_end"].startswith(f"df-index: {tmp_path}/catalogs/it.catalog: ")
    assert row["stderr_end"].count("\n") == 1
    assert "disk full" in row["stderr_end"] or "free some space" in row["stderr_end"]
    assert [p.name for p in (tmp_path / "catalogs").iterdir()] == ["it.lock"]


@pytest.mark.parametrize("kbytes", [16, 44])  # the second holds the LMDB part, but not the page behind it
def test_a_file_system_without_room_is_one_line_and_leaves_no_catalog(tiny_dir, tmp_path, kbytes):
    folder = tmp_path / "small"
    folder.mkdir()
    script = """
mount -t tmpfs -o size=$1k none "$2" || exit 77
"$3" build "$4" --name it --cache-dir "$2"
status=$?
ls -A "$2/catalogs"
exit $status
"""
    words = ["unshare", "-m", "sh", "-c", script, "sh", str(kbytes), folder, DF_INDEX, tiny_dir]
    try:
        done = subprocess.run(words, capture_output=True, text=True)
    except OSError:
        pytest.skip("unshare is not installed")
    if done.returncode == 77 or "unshare failed" in done.stderr:
        pytest.skip("file systems cannot be mounted here")
    assert (done.returncode, done.stdout) == (1, "it.lock\n")
    assert done.stderr.startswith(f"df-index: {folder}/catalogs/it.catalog: ")
    assert done.stderr.count("\n") == 1
    assert "disk full" in done.stderr or "free some space" in done.stderr


def test_few_open_files_are_enough(tiny_dir, tmp_path, fault_tool):
    command = [
        sys.executable, fault_tool("run_limited").__file__, "--nofile", "64", "--",
        DF_INDEX, "build", tiny_dir, "--cache-dir", tmp_path,
    ]  # fmt: skip
    assert json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)["rc"] == 0


def test_a_full_disk_leaves_the_older_catalog_in_use(tiny_dir, tmp_path, fault_tool, df_index):
    df_index("build", tiny_dir, "--name", "it")
    path = tmp_path / "cache" / "catalogs" / "it.catalog"
    before = path.read_bytes()
    command = [
        sys.executable, fault_tool("run_limited").__file__, "--fsize", str(len(before) // 2), "--",
        DF_INDEX, "build", tiny_dir, "--cache-dir", tmp_path / "cache", "--name", "it",
    ]  # fmt: skip
    assert json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)["rc"] == 1
    assert path.read_bytes() == before
    assert df_index("show", "it").status == 0


def test_a_catalog_that_just_fits_is_whole(tiny_dir, tmp_path, fault_tool, df_index):
    df_index("build", tiny_dir, "--name", "measure")
    size = (tmp_path / "cache" / "catalogs" / "measure.catalog").stat().st_size
    command = [
        sys.executable, fault_tool("run_limited").__file__, "--fsize", str(size), "--",
        DF_INDEX, "build", tiny_dir, "--cache-dir", tmp_path / "cache", "--name", "it",
    ]  # fmt: skip
    assert json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)["rc"] == 0
    with Catalog(tmp_path / "cache" / "catalogs" / "it.catalog") as catalog:
        assert catalog.totals.experts == 128


def test_a_place_where_nothing_can_be_written_is_one_line(df_index, tmp_path):
    blocked = tmp_path / "file"
    blocked.write_bytes(b"")
    result = df_index("build", "demo", "--cache-dir", blocked / "cache")
    assert result.status == 1
    assert str(blocked / "cache" / "catalogs") in result.line
    (tmp_path / "cache" / "catalogs").mkdir(parents=True)
    (tmp_path / "cache" / "catalogs" / "demo.catalog").mkdir()
    result = df_index("build", "demo")
    assert result.status == 1
    assert "demo.catalog: " in result.line
    assert parts(tmp_path / "cache" / "catalogs") == []


# ---- interrupts -----------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", [("429_retry_after", {"seconds": 100}), ("stall", {"hold": 100}), ("slow_drip", {})])
def test_ctrl_c_ends_a_build_soon_even_while_the_server_keeps_it_waiting(tiny_dir, hub, tmp_path, mode):
    server = hub(tiny_dir, mode[0], **{"path": "*.safetensors", "times": 1000, "bytes": 64, "every": 1, **mode[1]})
    builder = start("build", "some/model", cache=tmp_path / "cache")
    while not any("safetensors" in row["path"] for row in server.state.log):
        time.sleep(0.02)
        assert builder.poll() is None
    time.sleep(0.3)
    begin = time.monotonic()
    builder.send_signal(signal.SIGINT)
    _, err = builder.communicate(timeout=60)
    assert time.monotonic() - begin < 15
    assert builder.returncode == 130
    assert err.endswith("df-index: interrupted; what was finished is kept\n")
    assert "Traceback" not in err
    assert not list((tmp_path / "cache").rglob("*.catalog"))


def test_a_bad_shard_ends_a_build_soon_even_while_others_are_kept_waiting(tiny_copy, hub, build):
    tiny_copy.path(1).write_bytes(b"<!DOCTYPE html>" * 99)
    hub(tiny_copy.folder, "stall", path="*00003*", hold=100, times=1000)
    begin = time.monotonic()
    with pytest.raises(BadCheckpoint, match=r"model-00001-of-000012\.safetensors: .*web page"):
        build("some/model")
    assert time.monotonic() - begin < 15
