"""How fast does a directory bring whole experts, past the page cache? A second or two of reading, for a plan."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from deltafin.errors import DeltafinError
from deltafin.indexer import clear_stale, disk_error, make_directory, temporary
from deltafin.store.arena import Arena, slot_nbytes
from deltafin.store.drive import DEPTHS, MEASURE_S, SPARE_SLOTS, Drive, Span, measure_depth
from deltafin.store.iobench import SPAN_NBYTES, expert_objects, file_system, write_test_file
from deltafin.store.space import free_nbytes

log = logging.getLogger(__name__)

LEAST_SPANS = 16  # that are there already: fewer might come from some cache below
TEST_SPANS = 32  # 561 MB in a temporary file, where nothing is there to be read yet
SPARE_NBYTES = 2_000_000_000  # stay free on the disk; with less than that and the file no file is written
_MOST_SPANS = 512
_IN_MEMORY = ("tmpfs", "ramfs")


@dataclass(frozen=True, slots=True)
class DriveProbe:
    """What was found of one directory; `rate` is None where it cannot be known, and `note` says why."""

    path: str
    device: int  # of the file system; -1 if the directory cannot be made
    file_system: str
    free_nbytes: int
    writable: bool
    direct: bool | None  # whether reads go past the page cache; None if none was tried
    depth: int | None  # reads at once that suit it
    rate: float | None  # bytes a second
    source: str  # what was read: "objects", "shards", "a temporary file", "nothing"
    note: str


def probe_drive(path: Path, *, seconds: float = MEASURE_S, may_write: bool = True) -> DriveProbe:
    """Reads experts that are there, or shards, or, if it may, a temporary file that is gone afterwards.

    Raises nothing of disks.
    """
    there = _existing(path)
    kind = file_system(there)
    writable = may_write and os.access(there, os.W_OK)
    free = free_nbytes(there)
    if kind in _IN_MEMORY:
        note = f"{kind} lies in memory and has no drive: a rate measured here proves nothing"
        return DriveProbe(str(path), device_of(path), kind, free, writable, None, None, None, "nothing", note)
    try:
        with ExitStack() as stack:
            source, spans = stack.enter_context(_spans(path, free, writable))
            if not spans:
                return _unread(path, kind, free, writable, source)
            rate, depth, direct = _measure(path, spans, seconds)
    except DeltafinError as e:
        return _unread(path, kind, free, writable, f"not measured: {e}")
    note = "" if direct else "direct reads are refused: what is read is partly memory, so no rate is given"
    return DriveProbe(str(path), device_of(path), kind, free, writable, direct, depth, rate, source, note)


def device_of(path: Path) -> int:
    """The file system that a directory is or will be on, as a number."""
    return os.stat(_existing(path)).st_dev


def _unread(path: Path, kind: str, free: int, writable: bool, note: str) -> DriveProbe:
    return DriveProbe(str(path), device_of(path), kind, free, writable, None, None, None, "nothing", note)


def _existing(path: Path) -> Path:
    """The directory itself, or the nearest above it that is there."""
    path = path.absolute()
    while not path.is_dir() and path != path.parent:
        path = path.parent
    return path


def _measure(path: Path, spans: list[Span], seconds: float) -> tuple[float | None, int | None, bool]:
    most = max(DEPTHS) + SPARE_SLOTS
    with Arena(most * slot_nbytes(SPAN_NBYTES)) as arena, Drive(path) as drive:
        slots = [arena.take(slot_nbytes(SPAN_NBYTES)) for _ in range(most)]
        report = measure_depth(drive, spans, slots, seconds=seconds)
    if report is None:
        return None, None, False
    return report.rates[report.depth], report.depth, True


@contextmanager
def _spans(path: Path, free: int, writable: bool) -> Iterator[tuple[str, list[Span]]]:
    """What to read, and what it is; or no spans, and why."""
    if objects := _objects(path):
        yield "objects", objects
        return
    if shards := _in_shards(path):
        yield "shards", shards
        return
    needed = TEST_SPANS * SPAN_NBYTES
    if not writable:
        yield "not measured: nothing to read yet, and nothing may be written there", []
        return
    if free < needed + SPARE_NBYTES:
        yield "not measured: nothing to read yet, and too little space for a test file", []
        return
    with _test_file(path, needed) as file:
        yield "a temporary file", [(file, at, SPAN_NBYTES) for at in range(0, needed, SPAN_NBYTES)]


def _objects(path: Path) -> list[Span]:
    if not (path / "objects").is_dir():
        return []
    for count in (_MOST_SPANS, 128, 64, LEAST_SPANS):
        if found := expert_objects(path, count):
            return found
    return []


def _in_shards(path: Path) -> list[Span]:
    """Pieces as long as an expert, spread over the files of a directory of shards."""
    found: list[Span] = []
    for file in sorted(path.glob("*.safetensors")):
        nbytes = file.stat().st_size
        found += [(file, at, SPAN_NBYTES) for at in range(0, nbytes - SPAN_NBYTES, 8 * SPAN_NBYTES)][:16]
    return found[:_MOST_SPANS] if len(found) >= LEAST_SPANS else []


@contextmanager
def _test_file(path: Path, nbytes: int) -> Iterator[Path]:
    """Bears a name like everything unfinished in a root: after a kill whoever opens the root removes it."""
    tmp = path / "tmp"
    made = [folder for folder in (tmp, *tmp.parents) if not folder.exists()]
    file = temporary(tmp, "probe")
    try:
        try:
            make_directory(tmp)
            clear_stale(tmp)
            write_test_file(file, nbytes, lambda written: None)
        except OSError as e:
            raise disk_error(e, file) from None
        yield file
    finally:
        with suppress(OSError):
            file.unlink(missing_ok=True)
        for folder in made:
            with suppress(OSError):  # others have files in it
                folder.rmdir()


def direct_reads(path: Path) -> tuple[bool | None, str]:
    """Whether a direct read of a temporary file in a directory works, and why not; None where none can be tried."""
    there = _existing(path)
    kind = file_system(there)
    if kind in _IN_MEMORY:
        return None, f"{kind} accepts direct reads but has no drive: that proves nothing"
    if not os.access(there, os.W_OK):
        return None, "not tried: nothing may be written there"
    nbytes = 2 << 20
    try:
        with _test_file(path, nbytes) as file, Drive(path) as drive, Arena(slot_nbytes(nbytes)) as arena:
            drive.read(file, 0, nbytes, arena.take(slot_nbytes(nbytes)))
            works = drive.direct
    except DeltafinError as e:
        return False, str(e)
    return works, "" if works else f"{kind} refuses them: what is read goes through the page cache, at twice the cost"
