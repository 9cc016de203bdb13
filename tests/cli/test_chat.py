"""df-run --chat: answers, thinking, tools, conversations, and what a restart finds again."""

from __future__ import annotations

import json
import os
import pty
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from deltafin.cli.answering import Answering
from deltafin.cli.chat_screen import ChatScreen
from deltafin.cli.choosing import Choosing
from deltafin.cli.watch import Watch
from deltafin.errors import NetworkError
from deltafin.runtime import Sampling
from deltafin.runtime.chat import ToolCall
from deltafin.store import open_store

JAPAN = "What is the capital of Japan?"
TOKYO = "The capital of Japan is Tokyo.\n"


@pytest.fixture
def ask(df):
    """`ask("question", options ...)`: one question to the demo, without effort."""

    def run(question, *options, **more):
        effort = () if "--effort" in options else ("--effort", "none")
        given = () if question is None else ("--prompt", question)
        return df("df-run", "demo", "--chat", *given, *effort, *options, **more)

    return run


def _refused(done, *parts, status=2):
    assert (done.status, done.out) == (status, "")
    assert done.err.startswith("df-run: ") and done.err.count("\n") == 1
    assert all(part in done.err for part in parts), done.err


@pytest.fixture(scope="module")
def cases(golden):
    return {c["name"]: c for c in json.loads((golden / "demo.json").read_text())["cases"]}


def test_a_question_is_answered_and_ends_by_itself(ask):
    done = ask(JAPAN)
    assert (done.status, done.out, done.err) == (0, TOKYO, "")


def test_thinking_is_kept_apart_from_the_answer(ask):
    done = ask(JAPAN, "--effort", "low")
    assert (done.status, done.out) == (0, TOKYO)
    assert "Tokyo" in done.err and done.err.count("\n") == 1
    hidden = ask(JAPAN, "--effort", "low", "--hide-thinking")
    assert (hidden.out, hidden.err) == (TOKYO, "")
    found = ask(JAPAN, "--effort", "low", "--json").json
    assert (found["text"] + "\n", found["reasoning"], found["finish"]) == (TOKYO, done.err.rstrip("\n"), "stop")
    assert found["stopped"] and found["tool_calls"] == []


@pytest.mark.parametrize("name", ["tool call", "two tool calls", "tool result", "json object", "two turns with memory"])
def test_golden_conversations_come_out_token_for_token(df, tmp_path, cases, name):
    case = cases[name]
    (tmp_path / "m.json").write_text(json.dumps(case["messages"]))
    options = ["--messages", tmp_path / "m.json", "--effort", case["effort"] if case["thinking"] else "none"]
    if case.get("tools"):
        (tmp_path / "t.json").write_text(json.dumps(case["tools"]))
        options += ["--tools", tmp_path / "t.json"]
    if case.get("response_format"):
        options += ["--response-format", "json_object"]
    done = df("df-run", "demo", "--chat", *options, "--json")
    found = done.json
    assert found["prompt_ids"] == case["prompt_ids"]
    assert found["ids"] == case["ids"]
    if "call" in name:
        assert found["finish"] == "tool_calls" and found["tool_calls"]
        shown = [json.loads(line) for line in df("df-run", "demo", "--chat", *options).out.splitlines() if line]
        calls = [{"tool": c["name"], "arguments": json.loads(c["arguments"])} for c in found["tool_calls"]]
        assert [line for line in shown if "tool" in line] == calls


def test_a_conversation_from_a_pipe_remembers(ask):
    lines = f'{JAPAN}\n"""\nSpell the word:\ntea\n"""\nWhat is 2 \\\n+ 3?\n/clear\n{JAPAN}\n/exit\nnever read\n'
    done = ask(None, stdin=lines.encode())
    assert done.status == 0
    answers = done.out.splitlines()
    assert answers[0] == answers[-1] == TOKYO.rstrip()
    assert len(answers) == 4


def test_each_turn_is_what_the_whole_conversation_would_give(ask, tmp_path):
    """With the answers' own ids kept, and no prefix computed twice."""
    first, second = ask(None, stdin=f"{JAPAN}\nAnd of Italy?\n".encode()).out.splitlines()
    messages = [
        {"role": "user", "content": JAPAN},
        {"role": "assistant", "content": first},
        {"role": "user", "content": "And of Italy?"},
    ]
    (tmp_path / "m.json").write_text(json.dumps(messages))
    options = ("--messages", tmp_path / "m.json", "--keep-states", "0")
    assert ask(None, *options).out == second + "\n"


def test_a_long_message_that_is_typed_takes_one_pass(ask):
    lines = f"{'one two three ' * 100}\n".encode()
    done = ask(None, "--max-new", 2, "--draft", "none", "--keep-states", 0, "--stats", stdin=lines)
    assert "passes    2, " in done.err


def test_torch_guesses_only_if_it_is_asked_to(tiny_dir, tmp_path):
    """It has no times that say what pays, and promises no bits."""
    with open_store(str(tiny_dir), cache_dir=tmp_path) as store:
        for device, asked, depth in (("cpu", False, 4), ("torch", False, 0), ("cuda", False, 0), ("torch", True, 4)):
            assert Choosing(Sampling(), (), depth=4, asked=asked).beside(store, device).depth == depth


def test_a_stop_string_ends_the_answer_before_it(ask):
    done = ask(JAPAN, "--stop", " is")
    assert (done.out, done.err) == ("The capital of Japan\n", "")
    found = ask(JAPAN, "--stop", " is", "--json").json
    assert (found["text"], found["finish"]) == ("The capital of Japan", "stop")


def test_an_answer_that_is_too_long_is_cut_and_that_is_said(ask):
    done = ask(JAPAN, "--max-new", 3)
    assert done.status == 0 and TOKYO.startswith(done.out.rstrip("\n"))
    assert done.err == "df-run: cut after --max-new 3 tokens\n"


def test_a_restart_computes_only_what_is_new(ask, tmp_path):
    """The system prompt from one question, and the conversation from another, without a word about states."""
    system = ("--system", "You are a helpful assistant.", "--draft", "none")  # guesses are rows, too
    expected = ask(JAPAN, *system, "--json", "--keep-states", "0").json
    ask("Hello!", *system)
    files = list((tmp_path / "cache" / "states").rglob("*.state"))
    assert len(files) == 2 and all(f.stat().st_mode & 0o777 == 0o600 for f in files)
    again = ask(JAPAN, *system, "--json").json
    assert again["ids"] == expected["ids"]
    assert again["prompt_ids"] == expected["prompt_ids"]
    computed = again["seconds"]["rows"] - (len(again["ids"]) - 1)
    assert computed < len(expected["prompt_ids"]) - 10, "the system prompt was not computed again"

    (tmp_path / "m.json").write_text(
        json.dumps([
            {"role": "user", "content": JAPAN}, {"role": "assistant", "content": expected["text"]},
            {"role": "user", "content": "Thanks!"},
        ])
    )  # fmt: skip
    on = ask(None, *system, "--messages", tmp_path / "m.json", "--stats", "--json")
    assert "tokens restored, 1 kept" in on.err
    alone = ask(None, *system, "--messages", tmp_path / "m.json", "--json", "--keep-states", "0").json
    assert on.json["ids"] == alone["ids"]
    assert on.json["seconds"]["rows"] < alone["seconds"]["rows"] - len(expected["prompt_ids"]) + 2


def test_a_damaged_state_is_computed_again_and_that_is_said(ask, tmp_path):
    system = ("--system", "You are a helpful assistant.")
    expected = ask(JAPAN, *system)
    for file in (tmp_path / "cache" / "states").rglob("*.state"):
        raw = bytearray(file.read_bytes())
        raw[len(raw) // 2] ^= 4
        file.write_bytes(raw)
    again = ask(JAPAN, *system)
    assert (again.status, again.out) == (0, expected.out)
    assert "digest" in again.err and again.err.count("\n") == 1


def test_a_saved_conversation_goes_on(ask, df, tmp_path):
    whole = ask(None, "--keep-states", 0, stdin=f"{JAPAN}\nAnd of Italy?\n".encode()).out.splitlines()
    file = tmp_path / "talk.state"
    ask(JAPAN, "--save-state", file, "--keep-states", "0")
    on = ask("And of Italy?", "--load-state", file, "--keep-states", "0")
    assert (on.status, on.out, on.err) == (0, whole[1] + "\n", "")
    again = df("df-run", "demo", "--chat", "--prompt", "And of Italy?", "--load-state", file, "--keep-states", "0")
    assert (again.out, again.err) == (on.out, ""), "it thinks as little as before, unasked"
    for option in (("--system", "x"), ("--effort", "low")):
        _refused(ask("And?", "--load-state", file, *option), "has its own")
    df("df-run", "demo", "--prompt", "The capital", "--max-new", 2, "--save-state", file)
    _refused(ask("And?", "--load-state", file), "not of a chat")


def test_saved_texts_go_on_as_if_they_had_never_stopped(df, tmp_path):
    file = tmp_path / "state"
    for how in ((), ("--temperature", "0.8", "--seed", "5"), ("--draft", "none")):

        def text(*options, how=how):
            done = df("df-run", "demo", *how, *options)
            assert (done.status, done.err) == (0, "")
            return done.out.removesuffix("\n")

        whole = text("--prompt", "One, two, three", "--max-new", 24)
        first = text("--prompt", "One, two, three", "--max-new", 9, "--save-state", file)
        second = text("--load-state", file, "--max-new", 15)
        assert first + second == whole
    _refused(df("df-run", "demo", "--load-state", tmp_path / "none", "--max-new", 1), "no such state", status=1)
    file.write_bytes(file.read_bytes()[:-100])
    _refused(df("df-run", "demo", "--load-state", file, "--max-new", 1), status=1)


def test_a_run_that_fails_before_its_first_token_says_why_and_saves_nothing(df, tmp_path, monkeypatch):
    def forward(*_args, **_keywords):
        raise NetworkError("no network")

    monkeypatch.setattr("deltafin.runtime.Model.forward", forward)
    for how in ((), ("--chat",)):
        done = df("df-run", "demo", "--prompt", "One, two", *how, "--save-state", tmp_path / "state")
        assert (done.status, done.err) == (1, "df-run: no network\n")
        assert not (tmp_path / "state").exists()


@pytest.fixture
def at_pass(monkeypatch):
    """`at_pass(n, error)` raises the error when the prompt of an answer is in its n-th pass."""

    def arrange(number, error):
        rows = Watch.rows

        def interrupted(self, spans):
            rows(self, spans)
            if self._pass == number:
                raise error

        monkeypatch.setattr(Watch, "rows", interrupted)

    return arrange


def test_what_is_saved_after_a_stopped_question_is_the_conversation_before_it(ask, at_pass, tmp_path, monkeypatch):
    """The sequence had read on, and its state was written: no chat could go on from that."""
    file = tmp_path / "talk.state"
    story = "Tell me a story about a fox. " * 30
    asked = f"{JAPAN}\n{story}\n{JAPAN}\n".encode()  # from a pipe, Ctrl-C ends it all
    whole = ask(None, "--keep-states", 0, stdin=f"{JAPAN}\nAnd of Italy?\n".encode()).out.splitlines()
    monkeypatch.setattr(signal, "signal", lambda *_: None)  # an interrupted command leaves a handler for its ending
    monkeypatch.setattr("deltafin.runtime.Model.most_rows", property(lambda _: 10))  # so that a story takes many passes
    at_pass(12, KeyboardInterrupt())
    done = ask(None, "--save-state", file, stdin=asked)
    assert (done.status, done.out) == (130, TOKYO) and "interrupted" in done.err
    assert ask("And of Italy?", "--load-state", file).out == whole[1] + "\n"
    file.unlink()
    done = ask(None, "--keep-states", 0, "--save-state", file, stdin=asked)
    assert (done.status, done.out) == (130, TOKYO) and "not written" in done.err and not file.exists()
    # Nor is there anything to save where the first question was stopped.
    done = ask(None, "--save-state", file, stdin=story.encode())
    assert (done.status, done.out, file.exists()) == (130, "", False) and "interrupted" in done.err


def test_where_nothing_was_said_nothing_is_saved_and_that_is_said(ask, tmp_path):
    for lines in ("", f"{JAPAN}\n/clear\n"):
        done = ask(None, "--save-state", tmp_path / "talk.state", stdin=lines.encode())
        assert done.status == 0 and done.err == f"df-run: nothing was said, so {tmp_path}/talk.state is not written\n"
        assert not (tmp_path / "talk.state").exists()


def test_an_answer_that_fails_is_kept_as_far_as_it_came(ask, tmp_path, monkeypatch):
    took = Answering._took

    def fails(self, chosen):
        took(self, chosen)
        if len(self.outcome.chosen) == 6:
            raise NetworkError("the line is down")

    file = tmp_path / "talk.state"
    with monkeypatch.context() as patch:
        patch.setattr(Answering, "_took", fails)
        done = ask("Tell me a story about a fox.", "--save-state", file, "--keep-states", 0, "--draft", "none")
    assert (done.status, done.err) == (1, "df-run: the line is down\n") and done.out.startswith("Once upon")
    on = ask(JAPAN, "--load-state", file, "--keep-states", 0)
    assert (on.status, on.err) == (0, "") and "Tokyo" in on.out


def test_ctrl_c_before_anything_was_computed_saves_nothing(df, at_pass, tmp_path, monkeypatch):
    monkeypatch.setattr(signal, "signal", lambda *_: None)  # an interrupted command leaves a handler for its ending
    at_pass(1, KeyboardInterrupt())
    done = df("df-run", "demo", "--prompt", "Once", "--save-state", tmp_path / "state")
    assert (done.status, done.out) == (130, "") and "interrupted" in done.err and "nothing to save" not in done.err
    assert not (tmp_path / "state").exists()


@pytest.mark.parametrize("kind", ["pipe", "long", "below a file", "torch"])
def test_a_state_that_cannot_be_saved_is_refused_before_anything_is_computed(df, tmp_path, kind):
    (tmp_path / "file").touch()
    os.mkfifo(tmp_path / "pipe")
    place = {"long": "a" * 300, "below a file": "file/state", "torch": "state"}.get(kind, kind)
    for chat in ((), ("--chat",)):
        device = ("--device", "torch") if kind == "torch" else ()
        done = df("df-run", "demo", *chat, "--prompt", "Hello!", "--save-state", tmp_path / place, *device)
        assert done.status in (1, 2) and (done.out, done.err.count("\n")) == ("", 1)
    assert sorted(os.listdir(tmp_path)) == ["cache", "file", "pipe"]


@pytest.mark.parametrize("text", [f'"""\n{JAPAN}', f"{JAPAN}\\", "What is the \\\ncapital of Japan?\\"])
def test_the_end_of_a_pipe_ends_a_message_of_several_lines(ask, text):
    done = ask(None, stdin=text.encode())
    assert (done.status, done.err) == (0, "") and done.out.strip()


def test_a_message_that_is_not_utf8_is_refused_in_any_locale(command):
    for locale in ("utf-8:strict", "ascii"):
        words = ("demo", "--chat", "--effort", "none")
        done = command(
            "df-run", *words, input="caf\udce9\n", errors="surrogateescape", env={"PYTHONIOENCODING": locale}
        )
        assert (done.returncode, done.stdout) == (2, "")
        assert done.stderr == "df-run: 'caf' is followed by a byte that is not UTF-8\n"


def test_what_begins_with_a_slash_is_a_command_or_refused_unless_quoted(ask):
    done = ask(None, stdin=b"/usr/bin/env is what?\nHello!\n")
    _refused(done, "'/usr/bin/env is what?' is no command", "/help")
    _refused(ask(None, stdin=b"/save\n"), "'/save' is no command")
    done = ask(None, stdin=b'"""\n/usr/bin/env is what?\n"""\n')
    assert (done.status, done.err) == (0, "") and done.out.strip()


def test_save_knows_the_home_folder_and_refuses_impossible_names(ask, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    done = ask(None, stdin=b"Hello!\n/save ~/talk.state\n")
    assert done.status == 0 and (tmp_path / "home" / "talk.state").is_file() and not (tmp_path / "~").exists()
    for name, status in (("a\0b", 2), ("a" * 300, 1)):
        done = ask(None, stdin=f"Hello!\n/save {name}\n".encode())
        assert done.status == status and done.err.count("\n") == 1 and done.err.startswith("df-run: ")


def test_a_seed_gives_the_same_text_and_guesses_change_nothing(df):
    prompt = ("--prompt", "one two three one two three one two", "--max-new", 20, "--json", "--logprobs", 2)
    for how in ((), ("--temperature", "1.0", "--seed", "11", "--top-p", "0.9")):
        with_, without = (df("df-run", "demo", *prompt, *how, "--draft", d).json for d in ("ngram", "none"))
        assert without["drafted"] == 0
        if not how:
            assert with_["accepted"] > 0 and with_["passes"] == without["passes"] - with_["accepted"]
        for key in ("ids", "text", "logprobs", "finish"):
            assert with_[key] == without[key]
        assert len(without["logprobs"]) == len(without["ids"]) and len(without["logprobs"][0]["top"]) == 2


def test_draws_without_a_seed_say_theirs(df):
    prompt = ("--prompt", "Once", "--max-new", 8, "--temperature", "1.5")
    done = df("df-run", "demo", *prompt)
    assert done.err.startswith("df-run: --seed ") and done.err.count("\n") == 1
    again = df("df-run", "demo", *prompt, "--seed", done.err.split()[-1])
    assert (again.out, again.err) == (done.out, "")


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        (["--prompt-ids", "1"], ["--prompt-ids", "with --chat"]),
        (["--prompt", "a", "--ids"], ["--ids", "with --chat"]),
        (["--prompt", " "], ["the question is empty"]),
        (["--json"], ["--json needs a question"]),
        (["--prompt", "a", "--tools", "{no}"], ["--tools", "cannot be read"]),
        (["--prompt", "a", "--messages", "{bad}"], ["--messages", "messages[0].role"]),
        (["--prompt", "a", "--tools", "{bad_json}"], ["--tools", "not JSON"]),
        (["--prompt", "a", "--stop", ""], ["a stop string is empty"]),
        (["--prompt", "a", "--seed", "1"], ["--seed has no effect"]),
        (["--prompt", "a", "--tool-choice", "required"], ["--tool-choice has no effect without --tools"]),
        (["--prompt", "a", "--temperature", "-1"], ["temperature"]),
        (["--prompt", "a", "--logit-bias", "x"], ["--logit-bias"]),
        (["--prompt", "a", "--logit-bias", "99999999=1"], ["outside the vocabulary"]),
        (["--prompt", "a", "--logit-bias", "5=1", "--logit-bias", "5=2"], ["--logit-bias", "twice for 5"]),
        (["--prompt", "a", "--logprobs", "1"], ["--logprobs has no effect without --json"]),
        (["--prompt", "a", "--draft", "none", "--draft-depth", "2"], ["--draft-depth has no effect"]),
        (["--prompt", "a", "--draft", "ngram", "--trace", "{no}"], ["exclude each other"]),
        (["--prompt", "a", "--keep-states", "1GB", "--device", "torch"], ["states"]),
    ],
)
def test_what_makes_no_sense_is_one_line(df, tmp_path, options, parts):
    (tmp_path / "bad").write_text('[{"role": "king"}]')
    (tmp_path / "json").write_text("{")
    files = {"no": tmp_path / "no" / "no", "bad": tmp_path / "bad", "bad_json": tmp_path / "json"}
    done = df("df-run", "demo", "--chat", *(o.format(**files) if o.startswith("{") else o for o in options))
    _refused(done, *parts, status=1 if "cannot be read" in parts else 2)


@pytest.mark.parametrize("option", ["--system", "--effort", "--tool-choice", "--keep-states"])
def test_options_of_a_chat_are_refused_without_one(df, option):
    value = {"--effort": "low", "--tool-choice": "auto", "--keep-states": "1GB"}.get(option, "x")
    _refused(df("df-run", "demo", "--prompt", "a", option, value), option, "without --chat")


def test_a_model_without_a_tokenizer_cannot_chat(df, tiny_dir):
    _refused(df("df-run", tiny_dir, "--chat", "--prompt", "a"), "no tokenizer")


class Terminal:
    """df-run --chat on a terminal."""

    def __init__(self, cache: Path, *options: str) -> None:
        self._ours, theirs = pty.openpty()
        words = [Path(sys.executable).with_name("df-run"), "demo", "--chat", "--draft", "none", *options]
        env = {**os.environ, "DELTAFIN_CACHE": str(cache), "TERM": "dumb"}
        self.process = subprocess.Popen(
            words, stdin=theirs, stdout=theirs, stderr=theirs, env=env, start_new_session=True
        )
        os.close(theirs)
        self.seen = ""

    def until(self, text: str) -> None:
        end = time.monotonic() + 60
        while text not in self.seen:
            assert time.monotonic() < end and self.process.poll() is None, self.seen
            if select.select([self._ours], [], [], 0.1)[0]:
                self.seen += os.read(self._ours, 65536).decode(errors="replace")

    def type(self, text: str) -> None:
        self.seen = ""
        os.write(self._ours, text.encode())

    def interrupt(self) -> None:
        os.kill(self.process.pid, signal.SIGINT)

    def status(self) -> int:
        end = time.monotonic() + 30
        while self.process.poll() is None and time.monotonic() < end:
            if select.select([self._ours], [], [], 0.1)[0]:
                try:
                    self.seen += os.read(self._ours, 65536).decode(errors="replace")
                except OSError:
                    break
        return self.process.wait(timeout=30)


@pytest.fixture
def terminal(tmp_path):
    opened = []

    def open_(*options):
        opened.append(Terminal(tmp_path / "cache", *options))
        return opened[-1]

    yield open_
    for one in opened:
        one.process.kill()
        one.process.wait()


def test_ctrl_c_stops_the_answer_and_keeps_the_conversation(terminal):
    chat = terminal("--effort", "none")
    chat.until("> ")
    chat.type("Tell me a story about a fox.\n")
    chat.until("a little")  # stories of the demo go on for a while
    chat.interrupt()
    chat.until("> ")
    assert chat.process.poll() is None
    chat.type(f"{JAPAN}\n")
    chat.until(TOKYO.strip())
    chat.until("\n> ")
    chat.type("/exit\n")
    assert chat.status() == 0
    assert "Traceback" not in chat.seen


def test_ctrl_c_twice_at_the_prompt_leaves_with_130(terminal):
    chat = terminal("--effort", "none")
    chat.until("> ")
    time.sleep(0.2)  # a signal between the prompt and the wait for a key is seen with the next key only
    chat.interrupt()
    chat.until("leaves)\r\n> ")
    time.sleep(0.2)
    chat.interrupt()
    assert chat.status() == 130
    assert "Traceback" not in chat.seen


def test_a_message_that_cannot_be_asked_does_not_stay(terminal):
    """It stayed in the conversation, and each question after it failed with it."""
    chat = terminal("--effort", "none")
    chat.until("> ")
    os.write(chat._ours, b"caf\xe9\xff\n")
    chat.until("not UTF-8\r\n> ")
    chat.type(f"{JAPAN}\n")
    chat.until(TOKYO.strip())
    chat.type("/exit\n")
    assert chat.status() == 0


def test_thinking_is_dim_on_a_terminal(terminal):
    chat = terminal("--effort", "low")
    chat.until("> ")
    chat.type(f"{JAPAN}\n")
    chat.until(TOKYO.strip())
    assert "\x1b[2m" in chat.seen and chat.seen.index("\x1b[2m") < chat.seen.index("\x1b[0m")
    assert chat.seen.index("\x1b[0m") < chat.seen.index(TOKYO.strip())
    chat.until("\n> ")
    chat.type("\x04")
    assert chat.status() == 0


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        ('{"a": "\\ud800"}', {"a": "\ud800"}),
        ('{"a": NaN}', '{"a": NaN}'),
        ('{"a": 1e999}', '{"a": 1e999}'),
        ('{"a": ', '{"a": '),
        ("[" * 100_000, "[" * 100_000),
        ("", {}),
    ],
)
def test_whatever_a_model_writes_a_call_is_a_line_of_json(capfd, arguments, shown):
    ChatScreen(quiet=False, hide_thinking=False).tool_call(ToolCall("f\x1b", arguments))
    out = capfd.readouterr().out
    assert out.count("\n") == 1 and json.loads(out) == {"tool": "f\x1b", "arguments": shown}


def test_results_of_several_calls_are_asked_for_one_by_one(terminal, cases, tmp_path):
    case = cases["two tool calls"]
    (tmp_path / "t.json").write_text(json.dumps(case["tools"]))
    chat = terminal("--effort", "none", "--tools", str(tmp_path / "t.json"))
    chat.until("> ")
    chat.type(case["messages"][-1]["content"] + "\n")
    chat.until("result of get_weather (1 of 2)> ")
    chat.type("5 degrees\n")
    chat.until("result of get_weather (2 of 2)> ")
    chat.type("12 degrees\n")
    chat.until("\n> ")
    chat.type("/exit\n")
    assert chat.status() == 0
