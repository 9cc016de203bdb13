"""What ids of an answer say: golden outputs cut in every way, characters in pieces, and what a model may do wrong."""

from __future__ import annotations

import itertools
import json
import random

import pytest

from deltafin.errors import BadRequest
from deltafin.runtime.chat import (
    AssistantMessage,
    ChatParser,
    ContentText,
    Control,
    Conversation,
    Finished,
    ReasoningText,
    ReasoningWasContent,
    ToolCall,
    ToolCallArguments,
    ToolCallBegan,
    encode,
    parse,
    pieces,
)
from deltafin.runtime.chat.wire import CLOSE, END_OF_MSG, EOS, OPEN, SEP, close_tag, open_tag


@pytest.fixture
def new_id():
    numbers = itertools.count()
    return lambda: f"call_{next(numbers)}"


@pytest.fixture
def stream(tokenizer, new_id, gather):
    """Ids pushed one by one; returns the events."""

    def stream(ids, thinking):
        parser = ChatParser(tokenizer, thinking, new_id)
        events = [event for token in ids for event in parser.push(token)]
        events += parser.finish()
        assert gather(events) == parser.answer
        return events

    return stream


def read(answer) -> dict:
    """As the golden file writes an answer."""
    calls = []
    for call in answer.tool_calls:
        try:
            calls.append({"name": call.name, "arguments": json.loads(call.arguments)})
        except ValueError:
            calls.append({"name": call.name, "arguments_raw": call.arguments})
    return {"reasoning": answer.reasoning, "content": answer.content, "tool_calls": calls, "finish": answer.finish}


def in_order(value: object) -> str:
    return json.dumps(value)


# Golden


def test_every_golden_output_is_read_however_it_is_cut(
    golden_chat, as_pieces, in_bytes, cut_anew, tokenizer, stream, gather
):
    cases = [c for c in golden_chat.values() if c["kind"] == "parse"]
    assert len(cases) == 76
    rng = random.Random(20261130)
    for case in cases:
        written = as_pieces(case["pieces"])
        whole = encode(written, tokenizer)
        cuts = [whole, in_bytes(written), *(cut_anew(whole, rng) for _ in range(20))]
        expected = dict(case["expect"])
        finishes = expected.pop("finish_any", None) or [expected["finish"]]
        for ids in cuts:
            for got in (read(gather(stream(ids, case["thinking"]))), read(parse(ids, tokenizer, case["thinking"]))):
                assert got["finish"] in finishes, case["id"]
                assert in_order({**got, "finish": None}) == in_order({**expected, "finish": None}), case["id"]


def test_golden_deltas_come_in_order_and_show_no_control_token(golden_chat, as_pieces, in_bytes, stream):
    order = {ReasoningText: 0, ContentText: 1, ToolCallBegan: 2, ToolCallArguments: 2, Finished: 3}
    for case in golden_chat.values():
        if case["kind"] != "parse" or case.get("stream") is False:
            continue
        written = as_pieces(case["pieces"])
        events = stream(in_bytes(written), case["thinking"])
        stages = [order[type(event)] for event in events]
        assert stages == sorted(stages), case["id"]
        assert stages.count(3) == 1, case["id"]
        if not any("<|" in piece for piece in written if isinstance(piece, str)):
            assert "<|" not in str(events), case["id"]


def test_the_demo_models_own_answers_are_read(golden_demo, tokenizer, stream, gather):
    answers = {case["name"]: gather(stream(case["ids"], case["thinking"])) for case in golden_demo}
    for case in golden_demo:
        answer = answers[case["name"]]
        assert answer.finish == ("tool_calls" if answer.tool_calls else "stop"), case["name"]
        assert bool(answer.reasoning) == case["thinking"], case["name"]
        # Written as a message, the answer is the very ids that the model chose.
        again = pieces(Conversation([answer.message()], thinking=case["thinking"]), opening=False)
        opened = pieces(Conversation(thinking=case["thinking"]))
        assert encode(again[len(opened) :], tokenizer) == case["ids"], case["name"]
    assert answers["moons of Saturn"].content == "The three largest moons of Saturn are Titan, Rhea and Iapetus."
    assert [(c.name, json.loads(c.arguments)) for c in answers["tool call"].tool_calls] == [
        ("get_weather", {"city": "Paris"})
    ]
    assert len(answers["two tool calls"].tool_calls) == 2
    assert isinstance(json.loads(answers["json object"].content), dict)


# Characters in pieces


def test_characters_come_out_whole_wherever_they_stand(faults, tokenizer, byte_ids, gather):
    places = {
        "reasoning": (True, [], lambda a: a.reasoning),
        "content": (False, [], lambda a: a.content),
        "argument": (
            False,
            [*open_tag("tools"), *open_tag("call", ("tool", "f")), *open_tag("argument", ("key", "k"))],
            lambda a: json.loads(a.tool_calls[0].arguments)["k"],
        ),
    }
    end = [*close_tag("argument"), *close_tag("call"), END_OF_MSG]
    for case, (thinking, begin, shown) in itertools.product(faults("text_cases").build()["stream"], places.values()):
        parser = ChatParser(tokenizer, thinking)
        events = [e for token in encode(begin, tokenizer) for e in parser.push(token)]
        before = len(events)
        raw = b"".join(map(bytes.fromhex, case["pieces"]))
        for token in (byte_ids[b] for b in raw):
            events += parser.push(token)
        if not begin and case["text"]:
            arrived = "".join(e.text for e in events[before:])
            assert arrived == raw.decode(errors="ignore"), case["name"]  # nothing is held back but half a character
        events += [e for token in encode(end, tokenizer) for e in parser.push(token)]
        got = shown(gather(events))
        assert got == raw.decode(errors="replace"), case["name"]


def test_a_control_token_ends_a_character_that_was_never_whole(tokenizer, byte_ids, stream):
    half = byte_ids["é".encode()[0]]
    rest = byte_ids["é".encode()[1]]
    (reserved,) = encode([Control("[PAD]")], tokenizer)
    assert stream([half, reserved, rest], thinking=False)[:-1] == [ContentText("\ufffd"), ContentText("\ufffd")]
    assert stream([half], thinking=False)[:-1] == [ContentText("\ufffd")]


# Tool calls


def call(*inner, **attributes) -> list:
    flat = [piece for part in inner for piece in part]
    return [*open_tag("call", *attributes.items()), *flat, *close_tag("call")]


def argument(value: str, **attributes) -> list:
    return [*open_tag("argument", *attributes.items()), value, *close_tag("argument")]


@pytest.fixture
def calls(in_bytes, stream, gather):
    def calls(*inner) -> tuple:
        flat = [piece for part in inner for piece in part]
        answer = gather(stream(in_bytes([*open_tag("tools"), *flat, *close_tag("tools"), END_OF_MSG]), thinking=False))
        return tuple((c.name, c.arguments) for c in answer.tool_calls)

    return calls


def test_a_value_keeps_its_source_and_the_arguments_are_json(calls):
    values = ["1e2", " -0.0\n", "[1,2]", '{"b":1, "a": "x\ny"}', "9" * 5000, '"\\ud800"', "true"]
    ((_, text),) = calls(call(*(argument(v, key=str(i), type="object") for i, v in enumerate(values)), tool="f"))
    assert text == (
        '{"0": 1e2, "1": -0.0, "2": [1,2], "3": {"b":1, "a": "x\\u000ay"}, "4": ' + "9" * 5000
        + ', "5": "\\ud800", "6": true}'
    )  # fmt: skip
    text.encode()
    assert json.loads(text.replace("9" * 5000, "9"))["3"] == {"b": 1, "a": "x\ny"}


@pytest.mark.parametrize(
    "value", ["", " ", "1,5", "{", "NaN", "-Infinity", "True", "1 2", "[" * 100_000, "\u00a01", "\x00"]
)
def test_a_value_that_is_not_json_is_text(calls, value):
    ((_, text),) = calls(call(argument(value, key="k", type="number"), tool="f"))
    assert json.loads(text) == {"k": value}


def test_an_odd_json_body_is_handed_on(calls):
    def body(text: str) -> list:
        return [*open_tag("json", ("type", "object")), text, *close_tag("json")]

    assert calls(call(body("not json"), tool="f"), call(body("[1]"), tool="g")) == (("f", "not json"), ("g", "[1]"))
    # The json body counts, wherever it stands, and the first one.
    assert calls(call(argument("1", key="a"), body('{"b": 2}'), body("{}"), tool="f")) == (("f", '{"b": 2}'),)


def test_what_is_left_open_inside_a_call_ends_with_it(calls):
    begun = open_tag("argument", ("key", "a"), ("type", "number"))
    assert calls(call([*begun, "1"], tool="f")) == (("f", '{"a": 1}'),)
    assert calls(call([*begun, "1"], argument("2", key="b"), tool="f")) == (("f", '{"a": 1, "b": "2"}'),)
    # A call inside which another is opened was never closed.
    assert calls(open_tag("call", ("tool", "lost")), call(tool="g")) == (("g", "{}"),)


def test_an_empty_name_is_no_name(calls):
    assert calls(call(tool=""), call(), call(argument("v", type="string"), tool="f")) == ()


def test_ids_of_calls_are_invented_and_differ(tokenizer):
    ids = encode([*open_tag("tools"), *call(tool="f"), *call(tool="f"), *close_tag("tools"), END_OF_MSG], tokenizer)
    seen = [c.id for _ in range(50) for c in parse(ids, tokenizer, thinking=False).tool_calls]
    assert len(set(seen)) == 100
    assert all(i.startswith("call_") and len(i) > 20 for i in seen)


# What the model may do with its elements


def test_an_answer_inside_think_is_content_once_response_is_closed(tokenizer, stream, gather):
    ids = encode(["Sure.", *close_tag("response"), *close_tag("message"), END_OF_MSG], tokenizer)
    events = stream(ids, thinking=True)
    assert events[-2:] == [ReasoningWasContent("Sure."), Finished("stop")]
    assert all(isinstance(e, ReasoningText) for e in events[:-2])
    # Only what stands in that think element: reasoning that was closed before remains reasoning.
    ids = encode(["a", *close_tag("think"), *open_tag("think"), "b", *close_tag("response"), END_OF_MSG], tokenizer)
    answer = gather(stream(ids, thinking=True))
    assert (answer.reasoning, answer.content) == ("a", "b")


def test_tags_that_mean_nothing_where_they_stand_leave_no_trace(tokenizer, stream, gather):
    strange = [
        *open_tag("call", ("tool", "f")), *close_tag("call"), *close_tag("tools"), *close_tag("argument"),
        *close_tag("think"), OPEN, SEP, CLOSE, SEP, SEP, *open_tag("argument", ("key", "k")), Control("[BOS]"),
        Control("<|media_pad|>"), OPEN, "resp", OPEN, "x", CLOSE, "y",
    ]  # fmt: skip
    answer = gather(stream(encode(["a", *strange, *close_tag("note"), "b", END_OF_MSG], tokenizer), thinking=False))
    assert (answer.reasoning, answer.content, answer.tool_calls) == ("", "ab", ())


def test_nothing_counts_after_the_end_whichever_token_it_was(tokenizer):
    for end in (END_OF_MSG, EOS):
        parser = ChatParser(tokenizer, thinking=False)
        ids = encode(["a", end], tokenizer)
        events = [e for token in ids for e in parser.push(token)]
        assert parser.done
        assert events[-1] == Finished("stop")
        assert parser.push(ids[0]) == parser.push(ids[-1]) == parser.finish() == []
        assert parser.answer.content == "a"
        assert parser.ids == (ids if end == END_OF_MSG else ids[:-1])


def test_a_message_that_was_closed_is_not_opened_again(tokenizer, stream, gather):
    more = [*open_tag("message", ("role", "user")), *open_tag("response"), "b", *open_tag("tools"), *call(tool="f")]
    ids = encode(["a", *close_tag("message"), *more, END_OF_MSG], tokenizer)
    answer = gather(stream(ids, thinking=False))
    assert (answer.content, answer.tool_calls, answer.finish) == ("a", (), "stop")


def test_a_finish_by_hand_is_said_once(tokenizer):
    parser = ChatParser(tokenizer, thinking=True)
    assert parser.answer.finish is None
    assert parser.finish() == [Finished("length")]
    assert parser.finish() == []
    assert parser.done


def test_an_id_outside_the_vocabulary_is_refused_and_nothing_happened(tokenizer):
    parser = ChatParser(tokenizer, thinking=True)
    for token in (-1, 2048):
        with pytest.raises(BadRequest, match="outside the vocabulary"):
            parser.push(token)
    assert parser.ids == []
    assert not parser.done


def test_a_long_malformed_tag_takes_no_longer_than_a_text(tokenizer):
    for text in ['a="' * 50_000, " " * 50_000 + "=", ' a="' * 50_000, "x" * 100_000]:
        parser = ChatParser(tokenizer, thinking=False)
        for token in encode([OPEN, text, SEP, "b", END_OF_MSG], tokenizer):
            parser.push(token)
        assert parser.answer.content == "b"


# Cut answers


MESSAGE_END = [*close_tag("message"), END_OF_MSG]
NO_ANSWER = [*open_tag("response"), *close_tag("response")]


@pytest.mark.parametrize(
    ("written", "missing"),
    [
        ([], [*close_tag("think"), *NO_ANSWER]),
        (["r", OPEN], ["response", SEP, *close_tag("response")]),
        (["r", OPEN, "to"], ["ols", SEP, *close_tag("tools")]),
        (["r", CLOSE, "thi"], ["nk", SEP, *NO_ANSWER]),
        (["r", CLOSE, "else"], [SEP, *close_tag("think"), *NO_ANSWER]),
        (["r", *close_tag("think")], NO_ANSWER),
        (["r", *close_tag("think"), OPEN, "odd x"], [SEP, *NO_ANSWER]),
        (["a", CLOSE, "response"], [SEP]),
        (["a", *close_tag("response")], []),
        ([*NO_ANSWER, OPEN], ["tools", SEP, *close_tag("tools")]),
        ([*open_tag("tools")], close_tag("tools")),
        ([*open_tag("tools"), OPEN], ["call", SEP, *close_tag("call"), *close_tag("tools")]),
        ([*open_tag("tools"), OPEN, 'call tool="re'], ['"', SEP, *close_tag("call"), *close_tag("tools")]),
        ([*open_tag("tools"), *open_tag("call"), OPEN, 'argument key="a" ty'],
         [SEP, *close_tag("argument"), *close_tag("call"), *close_tag("tools")]),
        ([*open_tag("tools"), *open_tag("call"), *open_tag("json"), "{", CLOSE],
         ["json", SEP, *close_tag("call"), *close_tag("tools")]),
    ],
)  # fmt: skip
def test_a_cut_answer_lacks_just_what_makes_it_a_message(tokenizer, written, missing):
    parser = ChatParser(tokenizer, thinking=True)
    for token in encode(written, tokenizer):
        parser.push(token)
    assert parser.closing() == [*missing, *MESSAGE_END]


def test_an_answer_that_ended_lacks_nothing_and_one_that_closed_only_its_end(tokenizer):
    for written, missing in ([END_OF_MSG], []), ([*close_tag("message")], [END_OF_MSG]), ([OPEN, END_OF_MSG], []):
        parser = ChatParser(tokenizer, thinking=False)
        for token in encode(written, tokenizer):
            parser.push(token)
        assert parser.closing() == missing


def test_a_message_and_its_answer_are_the_same_thing(tokenizer):
    message = AssistantMessage("c", "r", (ToolCall("f", '{"a": [1]}', "call_0"),))
    written = encode(pieces(Conversation([message]), opening=False), tokenizer)
    opened = len(encode(pieces(Conversation()), tokenizer))
    assert parse(written[opened:], tokenizer, thinking=True, new_id=lambda: "call_0").message() == message
