"""Options of a chat."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import click

from deltafin.cli.options import gathered, options
from deltafin.cli.run_settings import StateOptions
from deltafin.errors import BadRequest

_options = options(
    click.option("--system", metavar="TEXT", help="The system prompt of a chat."),
    click.option(
        "--messages",
        type=click.Path(path_type=Path),
        metavar="F",
        help="Begin with these messages (JSON, as OpenAI's API).",
    ),
    click.option(
        "--tools",
        type=click.Path(path_type=Path),
        metavar="F",
        help="Tools that may be called (JSON, as OpenAI's API).",
    ),
    click.option(
        "--tool-choice", type=click.Choice(["auto", "none", "required"]), help="Whether tools must be called."
    ),
    click.option(
        "--response-format", metavar="F", help="json_object, or a JSON file with the schema that the answer must match."
    ),
    click.option(
        "--effort", type=click.Choice(["none", "low", "high", "max"]), help="How much to think (default: max)."
    ),
    click.option("--hide-thinking", is_flag=True, help="Show the answer without the reasoning before it."),
)


@dataclass(frozen=True, slots=True)
class ChatOptions:
    """As they were given."""

    system: str | None
    messages: Path | None
    tools: Path | None
    tool_choice: str | None
    response_format: str | None
    effort: str | None
    hide_thinking: bool


def chat_options(command: Callable[..., None]) -> Callable[..., None]:
    """Adds the options; the command takes them as one argument `talk`."""
    return _options(gathered("talk", ChatOptions)(command))


def refuse_chat_options(talk: ChatOptions, states: StateOptions) -> None:
    """Raises BadRequest for the first that has no effect on a text that is only continued."""
    given = {
        "--system": talk.system is not None,
        "--messages": talk.messages is not None,
        "--tools": talk.tools is not None,
        "--tool-choice": talk.tool_choice is not None,
        "--response-format": talk.response_format is not None,
        "--effort": talk.effort is not None,
        "--hide-thinking": talk.hide_thinking,
        "--keep-states": states.keep_states is not None,
    }
    for name, there in given.items():
        if there:
            raise BadRequest(f"{name} has no effect without --chat")
