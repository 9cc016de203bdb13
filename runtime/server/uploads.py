"""A file on its way in: a form of several parts, whose file goes to the drive piece by piece.

It is open only while a piece is written: clients that say nothing more must not take the open files of the weights.
"""

from __future__ import annotations

import asyncio
import os
import re
import unicodedata
from collections.abc import AsyncIterator
from pathlib import Path

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from deltafin.indexer import discard, disk_error
from deltafin.runtime.server.errors import ApiError
from deltafin.runtime.server.files import MOST_NAME

MOST_FIELDS, MOST_FIELD_NBYTES = 16, 1024  # of a form, besides its file
_WRITE_NBYTES = 256 << 10  # at once, and as much of each upload is in memory


class Upload:
    """One form with a field `file`. Whoever takes what `part` names then publishes it; `discard` comes last."""

    def __init__(self, content_type: str, part: Path, most_nbytes: int) -> None:
        """Raises ApiError if it is no form; 413 comes while reading, as soon as the file is too long."""
        kind, options = parse_options_header(content_type)
        boundary = options.get(b"boundary")
        if kind != b"multipart/form-data" or not boundary:
            raise ApiError(415, "a file is sent as multipart/form-data, in a field named file")
        self.part = part
        self.fields: dict[str, str] = {}
        self.filename: str | None = None  # as the user calls it; None if there was no file
        self._most_nbytes = most_nbytes
        self._nbytes = 0
        self._buffer = bytearray()
        self._made = False  # whether the part is there
        self._ended = False
        self._header = [bytearray(), bytearray()]
        self._headers: dict[bytes, bytes] = {}
        self._field: tuple[str, bytearray] | None = None  # that is being read; None: the file
        try:
            self._parser = MultipartParser(
                boundary,
                {
                    "on_part_begin": self._begin,
                    "on_header_field": lambda data, start, end: self._header[0].extend(data[start:end]),
                    "on_header_value": lambda data, start, end: self._header[1].extend(data[start:end]),
                    "on_header_end": self._end_header,
                    "on_headers_finished": self._enter,
                    "on_part_data": self._data,
                    "on_part_end": self._leave,
                    "on_end": self._end,
                },
            )
        except FormParserError:
            raise self._broken() from None

    async def read(self, stream: AsyncIterator[bytes]) -> None:
        """To the end of the form. Raises ApiError, NoSpace or DiskError."""
        async for chunk in stream:
            try:
                self._parser.write(chunk)
            except FormParserError:
                raise self._broken() from None
            if len(self._buffer) >= _WRITE_NBYTES:
                await asyncio.to_thread(self._write)
        if not self._ended:
            raise self._broken()
        await asyncio.to_thread(self._write)

    def discard(self) -> None:
        """Whatever has not been published goes."""
        discard(self.part)

    def _write(self) -> None:
        flags = 0 if self._made else os.O_CREAT | os.O_EXCL
        try:
            fd = os.open(self.part, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC | flags, 0o600)
            try:
                self._made = True
                left = memoryview(bytes(self._buffer))
                while left:
                    left = left[os.write(fd, left) :]
            finally:
                os.close(fd)
        except OSError as e:
            raise disk_error(e, self.part) from None
        self._buffer.clear()

    # ---- told by the parser

    def _begin(self) -> None:
        self._headers = {}

    def _end_header(self) -> None:
        name, value = self._header
        self._headers[bytes(name).lower()] = bytes(value)
        self._header = [bytearray(), bytearray()]

    def _enter(self) -> None:
        """The headers of a part are there."""
        _, options = parse_options_header(self._headers.get(b"content-disposition", b""))
        name = options.get(b"name", b"").decode(errors="replace")
        if name in self.fields or (name == "file" and self.filename is not None):
            raise ApiError(400, f"the form has {name[:60]!r} twice", param=name[:60])
        if len(self.fields) >= MOST_FIELDS:
            raise ApiError(400, f"the form has more than {MOST_FIELDS} fields")
        if name != "file":
            self._field = name, bytearray()
            return
        if b"filename" not in options:
            raise ApiError(400, "file is no file; send it with a filename", param="file")
        self._field = None
        self.filename = own_name(options[b"filename"].decode(errors="replace"))

    def _data(self, data: bytes, start: int, end: int) -> None:
        if self._field is not None:
            name, value = self._field
            if len(value) + end - start > MOST_FIELD_NBYTES:
                raise ApiError(400, f"{name[:60]} has more than {MOST_FIELD_NBYTES:,} bytes", param=name[:60])
            value.extend(data[start:end])
            return
        self._nbytes += end - start
        if self._nbytes > self._most_nbytes:
            raise ApiError(413, f"the file has more than {self._most_nbytes:,} bytes; send it in several", param="file")
        self._buffer += memoryview(data)[start:end]

    def _leave(self) -> None:
        if self._field is not None:
            name, value = self._field
            self.fields[name] = value.decode(errors="replace")

    def _end(self) -> None:
        self._ended = True

    @staticmethod
    def _broken() -> ApiError:
        return ApiError(400, "the body is no whole form; send the file as multipart/form-data")


def own_name(given: str) -> str:
    """What of a user's file name is shown again: no folders, nothing that a terminal would act upon."""
    name = re.split(r"[/\\]", given)[-1]
    name = "".join(c for c in name if unicodedata.category(c)[0] != "C")[:MOST_NAME].strip()
    return name or "upload.jsonl"
