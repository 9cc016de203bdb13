"""The input of a batch: which requests there are, which can be answered, and how long they can get.

The whole file is read and checked before anything is computed, so that a mistake in the last line is known at once.
What stays of it in memory is some 130 bytes a line; a line is read again when it is its turn.
"""

from __future__ import annotations

import os
import stat
from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from deltafin.errors import BadRequest, DiskError
from deltafin.indexer import disk_error
from deltafin.runtime.batch.keys import KEY_NBYTES, Keys, digest
from deltafin.runtime.batch.results import Results
from deltafin.runtime.openai import ENDPOINTS, BadBody, Serving, Task, parse, read_body
from deltafin.runtime.openai.fields import Fields, one_of, shown

NO_KEY = bytes(KEY_NBYTES)
MOST_LINE_NBYTES = 64 << 20  # some ten times the longest prompt that the model takes


@dataclass(frozen=True, slots=True)
class Request:
    """One line of the input."""

    index: int  # among the requests of the file, from 0
    line: int  # in the file, from 1
    key: bytes  # of this request and all that its answer depends on
    custom_id: str
    fields: dict[str, object]


class Requests:
    """The input file, open; close it, or use it in a `with`. `scan` comes first."""

    def __init__(self, path: Path, serving: Serving, *, check: Callable[[Task], None] = lambda task: None) -> None:
        """`check` may refuse a task that could be done: it raises BadBody then."""
        self.path = path
        self._serving = serving
        self._check_task = check
        # Answers depend on the request, what answers, and the number of tokens where a request gives none.
        self._settings = digest(serving.fingerprint.encode(), str(serving.max_new).encode())
        self._keys, self._custom_ids = Keys(), Keys()
        self._offsets, self._lines = array("Q"), array("Q")
        self.lengths = array("I")  # of prompt and answer, at most; 0: it is answered, or refused
        self._beginnings = Keys()  # of what the open ones begin with
        self._beginning_lengths = array("I")
        self.refused = array("Q")  # indexes of those that cannot be answered, and have no error for an answer yet
        self.answered = 0
        self.named_models: set[str] = set()  # that requests ask for; a few are enough to tell
        try:
            # Not blocking: opening a named pipe would wait for somebody who writes.
            self._file = open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK))  # noqa: SIM115
        except OSError as e:
            raise disk_error(e, path, "cannot read the requests") from None
        self.nbytes = os.fstat(self._file.fileno()).st_size
        if not stat.S_ISREG(os.fstat(self._file.fileno()).st_mode):
            self.close()
            raise BadRequest(f"{path}: is no file; a batch reads its requests more than once")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __len__(self) -> int:
        return len(self._offsets)

    def close(self) -> None:
        self._file.close()

    @property
    def open(self) -> bool:
        """Whether any can be answered and is not."""
        return any(self.lengths)

    def is_open(self, key: bytes) -> bool:
        """Whether a request with this key waits for an answer."""
        index = self._keys.find(key)
        return index >= 0 and self.lengths[index] > 0

    def beginnings(self) -> Iterator[tuple[bytes, int, int]]:
        """Instructions that open requests begin with: their key, how many requests have them, their tokens."""
        return (
            (key, count, self._beginning_lengths[first])
            for key, count, first in self._beginnings.repetitions()
            if key != NO_KEY
        )

    def complaint(self, request: Request) -> BadBody:
        """Why a request is refused."""
        try:
            self.task(request)
        except BadBody as e:
            return e
        raise AssertionError("a request that was refused is fine now")

    def scan(self, results: Results, progress: Callable[[int], None] = lambda nbytes: None) -> None:
        """Reads and checks all, and compares it with what is answered; `progress` is told how many bytes are done.

        Raises BadRequest if the file is no list of requests, or the results are those of another one.
        """
        for request, offset in self._all(progress):
            self._keys.add(request.key)
            self._custom_ids.add(digest(request.custom_id.encode()))
            self._offsets.append(offset)
            self._lines.append(request.line)
            self.lengths.append(self._length(request, results))
        self._keys.seal()
        self._custom_ids.seal()
        self._beginnings.seal()
        if not len(self):
            raise BadRequest(f"{self.path}: there are no requests in it")
        if (twice := self._custom_ids.repeated()) is not None:
            later, earlier = (self._lines[index] for index in twice)
            raise BadRequest(f"{self.path}: lines {earlier} and {later} have the same custom_id; each needs its own")
        self._check(results)

    def read(self, index: int) -> Request:
        """Reads a request again. Raises DiskError if the file is no longer what it was."""
        try:
            self._file.seek(self._offsets[index])
            raw = self._file.readline(MOST_LINE_NBYTES)
        except OSError as e:
            raise disk_error(e, self.path, "cannot read the requests") from None
        if self._key(raw) != self._keys[index]:
            raise DiskError(f"{self.path}: line {self._lines[index]} has changed meanwhile; run it again")
        return self._request(raw, index, self._lines[index])

    def task(self, request: Request) -> Task:
        """What a request asks for. Raises BadBody if it cannot be done."""
        fields = Fields(request.fields)
        fields.ignore("custom_id", "body")
        if (method := fields.text("method")) != "POST":
            raise BadBody(f'method is {shown(method)}; expected "POST"', "method")
        url = fields.text("url")
        endpoint = next((e for e in ENDPOINTS if e == url), None)
        if endpoint is None:
            raise BadBody(f"url is {shown(url)}; expected {one_of(ENDPOINTS)}", "url")
        fields.finish()
        # Of the name alone: a text drawn without a seed is the same when the batch is run again.
        seed = int.from_bytes(digest(request.custom_id.encode())[:8], "little")
        task = read_body(endpoint, request.fields.get("body"), self._serving, seed=seed)
        if task.stream:
            raise BadBody("stream: answers of a batch are written whole; leave it out", "stream", "unsupported_value")
        self._check_task(task)
        return task

    def _all(self, progress: Callable[[int], None]) -> Iterator[tuple[Request, int]]:
        """Every request and where it stands."""
        offset = 0
        try:
            self._file.seek(0)
            for number in range(1, 1 << 62):
                raw = self._file.readline(MOST_LINE_NBYTES)
                if not raw:
                    return
                if len(raw) == MOST_LINE_NBYTES and not raw.endswith(b"\n"):
                    raise BadRequest(f"{self.path}: line {number} has more than {MOST_LINE_NBYTES:,} bytes")
                if not raw.isspace():
                    yield self._request(raw, len(self), number), offset
                offset += len(raw)
                progress(offset)
        except OSError as e:
            raise disk_error(e, self.path, "cannot read the requests") from None

    def _request(self, raw: bytes, index: int, number: int) -> Request:
        where = f"{self.path}: line {number}"
        try:
            fields = parse(raw)
        except BadRequest as e:
            raise BadRequest(f"{where}: {e}; expected one request a line, and nothing was begun") from None
        if not isinstance(fields, dict):
            raise BadRequest(f"{where} is {shown(fields)}; expected an object with custom_id, method, url and body")
        custom_id = fields.get("custom_id")
        if not isinstance(custom_id, str) or not custom_id:
            raise BadRequest(f"{where}: custom_id is {shown(custom_id)}; expected a name of the request's own")
        try:
            custom_id.encode()
        except UnicodeEncodeError:
            raise BadRequest(f"{where}: custom_id has half of a surrogate pair in it, which is no text") from None
        return Request(index, number, self._key(raw), custom_id, fields)

    def _key(self, raw: bytes) -> bytes:
        return digest(self._settings, raw.strip())

    def _length(self, request: Request, results: Results) -> int:
        if results.keys.find(request.key) >= 0:
            self.answered += 1
            return 0
        try:
            task = self.task(request)
        except BadBody:
            self.refused.append(request.index)
            return 0
        if task.model is not None and len(self.named_models) < 4:
            self.named_models.add(task.model)
        self._beginnings.add(beginning_key(task))
        self._beginning_lengths.append(task.shared)
        return task.tokens

    def _check(self, results: Results) -> None:
        """Whether every answer that is there is one to a request of this file."""
        if len(results) == self.answered:
            return
        for number in range(len(results)):
            if self._keys.find(results.keys[number]) >= 0:
                continue
            if self._custom_ids.find(results.custom_ids[number]) < 0:
                why = f"answers a request that is not in {self.path}"
            else:
                why = f"answers another version of a request in {self.path}, or was made with another model or setting"
            raise BadRequest(f"{results.path}: line {number + 1} {why}; remove that line, or choose another output")


def beginning_key(task: Task) -> bytes:
    """Names the instructions that a prompt begins with; `NO_KEY` if there are none."""
    if not task.shared:
        return NO_KEY
    return digest(array("I", task.ids[: task.shared]).tobytes())
