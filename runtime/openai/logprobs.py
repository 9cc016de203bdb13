"""Log-probabilities as the API has them, in the two shapes of its two endpoints.

They cover every token that was chosen, those of the chat format's markup among them, so that their sum is that of the
answer as the model wrote it.
"""

from __future__ import annotations

from collections.abc import Sequence

from deltafin.runtime.sampling import Chosen
from deltafin.runtime.tokenizer import StreamDecoder, Tokenizer


def chat_logprobs(tokens: Sequence[Chosen], tokenizer: Tokenizer) -> dict[str, object]:
    """One entry a token, with its bytes and its alternatives."""
    content = []
    for chosen in tokens:
        assert chosen.logprob is not None
        top = [_entry(token, logprob, tokenizer) for token, logprob in chosen.top]
        content.append({**_entry(chosen.token, chosen.logprob, tokenizer), "top_logprobs": top})
    return {"content": content, "refusal": None}


def text_logprobs(tokens: Sequence[Chosen], tokenizer: Tokenizer) -> dict[str, object]:
    """Those of a whole answer."""
    return TextLogprobs(tokenizer).push(tokens)


class TextLogprobs:
    """Lists side by side, as /v1/completions has them. The chosen token is always among the alternatives."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._decoder = StreamDecoder(tokenizer)
        self._length = 0  # characters before the next token

    def push(self, tokens: Sequence[Chosen]) -> dict[str, object]:
        """Of the next tokens of the answer."""
        names = [_name(chosen.token, self._tokenizer) for chosen in tokens]
        offsets, top = [], []
        for chosen, name in zip(tokens, names, strict=True):
            offsets.append(self._length)
            self._length += len(self._decoder.push(chosen.token))
            entries = {
                _name(token, self._tokenizer): logprob for token, logprob in reversed(chosen.top)
            }  # of one name the likelier
            assert chosen.logprob is not None
            top.append({**dict(reversed(entries.items())), name: chosen.logprob})
        return {
            "tokens": names,
            "token_logprobs": [chosen.logprob for chosen in tokens],
            "top_logprobs": top if any(chosen.top for chosen in tokens) else None,
            "text_offset": offsets,
        }


def _entry(token: int, logprob: float, tokenizer: Tokenizer) -> dict[str, object]:
    raw = tokenizer.token_bytes(token)
    return {"token": raw.decode(errors="replace"), "logprob": logprob, "bytes": list(raw)}


def _name(token: int, tokenizer: Tokenizer) -> str:
    """The token's text; of what is no text by itself the bytes, written out."""
    raw = tokenizer.token_bytes(token)
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)
