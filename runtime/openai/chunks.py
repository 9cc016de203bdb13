"""An answer as the chunks of a stream, which a client joins to what the whole object would have had."""

from __future__ import annotations

from collections.abc import Sequence

from deltafin.runtime.chat import ContentText, Event, ReasoningText, ToolCallArguments, ToolCallBegan
from deltafin.runtime.openai.answer import Answer
from deltafin.runtime.openai.logprobs import TextLogprobs, chat_logprobs
from deltafin.runtime.openai.task import CHAT, Serving
from deltafin.runtime.sampling import Chosen

Chunk = dict[str, object]


class Chunks:
    """Writes what an answer reports as objects of the API, in order; all have one id.

    Joined, their texts, tool calls and logprobs are those of `Answer.as_json`, but for one thing that cannot be taken
    back: where the model answers inside its reasoning and this is known only at the end, the text is sent twice, as
    `reasoning_content` while it arrives and as `content` then.
    """

    def __init__(self, answer: Answer, serving: Serving, created: int) -> None:
        """`created` in seconds since 1970."""
        self._answer, self._serving, self._created = answer, serving, created
        self._chat = answer.task.endpoint == CHAT
        self._text_logprobs = TextLogprobs(serving.tokenizer)
        self._held: list[Chosen] = []  # tokens that have shown nothing so far
        self._begun = False

    def begin(self) -> list[Chunk]:
        """Before the first token."""
        if not self._chat:
            return []
        delta: dict[str, object] = {"role": "assistant", "content": ""}
        if self._answer.task.thinking:
            delta["reasoning_content"] = ""
        return [self._chunk([self._choice({"delta": delta}, [])])]

    def news(self, events: Sequence[Event], chosen: Sequence[Chosen]) -> list[Chunk]:
        """What some tokens, `chosen`, have added: nothing, or one chunk."""
        self._held += chosen
        shown = self._delta(events) if self._chat else _text(events)
        if not shown:
            return []
        held, self._held = self._held, []
        return [self._chunk([self._choice({"delta": shown} if self._chat else {"text": shown}, held)])]

    def end(self, events: Sequence[Event], chosen: Sequence[Chosen]) -> list[Chunk]:
        """What the last tokens have added, why there are no more, and the counts if they were asked for."""
        found = self.news(events, chosen)
        held, self._held = self._held, []
        nothing: dict[str, object] = {"delta": {}} if self._chat else {"text": ""}
        found.append(self._chunk([self._choice(nothing, held, self._answer.reason)]))
        if self._answer.task.stream_usage:
            found.append(self._chunk([], usage=self._answer.usage()))
        return found

    def progress(self, told: dict[str, object]) -> Chunk:
        """No part of the answer: how far the work for it is."""
        return self._chunk([], progress=told)

    def _chunk(self, choices: list[dict[str, object]], **more: object) -> Chunk:
        kind = "chat.completion.chunk" if self._chat else "text_completion"
        if self._answer.task.stream_usage:
            more = {"usage": None, **more}
        return self._answer.written(kind, self._created, choices, **more)

    def _choice(
        self, shown: dict[str, object], chosen: Sequence[Chosen], reason: str | None = None
    ) -> dict[str, object]:
        task = self._answer.task
        logprobs: dict[str, object] | None = None
        if task.sampling.top_logprobs is not None and chosen:
            logprobs = (
                chat_logprobs(chosen, self._serving.tokenizer) if self._chat else self._text_logprobs.push(chosen)
            )
        choice = {"index": 0, **shown, "logprobs": logprobs, "finish_reason": reason}
        if task.returns_ids:
            if not self._begun:
                choice["prompt_token_ids"] = list(task.ids)
            choice["token_ids"] = [c.token for c in chosen]
        self._begun = True
        return choice

    @staticmethod
    def _delta(events: Sequence[Event]) -> dict[str, object]:
        """Of a message. Reasoning comes before content and content before calls, so one delta holds them in order."""
        delta: dict[str, object] = {}
        reasoning = "".join(e.text for e in events if isinstance(e, ReasoningText))
        if reasoning:
            delta["reasoning_content"] = reasoning
        if content := _text(events):
            delta["content"] = content
        calls: list[dict[str, object]] = []
        for event in events:
            match event:
                case ToolCallBegan(index, call_id, name):
                    function = {"name": name, "arguments": ""}
                    calls.append({"index": index, "id": call_id, "type": "function", "function": function})
                case ToolCallArguments(index, text):
                    calls.append({"index": index, "function": {"arguments": text}})
        return delta | ({"tool_calls": calls} if calls else {})


def _text(events: Sequence[Event]) -> str:
    return "".join(e.text for e in events if isinstance(e, ContentText))
