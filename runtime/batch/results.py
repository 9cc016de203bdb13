"""The output of a batch: one line an answer, appended whole and synced, in the order in which answers finish.

The file is all that a later run needs to know what is done. So every line names its request twice: by `custom_id`, and
in `id` by a digest of the request and of all that its answer depends on.
"""

from __future__ import annotations

import logging
import os
import re
import stat
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Self

from deltafin.errors import BadRequest, DiskError
from deltafin.indexer import disk_error, sync_directory
from deltafin.runtime.batch.journal import append_whole
from deltafin.runtime.batch.keys import Keys, digest
from deltafin.runtime.exclusive import is_same, lock
from deltafin.runtime.openai import parse, write_line

log = logging.getLogger(__name__)

ID_PREFIX = "batch_req_"
_ID = re.compile(ID_PREFIX + "([0-9a-f]{32})", re.ASCII)
_BEGINNING = f'{{"id":"{ID_PREFIX}'.encode()
MOST_LINE_NBYTES = 1 << 30


class Results:
    """The output file, locked and open for appending; close it, or use it in a `with`.

    Opening reads what is there, and cuts off the end of a line that was never finished. Raises BadRequest if it is no
    output of a batch, or another process writes to it; DiskError or NoSpace.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.keys = Keys()  # of the requests that are answered
        self.custom_ids = Keys()  # digests of their names
        self.errors = 0  # answers that are errors, those that were appended since, too
        self._fd, self._made = _open_locked(path)
        try:
            self._nbytes = 0
            self._read()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __len__(self) -> int:
        """How many answers were there when it was opened."""
        return len(self.keys)

    def append(self, key: bytes, custom_id: str, response: dict[str, object] | None, error: object = None) -> None:
        """Adds the answer to a request; when this returns, it is on the drive. Raises NoSpace or DiskError."""
        line = write_line({"id": ID_PREFIX + key.hex(), "custom_id": custom_id, "response": response, "error": error})
        try:
            if not is_same(self._fd, self.path):
                raise DiskError(f"{self.path}: was moved or removed while it was written; put it back and run it again")
            append_whole(self._fd, line, self._nbytes)
            self._nbytes += len(line)
            os.fsync(self._fd)
        except OSError as e:
            raise disk_error(e, self.path) from None
        self.errors += is_error(response)

    def close(self) -> None:
        """Gives the lock back. A file that was made in vain goes."""
        if self._fd < 0:
            return
        if self._made and os.fstat(self._fd).st_size == 0 and is_same(self._fd, self.path):
            self.path.unlink(missing_ok=True)
        os.close(self._fd)
        self._fd = -1

    def _read(self) -> None:
        for number, line in enumerate(self._lines(), start=1):
            key, custom_id, wrong = self._identify(line, number)
            self.errors += wrong
            self.keys.add(key)
            self.custom_ids.add(digest(custom_id.encode()))
        self.keys.seal()
        self.custom_ids.seal()
        if (twice := self.custom_ids.repeated()) is not None:
            later, earlier = twice
            raise BadRequest(f"{self.path}: lines {earlier + 1} and {later + 1} answer the same custom_id; remove one")

    def _lines(self) -> Iterator[bytes]:
        """The whole lines. What stands behind the last newline is cut off, unless only the newline is missing."""
        try:
            with open(os.dup(self._fd), "rb") as f:
                f.seek(0)
                number = 0
                while line := f.readline(MOST_LINE_NBYTES):
                    number += 1
                    if line.endswith(b"\n"):
                        yield line
                        self._nbytes += len(line)
                    elif len(line) == MOST_LINE_NBYTES:
                        raise BadRequest(f"{self.path}: has a line of more than {MOST_LINE_NBYTES:,} bytes")
                    elif self._is_whole(line):
                        append_whole(self._fd, b"\n", self._nbytes + len(line))
                        yield line
                        self._nbytes += len(line) + 1
                    elif not _is_begun(line):
                        raise self._foreign(number, "it has no end")
                    else:
                        os.ftruncate(self._fd, self._nbytes)
                        log.info("%s: the last line was not finished and is cut off", self.path)
        except OSError as e:
            raise disk_error(e, self.path, "cannot read the output") from None

    def _is_whole(self, line: bytes) -> bool:
        try:
            self._identify(line, 0)
        except BadRequest:
            return False
        return True

    def _identify(self, line: bytes, number: int) -> tuple[bytes, str, bool]:
        """The key and custom_id of an answer, and whether it is an error. Raises BadRequest."""
        if line.isspace():
            raise self._foreign(number, "it is empty")
        try:
            answer = parse(line)
        except BadRequest as e:
            raise self._foreign(number, str(e)) from None
        fields = answer if isinstance(answer, dict) else {}
        name, custom_id = fields.get("id"), fields.get("custom_id")
        found = _ID.fullmatch(name) if isinstance(name, str) else None
        if found is None or not isinstance(custom_id, str) or not _is_text(custom_id):
            raise self._foreign(number, "no id and custom_id of df-run batch in it")
        return bytes.fromhex(found[1]), custom_id, is_error(fields.get("response"))

    def _foreign(self, number: int, why: str) -> BadRequest:
        return BadRequest(
            f"{self.path}: line {number} is no answer of this command ({why}); remove the line if it is there by "
            "mistake, or choose another output"
        )


def is_error(response: object) -> bool:
    """Whether a line with this `response` is no answer as it was asked for."""
    return not isinstance(response, dict) or response.get("status_code") != 200


def _is_text(name: str) -> bool:
    """Not if half of a surrogate pair is in it, which no request has in its name."""
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


def _is_begun(line: bytes) -> bool:
    """Whether a line without an end may be the beginning of an answer; after a power cut zeros may follow."""
    line = line.rstrip(b"\0")
    return line.startswith(_BEGINNING) or _BEGINNING.startswith(line)


def _open_locked(path: Path) -> tuple[int, bool]:
    """The file, which only this process may write to as long as it is open, and whether it was made now."""
    while True:
        made = not os.path.lexists(path)
        try:
            # Not blocking: opening a named pipe would wait for somebody who reads.
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NONBLOCK, 0o644)
        except OSError as e:
            raise disk_error(e, path, "cannot open the output") from None
        try:
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                raise BadRequest(f"{path}: is no file; a batch needs one, to go on after an interruption")
            lock(fd, path)
            if is_same(fd, path):
                if made:
                    sync_directory(path.parent)
                return fd, made
        except BaseException:
            os.close(fd)
            raise
        os.close(fd)  # whoever had it before removed it: it is another file now, or none
