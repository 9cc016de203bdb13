"""Disks that are odd, full or wrong: file systems side by side, a quota, and files that only look whole."""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
import subprocess

import pytest

from deltafin.errors import Corrupt, NoSpace
from deltafin.store import all_items, drive, expert_items, verify
from deltafin.store.objectlog import span_key
from deltafin.store.roots import Root

CONTENT = bytes(range(256)) * 1200
KEY = span_key(bytes(32), 0, len(CONTENT))


@pytest.fixture
def file_system(request, tmp_path):
    """A folder on a file system of the asked kind, 16 MB large; skips where nobody may mount."""
    where = tmp_path / "disk"
    where.mkdir()
    image, lower = tmp_path / "image", tmp_path / "lower"
    lower.mkdir()
    for name in ("upper", "work"):
        (tmp_path / name).mkdir()
    words = {
        "ext4": ["-o", "loop", image],
        "tmpfs": ["-t", "tmpfs", "-o", "size=16m", "tmpfs"],
        "overlay": ["-t", "overlay", "-o", f"lowerdir={lower},upperdir={tmp_path}/upper,workdir={tmp_path}/work", "o"],
    }[request.param]
    try:
        if request.param == "ext4":
            image.write_bytes(b"")
            os.truncate(image, 16 << 20)
            subprocess.run(["mkfs.ext4", "-q", "-F", image], check=True, capture_output=True)
        subprocess.run(["mount", *words, where], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip(f"no {request.param} can be mounted here")
    yield where
    subprocess.run(["umount", "-l", where], check=True)


@pytest.mark.parametrize("file_system", ["ext4", "tmpfs", "overlay"], indirect=True)
@pytest.mark.parametrize("kind", ["shards", "objects"])
def test_direct_reads_of_every_span_are_the_shards_bytes_on_every_file_system(
    file_system, kind, opened, full_cache, odd_dir, tiny_dir, span_bytes, new_slot, monkeypatch, caplog
):
    """IO-01: spans of every phase, and the first and last of each file; read past the page cache where that works."""
    monkeypatch.setattr(drive, "DIRECT_FROM_NBYTES", 1)
    directory = odd_dir if kind == "shards" else tiny_dir
    if kind == "shards":
        model = shutil.copytree(odd_dir, file_system / "odd")
        store = opened(model)
    else:
        shutil.copytree(full_cache, file_system / "cache")
        store = opened(cache_dir=file_system / "cache", offline=True)
    items = all_items(store.catalog)
    for item in items:
        content = store.read(item.span, new_slot(item.span.nbytes), expert=item.address)
        assert content.tobytes() == span_bytes(store, directory, item.span), item.label
    reader = (store.shard_directories if kind == "shards" else store.roots)[0].drive
    assert reader.stats.reads == len(items)
    assert len([r for r in caplog.records if "direct reads are refused" in r.getMessage()]) == (not reader.direct)


@pytest.mark.parametrize("file_system", ["ext4", "tmpfs"], indirect=True)
def test_a_file_system_that_fills_up_keeps_what_is_whole_and_goes_on_when_there_is_room(file_system, objects):
    """CA-02, on a file system that allocates late, too."""
    root = Root(file_system / "cache", writable=True)
    filler = file_system / "filler"
    filler.write_bytes(bytes(8 << 20))
    with pytest.raises(NoSpace, match="No space left"):
        for number in range(100):
            content = memoryview(bytes([number]) * (300_000 + number))
            root.publish(span_key(bytes(32), number, len(content)), content)
    assert list((file_system / "cache" / "tmp").iterdir()) == []
    kept = objects(file_system / "cache")
    assert kept
    assert all(hashlib.sha256(path.read_bytes()).hexdigest() == name for name, path in kept.items())
    assert len(Root(file_system / "cache").log.entries) == len(kept)
    filler.unlink()
    entry = root.publish(KEY, memoryview(CONTENT))
    assert objects(file_system / "cache")[entry.sha256.hex()].read_bytes() == CONTENT


@pytest.mark.parametrize("code", [errno.EDQUOT, errno.ENOSPC, errno.EFBIG])
@pytest.mark.parametrize("step", ["open", "fsync", "replace"])
def test_a_quota_is_no_space_wherever_it_is_noticed_and_nothing_is_left(tmp_path, monkeypatch, objects, code, step):
    def fail(*_args, **_keywords):
        raise OSError(code, os.strerror(code))

    root = Root(tmp_path, writable=True)
    root.publish(span_key(bytes(32), 1, 3), memoryview(b"abc"))
    with monkeypatch.context() as patch:
        if step == "open":
            patch.setattr("deltafin.store.roots.open", fail, raising=False)
        else:
            patch.setattr(os, step, fail)
        with pytest.raises(NoSpace, match=f"{tmp_path}.*free some space"):
            root.publish(KEY, memoryview(CONTENT))
    assert len(objects(tmp_path)) == 1 and list((tmp_path / "tmp").iterdir()) == []
    assert Root(tmp_path).find(KEY) is None


# ---- files that only look whole ---------------------------------------------------------------------------


def _preallocate(path, keep: float) -> None:
    """As a machine that lost power leaves a file: its full length, and zeros from somewhere on."""
    nbytes = path.stat().st_size
    os.truncate(path, int(nbytes * keep))
    with open(path, "r+b") as f:
        os.posix_fallocate(f.fileno(), 0, nbytes)
    assert path.stat().st_size == nbytes


@pytest.mark.parametrize("keep", [0.0, 0.5, 0.999])
def test_an_object_of_full_length_that_ends_in_zeros_is_found_before_its_first_use(
    full, objects, tiny_truth, tmp_path, keep
):
    """CA-03: length proves nothing."""
    store, server = full
    (item,) = expert_items(store.catalog, [2], [5])
    entry = store.roots[0].find(store.key(item.span))
    _preallocate(objects(tmp_path / "cache")[entry.sha256.hex()], keep)
    server.set_mode("ok")
    assert [bytes(content) for _, content in store.experts(2, [5])] == [tiny_truth.expert(2, 5)]
    assert store.stats.snapshot()["corrupt_objects"] == 1
    assert server.stats()["requests"] == 1


def test_verify_finds_objects_that_end_in_zeros(full, objects, tmp_path):
    store, _ = full
    bad = sorted(objects(tmp_path / "cache").values())[::20]
    for path in bad:
        _preallocate(path, 0.5)
    report = verify(store)
    assert len(report.damaged) == len(bad)
    assert all(any(path.name in line for line in report.damaged) for path in bad)


def test_twenty_newest_objects_of_zeros_are_noticed_one_by_one_and_offline_each_is_an_error(full, opened, tmp_path):
    store, _ = full
    cache = store.roots[0].path
    store.close()
    store = opened(offline=True)
    newest = list(store.roots[0].log.entries.values())[-20:]
    for entry in newest:
        _preallocate(store.roots[0].object_path(entry), 0.0)
    wrong = 0
    for item in expert_items(store.catalog, range(1, 9), range(16)):
        entry = store.roots[0].find(store.key(item.span))
        if entry in newest:
            with pytest.raises(Corrupt, match="fetch it again with df-fetch"):
                list(store.experts(item.layer, [item.expert]))
            wrong += 1
    assert wrong
    assert len(list((cache / "quarantine").iterdir())) == wrong
