"""The fields that say how tokens are chosen and where an answer ends; both kinds of request have them."""

from __future__ import annotations

import re
from dataclasses import dataclass

from deltafin.errors import BadRequest
from deltafin.runtime.openai.errors import BadBody
from deltafin.runtime.openai.fields import Fields, shown
from deltafin.runtime.openai.task import Serving
from deltafin.runtime.sampling import MOST_SEED, MOST_TEMPERATURE, Sampling, reserved_ids

MOST_TOP_LOGPROBS = 20
MOST_STOPS = 4
MOST_STOP_LENGTH = 1 << 16  # searching takes memory for each character, and none that long was ever meant
MOST_BIASES = 1024
_TOKEN = re.compile(r"0|[1-9][0-9]{0,8}", re.ASCII)  # one way to write each
# Fields that say who asks, or what a service does around an answer; none can change it.
_ABOUT_THE_CALLER = ("user", "metadata", "safety_identifier", "prompt_cache_key", "prompt_cache_retention")


@dataclass(frozen=True, slots=True)
class Decoding:
    """The part of a task that both kinds of request have in common."""

    sampling: Sampling
    max_new: int | None
    stops: tuple[str, ...]
    returns_ids: bool
    stream: bool
    stream_usage: bool
    stream_progress: bool
    model: str | None


def read_decoding(fields: Fields, serving: Serving, *, seed: int, top_logprobs: int | None) -> Decoding:
    """Reads what is common; `seed` is what draws go by if the request gives none.

    Raises BadBody.
    """
    fields.ignore(*_ABOUT_THE_CALLER)
    fields.only("n", [1], "one request has one answer; send it again for another one")
    for penalty in ("frequency_penalty", "presence_penalty"):
        fields.only(penalty, [0], "penalties are not supported; leave it out or 0")
    fields.only("store", [False], "answers are not stored; leave it out")
    fields.only("service_tier", ["auto", "default"], "there is only one tier; leave it out")
    stream = fields.boolean("stream") or False
    options = fields.inner("stream_options")
    if options is not None and not stream:
        raise BadBody("stream_options has no effect without stream; leave it out", fields.path("stream_options"))
    include_usage = include_progress = False
    if options is not None:
        include_usage = options.boolean("include_usage") or False
        include_progress = options.boolean("include_progress") or False
        options.only("include_obfuscation", [False], "nothing is added to hide the lengths of tokens; leave it out")
        options.finish()
    return Decoding(
        sampling=_sampling(fields, serving, seed, top_logprobs),
        max_new=_max_new(fields, serving),
        stops=_stops(fields),
        returns_ids=fields.boolean("return_token_ids") or False,
        stream=stream,
        stream_usage=include_usage,
        stream_progress=include_progress,
        model=fields.text("model"),
    )


def fitting_max_new(fields: Fields, serving: Serving, asked: int | None, prompt: int) -> int:
    """How many tokens may follow a prompt of so many. Raises BadBody if what was asked for exceeds model or memory."""
    most, limit = serving.max_positions, f"the model's {serving.max_positions} positions"
    if serving.most_tokens is not None and serving.most_tokens < most:
        most, limit = serving.most_tokens, f"the {serving.most_tokens} tokens that this server has memory for"
    left = most - prompt
    if left < (asked or 1):
        new = f" and {asked} new ones" if asked is not None else ""
        raise BadBody(
            f"{prompt} tokens{new} exceed {limit}",
            "messages" if fields.has("messages") else "prompt",
            "context_length_exceeded",
        )
    return asked if asked is not None else min(left, serving.max_new)


def _sampling(fields: Fields, serving: Serving, seed: int, top_logprobs: int | None) -> Sampling:
    temperature = fields.number("temperature", 0, MOST_TEMPERATURE)
    top_p, min_p = fields.number("top_p", 0, 1), fields.number("min_p", 0, 1)
    top_k = fields.integer("top_k", -1, 2**31 - 1)
    given = fields.integer("seed", -(2**63), MOST_SEED)
    if temperature is None:
        for name, value, nothing in (
            ("top_p", top_p, (None, 1)),
            ("top_k", top_k, (None, 0, -1)),
            ("min_p", min_p, (None, 0)),
        ):
            if value not in nothing:
                raise BadBody(
                    f"{fields.path(name)} has no effect without a temperature, which is 0 (greedy) if it is left out; "
                    "give both",
                    fields.path(name),
                )
    try:
        return Sampling(
            temperature=temperature or 0.0,
            top_p=1.0 if top_p is None else top_p,
            top_k=max(0, top_k or 0),
            min_p=min_p or 0.0,
            seed=seed if given is None else given & MOST_SEED,
            logit_bias=_biases(fields, serving),
            top_logprobs=top_logprobs,
        )
    except BadRequest as e:
        if isinstance(e, BadBody):
            raise
        raise BadBody(str(e), fields.path(str(e).partition(" ")[0])) from None


def _biases(fields: Fields, serving: Serving) -> dict[int, float]:
    given = fields.inner("logit_bias")
    if given is None:
        return {}
    biases: dict[int, float] = {}
    reserved = reserved_ids(serving.tokenizer)
    names = given.names()
    if len(names) > MOST_BIASES:
        raise BadBody(f"logit_bias has {len(names)} entries; at most {MOST_BIASES}", fields.path("logit_bias"))
    for name in names:
        token = int(name) if _TOKEN.fullmatch(name) else -1
        if not 0 <= token < serving.vocab_size:
            path = fields.path("logit_bias")
            raise BadBody(f"{path}: {shown(name)} is no token id from 0 to {serving.vocab_size - 1}", path)
        bias = given.number(name, -100, 100) or 0.0
        if bias > 0 and token in reserved:
            raise BadBody(f"logit_bias: id {token} is reserved and never chosen", fields.path("logit_bias"))
        biases[token] = bias
    return biases


def _max_new(fields: Fields, serving: Serving) -> int | None:
    old = fields.integer("max_tokens", 1, serving.max_positions)
    new = fields.integer("max_completion_tokens", 1, serving.max_positions)
    if old is not None and new is not None and old != new:
        path = fields.path("max_tokens")
        raise BadBody(f"max_tokens is {old} and max_completion_tokens {new}; give one of them", path)
    return old if new is None else new


def _stops(fields: Fields) -> tuple[str, ...]:
    path, value = fields.path("stop"), fields.value("stop")
    if value is None:
        return ()
    stops = value if isinstance(value, list) else [value]
    texts = [s for s in stops if isinstance(s, str)]
    if len(texts) != len(stops):
        raise BadBody(f"{path}: expected a string or a list of strings", path)
    if len(texts) > MOST_STOPS:
        raise BadBody(f"{path} has {len(texts)} strings; at most {MOST_STOPS}", path)
    if any(len(text) > MOST_STOP_LENGTH for text in texts):
        raise BadBody(f"{path} has a string of more than {MOST_STOP_LENGTH:,} characters", path)
    if "" in texts:
        raise BadBody(f"{path}: an empty string would end every answer before it begins", path)
    return tuple(dict.fromkeys(texts))
