"""df-fetch and packs: what is written, asked, shown, checked and removed."""

from __future__ import annotations

import signal

import pytest

from deltafin.indexer import GLOBALS
from deltafin.store import open_store, spine_items

REPO = "org/tiny"


@pytest.fixture
def indexed(hub, tiny_dir, tmp_path, index_only):
    """tiny on a hub, indexed, nothing fetched."""
    server = hub(tiny_dir)
    index_only(tmp_path / "cache", REPO)
    server.set_mode("ok")
    return server


@pytest.fixture
def paths(tmp_path):
    """`paths()`: the packs in the cache now."""
    return lambda: sorted((tmp_path / "cache" / "packs").rglob("*.pack"))


@pytest.fixture
def spans(tmp_path):
    """`spans(layers)`: what the server is asked for when these are fetched; GLOBALS is what lies beside the layers."""

    def of(layers) -> set[tuple[str, int, int]]:
        with open_store(REPO, cache_dir=tmp_path / "cache", offline=True) as store:
            items = [i for i in spine_items(store.catalog) if i.layer in layers]
            return {(store.catalog.shards[i.span.shard].name, i.span.offset, i.span.nbytes) for i in items}

    return of


def test_the_spine_goes_straight_into_packs_and_the_rest_into_objects(df, indexed, paths, spans, ranges, tmp_path):
    done = df("df-fetch", "spine", REPO, "--as", "bf12")
    assert (done.status, done.err) == (0, "")
    fetched, packed = done.out.splitlines()
    assert fetched == "fetched 3 spans, 263 KB; 0 spans, 0 B were here already"
    assert packed.startswith("packed 9 layers as bf12: 2.01 MB became ")
    assert packed.endswith("; 0 layers were here already")
    seen = ranges(indexed)
    assert set(seen) == spans([*range(9), GLOBALS]) and set(seen.values()) == {1}
    assert len(paths()) == 9
    assert len(list((tmp_path / "cache" / "objects").rglob("*/*"))) == 3
    again = df("df-fetch", "spine", REPO, "--as", "bf12")
    assert again.out == "packed 0 layers as bf12: 0 B became 0 B; 9 layers were here already\n"


def test_layers_are_chosen_and_then_nothing_beside_them_is_fetched(df, indexed, paths, spans, ranges):
    done = df("df-fetch", "spine", REPO, "--as", "bf16", "--layers", "2-3,8")
    assert done.out.startswith("packed 3 layers as bf16")
    assert [path.name for path in paths()] == ["layer-00002.pack", "layer-00003.pack", "layer-00008.pack"]
    assert set(ranges(indexed)) == spans([2, 3, 8])


def test_layers_can_be_chosen_without_packs_too(df, indexed, paths, spans, ranges):
    assert df("df-fetch", "spine", REPO, "--layers", "0,4").status == 0
    assert set(ranges(indexed)) == spans([0, 4]) and paths() == []


def test_int8_is_called_not_as_released_wherever_it_is_shown(df, indexed):
    assert "int8 (not as released)" in df("df-fetch", "spine", REPO, "--as", "int8").out
    assert "packs    int8 (not as released): 9 of 9 layers" in df("df-fetch", "status", REPO).out
    assert "(not as released)" in " ".join(df("df-fetch", "spine", "--help").out.split())


def test_status_lists_packs(df, indexed, paths):
    df("df-fetch", "spine", REPO, "--as", "bf12", "--layers", "1")
    df("df-fetch", "spine", REPO, "--as", "int8")
    nbytes = {path: path.stat().st_size for path in paths()}
    listed = df("df-fetch", "status", REPO, "--json").json["packs"]
    assert listed == [
        {
            "format": name,
            "as_released": name == "bf12",
            "layers": layers,
            "nbytes": sum(n for path, n in nbytes.items() if path.parent.name == name),
        }
        for name, layers in (("bf12", 1), ("int8", 9))
    ]
    assert "packs    bf12: 1 of 9 layers, " in df("df-fetch", "status", REPO).out


def test_verify_moves_a_damaged_pack_aside_and_packing_again_repairs_it(df, indexed, paths, tmp_path):
    df("df-fetch", "spine", REPO, "--as", "bf12")
    assert "9 packs whole (" in df("df-fetch", "verify", REPO).out
    victim = paths()[4]
    data = bytearray(victim.read_bytes())
    data[-5000] ^= 1
    victim.write_bytes(data)
    done = df("df-fetch", "verify", REPO)
    assert done.status == 1
    assert done.out.startswith(f"damaged: {victim}: the piece at ") and "moved to" in done.out
    assert victim not in paths()
    assert df("df-fetch", "verify", REPO, "--json").json["packs"] == 8
    assert df("df-fetch", "spine", REPO, "--as", "bf12").out.startswith("packed 1 layers")
    assert df("df-fetch", "verify", REPO).status == 0


def test_rm_removes_the_packs_of_one_format_and_nothing_else(df, full_tiny, paths):
    df("df-fetch", "spine", REPO, "--as", "bf12")
    df("df-fetch", "spine", REPO, "--as", "int8", "--layers", "1-2")
    assert df("df-fetch", "rm", REPO, "--packs", "int8").out.startswith("removed 2 packs, ")
    assert len(paths()) == 9
    assert df("df-fetch", "rm", REPO, "--packs", "int8").out == "removed 0 packs, 0 B\n"
    assert df("df-fetch", "verify", REPO, "--json").json["whole"] == 140
    assert "140 objects, 2.69 MB, 9 packs, " in df("df-fetch", "rm", REPO, "--all").out
    assert paths() == []


@pytest.mark.parametrize("args", [["--packs", "bf11"], ["--packs", "bf12", "--spine"], ["--packs", "bf12", "--all"]])
def test_rm_of_packs_that_says_too_much_or_what_there_is_not_is_wrong_usage(df, full_tiny, args):
    assert df("df-fetch", "rm", REPO, *args).status == 2


def test_a_large_packing_is_asked_for_once(df, indexed, paths, monkeypatch):
    monkeypatch.setattr("deltafin.cli.fetch.ASK_ABOVE_NBYTES", 1000)
    monkeypatch.setattr("deltafin.cli.options.ASK_ABOVE_NBYTES", 1000)
    done = df("df-fetch", "spine", REPO, "--as", "bf12")
    assert done.status == 2 and paths() == [] and indexed.stats()["requests"] == 0
    assert "spine of org/tiny as bf12: 2.27 MB to fetch, about 2." in done.err and "Add --yes to go on" in done.err
    assert df("df-fetch", "spine", REPO, "--as", "bf12", tty=True, stdin=b"y\n").status == 0
    assert len(paths()) == 9


def test_a_full_disk_is_one_line_before_anything_is_fetched(df, indexed, paths, monkeypatch):
    monkeypatch.setattr("deltafin.store.space.Space.room", lambda space: 100_000)
    done = df("df-fetch", "spine", REPO, "--as", "bf12")
    assert (done.status, done.out, done.err.count("\n")) == (1, "", 1)
    assert "are to be written, but" in done.err and "100 KB free" in done.err
    assert indexed.stats()["requests"] == 0 and paths() == []


@pytest.mark.parametrize("args", [["--as", "fp8"], ["--as", "bf12", "--layers", "9"], ["--as", "bf12", "--layers="]])
def test_a_format_or_layer_that_there_is_not_is_wrong_usage(df, indexed, paths, args):
    assert df("df-fetch", "spine", REPO, *args).status == 2
    assert paths() == [] and indexed.stats()["requests"] == 0


def test_ctrl_c_keeps_finished_layers_and_leaves_nothing_else(start, df, indexed, paths, until, tmp_path):
    indexed.set_mode("slow_drip", bytes=16384, every=0.05)
    process = start("df-fetch", "spine", REPO, "--as", "bf12")
    until(lambda: len(paths()) >= 1)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=20)
    assert process.returncode == 130 and b"Traceback" not in err
    assert list((tmp_path / "cache" / "tmp").iterdir()) == []
    assert 1 <= len(paths()) < 9
    indexed.set_mode("ok")
    assert df("df-fetch", "verify", REPO).status == 0
    assert df("df-fetch", "spine", REPO, "--as", "bf12").status == 0
    assert len(paths()) == 9


def test_a_model_in_a_directory_is_packed_without_a_copy_of_its_objects(df, tiny_dir, paths, tmp_path):
    done = df("df-fetch", "spine", tiny_dir, "--as", "bf12", "--offline")
    assert done.out.startswith("packed 9 layers as bf12")
    assert not (tmp_path / "cache" / "objects").exists() and len(paths()) == 9


def test_a_run_takes_the_spine_from_packs_and_never_fetches_it_again(df, indexed, spans, ranges, paths):
    wanted = df("df-run", REPO, "--prompt-ids", "5 17 200", "--max-new", "3", "--ids", "--spine", "released").out
    before = ranges(indexed)
    df("df-fetch", "rm", REPO, "--spine")
    df("df-fetch", "spine", REPO, "--as", "bf12")
    packed = ranges(indexed) - before
    done = df("df-run", REPO, "--prompt-ids", "5 17 200", "--max-new", "3", "--ids", "--stats")
    assert (done.status, done.out) == (0, wanted)
    assert "spine     bf12" in done.err and "pack " in done.err
    assert ranges(indexed) - before == packed, "nothing of the spine a second time"
    assert set(packed) == spans([*range(9), GLOBALS])


def test_int8_is_labelled_where_it_answers_and_wanting_what_there_is_not_says_how_to_make_it(df, indexed):
    words = ("df-run", REPO, "--prompt-ids", "5 17 200", "--max-new", "3", "--ids")
    missing = df(*words, "--spine", "int8")
    assert (missing.status, missing.out) == (1, "")
    assert missing.err.strip() == (
        f"df-run: 0 of 9 layers of {REPO} are packed as int8; run: df-fetch spine {REPO} --as int8"
    )
    df("df-fetch", "spine", REPO, "--as", "int8")
    done = df(*words, "--spine", "int8")
    assert (done.status, done.err) == (0, "df-run: spine int8 (not as released)\n")
    assert '"as_released": false' in df(*words[:-1], "--json", "--spine", "int8").out
    assert "not as released" not in df(*words, "--stats").err, "unasked it is not used"
