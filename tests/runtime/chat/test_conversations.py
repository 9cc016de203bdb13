"""Random conversations: written and read back, cut anywhere, continued; and random ids, which nobody would write."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

from deltafin.runtime.chat import (
    AssistantMessage,
    ChatParser,
    Conversation,
    Dialogue,
    SystemMessage,
    ToolCall,
    ToolResult,
    UserMessage,
    encode,
    parse,
    pieces,
    prompt,
)
from deltafin.runtime.chat.arguments import split

SEED = 20261130

WORDS = [
    *(
        "think",
        "response",
        "tools",
        "call",
        "argument",
        "message",
        "json",
        "the",
        "Paris",
        " ",
        "  ",
        "\n",
        "\r\n",
        "\t",
    ),
    *(
        "<|open|>",
        "<|close|>",
        "<|sep|>",
        "<|end_of_msg|>",
        "[EOS]",
        "<|reserved_token_2000|>",
        "<think>",
        "</response>",
    ),
    *('tool="x"', '"', "'", "&", "&amp;", "&quot;", "&amp;quot;", "<", ">", "{", "}", "[", "\\", "\\n", "1e2", "null"),
    *("é", "é", "模型", "שלום", "👩‍🚀", "🇳🇴", "\ufeff", "\u2028", "\x00", "\x1b", "\x7f", "\ufffd", "😀"),
]


class Writer:
    """Makes up conversations."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng

    def text(self, most: int = 12) -> str:
        joint = self.rng.choice(["", " "])
        return joint.join(self.rng.choices(WORDS, k=self.rng.randrange(most)))

    def value(self, depth: int = 0) -> object:
        kind = self.rng.randrange(9 if depth < 3 else 6)
        if kind < 2:
            return self.text(5)
        if kind < 6:
            simple = [None, True, False, 0, -7, 2.5, 1e100, 1e-7, 10**30, self.rng.random(), self.rng.randrange(10**6)]
            return self.rng.choice(simple)
        if kind < 7:
            return [self.value(depth + 1) for _ in range(self.rng.randrange(4))]
        return {self.text(3): self.value(depth + 1) for _ in range(self.rng.randrange(4))}

    def call(self) -> ToolCall:
        kind = self.rng.randrange(6)
        if kind == 0:
            arguments = self.text() + self.rng.choice(["", "{", '{"a": 1,', "[1, 2]", " "])
        else:
            value = {self.text(3): self.value() for _ in range(self.rng.randrange(4))}
            arguments = json.dumps(value, ensure_ascii=False, indent=2 if kind == 1 else None)
        return ToolCall(self.text(3) + "f", arguments, self.rng.choice([None, "a", "b", "c"]))

    def answer(self) -> AssistantMessage:
        calls = [self.call() for _ in range(self.rng.choice([0, 0, 1, 2, 3]))]
        content = self.text(30) if self.rng.random() < 0.8 else tuple(self.text() for _ in range(3))
        name = self.text(3) if self.rng.random() < 0.1 else ""
        return AssistantMessage(content, self.text(30), tuple(calls), name)

    def others(self) -> Iterator[SystemMessage | UserMessage | ToolResult]:
        for _ in range(self.rng.randrange(4)):
            kind = self.rng.randrange(4)
            if kind == 0:
                yield SystemMessage(self.text(), tools=[{"name": self.text(3)}] if self.rng.random() < 0.2 else ())
            elif kind == 1:
                yield ToolResult(self.text(), self.rng.choice([None, "a", "b", "c"]), self.text(3) + "t")
            else:
                yield UserMessage(self.text(), self.text(3) if self.rng.random() < 0.2 else "")

    def conversation(self) -> Conversation:
        messages: list = []
        for _ in range(self.rng.randint(1, 3)):
            messages += [*self.others(), self.answer()]
        tools = [{"function": {"name": self.text(3), "parameters": self.value()}}] * self.rng.randrange(2)
        thinking = self.rng.random() < 0.7
        return Conversation(
            [*messages, *self.others()],
            tools,
            thinking,
            self.rng.choice([None, "low", "high", "max"]),
            self.rng.choice([None, "auto", "none", "required"]),
            self.rng.choice([None, "text", "json_object"]),
        )


@pytest.fixture
def own_ids(tokenizer) -> Callable[[AssistantMessage, bool], list[int]]:
    """What a model writes that writes as the format does: the message after the two tags that its prompt opens."""
    sep = tokenizer.special_id("<|sep|>")

    def own_ids(message: AssistantMessage, thinking: bool) -> list[int]:
        ids = encode(pieces(Conversation([message], thinking=thinking), opening=False), tokenizer)
        return ids[ids.index(sep, ids.index(sep) + 1) + 1 :]

    return own_ids


def members(arguments: str) -> object:
    """Arguments compared by what they say: an object's members in order, else the text."""
    try:
        value = json.loads(arguments or "{}", object_pairs_hook=lambda pairs: ("object", pairs))
    except ValueError:
        return arguments
    return value if isinstance(value, tuple) else arguments


def check_round_trip(seed: int, tokenizer, own_ids, cut_anew, gather) -> None:
    """Every answer of a conversation is read back as it was, from its place in the prompt and in other tokens."""
    rng = random.Random(seed)
    conversation = Writer(rng).conversation()
    whole = prompt(conversation, tokenizer)
    assert list(whole.ids) == encode(pieces(conversation), tokenizer)
    for place, message in enumerate(conversation.messages):
        if not isinstance(message, AssistantMessage):
            continue
        ids = own_ids(message, conversation.thinking)
        assert ids == list(whole.ids[whole.ends[place] - len(ids) : whole.ends[place]])
        answer = parse(ids, tokenizer, conversation.thinking)
        assert answer.reasoning == (message.reasoning if conversation.thinking else "")
        assert answer.content == "".join(message.content)
        assert [(c.name, members(c.arguments)) for c in answer.tool_calls] == [
            (c.name, members(c.arguments)) for c in message.tool_calls
        ]
        assert answer.finish == ("tool_calls" if message.tool_calls else "stop")
        if isinstance(message.content, str):
            # Taken as a message of the next prompt, it is the ids that it was read from.
            again = replace(answer.message(), name=message.name)
            assert own_ids(again, conversation.thinking) == ids
        parser = ChatParser(tokenizer, conversation.thinking)
        events = [event for token in cut_anew(ids, rng) for event in parser.push(token)]
        assert replace(gather(events), tool_calls=()) == replace(answer, tool_calls=())
        assert [(c.name, c.arguments) for c in gather(events).tool_calls] == [
            (c.name, c.arguments) for c in answer.tool_calls
        ]


def test_random_conversations_are_read_back_as_they_were_written(tokenizer, own_ids, cut_anew, gather):
    for seed in range(500):
        check_round_trip(SEED + seed, tokenizer, own_ids, cut_anew, gather)


@pytest.mark.slow
def test_ten_thousand_random_conversations_are_read_back_as_they_were_written(tokenizer, own_ids, cut_anew, gather):
    for seed in range(10_000):
        check_round_trip(2 * SEED + seed, tokenizer, own_ids, cut_anew, gather)


# Going on


def test_a_dialogue_only_appends_and_equals_the_conversation_written_at_once(tokenizer, own_ids):
    for seed in range(60):
        rng = random.Random(seed)
        writer = Writer(rng)
        thinking = rng.random() < 0.7
        tools = [{"name": "f"}] * rng.randrange(2)
        dialogue = Dialogue(tokenizer, Conversation([SystemMessage(writer.text())], tools, thinking, "low"))
        seen: list[int] = []  # what a sequence would have been fed
        for _ in range(4):
            dialogue.add(UserMessage(writer.text()))
            ids = dialogue.prompt()
            assert ids[: len(seen)] == seen
            assert ids == list(prompt(dialogue.conversation, tokenizer).ids)
            message = replace(writer.answer(), name="", content=writer.text())
            written = own_ids(message, thinking)
            parser = dialogue.parser()
            for token in written:
                parser.push(token)
            dialogue.answered(parser)
            seen = [*ids, *written]
            calls = parser.answer.tool_calls
            assert dialogue.conversation.messages[-1] == parser.answer.message()
            dialogue.add(*(ToolResult(writer.text(), call.id) for call in reversed(calls)))
        assert dialogue.prompt()[: len(seen)] == seen


def test_an_answer_cut_anywhere_is_closed_as_the_message_it_then_is(tokenizer, own_ids, in_bytes):
    for seed in range(6):
        writer = Writer(random.Random(seed))
        for thinking in (True, False):
            message = AssistantMessage(writer.text(20), writer.text(20))
            canonical = pieces(Conversation([message], thinking=thinking), opening=False)
            opened = len(pieces(Conversation(thinking=thinking)))
            answer = in_bytes(canonical[opened:])
            for count in range(len(answer) + 1):
                dialogue = Dialogue(tokenizer, Conversation([UserMessage("q")], thinking=thinking))
                asked = dialogue.prompt()
                parser = dialogue.parser()
                for token in answer[:count]:
                    parser.push(token)
                dialogue.answered(parser)
                dialogue.add(UserMessage("go on"))
                ids = dialogue.prompt()
                assert ids[: len(asked) + count] == asked + answer[:count]
                # Ids of words that were cut may differ from those of the format; what they say does not.
                assert tokenizer.decode(ids) == tokenizer.decode(prompt(dialogue.conversation, tokenizer).ids)


def test_a_cut_call_is_none_in_the_answer_and_whole_in_the_history(tokenizer, own_ids):
    message = AssistantMessage("c", "r", [ToolCall('a"b', '{"k": "v", "n": [1, 2]}'), ToolCall("g", "not json")])
    written = own_ids(message, True)
    for count in range(len(written) + 1):
        parser = ChatParser(tokenizer, thinking=True)
        for token in written[:count]:
            parser.push(token)
        parser.finish()
        closed = parse([*parser.ids, *encode(parser.closing(), tokenizer)], tokenizer, thinking=True)
        assert closed.finish in ("stop", "tool_calls")
        assert (closed.reasoning, closed.content) == (parser.answer.reasoning, parser.answer.content)
        whole = [(c.name, c.arguments) for c in parser.answer.tool_calls]
        assert [(c.name, c.arguments) for c in closed.tool_calls][: len(whole)] == whole
        assert len(closed.tool_calls) <= len(whole) + 1


def test_an_answer_that_ended_with_another_token_is_ended_as_a_message(tokenizer):
    dialogue = Dialogue(tokenizer, Conversation([UserMessage("q")], thinking=False))
    parser = dialogue.parser()
    for token in [*encode(["a"], tokenizer), tokenizer.special_id("[EOS]")]:
        parser.push(token)
    dialogue.answered(parser)
    assert dialogue.prompt() == list(prompt(dialogue.conversation, tokenizer).ids)


# Ids at random


TAGS = [
    *("think", "response", "tools", "call", "argument", "json", "message", "note", "", " ", "resp", "call tool="),
    *('call tool="f" index="1"', 'call index="1"', 'call tool="a&quot;b&amp;amp;"', 'argument key="k" type="number"'),
    *(
        'argument key="k"',
        'argument type="string"',
        'argument key="" type="weird"',
        'json type="object"',
        'message role="x"',
    ),
]
VALUES = ["1", '"s"', "tru", "[1, 2]", '{"a": 1}', "{", "", " \n", "word", "é模👩‍🚀", "x=\"y\""]  # fmt: skip


def random_ids(rng: random.Random, tokenizer, byte_ids) -> list[int]:
    """Mostly tags and values in no order, some ids from anywhere, half characters, and ends."""
    special = list(tokenizer.special_tokens.values())
    control = [tokenizer.special_id(f"<|{name}|>") for name in ("open", "close", "sep")]
    ends = [tokenizer.special_id("<|end_of_msg|>"), tokenizer.special_id("[EOS]")]
    ids: list[int] = []
    for _ in range(rng.randrange(60)):
        kind = rng.random()
        if kind < 0.55:  # a tag, whole or not
            begin, end = control[rng.randrange(2)], control[2]
            tag = [begin, *encode([rng.choice(TAGS)], tokenizer), end]
            ids += tag if rng.random() < 0.8 else tag[: rng.randint(1, len(tag))]
        elif kind < 0.8:
            ids += encode([rng.choice(VALUES)], tokenizer)
        elif kind < 0.9:
            ids += rng.choices(byte_ids, k=rng.randint(1, 4))
        elif kind < 0.97:
            ids.append(rng.choice([*control, *set(special).difference(ends)]))
        else:
            ids.append(rng.choice(ends))
    return ids


def check_random_ids(seed: int, tokenizer, byte_ids, own_ids, cut_anew, gather) -> None:
    rng = random.Random(seed)
    thinking = rng.random() < 0.5
    ids = random_ids(rng, tokenizer, byte_ids)
    parser = ChatParser(tokenizer, thinking, new_id=iter(range(1000)).__next__)
    events = [event for token in ids for event in parser.push(token)] + parser.finish()
    answer = parser.answer
    assert gather(events) == answer
    assert parse(ids, tokenizer, thinking, new_id=iter(range(1000)).__next__) == answer
    assert parse(cut_anew(ids, rng), tokenizer, thinking, new_id=iter(range(1000)).__next__) == answer
    # Made a whole message, it ends, and says the same.
    closed = parse([*parser.ids, *encode(parser.closing(), tokenizer)], tokenizer, thinking)
    assert closed.finish in ("stop", "tool_calls")
    special = frozenset(tokenizer.special_tokens.values())
    last = parser.ids[::-1].index(close) if (close := tokenizer.special_id("<|close|>")) in parser.ids else 0
    if tokenizer.decode(i for i in parser.ids[len(parser.ids) - last :] if i not in special).strip() == "response":
        # The one cut tag whose end says something: what was reasoning may be content in the history.
        assert sorted(closed.reasoning + closed.content) == sorted(answer.reasoning + answer.content)
    else:
        assert (closed.reasoning, closed.content) == (answer.reasoning, answer.content)
    calls = [(c.name, c.arguments) for c in answer.tool_calls]
    assert [(c.name, c.arguments) for c in closed.tool_calls][: len(calls)] == calls
    # And it can be said again.
    again = parse(own_ids(answer.message(), True), tokenizer, thinking=True)
    assert (again.reasoning, again.content) == (answer.reasoning, answer.content)
    assert [(c.name, split(c.arguments) or c.arguments) for c in again.tool_calls] == [
        (c.name, split(c.arguments) or c.arguments) for c in answer.tool_calls
    ]
    # No control token shows: where no text spells "<|" or "[", as here, none of their names can come of it.
    spelled = tokenizer.decode(i for i in ids if i < min(tokenizer.special_tokens.values()))
    if "<|" not in spelled:
        assert "<|" not in answer.reasoning + answer.content + str(calls)


def test_random_ids_never_confuse_the_parser(tokenizer, byte_ids, own_ids, cut_anew, gather):
    for seed in range(500):
        check_random_ids(seed, tokenizer, byte_ids, own_ids, cut_anew, gather)


@pytest.mark.slow
def test_twenty_thousand_streams_of_random_ids_never_confuse_the_parser(tokenizer, byte_ids, own_ids, cut_anew, gather):
    for seed in range(20_000):
        check_random_ids(10_000 + seed, tokenizer, byte_ids, own_ids, cut_anew, gather)
