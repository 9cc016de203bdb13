"""Files that clients have uploaded, and those that batches have left for them.

Each is two files in one folder: its bytes, and then a record that says it is there. The names that users give are in
the record only.
"""

from __future__ import annotations

import io
import logging
import os
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from deltafin.indexer import discard, disk_error, make_directory, publish, temporary
from deltafin.runtime.server.errors import ApiError
from deltafin.runtime.server.records import clear_parts, new_id, read_records, write_record

log = logging.getLogger(__name__)

PREFIX = "file-"
INPUT, OUTPUT = "batch", "batch_output"  # purposes
MOST_NAME = 255  # characters of a user's name for a file
MOST_SENT = 8  # files at once: each is open for as long as its client takes to read it
_RETRY_S = 5


@dataclass(frozen=True, slots=True)
class FileRecord:
    """One file."""

    id: str
    filename: str
    purpose: str
    nbytes: int
    created: float  # seconds since 1970

    def as_json(self) -> dict[str, object]:
        """The object of the API."""
        return {
            "id": self.id,
            "object": "file",
            "bytes": self.nbytes,
            "created_at": int(self.created),
            "filename": self.filename,
            "purpose": self.purpose,
            "status": "processed",
            "expires_at": None,
            "status_details": None,
        }


class FileStore:
    """The files of a folder that only this process writes to. For any thread."""

    def __init__(self, folder: Path) -> None:
        """Removes what an earlier process has left unfinished. Raises DiskError or NoSpace."""
        self.folder = folder
        self._sending = threading.Semaphore(MOST_SENT)
        self._lock = threading.Lock()
        self._records: dict[str, FileRecord] = {}  # in the order of their making
        try:
            make_directory(folder, 0o700)
            clear_parts(folder)
            found = [_record(name, value) for name, value in read_records(folder, PREFIX)]
            self._clear_orphans()
        except OSError as e:
            raise disk_error(e, folder, "cannot read the files") from None
        for record in sorted((r for r in found if r is not None), key=lambda r: (r.created, r.id)):
            self._records[record.id] = record

    def find(self, file_id: str) -> FileRecord | None:
        return self._records.get(file_id)

    def all(self) -> list[FileRecord]:
        """The oldest first."""
        with self._lock:
            return list(self._records.values())

    def path(self, file_id: str) -> Path:
        """Of the bytes of a file that is there."""
        return self.folder / file_id

    def part(self) -> Path:
        """A new name in the folder for bytes that will be a file."""
        return temporary(self.folder, "new")

    def add(self, part: Path, filename: str, purpose: str, file_id: str | None = None) -> FileRecord:
        """Makes a finished `part` a file; with an id, in place of one that has it. Raises NoSpace or DiskError."""
        file_id = file_id or new_id(PREFIX)
        try:
            record = FileRecord(file_id, filename[:MOST_NAME], purpose, part.stat().st_size, time.time())
            publish(part, self.path(file_id))
        except OSError as e:
            raise disk_error(e, self.folder) from None
        try:
            write_record(self._record_path(file_id), asdict(record))
        except BaseException:
            discard(self.path(file_id))
            raise
        with self._lock:
            self._records[file_id] = record
        return record

    def open(self, file_id: str) -> io.FileIO:
        """The bytes; they can be read to the end even if the file is removed meanwhile.

        Raises DiskError, or ApiError if `MOST_SENT` are open already.
        """
        if not self._sending.acquire(blocking=False):
            why = f"{MOST_SENT} files are being sent already; try again in {_RETRY_S} s"
            raise ApiError(503, why, code="too_many_downloads", headers={"Retry-After": str(_RETRY_S)})
        try:
            return _Sent(self.path(file_id), self._sending)
        except OSError as e:
            self._sending.release()
            raise disk_error(e, self.path(file_id), "cannot read") from None

    def remove(self, file_id: str) -> None:
        """Raises DiskError."""
        try:
            self._record_path(file_id).unlink(missing_ok=True)
            self.path(file_id).unlink(missing_ok=True)
        except OSError as e:
            raise disk_error(e, self.path(file_id), "cannot remove") from None
        with self._lock:
            self._records.pop(file_id, None)

    def _record_path(self, file_id: str) -> Path:
        return self.folder / f"{file_id}.json"

    def _clear_orphans(self) -> None:
        """Bytes whose record was not written yet, or is gone already."""
        for path in self.folder.iterdir():
            if path.name.startswith(PREFIX) and not path.suffix and not os.path.lexists(self._record_path(path.name)):
                discard(path)


class _Sent(io.FileIO):
    """A file that gives its place back when it is closed, which happens even if nobody has read from it."""

    _place: threading.Semaphore | None = None

    def __init__(self, path: Path, place: threading.Semaphore) -> None:
        super().__init__(path, "rb")
        self._place = place

    def close(self) -> None:
        super().close()
        place, self._place = self._place, None
        if place is not None:
            place.release()


def write_part(part: Path, pieces: Iterator[bytes]) -> None:
    """Writes a new file, which goes if anything fails. Raises NoSpace or DiskError."""
    try:
        with open(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            for piece in pieces:
                file.write(piece)
    except BaseException as e:
        discard(part)
        if isinstance(e, OSError):
            raise disk_error(e, part) from None
        raise


def _record(name: str, value: dict[str, object]) -> FileRecord | None:
    match value:
        case {"id": str(i), "filename": str(f), "purpose": str(p), "nbytes": int(n), "created": float(c)} if i == name:
            return FileRecord(i, f, p, n, c)
    log.warning("the record of %s is damaged and left alone", name)
    return None
