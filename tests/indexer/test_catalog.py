"""A finished catalog: whole or refused, shared in a process, readable from read-only places and after any crash."""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from deltafin.errors import BadCatalog
from deltafin.indexer import GLOBALS, Catalog

PAGE = 4096

# Reads everything that a catalog says. Run in processes of their own, where a crash is seen and nothing is cached.
READER = """
import hashlib, json, os, sys
from pathlib import Path
from deltafin.errors import BadCatalog, NotFound
from deltafin.indexer import GLOBALS, Catalog

def digest(path):
    with Catalog(Path(path)) as c:
        everything = [
            c.totals, c.shards, c.layout_sha256, c.embedding(), c.head(), c.spine(GLOBALS), c.file("config.json"),
            [c.spine(layer) for layer in range(c.config.num_layers)],
            [c.expert_spans(layer, range(c.config.num_experts)) for layer in c.config.moe_layers],
        ]
    return hashlib.sha256(repr(everything).encode()).hexdigest()
"""


def read_all(path: Path) -> str:
    space: dict[str, Callable[[Path], str]] = {}
    exec(READER, space)
    return space["digest"](path)


def run(script: str, *args: object, **keywords) -> str:
    words = [sys.executable, "-c", READER + script, *map(str, args)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120, **keywords)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture
def catalog(build, demo_dir) -> Catalog:
    return build(demo_dir, "demo")


@pytest.fixture(scope="module")
def finished(tmp_path_factory, tiny_dir) -> Path:
    """A catalog file that no test may change."""
    from deltafin.indexer import build_catalog, parse_model

    path = tmp_path_factory.mktemp("finished") / "tiny.catalog"
    build_catalog(parse_model(str(tiny_dir), path.parent).source(), path, "tiny")
    return path


# ---- damage ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def damaged(finished, fault_tool, tmp_path_factory) -> Iterator[tuple[Path, dict[str, tuple[int, str]]]]:
    """What opening each variant of damage_catalog.py does: exit status or minus signal, and the message."""
    out = tmp_path_factory.mktemp("damaged")
    fault_tool("damage_catalog").main([str(finished), str(out)])
    names = [row["name"] for row in json.loads((out / "manifest.json").read_text())]
    script = """
results = {}
for name in sys.argv[2:]:
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            text, status = digest(f"{sys.argv[1]}/{name}/tiny.catalog"), 0
        except (BadCatalog, NotFound) as e:
            text, status = f"{type(e).__name__} {e}", 3
        except BaseException as e:
            text, status = repr(e), 4
        os.write(write, text.encode())
        os._exit(status)
    os.close(write)
    text = os.read(read, 65536).decode()
    os.close(read)
    results[name] = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), text
print(json.dumps(results))
"""
    yield out, {name: tuple(result) for name, result in json.loads(run(script, out, *names)).items()}
    (out / "read_only").chmod(0o700)


@pytest.mark.parametrize("name", ["control", "read_only", "stale_lock"])
def test_a_catalog_with_nothing_wrong_in_it_is_read_in_full(damaged, finished, name):
    assert damaged[1][name] == (0, read_all(finished))


@pytest.mark.parametrize(
    ("name", "complaint"),
    [
        ("empty_file", "no catalog, or it was cut short"),
        ("half", "no catalog, or it was cut short"),
        ("cut_mid_page", "no catalog, or it was cut short"),
        ("noise_start", "is damaged"),
        ("bad_magic", "is damaged"),
        ("other_format", "another version"),
        ("one_meta", "is damaged"),
        ("noise_pages", "is damaged"),
    ],
)
def test_a_damaged_catalog_is_refused_with_its_name_and_the_way_out_and_no_signal(damaged, name, complaint):
    out, results = damaged
    status, text = results[name]
    assert status == 3, (status, text)
    kind = "OldCatalog" if name == "other_format" else "BadCatalog"
    assert text.startswith(f"{kind} {out / name / 'tiny.catalog'}: ")
    assert complaint in text
    assert "rebuild it with df-index build" in text


def test_a_catalog_that_is_gone_is_not_found(damaged):
    out, results = damaged
    status, text = results["missing_data"]
    assert (status, text) == (
        3,
        f"NotFound {out}/missing_data/tiny.catalog: no catalog (No such file or directory); "
        "build one with df-index build",
    )


def test_every_variant_of_the_damage_tool_is_judged_here(damaged):
    assert set(damaged[1]) == {
        "control", "read_only", "stale_lock", "empty_file", "half", "cut_mid_page", "noise_start", "bad_magic",
        "other_format", "one_meta", "noise_pages", "missing_data",
    }  # fmt: skip


def test_a_flipped_bit_anywhere_is_refused(finished, tmp_path):
    blob = finished.read_bytes()
    trailer = len(blob) - PAGE
    rng = random.Random(7)
    places = [
        *range(0, 160),  # the first meta page
        *range(PAGE, PAGE + 160),  # its twin
        *rng.sample(range(trailer), 300),
        *range(trailer, trailer + blob[trailer:].index(b"\n")),  # the JSON of the trailer
        *rng.sample(range(trailer, len(blob)), 30),
    ]
    path = tmp_path / "flipped.catalog"
    path.write_bytes(blob)
    opened = []
    with open(path, "r+b", buffering=0) as f:
        for at in places:
            for bit in range(8) if at >= trailer else [rng.randrange(8)]:
                os.pwrite(f.fileno(), bytes([blob[at] ^ 1 << bit]), at)
                try:
                    Catalog(path).close()
                    opened.append((at, bit))
                except BadCatalog as e:
                    assert str(path) in str(e)
            os.pwrite(f.fileno(), blob[at : at + 1], at)
    assert opened == []
    assert read_all(path) == read_all(finished)


@pytest.mark.parametrize("keep", [0, 1, 16, 23, 24, 4095, 4096, 8192, -PAGE, -PAGE - 1, -1])
def test_a_catalog_cut_at_any_place_is_refused(finished, tmp_path, keep):
    path = tmp_path / "cut.catalog"
    path.write_bytes(finished.read_bytes()[:keep])
    with pytest.raises(BadCatalog, match="rebuild it with df-index build"):
        Catalog(path)


@pytest.mark.parametrize("extra", [b"\n", b" ", b"x", bytes(PAGE)])
def test_a_catalog_with_something_behind_it_is_refused(finished, tmp_path, extra):
    path = tmp_path / "long.catalog"
    path.write_bytes(finished.read_bytes() + extra)
    with pytest.raises(BadCatalog):
        Catalog(path)


def test_a_catalog_with_something_in_the_middle_is_refused(finished, tmp_path):
    path = tmp_path / "long.catalog"
    blob = finished.read_bytes()
    path.write_bytes(blob[:-PAGE] + bytes(PAGE) + blob[-PAGE:])
    with pytest.raises(BadCatalog, match=f"has {len(blob) + PAGE} bytes, expected {len(blob)}; rebuild it"):
        Catalog(path)


def with_trailer(finished: Path, path: Path, **changes: object) -> Path:
    """A copy whose trailer says something else; None takes a field away."""
    blob = finished.read_bytes()
    trailer = {**json.loads(blob[-PAGE:]), **changes}
    trailer = {key: value for key, value in trailer.items() if value is not None}
    path.write_bytes(blob[:-PAGE] + json.dumps(trailer).encode().ljust(PAGE, b"\n"))
    return path


@pytest.mark.parametrize("changes", [{"version": 1}, {"version": "2"}, {"format": "another-catalog"}], ids=str)
def test_a_catalog_of_another_version_says_so_and_what_to_do(finished, tmp_path, changes):
    with pytest.raises(BadCatalog, match=r"another version of Deltafin .*; rebuild it with df-index build"):
        Catalog(with_trailer(finished, tmp_path / "x.catalog", **changes))


@pytest.mark.parametrize("field", ["format", "version", "lmdb_nbytes", "sha256", "records"])
def test_a_trailer_without_one_of_its_fields_is_refused(finished, tmp_path, field):
    with pytest.raises(BadCatalog):
        Catalog(with_trailer(finished, tmp_path / "x.catalog", **{field: None}))


@pytest.mark.parametrize("field", ["lmdb_nbytes", "sha256", "records"])
@pytest.mark.parametrize("value", [0, -1, 10**30, float("inf"), float("nan"), "", "x", [], {}, True, 7])
def test_a_trailer_with_another_value_is_refused(finished, tmp_path, field, value):
    with pytest.raises(BadCatalog):
        Catalog(with_trailer(finished, tmp_path / "x.catalog", **{field: value}))


@pytest.mark.parametrize("blob", [b"[]", b"null", b'"x"', b"[" * 4000, b"\xff" * 99, b"{}"], ids=lambda b: repr(b[:4]))
def test_a_last_page_that_is_no_trailer_is_refused(finished, tmp_path, blob):
    path = tmp_path / "x.catalog"
    path.write_bytes(finished.read_bytes()[:-PAGE] + blob.ljust(PAGE, b"\n"))
    with pytest.raises(BadCatalog, match="no catalog, or it was cut short"):
        Catalog(path)


def test_some_other_file_or_a_directory_is_no_catalog(tmp_path, tiny_dir):
    with pytest.raises(BadCatalog, match="no catalog, or it was cut short"):
        Catalog(tiny_dir / "config.json")
    with pytest.raises(BadCatalog, match="not a file"):
        Catalog(tmp_path)


def test_an_lmdb_file_of_somebody_else_is_no_catalog(tmp_path):
    import lmdb

    path = tmp_path / "x.catalog"
    with lmdb.open(str(path), subdir=False, lock=False) as env, env.begin(write=True) as txn:
        txn.put(b"a/about", b"{}")
    with pytest.raises(BadCatalog, match="no catalog, or it was cut short"):
        Catalog(path)


# ---- sharing --------------------------------------------------------------------------------------


def test_closing_one_of_several_users_leaves_the_others_working(catalog, tmp_path, monkeypatch):
    link = tmp_path / "link.catalog"
    link.symlink_to(catalog.path)
    monkeypatch.chdir(catalog.path.parent)
    others = [Catalog(p) for p in (catalog.path, link, Path(catalog.path.name), Path("..", *catalog.path.parts[-2:]))]
    wanted = catalog.expert_spans(1, range(32))
    while others:
        others.pop(len(others) // 2).close()
        assert catalog.expert_spans(1, range(32)) == wanted
        assert all(other.expert_spans(1, range(32)) == wanted for other in others)


def open_files(path: Path) -> int:
    """How many of this process's file descriptors are of the file."""
    found = 0
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            found += os.readlink(f"/proc/self/fd/{fd}") == str(path)
    return found


def test_closing_twice_takes_nothing_from_another_user(catalog):
    with Catalog(catalog.path) as other:
        other.close()
        other.close()
    assert len(catalog.expert_spans(1, range(32))) == 32


def test_a_failed_opening_takes_nothing_from_another_user_and_keeps_nothing(catalog, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr("deltafin.indexer.catalog.parse_config", lambda *args: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            Catalog(catalog.path)
    assert len(catalog.expert_spans(1, range(32))) == 32
    assert open_files(catalog.path) > 0
    catalog.close()
    assert open_files(catalog.path) == 0


def test_many_threads_open_read_and_close_one_catalog(catalog):
    path, wanted, errors = catalog.path, catalog.expert_spans(3, range(32)), []
    catalog.close()
    barrier = threading.Barrier(12)

    def work():
        try:
            barrier.wait()
            for _ in range(15):
                with Catalog(path) as mine:
                    assert mine.expert_spans(3, range(32)) == wanted
                    assert len(mine.spine(GLOBALS).tensors) == 3
        except BaseException as e:
            errors.append(e)

    threads = [threading.Thread(target=work) for _ in range(12)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert errors == []


def test_one_open_catalog_serves_many_threads(catalog):
    wanted = {layer: catalog.expert_spans(layer, range(32)) for layer in catalog.config.moe_layers}
    errors = []

    def work(layer):
        try:
            for _ in range(50):
                assert catalog.expert_spans(layer, range(32)) == wanted[layer]
                assert catalog.spine(layer).spans
        except BaseException as e:
            errors.append(e)

    threads = [threading.Thread(target=work, args=[layer]) for layer in wanted]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert errors == []


def test_a_rebuilt_catalog_leaves_readers_of_the_old_one_alone(tiny_copy, build, tiny_dir):
    old = build(tiny_copy.folder)
    spans = old.expert_spans(8, range(16))
    tiny_copy.edit(9, lambda tensors: sorted(tensors, key=lambda t: ".experts." in t.name))
    new = build(tiny_copy.folder)
    assert new.path == old.path
    assert old.expert_spans(8, range(16)) == spans
    assert new.expert_spans(8, range(16)) != spans
    with Catalog(new.path) as third:
        assert third.layout_sha256 == new.layout_sha256 != old.layout_sha256


def test_two_hundred_killed_readers_leave_no_trouble_and_no_file(finished):
    script = """
import signal, time
want, pids = digest(sys.argv[1]), []
for _ in range(200):
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        reader = Catalog(Path(sys.argv[1]))
        txn = reader._handle.env.begin()  # a read that never ends
        os.write(write, b"x")
        time.sleep(600)
    os.read(read, 1)
    os.close(read), os.close(write)
    pids.append(pid)
    if len(pids) > 150:  # so that 150 readers are there at once
        os.kill(pids.pop(0), signal.SIGKILL)
assert digest(sys.argv[1]) == want
for pid in pids:
    os.kill(pid, signal.SIGKILL)
for _ in range(200):
    os.wait()
assert digest(sys.argv[1]) == want
print(sorted(os.listdir(Path(sys.argv[1]).parent)))
"""
    assert run(script, finished) == "['tiny.catalog', 'tiny.lock']\n"


@pytest.mark.skipif(os.name != "posix", reason="needs another user")
def test_a_user_who_may_only_read_reads_a_catalog_in_a_read_only_directory(finished):
    folder = Path(tempfile.mkdtemp())  # pytest's own folders are closed to other users
    try:
        path = Path(shutil.copy(finished, folder / "tiny.catalog"))
        path.chmod(0o444)
        folder.chmod(0o555)
        script = """
if os.getuid() == 0:
    os.setgroups([]), os.setgid(65534), os.setuid(65534)
try:
    open(sys.argv[1] + ".new", "w")
except PermissionError:
    print(digest(sys.argv[1]))
"""
        assert run(script, path).strip() == read_all(finished)
        assert [p.name for p in folder.iterdir()] == [path.name]
    finally:
        folder.chmod(0o755)
        shutil.rmtree(folder)


def test_a_copy_of_a_catalog_works_and_takes_no_more_disk_than_its_length(finished, tmp_path):
    copy = Path(shutil.copy(finished, tmp_path / "copy.catalog"))
    assert read_all(copy) == read_all(finished)
    assert finished.stat().st_size < 200_000
    assert finished.stat().st_blocks * 512 <= finished.stat().st_size + PAGE
