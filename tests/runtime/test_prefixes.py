"""Beginnings kept on disk: the right one is found, its bytes are those of a cold run, and trouble never stops a run."""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from deltafin.errors import BadRequest, NoMemory
from deltafin.runtime import Segment
from deltafin.runtime.states import PrefixStore, identity, prefixes, save_state, state_nbytes
from deltafin.store import state_files
from deltafin.store.space import Space

TEXT = [(11 * n * n + 5 * n) % 199 + 1 for n in range(400)]
PLENTY = 1 << 30


@pytest.fixture(scope="module")
def own_model(open_model, tiny_dir, tmp_path_factory):
    with open_model(tiny_dir, cache_dir=tmp_path_factory.mktemp("prefixes") / "cache") as model:
        yield model


@pytest.fixture
def cache(own_model):
    """The cache of `model`."""
    return own_model.store.roots[0].path


@pytest.fixture
def model(own_model, cache):
    """tiny with no state in its cache yet."""
    yield own_model
    for name in ("states", "tmp"):
        if (cache / name).is_symlink():
            (cache / name).unlink()
        shutil.rmtree(cache / name, ignore_errors=True)


def _fed(model, ids, seq=None):
    seq = seq or model.sequence()
    model.forward([Segment(seq, ids)], logits="none")
    return seq


def _keep(store, model, *lengths):
    for length in lengths:
        assert store.keep(model, _fed(model, TEXT[:length]))


def _lengths(model) -> list[int]:
    return sorted(int(file.path.name.split("-")[0]) for file in state_files(model.store.roots[0].path))


def _files(model) -> dict[int, Path]:
    return {int(f.path.name.split("-")[0]): f.path for f in state_files(model.store.roots[0].path)}


def _nbytes(model, length) -> int:
    return state_nbytes(identity(model), model.config, length)


def _ages(model, *lengths) -> None:
    """The first is the oldest; all are older than what is written from now on."""
    for number, length in enumerate(lengths):
        os.utime(_files(model)[length], ns=(0, 10**18 + number))


def _lines(caplog) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]


# ---- which one is found ----------------------------------------------------------------------------------


def test_the_longest_proper_prefix_is_found_and_goes_on_like_a_cold_run(model):
    store = PrefixStore(PLENTY)
    _keep(store, model, 1, 63, 64, 65, 256, 300)
    expected = model.forward([Segment(model.sequence(), TEXT)])
    for length, found in ((400, 300), (301, 300), (300, 256), (256, 65), (65, 64), (64, 63), (63, 1), (2, 1)):
        seq = PrefixStore(PLENTY).longest(model, TEXT[:length])
        assert seq.ids == TEXT[:found]
        rest = model.forward([Segment(seq, TEXT[found:length])])
        assert rest.tobytes() == expected[found:length].tobytes()
    assert store.longest(model, TEXT[:1]) is None
    assert store.longest(model, []) is None


@pytest.mark.parametrize("shared", [1, 63, 64, 65])
def test_a_text_that_differs_from_some_token_on_finds_only_what_it_shares(model, shared):
    """NU-08: an edited turn, or another question after the same system prompt."""
    store = PrefixStore(PLENTY)
    _keep(store, model, 1, 63, 64, 65, 66, 120)
    edited = [*TEXT[:shared], TEXT[shared] % 199 + 1, *TEXT[shared + 1 : 130]]
    seq = store.longest(model, edited)
    assert seq.ids == TEXT[:shared]
    cold = model.forward([Segment(model.sequence(), edited)])
    assert model.forward([Segment(seq, edited[shared:])]).tobytes() == cold[shared:].tobytes()


def test_a_file_named_as_another_state_is_never_taken_for_it(model, caplog):
    """Its digests are right, but its tokens are not those of its name."""
    store = PrefixStore(PLENTY)
    _keep(store, model, 50)
    (path,) = _files(model).values()
    save_state(path, model, _fed(model, TEXT[:50][::-1]))
    _is_not_taken(store, model, path, caplog)


def test_a_state_with_pending_tokens_is_not_a_beginning(model, caplog):
    store = PrefixStore(PLENTY)
    _keep(store, model, 50)
    (path,) = _files(model).values()
    save_state(path, model, _fed(model, TEXT[:50]), TEXT[50:52])
    _is_not_taken(store, model, path, caplog)


def _is_not_taken(store, model, path, caplog) -> None:
    assert store.longest(model, TEXT) is None
    assert "other tokens" in _lines(caplog)[0] and store.stats.damaged == 1 and not path.exists()


def test_names_are_one_chain_over_the_ids_whatever_lengths_are_asked_for(model):
    which = identity(model)
    ids = np.arange(1_000_000, dtype=np.uint32) % 1000
    lengths = [1, 15, 16, 17, 999_999, 1_000_000]
    names = prefixes.prefix_names(which, ids, lengths)
    for length, name in zip(lengths, names, strict=True):
        digest = hashlib.sha256(b"deltafin prefix\n" + which.digest + ids[:length].tobytes()).hexdigest()
        assert name == f"{length}-{digest[:32]}.state"
    assert prefixes.prefix_names(which, ids, [1_000_000]) == names[-1:]


def test_what_is_kept_is_private_and_counted(model):
    store = PrefixStore(PLENTY)
    assert store.keep(model, _fed(model, TEXT[:9])) and store.has(model, TEXT[:9])
    assert not store.has(model, TEXT[:8]) and not store.keep(model, model.sequence())
    (path,) = _files(model).values()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert all(stat.S_IMODE(path.parents[n].stat().st_mode) == 0o700 for n in range(3))
    assert len(store.longest(model, TEXT)) == 9
    nbytes = _nbytes(model, 9)
    assert store.stats.snapshot() == {
        "kept": 1, "kept_nbytes": nbytes, "restored": 1, "restored_nbytes": nbytes, "restored_tokens": 9,
        "evicted": 0, "evicted_nbytes": 0, "damaged": 0,
    }  # fmt: skip


def test_models_with_other_bits_do_not_see_each_others_states(model, monkeypatch):
    store = PrefixStore(PLENTY)
    _keep(store, model, 30)
    monkeypatch.setattr("deltafin.runtime.states.identifying._spine", lambda _: "int8")
    assert store.longest(model, TEXT) is None
    _keep(store, model, 20)
    assert store.longest(model, TEXT).ids == TEXT[:20]
    monkeypatch.undo()
    assert store.longest(model, TEXT).ids == TEXT[:30]
    assert len({path.parent for path in _files(model).values()}) == 2


@pytest.mark.parametrize("ids", [[1, -1], [1, 1 << 40], [1, 200_000], ["a", 2]])
def test_ids_that_are_none_are_refused(model, ids):
    with pytest.raises(BadRequest, match="vocabulary"):
        PrefixStore(PLENTY).longest(model, ids)


def test_a_model_without_states_is_refused(tiny_torch):
    for call in (PrefixStore().longest, PrefixStore().writer):
        with pytest.raises(BadRequest, match="native kernels only"):
            call(tiny_torch, [1, 2])


# ---- written while a pass runs ---------------------------------------------------------------------------


def test_a_checkpoint_written_layer_by_layer_is_the_file_that_keeping_writes(model):
    store = PrefixStore(PLENTY)
    seq = _fed(model, TEXT[:300])
    writer = store.writer(model, TEXT[:300])
    for layer, state in enumerate(seq.state):
        assert _lengths(model) == []
        assert not writer.complete
        writer.layer(layer, state)
    assert writer.complete and writer.commit()
    path = _files(model)[300]
    found = path.read_bytes()
    path.unlink()
    assert store.keep(model, seq)
    assert path.read_bytes() == found
    assert store.writer(model, TEXT[:300]) is None, "it is there already"
    assert store.stats.kept == 2


def test_a_checkpoint_of_a_pass_that_failed_leaves_nothing(model, cache):
    store = PrefixStore(PLENTY)
    writer = store.writer(model, TEXT[:300])
    for layer, state in enumerate(_fed(model, TEXT[:300]).state[:5]):
        writer.layer(layer, state)
    assert len(os.listdir(cache / "tmp")) == 1
    writer.abort()
    writer.abort()
    assert os.listdir(cache / "tmp") == [] and _lengths(model) == []
    assert not writer.commit() and store.stats.kept == 0


# ---- room ------------------------------------------------------------------------------------------------


def test_the_least_recently_used_goes_first_and_using_counts(model):
    store = PrefixStore(sum(_nbytes(model, n) for n in (100, 101, 102)))
    _keep(store, model, 100, 101, 102)
    _ages(model, 100, 101, 102)
    assert store.longest(model, TEXT[:101]).ids == TEXT[:100]  # used: now the youngest
    _keep(store, model, 99)
    assert _lengths(model) == [99, 100, 102]
    _ages(model, 99, 100, 102)
    assert store.keep(model, _fed(model, TEXT[:99])), "keeping again is using"
    _keep(store, model, 98)
    assert _lengths(model) == [98, 99, 102]
    assert store.stats.evicted == 2 and store.stats.evicted_nbytes == _nbytes(model, 101) + _nbytes(model, 100)


def test_states_of_other_models_and_spines_count_and_go_too(model, monkeypatch):
    store = PrefixStore(_nbytes(model, 50) + 2000)
    _keep(store, model, 50)
    monkeypatch.setattr("deltafin.runtime.states.identifying._spine", lambda _: "int8")
    _keep(store, model, 49)
    assert _lengths(model) == [49]


def test_a_state_that_is_larger_than_the_budget_is_not_kept_and_that_is_said_once(model, caplog):
    store = PrefixStore(_nbytes(model, 50) - 1)
    _keep(store, model, 10)
    for _ in range(2):
        assert not store.keep(model, _fed(model, TEXT[:50]))
        assert store.writer(model, TEXT[:50]) is None
    (line,) = _lines(caplog)
    assert "is not kept" in line and "larger budget" in line
    assert _lengths(model) == [10], "nothing is evicted in vain"


def test_no_budget_is_off_and_a_negative_one_makes_no_sense(model, cache):
    store = PrefixStore(0)
    assert not store.keep(model, _fed(model, TEXT[:5]))
    assert store.longest(model, TEXT) is None and store.writer(model, TEXT) is None and not store.has(model, TEXT[:5])
    assert not (cache / "states").exists()
    with pytest.raises(BadRequest, match="expected 0"):
        PrefixStore(-1)


def test_by_default_states_take_a_tenth_of_what_would_be_free_without_them(model, monkeypatch):
    state, store = _nbytes(model, 100), PrefixStore()
    free = 30 * state
    monkeypatch.setattr(
        Space,
        "left_on_disk",
        property(lambda space: free - sum(file.nbytes for file in state_files(space.path))),
    )
    for _ in range(2):  # what they hold already does not make the next tenth smaller
        _keep(store, model, 100, 99, 98, 97, 96)
        assert len(_lengths(model)) == 3
    free = 9 * state
    assert not store.keep(model, _fed(model, TEXT[:100]))


def test_what_the_disk_keeps_in_reserve_is_left_alone(model, monkeypatch):
    store = PrefixStore(PLENTY)
    _keep(store, model, 100, 90)
    _ages(model, 100, 90)
    monkeypatch.setattr(Space, "left_on_disk", property(lambda _: 0))
    _keep(store, model, 80)
    assert _lengths(model) == [80, 90]


# ---- trouble ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("damage", ["flip", "cut", "empty", "header", "zeros"])
def test_a_damaged_state_is_removed_said_once_and_the_next_shorter_one_is_used(model, damage, caplog):
    store = PrefixStore(PLENTY)
    _keep(store, model, 100, 50)
    path = _files(model)[100]
    data = bytearray(path.read_bytes())
    if damage == "flip":
        data[len(data) // 2] ^= 4
    elif damage == "header":
        data[50] ^= 1
    else:
        data = {"cut": data[:-1], "empty": b"", "zeros": bytes(len(data))}[damage]
    path.write_bytes(data)
    for _ in range(2):
        assert store.longest(model, TEXT).ids == TEXT[:50]
    (line,) = _lines(caplog)
    assert str(path) in line and line.endswith("it is removed, and computed again")
    assert store.stats.damaged == 1 and _lengths(model) == [50]
    assert store.keep(model, _fed(model, TEXT[:100]))
    assert store.longest(model, TEXT).ids == TEXT[:100]


def test_a_damaged_state_that_cannot_be_removed_is_looked_at_once(model, monkeypatch, caplog):
    store = PrefixStore(PLENTY)
    _keep(store, model, 100)
    _files(model)[100].write_bytes(b"")

    def no(*_args, **_keywords):
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(Path, "unlink", no)
    assert store.longest(model, TEXT) is None and store.longest(model, TEXT) is None
    assert store.stats.damaged == len(_lines(caplog)) == 1


def test_a_state_that_vanishes_between_looking_and_opening_is_a_miss(model, monkeypatch, caplog):
    store = PrefixStore(PLENTY)
    _keep(store, model, 100, 50)
    states_in = prefixes.states_in

    def then_gone(folder):
        found = states_in(folder)
        _files(model)[100].unlink(missing_ok=True)
        return found

    monkeypatch.setattr(prefixes, "states_in", then_gone)
    assert store.longest(model, TEXT).ids == TEXT[:50]
    assert _lines(caplog) == [] and store.stats.damaged == 0


@pytest.mark.parametrize("place", ["states", "states/KEY", "states/KEY/CLASS", "tmp", "file"])
def test_no_link_out_of_the_cache_is_followed(model, cache, tmp_path, place, caplog):
    store = PrefixStore(PLENTY)
    _keep(store, model, 100)
    path = _files(model)[100]
    linked = {
        "states": path.parents[2], "states/KEY": path.parents[1], "states/KEY/CLASS": path.parent,
        "tmp": cache / "tmp", "file": path,
    }[place]  # fmt: skip
    linked.rename(tmp_path / "elsewhere")
    linked.symlink_to(tmp_path / "elsewhere")
    before = sorted((tmp_path / "elsewhere").rglob("*"))
    assert store.longest(model, TEXT) is None
    kept = store.keep(model, _fed(model, TEXT[:50])), store.keep(model, _fed(model, TEXT[:100]))
    assert kept == (place == "file",) * 2
    assert sorted((tmp_path / "elsewhere").rglob("*")) == before
    assert place == "file" or "a link" in _lines(caplog)[0]
    assert place != "file" or not path.is_symlink()


def test_a_link_put_in_the_place_of_a_state_while_it_is_looked_for_is_not_followed(
    model, tmp_path, monkeypatch, caplog
):
    store = PrefixStore(PLENTY)
    _keep(store, model, 100)
    path, states_in = _files(model)[100], prefixes.states_in

    def then_linked(folder):
        found = states_in(folder)
        path.rename(tmp_path / "elsewhere")
        path.symlink_to(tmp_path / "elsewhere")
        return found

    monkeypatch.setattr(prefixes, "states_in", then_linked)
    assert store.longest(model, TEXT) is None
    assert "cannot read the state" in _lines(caplog)[0]


def test_odd_files_beside_the_states_are_left_alone(model):
    store = PrefixStore(PLENTY)
    _keep(store, model, 100)
    folder = _files(model)[100].parent
    for name in (
        "notes.txt",
        "7-x.state",
        f"{'9' * 12}-{'0' * 32}.state",
        f"0-{'0' * 32}.state",
        f"-1-{'0' * 32}.state",
    ):
        (folder / name).write_bytes(b"x")
    (folder / f"50-{'0' * 32}.state").mkdir()
    assert store.longest(model, TEXT).ids == TEXT[:100]
    store.budget_nbytes = _nbytes(model, 99)
    _keep(store, model, 98)
    assert (folder / "notes.txt").exists() and (folder / "7-x.state").exists()


def test_a_full_disk_is_said_once_and_the_run_goes_on(open_model, tiny_dir, small_disk, monkeypatch, caplog):
    disk = small_disk(8 << 20, "disk")
    filler = disk / "filler"
    with open_model(tiny_dir, cache_dir=disk / "cache") as model:
        small, large = _nbytes(model, 60), _nbytes(model, 400)
        filler.write_bytes(bytes(shutil.disk_usage(disk).free - small - large // 2))
        store = PrefixStore(PLENTY)
        monkeypatch.setattr(Space, "left_on_disk", property(lambda _: PLENTY))
        monkeypatch.setattr("deltafin.runtime.states.writing.free_nbytes", lambda _: PLENTY)
        _keep(store, model, 60)
        seq = _fed(model, TEXT)
        for _ in range(2):
            assert not store.keep(model, seq)
        assert os.listdir(disk / "cache" / "tmp") == []
        (line,) = _lines(caplog)
        assert "No space left on device" in line and "computed again" in line
        assert store.longest(model, TEXT).ids == TEXT[:60]
        filler.unlink()
        assert store.keep(model, seq), "there is room again"


def test_a_cache_that_is_only_read_is_said_once_and_still_used(open_model, tiny_dir, small_disk, caplog):
    disk = small_disk(8 << 20, "disk")
    with open_model(tiny_dir, cache_dir=disk / "cache") as model:
        store = PrefixStore(PLENTY)
        _keep(store, model, 60, 30)
        subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
        seq = _fed(model, TEXT[:100])
        for _ in range(2):
            assert not store.keep(model, seq)
            assert store.longest(model, TEXT).ids == TEXT[:60]
        store.budget_nbytes = _nbytes(model, 100)
        assert not store.keep(model, seq), "nothing can be evicted"
        (line,) = _lines(caplog)
        assert "Read-only file system" in line
        assert store.keep(model, _fed(model, TEXT[:30])), "it is there"
        subprocess.run(["mount", "-o", "remount,rw", str(disk)], check=True)


def test_a_drive_that_goes_away_is_said_once_and_nothing_is_written_in_its_place(
    open_model, tiny_dir, tmp_path, caplog
):
    cache = tmp_path / "cache"
    with open_model(tiny_dir, cache_dir=cache) as model:
        store = PrefixStore(PLENTY)
        _keep(store, model, 30)
        seq = _fed(model, TEXT[:100])
        cache.rename(tmp_path / "away")
        for _ in range(2):
            assert not store.keep(model, seq) and store.longest(model, TEXT) is None
        assert not cache.exists() and len(_lines(caplog)) == 1
        (tmp_path / "away").rename(cache)


def test_a_state_that_does_not_fit_into_memory_says_so(model, monkeypatch):
    store = PrefixStore(PLENTY)
    _keep(store, model, 30)

    def none(tokens):
        raise NoMemory("no")

    monkeypatch.setattr(model, "make_room", none)
    with pytest.raises(NoMemory):
        store.longest(model, TEXT)
    assert _lengths(model) == [30]


# ---- processes -------------------------------------------------------------------------------------------

PROGRAM = """
import sys, time
import deltafin
from deltafin.runtime.states import PrefixStore, save_state
model_dir, cache, ids, stop = sys.argv[1], sys.argv[2], [int(i) for i in sys.argv[3].split(",")], sys.argv[4]

def pause(where):
    if where == stop:
        print(where, flush=True)
        sys.stdin.readline()

with deltafin.open(model_dir, cache_dir=cache) as model:
    seq = model.sequence()
    model.forward([deltafin.Segment(seq, ids)], logits="none")
    pause("ready")
    writer = PrefixStore(1 << 30).writer(model, ids)
    if writer is not None:
        for layer, state in enumerate(seq.state):
            writer.layer(layer, state)
            pause(f"layer {layer}")
        assert writer.commit()
    pause("kept")
    print("done", flush=True)
"""


@pytest.fixture
def writing(tiny_dir):
    """`writing(stop, cache)`: another process that keeps the first 300 ids and waits at `stop`."""
    started = []

    def start(stop: str, cache: Path) -> subprocess.Popen[str]:
        words = [str(tiny_dir), str(cache), ",".join(map(str, TEXT[:300])), stop]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        process = subprocess.Popen([sys.executable, "-c", PROGRAM, *words], text=True, **pipes)
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


@pytest.mark.parametrize("stop", ["layer 4", "kept"])
def test_a_kill_leaves_nothing_or_a_whole_state_that_goes_on_like_an_uninterrupted_run(
    open_model, tiny_dir, tmp_path, writing, tiny, stop
):
    process = writing(stop, tmp_path / "cache")
    assert process.stdout.readline().strip() == stop
    process.kill()
    process.wait()
    left = os.listdir(tmp_path / "cache" / "tmp")
    assert len(left) == (stop != "kept")
    expected = tiny.forward([Segment(tiny.sequence(), TEXT)])
    with open_model(tiny_dir, cache_dir=tmp_path / "cache") as model:
        assert os.listdir(tmp_path / "cache" / "tmp") == [], "opening the cache clears what dead writers left"
        store = PrefixStore(PLENTY)
        seq = store.longest(model, TEXT)
        if stop != "kept":
            assert seq is None
            _keep(store, model, 300)
            seq = store.longest(model, TEXT)
        assert len(seq) == 300
        assert model.forward([Segment(seq, TEXT[300:])]).tobytes() == expected[300:].tobytes()


def test_two_processes_that_keep_the_same_state_at_once_both_succeed(model, cache, writing):
    pair = [writing("layer 4", cache), writing("layer 4", cache)]
    for process in pair:
        assert process.stdout.readline().strip() == "layer 4"
    for process in pair:  # both are half through
        process.stdin.write("\n")
        process.stdin.flush()
        assert process.stdout.readline().strip() == "done"
        assert process.wait() == 0
    assert _lengths(model) == [300]
    assert PrefixStore(PLENTY).longest(model, TEXT).ids == TEXT[:300]
