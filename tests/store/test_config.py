"""Which roots there are: the configuration file and --root."""

from __future__ import annotations

from pathlib import Path

import pytest

from deltafin.errors import BadRequest, NotFound
from deltafin.store import Limits, RootSpec, parse_nbytes, parse_root
from deltafin.store.config import chosen_roots, read_config


@pytest.fixture
def config(tmp_path):
    """`config(text)`: what a file of this text says."""
    path = tmp_path / "config.toml"

    def read(text: str):
        path.write_text(text)
        return read_config({"DELTAFIN_CONFIG": str(path)})

    return read


def test_a_file_gives_roots_with_budgets_and_limits_of_the_cache(config, tmp_path):
    found = config(
        f"""
        [cache]
        reserve = "20GB"
        [[root]]
        path = "{tmp_path}"
        write = true
        budget = "1.5TB"
        [[root]]
        path = "/mnt/shards"
        """
    )
    assert found.cache == Limits(reserve=20_000_000_000)
    writable, plain = found.roots
    assert (writable.path, writable.write, writable.limits) == (tmp_path, True, Limits(budget=1_500_000_000_000))
    assert (plain.path, plain.write, plain.limits) == (Path("/mnt/shards"), False, Limits())


def test_without_a_file_there_is_only_the_cache(tmp_path):
    for environ in ({}, {"HOME": str(tmp_path)}, {"XDG_CONFIG_HOME": str(tmp_path)}):
        assert read_config(environ).roots == ()


@pytest.mark.parametrize("where", ["XDG_CONFIG_HOME", "HOME"])
def test_the_users_own_file_is_found(tmp_path, where):
    folder = tmp_path / (".config/deltafin" if where == "HOME" else "deltafin")
    folder.mkdir(parents=True)
    (folder / "config.toml").write_text("[cache]\nbudget = 5\n")
    assert read_config({where: str(tmp_path)}).cache == Limits(budget=5)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("[cahce]", "unknown key 'cahce'; known are cache, root"),
        ("cache = 3", "cache: expected a table"),
        ("root = 3", "root: expected tables"),
        ("[root]\npath = '/a'", "root: expected tables"),
        ("[cache]\npath = '/a'", r"\[cache\]: unknown key 'path'"),
        ("[cache]\nbudget = 'lots'", r"\[cache\]: budget: 'lots' is no size"),
        ("[cache]\nbudget = -1", "budget: -1 is no size"),
        ("[cache]\nbudget = true", "budget: True is no size"),
        ("[cache]\nreserve = 1.5", "reserve: 1.5 is no size"),
        ("[[root]]\nwrite = true", r"\[\[root\]\] number 1: path: expected a directory"),
        ("[[root]]\npath = 3", "number 1: path: expected a directory"),
        ("[[root]]\npath = 'a/b'", "path 'a/b': expected an absolute path"),
        ("[[root]]\npath = '/a'\nwrite = 1", "write: expected true or false"),
        ("[[root]]\npath = '/a'\nbugdet = '1GB'", "number 1: unknown key 'bugdet'"),
        ("[[root]]\npath = '/a'\n[[root]]\npath = '/b'\nbudget = 1", "number 2.*have no effect.*add write"),
        ("[[root", "not TOML"),
        ("\x80", "not TOML"),
    ],
)
def test_a_mistake_is_named_with_file_and_key(config, tmp_path, text, complaint):
    with pytest.raises(BadRequest, match=complaint) as raised:
        config(text) if text.isascii() else (
            (tmp_path / "config.toml").write_bytes(b"\x80"),
            read_config({"DELTAFIN_CONFIG": str(tmp_path / "config.toml")}),
        )
    assert str(tmp_path / "config.toml") in str(raised.value)


def test_a_file_that_is_named_must_be_there(tmp_path):
    with pytest.raises(NotFound, match=r"DELTAFIN_CONFIG=.*no such file"):
        read_config({"DELTAFIN_CONFIG": str(tmp_path / "none.toml")})
    with pytest.raises(NotFound, match="cannot be read"):
        read_config({"DELTAFIN_CONFIG": str(tmp_path)})


def test_a_directory_on_the_command_line_may_have_options(tmp_path):
    assert parse_root("/a/b") == RootSpec(Path("/a/b"), origin="--root /a/b")
    found = parse_root("/a/b,budget=500GB,write,reserve=0")
    assert (found.path, found.write, found.limits) == (Path("/a/b"), True, Limits(500_000_000_000, 0))
    odd = tmp_path / "with,write"
    odd.mkdir()
    assert parse_root(str(odd)).path == odd
    assert parse_root(f"{odd},write").write


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("/a,budget=1GB", "have no effect"),
        ("/a,write,budget=x", "budget: 'x' is no size"),
        ("/a,write,budget=1,budget=2", "budget is given twice"),
    ],
)
def test_options_that_make_no_sense_are_refused(text, complaint):
    with pytest.raises(BadRequest, match=complaint):
        parse_root(text)


def test_the_command_line_replaces_an_entry_of_the_file(config, tmp_path):
    cache = tmp_path / "cache"
    (tmp_path / "a").mkdir(), cache.mkdir()
    found = config(f"[[root]]\npath = '{tmp_path / 'a'}'\nwrite = true\n")
    (root,) = chosen_roots(found, [parse_root(str(tmp_path / "a"))], cache)
    assert not root.write


def test_roots_that_are_not_there_or_twice_there_are_refused(config, tmp_path):
    cache, a = tmp_path / "cache", tmp_path / "a"
    a.mkdir(), cache.mkdir()
    with pytest.raises(NotFound, match=r"\[\[root\]\] number 1: path .*none: no such directory"):
        chosen_roots(config(f"[[root]]\npath = '{tmp_path / 'none'}'"), [], cache)
    with pytest.raises(NotFound, match=r"--root .*,x=1: no such directory"):
        chosen_roots(config(""), [parse_root(f"{a},x=1")], cache)
    with pytest.raises(BadRequest, match="is the same directory as"):
        chosen_roots(config(f"[[root]]\npath = '{a}'\n[[root]]\npath = '{a}/.'"), [], cache)
    with pytest.raises(BadRequest, match=r"a root already; its limits go under \[cache\]"):
        chosen_roots(config(f"[[root]]\npath = '{cache}'"), [], cache)


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [("500", 500), ("1.5TB", 1_500_000_000_000), ("20GiB", 20 << 30), ("7 kb", 7000), ("x", None), ("-1", None)],
)
def test_sizes(text, nbytes):
    assert parse_nbytes(text) == nbytes
