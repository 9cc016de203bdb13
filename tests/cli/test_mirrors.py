"""--mirror and DELTAFIN_MIRRORS: other servers before the hub, in the commands that fetch."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

REPO, TOKEN = "org/tiny", "hf_dummyTokenThatMustNotBeSeen"
RUN = ["df-run", REPO, "--prompt-ids", "1 2 3", "--max-new", "2", "--ids", "--yes"]


@pytest.fixture
def indexed(tiny_cache, tmp_path) -> Path:
    """The command's cache, which holds the catalog of org/tiny and nothing else."""
    shutil.copytree(tiny_cache / "catalogs", tmp_path / "cache" / "catalogs")
    return tmp_path / "cache"


@pytest.fixture
def mirror(range_server, tiny_dir) -> Iterator[Callable[..., object]]:
    """`mirror(mode)` serves the shards of tiny as plain files, and is no hub."""
    running = []

    def start(mode: str = "ok", root: Path = tiny_dir, **args):
        running.append(range_server.FaultServer(root=str(root)))
        running[-1].__enter__()
        running[-1].set_mode(mode, **args)
        return running[-1]

    yield start
    for server in running:
        server.__exit__(None, None, None)


def objects(cache: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in (cache / "objects").rglob("*") if path.is_file()}


def test_with_a_catalog_and_a_mirror_the_hub_is_never_contacted(df, indexed, mirror, tiny_cache, monkeypatch):
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:1")
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    server = mirror()
    done = df("df-fetch", "all", REPO, "--mirror", server.url, "-vv")
    assert done.status == 0, done.err
    assert objects(indexed).items() >= objects(tiny_cache).items()
    assert not server.stats()["auth_seen_on_hub"]
    assert TOKEN not in done.out + done.err
    assert df(*RUN, "--offline").status == 0


def test_a_run_streams_from_a_mirror(df, indexed, mirror, hub, tiny_dir, tiny_cache, monkeypatch):
    said = df(*RUN, "--offline", cache=tiny_cache).out
    asked = hub(tiny_dir)
    server = mirror()
    done = df(*RUN, "--mirror", server.url)
    assert (done.status, done.out) == (0, said), done.err
    assert server.state.log and not asked.state.log


def test_the_variable_names_several_and_the_option_wins(df, indexed, mirror, hub, tiny_dir, monkeypatch):
    asked, dead, first, second = hub(tiny_dir), mirror("gone_404"), mirror(), mirror()
    monkeypatch.setenv("DELTAFIN_MIRRORS", f" {dead.url}  {first.url}/ ")
    warm = ["df-fetch", "warm", REPO, "--layers", "3"]
    done = df(*warm, "--experts", "0-3")
    assert done.status == 0, done.err
    assert done.err.count("\n") == 1 and "mirror passed over for 60 s, for model-00004" in done.err
    assert (len(first.state.log), len(asked.state.log)) == (4, 0)
    assert df(*warm, "--experts", "4-7", "--mirror", second.url).status == 0
    assert (len(first.state.log), len(second.state.log), len(asked.state.log)) == (4, 4, 0)


def test_repository_and_commit_are_filled_in(df, indexed, mirror, monkeypatch, range_server):
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:1")
    server = mirror()
    done = df("df-fetch", "warm", REPO, "--layers", "3", "--mirror", server.url + "/{repo}/resolve/{commit}/")
    assert done.status == 0, done.err
    assert {row["path"].rpartition("/")[0] for row in server.state.log} == {
        f"/{REPO}/resolve/{range_server.COMMIT_A}",
    }  # fmt: skip


def test_what_no_mirror_has_comes_from_the_hub(df, indexed, mirror, hub, tiny_dir, tiny_cache, tmp_path):
    """A mirror with some of the shards is a help all the same."""
    some = tmp_path / "some"
    some.mkdir()
    for path in sorted(tiny_dir.glob("*.safetensors"))[:5]:
        shutil.copy(path, some)
    asked, server = hub(tiny_dir), mirror(root=some)
    done = df("df-fetch", "all", REPO, "--mirror", server.url)
    assert done.status == 0, done.err
    assert objects(indexed).items() >= objects(tiny_cache).items()
    assert done.err.count("mirror passed over") == 1
    from_mirror = {row["path"] for row in server.state.log if row["status"] == 206}
    assert {Path(name).name for name in from_mirror} <= {path.name for path in some.iterdir()}
    assert {Path(row["path"]).name for row in asked.state.log}.isdisjoint(path.name for path in some.iterdir())


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["df-fetch", "all", REPO, "--offline"], "--mirror has no effect offline"),
        (["df-fetch", "warm", "demo"], "--mirror has no effect for demo: its shards are on this machine"),
        (["df-run", "demo", "--prompt", "x"], "--mirror has no effect for demo: its shards are on this machine"),
    ],
    ids=["offline", "fetch demo", "run demo"],
)
def test_a_mirror_that_would_have_no_effect_is_wrong_usage(df, indexed, words, complaint):
    done = df(*words, "--mirror", "http://127.0.0.1:1")
    assert done.status == 2 and done.err.count("\n") == 1 and complaint in done.err


def test_a_mirror_of_a_catalog_that_was_built_from_a_directory_is_wrong_usage(df, tiny_dir):
    assert df("df-index", "build", tiny_dir, "--name", "mine").status == 0
    done = df("df-fetch", "all", "mine", "--mirror", "http://127.0.0.1:1")
    assert done.status == 2 and "--mirror has no effect for mine: its shards are in " in done.err


@pytest.mark.parametrize("by", ["option", "variable"])
def test_what_is_no_address_is_wrong_usage_before_anything_is_asked(df, indexed, hub, tiny_dir, monkeypatch, by):
    asked = hub(tiny_dir)
    address = "http://user:secret@nas/x"
    if by == "variable":
        monkeypatch.setenv("DELTAFIN_MIRRORS", address)
    done = df("df-fetch", "all", REPO, *(["--mirror", address] if by == "option" else []))
    assert done.status == 2 and "a plain address is needed" in done.err and "secret" not in done.err
    assert not asked.state.log
