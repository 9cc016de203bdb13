"""An answer while its tokens arrive, and as the API's object when it is over."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Literal

from deltafin.runtime.chat import (
    ChatParser,
    ContentText,
    Event,
    Finished,
    ReasoningText,
    ReasoningWasContent,
    ToolCallArguments,
    ToolCallBegan,
)
from deltafin.runtime.openai.logprobs import chat_logprobs, text_logprobs
from deltafin.runtime.openai.task import CHAT, Serving, Task
from deltafin.runtime.sampling import Chosen
from deltafin.runtime.stopping import StopStrings
from deltafin.runtime.tokenizer import StreamDecoder

# Why no more tokens came: a stop token or a stop string, or there were as many as may be.
Cause = Literal["stop", "length"]


class Answer:
    """Takes the tokens of one task in order. `name` is unlike that of any other answer.

    Stop strings count in what is shown as the answer, not in reasoning or tool calls; `ended` says that one has come.
    """

    def __init__(self, task: Task, serving: Serving, name: str) -> None:
        self.task = task
        self.tokens: list[Chosen] = []
        self.ended = False
        self.reason: str | None = None  # as the API names it, once it is over
        self.cached = 0  # tokens of the prompt that were not computed for it
        self._serving = serving
        self._name = name
        self._stops = StopStrings(task.stops)
        self._special = frozenset(serving.tokenizer.special_tokens.values())
        self._decoder = StreamDecoder(serving.tokenizer)
        self._parser = ChatParser(serving.tokenizer, task.thinking, self._call_id) if task.endpoint == CHAT else None
        self._reasoning: list[str] = []
        self._thoughts: list[int] = []  # tokens of each piece of it
        self._unfinished = 0  # tokens since the last whole character
        self._content: list[str] = []
        self._calls: list[dict[str, object]] = []

    def push(self, chosen: Chosen) -> list[Event]:
        """What one more token, no stop token, adds to the answer."""
        self.tokens.append(chosen)
        if self._parser is None:
            return self._shown([ContentText(self._decoder.push(chosen.token))])
        self._unfinished = 0 if chosen.token in self._special else self._unfinished + 1
        return self._shown(self._parser.push(chosen.token))

    def ends(self, chosen: Chosen) -> bool:
        """`push`, for who only wants to know whether this was the last token."""
        self.push(chosen)
        return self.ended

    def finish(self, chosen: Sequence[Chosen], cause: Cause) -> list[Event]:
        """No more tokens come. `chosen` are all there were, of which only a stop token at the end may be new."""
        events: list[Event] = []
        stop = chosen[len(self.tokens) :]
        assert len(stop) <= (cause == "stop")
        self.tokens += stop
        if self._parser is not None:
            for last in stop:
                events += self._parser.push(last.token)
            events += self._parser.finish()
        else:
            events.append(ContentText(self._decoder.finish()))
        shown = self._shown([e for e in events if not isinstance(e, Finished)])
        if self.ended:
            self.reason = "stop"
            return shown
        self.reason = cause if self._parser is None else self._parser.answer.finish
        if rest := self._stops.finish():
            self._content.append(rest)
            shown.append(ContentText(rest))
        return shown

    def fits(self) -> bool:
        """Whether an answer that is over is what the request's format asks for. One that calls tools always is."""
        if self.task.answer_format == "text" or self.reason == "tool_calls":
            return True
        try:
            value = json.loads("".join(self._content))
        except (ValueError, RecursionError):
            return False
        return isinstance(value, dict) or self.task.answer_format == "json_schema"

    def as_json(self, created: int) -> dict[str, object]:
        """The object of the API, once the answer is over; `created` in seconds since 1970."""
        assert self.reason is not None
        task = self.task
        chat = task.endpoint == CHAT
        logprobs = None
        if task.sampling.top_logprobs is not None:
            logprobs = (chat_logprobs if chat else text_logprobs)(self.tokens, self._serving.tokenizer)
        choice: dict[str, object] = {"index": 0}
        choice |= {"message": self._message()} if chat else {"text": "".join(self._content)}
        choice |= {"logprobs": logprobs, "finish_reason": self.reason}
        if task.returns_ids:
            choice |= {"prompt_token_ids": list(task.ids), "token_ids": [c.token for c in self.tokens]}
        return self.written("chat.completion" if chat else "text_completion", created, [choice], usage=self.usage())

    def written(
        self, kind: str, created: int, choices: Sequence[dict[str, object]], **more: object
    ) -> dict[str, object]:
        """An object of the API with what the answer and each of its chunks have in common; `kind` is its type."""
        serving, sampling = self._serving, self.task.sampling
        found: dict[str, object] = {
            "id": f"{'chatcmpl' if self.task.endpoint == CHAT else 'cmpl'}-{self._name}",
            "object": kind,
            "created": created,
            "model": serving.name,
            "choices": choices,
            **more,
            "system_fingerprint": serving.fingerprint,
        }
        return found | ({"seed": sampling.seed} if sampling.temperature else {})

    def usage(self) -> dict[str, object]:
        """The tokens so far."""
        prompt, completion = len(self.task.ids), len(self.tokens)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": self.cached},
            "completion_tokens_details": {"reasoning_tokens": sum(self._thoughts)},
        }

    def _message(self) -> dict[str, object]:
        message: dict[str, object] = {"role": "assistant", "content": "".join(self._content), "refusal": None}
        if self.task.thinking:
            message["reasoning_content"] = "".join(self._reasoning)
        if self._calls:
            message["content"] = message["content"] or None
            message["tool_calls"] = self._calls
        return message

    def _shown(self, events: Sequence[Event]) -> list[Event]:
        """Gathers what came, less what stop strings hold back."""
        shown: list[Event] = []
        for event in events:
            if self.ended:
                break
            match event:
                case ReasoningText(text):
                    self._reasoning.append(text)
                    self._thoughts.append(max(1, self._unfinished))
                    self._unfinished = 0
                case ReasoningWasContent(text):
                    self._take_back(len(text))
                    shown += self._content_text(text)
                    continue
                case ContentText(text):
                    shown += self._content_text(text)
                    continue
                case ToolCallBegan(_, call_id, name):
                    self._calls.append({"id": call_id, "type": "function", "function": {"name": name, "arguments": ""}})
                case ToolCallArguments(index, text):
                    function = self._calls[index]["function"]
                    assert isinstance(function, dict)
                    function["arguments"] += text
            shown.append(event)
        return shown

    def _content_text(self, text: str) -> list[Event]:
        self._unfinished = 0
        text, self.ended = self._stops.push(text)
        self._content.append(text)
        return [ContentText(text)] if text else []

    def _take_back(self, count: int) -> None:
        """The last `count` characters of reasoning were none; they came in whole pieces."""
        while count > 0:
            count -= len(self._reasoning.pop())
            self._thoughts.pop()

    def _call_id(self) -> str:
        """Of the answer's name and the call's number: the same when the answer is drawn again."""
        return f"call_{self._name}_{len(self._calls)}"
