"""Fetching many spans: what `df-fetch` and the start of `df-run` do."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass

from deltafin.errors import Missing
from deltafin.indexer import RemoteFiles, Span
from deltafin.store.idle import IDLE_TRANSFERS, Idle
from deltafin.store.parallelism import MOST, Parallelism
from deltafin.store.selection import Item
from deltafin.store.store import Store

Landed = Callable[[Item], None]
Take = Callable[[Span, memoryview], bool]

_LOOK_EVERY_S = 0.2  # at how many transfers there may be; one that lands is seen at once

# What a measurement of the line may cost. The spans are kept, so nothing of it is wasted.
_PROBE_S = 3.0
_PROBE_NBYTES = 256 << 20


@dataclass(frozen=True, slots=True)
class FetchPlan:
    """What a fetch would do: `items` are missing here, `present` of the asked ones are not."""

    items: tuple[Item, ...]
    present: int
    present_nbytes: int

    @property
    def nbytes(self) -> int:
        return sum(i.span.nbytes for i in self.items)


def plan_fetch(store: Store, items: Iterable[Item], limit_nbytes: int | None = None) -> FetchPlan:
    """Keeps the missing ones, in order, up to `limit_nbytes` of them."""
    missing, present, present_nbytes, total = [], 0, 0, 0
    for item in items:
        if store.is_local(item.span):
            present += 1
            present_nbytes += item.span.nbytes
        elif limit_nbytes is None or total + item.span.nbytes <= limit_nbytes:
            missing.append(item)
            total += item.span.nbytes
        else:
            break
    return FetchPlan(tuple(missing), present, present_nbytes)


def fetch(
    store: Store,
    items: Sequence[Item],
    landed: Landed | None = None,
    enough: Callable[[], bool] | None = None,
    *,
    idle: Idle | None = None,
    take: Take | None = None,
    anew: bool = False,
) -> int:
    """Fetches spans in parallel, in order, each kept before it counts; returns how many landed.

    The first failure stops the rest; what landed stays. `landed` is called from one thread at a time. Once
    `enough` says so no further span is begun. How many are fetched at once is found by trying; with `idle` they
    are few, and none is begun while a run uses the line. `take` is shown each span's bytes by the thread that fetched
    them, and says whether it keeps the memory. `anew` believes what contradicts unproven digests.
    """
    if items and not store.may_fetch:
        lacking = f"{len(items)} spans ({sum(i.span.nbytes for i in items):,} bytes)"
        if (path := store.catalog.location.path) is not None:
            raise Missing(f"{lacking}: not found at {path}; was the directory moved? rebuild with df-index build")
        raise Missing(
            f"{lacking} are not on this machine and fetching is off; run again without --offline and HF_HUB_OFFLINE"
        )
    buffers = threading.local()

    def one(item: Item) -> Item:
        buffer = getattr(buffers, "buffer", None)
        if buffer is None or len(buffer) < item.span.nbytes:
            buffers.buffer = buffer = bytearray(item.span.nbytes)
        view = memoryview(buffer)[: item.span.nbytes]
        store.fetch(item.span, view, expert=item.address, anew=anew)
        if take is not None and take(item.span, view):
            buffers.buffer = None
        return item

    waiting, count = _Queue(store, items), 0
    flying: set[Future[Item]] = set()
    may_fly = _transfers(store.remote) if idle is None else _idle_transfers(idle)
    with ThreadPoolExecutor(MOST, "fetch") as pool:
        try:
            while waiting or flying:
                if enough is not None and enough():
                    waiting.clear()
                while waiting and len(flying) < may_fly():
                    flying.add(pool.submit(one, waiting.next()))
                done, flying = wait(flying, timeout=_LOOK_EVERY_S, return_when=FIRST_COMPLETED)
                for future in done:
                    item = future.result()
                    count += 1
                    if landed is not None:
                        landed(item)
                if not flying and not done and waiting:
                    time.sleep(_LOOK_EVERY_S)  # for a run: `wait` has nothing to wait for
            return count
        finally:
            pool.shutdown(wait=True, cancel_futures=True)
            store.sync()


class _Queue:
    """In order, but what another process is fetching when its turn comes is left for the end: it may be here then."""

    def __init__(self, store: Store, items: Iterable[Item]) -> None:
        self._store = store
        self._first, self._later = deque(items), deque[Item]()

    def __bool__(self) -> bool:
        return bool(self._first or self._later)

    def next(self) -> Item:
        while self._first:
            item = self._first.popleft()
            if not self._store.is_claimed(item.span):
                return item
            self._later.append(item)
        return self._later.popleft()

    def clear(self) -> None:
        self._first.clear()
        self._later.clear()


def _transfers(remote: RemoteFiles | None) -> Callable[[], int]:
    """How many transfers to have under way, each time it is asked."""
    found = Parallelism(time.monotonic())

    def now() -> int:
        if remote is None:
            return found.transfers
        if remote.pause_left_s > 0:
            found.disturbed(time.monotonic(), remote.stats.nbytes)
        return found.observe(time.monotonic(), remote.stats.nbytes, remote.stats.throttled)

    return now


def _idle_transfers(idle: Idle) -> Callable[[], int]:
    return lambda: IDLE_TRANSFERS if idle.free else 0


def measure_rate(
    store: Store,
    items: Sequence[Item],
    landed: Landed | None = None,
    *,
    idle: Idle | None = None,
    take: Take | None = None,
) -> tuple[float, set[Item]]:
    """Fetches the first of `items` for a few seconds; returns bytes per second and the items that landed."""
    started, done = time.monotonic(), set[Item]()
    nbytes = 0

    def note(item: Item) -> None:
        nonlocal nbytes
        done.add(item)
        nbytes += item.span.nbytes
        if landed is not None:
            landed(item)

    def enough() -> bool:
        return nbytes >= _PROBE_NBYTES or time.monotonic() - started >= _PROBE_S

    fetch(store, items, note, enough, idle=idle, take=take)
    return nbytes / max(1e-9, time.monotonic() - started), done
