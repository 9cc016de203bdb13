"""Batches of OpenAI's API: they ride in the passes where requests leave room, and outlive the server.

What is on the drive is what counts: a record for each batch and file, and the results and journal of `runtime.batch`.
Killed at any moment, a server on the same folder goes on. One thread of the service reads and writes files; what
touches the model is done in the engine's.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from deltafin.errors import BadRequest, DeltafinError, DiskError
from deltafin.indexer import disk_error, make_directory
from deltafin.runtime.batch import LineError, StoredBeginnings, check_input
from deltafin.runtime.exclusive import lock
from deltafin.runtime.generation import Generation, Runner, Step
from deltafin.runtime.openai import Endpoint, Serving
from deltafin.runtime.server.batch_folder import BatchFolder
from deltafin.runtime.server.batch_outputs import write_outputs
from deltafin.runtime.server.batch_records import PREFIX, BatchRecord, Status
from deltafin.runtime.server.engine import Engine
from deltafin.runtime.server.errors import ApiError, api_error
from deltafin.runtime.server.files import INPUT, FileRecord, FileStore
from deltafin.runtime.server.files import PREFIX as FILE_PREFIX
from deltafin.runtime.server.pauses import Pauses
from deltafin.runtime.server.records import new_id
from deltafin.runtime.server.refusing import Stopped
from deltafin.runtime.server.riders import Riders
from deltafin.runtime.server.riding import Riding
from deltafin.runtime.server.room import Room
from deltafin.runtime.server.settings import Settings
from deltafin.runtime.states import PrefixStore

log = logging.getLogger(__name__)

MOST_RIDING = 2  # batches that are open at once; what one leaves of the room, the next one takes
MOST_OPEN = 1000  # batches that are not over
FIRST_PAUSE_S = 60.0  # before a batch that had to stop is tried again


class _Interrupted(Exception):
    """Reading or writing files of a batch ends: it was cancelled, or the service is closing."""


class BatchService:
    """The files and batches of a folder, which no other process may use meanwhile. A `Company` of the engine."""

    def __init__(
        self,
        folder: Path,
        engine: Engine,
        serving: Serving,
        settings: Settings,
        *,
        states: PrefixStore | None = None,
        aliases: frozenset[str] = frozenset(),
        first_pause_s: float = FIRST_PAUSE_S,
    ) -> None:
        """`states` keeps beginnings that many requests share; `aliases` are other names of the model.

        Raises DeltafinError if the folder is in use, or DiskError or NoSpace.
        """
        self.most_file_nbytes = settings.most_file_nbytes
        self._engine, self._serving = engine, serving
        self._names = aliases | {serving.name}
        self._beginnings = None if states is None else StoredBeginnings(engine.model, states)
        self._lock_fd = _own(folder)
        try:
            self.files = FileStore(folder / "files")
            self._folder = BatchFolder(folder / "batches")
        except BaseException:
            os.close(self._lock_fd)
            raise
        self._changed = threading.Condition()  # of all below
        self._closing = self._closed = False
        self._riders = Riders(self._give_back)
        self._back: deque[Riding] = deque()  # from the engine
        self._pauses = Pauses(first_pause_s)
        self._thread = threading.Thread(target=self._work, name="batches", daemon=True)
        self._thread.start()

    # ---- for the routes ----------------------------------------------------------------------------------

    def find(self, batch_id: str) -> BatchRecord | None:
        """As it is now."""
        with self._changed:
            record = self._folder.records.get(batch_id)
            return None if record is None else self._now(record)

    def all(self) -> list[BatchRecord]:
        """The oldest first."""
        with self._changed:
            return [self._now(record) for record in self._folder.records.values()]

    def create(self, file_id: str, endpoint: Endpoint, metadata: dict[str, str] | None) -> BatchRecord:
        """Raises ApiError, Stopped, NoSpace or DiskError."""
        with self._changed:
            self._check_open()
            file = self.files.find(file_id)
            if file is None:
                raise ApiError(404, f"there is no file {file_id[:60]!r}", param="input_file_id")
            if file.purpose != INPUT:
                raise ApiError(400, f'the file has the purpose "{file.purpose}", not "batch"', param="input_file_id")
            if sum(not record.is_over for record in self._folder.records.values()) >= MOST_OPEN:
                raise ApiError(429, f"{MOST_OPEN} batches wait already", code="too_many_batches")
            record = BatchRecord(
                id=new_id(PREFIX),
                endpoint=endpoint,
                input_file_id=file_id,
                model=self._serving.name,
                fingerprint=self._serving.fingerprint,
                max_new=self._serving.max_new,
                most_tokens=self._serving.most_tokens,
                created=time.time(),
                metadata=metadata,
            )
            self._put(record)
        return record

    def cancel(self, batch_id: str) -> BatchRecord | None:
        """What is answered stays. Raises ApiError if it is too late for that, Stopped, NoSpace or DiskError."""
        with self._changed:
            self._check_open()
            record = self._folder.records.get(batch_id)
            if record is None or record.status == "cancelling":
                return record
            if record.status not in ("validating", "in_progress"):
                raise ApiError(409, f"the batch is {record.status}; there is nothing to cancel")
            record = self._put(self._now(record).to("cancelling", time.time()), errors=())
            self._pauses.forget(batch_id)
            if (riding := self._riders.find(batch_id)) is not None:
                riding.cancelled = True
        self._engine.wake()
        return record

    def add_file(self, part: Path, filename: str) -> FileRecord:
        """Makes an upload a file. Raises Stopped, NoSpace or DiskError."""
        with self._changed:
            self._check_open()
        return self.files.add(part, filename, INPUT)

    def remove_file(self, file_id: str) -> bool:
        """False if it is not there. Raises ApiError if a batch needs it, Stopped or DiskError."""
        with self._changed:
            self._check_open()
            user = next(
                (r for r in self._folder.records.values() if not r.is_over and r.input_file_id == file_id), None
            )
            if user is not None:
                why = f"{user.id} is {user.status} and needs the file; cancel the batch first"
                raise ApiError(409, why, code="file_in_use")
            if self.files.find(file_id) is None:
                return False
            self.files.remove(file_id)
        return True

    # ---- the engine's thread -------------------------------------------------------------------------------

    def ready(self) -> bool:
        return self._riders.ready()

    def join(self, runner: Runner, room: Room) -> None:
        self._riders.join(runner, room)

    def owns(self, generation: Generation) -> bool:
        return self._riders.owner(generation) is not None

    def took(self, steps: Sequence[Step]) -> None:
        self._riders.took(steps)

    def step_back(self, runner: Runner, room: Room) -> bool:
        return self._riders.step_back(runner)

    def failed(self, generation: Generation, error: Exception, *, alone: bool) -> None:
        self._riders.failed(generation, error, alone=alone)

    def close(self) -> None:
        """Everything is kept for the next server. Waits for what is being written; nothing can be asked any more."""
        with self._changed:
            if self._closed:
                return
            self._closing = True
            self._changed.notify_all()
        self._thread.join()
        with self._changed:
            for riding in [*self._riders.all, *self._back]:
                riding.close()
            self._closed = True
            os.close(self._lock_fd)

    def _give_back(self, riding: Riding) -> None:
        with self._changed:
            self._riders.remove(riding)
            self._back.append(riding)
            self._changed.notify_all()

    # ---- the service's thread ------------------------------------------------------------------------------

    def _work(self) -> None:
        while (found := self._next_work()) is not None:
            record, riding = found
            try:
                if riding is not None:
                    self._take_back(record, riding)
                elif record.status == "validating":
                    self._validate(record)
                elif record.status == "in_progress":
                    self._open(record)
                else:
                    self._finish(record)
            except _Interrupted:
                pass
            except (DeltafinError, MemoryError) as e:
                self._pause(record, e)
            except Exception as e:
                log.exception("%s failed", record.id)
                self._pause(record, e)

    def _next_work(self) -> tuple[BatchRecord, Riding | None] | None:
        """The oldest batch that something can be done for. Waits for one; None if the service is closing."""
        with self._changed:
            while not self._closing:
                if self._back:
                    riding = self._back.popleft()
                    return self._folder.records[riding.id], riding
                now = time.monotonic()
                for record in self._folder.records.values():
                    if self._needs_work(record, now):
                        return record, None
                self._changed.wait(self._pauses.left_s(now))
        return None

    def _needs_work(self, record: BatchRecord, now: float) -> bool:
        if record.is_over or self._pauses.why(record.id, now) is not None or self._riders.find(record.id) is not None:
            return False
        return record.status != "in_progress" or len(self._riders.all) < MOST_RIDING

    def _validate(self, record: BatchRecord) -> None:
        """Whether the input is a list of requests."""
        path = self.files.path(record.input_file_id)
        checked = check_input(path, record.endpoint, lambda nbytes: self._check(record))
        with self._changed:
            self._check(record)
            record = replace(record, total=checked.requests)
            if checked.errors:
                self._put(record.to("failed", time.time()), errors=tuple(checked.errors))
            else:
                self._put(record.to("in_progress", time.time()))

    def _open(self, record: BatchRecord) -> None:
        """Gives a batch to the engine."""
        path, target = self.files.path(record.input_file_id), self._folder.results(record)
        if record.fingerprint != self._serving.fingerprint:
            if _has_bytes(target):
                why = "the weights or the spine are not those that its first answers were computed with"
                self._give_up(record, LineError("model_changed", why))
                return
            with self._changed:
                record = self._put(replace(self._folder.records[record.id], fingerprint=self._serving.fingerprint))
        names = self._names | {record.model}
        try:
            riding = Riding(record, path, target, self._engine, self._beginnings, names, lambda: self._check(record))
        except BadRequest as e:
            self._give_up(record, self._unusable(e))
            return
        with self._changed:
            if self._closing or self._folder.records[record.id].status != "in_progress":
                riding.close()
                return
            self._riders.add(riding, list(self._folder.records))
        self._engine.wake()

    def _take_back(self, record: BatchRecord, riding: Riding) -> None:
        """From the engine: all is answered, it was cancelled, or it cannot go on now."""
        riding.close()
        if riding.batch.counts.answers:
            self._pauses.forget(record.id)
        with self._changed:
            self._folder.records[record.id] = record = riding.counted(self._folder.records[record.id])
            if record.status == "in_progress" and riding.batch.over:
                self._put(record.to("finalizing", time.time()))
                return
        if riding.trouble is not None and record.status == "in_progress":
            self._pause(record, riding.trouble)

    def _give_up(self, record: BatchRecord, error: LineError) -> None:
        """What is answered is kept, but there will be no more."""
        log.warning("%s: %s; it ends with what is answered", record.id, error.message)
        with self._changed:
            self._check(record)
            self._put(record.to("finalizing", time.time()), errors=(error,))

    def _unusable(self, error: BadRequest) -> LineError:
        message = str(error).replace(f"{self._folder.path}/", "").replace(f"{self.files.folder}/", "")
        return LineError("results_unusable", message)

    def _finish(self, record: BatchRecord) -> None:
        """Writes the files of a batch to which no more answers come."""
        if record.output_id is None or record.error_id is None:
            with self._changed:
                record = replace(record, output_id=new_id(FILE_PREFIX), error_id=new_id(FILE_PREFIX))
                self._put(record)
        assert record.output_id is not None
        assert record.error_id is not None
        names = (f"{record.id}_output.jsonl", f"{record.id}_error.jsonl")
        ids = (record.output_id, record.error_id)
        try:
            found = write_outputs(self._folder.results(record), self.files, names, ids, lambda: self._check(record))
        except BadRequest as e:  # somebody has changed the results: they are left to whoever can tell why
            log.error("%s: %s", record.id, e)
            with self._changed:
                record = replace(record, output_id=None, error_id=None)
                self._put(record.to("failed", time.time()), errors=(*record.errors, self._unusable(e)))
            return
        ending: Status = "completed"
        if record.status == "cancelling":
            ending = "cancelled"
        elif record.errors:
            ending = "failed"
        with self._changed:
            record = replace(record, completed=found.answers, failed=found.errors, usage=found.tokens)
            record = replace(record, has_output=found.answers > 0, has_errors=found.errors > 0)
            self._put(record.to(ending, time.time()))
            self._pauses.forget(record.id)
        self._folder.clear(record)

    def _pause(self, record: BatchRecord, error: Exception) -> None:
        with self._changed:
            self._pauses.begin(record.id, error)

    def _check(self, record: BatchRecord) -> None:
        """Raises _Interrupted if work on a batch is to end."""
        status = self._folder.records[record.id].status
        if self._closing or (status == "cancelling" and record.status != "cancelling"):
            raise _Interrupted

    # ---- records ---------------------------------------------------------------------------------------------

    def _put(self, record: BatchRecord, *, errors: tuple[LineError, ...] | None = None) -> BatchRecord:
        """Whatever a batch has become. With the lock."""
        record = self._folder.put(record if errors is None else replace(record, errors=errors))
        self._changed.notify_all()
        return record

    def _now(self, record: BatchRecord) -> BatchRecord:
        """With the counts of the moment, and why it waits."""
        if (riding := self._riders.find(record.id)) is not None:
            return riding.counted(record)
        error = self._pauses.why(record.id, time.monotonic())
        if error is None or record.errors:
            return record
        told = api_error(error)
        why = LineError(told.code or "server_error", f"{told}; it is tried again by itself")
        return replace(record, errors=(why,))

    def _check_open(self) -> None:
        if self._closing:
            raise Stopped("the server is shutting down")


def _has_bytes(path: Path) -> bool:
    try:
        return path.stat().st_size > 0
    except FileNotFoundError:
        return False


def _own(folder: Path) -> int:
    """The folder, for this process alone as long as the file is open."""
    path = folder / "lock"
    try:
        make_directory(folder, 0o700)
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as e:
        raise disk_error(e, folder, "cannot keep files there") from None
    try:
        lock(fd, path)
    except DiskError:
        os.close(fd)
        raise
    except DeltafinError:
        os.close(fd)
        raise DeltafinError(
            f"{folder}: another server keeps its files and batches there; stop it, or give another folder with --data"
        ) from None
    return fd
