"""Text and ids: exact round trips, no control token out of text, whole characters only."""

from __future__ import annotations

import base64
import json
import random
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deltafin.errors import BadCheckpoint, BadRequest
from deltafin.runtime import StreamDecoder, Tokenizer, Utf8Stream
from deltafin.runtime.tokenizer import MAX_RUN, MAX_SLICE, _pieces


def ranks(tokens: list[bytes]) -> bytes:
    return b"".join(base64.b64encode(t) + b" %d\n" % i for i, t in enumerate(tokens))


BYTES = [bytes([b]) for b in range(256)]
TOKENS = [*BYTES, b"ab", b"abc", b" x", b"  ", b"12", b"\xe6\xa8", b"\xe6\xa8\xa1"]


def config(names: dict[int, str]) -> bytes:
    return json.dumps({"added_tokens_decoder": {str(i): {"content": n} for i, n in names.items()}}).encode()


@pytest.fixture(scope="module")
def small() -> Tokenizer:
    n = len(TOKENS)
    return Tokenizer(ranks(TOKENS), config({n: "[BOS]", n + 1: "[EOS]", n + 3: "<|open|>"}), n + 256)


@pytest.fixture(scope="module")
def cases(faults):
    return faults("text_cases").build()


# Encoding


def test_special_ids_follow_the_ranks_and_the_unnamed_are_reserved(small):
    n = len(TOKENS)
    assert small.vocab_size == n + 256
    assert small.special_id("[EOS]") == n + 1
    assert small.special_id(f"<|reserved_token_{n + 2}|>") == n + 2
    assert list(small.special_tokens.values()) == list(range(n, n + 256))
    with pytest.raises(BadRequest, match="no special token"):
        small.special_id("[NONE]")


def test_merges_follow_the_ranks_inside_the_pieces_of_the_split(small):
    assert small.encode("abc") == [TOKENS.index(b"abc")]
    assert small.encode("1234") == [TOKENS.index(b"12"), ord("3"), ord("4")]
    assert small.encode("模") == [TOKENS.index(b"\xe6\xa8\xa1")]
    assert small.encode("") == []


@pytest.mark.parametrize("which", ["small", "demo"])
def test_control_markers_in_text_stay_text(request, cases, which):
    tokenizer = request.getfixturevalue(which)
    tokenizer = tokenizer if which == "small" else tokenizer.tokenizer
    special = set(tokenizer.special_tokens.values())
    for case in cases["messages"]:
        ids = tokenizer.encode(case["text"])
        assert not special & set(ids), case["name"]
        assert tokenizer.decode(ids) == case["text"], case["name"]
    for name in tokenizer.special_tokens:
        assert not special & set(tokenizer.encode(name))


@given(st.text(max_size=200))
@settings(max_examples=200, deadline=None)
def test_any_text_comes_back_from_its_ids(small, text):
    ids = small.encode(text)
    assert small.decode(ids) == text
    assert max(ids, default=0) < len(TOKENS)


@pytest.mark.parametrize("text", ["a\ud800b", "\udfff", "ok \udcff"])
def test_half_a_surrogate_pair_is_refused_with_its_place(small, text):
    place = re.search("[\ud800-\udfff]", text).start()
    with pytest.raises(BadRequest, match=f"character {place} of the text is U\\+D"):
        small.encode(text)


def _official_slices(text: str, longest: int):
    """The cut of a run as the model's own tokenizer states it, character by character."""
    length, space, start = 0, text[0].isspace() if text else False, 0
    for i, character in enumerate(text):
        if space ^ character.isspace():
            length, space = 1, character.isspace()
        else:
            length += 1
            if length > longest:
                yield text[start:i]
                start, length = i, 1
    yield text[start:]


def test_long_runs_are_cut_where_the_models_own_tokenizer_cuts_them():
    kinds = random.Random(3)
    lengths = [1, 2, 17, MAX_RUN - 1, MAX_RUN, MAX_RUN + 1, 2 * MAX_RUN, 2 * MAX_RUN + 1, 70_001]
    for _ in range(12):
        text = "".join(kinds.choice(["a", " ", "模", "\u3000", "\n", "\x1c"]) * kinds.choice(lengths) for _ in range(4))
        text = text[:MAX_SLICE]
        assert list(_pieces(text)) == list(_official_slices(text, MAX_RUN))


def test_the_two_notions_of_whitespace_are_one():
    for code in range(0x110000):
        assert bool(re.match(r"\s", chr(code))) == chr(code).isspace()


def test_long_text_is_cut_into_slices_first():
    text = "word " * (MAX_SLICE // 5 + 10)
    assert [len(p) for p in _pieces(text)] == [MAX_SLICE, 50]


def test_a_million_characters_without_a_space_are_encoded(small):
    ids = small.encode("abc" * 350_000)
    assert small.decode(ids) == "abc" * 350_000


# Decoding


def test_token_bytes_are_those_of_the_file_and_a_special_token_is_its_name(small):
    assert [small.token_bytes(i) for i in range(len(TOKENS))] == TOKENS
    assert small.token_bytes(small.special_id("<|open|>")) == b"<|open|>"
    for token in (-1, small.vocab_size):
        with pytest.raises(BadRequest, match="outside the vocabulary"):
            small.token_bytes(token)


def test_pieces_of_characters_come_out_as_whole_characters(cases):
    for case in cases["stream"]:
        stream = Utf8Stream()
        parts = [stream.push(bytes.fromhex(piece)) for piece in case["pieces"]]
        end = stream.finish()
        if case["name"] == "bad_byte_inside":
            assert parts == ["ok", "\ufffd", "!"]
        else:
            assert "".join(parts) == case["text"], case["name"]
            assert "\ufffd" not in "".join(parts) or case["name"] == "real_replacement_char"
        assert end == ("\ufffd" if case["name"] == "cut_at_end" else ""), case["name"]


def test_an_unfinished_character_does_not_eat_its_neighbour():
    stream = Utf8Stream()
    assert [stream.push(b) for b in (b"a\xf0\x9f", b"b", b"\xff\xc3", b"\xa9")] == ["a", "\ufffdb", "\ufffd", "é"]
    assert stream.finish() == ""


@given(st.binary(max_size=60), st.integers(1, 5))
@settings(max_examples=200, deadline=None)
def test_a_stream_says_what_decoding_at_once_says(raw, step):
    stream = Utf8Stream()
    parts = [stream.push(raw[i : i + step]) for i in range(0, len(raw), step)]
    assert "".join(parts) + stream.finish() == raw.decode(errors="replace")


@pytest.mark.parametrize("which", ["small", "demo"])
def test_every_id_passes_through_the_stream_decoder(request, which):
    tokenizer = request.getfixturevalue(which)
    tokenizer = tokenizer if which == "small" else tokenizer.tokenizer
    for token in range(tokenizer.vocab_size):
        stream = StreamDecoder(tokenizer)
        assert stream.push(token) + stream.finish() == tokenizer.decode([token])
    everything = list(range(tokenizer.vocab_size))
    stream = StreamDecoder(tokenizer)
    assert "".join(map(stream.push, everything)) + stream.finish() == tokenizer.decode(everything)


# Files that make no sense


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (ranks(TOKENS).replace(b" 5\n", b" 6\n", 1), "line 6 has rank '6'; expected 5"),
        (ranks(TOKENS[1:]), "single byte 0x00 is missing"),
        (ranks([*TOKENS, b"ab"]), "line 264 repeats the token 'ab'"),
        (ranks([*TOKENS, b""]), "empty token"),
        (ranks(TOKENS) + b"%%% 263\n", "line 264 is not base64"),
        (ranks(TOKENS) + b"\n", "line 264 has rank ''"),
        (ranks(TOKENS).replace(b" 7\n", b" +7\n", 1), "line 8 has rank"),
        (ranks(TOKENS).replace(b" 7\n", b" 07\n", 1), "line 8 has rank"),
        (b"", "single byte 0x00 is missing"),
        (b"\xff\xfe\x00", "line 1"),
    ],
)
def test_ranks_that_make_no_sense_are_refused(raw, message):
    with pytest.raises(BadCheckpoint, match=re.escape(message)):
        Tokenizer(raw, config({}), len(TOKENS) + 256)


def test_ranks_that_do_not_fill_the_vocabulary_are_refused():
    with pytest.raises(BadCheckpoint, match="263 ranks and 256 special ids; expected 512"):
        Tokenizer(ranks(TOKENS), config({}), 512)


@pytest.mark.parametrize(
    "raw",
    [
        b"[]",
        b"{",
        b"{}",
        config({0: "[BOS]"}),
        config({len(TOKENS) + 256: "[BOS]"}),
        config({len(TOKENS): ""}),
        config({len(TOKENS): "[BOS]", len(TOKENS) + 1: "[BOS]"}),
        b'{"added_tokens_decoder": {"x": {"content": "[BOS]"}}}',
        b'{"added_tokens_decoder": {"263": {"content": 5}}}',
    ],
)
def test_names_of_special_ids_that_make_no_sense_are_refused(raw):
    with pytest.raises(BadCheckpoint, match=r"^tokenizer_config\.json") as caught:
        Tokenizer(ranks(TOKENS), raw, len(TOKENS) + 256)
    assert "\n" not in str(caught.value)
