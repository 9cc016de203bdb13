"""Messages as an API sends them: what is read, what is refused, and that the refusal names the field."""

from __future__ import annotations

import random

import pytest

from deltafin.errors import BadRequest
from deltafin.runtime.chat import (
    AssistantMessage,
    Conversation,
    SystemMessage,
    ToolCall,
    ToolResult,
    UserMessage,
    from_openai,
    prompt,
    tools_of,
)


def test_each_role_becomes_its_message():
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a":1}'}}
    assert from_openai(
        [
            {"role": "developer", "content": "s", "name": "n"},
            {"role": "system", "tools": [{"name": "t"}]},
            {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
            {"role": "assistant", "content": None, "reasoning_content": "r", "tool_calls": [call], "refusal": None},
            {"role": "assistant", "content": "x", "reasoning": "alias", "audio": None, "annotations": []},
            {"role": "tool", "tool_call_id": "c1", "content": "5", "name": "f"},
            {"role": "tool", "id": 7, "content": None},
        ]
    ) == (
        SystemMessage("s", "n"),
        SystemMessage(tools=({"name": "t"},)),
        UserMessage(("a", "b")),
        AssistantMessage("", "r", (ToolCall("f", '{"a":1}', "c1"),)),
        AssistantMessage("x", "alias"),
        ToolResult("5", "c1", "f"),
        ToolResult("", "7"),
    )


def test_arguments_given_as_an_object_are_written_as_python_writes_json():
    def arguments(value: object) -> str:
        message = {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": value}}]}
        (read,) = from_openai([message])
        assert isinstance(read, AssistantMessage)
        return read.tool_calls[0].arguments

    assert arguments({"b": 1.0, "a": [1e100, "é"]}) == '{"b": 1.0, "a": [1e+100, "é"]}'
    assert arguments(None) == arguments("") == ""
    assert arguments(" ") == " "


def test_a_call_without_the_function_around_it_is_read_too():
    (message,) = from_openai([{"role": "assistant", "tool_calls": [{"name": "f", "arguments": {}, "id": 3}]}])
    assert isinstance(message, AssistantMessage)
    assert message.tool_calls == (ToolCall("f", "{}", "3"),)


def user(content: object) -> list[dict]:
    return [{"role": "user", "content": "fine"}, {"role": "user", "content": content}]


def call(call: object) -> list[dict]:
    return [{"role": "assistant", "tool_calls": [call]}]


@pytest.mark.parametrize(
    ("messages", "refusal"),
    [
        ("hi", "messages is text; expected a list"),
        ({"role": "user"}, "messages is an object; expected a list"),
        (["hi"], "messages[0] is text; expected an object"),
        ([{"content": "x"}], "messages[0].role is None; expected system, developer, user, assistant or tool"),
        ([{"role": "critic"}], "messages[0].role is 'critic'"),
        ([{"role": ["user"]}], "messages[0].role is ['user']"),
        (user(5), "messages[1].content is a number; expected text or a list of parts"),
        (user({"type": "text"}), "messages[1].content is an object"),
        (user(["x"]), "messages[1].content[0] is text; expected an object"),
        (user([{"type": "image_url", "image_url": {}}]), "messages[1].content[0].type is 'image_url'; only text"),
        (user([{"type": "text", "text": "x"}, {"type": "text"}]), "messages[1].content[1].text is null"),
        ([{"role": "user", "content": "x", "name": 1}], "messages[0].name is a number; expected text"),
        ([{"role": "assistant", "reasoning": ["x"]}], "messages[0].reasoning is a list; expected text"),
        ([{"role": "assistant", "tool_calls": {}}], "messages[0].tool_calls is an object; expected a list"),
        ([{"role": "assistant", "function_call": {"name": "f"}}], "messages[0].function_call: use tool_calls"),
        ([{"role": "assistant", "content": "x", "partial": True}], "messages[0].partial: an answer cannot be begun"),
        (call("f"), "messages[0].tool_calls[0] is text; expected an object"),
        (call({"type": "custom"}), "messages[0].tool_calls[0].type is 'custom'; expected function"),
        (call({"function": "f"}), "messages[0].tool_calls[0].function is text; expected an object"),
        (call({"function": {}}), "messages[0].tool_calls[0].function.name is missing"),
        (call({"function": {"name": "f", "arguments": []}}), "messages[0].tool_calls[0].function.arguments is a list"),
        (call({"function": {"name": "f", "arguments": {"a": float("inf")}}}), ".function.arguments is not JSON"),
        ([{"role": "system", "tools": [1]}], "messages[0].tools[0] is a number; expected an object"),
    ],
)
def test_a_refusal_names_the_field_and_what_it_should_be(messages, refusal):
    with pytest.raises(BadRequest) as e:
        from_openai(messages)
    assert refusal in str(e.value)
    assert "\n" not in str(e.value)


def test_tools_must_be_a_list_of_objects():
    assert tools_of(None) == ()
    with pytest.raises(BadRequest, match=r"tools is an object; expected a list"):
        tools_of({"name": "f"})


FIELDS = [
    *("role", "content", "name", "tool_calls", "tool_call_id", "id", "tool", "tools", "reasoning", "reasoning_content"),
    *("type", "text", "function", "arguments", "partial", "json_schema", "schema"),
]
LEAVES = [
    *(
        None,
        True,
        False,
        0,
        -1,
        2.5,
        float("nan"),
        float("inf"),
        "",
        " ",
        "x",
        '{"a": 1}',
        "a\ud800",
        "\x00",
        "low",
        "max",
    ),
    *("system", "developer", "user", "assistant", "tool", "text", "function", "json_object", "json_schema", "none"),
]


def junk(rng: random.Random, depth: int) -> object:
    """JSON that often looks like what is expected there."""
    kind = rng.random() if depth else 1.0
    if kind < 0.35:
        return [junk(rng, depth - 1) for _ in range(rng.randrange(4))]
    if kind < 0.8:
        return {rng.choice(FIELDS): junk(rng, depth - 1) for _ in range(rng.randrange(6))}
    return rng.choice(LEAVES)


def test_whatever_json_arrives_it_is_read_or_refused_in_one_line(tokenizer):
    rng = random.Random(20261130)
    read = 0
    for _ in range(5000):
        message = {"role": rng.choice(LEAVES[-10:-5]), "content": rng.choice(LEAVES)}
        try:
            messages = from_openai([{**message, **junk_object(rng)} for _ in range(rng.randrange(4))])
            asked = Conversation(
                messages,
                tools_of(junk(rng, 2)) if rng.random() < 0.3 else (),
                rng.random() < 0.5,
                rng.choice(["low", None]),
                junk(rng, 2) if rng.random() < 0.3 else None,
                junk(rng, 3) if rng.random() < 0.3 else None,
            )
            prompt(asked, tokenizer)
            read += 1
        except BadRequest as e:
            assert "\n" not in str(e)
    assert 500 < read < 4500  # it was neither refused nor read for one reason alone


def junk_object(rng: random.Random) -> dict:
    return {rng.choice(FIELDS[1:]): junk(rng, 3) for _ in range(rng.randrange(4))}


def test_a_refusal_stays_short_whatever_is_refused():
    deep: object = "x" * 100_000
    for _ in range(900):
        deep = {"role": deep}
    for refused in (deep, "x" * 100_000, ["x"] * 100_000):
        for ask in (lambda r: from_openai([{"role": r}]), lambda r: Conversation(tool_choice={"type": r})):
            with pytest.raises(BadRequest) as e:
                ask(refused)
            assert len(str(e.value)) < 300
