"""df-run --chat: one question, or a conversation."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import click

from deltafin.cli.chat_input import BLOCK, Leave, MessageReader
from deltafin.cli.chat_options import ChatOptions
from deltafin.cli.chat_screen import ChatScreen
from deltafin.cli.lines import one_line
from deltafin.cli.options import print_json
from deltafin.cli.prompts import json_file
from deltafin.cli.run_settings import RunSettings, saving_at_the_end
from deltafin.cli.run_stats import print_stats, run_as_json
from deltafin.errors import BadRequest, DeltafinError
from deltafin.runtime.chat import Conversation, Dialogue, SystemMessage, UserMessage, from_openai, thinking_of, tools_of

if TYPE_CHECKING:
    from deltafin.cli.choosing import Choosing
    from deltafin.cli.talk import Talk
    from deltafin.runtime import Model, Tokenizer
    from deltafin.runtime.chat import Answer, Message

T = TypeVar("T")

HELP = """\
/help            this
/clear           begin a new conversation
/effort E        think none, low, high or max in a new conversation
/save F          write the conversation's state to F, for --load-state
/exit            leave; so does Ctrl-D

A line that ends with \\ goes on in the next one; lines between two lines of \"\"\" are one message.
Ctrl-C stops an answer and keeps the conversation."""


class ChatJob:
    """A conversation's beginning, and the question if there is one."""

    def __init__(
        self, settings: RunSettings, talk: ChatOptions, text: str | None, *, prompt_ids: str | None, as_ids: bool
    ) -> None:
        for name, there in (("--prompt-ids", prompt_ids is not None), ("--ids", as_ids)):
            if there:
                raise BadRequest(f"{name} has no effect with --chat")
        if text is not None and not text.strip():
            raise BadRequest("the question is empty")
        self._settings, self._options = settings, talk
        self._conversation = _resumed(talk) if settings.states.load_state else _conversation(talk)
        if text is not None:
            self._conversation = replace(self._conversation, messages=(*self._conversation.messages, UserMessage(text)))
        # Whether something is to be answered before anybody is asked.
        self._asked = bool(self._conversation.messages) and not isinstance(
            self._conversation.messages[-1], SystemMessage
        )
        if settings.as_json and not self._asked:
            raise BadRequest("--json needs a question: give one with --prompt, --prompt-file, --messages or -")

    def read(self, tokenizer: Tokenizer | None) -> int:
        """How many tokens the first prompt has; of one that is still to be typed, for how many a pass is made."""
        from deltafin.runtime import Want

        if tokenizer is None:
            raise BadRequest("this model has no tokenizer, so it cannot chat; give --prompt-ids without --chat")
        rows = len(Dialogue(tokenizer, self._conversation).prompt())
        return rows if self._asked else max(rows, Want().rows)

    def run(self, engine: Model, how: Choosing) -> None:
        from deltafin.cli.talk import Talk

        settings = self._settings
        screen = ChatScreen(quiet=settings.as_json, hide_thinking=self._options.hide_thinking)
        with (
            Talk(engine, self._conversation, how, settings, screen, as_before=self._options.effort is None) as talk,
            saving_at_the_end(lambda path: _save(talk, path), settings.states),
        ):
            self._talk(engine, talk, how)
            if settings.states.save_state is not None and not talk.started:
                click.echo(f"df-run: nothing was said, so {settings.states.save_state} is not written", err=True)
        if settings.stats:
            print_stats(engine, talk.given, talk.outcome, None, talk.lines())

    def _talk(self, engine: Model, talk: Talk, how: Choosing) -> None:
        if not self._asked:
            self._converse(engine, talk)
            return
        answer = talk.ask()
        if answer is None:
            raise KeyboardInterrupt
        if self._settings.as_json:
            print_json({**run_as_json(engine, talk.prompt, talk.outcome, how.sampling), **_json(answer)})

    def _converse(self, engine: Model, talk: Talk) -> None:
        reader = MessageReader()
        if reader.terminal:
            click.echo(f"{engine.store.model}: /help says what else can be typed; Ctrl-D leaves", err=True)
        effort = self._options.effort
        while True:
            try:
                message = reader.message()
                if message.startswith("/") and not reader.quoted:
                    effort = self._command(talk, reader, message, effort)
                elif message.strip():
                    _turns(talk, reader, UserMessage(message))
            except Leave:
                return
            except DeltafinError as e:
                if not reader.terminal:
                    raise
                click.echo(f"df-run: {one_line(str(e))}", err=True)

    def _command(self, talk: Talk, reader: MessageReader, line: str, effort: str | None) -> str | None:
        """Does what a line that begins with / says; returns the effort of conversations to come."""
        name, _, argument = line.strip().partition(" ")
        argument = argument.strip()
        if name in ("/exit", "/quit"):
            raise Leave
        if name == "/save" and argument:
            path = Path(os.path.expanduser(argument))
            click.echo(f"{talk.save(path):,} bytes written to {path}", err=True)
        elif name == "/effort" and argument:
            thinking_of(argument, "effort")
            effort = argument
            self._restart(talk, reader, effort)
        elif name == "/clear" and not argument:
            self._restart(talk, reader, effort)
        elif name == "/help":
            click.echo(HELP, err=True)
        else:
            raise BadRequest(
                f"{line.strip()[:60]!r} is no command; /help lists them, and a message that begins with / goes "
                f"between two lines of {BLOCK}"
            )
        return effort

    def _restart(self, talk: Talk, reader: MessageReader, effort: str | None) -> None:
        talk.restart(_conversation(self._options, effort))
        if reader.terminal:
            click.echo("(a new conversation)", err=True)


def _turns(talk: Talk, reader: MessageReader, message: Message) -> None:
    """An answer, and if it calls tools, those that follow the results that are typed in."""
    from deltafin.runtime.chat import ToolResult

    answer = talk.ask(message)
    while answer is not None and answer.tool_calls:
        calls = answer.tool_calls
        results = []
        for number, call in enumerate(calls, start=1):
            which = f" ({number} of {len(calls)})" if len(calls) > 1 else ""
            # The model wrote the name, and a terminal would obey it.
            result = reader.message(f"result of {one_line(call.name)}{which}> ")
            results.append(ToolResult(result, call.id, call.name))
        answer = talk.ask(*results)
    if answer is not None:
        return
    if not reader.terminal:
        raise KeyboardInterrupt  # nobody sits there who would say more
    if not talk.outcome.chosen:
        click.echo("\n(stopped before the answer began; what was asked is not kept)", err=True)


def _save(talk: Talk, path: Path) -> None:
    """What was said up to the last answer, if anything."""
    if talk.started:
        talk.save(path)


def _json(answer: Answer) -> dict[str, object]:
    calls = [{"id": c.id, "name": c.name, "arguments": c.arguments} for c in answer.tool_calls]
    return {
        "text": answer.content,
        "reasoning": answer.reasoning,
        "tool_calls": calls,
        "finish": answer.finish,
        "stopped": answer.finish != "length",
    }


def _conversation(talk: ChatOptions, effort: str | None = None) -> Conversation:
    """What the options say. Raises BadRequest or NotFound, which names the option."""
    thinking, said = thinking_of(effort or talk.effort, "--effort")
    messages: list[Message] = [] if talk.system is None else [SystemMessage(talk.system)]
    if talk.messages is not None:
        messages += _from_file(talk.messages, "--messages", from_openai)
    tools = () if talk.tools is None else _from_file(talk.tools, "--tools", tools_of)
    if (
        talk.tool_choice is not None
        and not tools
        and not any(isinstance(m, SystemMessage) and m.tools for m in messages)
    ):
        raise BadRequest("--tool-choice has no effect without --tools")
    wanted = None if talk.response_format is None else _response_format(talk.response_format)
    return Conversation(messages, tools, thinking, said, talk.tool_choice, wanted)


def _resumed(talk: ChatOptions) -> Conversation:
    """Of a saved conversation nothing has to be said again; only whether the next answer thinks."""
    said = {
        "--system": talk.system, "--messages": talk.messages, "--tools": talk.tools,
        "--effort": None if talk.effort == "none" else talk.effort,
    }  # fmt: skip
    for name, value in said.items():
        if value is not None:
            raise BadRequest(f"{name} has no effect with --load-state: the saved conversation has its own")
    wanted = None if talk.response_format is None else _response_format(talk.response_format)
    return Conversation((), (), talk.effort != "none", None, talk.tool_choice, wanted)


def _from_file(path: Path, option: str, read: Callable[[object], tuple[T, ...]]) -> tuple[T, ...]:
    value = json_file(path, option)
    try:
        return read(value)
    except BadRequest as e:
        raise BadRequest(f"{option} {path}: {e}") from None


def _response_format(given: str) -> str | dict[str, object]:
    if given in ("text", "json_object"):
        return given
    return {"type": "json_schema", "json_schema": {"schema": json_file(Path(given), "--response-format")}}
