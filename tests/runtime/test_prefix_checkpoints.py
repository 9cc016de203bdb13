"""A state that a pass writes to the prefix store on its way is the state of a pass that ended there."""

from __future__ import annotations

import os

import pytest

from deltafin.errors import NoSpace
from deltafin.runtime import Observer, Segment
from deltafin.runtime.segment import Checkpoint
from deltafin.runtime.states import PrefixStore
from deltafin.store import state_files

TEXT = [(13 * n * n + 7 * n) % 199 + 1 for n in range(320)]
PLENTY = 1 << 30


@pytest.fixture(scope="module")
def own_model(open_model, tiny_dir, tmp_path_factory):
    with open_model(tiny_dir, cache_dir=tmp_path_factory.mktemp("checkpoints") / "cache") as model:
        yield model


@pytest.fixture
def model(own_model):
    """tiny with no state in its cache yet."""
    for file in state_files(own_model.store.roots[0].path):
        file.path.unlink()
    return own_model


def _file(model) -> bytes:
    (file,) = state_files(model.store.roots[0].path)
    return file.path.read_bytes()


@pytest.mark.parametrize("at", [1, 64, 255, 256, 257, 319, 320])
def test_a_checkpoint_in_a_pass_is_the_file_of_a_pass_that_ended_there(model, at):
    store = PrefixStore(PLENTY)
    ended = model.sequence()
    model.forward([Segment(ended, TEXT[:at])], logits="none")
    assert store.keep(model, ended)
    expected = _file(model)
    state_files(model.store.roots[0].path)[0].path.unlink()

    begun, seq, other = 30 if at > 30 else 0, model.sequence(), model.sequence()
    if begun:
        model.forward([Segment(seq, TEXT[:begun])], logits="none")
    writer = store.writer(model, TEXT[:at])
    segment = Segment(seq, TEXT[begun:], checkpoint=Checkpoint(at - begun, writer))
    found = model.forward([Segment(other, TEXT[:40]), segment])[40:]
    assert writer.complete and writer.commit()
    assert _file(model) == expected
    assert found.tobytes() == model.forward([Segment(model.sequence(), TEXT)])[begun:].tobytes()
    if at < len(TEXT):
        again = store.longest(model, TEXT)
        assert again.ids == TEXT[:at]
        rest = model.forward([Segment(again, TEXT[at:])])
        assert rest.tobytes() == found[at - begun :].tobytes()


def test_a_pass_that_is_interrupted_keeps_nothing(model):
    class Interrupting(Observer):
        def layer(self, layer, num_layers):
            if layer == 5:
                raise KeyboardInterrupt

    store = PrefixStore(PLENTY)
    writer = store.writer(model, TEXT[:100])
    with pytest.raises(KeyboardInterrupt):
        segment = Segment(model.sequence(), TEXT, checkpoint=Checkpoint(100, writer))
        model.forward([segment], logits="none", observer=Interrupting())
    assert not writer.complete
    writer.abort()
    cache = model.store.roots[0].path
    assert state_files(cache) == [] and os.listdir(cache / "tmp") == []


def test_a_disk_that_fills_up_during_a_pass_does_not_fail_it(model, monkeypatch, caplog):
    store = PrefixStore(PLENTY)
    writer, seq = store.writer(model, TEXT[:100]), model.sequence()

    def full(*_args):
        raise NoSpace("a.state: cannot write: No space left on device")

    monkeypatch.setattr("deltafin.runtime.states.writing.StateWriter._write", full)
    found = model.forward([Segment(seq, TEXT, checkpoint=Checkpoint(100, writer))])
    monkeypatch.undo()
    assert found.tobytes() == model.forward([Segment(model.sequence(), TEXT)]).tobytes()
    assert not writer.complete and not writer.commit()
    assert len([r for r in caplog.records if "No space left" in r.getMessage()]) == 1
    cache = model.store.roots[0].path
    assert state_files(cache) == [] and os.listdir(cache / "tmp") == []
