"""The demo's tokenizer, golden pieces as ids, and deltas put together by someone else than the parser."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterable, Sequence

import pytest

from deltafin.runtime import Tokenizer
from deltafin.runtime.chat import (
    Answer,
    ContentText,
    Control,
    Event,
    Finished,
    Piece,
    ReasoningText,
    ReasoningWasContent,
    ToolCall,
    ToolCallArguments,
    ToolCallBegan,
    encode,
)


@pytest.fixture(scope="session")
def tokenizer(demo_dir) -> Tokenizer:
    ranks, config = (demo_dir / name for name in ("tiktoken.model", "tokenizer_config.json"))
    return Tokenizer(ranks.read_bytes(), config.read_bytes(), vocab_size=2048)


@pytest.fixture(scope="session")
def golden_chat(golden) -> dict[str, dict]:
    """Cases of the revision that is followed, by id."""
    data = json.loads((golden / "chat" / "cases.json").read_bytes())
    assert data["format"] == "k3-chat-golden/1"
    return {c["id"]: c for c in data["cases"] if c.get("revision") != "launch"}


@pytest.fixture(scope="session")
def golden_demo(golden) -> list[dict]:
    return [c for c in json.loads((golden / "demo.json").read_bytes())["cases"] if c["kind"] == "chat"]


@pytest.fixture(scope="session")
def as_pieces() -> Callable[[Iterable[dict | str]], list[Piece]]:
    """The golden files' way of writing pieces to ours."""
    return lambda written: [Control(p["c"]) if isinstance(p, dict) else p for p in written]


@pytest.fixture(scope="session")
def byte_ids(tokenizer) -> Sequence[int]:
    """The id of each single byte: with these any text can be cut anywhere."""
    ids = {tokenizer.token_bytes(i): i for i in range(min(tokenizer.special_tokens.values()))}
    return [ids[bytes([b])] for b in range(256)]


@pytest.fixture(scope="session")
def in_bytes(tokenizer, byte_ids) -> Callable[[Iterable[Piece]], list[int]]:
    """Pieces with every byte of text as a token of its own."""

    def in_bytes(pieces: Iterable[Piece]) -> list[int]:
        ids: list[int] = []
        for piece in pieces:
            ids += encode([piece], tokenizer) if isinstance(piece, Control) else [byte_ids[b] for b in piece.encode()]
        return ids

    return in_bytes


@pytest.fixture(scope="session")
def cut_anew(tokenizer, byte_ids) -> Callable[[Sequence[int], random.Random], list[int]]:
    """The same bytes in other tokens: text is cut at random bytes, also inside characters, and tokenised in between."""
    first = min(tokenizer.special_tokens.values())
    by_bytes = {tokenizer.token_bytes(i): i for i in range(first)}
    longest = max(map(len, by_bytes))

    def longest_token(raw: bytes, most: int) -> bytes:
        return next(raw[:n] for n in range(min(most, len(raw)), 0, -1) if raw[:n] in by_bytes)

    def cut_anew(ids: Sequence[int], rng: random.Random) -> list[int]:
        out: list[int] = []
        raw = b""
        for token in [*ids, None]:
            if token is not None and token < first:
                raw += tokenizer.token_bytes(token)
                continue
            while raw:
                piece = longest_token(raw, rng.randint(1, longest))
                out.append(by_bytes[piece])
                raw = raw[len(piece) :]
            if token is not None:
                out.append(token)
        return out

    return cut_anew


@pytest.fixture(scope="session")
def gather() -> Callable[[Iterable[Event]], Answer]:
    """What a client holds who puts deltas together; it checks that they come as promised."""

    def gather(events: Iterable[Event]) -> Answer:
        reasoning = content = ""
        names: list[tuple[str, str]] = []
        arguments: list[str] = []
        finish = None
        for event in events:
            assert finish is None, "nothing comes after the end"
            match event:
                case ReasoningText(text):
                    assert text
                    reasoning += text
                case ContentText(text):
                    assert text
                    content += text
                case ReasoningWasContent(text):
                    assert text
                    assert reasoning.endswith(text)
                    reasoning = reasoning[: -len(text)]
                    content += text
                case ToolCallBegan(index, call_id, name):
                    assert index == len(names)
                    assert call_id not in [known for known, _ in names]
                    names.append((call_id, name))
                    arguments.append("")
                case ToolCallArguments(index, text):
                    arguments[index] += text
                case Finished(reason):
                    finish = reason
        calls = (ToolCall(name, text, call_id) for (call_id, name), text in zip(names, arguments, strict=True))
        return Answer(reasoning, content, tuple(calls), finish)

    return gather
