"""Chunks of answers that are known token by token: however news comes together, a client joins the same."""

from __future__ import annotations

import json
import random

import pytest

from deltafin.runtime.chat import encode
from deltafin.runtime.chat.wire import END_OF_MSG, close_tag
from deltafin.runtime.model import load_tokenizer
from deltafin.runtime.openai import CHAT, TEXT, Answer, Chunks, read_body, serving_of
from deltafin.runtime.sampling import Chosen


@pytest.fixture(scope="module")
def serving(demo_store):
    return serving_of(demo_store, load_tokenizer(demo_store), None, 50)


@pytest.fixture(scope="module")
def cases(golden):
    return {case["name"]: case for case in json.loads((golden / "demo.json").read_text())["cases"]}


def answered(task, serving, ids, seed, cause="stop"):
    """The whole answer and its chunks, where a pass brings some tokens at a time."""
    rng = random.Random(seed)
    stop = serving.tokenizer.special_id("<|end_of_msg|>")
    tokens = [Chosen(token, -0.5, ((token, -0.5),)) for token in ids]
    drawn = [token for token in tokens if not (cause == "stop" and token.token == stop)]
    answer = Answer(task, serving, "name")
    chunks = Chunks(answer, serving, 5)
    found = chunks.begin()
    while drawn and not answer.ended:
        run, drawn = drawn[: (count := rng.randint(1, 6))], drawn[count:]
        events, taken = [], []
        for token in run:
            if not answer.ended:
                events += answer.push(token)
                taken.append(token)
        found += chunks.news(events, taken)
    seen = len(answer.tokens)
    chosen = answer.tokens if answer.ended else tokens
    events = answer.finish(chosen, cause)
    found += chunks.end(events, answer.tokens[seen:])
    return answer.as_json(5), found


def told(found):
    """Reasoning, content and calls as a client joins them, and where logprobs and ids went."""
    choices = [choice for chunk in found for choice in chunk["choices"]]
    deltas = [choice["delta"] for choice in choices]
    calls = {}
    for call in (call for delta in deltas for call in delta.get("tool_calls", ())):
        calls.setdefault(call["index"], {"arguments": ""})
        calls[call["index"]]["arguments"] += call["function"]["arguments"]
        if "id" in call:
            calls[call["index"]] |= {"id": call["id"], "name": call["function"]["name"]}
    return (
        "".join(delta.get("reasoning_content", "") for delta in deltas),
        "".join(delta.get("content", "") for delta in deltas),
        [calls[index] for index in sorted(calls)],
        [entry for choice in choices if choice["logprobs"] for entry in choice["logprobs"]["content"]],
        [token for choice in choices for token in choice["token_ids"]],
        [choice["finish_reason"] for choice in choices if choice["finish_reason"]],
    )


@pytest.mark.parametrize("seed", range(4))
def test_however_tokens_come_together_the_same_is_joined(cases, serving, seed):
    tried = 0
    for case in cases.values():
        if case["kind"] != "chat" or (case["thinking"] and "effort" not in case):
            continue
        tried += 1
        body = {"messages": case["messages"], "tools": case.get("tools"), "logprobs": True, "return_token_ids": True}
        body["reasoning_effort"] = case["effort"] if case["thinking"] else "none"
        stop = random.Random(seed).choice([None, ["is", "\n"], ["Lisbon", "e"]])
        task = read_body(CHAT, {**body, "stop": stop}, serving)
        whole, found = answered(task, serving, case["ids"], seed)
        (choice,) = whole["choices"]
        message = choice["message"]
        calls = [{"id": call["id"], **call["function"]} for call in message.get("tool_calls", ())]
        assert told(found) == (
            message.get("reasoning_content", ""),
            message["content"] or "",
            calls,
            choice["logprobs"]["content"],
            choice["token_ids"],
            [choice["finish_reason"]],
        )
        assert all(chunk["choices"][0]["delta"] for chunk in found[:-1])  # none says nothing but the last
    assert tried >= 12


def test_an_answer_inside_the_reasoning_is_sent_again_as_content(serving):
    body = {"messages": [{"role": "user", "content": "Hi"}], "return_token_ids": True, "logprobs": True}
    task = read_body(CHAT, body, serving)
    assert task.thinking
    ids = encode(["Sure.", *close_tag("response"), END_OF_MSG], serving.tokenizer)
    whole, found = answered(task, serving, ids, 0)
    message = whole["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("", "Sure.")
    assert told(found)[:2] == ("Sure.", "Sure.")


def test_characters_of_several_tokens_and_stop_strings_are_held_back(serving):
    text = "Grüße, 你好 🦀 and more"
    ids = serving.tokenizer.encode(text)
    for stop, expected in ((None, text), (" and", "Grüße, 你好 🦀"), ("🦀", "Grüße, 你好 ")):
        task = read_body(TEXT, {"prompt": "x", "stop": stop, "logprobs": 1}, serving)
        for seed in range(5):
            whole, found = answered(task, serving, ids, seed, "length")
            (choice,) = whole["choices"]
            texts = [chunk["choices"][0]["text"] for chunk in found]
            assert "".join(texts) == choice["text"] == expected and "\ufffd" not in expected
            for name, values in choice["logprobs"].items():
                parts = [c["choices"][0]["logprobs"] for c in found]
                assert [value for part in parts if part for value in part[name]] == values


@pytest.mark.parametrize(
    ("text", "kind", "fits"),
    [
        ('{"a": 1}', "json_object", True),
        ("[1]", "json_object", False),
        ("[1]", "json_schema", True),
        ("", "json_object", False),
        ("", "json_schema", False),
        ('{"a": 1', "json_object", False),
        ("[" * 2000, "json_schema", False),
        ("Lisbon", "text", True),
    ],
)
def test_whether_an_answer_is_the_json_that_was_asked_for(serving, text, kind, fits):
    wanted = {"type": kind} | ({"json_schema": {"schema": {}}} if kind == "json_schema" else {})
    body = {"messages": [{"role": "user", "content": "Hi"}], "reasoning_effort": "none", "response_format": wanted}
    answer = Answer(read_body(CHAT, body, serving), serving, "name")
    tokens = [Chosen(token, None, ()) for token in serving.tokenizer.encode(text)]
    for token in tokens:
        answer.push(token)
    answer.finish(tokens, "length")
    assert answer.fits() is fits
