"""A conversation whose answers fail or are interrupted: what was said before is kept, and nothing else is."""

from __future__ import annotations

import gc
import weakref

import pytest

import deltafin
from deltafin.cli.chat_screen import ChatScreen
from deltafin.cli.choosing import Choosing
from deltafin.cli.run_settings import RunSettings, StateOptions, saving_at_the_end
from deltafin.cli.talk import Talk
from deltafin.errors import BadRequest, NetworkError
from deltafin.runtime import Sampling
from deltafin.runtime.chat import Conversation, UserMessage
from deltafin.runtime.states import load_state

JAPAN, ITALY = UserMessage("What is the capital of Japan?"), UserMessage("And of Italy?")
GARBLED = UserMessage("half a pair \udcff")


@pytest.fixture
def model(demo_dir, tmp_path):
    with deltafin.open(demo_dir, cache_dir=tmp_path / "cache", offline=True) as opened:
        opened._backend.most_rows = 8  # so that a question takes several passes
        yield opened


@pytest.fixture
def talk(model):
    """`talk(keep_states)` is a conversation that has not begun."""

    def begin(keep_states=0, load=None):
        states = StateOptions(save_state=None, load_state=load, keep_states=keep_states)
        settings = RunSettings(states, max_new=40, as_json=True, stats=False, trace=None)
        how = Choosing(Sampling(), (), depth=0, asked=False)
        screen = ChatScreen(quiet=True, hide_thinking=True)
        return Talk(model, Conversation(thinking=False), how, settings, screen)

    return begin


@pytest.fixture
def failing(model, monkeypatch):
    """`failing(kind, after)`: so many passes succeed, then one raises, then all succeed."""
    real = model.forward

    def arm(kind, after):
        left = [after]

        def forward(*args, **keywords):
            left[0] -= 1
            if left[0] == -1:
                raise kind("no network")
            return real(*args, **keywords)

        monkeypatch.setattr(model, "forward", forward)

    return arm


@pytest.mark.parametrize("after", [0, 1])
@pytest.mark.parametrize("keep_states", [0, 1 << 30])
def test_a_question_that_fails_leaves_no_trace_in_the_conversation(talk, failing, after, keep_states):
    whole = talk(0)
    whole.ask(JAPAN)
    expected = whole.ask(ITALY)
    one = talk(keep_states)
    one.ask(JAPAN)
    failing(NetworkError, after)
    with pytest.raises(NetworkError):
        one.ask(UserMessage("Who are you?"))
    assert one.ask(ITALY) == expected
    assert one.prompt == whole.prompt


def test_a_question_that_is_no_text_leaves_no_trace_either(talk):
    one = talk()
    expected = one.ask(JAPAN)
    one = talk()
    with pytest.raises(BadRequest, match="surrogate"):
        one.ask(GARBLED)
    assert one.ask(JAPAN) == expected


@pytest.mark.parametrize("error", [NetworkError, KeyboardInterrupt])
def test_what_is_saved_after_a_failure_is_the_conversation_before(talk, failing, model, tmp_path, error):
    """A question without an answer is no part of it, though the sequence has seen some of it."""
    file = tmp_path / "state"
    one = talk(1 << 30)
    one.ask(JAPAN)
    before = one._dialogue.ids
    failing(error, 1)
    if error is NetworkError:
        with pytest.raises(NetworkError):
            one.ask(ITALY)
    else:
        assert one.ask(ITALY) is None
    one.save(file)
    saved = load_state(file, model)
    assert [*saved.seq.ids, *saved.pending] == before
    expected = one.ask(ITALY)
    assert talk(load=file).ask(ITALY) == expected


def test_a_state_that_nobody_could_load_is_not_saved(talk, failing, tmp_path):
    one = talk(0)
    failing(NetworkError, 1)
    with pytest.raises(NetworkError):
        one.ask(JAPAN)
    assert not one.started
    with pytest.raises(BadRequest, match="nothing was said yet"):
        one.save(tmp_path / "state")
    one.ask(JAPAN)
    failing(NetworkError, 1)
    with pytest.raises(NetworkError):
        one.ask(ITALY)
    with pytest.raises(BadRequest, match="not written: the question that was stopped"):
        one.save(tmp_path / "state")
    assert not (tmp_path / "state").exists()
    one.ask(JAPAN)
    one.save(tmp_path / "state")


def test_what_a_failed_question_computed_is_let_go_before_another_state_is_read(talk, failing, model, monkeypatch):
    one = talk(1 << 30)
    one.ask(JAPAN)
    failing(NetworkError, 2)
    with pytest.raises(NetworkError):
        one.ask(UserMessage("Who are you?"))
    lost = weakref.ref(one._seq)
    alive = []
    real = one._prefixes.longest

    def longest(*args):
        gc.collect()
        alive.append(lost() is not None)
        return real(*args)

    monkeypatch.setattr(one._prefixes, "longest", longest)
    one.ask(ITALY)
    assert alive == [False]


def test_a_save_that_fails_does_not_hide_why_the_run_ended(tmp_path, capsys):
    def save(path):
        raise BadRequest(f"{path.name}: cannot be saved")

    states = StateOptions(save_state=tmp_path / "state", load_state=None, keep_states=None)
    for error in (NetworkError("no network"), KeyboardInterrupt()):
        with pytest.raises(type(error)), saving_at_the_end(save, states):
            raise error
        assert capsys.readouterr().err == "df-run: state: cannot be saved\n"
    with pytest.raises(BadRequest), saving_at_the_end(save, states):
        pass
