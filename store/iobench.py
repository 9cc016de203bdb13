"""How fast does the store read from this drive, and how fast could anything?

Every rate stands beside the best that plain sequential reads reach in the same run. All cases take turns, forth and
back, and of each the median counts: a shared drive gives one second twice what it gives the next.
"""

from __future__ import annotations

import logging
import os
import resource
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import cycle, islice
from pathlib import Path

import numpy as np

from deltafin.cext import _io
from deltafin.errors import BadRequest, Corrupt, NoSpace
from deltafin.indexer import clear_stale, disk_error, make_directory, temporary
from deltafin.store.arena import Arena, Slot, slot_nbytes
from deltafin.store.drive import DEPTH, DEPTHS, MEASURE_S, SPARE_SLOTS, Drive, Span, measure_depth, read_spans
from deltafin.store.roots import Root
from deltafin.store.space import free_nbytes

log = logging.getLogger(__name__)

SPAN_NBYTES = 17_547_264  # an expert of K3
PHASE = 3_088  # of a page: where the experts of its original shards start
SET_NBYTES = 4_000_000_000
SPARE_NBYTES = 500_000_000  # stay free on the disk
ROUNDS = 5
RAW_BLOCKS = (1 << 20, 4 << 20, 16 << 20)
RAW_THREADS = (1, 4, 8)
RUN_SPANS = 8  # of the shard in one go
SLOW_PART = 0.5  # of the raw rate: the rate of the limited root
TURNS = len(RAW_BLOCKS) * len(RAW_THREADS) * (ROUNDS + 1) + 4 * ROUNDS


@dataclass(frozen=True, slots=True)
class Line:
    """One way of reading: medians over the rounds, in bytes a second and core-seconds for 10^9 bytes."""

    name: str
    rate: float
    least: float
    most: float
    limit: float
    core_s_per_gb: float

    @property
    def ratio(self) -> float:
        return self.rate / self.limit


@dataclass(frozen=True, slots=True)
class Report:
    directory: str
    file_system: str
    direct: bool  # whether reads went past the page cache
    objects: bool  # whether the aligned spans were objects that were there
    set_nbytes: int
    depth: int
    rounds: int
    turn_s: float
    raw: tuple[Line, ...]  # the best first; its rate is the limit of all
    spans: tuple[Line, ...]  # the last against the rate that its root was given

    @property
    def in_memory(self) -> bool:
        """Such a file system accepts direct reads and has no drive: its numbers say nothing of one."""
        return self.file_system in ("tmpfs", "ramfs")


@dataclass(slots=True)
class _Case:
    name: str
    read: Callable[[float], int]  # reads for so many seconds, at least once; returns bytes
    prepare: Callable[[], None] = lambda: None  # outside the clock
    rates: list[float] = field(default_factory=list)
    costs: list[float] = field(default_factory=list)

    def take_turn(self, seconds: float) -> None:
        self.prepare()
        cores, start = _core_s(), time.monotonic()
        nbytes = self.read(seconds)
        self.rates.append(nbytes / (time.monotonic() - start))
        self.costs.append((_core_s() - cores) / nbytes * 1e9)

    def forget(self) -> None:
        self.rates.clear()
        self.costs.clear()

    def line(self, limit: float) -> Line:
        rate, cost = statistics.median(self.rates), statistics.median(self.costs)
        return Line(self.name, rate, min(self.rates), max(self.rates), limit, cost)


@dataclass(frozen=True, slots=True)
class SpanFiles:
    """What is read: as many whole spans in files of their own as in one shard."""

    directory: Path
    aligned: tuple[Span, ...]
    objects: bool  # whether these are objects that were there
    shard: Path
    in_place: tuple[Span, ...]

    @property
    def nbytes(self) -> int:
        return sum(nbytes for _, _, nbytes in self.aligned + self.in_place)


def measure(
    files: SpanFiles,
    *,
    rate: float | None = None,
    seconds: float = 40.0,
    measured: Callable[[int], None] = lambda turns: None,
) -> Report:
    """Reads the files in all ways. `rate` is that of the limited root, by default half of what the drive gives.

    `measured` hears of turns, TURNS in all. Raises Corrupt, NoMemory, DiskError.
    """
    turn_s = seconds / TURNS
    most = max(DEPTHS) + SPARE_SLOTS
    with ExitStack() as stack:
        arena = stack.enter_context(Arena(most * slot_nbytes(SPAN_NBYTES)))
        slots = [arena.take(slot_nbytes(SPAN_NBYTES)) for _ in range(most)]
        probe = stack.enter_context(Drive(files.directory))
        for span in (files.aligned[0], files.aligned[-1], files.in_place[0], files.in_place[-1]):
            _compare(probe, span, slots[0])
        chosen = measure_depth(probe, files.aligned, slots, depths=DEPTHS, seconds=min(MEASURE_S, seconds / 20))
        depth = DEPTH if chosen is None else chosen.depth

        raw = [
            _Case(
                f"{block >> 20} MiB blocks, {threads} thread{'s' * (threads > 1)}",
                _Sequential(files, block, threads, slots, direct=probe.direct),
            )
            for block in RAW_BLOCKS
            for threads in RAW_THREADS
        ]
        for case in raw:  # warms up, and tells which rate is well below the drive's
            case.take_turn(turn_s)
            measured(1)
        rate = rate or SLOW_PART * max(case.rates[0] for case in raw)

        plain, cached, limited = (
            stack.enter_context(drive)
            for drive in (
                Drive(files.directory, depth=depth, direct=probe.direct),
                Drive(files.directory, depth=depth, direct=False),
                Drive(files.directory, depth=depth, direct=probe.direct, rate=rate),
            )
        )
        slots = slots[: depth + SPARE_SLOTS]

        def once(seconds: float) -> int:  # from the first on, but none twice: it would come from memory
            return read_spans(cached, iter(files.aligned), slots, seconds)

        forget = partial(_forget, [path for path, _, _ in files.aligned])
        whole = [
            _Case("aligned", partial(read_spans, plain, cycle(files.aligned), slots)),
            _Case(f"{PHASE:,} bytes into a page", partial(read_spans, plain, cycle(files.in_place), slots)),
            _Case("through the page cache, cold", once, forget),
            _Case(f"aligned, root of {rate / 1e9:.3g} GB/s", partial(read_spans, limited, cycle(files.aligned), slots)),
        ]
        for case in raw:
            case.forget()
        for number in range(ROUNDS):
            for case in (raw + whole)[:: -1 if number % 2 else 1]:
                case.take_turn(turn_s)
                measured(1)

        limit = max(statistics.median(case.rates) for case in raw)
        return Report(
            directory=str(files.directory),
            file_system=file_system(files.directory),
            direct=plain.direct,
            objects=files.objects,
            set_nbytes=files.nbytes,
            depth=depth,
            rounds=ROUNDS,
            turn_s=turn_s,
            raw=tuple(sorted((case.line(limit) for case in raw), key=lambda line: -line.rate)),
            spans=(*(case.line(limit) for case in whole[:-1]), whole[-1].line(rate)),
        )


# ---- ways of reading ------------------------------------------------------------------------------------


class _Sequential:
    """What dd does: threads that read long runs of files, each block after block.

    The runs are all that is read as spans, in turn from the shard and from other files: a cache somewhere below
    then favours nobody. The blocks go to all the memory that spans go to, for the same reason.
    """

    def __init__(self, files: SpanFiles, block: int, threads: int, slots: Sequence[Slot], *, direct: bool) -> None:
        self._files, self._block, self._threads, self._direct = files, block, threads, direct
        runs = list(_runs(files))
        starts = [i * len(runs) // threads for i in range(threads)]
        self._blocks = [self._cut(cycle(runs[at:] + runs[:at])) for at in starts]
        self._parts = [cycle(_parts(slots[i::threads], block)) for i in range(threads)]

    def __call__(self, seconds: float) -> int:
        end = time.monotonic() + seconds

        def work(number: int) -> int:
            nbytes = 0
            fd, opened, direct = -1, None, False
            try:
                while not nbytes or time.monotonic() < end:
                    path, offset = next(self._blocks[number])
                    if path != opened:
                        if fd >= 0:
                            os.close(fd)
                        fd, direct = _io.open(path, self._direct)
                        opened = path
                    _io.read(fd, offset, self._block, next(self._parts[number]), direct)
                    nbytes += self._block
            finally:
                if fd >= 0:
                    os.close(fd)
            return nbytes

        try:
            with ThreadPoolExecutor(self._threads) as pool:
                try:
                    return sum(pool.map(work, range(self._threads)))
                finally:
                    end = 0.0  # after Ctrl-C nobody waits for the rest of the turn
        except OSError as e:
            raise disk_error(e, self._files.directory, f"cannot read {self._block} bytes (errno {e.errno})") from None

    def _cut(self, runs: Iterator[Span]) -> Iterator[tuple[Path, int]]:
        for path, start, nbytes in runs:
            for offset in range(start, start + nbytes - self._block + 1, self._block):
                yield path, offset


def _runs(files: SpanFiles) -> Iterator[Span]:
    """The shard in runs of some spans, each followed by as many files."""
    for at in range(0, len(files.aligned), RUN_SPANS):
        some = files.aligned[at : at + RUN_SPANS]
        yield files.shard, at * SPAN_NBYTES, len(some) * SPAN_NBYTES  # on pages: SPAN_NBYTES is a multiple of one
        yield from some


def _parts(slots: Sequence[Slot], block: int) -> list[Slot]:
    return [slot[at : at + block] for slot in slots for at in range(0, slot.size - block + 1, block)]


def _core_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


# ---- what is read ---------------------------------------------------------------------------------------


@contextmanager
def span_files(
    directory: Path, *, nbytes: int = SET_NBYTES, written: Callable[[int], None] = lambda nbytes: None
) -> Iterator[SpanFiles]:
    """Files of `nbytes` together, gone at the end; experts among the objects of `directory` serve if it has enough.

    They bear names like everything unfinished in a root: if this process is killed, whoever opens the root
    or measures it next removes them. `written` hears of bytes. Raises BadRequest, NoSpace, DiskError.
    """
    count = nbytes // (2 * SPAN_NBYTES)
    if count < 2:
        raise BadRequest(f"{nbytes} bytes of test files are too few; from {4 * SPAN_NBYTES} on")
    aligned = expert_objects(directory, count)
    objects = bool(aligned)
    needed = (1 if objects else 2) * count * SPAN_NBYTES + SPARE_NBYTES
    if (free := free_nbytes(directory)) < needed:
        raise NoSpace(
            f"{directory}: test files and what stays free take {needed} bytes, but {free} are free; "
            "free some space or choose another --dir or --size"
        )
    tmp = directory / "tmp"
    made: list[Path] = []
    try:
        try:
            make_directory(tmp)
            clear_stale(tmp)
            while len(aligned) < count:
                made.append(temporary(tmp, "bench"))
                write_test_file(made[-1], SPAN_NBYTES, written)
                aligned.append((made[-1], 0, SPAN_NBYTES))
            shard = temporary(tmp, "bench")
            made.append(shard)
            write_test_file(shard, PHASE + count * SPAN_NBYTES, written)
        except OSError as e:
            raise disk_error(e, tmp) from None
        in_place = tuple((shard, PHASE + i * SPAN_NBYTES, SPAN_NBYTES) for i in range(count))
        yield SpanFiles(directory, tuple(aligned), objects, shard, in_place)
    finally:
        for path in made:
            try:
                path.unlink(missing_ok=True)
            except OSError as e:
                log.warning("%s: a test file that cannot be removed: %s", path, e.strerror)
        with suppress(OSError):  # others have files in it
            tmp.rmdir()


def expert_objects(directory: Path, count: int) -> list[Span]:
    """So many experts among the objects of a root, or none."""
    found = (name for name, nbytes in Root(directory).object_files() if nbytes == SPAN_NBYTES)
    names = list(islice(found, count))
    return [(directory / "objects" / n[:2] / n, 0, SPAN_NBYTES) for n in names] if len(names) == count else []


def write_test_file(path: Path, nbytes: int, written: Callable[[int], None]) -> None:
    """Fills a file with what no drive can compress, and nothing of it stays in the page cache."""
    block = np.random.default_rng(os.getpid()).bytes(min(nbytes, SPAN_NBYTES) + 1)
    with open(path, "xb", buffering=0) as f:
        at = 0
        while at < nbytes:
            n = f.write(memoryview(block)[: nbytes - at])
            at += n
            written(n)
        os.fsync(f.fileno())
    _forget([path])


def _forget(paths: Sequence[Path]) -> None:
    """Takes files out of the page cache, where the system can be asked to."""
    if not hasattr(os, "posix_fadvise"):
        return
    for path in paths:
        fd = os.open(path, os.O_RDONLY)
        try:
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)


def _compare(drive: Drive, span: Span, slot: Slot) -> None:
    """Speed is worth nothing if the bytes are wrong."""
    path, offset, nbytes = span
    with open(path, "rb") as f:
        f.seek(offset)
        same = drive.read(*span, slot).tobytes() == f.read(nbytes)
    _forget([path])
    if not same:
        raise Corrupt(f"{path}: {nbytes} bytes at {offset} differ between a direct and a buffered read")


def file_system(path: Path) -> str:
    """The type of the file system at `path`, as far as the system tells."""
    best, kind = -1, "unknown file system"
    try:
        mounts = Path("/proc/self/mounts").read_text(errors="surrogateescape").splitlines()
    except OSError:
        return kind
    real = Path(os.path.realpath(path))
    for line in mounts:
        _, where, found, *_ = line.split(" ")
        where = where.encode("ascii", "surrogateescape").decode("unicode_escape", "surrogateescape")
        if real.is_relative_to(where) and len(where) >= best:  # a later mount at the same place hides the earlier
            best, kind = len(where), found
    return kind
