"""A body of /v1/chat/completions: a conversation that the model answers in its own chat format."""

from __future__ import annotations

import re
from collections.abc import Mapping

from deltafin.errors import BadRequest
from deltafin.runtime.chat import Conversation, JsonObject, from_openai, prompt, tools_of
from deltafin.runtime.openai.decoding import MOST_TOP_LOGPROBS, fitting_max_new, read_decoding
from deltafin.runtime.openai.errors import BadBody
from deltafin.runtime.openai.fields import Fields
from deltafin.runtime.openai.task import CHAT, AnswerFormat, Serving, Task

EFFORTS = ("none", "low", "high", "max")
DEFAULT_EFFORT = "max"  # the model's own
_PATH = re.compile(r"[a-z_]+[a-z_0-9.\[\]]*", re.ASCII)


def read_chat(body: object, serving: Serving, *, seed: int = 0) -> Task:
    """The task of a body. `seed` is what draws go by if the body gives none. Raises BadBody."""
    fields = Fields(body)
    fields.only("modalities", [["text"]], "answers are text; leave it out")
    fields.only("verbosity", ["medium"], "the model has no such setting; leave it out")
    fields.only("parallel_tool_calls", [True], "the model may always call several tools; leave it out")
    decoding = read_decoding(fields, serving, seed=seed, top_logprobs=_top_logprobs(fields, serving))
    conversation = _conversation(fields)
    fields.finish()
    try:
        written = prompt(conversation, serving.tokenizer)
    except BadRequest as e:
        raise _named(e, "messages") from None
    return Task(
        endpoint=CHAT,
        ids=written.ids,
        shared=written.preamble,
        sampling=decoding.sampling,
        max_new=fitting_max_new(fields, serving, decoding.max_new, len(written.ids)),
        stops=decoding.stops,
        thinking=conversation.thinking,
        answer_format=_answer_format(conversation),
        returns_ids=decoding.returns_ids,
        stream=decoding.stream,
        stream_usage=decoding.stream_usage,
        stream_progress=decoding.stream_progress,
        model=decoding.model,
    )


def _top_logprobs(fields: Fields, serving: Serving) -> int | None:
    asked = fields.boolean("logprobs") or False
    top = fields.integer("top_logprobs", 0, min(MOST_TOP_LOGPROBS, serving.vocab_size))
    if top is not None and not asked:
        raise BadBody("top_logprobs has no effect without logprobs: true", "top_logprobs")
    return (top or 0) if asked else None


def _conversation(fields: Fields) -> Conversation:
    thinking, effort = _effort(fields)
    if not fields.array("messages"):
        raise BadBody("messages is missing or empty; expected at least one message", "messages")
    try:
        return Conversation(
            messages=from_openai(fields.value("messages")),
            tools=_tools(fields),
            thinking=thinking,
            effort=effort,
            tool_choice=_tool_choice(fields),
            response_format=_response_format(fields),
        )
    except BadBody:
        raise
    except BadRequest as e:
        raise _named(e, "messages") from None


def _effort(fields: Fields) -> tuple[bool, str | None]:
    """Whether the model is to reason, and how much. Two names for it are in use; they must agree."""
    effort = fields.choice("reasoning_effort", EFFORTS)
    switch = fields.inner("thinking")
    if switch is not None:
        kind = switch.choice("type", ("enabled", "disabled"))
        if kind is None:
            raise switch.wrong("type", '"enabled" or "disabled"')
        switch.finish()
        if effort is not None and (effort == "none") != (kind == "disabled"):
            raise BadBody(f'reasoning_effort is "{effort}" and thinking {kind}; give one of them', "thinking")
        effort = effort or ("none" if kind == "disabled" else None)
    return (False, None) if effort == "none" else (True, effort or DEFAULT_EFFORT)


def _tools(fields: Fields) -> tuple[JsonObject, ...]:
    """Declarations as they were given; the format shows them to the model whole."""
    for number, declared in enumerate(fields.array("tools") or ()):
        tool = Fields(declared, f"{fields.path('tools')}[{number}]")
        if tool.text("type") != "function":
            raise tool.wrong("type", '"function"')
        function = tool.inner("function")
        if function is None:
            raise tool.wrong("function", "an object that declares it")
        if not function.text("name"):
            raise function.wrong("name", "the name of a function")
        function.text("description")
        function.inner("parameters")
        _only_unconstrained(function)
    return tools_of(fields.value("tools"))


def _tool_choice(fields: Fields) -> str | None:
    value = fields.value("tool_choice")
    if isinstance(value, dict):
        path = fields.path("tool_choice")
        raise BadBody(
            f'{path}: a certain tool cannot be forced; declare only that one and ask for "required"',
            path,
            "unsupported_value",
        )
    choice = fields.choice("tool_choice", ("none", "auto", "required"))
    if choice == "required" and not fields.array("tools"):
        raise BadBody('tool_choice is "required", but there are no tools', fields.path("tool_choice"))
    return choice


def _response_format(fields: Fields) -> JsonObject | None:
    """What the format has a message for. The model is told; nothing forces it."""
    wanted = fields.inner("response_format")
    if wanted is None:
        return None
    kind = wanted.choice("type", ("text", "json_object", "json_schema"))
    if kind is None:
        raise wanted.wrong("type", '"text", "json_object" or "json_schema"')
    schema = wanted.inner("json_schema")
    wanted.finish()
    if kind == "json_schema":
        if schema is None:
            raise wanted.wrong("json_schema", "an object with a schema")
        if schema.inner("schema") is None:
            raise schema.wrong("schema", "a JSON schema")
        _only_unconstrained(schema)
        schema.ignore("name", "description")
        schema.finish()
    elif schema is not None:
        raise BadBody(f'{wanted.path("json_schema")} has no effect with type "{kind}"', wanted.path("json_schema"))
    return wanted.all()


def _answer_format(conversation: Conversation) -> AnswerFormat:
    wanted = conversation.response_format
    match wanted.get("type") if isinstance(wanted, Mapping) else wanted:
        case "json_object":
            return "json_object"
        case "json_schema":
            return "json_schema"
        case _:
            return "text"


def _only_unconstrained(declared: Fields) -> None:
    declared.only("strict", [False], "what the model writes is not forced to fit a schema; leave it out")


def _named(error: BadRequest, otherwise: str) -> BadBody:
    """An error of the chat format, whose message begins with the path of the field."""
    found = _PATH.match(str(error))
    path = (
        found[0] if found is not None and found[0].startswith(("messages", "tools", "response_format")) else otherwise
    )
    return BadBody(str(error), path)
