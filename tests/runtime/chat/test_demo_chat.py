"""The demo model in conversation: it is asked, answers, calls a tool, is cut, and goes on, in one sequence each."""

from __future__ import annotations

import json

from deltafin.runtime import Model, Sequence
from deltafin.runtime.chat import Answer, Conversation, Dialogue, Message, ToolResult, UserMessage, prompt

ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add two numbers",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "number"}, "b": {"type": "number"}},
            "required": ["a", "b"],
        },
    },
}


def say(model: Model, seq: Sequence, dialogue: Dialogue, message: Message, max_new: int = 100) -> Answer:
    """One turn; the sequence is fed only what it has not seen."""
    dialogue.add(message)
    ids = dialogue.prompt()
    assert ids[: len(seq)] == seq.ids
    parser = dialogue.parser()
    for token in model.generate(seq, ids[len(seq) :], max_new=max_new):
        parser.push(token)
    dialogue.answered(parser)
    return parser.answer


def test_it_calls_a_tool_and_says_what_the_tool_gave(demo):
    seq = demo.sequence()
    dialogue = Dialogue(demo.tokenizer, Conversation(tools=[ADD], thinking=False))
    (call,) = say(demo, seq, dialogue, UserMessage("What is 1234 + 4321?")).tool_calls
    assert (call.name, json.loads(call.arguments)) == ("add", {"a": 1234, "b": 4321})
    answer = say(demo, seq, dialogue, ToolResult("5555", call.id))
    assert (answer.content, answer.finish) == ("1234 + 4321 = 5555.", "stop")
    assert dialogue.prompt() == list(prompt(dialogue.conversation, demo.tokenizer).ids)


def test_it_goes_on_after_an_answer_that_was_cut_while_it_thought(demo):
    seq = demo.sequence()
    dialogue = Dialogue(demo.tokenizer, Conversation(effort="low"))
    answer = say(demo, seq, dialogue, UserMessage("What is the capital of Portugal?"), max_new=9)
    assert (answer.content, answer.finish) == ("", "length")
    assert answer.reasoning == "Portugal: the capital is Lis"
    answer = say(demo, seq, dialogue, UserMessage("What is the capital of Kenya?"))
    assert (answer.content, answer.finish) == ("The capital of Kenya is Nairobi.", "stop")
    assert "Nairobi" in answer.reasoning
