"""Where batches are on the drive: a record of each, and the answers so far of those that are not over."""

from __future__ import annotations

import logging
from pathlib import Path

from deltafin.indexer import discard, disk_error, make_directory
from deltafin.runtime.batch import journal_path
from deltafin.runtime.server.batch_records import PREFIX, BatchRecord
from deltafin.runtime.server.records import clear_parts, read_records, write_record

log = logging.getLogger(__name__)


class BatchFolder:
    """A folder that only this process writes to. One thread at a time."""

    def __init__(self, path: Path) -> None:
        """Reads what earlier processes have left; what is of no use goes. Raises NoSpace or DiskError."""
        self.path = path
        self.records: dict[str, BatchRecord] = {}  # the oldest first
        try:
            make_directory(path, 0o700)
            clear_parts(path)
            found = self._read()
        except OSError as e:
            raise disk_error(e, path, "cannot read the batches") from None
        for record in sorted(found, key=lambda r: (r.created, r.id)):
            self.records[record.id] = record
            if record.is_over and record.output_id is not None:
                self.clear(record)

    def put(self, record: BatchRecord) -> BatchRecord:
        """On the drive first, and then in memory. Raises NoSpace or DiskError."""
        write_record(self.path / f"{record.id}.json", record.as_record())
        self.records[record.id] = record
        return record

    def results(self, record: BatchRecord) -> Path:
        """Of a batch's answers, beside which their journal is."""
        return self.path / f"{record.id}.jsonl"

    def clear(self, record: BatchRecord) -> None:
        """The answers are in the files of the batch now."""
        discard(self.results(record))
        discard(journal_path(self.results(record)))

    def _read(self) -> list[BatchRecord]:
        found = []
        for name, value in read_records(self.path, PREFIX):
            try:
                found.append(BatchRecord.read(value))
            except ValueError as e:
                log.warning("%s: %s; it is left alone", name, e)
        return found
