"""Small files of the cache may come from anywhere: a pipe is not waited for, a link not written through."""

from __future__ import annotations

import os

import pytest

from deltafin.errors import BadRequest
from deltafin.indexer import read_small
from deltafin.store.config import parse_root, read_config
from deltafin.store.verifystate import STATE_NAME, VerifyState, read_result


def test_pipes_directories_and_long_files_are_errors_at_once(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "long").write_bytes(bytes(11))
    for name in ("pipe", "long", "."):
        with pytest.raises(OSError):
            read_small(tmp_path / name, 10)
    assert read_small(tmp_path / "long", 11) == bytes(11)


def test_a_verification_neither_waits_for_a_pipe_nor_writes_through_a_link(tmp_path):
    os.mkfifo(tmp_path / "verify.json")
    assert read_result(tmp_path) is None
    victim, state = tmp_path / "victim", tmp_path / STATE_NAME
    victim.write_text("mine")
    state.symlink_to(victim)
    VerifyState(tmp_path, "m").close(finished=False)
    assert victim.read_text() == "mine" and not state.is_symlink()
    state.unlink()
    os.mkfifo(state)
    VerifyState(tmp_path, "m").close(finished=True)


@pytest.mark.parametrize(
    "text", ["a=" + "[" * 5000, "a = " + "9" * 5000, "[[root]]\npath = '~nobody_x/y'", "[[root]]\npath = '/a\\u0000'"]
)
def test_a_hostile_configuration_file_is_one_error(tmp_path, text):
    file = tmp_path / "config.toml"
    file.write_text(text.replace("'/a", '"/a').replace("0000'", '0000"'))
    with pytest.raises(BadRequest, match=r"config\.toml"):
        read_config({"DELTAFIN_CONFIG": str(file)})
    with pytest.raises(BadRequest):
        parse_root("~nobody_x/y")
