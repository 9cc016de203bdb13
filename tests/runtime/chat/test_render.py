"""What the model reads for a conversation: golden pieces and ids, and where states can be kept."""

from __future__ import annotations

import pytest

from deltafin.errors import BadRequest
from deltafin.runtime.chat import (
    AssistantMessage,
    Control,
    Conversation,
    SystemMessage,
    ToolCall,
    ToolResult,
    UserMessage,
    encode,
    follow_up,
    from_openai,
    pieces,
    prompt,
    thinking_of,
    tools_of,
)


def conversation(call: dict) -> Conversation:
    return Conversation(
        from_openai(call["messages"]),
        tools_of(call["tools"]),
        call["thinking"],
        call["thinking_effort"],
        call["tool_choice"],
        call["response_format"],
    )


def test_every_golden_conversation_gives_its_pieces_and_their_ids(golden_chat, as_pieces, tokenizer):
    cases = [c for c in golden_chat.values() if c["kind"] == "render" and not c.get("refused")]
    assert len(cases) > 70
    for case in cases:
        call = case["call"]
        got = pieces(conversation(call), opening=call["add_generation_prompt"])
        assert got == as_pieces(case["segments"]), case["id"]
        ids = []
        for piece in case["segments"]:
            ids += tokenizer.encode(piece) if isinstance(piece, str) else [tokenizer.special_id(piece["c"])]
        assert encode(got, tokenizer) == ids, case["id"]
        if call["add_generation_prompt"]:
            assert list(prompt(conversation(call), tokenizer).ids) == ids, case["id"]


def test_every_golden_refusal_is_one_clear_line(golden_chat):
    cases = [c for c in golden_chat.values() if c.get("refused")]
    assert len(cases) == 6
    for case in cases:
        with pytest.raises(BadRequest, match=r"effort|role|result") as e:
            pieces(conversation(case["call"]))
        assert "\n" not in str(e.value)


def test_the_demo_model_is_asked_with_exactly_the_ids_it_was_asked_with(golden_demo, tokenizer):
    assert len(golden_demo) == 13
    for case in golden_demo:
        asked = Conversation(
            from_openai(case["messages"]),
            tools_of(case.get("tools")),
            case["thinking"],
            case.get("effort"),
            case.get("tool_choice"),
            case.get("response_format"),
        )
        assert list(prompt(asked, tokenizer).ids) == case["prompt_ids"], case["name"]


def test_whatever_a_message_spells_out_no_control_id_comes_of_it(faults, tokenizer):
    first = min(tokenizer.special_tokens.values())
    for case in faults("text_cases").build()["messages"]:
        text = case["text"]
        for message in (UserMessage(text), SystemMessage(text), ToolResult(text, tool="t"), AssistantMessage(text)):
            written = pieces(Conversation([message], thinking=False), opening=False)
            assert written.count(text) == 1, case["name"]
            ids = encode(written, tokenizer)
            assert sum(i >= first for i in ids) == sum(isinstance(p, Control) for p in written)
            assert tokenizer.decode(encode([text], tokenizer)) == text
            assert max(encode([text], tokenizer)) < first


def test_attributes_are_escaped_and_stay_text(tokenizer):
    written = pieces(Conversation([UserMessage("x", name='a"<|sep|>&b')], thinking=False), opening=False)
    assert written[:10] == [
        Control("<|open|>"), "message", " role", '="', "user", '"', " name", '="', "a&quot;<|sep|>&amp;b", '"',
    ]  # fmt: skip


def test_half_a_surrogate_pair_is_refused_in_one_line(tokenizer):
    with pytest.raises(BadRequest, match="surrogate"):
        prompt(Conversation([UserMessage("a\ud800")]), tokenizer)


# Arguments, as the current revision has them


@pytest.mark.parametrize(
    ("text", "written"),
    [
        ('{"a": "b", "n": 1e2}', [("a", "string", "b"), ("n", "number", "1e2")]),
        ('{"a":1,"a":2}', [("a", "number", "1"), ("a", "number", "2")]),
        ('{"s": "x\\u00e9\\"", "o": {"k" :[1,\n2]}}', [("s", "string", 'xé"'), ("o", "object", '{"k" :[1,\n2]}')]),
        ('{"n": ' + "9" * 5000 + "}", [("n", "number", "9" * 5000)]),
        ("{}", []),
        (" { } ", []),
        ("", []),
    ],
)
def test_a_json_object_is_taken_apart_one_level_deep(text, written):
    call = AssistantMessage(tool_calls=[ToolCall("f", text)])
    got = [p for p in pieces(Conversation([call], thinking=False), opening=False) if isinstance(p, str)]
    flat = []
    for key, kind, value in written:
        flat += ["argument", " key", '="', key, '"', " type", '="', kind, '"', value, "argument"]
    start = got.index("call") + 9
    assert got[start : got.index("call", start)] == flat


@pytest.mark.parametrize(
    "text",
    [
        *("  ", "{", "[1]", '"text"', "null", '{"a": 1,}', '{"a" 1}', "{'a': 1}", "{1: 2}"),
        *('{"a": NaN}', '{"a": 01}', '{"a": 1} x', '{"a": ' + "[" * 200_000),
    ],
)
def test_anything_else_goes_into_a_json_element_as_it_is(text):
    call = AssistantMessage(tool_calls=[ToolCall("f", text)])
    got = pieces(Conversation([call], thinking=False), opening=False)
    assert got[got.index("json") : got.index("json") + 7] == [
        "json", " type", '="', "object", '"', Control("<|sep|>"), text,
    ]  # fmt: skip


def test_of_two_calls_with_one_id_the_first_is_meant():
    calls = [ToolCall("first", id="x"), ToolCall("second", id="x"), ToolCall("third", id="y")]
    results = [ToolResult("b", "y"), ToolResult("a", "x")]
    written = pieces(Conversation([AssistantMessage(tool_calls=calls), *results], thinking=False), opening=False)
    assert [p for p in written if p in ("first", "second", "third", "a", "b")][3:] == ["first", "a", "third", "b"]


# Effort, tool choice, response format


def test_effort_none_is_not_to_think_and_what_k3_lacks_is_refused():
    assert thinking_of(None) == (True, "max")
    assert thinking_of("none") == (False, None)
    assert thinking_of("low") == (True, "low")
    with pytest.raises(BadRequest, match=r"reasoning_effort is 'medium'; expected none, low, high, max"):
        thinking_of("medium")


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"effort": "medium"}, "effort is 'medium'"),
        ({"tool_choice": "any"}, "tool_choice is 'any'"),
        ({"tool_choice": {"type": "custom"}}, "tool_choice"),
        ({"response_format": "xml"}, "response_format is 'xml'"),
        ({"response_format": {"json_schema": {}}}, "response_format is None"),
    ],
)
def test_a_setting_that_would_have_no_effect_is_refused(setting, message):
    with pytest.raises(BadRequest, match=message):
        Conversation([UserMessage("x")], **setting)


def test_a_tool_or_schema_that_is_not_json_is_refused_by_name():
    deep: dict = {}
    for _ in range(100_000):
        deep = {"d": deep}
    try:
        for value in (float("nan"), {1, 2}, deep):
            with pytest.raises(BadRequest, match=r"^tools is "):
                pieces(Conversation([], tools=[{"x": value}]))
        with pytest.raises(BadRequest, match=r"response_format\.json_schema is"):
            pieces(Conversation(response_format={"type": "json_schema", "json_schema": {"schema": {"a": {1}}}}))
    finally:
        while deep:  # freeing it at once would recurse as deeply
            deep = deep["d"]


# Boundaries


def test_a_prompt_says_where_the_preamble_and_each_message_end(tokenizer):
    leading = [SystemMessage("Rule one."), SystemMessage(tools=[{"name": "t"}])]
    rest = [UserMessage("Hi"), SystemMessage("Rule two."), UserMessage("Go")]
    tools = [{"type": "function", "function": {"name": "f"}}]
    whole = prompt(Conversation([*leading, *rest], tools, effort="low"), tokenizer)
    shared = encode(pieces(Conversation(leading, tools, effort="low"), opening=False), tokenizer)
    assert list(whole.ids[: whole.preamble]) == shared
    assert whole.ends[1] == whole.preamble < whole.ends[2] < whole.ends[3] < whole.ends[4] < len(whole.ids)
    for count, end in enumerate(whole.ends, start=1):
        part = Conversation([*leading, *rest][:count], tools, effort="low")
        assert list(whole.ids[:end]) == encode(pieces(part, opening=False), tokenizer)


def test_without_anything_shared_the_preamble_is_empty(tokenizer):
    whole = prompt(Conversation([UserMessage("Hi"), SystemMessage("late")], thinking=False), tokenizer)
    assert whole.preamble == 0
    assert len(whole.ends) == 2


def test_what_follows_and_what_came_before_join_to_the_whole():
    calls = [ToolCall("f", '{"a": 1}', "1"), ToolCall("g", "", "2")]
    messages = [
        SystemMessage("s"),
        UserMessage("u"),
        AssistantMessage("a", "r", calls),
        ToolResult("second", "2"),
        ToolResult("first", "1"),
        AssistantMessage("done", "ok"),
        UserMessage("bye"),
    ]
    whole = pieces(Conversation(messages, effort="high"))
    for after in (0, 1, 2, 3, 5, 6, 7):
        before = pieces(Conversation(messages[:after], effort="high"), opening=False) if after else []
        assert before + follow_up(Conversation(messages, effort="high"), after) == whole
    with pytest.raises(AssertionError):
        follow_up(Conversation(messages, effort="high"), 4)  # between results that are put in order together
