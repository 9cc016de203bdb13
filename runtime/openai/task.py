"""What a request comes to: a prompt and how to answer it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from deltafin.runtime.sampling import Sampling
from deltafin.runtime.tokenizer import Tokenizer

Endpoint = Literal["/v1/chat/completions", "/v1/completions"]
# Text of any kind, an object of JSON, any value of JSON: a schema is shown to the model, and nothing more.
AnswerFormat = Literal["text", "json_object", "json_schema"]
CHAT: Endpoint = "/v1/chat/completions"
TEXT: Endpoint = "/v1/completions"
ENDPOINTS: tuple[Endpoint, ...] = (CHAT, TEXT)


@dataclass(frozen=True, slots=True)
class Serving:
    """What answers requests, as far as a request can tell: the model's name, its words and its limits."""

    name: str
    fingerprint: str  # of all that an answer depends on besides the request
    tokenizer: Tokenizer
    vocab_size: int
    max_positions: int
    max_new: int  # new tokens where a request gives no number; fewer if the model has not so many positions left
    most_tokens: int | None = None  # of prompt and answer, where memory holds fewer than the model has positions


@dataclass(frozen=True, slots=True)
class Task:
    """A checked request. Equal tasks have equal answers, to the bit."""

    endpoint: Endpoint
    ids: tuple[int, ...]  # the prompt
    shared: int  # how many of the first ids are instructions that other requests may share
    sampling: Sampling
    max_new: int
    stops: tuple[str, ...] = ()
    thinking: bool = False  # whether the prompt ends inside the element for reasoning
    answer_format: AnswerFormat = "text"  # that the model was told of; `Answer.fits` says whether it kept to it
    returns_ids: bool = False  # whether the answer also has the token ids of prompt and text
    stream: bool = False
    stream_usage: bool = False  # whether a stream ends with the counts
    stream_progress: bool = False  # whether a stream tells how far the work is while there are no tokens
    model: str | None = None  # as the request has it; what answers is not its choice

    @property
    def tokens(self) -> int:
        """As long as prompt and answer can get."""
        return len(self.ids) + self.max_new
