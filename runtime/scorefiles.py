"""Texts to score out of a file, and their scores in another one, line by line.

A line of results says by a digest what it is the result of, so that a run which was ended goes on where it stood, and
never in a file of something else.
"""

from __future__ import annotations

import hashlib
import io
import json
import math
import os
import stat
import sys
from collections import abc
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Protocol, Self

import numpy as np

from deltafin.errors import BadRequest, DiskError, NotFound
from deltafin.indexer import ModelConfig, disk_error
from deltafin.runtime.exclusive import is_same, lock
from deltafin.runtime.model import Model
from deltafin.runtime.openai import parse
from deltafin.runtime.score import Score, Text, perplexity
from deltafin.runtime.states import identity
from deltafin.runtime.tokenizer import Tokenizer

LINE_NBYTES = 64 << 20  # more is no text that a model has positions for
RESULT_NBYTES = 1 << 30  # more is no line of results
_BEGIN = b'{"line": '  # of a line of results
_SHAPES = ({"text"}, {"prompt", "continuation"}, {"ids"}, {"prompt_ids", "ids"})


@dataclass(frozen=True, slots=True)
class Line:
    """One text of an input."""

    number: int  # in its file, from 1
    id: str | int | None  # the caller's own
    text: Text


class Input:
    """A file of texts that can be read more than once; what is no regular file is held in memory."""

    def __init__(self, path: Path, *, whole: bool = False) -> None:
        """`-` is stdin. `whole`: the file is one text, and not a JSON object a line. Raises NotFound, BadRequest."""
        self.name = "stdin" if str(path) == "-" else str(path)
        self._whole = whole
        self._path: Path | None = path
        self._content = b""
        self.nbytes = 0
        try:
            if str(path) == "-":
                if sys.stdin is None:
                    raise BadRequest("stdin is closed; give a file")
                self._path, self._content = None, sys.stdin.buffer.read()
            elif not stat.S_ISREG(path.stat().st_mode):
                self._path, self._content = None, path.read_bytes()
            self.nbytes = len(self._content) if self._path is None else path.stat().st_size
        except OSError as e:
            raise NotFound(f"{self.name}: cannot be read ({e.strerror})") from None

    def lines(
        self,
        tokenizer: Tokenizer | None,
        config: ModelConfig,
        progress: abc.Callable[[int], None] = lambda nbytes: None,
    ) -> abc.Iterator[Line]:
        """Every text; a BadRequest names the line that is none. Empty lines are passed over.

        `progress` is told the bytes of each line.
        """
        try:
            with io.BytesIO(self._content) if self._path is None else self._path.open("rb") as file:
                for number, raw in enumerate(_raw_lines(file, self._whole), 1):
                    progress(len(raw))
                    if len(raw) > LINE_NBYTES:
                        raise BadRequest(f"{self.name}, line {number}: longer than {LINE_NBYTES >> 20} MiB")
                    try:
                        if self._whole:
                            yield Line(number, None, _checked(_text(None, _encode(_decode(raw), tokenizer)), config))
                        elif raw.strip():
                            yield _line(number, raw, tokenizer, config)
                    except BadRequest as e:
                        where = self.name if self._whole else f"{self.name}, line {number}"
                        raise BadRequest(f"{where}: {e}") from None
        except OSError as e:
            raise NotFound(f"{self.name}: cannot be read ({e.strerror})") from None


def _raw_lines(file: BinaryIO, whole: bool) -> abc.Iterator[bytes]:
    if whole:
        yield file.read(LINE_NBYTES + 1)
        return
    while raw := file.readline(LINE_NBYTES + 1):
        yield raw


def _line(number: int, raw: bytes, tokenizer: Tokenizer | None, config: ModelConfig) -> Line:
    _decode(raw)
    try:
        fields = parse(raw)
    except BadRequest as e:
        raise BadRequest(f"no JSON object: {e}") from None
    if not isinstance(fields, dict):
        raise BadRequest("no JSON object")
    name: object = fields.pop("id", None)
    if name is not None and (isinstance(name, bool) or not isinstance(name, str | int)):
        raise BadRequest("id is no string and no integer")
    if set(fields) not in _SHAPES:
        found = ", ".join(map(repr, sorted(fields))) or "nothing"
        raise BadRequest(
            f'it has {found[:200]}; expected "text", or "prompt" and "continuation", or "ids", or "prompt_ids" and '
            '"ids", and beside them nothing but "id"'
        )
    if "ids" in fields:
        first, rest = _ids(fields, "prompt_ids", config), _ids(fields, "ids", config)
    elif "text" in fields:
        first, rest = None, _encode(_string(fields, "text"), tokenizer)
    else:
        first = _encode(_string(fields, "prompt"), tokenizer)
        rest = _encode(_string(fields, "continuation"), tokenizer)
    return Line(number, name, _checked(_text(first, rest or []), config))


def _text(prompt: list[int] | None, rest: list[int]) -> Text:
    if prompt is None:
        if len(rest) < 2:
            raise BadRequest(
                f"{len(rest)} token{'s' * (len(rest) != 1)}: the first has no log-probability, because nothing stands "
                "before it; at least 2 are needed"
            )
        return Text(rest)
    if not prompt or not rest:
        raise BadRequest(f"the {'continuation' if prompt else 'prompt'} has no tokens; at least one is needed")
    return Text(prompt + rest, first=len(prompt))


def _checked(text: Text, config: ModelConfig) -> Text:
    if text.rows > config.max_positions:
        raise BadRequest(
            f"{len(text.ids):,} tokens; the model has positions for {config.max_positions:,} and one after them: cut it"
        )
    return text


def _decode(raw: bytes) -> str:
    try:
        return raw.decode()
    except UnicodeDecodeError as e:
        raise BadRequest(f"no UTF-8 (byte {e.start})") from None


def _encode(text: str, tokenizer: Tokenizer | None) -> list[int]:
    if tokenizer is None:
        raise BadRequest('this model has no tokenizer; give "ids"')
    return tokenizer.encode(text)


def _string(fields: abc.Mapping[str, object], name: str) -> str:
    value = fields[name]
    if not isinstance(value, str):
        raise BadRequest(f"{name} is no string")
    return value


def _ids(fields: abc.Mapping[str, object], name: str, config: ModelConfig) -> list[int] | None:
    if name not in fields:
        return None
    value = fields[name]
    if not isinstance(value, list):
        raise BadRequest(f"{name} is no list")
    for place, token in enumerate(value):
        if type(token) is not int or not 0 <= token < config.vocab_size:
            raise BadRequest(f"{name}: entry {place} is no token id from 0 to {config.vocab_size - 1}")
    return value


# ---- results -----------------------------------------------------------------------------------------------


class ResultKeys:
    """Digests of what a result depends on: what computes, the text, and which of its tokens are scored."""

    def __init__(self, model: Model) -> None:
        self._computes = identity(model).digest

    def of(self, text: Text) -> str:
        ids = np.array([text.first, *text.ids], "<u4").tobytes()
        return hashlib.sha256(b"deltafin score\n" + self._computes + ids).hexdigest()[:16]


@dataclass(slots=True)
class Totals:
    """Of all results so far."""

    texts: int = 0
    tokens: int = 0
    log_prob: float = 0.0
    greedy: int = 0

    def add(self, tokens: int, log_prob: float, greedy: bool) -> None:
        self.texts += 1
        self.tokens += tokens
        self.log_prob += log_prob
        self.greedy += greedy

    @property
    def perplexity(self) -> float | None:
        return _finite(perplexity(self.log_prob, self.tokens)) if self.tokens else None


def result(line: Line, key: str, score: Score, *, tokens: bool) -> dict[str, object]:
    """A line of results; with `tokens` also of each token. Log-probabilities are float32 in the fewest digits."""
    count, total = len(score.log_probs), score.total
    fields: dict[str, object] = {
        "line": line.number,
        "id": line.id,
        "tokens": count,
        "logprob": total,
        "perplexity": _finite(perplexity(total, count)),
        "greedy": score.greedy,
        "key": key,
    }
    if tokens:
        fields["ids"] = list(line.text.ids[line.text.first :])
        fields["logprobs"] = [float(str(value)) for value in score.log_probs]
    return fields


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


class Sink(Protocol):
    """Takes lines of results."""

    def write(self, lines: abc.Sequence[abc.Mapping[str, object]]) -> None: ...


class Output:
    """A file of results that grows in the order of the input. Close it, or use it in a `with`.

    Lines are on the disk when `write` returns. A line that a killed process left unfinished is cut off.
    """

    def __init__(self, path: Path) -> None:
        """Raises BadRequest if something else than a file is there, DeltafinError if another process writes to it,
        DiskError or NoSpace."""
        self.path = path
        try:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NONBLOCK, 0o666)
        except OSError as e:
            raise disk_error(e, path) from None
        self._file = os.fdopen(fd, "r+b", buffering=0)
        self._end = 0  # of what is known to be whole
        try:
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                raise BadRequest(f"{path}: no regular file; leave -o out to print the results")
            lock(fd, path)
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()

    def resume(self, lines: abc.Iterator[Line], keys: ResultKeys, totals: Totals, *, tokens: bool) -> None:
        """Goes to the end of what is there, which must be results of the first of `lines`; takes these off it.

        Raises BadRequest if it is something else.
        """
        reader = io.BufferedReader(self._file)
        try:
            while (raw := reader.readline(RESULT_NBYTES)).endswith(b"\n"):
                line = next(lines, None)
                if line is None or not _take(raw, line, keys.of(line.text), totals, tokens=tokens):
                    raise self._foreign(totals.texts + 1)
                self._end += len(raw)
            begun = raw.rstrip(b"\0")  # zeros may follow after a power cut
            nothing_but_zeros = raw != b"" and not begun and not self._end
            foreign = len(raw) == RESULT_NBYTES or begun[: len(_BEGIN)] != _BEGIN[: len(begun)]
            if foreign or nothing_but_zeros:  # not ours to remove
                raise self._foreign(totals.texts + 1)
            self._file.truncate(self._end)
        except OSError as e:
            raise disk_error(e, self.path) from None
        finally:
            reader.detach()

    def _foreign(self, number: int) -> BadRequest:
        return BadRequest(
            f"{self.path}: line {number} is not the result of this input, model and options; choose another file for "
            "the results, or remove this one"
        )

    def write(self, lines: abc.Sequence[abc.Mapping[str, object]]) -> None:
        data = _json_lines(lines)
        try:
            if not is_same(self._file.fileno(), self.path):
                raise DiskError(f"{self.path}: was moved or removed while it was written; put it back and run it again")
            self._file.seek(self._end)
            left = memoryview(data)
            while left:  # a write may be cut short
                left = left[self._file.write(left) :]
            os.fsync(self._file.fileno())
            self._end += len(data)
        except OSError as e:
            raise disk_error(e, self.path) from None


class Printed:
    """Results on stdout."""

    def write(self, lines: abc.Sequence[abc.Mapping[str, object]]) -> None:
        sys.stdout.write(_json_lines(lines).decode())
        sys.stdout.flush()


def _json_lines(lines: abc.Sequence[abc.Mapping[str, object]]) -> bytes:
    return b"".join(json.dumps(line).encode() + b"\n" for line in lines)


def _take(raw: bytes, line: Line, key: str, totals: Totals, *, tokens: bool) -> bool:
    """Adds a line of results to the totals, if it is the result of that text."""
    try:
        fields = parse(raw)
    except BadRequest:
        return False
    if not isinstance(fields, dict):
        return False
    same = (fields.get("line"), fields.get("id"), fields.get("key")) == (line.number, line.id, key)
    count, total, greedy = (fields.get(name) for name in ("tokens", "logprob", "greedy"))
    if not same or count != len(line.text.ids) - line.text.first or ("logprobs" in fields) != tokens:
        return False
    if not isinstance(total, float) or not math.isfinite(total) or not isinstance(greedy, bool):
        return False
    totals.add(count, total, greedy)
    return True
