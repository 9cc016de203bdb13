"""Clients that people have already: OpenAI's own, LangChain's, curl. What they get is what df-run writes."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys

import openai
import pytest
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from openai import AsyncOpenAI, OpenAI

RUN = "from deltafin.cli import run_main; run_main()"
THINKING, TOOLS = "capital, thinking low", "tool call"


@pytest.fixture(scope="module")
def cases(golden):
    return {case["name"]: case for case in json.loads((golden / "demo.json").read_text())["cases"]}


@pytest.fixture(scope="module")
def df_run(tmp_path_factory, demo_dir):
    """`df_run(case)`: what the command answers the same conversation with."""
    folder = tmp_path_factory.mktemp("df-run")

    def run(case) -> dict[str, object]:
        (folder / "messages.json").write_text(json.dumps(case["messages"]))
        words = [sys.executable, "-c", RUN, str(demo_dir), "--chat", "--json", "--messages", "messages.json"]
        if "tools" in case:
            (folder / "tools.json").write_text(json.dumps(case["tools"]))
            words += ["--tools", "tools.json"]
        words += ["--effort", case.get("effort") or "none"]
        env = {**os.environ, "DELTAFIN_CACHE": str(folder / "cache")}
        done = subprocess.run(words, cwd=folder, capture_output=True, text=True, timeout=120, env=env)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    return run


@pytest.fixture(scope="module")
def client(server):
    with OpenAI(base_url=f"{server.url}/v1", api_key="anything", timeout=60) as client:
        yield client


@pytest.fixture(scope="module")
def ask(server):
    """The fields of a golden conversation as the client takes them."""

    def fields(case, **more):
        given = {"model": server.model_name, "messages": case["messages"]}
        if "tools" in case:
            given["tools"] = case["tools"]
        given["reasoning_effort"] = case.get("effort") or "none"
        return {**given, "extra_body": {"return_token_ids": True}, **more}

    return fields


def usage_is_right(usage, case, cached=None) -> None:
    assert usage.prompt_tokens == len(case["prompt_ids"])
    assert usage.completion_tokens == len(case["ids"])
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
    assert 0 <= usage.prompt_tokens_details.cached_tokens < usage.prompt_tokens


@pytest.mark.parametrize("name", [pytest.param(THINKING, marks=pytest.mark.slow), TOOLS])
def test_an_answer_is_that_of_df_run(client, ask, cases, df_run, name):
    case = cases[name]
    ran = df_run(case)
    choice = client.chat.completions.create(**ask(case)).choices[0]
    assert choice.prompt_token_ids == ran["prompt_ids"] == case["prompt_ids"]
    assert choice.token_ids == ran["ids"] == case["ids"]
    assert choice.message.content == (None if name == TOOLS else ran["text"])


@pytest.mark.parametrize("name", ["two turns with memory", "tool result"])
def test_conversations_of_all_kinds_have_their_known_answers(client, ask, cases, name):
    answer = client.chat.completions.create(**ask(cases[name]))
    choice = answer.choices[0]
    assert choice.token_ids == cases[name]["ids"]
    assert choice.message.content == cases[name]["text"].partition("<|close|>")[0]
    assert choice.finish_reason == "stop"
    usage_is_right(answer.usage, cases[name])
    assert answer.usage.completion_tokens_details.reasoning_tokens == 0


def test_reasoning_comes_beside_the_answer(client, ask, cases):
    answer = client.chat.completions.create(**ask(cases[THINKING]))
    message = answer.choices[0].message
    assert message.reasoning_content == "Portugal: the capital is Lisbon."
    assert message.content == "The capital of Portugal is Lisbon."
    usage_is_right(answer.usage, cases[THINKING])
    assert 0 < answer.usage.completion_tokens_details.reasoning_tokens < answer.usage.completion_tokens


def gathered(chunks):
    """A stream put together again: message fields, tool calls, finish reason, usage, ids."""
    found = {"content": "", "reasoning": "", "calls": {}, "finish": None, "usage": None, "ids": [], "pieces": 0}
    for chunk in chunks:
        found["usage"] = chunk.usage or found["usage"]
        for choice in chunk.choices:
            delta = choice.delta
            found["content"] += delta.content or ""
            found["reasoning"] += getattr(delta, "reasoning_content", None) or ""
            found["ids"] += getattr(choice, "token_ids", None) or []
            found["pieces"] += bool(delta.content)
            for call in delta.tool_calls or []:
                known = found["calls"].setdefault(call.index, {"id": call.id, "name": "", "arguments": ""})
                known["name"] += call.function.name or ""
                known["arguments"] += call.function.arguments or ""
            found["finish"] = choice.finish_reason or found["finish"]
    return found


def test_a_stream_brings_the_same_piece_by_piece(client, ask, cases):
    case = cases[THINKING]
    with client.chat.completions.create(**ask(case, stream=True, stream_options={"include_usage": True})) as stream:
        found = gathered(stream)
    assert found["content"] == "The capital of Portugal is Lisbon."
    assert found["reasoning"] == "Portugal: the capital is Lisbon."
    assert found["ids"] == case["ids"]
    assert found["pieces"] > 1  # tokens of one beat come together
    assert found["finish"] == "stop"
    usage_is_right(found["usage"], case)


def test_the_clients_own_gathering_of_streams_works(client, ask, cases):
    """It checks the format more strictly than who only reads deltas."""
    with client.chat.completions.stream(**ask(cases[TOOLS])) as stream:
        events = [event.type for event in stream]
        final = stream.get_final_completion()
    (call,) = final.choices[0].message.tool_calls
    assert json.loads(call.function.arguments) == {"city": "Paris"}
    assert "tool_calls.function.arguments.delta" in events
    assert final.choices[0].finish_reason == "tool_calls"


def test_tools_go_round(client, ask, cases):
    """A call, its result, and the answer from it; whole and streamed alike."""
    case = cases[TOOLS]
    message = client.chat.completions.create(**ask(case)).choices[0].message
    (call,) = message.tool_calls
    assert (call.type, call.function.name) == ("function", "get_weather")
    assert json.loads(call.function.arguments) == {"city": "Paris"}
    assert message.reasoning_content == "I should call get_weather."
    found = gathered(client.chat.completions.create(**ask(case, stream=True)))
    assert found["finish"] == "tool_calls"
    assert found["ids"] == case["ids"]
    ((_, streamed),) = found["calls"].items()
    assert (streamed["name"], json.loads(streamed["arguments"])) == ("get_weather", {"city": "Paris"})
    result = {"role": "tool", "tool_call_id": call.id, "content": '{"weather": "sunny", "celsius": 21}'}
    messages = [*case["messages"], message.model_dump(exclude_none=True), result]
    answer = client.chat.completions.create(**ask(case, messages=messages)).choices[0]
    assert answer.finish_reason == "stop"
    assert "sunny" in answer.message.content


def test_many_at_once_from_the_asynchronous_client(server, ask, cases):
    names = ["two turns with memory", "greeting with system prompt", THINKING]

    async def all_of_them():
        async with AsyncOpenAI(base_url=f"{server.url}/v1", api_key="anything", timeout=60) as client:

            async def streamed(name):
                chunks = await client.chat.completions.create(**ask(cases[name], stream=True))
                return gathered([chunk async for chunk in chunks])["ids"]

            async def whole(name):
                return (await client.chat.completions.create(**ask(cases[name]))).choices[0].token_ids

            return await asyncio.gather(*(ask_(name) for name in names for ask_ in (streamed, whole)))

    found = asyncio.run(all_of_them())
    assert found == [cases[name]["ids"] for name in names for _ in range(2)]


def test_json_and_logprobs_and_stops_and_seeds(client, ask, cases):
    case = {**cases["json object"], "effort": None}
    wanted = {"response_format": {"type": "json_object"}}
    choice = client.chat.completions.create(**ask(case, **wanted, logprobs=True, top_logprobs=2)).choices[0]
    assert json.loads(choice.message.content) == {"answer": "Nairobi"}
    assert [len(token.top_logprobs) for token in choice.logprobs.content] == [2] * len(choice.token_ids)
    assert all(token.logprob <= 0 for token in choice.logprobs.content)
    stopped = client.chat.completions.create(**ask(cases["greeting with system prompt"], stop=["How"])).choices[0]
    assert (stopped.message.content, stopped.finish_reason) == ("Hello! ", "stop")
    drawn = [
        client.chat.completions.create(**ask(cases["unknown topic"], temperature=3, seed=n, max_tokens=8))
        for n in (3, 3, 5)
    ]
    ids = [answer.choices[0].token_ids for answer in drawn]
    assert ids[0] == ids[1] != ids[2]
    assert drawn[0].choices[0].finish_reason == "length"


def test_plain_completions(client, server, cases):
    case = cases["raw capital"]
    fields = {"model": server.model_name, "prompt": case["prompt"], "max_tokens": len(case["ids"])}
    answer = client.completions.create(**fields, extra_body={"return_token_ids": True})
    assert answer.choices[0].token_ids == case["ids"]
    usage_is_right(answer.usage, case)
    streamed = client.completions.create(**fields, stream=True)
    assert "".join(chunk.choices[0].text for chunk in streamed if chunk.choices) == answer.choices[0].text


def test_errors_are_the_clients_own(client, server, ask, cases):
    case = cases["greeting with system prompt"]
    with pytest.raises(openai.BadRequestError) as bad:
        client.chat.completions.create(**ask(case, n=3))
    assert bad.value.param == "n"
    with pytest.raises(openai.NotFoundError) as unknown:
        client.chat.completions.create(**ask(case, model="gpt-4o"))
    assert server.model_name in str(unknown.value)
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("gpt-4o")
    with pytest.raises(openai.BadRequestError) as long:
        client.chat.completions.create(**ask(case, max_tokens=100_000_000))
    assert long.value.code == "context_length_exceeded" or long.value.param == "max_tokens"
    assert [model.id for model in client.models.list()] == [server.model_name]


def test_a_key_is_asked_for_and_a_wrong_one_refused(new_server, cases, ask):
    server = new_server(api_key="sesame", context=512)
    fields = ask(cases["greeting with system prompt"], model=server.model_name, max_tokens=2)
    with pytest.raises(openai.AuthenticationError) as refused:
        OpenAI(base_url=f"{server.url}/v1", api_key="tahini").chat.completions.create(**fields)
    assert "sesame" not in str(refused.value) and "tahini" not in str(refused.value)
    assert OpenAI(base_url=f"{server.url}/v1", api_key="sesame").chat.completions.create(**fields).choices


def test_langchain(server, cases):
    model = ChatOpenAI(
        base_url=f"{server.url}/v1", api_key="anything", model=server.model_name, reasoning_effort="none", timeout=60
    )
    (question,) = cases["moons of Saturn"]["messages"]
    text = "The three largest moons of Saturn are Titan, Rhea and Iapetus."
    answer = model.invoke([HumanMessage(question["content"])])
    assert answer.content == text
    assert answer.usage_metadata["output_tokens"] == len(cases["moons of Saturn"]["ids"])
    assert "".join(piece.content for piece in model.stream(question["content"])) == text

    @tool
    def get_weather(city: str) -> str:
        """Get the current weather"""
        return "sunny"

    bound = model.bind_tools([get_weather])
    asked = [HumanMessage("What is the weather in Paris?")]
    called = bound.invoke(asked)
    (call,) = called.tool_calls
    assert (call["name"], call["args"]) == ("get_weather", {"city": "Paris"})
    final = bound.invoke([*asked, called, ToolMessage(get_weather.invoke(call["args"]), tool_call_id=call["id"])])
    assert final.content
    assert not final.tool_calls


def test_curl(server, cases, tmp_path):
    """As in the manual, whole and streamed."""
    (tmp_path / "body.json").write_text(
        json.dumps({"model": server.model_name, "reasoning_effort": "none", **_only(cases["moons of Saturn"])})
    )
    words = ["curl", "-sS", "--fail-with-body", "-N", f"{server.url}/v1/chat/completions"]
    words += ["-H", "Content-Type: application/json", "-d", "@body.json"]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    text = json.loads(done.stdout)["choices"][0]["message"]["content"]
    assert text == "The three largest moons of Saturn are Titan, Rhea and Iapetus."
    body = json.loads((tmp_path / "body.json").read_text())
    (tmp_path / "body.json").write_text(json.dumps({**body, "stream": True}))
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    data = [line.removeprefix("data: ") for line in done.stdout.splitlines() if line.startswith("data: ")]
    assert data[-1] == "[DONE]"
    assert "".join(json.loads(d)["choices"][0]["delta"].get("content") or "" for d in data[:-1]) == text


def _only(case):
    return {"messages": case["messages"]}
