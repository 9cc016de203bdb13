"""A body of /v1/completions: a prompt that is continued as plain text."""

from __future__ import annotations

from deltafin.errors import BadRequest
from deltafin.runtime.openai.decoding import MOST_TOP_LOGPROBS, fitting_max_new, read_decoding
from deltafin.runtime.openai.errors import BadBody
from deltafin.runtime.openai.fields import Fields
from deltafin.runtime.openai.task import TEXT, Serving, Task


def read_text(body: object, serving: Serving, *, seed: int = 0) -> Task:
    """The task of a body. `seed` is what draws go by if the body gives none. Raises BadBody."""
    fields = Fields(body)
    fields.only("best_of", [1], "one request has one answer; leave it out")
    fields.only("echo", [False], "the prompt is not repeated; leave it out")
    fields.only("suffix", [""], "text cannot be filled in before an ending; leave it out")
    top_logprobs = fields.integer("logprobs", 0, min(MOST_TOP_LOGPROBS, serving.vocab_size))
    decoding = read_decoding(fields, serving, seed=seed, top_logprobs=top_logprobs)
    ids = _prompt(fields, serving)
    fields.finish()
    return Task(
        endpoint=TEXT,
        ids=ids,
        shared=0,
        sampling=decoding.sampling,
        max_new=fitting_max_new(fields, serving, decoding.max_new, len(ids)),
        stops=decoding.stops,
        returns_ids=decoding.returns_ids,
        stream=decoding.stream,
        stream_usage=decoding.stream_usage,
        stream_progress=decoding.stream_progress,
        model=decoding.model,
    )


def _prompt(fields: Fields, serving: Serving) -> tuple[int, ...]:
    """A text or token ids, also as the only one of a list."""
    prompt, path = fields.value("prompt"), fields.path("prompt")
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list):
        if len(prompt) > 1:
            raise BadBody(
                f"{path} is a list of {len(prompt)} prompts; send a request for each", path, "unsupported_value"
            )
        prompt = prompt[0]
    if isinstance(prompt, str):
        try:
            ids = serving.tokenizer.encode(prompt)
        except BadRequest as e:
            raise BadBody(f"{path}: {e}", path) from None
    elif isinstance(prompt, list):
        ids = [token for token in prompt if isinstance(token, int) and not isinstance(token, bool)]
        if len(ids) != len(prompt):
            raise BadBody(f"{path}: expected a text, or a list of token ids", path)
        if ids and not 0 <= min(ids) <= max(ids) < serving.vocab_size:
            raise BadBody(f"{path}: token ids are from 0 to {serving.vocab_size - 1}", path)
    else:
        raise fields.wrong("prompt", "a text, or a list of token ids")
    if not ids:
        raise BadBody(f"{path} is empty; a model needs at least one token to continue", path)
    return tuple(ids)
