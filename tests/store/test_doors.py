"""What the rooms cost to import, where the cache is, and what the environment says."""

from __future__ import annotations

from pathlib import Path

import pytest

from deltafin.errors import BadRequest, Missing, NotFound
from deltafin.store import default_cache, is_offline, parse_numbers

IMPORTS = """
import sys
import deltafin.indexer, deltafin.store
heavy = {"torch", "tiktoken", "huggingface_hub", "deltafin.runtime"} & set(sys.modules)
sys.exit(f"imported: {sorted(heavy)}" if heavy else 0)
"""

WORKING = """
import sys
from deltafin.store import all_items, fetch, open_store, read_status, verify
with open_store("test/model", cache_dir=sys.argv[1]) as store:
    fetch(store, all_items(store.catalog))
    read_status(store), verify(store), store.spine(1), list(store.experts(1, [0])), store.embedding([1])
heavy = {"torch", "tiktoken", "deltafin.runtime"} & set(sys.modules)
sys.exit(f"imported: {sorted(heavy)}" if heavy else 0)
"""

SOCKETLESS = """
import socket, sys
def refuse(*args, **keywords):
    raise AssertionError("a socket was opened")
socket.socket.__init__ = refuse
socket.getaddrinfo = refuse
from deltafin.store import open_store, read_status, verify
with open_store("test/model", cache_dir=sys.argv[1], offline=True) as store:
    read_status(store), verify(store), store.spine(1), list(store.experts(1, [0])), store.embedding([1])
    list(store.head())
"""


def test_importing_the_indexer_and_the_store_imports_no_torch(python):
    done = python(IMPORTS)
    assert done.returncode == 0, done.stderr


def test_indexing_and_fetching_import_no_torch(python, hub, tiny_dir, tmp_path):
    hub(tiny_dir)
    done = python(WORKING, tmp_path / "cache")
    assert done.returncode == 0, done.stderr


def test_offline_no_socket_is_opened(python, full):
    store, _ = full
    done = python(SOCKETLESS, store.roots[0].path)
    assert done.returncode == 0, done.stderr


# ---- opening --------------------------------------------------------------------------------------------


def test_the_cache_is_where_the_environment_says():
    home = Path.home()
    assert default_cache({"DELTAFIN_CACHE": "/a/b", "XDG_CACHE_HOME": "/x"}) == Path("/a/b")
    assert default_cache({"DELTAFIN_CACHE": "~/models"}) == home / "models"
    assert default_cache({"DELTAFIN_CACHE": "", "XDG_CACHE_HOME": "/x"}) == Path("/x/deltafin")
    assert default_cache({}) == home / ".cache" / "deltafin"


@pytest.mark.parametrize("value", ["1", "ON", "on", "YES", "yes", "TRUE", "True"])
def test_offline_is_read_as_the_hub_client_reads_it(value):
    assert is_offline({"HF_HUB_OFFLINE": value})


@pytest.mark.parametrize("value", ["", "0", "off", "no", "false", "2"])
def test_anything_else_is_not_offline(value):
    assert not is_offline({"HF_HUB_OFFLINE": value})
    assert not is_offline({})


@pytest.mark.parametrize("how", ["option", "environment"])
def test_offline_a_model_that_is_not_indexed_says_what_to_run(opened, hub, tiny_dir, how):
    server = hub(tiny_dir)
    keywords = {"offline": True} if how == "option" else {"environ": {"HF_HUB_OFFLINE": "1"}}
    with pytest.raises(Missing, match=r"test/model is not indexed on this machine; .*df-index build test/model$"):
        opened(**keywords)
    assert server.state.log == []


def test_the_environment_alone_makes_an_indexed_model_offline(full, opened):
    assert full
    again = opened(environ={"HF_HUB_OFFLINE": "1"})
    assert not again.may_fetch
    assert again.remote is None


def test_a_catalogs_name_alone_opens_its_model(full, opened, tiny_truth):
    store, _ = full
    named = opened(store.catalog.name, offline=True)
    assert [slot.tobytes() for _, slot in named.experts(1, [3])] == [tiny_truth.expert(1, 3)]


def test_what_is_no_model_at_all_is_not_found(opened):
    for name in ("nonsense", "/no/such/directory", "a/b/c/d"):
        with pytest.raises(NotFound, match=name):
            opened(name)


def test_closing_twice_does_nothing(opened, tiny_dir):
    store = opened(tiny_dir)
    store.close()
    store.close()


# ---- selections -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "numbers"),
    [
        ("3", [3]),
        ("1-4", [1, 2, 3, 4]),
        ("4-4", [4]),
        ("9,1-3,2", [1, 2, 3, 9]),
        (" 1 , 2-3 ", [1, 2, 3]),
        ("1-9", list(range(1, 10))),
        ("007", [7]),
    ],
)
def test_numbers_and_ranges_become_a_sorted_list(text, numbers):
    assert parse_numbers(text, range(1, 10), "--layers") == numbers


@pytest.mark.parametrize("text", ["", ",", "1,", ",1", "1-", "-1", "1--2", "1-2-3", "a", "1 2", "1;2", "1.5", "*"])
def test_anything_else_is_refused_with_an_example(text):
    with pytest.raises(BadRequest, match=r"--layers '.*': expected numbers and ranges like 1-5,9"):
        parse_numbers(text, range(1, 10), "--layers")


@pytest.mark.parametrize("text", ["0", "10", "5-10", "0-3", "999999", "1,2,10"])
def test_numbers_that_the_model_does_not_have_are_refused_with_those_it_has(text):
    with pytest.raises(BadRequest, match="this model has 1 to 9"):
        parse_numbers(text, range(1, 10), "--layers")


def test_a_range_that_runs_backwards_is_refused():
    with pytest.raises(BadRequest, match="5-2 runs backwards"):
        parse_numbers("5-2", range(1, 10), "--layers")
