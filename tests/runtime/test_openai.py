"""Bodies of OpenAI's API: what is asked for is done, or refused by the name of its field; and answers in its shapes."""

from __future__ import annotations

import json
import math

import pytest

from deltafin.errors import BadRequest
from deltafin.runtime.openai import CHAT, TEXT, Answer, BadBody, Serving, parse, read_body, write_line
from deltafin.runtime.sampling import Chosen

USER = {"role": "user", "content": "What is the capital of Portugal?"}
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}


@pytest.fixture(scope="module")
def serving(demo):
    config = demo.config
    return Serving("demo", "fp_test", demo.tokenizer, config.vocab_size, config.max_positions, max_new=50)


@pytest.fixture
def chat(serving):
    def read(messages=None, default_seed=0, **fields):
        messages = [USER] if messages is None else messages
        return read_body(CHAT, {"model": "demo", "messages": messages, **fields}, serving, seed=default_seed)

    return read


@pytest.fixture
def text(serving):
    def read(prompt="The capital of France is", default_seed=0, **fields):
        return read_body(TEXT, {"prompt": prompt, **fields}, serving, seed=default_seed)

    return read


def refusal(read, **fields):
    with pytest.raises(BadBody) as caught:
        read(**fields)
    error = caught.value.as_json()["error"]
    assert error["type"] == "invalid_request_error" and error["message"] == str(caught.value)
    assert "\n" not in error["message"] and len(error["message"]) < 300
    json.dumps(error, allow_nan=False).encode()
    return error["param"]


# ---- what is asked for --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def cases(golden):
    return {case["name"]: case for case in json.loads((golden / "demo.json").read_text())["cases"]}


def test_conversations_become_the_prompts_of_the_golden_data(cases, chat):
    seen = 0
    for case in cases.values():
        if case["kind"] != "chat" or (case["thinking"] and "effort" not in case):
            continue
        fields = {"reasoning_effort": case["effort"] if case["thinking"] else "none"}
        if "tools" in case:
            fields["tools"] = case["tools"]
        if "response_format" in case:
            fields["response_format"] = {"type": case["response_format"]}
        task = chat(case["messages"], **fields)
        assert list(task.ids) == case["prompt_ids"], case["name"]
        assert task.thinking is case["thinking"]
        seen += 1
    assert seen >= 12


def test_a_prompt_is_text_or_ids_also_as_the_only_one_of_a_list(text, demo):
    ids = tuple(demo.tokenizer.encode("The capital of France is"))
    for prompt in ("The capital of France is", ["The capital of France is"], list(ids), [list(ids)]):
        assert text(prompt).ids == ids


def test_what_is_left_out_is_greedy_thinks_most_and_has_the_given_limit(chat, text):
    task = chat(default_seed=9)
    assert (task.sampling.temperature, task.sampling.seed, task.sampling.top_logprobs) == (0, 9, None)
    assert (task.max_new, task.stops, task.thinking, task.stream) == (50, (), True, False)
    assert task.ids == chat(reasoning_effort="max").ids == chat(thinking={"type": "enabled"}).ids
    assert chat(thinking={"type": "disabled"}).ids == chat(reasoning_effort="none").ids != task.ids
    assert text().max_new == 50


def test_everything_about_choosing_arrives(chat):
    task = chat(
        temperature=1, top_p=0.5, top_k=3, min_p=0.1, seed=-1, logit_bias={"5": -100, "6": 2.5}, logprobs=True,
        top_logprobs=20, max_tokens=7, max_completion_tokens=7, stop=["a", "b", "a"], return_token_ids=True,
        stream=True, stream_options={"include_usage": True, "include_obfuscation": False},
    )  # fmt: skip
    sampling = task.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (1.0, 0.5, 3, 0.1)
    assert (sampling.seed, dict(sampling.logit_bias), sampling.top_logprobs) == (2**64 - 1, {5: -100, 6: 2.5}, 20)
    assert (task.max_new, task.stops, task.returns_ids) == (7, ("a", "b"), True)
    assert task.stream and task.stream_usage


def test_fields_that_ask_for_nothing_are_accepted(chat, text):
    nothing = {
        "user": "u", "metadata": {"a": "b"}, "n": 1, "frequency_penalty": 0, "presence_penalty": 0.0, "store": False,
        "service_tier": "auto", "stop": None, "logit_bias": {}, "top_p": 1, "stream": False, "seed": None,
    }  # fmt: skip
    plain = chat()
    found = chat(**nothing, parallel_tool_calls=True, response_format={"type": "text"}, tools=[], tool_choice="auto")
    assert found.ids == plain.ids and found.sampling == plain.sampling
    assert text(**nothing, best_of=1, echo=False, suffix=None).ids == text().ids
    assert chat(something_new=None).ids == plain.ids


def test_the_leading_instructions_are_what_requests_share(chat):
    system = {"role": "system", "content": "Answer in one word."}
    one, other = chat([system, USER]), chat([system, {"role": "user", "content": "Hello"}])
    assert 0 < one.shared == other.shared < len(other.ids)
    assert one.ids[: one.shared] == other.ids[: other.shared]


# ---- what is refused ----------------------------------------------------------------------------------

HUGE = 10**400

WRONG = {
    "temperature": [-0.1, 101, "1", True, [], {}, math.nan, HUGE, 1e-9],
    "top_p": [0, 1.1, "1", False, math.inf],
    "top_k": [-2, 1.0, True, HUGE, 2**31],
    "min_p": [-1, 2, "0"],
    "seed": [1.0, True, "1", 2**64, -(2**63) - 1],
    "max_tokens": [0, -1, 1.0, True, "5", HUGE, 2**20 + 1],
    "max_completion_tokens": [0, False],
    "n": [2, 0, True, 1.5, "1", [1]],
    "frequency_penalty": [0.5, False, "0"],
    "presence_penalty": [-1],
    "stop": ["", ["a", ""], 1, ["a", 1], [["a"]], list("abcde"), {}, ["a", "b" * 65_537]],
    "logit_bias": [
        {"x": 1},
        {"-1": 1},
        {"2048": 1},
        {"1.0": 1},
        {"٣": 1},
        {"01": 1},
        [],
        1,
        {str(n): 1 for n in range(1025)},
    ],
    "store": [True, 0],
    "service_tier": ["flex"],
    "stream": ["yes", 1],
    "return_token_ids": [1],
    "model": [1, []],
    "best_token": [1],
    "audio": [{}],
    "user_id": ["x"],
}


@pytest.mark.parametrize(("field", "value"), [(f, v) for f, values in WRONG.items() for v in values], ids=str)
def test_what_cannot_be_done_is_refused_by_its_name(chat, text, field, value):
    more = {"temperature": 1} if field in ("top_p", "top_k", "min_p") else {}
    assert refusal(chat, **{field: value}, **more) == field
    assert refusal(text, **{field: value}, **more) == field


def tool_with(**fields):
    """A body's tools: one function, with these fields besides its name."""
    return {"tools": [{"type": "function", "function": {"name": "f", **fields}}]}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": "hello"}, "messages"),
        ({"messages": [1]}, "messages[0]"),
        ({"messages": [{"role": "wizard", "content": "x"}]}, "messages[0].role"),
        ({"messages": [USER, {"role": "user", "content": [{"type": "image_url"}]}]}, "messages[1].content[0].type"),
        ({"messages": [{"role": "user", "content": "\ud800"}]}, "messages"),
        ({"messages": [{"role": "tool", "content": "3"}]}, "messages[0]"),
        ({"modalities": ["text", "audio"]}, "modalities"),
        ({"verbosity": "low"}, "verbosity"),
        ({"parallel_tool_calls": False}, "parallel_tool_calls"),
        ({"reasoning_effort": "medium"}, "reasoning_effort"),
        ({"reasoning_effort": 3}, "reasoning_effort"),
        ({"thinking": True}, "thinking"),
        ({"thinking": {}}, "thinking.type"),
        ({"thinking": {"type": "enabled", "budget_tokens": 5}}, "thinking.budget_tokens"),
        ({"thinking": {"type": "disabled"}, "reasoning_effort": "low"}, "thinking"),
        ({"logprobs": 1}, "logprobs"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"tools": {}}, "tools"),
        ({"tools": [1]}, "tools[0]"),
        ({"tools": [{"type": "custom"}]}, "tools[0].type"),
        ({"tools": [{"type": "function", "function": {"name": ""}}]}, "tools[0].function.name"),
        ({"tools": [{"type": "function", "function": {"name": "f", "strict": True}}]}, "tools[0].function.strict"),
        (tool_with(parameters=3), "tools[0].function.parameters"),
        (tool_with(description=0), "tools[0].function.description"),
        ({"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "add"}}}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": "any", "tools": [TOOL]}, "tool_choice"),
        ({"response_format": "json_object"}, "response_format"),
        ({"response_format": {}}, "response_format.type"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
            "response_format.json_schema.schema",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {}, "strict": True}}},
            "response_format.json_schema.strict",
        ),
        ({"response_format": {"type": "text", "json_schema": {}}}, "response_format.json_schema"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": True, "stream_options": {"include_obfuscation": True}}, "stream_options.include_obfuscation"),
        ({"max_tokens": 5, "max_completion_tokens": 6}, "max_tokens"),
        ({"top_p": 0.9}, "top_p"),
        ({"min_p": 0.9}, "min_p"),
        ({"top_k": 9}, "top_k"),
        ({"max_tokens": 2**20}, "messages"),
    ],
    ids=lambda v: str(v)[:60],
)
def test_what_a_conversation_cannot_have_is_refused_by_its_path(chat, fields, param):
    assert refusal(chat, **fields) == param


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": None}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": ["a", "b"]}, "prompt"),
        ({"prompt": [[1], [2]]}, "prompt"),
        ({"prompt": [1, "a"]}, "prompt"),
        ({"prompt": [True]}, "prompt"),
        ({"prompt": [2048]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": [HUGE]}, "prompt"),
        ({"prompt": "\udfff"}, "prompt"),
        ({"best_of": 2}, "best_of"),
        ({"echo": True}, "echo"),
        ({"suffix": "x"}, "suffix"),
        ({"logprobs": True}, "logprobs"),
        ({"logprobs": 21}, "logprobs"),
        ({"messages": [USER]}, "messages"),
        ({"max_tokens": 2**20}, "prompt"),
    ],
    ids=lambda v: str(v)[:40],
)
def test_what_a_text_cannot_have_is_refused_by_its_name(text, fields, param):
    assert refusal(text, **fields) == param


@pytest.mark.parametrize("body", [None, [], "x", 1, True])
def test_a_body_is_an_object(serving, body):
    for endpoint in (CHAT, TEXT):
        with pytest.raises(BadBody, match="expected an object"):
            read_body(endpoint, body, serving)


def test_deep_nesting_is_refused_and_no_crash(chat):
    deep = {}
    for _ in range(100_000):
        deep = {"a": deep}
    tool = {"type": "function", "function": {"name": "f", "parameters": deep}}
    assert refusal(chat, tools=[tool]) == "tools"
    assert refusal(chat, something=deep) == "something"


def test_what_is_too_deep_does_not_depend_on_who_reads_it():
    def from_below(frames, raw):
        return from_below(frames - 1, raw) if frames else _can_be_read(raw)

    for depth in (1, 199, 200, 201, 202, *range(850, 1000)):
        for opened, closed in ((b"[", b"]"), (b'{"a":', b"}"), (b'[{"a":', b"}]")):
            times = depth // len(closed)
            raw = opened * times + b"1" + closed * times
            expected = times * len(closed) <= 200
            assert from_below(0, raw) == from_below(100, raw) == expected, depth


def _can_be_read(raw):
    try:
        parse(raw)
    except BadRequest as e:
        assert "nested more than 200 deep" in str(e)
        return False
    return True


def test_a_reserved_id_cannot_be_asked_for(chat, demo):
    reserved = min(demo.reserved_ids)
    assert refusal(chat, logit_bias={str(reserved): 1}) == "logit_bias"
    assert dict(chat(logit_bias={str(reserved): -1}).sampling.logit_bias) == {reserved: -1.0}


# ---- JSON ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"{",
        b"NaN",
        b'{"a": Infinity}',
        b"\xff",
        b'{"a":1,"a":2}',
        b"[" * 100_000,
        b"1" * 5000,
        b"{} {}",
        b"\xef\xbb\xbf{}",
    ],
    ids=lambda raw: str(raw[:20]),
)
def test_what_is_not_json_is_refused(raw):
    with pytest.raises(BadRequest) as caught:
        parse(raw)
    assert len(str(caught.value)) < 200 and "\n" not in str(caught.value)


def test_a_written_value_is_one_line_for_every_reader():
    value = {"text": "a\nb\r\u2028\u2029\x85\x0b\x0c\x1c ü 中 \U0001f600"}
    line = write_line(value)
    assert line.decode().splitlines() == [line.decode()[:-1]] and parse(line) == value
    assert "ü 中 \U0001f600" in line.decode()


def test_half_of_a_surrogate_pair_can_be_written_and_read_back(chat):
    assert parse(write_line({"a\ud800": "\udfff"})) == {"a\ud800": "\udfff"}
    with pytest.raises(BadBody) as caught:
        chat(**{"x\ud800": 1})
    assert parse(write_line(caught.value.as_json()))["error"]["param"] == "x\ud800"


# ---- answers ------------------------------------------------------------------------------------------


def answered(task, serving, ids, cause, stop=None, *, logprobs=None):
    """An answer of these tokens, as a generation would end it; the last may be a stop token."""
    chosen = [Chosen(i, None, ()) if logprobs is None else Chosen(i, *logprobs(i)) for i in ids]
    answer = Answer(task, serving, "name")
    for at, token in enumerate(chosen):
        if token.token == stop:
            assert at == len(chosen) - 1
            break
        if answer.ends(token):
            chosen = chosen[: at + 1]
            break
    answer.finish(chosen, cause)
    return answer


def choice(answer):
    (found,) = answer.as_json(created=5)["choices"]
    return found


@pytest.mark.parametrize("name", ["capital, thinking low", "tool call", "two tool calls", "json object", "code"])
def test_golden_answers_are_written_as_messages(cases, chat, serving, demo, name):
    case = cases[name]
    task = chat(case["messages"], reasoning_effort=case.get("effort", "none"), return_token_ids=True)
    answer = answered(task, serving, case["ids"], "stop", stop=demo.tokenizer.special_id("<|end_of_msg|>"))
    found = choice(answer)
    message = found["message"]
    assert found["token_ids"] == case["ids"]
    assert message["role"] == "assistant" and ("reasoning_content" in message) is case["thinking"]
    for shown in (message["content"], message.get("reasoning_content")):
        assert shown is None or shown in case["text"]
    assert message["content"] or "tool" in name
    usage = answer.as_json(5)["usage"]
    assert usage["completion_tokens"] == len(case["ids"]) and usage["total_tokens"] == len(case["ids"]) + len(task.ids)
    if "tool" in name:
        assert found["finish_reason"] == "tool_calls"
        calls = message["tool_calls"]
        assert [json.loads(c["function"]["arguments"])["city"] for c in calls] == (
            ["Paris"] if name == "tool call" else ["Rome", "Oslo"]
        )
        assert len({c["id"] for c in calls}) == len(calls) and {c["type"] for c in calls} == {"function"}
    else:
        assert found["finish_reason"] == "stop" and "tool_calls" not in message


def test_reasoning_is_told_apart_and_its_tokens_are_counted(cases, chat, serving, demo):
    case = cases["capital, thinking low"]
    answer = answered(chat(case["messages"]), serving, case["ids"], "stop", demo.tokenizer.special_id("<|end_of_msg|>"))
    message = choice(answer)["message"]
    reasoning, content = "Portugal: the capital is Lisbon.", "The capital of Portugal is Lisbon."
    assert (message["reasoning_content"], message["content"]) == (reasoning, content)
    counted = answer.as_json(5)["usage"]["completion_tokens_details"]["reasoning_tokens"]
    assert counted == case["ids"].index(demo.tokenizer.special_id("<|close|>"))


def test_a_cut_answer_says_length_and_shows_what_there_is(cases, chat, serving, demo):
    case = cases["capital, thinking low"]
    found = choice(answered(chat(case["messages"]), serving, case["ids"][:5], "length"))
    assert found["finish_reason"] == "length"
    reasoning = demo.tokenizer.decode(case["ids"][:5])
    assert reasoning.startswith("Portugal: ")
    assert found["message"] == {
        "role": "assistant", "content": "", "refusal": None, "reasoning_content": reasoning
    }  # fmt: skip


def test_a_stop_string_ends_the_answer_and_is_not_shown(cases, chat, text, serving, demo):
    ids = demo.tokenizer.encode(" Paris. The Eiffel Tower stands")
    answer = answered(text(stop=["Eif", "zzz"]), serving, ids, "stop")
    assert (choice(answer)["text"], choice(answer)["finish_reason"]) == (" Paris. The ", "stop")
    assert len(answer.tokens) < len(ids)
    held = answered(text(stop=["stands still"]), serving, ids, "length")
    assert (choice(held)["text"], choice(held)["finish_reason"]) == (" Paris. The Eiffel Tower stands", "length")
    case = cases["capital, thinking low"]  # Lisbon is named in the reasoning, too, where it ends nothing
    found = choice(answered(chat(case["messages"], stop="Lisbon"), serving, case["ids"], "stop"))
    assert found["message"]["content"] == "The capital of Portugal is "
    assert "Lisbon" in found["message"]["reasoning_content"] and found["finish_reason"] == "stop"


def test_a_stop_string_that_only_the_end_completes_counts(text, serving, demo):
    raw = next(i for i in range(256) if demo.tokenizer.token_bytes(i) == b"\xc3")
    ids = [*demo.tokenizer.encode("ab"), raw]  # the end makes a replacement character of it
    found = choice(answered(text(stop=["b\ufffd"]), serving, ids, "length"))
    assert (found["text"], found["finish_reason"]) == ("a", "stop")


def test_an_answer_in_the_place_of_reasoning_is_content(chat, serving, demo):
    tokenizer = demo.tokenizer
    close, sep = tokenizer.special_id("<|close|>"), tokenizer.special_id("<|sep|>")
    ids = [*tokenizer.encode("It is Lisbon."), close, *tokenizer.encode("response"), sep]
    end = tokenizer.special_id("<|end_of_msg|>")
    answer = answered(chat(), serving, [*ids, end], "stop", end)
    message = choice(answer)["message"]
    assert (message["content"], message["reasoning_content"]) == ("It is Lisbon.", "")
    assert answer.as_json(5)["usage"]["completion_tokens_details"]["reasoning_tokens"] == 0
    stopped = answered(chat(stop=["Lis"]), serving, [*ids, end], "stop", end)
    assert choice(stopped)["message"]["content"] == "It is " and choice(stopped)["finish_reason"] == "stop"


def test_a_character_that_was_cut_shows_as_one_replacement(text, serving, demo):
    raw = [next(i for i in range(256) if demo.tokenizer.token_bytes(i) == bytes([b])) for b in "é".encode()]
    assert choice(answered(text(), serving, raw, "length"))["text"] == "é"
    assert choice(answered(text(), serving, raw[:1], "length"))["text"] == "\ufffd"


def test_logprobs_cover_every_token_in_both_shapes(chat, text, serving, demo):
    ids = demo.tokenizer.encode(" Paris")
    raw = next(i for i in range(256) if demo.tokenizer.token_bytes(i) == b"\xc3")

    def logprobs(token):
        return -0.5, ((token, -0.5), (raw, -2.5))

    answer = answered(chat(logprobs=True, top_logprobs=2), serving, ids, "length", logprobs=logprobs)
    entries = choice(answer)["logprobs"]["content"]
    assert "".join(e["token"] for e in entries) == " Paris"
    assert b"".join(bytes(e["bytes"]) for e in entries) == b" Paris"
    assert [e["logprob"] for e in entries] == [-0.5] * len(ids)
    assert entries[0]["top_logprobs"][1] == {"token": "\ufffd", "logprob": -2.5, "bytes": [0xC3]}
    answer = answered(text(logprobs=2), serving, ids, "length", logprobs=logprobs)
    lists = choice(answer)["logprobs"]
    assert "".join(lists["tokens"]) == " Paris" and lists["token_logprobs"] == [-0.5] * len(ids)
    assert lists["top_logprobs"][0] == {lists["tokens"][0]: -0.5, "bytes:\\xc3": -2.5}
    assert lists["text_offset"] == [sum(map(len, lists["tokens"][:n])) for n in range(len(ids))]
    only = answered(text(logprobs=0), serving, ids, "length", logprobs=lambda token: (-0.5, ()))
    assert choice(only)["logprobs"]["top_logprobs"] is None


def test_a_drawn_answer_names_its_seed_and_a_greedy_one_has_none(text, serving):
    assert answered(text(temperature=1, seed=77), serving, [5], "length").as_json(5)["seed"] == 77
    assert answered(text(default_seed=8, temperature=0.5), serving, [5], "length").as_json(5)["seed"] == 8
    assert "seed" not in answered(text(), serving, [5], "length").as_json(5)


def test_the_object_has_what_clients_look_at(chat, text, serving):
    for task, kind in ((chat(), "chat.completion"), (text(), "text_completion")):
        body = answered(task, serving, [5, 6], "length").as_json(created=1234)
        assert (body["object"], body["created"], body["model"]) == (kind, 1234, "demo")
        assert body["id"].endswith("-name") and body["system_fingerprint"] == "fp_test"
        assert body["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}
        assert parse(write_line(body)) == body
