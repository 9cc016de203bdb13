"""A drive: reads of one directory, so many at once as suits what lies under it, and past the page cache."""

from __future__ import annotations

import errno
import heapq
import logging
import os
import statistics
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import count, cycle
from pathlib import Path
from typing import Self, TypeVar

import numpy as np
import numpy.typing as npt

from deltafin.cext import _io
from deltafin.errors import NoMemory
from deltafin.indexer import disk_error

log = logging.getLogger(__name__)

Bytes = npt.NDArray[np.uint8]
Span = tuple[Path, int, int]  # file, offset, bytes
T = TypeVar("T")

DEPTH = 8  # reads at once while nothing better is known
DEPTHS = (1, 2, 4, 8, 16)
MOST_DEPTH = 64
# Smaller reads go through the page cache: past it each costs the drive's full latency, and small models live in it.
DIRECT_FROM_NBYTES = 1 << 20
ENOUGH = 0.95  # of the best rate: more reads at once than that takes only cost memory
MEASURE_S = 1.5
MEASURE_TURNS = 5
SPARE_SLOTS = 2  # beyond the depth: a drive has its next work before the last was looked at
UNKNOWN_RATE = 1e9  # bytes a second, of a drive of which nothing is known yet
# A look at what a drive really does: so much must have been read since the last one, and it counts so much.
_LOOK_NBYTES = 32 << 20
_LOOK_BUSY_NBYTES = 1 << 30
_LOOK_S = 0.02
_LOOK_WEIGHT = 0.25


@dataclass(frozen=True, slots=True)
class DriveStats:
    nbytes: int  # asked for and delivered
    reads: int
    busy_s: float  # during which at least one read was under way


@dataclass(order=True, slots=True)
class _Task:
    rank: int  # 0 urgent, 1 not
    number: int
    nbytes: int = field(compare=False)
    run: Callable[[], None] = field(compare=False)
    drop: Callable[[], None] = field(compare=False)


class Drive:
    """The reader of one directory. Thread-safe. At most `depth` submitted works run at once; close it.

    `direct=False` reads through the page cache, as does a drive whose file system refuses direct reads.
    With a `rate` in bytes a second all reads together take as long as on a drive that is just so fast.
    `known_rate` is what was once measured, to be set before it is used.
    """

    def __init__(self, path: Path, *, depth: int = DEPTH, rate: float | None = None, direct: bool = True) -> None:
        assert 0 < depth <= MOST_DEPTH
        self.path = path
        self.depth = depth
        self.rate = rate
        self.known_rate: float | None = None
        self._direct = direct
        self._lock = threading.Lock()
        self._rested = threading.Condition(self._lock)  # told whenever a work is through
        self._working = 0
        self._tasks: list[_Task] = []  # a heap
        self._numbers = count()
        self._closed = False
        self._pool = ThreadPoolExecutor(depth, f"drive {path.name}")  # starts threads when there is work for them
        self._free_at = 0.0  # when a drive of `rate` would have delivered all it was asked for
        self._nbytes = self._reads = self._under_way = 0
        self._busy_s = self._busy_since = 0.0
        self._waiting_nbytes = [0, 0]  # of works that have not begun: urgent, not
        self._running_nbytes = 0
        self._moved_at = 0.0  # when a work began on an idle drive, or one ended
        self._seen_rate: float | None = None  # of this process's own reads, an average that forgets
        self._looked_nbytes, self._looked_busy_s = 0, 0.0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    @property
    def direct(self) -> bool:
        """Whether reads go past the page cache, as far as is known."""
        return self._direct

    @property
    def stats(self) -> DriveStats:
        with self._lock:
            now = time.monotonic() - self._busy_since if self._under_way else 0.0
            return DriveStats(self._nbytes, self._reads, self._busy_s + now)

    @property
    def expected_rate(self) -> float:
        """Bytes a second that it may be expected to bring: what it did lately, else what it was measured or held to."""
        return self._seen_rate or self.rate or self.known_rate or UNKNOWN_RATE

    def queued_s(self, *, urgent: bool) -> float:
        """Seconds until a work submitted now would begin, from the bytes of those that go before it."""
        rate = self.expected_rate
        with self._lock:
            if not self._running_nbytes:
                return 0.0
            waiting = self._waiting_nbytes[0] + (0 if urgent else self._waiting_nbytes[1])
            through = min(self._running_nbytes, rate * (time.monotonic() - self._moved_at))
            return (waiting + self._running_nbytes - through) / rate

    def set_depth(self, depth: int) -> None:
        """Changes how many submitted works run at once; while none waits."""
        assert 0 < depth <= MOST_DEPTH
        with self._lock:
            assert not self._tasks
            self.depth = depth
            self._pool.shutdown(wait=False)
            self._pool = ThreadPoolExecutor(depth, f"drive {self.path.name}")

    # ---- what waits, and in which order --------------------------------------------------------------

    def submit(
        self, work: Callable[[], T], *, urgent: bool, future: Future[T] | None = None, nbytes: int = 0
    ) -> Future[T]:
        """Runs `work` on a thread of the drive: urgent ones before all others, each kind in the order it came.

        `nbytes` that it will read tell others how long they would wait behind it.

        Cancelling the future of a work that has not begun drops it. Who lends memory to the work gives a `future`
        that is on record already: an interrupt may come when the work is queued and before this returns. Raises
        RuntimeError once closed, NoMemory if no thread can be started.
        """
        future = future or Future()

        def run() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                result = work()
            except BaseException as e:
                future.set_exception(e)
            else:
                future.set_result(result)

        def drop() -> None:
            future.cancel()
            future.set_running_or_notify_cancel()  # tells those who wait for it

        with self._lock:
            if self._closed:
                raise RuntimeError("the drive is closed")
            try:
                self._pool.submit(self._run_next)  # a turn for each task; which one gets it is decided when it comes
            except RuntimeError as e:
                raise NoMemory(
                    f"{self.path}: cannot start a thread to read with ({e}); raise the limit of memory (ulimit -v) or "
                    "of processes (ulimit -u)"
                ) from None
            heapq.heappush(self._tasks, _Task(0 if urgent else 1, next(self._numbers), nbytes, run, drop))
            self._waiting_nbytes[0 if urgent else 1] += nbytes
        return future

    def close(self) -> None:
        """Drops works that have not begun, their futures are cancelled, and waits for the others.

        After an interrupted wait it may be called again.
        """
        with self._lock:
            self._closed = True
            tasks, self._tasks = self._tasks, []
            self._waiting_nbytes = [0, 0]
        for task in tasks:
            task.drop()
        # Not left to the pool: Python 3.11 takes a thread for dead once waiting for it was interrupted.
        with self._rested:
            while self._working:
                self._rested.wait()
        self._pool.shutdown(wait=True, cancel_futures=True)

    def _run_next(self) -> None:
        with self._lock:
            if not self._tasks:  # closed meanwhile
                return
            task = heapq.heappop(self._tasks)
            self._waiting_nbytes[task.rank] -= task.nbytes
            self._working += 1
            if not self._running_nbytes:
                self._moved_at = time.monotonic()
            self._running_nbytes += task.nbytes
        try:
            task.run()
        finally:
            with self._rested:
                self._working -= 1
                self._running_nbytes -= task.nbytes
                self._moved_at = time.monotonic()
                self._rested.notify_all()

    # ---- reading ---------------------------------------------------------------------------------------

    def read(self, path: Path, offset: int, nbytes: int, slot: Bytes) -> Bytes:
        """Bytes of a file as a part of `slot`, which starts on a page and has `slot_nbytes(nbytes)`.

        Blocks; runs on the calling thread. What lies around the part in the slot is undefined. An error is
        a DiskError with errno and offset, after one retry: some drives fail once.
        """
        with self._counted(nbytes):
            due = self._reserve(nbytes)
            start = self._read(path, offset, nbytes, slot)
            if due is not None:
                time.sleep(max(0.0, due - time.monotonic()))
        return slot[start : start + nbytes]

    def _read(self, path: Path, offset: int, nbytes: int, slot: Bytes) -> int:
        for last_try in (False, True):
            try:
                return self._try(path, offset, nbytes, slot)
            except OSError as e:
                if last_try:
                    raise disk_error(e, path, f"cannot read {nbytes} bytes at {offset} (errno {e.errno})") from None
        raise AssertionError

    def _try(self, path: Path, offset: int, nbytes: int, slot: Bytes) -> int:
        wanted = self._direct and nbytes >= DIRECT_FROM_NBYTES
        fd, direct = _io.open(path, wanted)
        try:
            if wanted and not direct:
                self._fall_back("the file system does not open files for them")
            return _io.read(fd, offset, nbytes, slot, direct)
        except OSError as e:
            if not direct or e.errno != errno.EINVAL:
                raise
            self._fall_back(f"errno {e.errno}: {e.strerror}")
        finally:
            os.close(fd)
        return self._try(path, offset, nbytes, slot)

    def _fall_back(self, why: str) -> None:
        """Several reads may find out at once; it is said once."""
        with self._lock:
            first, self._direct = self._direct, False
        if first:
            log.warning("%s: direct reads are refused (%s); reading through the page cache", self.path, why)

    def _reserve(self, nbytes: int) -> float | None:
        """When a drive of the given rate, which serves one read after the other, has done with this one, too."""
        if self.rate is None:
            return None
        with self._lock:
            self._free_at = max(self._free_at, time.monotonic()) + nbytes / self.rate
            return self._free_at

    @contextmanager
    def _counted(self, nbytes: int) -> Iterator[None]:
        with self._lock:
            if self._under_way == 0:
                self._busy_since = time.monotonic()
            self._under_way += 1
        done = 0
        try:
            yield
            done = 1
        finally:
            with self._lock:
                self._under_way -= 1
                self._reads += done
                self._nbytes += done * nbytes
                if self._under_way == 0:
                    self._busy_s += time.monotonic() - self._busy_since
                self._look()

    def _look(self) -> None:
        """Learns the rate from what was read since the last look.

        An idle drive has delivered all that it began; on a busy one what is on its way must not weigh much.
        """
        busy_s = self._busy_s + (time.monotonic() - self._busy_since if self._under_way else 0.0)
        nbytes, took_s = self._nbytes - self._looked_nbytes, busy_s - self._looked_busy_s
        if nbytes < (_LOOK_BUSY_NBYTES if self._under_way else _LOOK_NBYTES) or took_s < _LOOK_S:
            return
        self._looked_nbytes, self._looked_busy_s = self._nbytes, busy_s
        known, found = self._seen_rate or self.rate or self.known_rate, nbytes / took_s
        self._seen_rate = found if known is None else known + _LOOK_WEIGHT * (found - known)


def wait_out(futures: Collection[Future[T]]) -> None:
    """Cancels what has not begun and waits for what has, also through interrupts: reads write into memory in use.

    An interrupt is raised at the end. What was never queued counts as not begun.
    """
    interrupt: KeyboardInterrupt | None = None
    while True:
        try:
            wait([future for future in futures if not future.cancel()])
            break
        except KeyboardInterrupt as e:
            interrupt = e
    if interrupt is not None:
        raise interrupt


# ---- how many reads at once -----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class DepthReport:
    depth: int  # the smallest that is good enough
    rates: dict[int, float]  # bytes a second by depth


def measure_depth(
    drive: Drive,
    spans: Sequence[Span],
    slots: Sequence[Bytes],
    *,
    depths: Sequence[int] = DEPTHS,
    seconds: float = MEASURE_S,
) -> DepthReport | None:
    """Reads spans (path, offset, bytes) in turn at each depth for which there are slots, each long enough for any.

    Several short turns each, forth and back, of which the median counts: a disturbance does not decide. On a
    slow drive it takes longer: a turn is at least one read on every slot. None where direct reads are
    refused: memory would be measured. Raises DiskError.
    """
    waiting = cycle(spans)
    with ExitStack() as stack:
        drives = [
            stack.enter_context(Drive(drive.path, depth=depth, rate=drive.rate, direct=drive.direct))
            for depth in sorted(depths)
            if depth <= len(slots)
        ]
        found: dict[int, list[float]] = {d.depth: [] for d in drives}
        for number in range(MEASURE_TURNS):
            for one in drives[:: -1 if number % 2 else 1]:
                usable = slots[: one.depth + SPARE_SLOTS]
                found[one.depth].append(_turn(one, waiting, usable, seconds / (len(drives) * MEASURE_TURNS)))
                if not one.direct:
                    drive._direct = False
                    return None
    rates = {depth: statistics.median(turns) for depth, turns in found.items()}
    best = max(rates.values())
    return DepthReport(next(depth for depth, rate in rates.items() if rate >= ENOUGH * best), rates)


def _turn(drive: Drive, spans: Iterator[Span], slots: Sequence[Bytes], seconds: float) -> float:
    start = time.monotonic()
    nbytes = read_spans(drive, spans, slots, seconds)
    return nbytes / (time.monotonic() - start)


def read_spans(drive: Drive, spans: Iterator[Span], slots: Sequence[Bytes], seconds: float) -> int:
    """Reads spans for so many seconds, one on its way to each slot all the time; returns bytes. For measuring."""
    end = time.monotonic() + seconds
    flying: dict[Future[Bytes], Bytes] = {}

    def launch(slot: Bytes) -> None:
        if (span := next(spans, None)) is not None:
            flying[drive.submit(partial(drive.read, *span, slot), urgent=True)] = slot

    for slot in slots:
        launch(slot)
    nbytes = 0
    while flying:
        for future in wait(flying, return_when=FIRST_COMPLETED).done:
            slot = flying.pop(future)
            nbytes += future.result().size
            if time.monotonic() < end:
                launch(slot)
    return nbytes
