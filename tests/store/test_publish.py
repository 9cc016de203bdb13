"""An object appears whole or not at all, whatever ends its writer, and however many write at once."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from deltafin.errors import NoSpace
from deltafin.indexer import temporary
from deltafin.store.arena import Arena, slot_nbytes
from deltafin.store.objectlog import span_key
from deltafin.store.roots import Root

CONTENT = bytes(range(256)) * 1200  # 307,200 bytes: more than one page, less than one write
KEY = span_key(bytes(32), 4096, len(CONTENT))


def _read(root: Root, key: bytes = KEY) -> bytes | None:
    entry = root.find(key)
    if entry is None:
        return None
    nbytes = slot_nbytes(entry.nbytes)
    return root.read(entry, Arena(nbytes).take(nbytes)).tobytes()


def test_what_is_published_is_a_file_named_by_its_digest_and_found_by_every_later_process(tmp_path):
    Root(tmp_path, writable=True).publish(KEY, memoryview(CONTENT))
    digest = hashlib.sha256(CONTENT).hexdigest()
    assert (tmp_path / "objects" / digest[:2] / digest).read_bytes() == CONTENT
    assert _read(Root(tmp_path)) == CONTENT
    assert list((tmp_path / "tmp").iterdir()) == []


def test_two_spans_of_equal_content_share_one_object(tmp_path, objects):
    root, other = Root(tmp_path, writable=True), span_key(bytes(32), 0, len(CONTENT))
    root.publish(KEY, memoryview(CONTENT))
    root.publish(other, memoryview(CONTENT))
    assert len(objects(tmp_path)) == 1
    assert _read(Root(tmp_path)) == _read(Root(tmp_path), other) == CONTENT


def test_an_object_that_lies_there_damaged_is_not_taken_for_the_one_to_be_kept(tmp_path, objects):
    """Its name is the digest and its length is right; only its content tells."""
    Root(tmp_path, writable=True).publish(KEY, memoryview(CONTENT))
    (path,) = objects(tmp_path).values()
    path.write_bytes(b"\0" * len(CONTENT))
    root, other = Root(tmp_path, writable=True), span_key(bytes(32), 0, len(CONTENT))
    root.publish(other, memoryview(CONTENT))
    assert _read(root, other) == CONTENT
    assert path.read_bytes() == CONTENT


# ---- kills ----------------------------------------------------------------------------------------------

# Forks one child for each step of a publish and kills it there, before the step or after it.
KILLER = """
import builtins, json, os, signal, sys
from pathlib import Path
from deltafin.store import roots
from deltafin.store.roots import Root

base, content, key = Path(sys.argv[1]), bytes(range(256)) * 1200, bytes.fromhex(sys.argv[2])
real = {name: getattr(os, name) for name in ("mkdir", "open", "fsync", "replace", "write", "close", "unlink")}

def publish(folder, victim):
    steps = []

    def step(name):
        steps.append(name)
        if len(steps) - 1 == victim:
            os.kill(os.getpid(), signal.SIGKILL)

    def wrap(name):
        def call(*args, **keywords):
            step(f"before {name}")
            result = real[name](*args, **keywords)
            step(f"after {name}")
            return result
        return call

    class HalfWriter:
        def __init__(self, *args, **keywords):
            self.file = builtins.open(*args, **keywords)
            step("after creating")
        def __enter__(self):
            return self
        def __exit__(self, *exc):
            self.file.close()
        def write(self, data):
            written = self.file.write(data[: max(1, len(data) // 2)])
            step("after writing a part")
            return written

    root = Root(folder, writable=True)
    for name in real:
        setattr(os, name, wrap(name))
    roots.open = HalfWriter
    try:
        root.publish(key, memoryview(content))
    finally:
        for name, function in real.items():
            setattr(os, name, function)
        del roots.open
    return steps

steps = publish(base / "whole", None)
for number in range(len(steps)):
    if (child := os.fork()) == 0:
        publish(base / f"{number:03}", number)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
print(json.dumps(steps))
"""


def test_a_kill_at_any_step_leaves_nothing_or_a_whole_object(tmp_path, python, objects):
    done = python(KILLER, tmp_path, KEY.hex())
    assert done.returncode == 0, done.stderr
    steps = json.loads(done.stdout)
    assert {"after writing a part", "before fsync", "before replace", "after replace", "before write"} <= set(steps)
    assert steps.index("before fsync") < steps.index("before replace") < steps.index("before write")
    digest, outcomes = hashlib.sha256(CONTENT).hexdigest(), set()
    for number, name in enumerate(steps):
        folder = tmp_path / f"{number:03}"
        found = {name: path.read_bytes() for name, path in objects(folder).items()}
        known = Root(folder).log.entries
        assert found in ({}, {digest: CONTENT}), name
        assert not known or found, f"{name}: a record before its object"
        outcomes.add((bool(found), bool(known)))

        again = Root(folder, writable=True)
        assert list(folder.glob("tmp/*")) == [], name
        again.publish(KEY, memoryview(CONTENT))
        assert _read(again) == CONTENT, name
    assert outcomes == {(False, False), (True, False), (True, True)}


TRACED = """
import sys
from pathlib import Path
from deltafin.store.roots import Root
root = Root(Path(sys.argv[1]), writable=True)
root.publish(bytes.fromhex(sys.argv[2]), memoryview(bytes(range(256)) * 1200))
"""


def test_data_reaches_the_disk_before_the_name_and_the_name_before_the_record(tmp_path, python):
    """The order that a power cut would show, as the kernel sees it."""
    strace = shutil.which("strace")
    if strace is None:
        pytest.skip("strace is not installed; the order is not checked")
    cache, log = tmp_path / "cache", tmp_path / "trace"
    calls = "trace=write,fsync,fdatasync,rename,renameat,renameat2"
    done = python(TRACED, cache, KEY.hex(), prefix=(strace, "-f", "-y", "-s", "0", "-e", calls, "-o", str(log)))
    if done.returncode != 0 and "ptrace" in done.stderr.lower():
        pytest.skip("strace may not trace here; the order is not checked")
    assert done.returncode == 0, done.stderr
    digest = hashlib.sha256(CONTENT).hexdigest()
    steps = []
    for line in log.read_text().splitlines():
        if re.search(rf"write\(\d+<{re.escape(str(cache))}/tmp/", line):
            steps.append("write data")
        elif re.search(rf"f(data)?sync\(\d+<{re.escape(str(cache))}/tmp/", line):
            steps.append("sync data")
        elif "rename" in line and digest in line:
            steps.append("rename")
        elif re.search(rf"fsync\(\d+<{re.escape(str(cache))}/objects/{digest[:2]}>", line):
            steps.append("sync directory")
        elif re.search(rf"write\(\d+<{re.escape(str(cache))}/objects.log>", line):
            steps.append("write record")
    assert steps == ["write data", "sync data", "rename", "sync directory", "write record"]


# ---- temporary files ------------------------------------------------------------------------------------


def _left_by(pid: int, folder, host: str | None = None):
    name = temporary(folder, "ab12").name
    mine = name.split(".")
    mine[-3] = str(pid)
    if host is not None:
        mine[-4] = host
    path = folder / ".".join(mine)
    path.write_bytes(b"half an object")
    return path


def _dead_pid() -> int:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def test_what_a_dead_writer_left_is_cleared_and_what_a_live_one_writes_is_not(tmp_path):
    folder = tmp_path / "tmp"
    folder.mkdir()
    dead, alive = _left_by(_dead_pid(), folder), _left_by(os.getppid(), folder)
    mine = _left_by(os.getpid(), folder)
    other = folder / "notes.part"
    other.write_text("not ours")
    Root(tmp_path)
    assert dead.exists(), "a root that is only read is left as it is"
    Root(tmp_path, writable=True)
    assert [dead.exists(), alive.exists(), mine.exists(), other.exists()] == [False, True, True, True]


def test_a_writer_on_another_machine_has_a_day(tmp_path):
    folder = tmp_path / "tmp"
    folder.mkdir()
    fresh, old = (_left_by(_dead_pid(), folder, host) for host in ("elsewhere", "far-away"))
    os.utime(old, (time.time() - 90_000,) * 2)
    Root(tmp_path, writable=True)
    assert (fresh.exists(), old.exists()) == (True, False)


def test_a_leftover_of_full_length_is_never_taken_for_an_object(tmp_path):
    """DL-02: neither an exact nor a longer leftover counts; both are cleared."""
    folder = tmp_path / "tmp"
    folder.mkdir()
    for extra in (b"", b"x"):
        _left_by(_dead_pid(), folder).write_bytes(CONTENT + extra)
    root = Root(tmp_path, writable=True)
    assert root.find(KEY) is None
    assert list(root.object_files()) == []
    assert list(folder.iterdir()) == []


def test_every_writer_has_names_of_its_own(tmp_path, monkeypatch):
    with ThreadPoolExecutor(8) as pool:
        names = list(pool.map(lambda _: temporary(tmp_path, "ab12").name, range(2000)))
    assert len(set(names)) == len(names)
    assert all(f".{os.getpid()}." in name for name in names)
    monkeypatch.setattr(socket, "gethostname", lambda: "a.host.with.dots")
    assert re.fullmatch(r"a_host_with_dots-\d+", temporary(tmp_path, "ab12").name.split(".")[2])


def test_threads_that_publish_the_same_bytes_at_once_leave_one_whole_object(tmp_path, objects):
    root, start = Root(tmp_path, writable=True), threading.Barrier(8)

    def publish(number: int) -> None:
        start.wait()
        root.publish(span_key(bytes(32), number, len(CONTENT)), memoryview(CONTENT))

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(publish, range(8)))
    assert [path.read_bytes() for path in objects(tmp_path).values()] == [CONTENT]
    assert len(Root(tmp_path).log.entries) == 8
    assert list((tmp_path / "tmp").iterdir()) == []


# ---- a disk that is full --------------------------------------------------------------------------------


def test_a_full_disk_is_no_space_and_leaves_nothing_behind(small_disk, objects):
    cache = small_disk(1 << 20, "cache")
    root = Root(cache, writable=True)
    kept, error = [], None
    for number in range(9):
        content = bytes([number]) * (200 << 10)
        key = span_key(bytes(32), number, len(content))
        try:
            root.publish(key, memoryview(content))
            kept.append((key, content))
        except NoSpace as e:
            error = e
            break
    assert error is not None and "No space left" in str(error) and str(cache) in str(error)
    assert len(kept) >= 3
    assert list((cache / "tmp").iterdir()) == []
    assert sorted(objects(cache)) == sorted(hashlib.sha256(content).hexdigest() for _, content in kept)
    assert [_read(Root(cache), key) for key, _ in kept] == [content for _, content in kept]

    shutil.rmtree(cache / "objects" / hashlib.sha256(kept[0][1]).hexdigest()[:2])
    root.publish(key, memoryview(content))  # room again: the same root goes on
    assert _read(Root(cache), key) == content


LIMITED = """
import resource, sys
from pathlib import Path
from deltafin.errors import NoSpace
from deltafin.store.roots import Root
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
root = Root(Path(sys.argv[1]), writable=True)
try:
    root.publish(bytes.fromhex(sys.argv[2]), memoryview(bytes(range(256)) * 1200))
except NoSpace as e:
    print("NoSpace", e)
"""


def test_a_limit_of_file_size_is_no_space_too(tmp_path, python, objects):
    done = python(LIMITED, tmp_path / "cache", KEY.hex())
    assert done.stdout.startswith("NoSpace"), done.stderr
    assert objects(tmp_path / "cache") == {}
    assert list((tmp_path / "cache/tmp").iterdir()) == []
    assert Root(tmp_path / "cache").log.entries == {}
