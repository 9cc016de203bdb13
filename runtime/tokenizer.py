"""Text to token ids and back, from a checkpoint's own files.

Ordinary text never becomes a control token: `<|open|>` typed by a user is eight harmless characters. Special ids
come only from `special_id`. Bytes, not characters, are what tokens stand for, so text that arrives token by token
goes through `StreamDecoder`.
"""

from __future__ import annotations

import base64
import codecs
import json
import re
from collections import abc
from types import MappingProxyType

import tiktoken

from deltafin.errors import BadCheckpoint, BadRequest

NUM_SPECIAL = 256

# Longer inputs are cut before encoding, as the model's own tokenizer does: first into slices, then any run of
# only whitespace or only non-whitespace. A cut changes ids, so the numbers are part of the tokenizer.
MAX_SLICE = 400_000
MAX_RUN = 25_000
_RUNS = re.compile(r"\s+|\S+")

_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_SUFFIX = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_SPLIT = "|".join(
    [
        r"[\p{Han}]+",
        rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_SUFFIX}",
        rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_SUFFIX}",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    ]
)


class Tokenizer:
    """Built from the bytes of `tiktoken.model` and `tokenizer_config.json`; opens no file and no socket."""

    def __init__(self, ranks: bytes, config: bytes, vocab_size: int) -> None:
        tokens = _parse_ranks(ranks)
        if len(tokens) + NUM_SPECIAL != vocab_size:
            raise BadCheckpoint(
                f"tiktoken.model: {len(tokens)} ranks and {NUM_SPECIAL} special ids; "
                f"expected {vocab_size} together, the vocabulary of config.json"
            )
        names = _special_names(config, len(tokens))
        # special name -> id, in ascending id
        self.special_tokens: abc.Mapping[str, int] = MappingProxyType({n: len(tokens) + i for i, n in enumerate(names)})
        self._bytes = [*tokens, *(name.encode(errors="replace") for name in names)]
        self._encoding = tiktoken.Encoding(
            "deltafin", pat_str=_SPLIT, mergeable_ranks={t: i for i, t in enumerate(tokens)}, special_tokens={}
        )

    @property
    def vocab_size(self) -> int:
        return len(self._bytes)

    def encode(self, text: str) -> list[int]:
        """Ids of ordinary text, never a special one."""
        try:
            text.encode()
        except UnicodeEncodeError as e:
            raise BadRequest(
                f"character {e.start} of the text is U+{ord(text[e.start]):04X}, half of a surrogate pair and no text"
            ) from None
        return [token for piece in _pieces(text) for token in self._encoding.encode_ordinary(piece)]

    def special_id(self, name: str) -> int:
        if name not in self.special_tokens:
            raise BadRequest(f"this tokenizer has no special token {name!r}")
        return self.special_tokens[name]

    def token_bytes(self, token: int) -> bytes:
        """What the token stands for; a special token stands for its name."""
        if not 0 <= token < len(self._bytes):
            raise BadRequest(f"token id {token} is outside the vocabulary of {len(self._bytes)}")
        return self._bytes[token]

    def decode(self, ids: abc.Iterable[int]) -> str:
        """Text of a whole list of ids; bytes that are not UTF-8 become U+FFFD."""
        return b"".join(map(self.token_bytes, ids)).decode(errors="replace")


class Utf8Stream:
    """Bytes in pieces to text in pieces: a character comes out once it is whole.

    Bytes that can never become a character come out as U+FFFD, without taking a neighbour with them.
    """

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, piece: bytes) -> str:
        return self._decoder.decode(piece)

    def finish(self) -> str:
        """U+FFFD if the stream ended inside a character, else nothing. A new stream may follow."""
        rest = self._decoder.decode(b"", final=True)
        self._decoder.reset()
        return rest


class StreamDecoder:
    """`Tokenizer.decode` for ids that arrive one by one; the pieces join to the same text."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._stream = Utf8Stream()

    def push(self, token: int) -> str:
        return self._stream.push(self._tokenizer.token_bytes(token))

    def finish(self) -> str:
        return self._stream.finish()


def _pieces(text: str) -> abc.Iterator[str]:
    for start in range(0, len(text), MAX_SLICE):
        piece = text[start : start + MAX_SLICE]
        if len(piece) <= MAX_RUN:
            yield piece
            continue
        begun = 0
        for run in _RUNS.finditer(piece):
            for cut in range(run.start() + MAX_RUN, run.end(), MAX_RUN):
                yield piece[begun:cut]
                begun = cut
        yield piece[begun:]


def _parse_ranks(raw: bytes) -> list[bytes]:
    """Lines of "base64 rank", ranks from 0 in order; returns the tokens by rank."""
    tokens: list[bytes] = []
    known: set[bytes] = set()
    for number, line in enumerate(raw.splitlines(), start=1):
        token, _, rank = line.partition(b" ")
        if rank != str(len(tokens)).encode():
            raise BadCheckpoint(f"tiktoken.model: line {number} has rank {_shown(rank)}; expected {len(tokens)}")
        try:
            value = base64.b64decode(token, validate=True)
        except ValueError as e:
            raise BadCheckpoint(f"tiktoken.model: line {number} is not base64 ({e})") from None
        if not value or value in known:
            what = f"repeats the token {_shown(value)}" if value else "is an empty token"
            raise BadCheckpoint(f"tiktoken.model: line {number} {what}")
        known.add(value)
        tokens.append(value)
    lacking = [b for b in range(256) if bytes([b]) not in known]
    if lacking:
        raise BadCheckpoint(f"tiktoken.model: the single byte 0x{lacking[0]:02x} is missing; some text has no encoding")
    return tokens


def _special_names(raw: bytes, first: int) -> list[str]:
    """Names of the special ids `first`.. in order, from `added_tokens_decoder`; the unnamed are reserved."""
    names = {first + i: f"<|reserved_token_{first + i}|>" for i in range(NUM_SPECIAL)}
    try:
        config: object = json.loads(raw)
    except (ValueError, RecursionError) as e:
        raise BadCheckpoint(f"tokenizer_config.json: not JSON ({e})") from None
    added: object = config.get("added_tokens_decoder") if isinstance(config, dict) else None
    if not isinstance(added, dict):
        raise BadCheckpoint("tokenizer_config.json: added_tokens_decoder is missing")
    for key, entry in added.items():
        name: object = entry.get("content") if isinstance(entry, dict) else None
        token = int(key) if re.fullmatch(r"[0-9]{1,9}", key) else -1
        if token not in names or not isinstance(name, str) or not name:
            raise BadCheckpoint(
                f"tokenizer_config.json: added_tokens_decoder[{key!r}] does not name "
                f"a special id from {first} to {first + NUM_SPECIAL - 1}"
            )
        names[token] = name
    if len(set(names.values())) != len(names):
        raise BadCheckpoint("tokenizer_config.json: added_tokens_decoder gives two ids one name")
    return list(names.values())


def _shown(raw: bytes) -> str:
    return repr(raw[:40].decode(errors="backslashreplace"))
