"""Spans that come over the network, and are kept."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np

from deltafin.errors import Corrupt, DeltafinError, DiskError, NoSpace
from deltafin.indexer import Catalog, Expected, RemoteFiles, Span, expert_layout
from deltafin.store.claims import Claims
from deltafin.store.digests import Digests
from deltafin.store.drive import Drive
from deltafin.store.idle import BusyLine
from deltafin.store.keeping import Keeper
from deltafin.store.objectlog import ObjectEntry
from deltafin.store.plausible import implausible
from deltafin.store.stats import StoreStats

log = logging.getLogger(__name__)

WORKERS = 8  # transfers at once
_ATTEMPTS = 3  # at a span whose bytes arrive complete but cannot be right
_CLAIM_POLL_S = 0.05  # while another process fetches what is wanted here


class Fetcher:
    """Fetches spans and makes them objects of the roots that `keeper` chooses. Thread-safe.

    Claims, and what idle fetches are told, lie in `cache`.

    `remote` opens the connection when the first span is asked for; None means that no socket is ever opened.
    """

    def __init__(
        self,
        catalog: Catalog,
        keeper: Keeper,
        cache: Path,
        remote: Callable[[], RemoteFiles] | None,
        digests: Digests,
        stats: StoreStats,
    ) -> None:
        self._catalog = catalog
        self._keeper = keeper
        self._cache = cache
        self._digests = digests
        self._stats = stats
        self._layout = expert_layout(catalog.config)
        self._open = remote
        self._remote: RemoteFiles | None = None
        self._busy: BusyLine | None = None
        self._lock = threading.Lock()
        self._keeps = True  # False once the disk is full
        self._claims = Claims(cache)
        self._stopping = threading.Event()
        self._waited = False  # for another process; it is said once
        self.drive = Drive(Path("http"), depth=WORKERS)  # only its queue: reads come from the network

    @property
    def open(self) -> bool:
        """Whether anything may be fetched."""
        return self._open is not None

    @property
    def remote(self) -> RemoteFiles | None:
        """The connection, opened on first use; None where there is none."""
        with self._lock:
            if self._remote is None and self._open is not None:
                self._remote = self._open()
                if self._busy is not None:
                    self._remote.on_arrival = self._busy.mark
            return self._remote

    def claim(self) -> None:
        """What is fetched from now on is for a run: it keeps idle fetches off the line. Before the first span."""
        self._busy = BusyLine(self._cache)

    @property
    def requests(self) -> int:
        """HTTP exchanges so far, redirects included."""
        return self._remote.stats.requests if self._remote is not None else 0

    @property
    def pause_left_s(self) -> float:
        """Seconds that the server has asked to wait before the next request."""
        return self._remote.pause_left_s if self._remote is not None else 0.0

    def stop(self) -> None:
        """Ends transfers of all threads soon; then close it, or `resume`."""
        self._stopping.set()
        if self._remote is not None:
            self._remote.stop()

    def resume(self) -> None:
        self._stopping.clear()
        if self._remote is not None:
            self._remote.resume()

    def close(self) -> None:
        self.stop()
        self.drive.close()
        if self._remote is not None:
            self._remote.close()
        self._claims.close()

    def is_claimed(self, span: Span) -> bool:
        """Whether a span is being fetched into the cache now, by this process or another."""
        return self._claims.is_taken(self._digests.key(span))

    def fetch(
        self,
        span: Span,
        view: memoryview,
        expert: tuple[int, int] | None,
        *,
        keep: bool = True,
        or_fail: bool = False,
        anew: bool = False,
    ) -> None:
        """Fills `view` with a span. `keep` makes it an object: if it cannot, that is said once, or raised (`or_fail`).

        `expert` lets it judge bytes that nobody vouches for; `anew` takes also what contradicts an unproven digest.
        Raises Corrupt or NetworkError, then nothing is kept.
        """
        if not keep or not (self._keeps or or_fail):
            self._transfer(span, view, expert, anew)
            self._stats.add(unkept_spans=int(keep))
            return
        if anew:  # what is here is in doubt
            self._transfer(span, view, expert, anew)
            entry = self._keeper.renew(span, view) or self._publish(span, view, expert, or_fail)
            if entry is not None:
                self._keeper.forget_others(span, entry)
            return
        key = self._digests.key(span)
        if self._brought_by_another(span, view):
            return
        try:
            self._transfer(span, view, expert, anew)
            self._publish(span, view, expert, or_fail)
        finally:
            self._claims.release(key)

    def _brought_by_another(self, span: Span, view: memoryview) -> bool:
        """Claims a span; True, and then `view` holds it, if another process has fetched it meanwhile or does so now.

        One that holds a claim is waited for as long as it lives and moves: its transfer began before ours would.
        """
        key = self._digests.key(span)
        while not self._claims.take(key):
            if self._is_here_now(span, view):
                return True
            self._say_waiting()
            if self._stopping.wait(_CLAIM_POLL_S):
                raise DeltafinError("stopped while another process was fetching what is needed")
        try:
            if not self._is_here_now(span, view):
                return False
        except BaseException:
            self._claims.release(key)
            raise
        self._claims.release(key)
        return True

    def _say_waiting(self) -> None:
        with self._lock:
            first, self._waited = not self._waited, True
        if first:
            log.info("another process is fetching what is needed here, too; waiting for it")

    def _is_here_now(self, span: Span, view: memoryview) -> bool:
        if not self._keeper.read(span, view):
            return False
        self._stats.add(object_spans=1, object_nbytes=len(view))
        return True

    def _transfer(self, span: Span, view: memoryview, expert: tuple[int, int] | None, anew: bool) -> None:
        """Brings a span over HTTP, again if it cannot be right. Raises Corrupt, NetworkError."""
        remote = self.remote
        assert remote is not None
        shard = self._catalog.shards[span.shard]
        expected = Expected(shard.nbytes, shard.sha256 or shard.etag, self._catalog.location.commit)
        complaint, attempts = None, 0
        while attempts < _ATTEMPTS:
            answer = remote.read_into(shard.name, span.offset, view, expected)
            self._stats.add(http_spans=1, http_nbytes=span.nbytes)
            complaint = self._complaint(span, view, expert, anew)
            if complaint is None:
                known = self._digests.known(span)
                self._stats.add(unproven_spans=int(known is None or not known.proven))
                return
            self._stats.add(refused_spans=1)
            if remote.blame(answer, f"{shard.name} at {span.offset}: {complaint}"):
                continue  # a mirror; the next source is asked, and that is no attempt of the hub's
            attempts += 1
            log.warning("%s at %d: %s; fetching again", shard.name, span.offset, complaint)
        what = "" if expert is None else f" (expert {expert[1]} of layer {expert[0]})"
        raise Corrupt(
            f"{shard.name}: bytes {span.offset} to {span.offset + span.nbytes - 1}{what}: {complaint}, "
            f"in {_ATTEMPTS} transfers; nothing of it was kept; is the server or a proxy at fault?"
        )

    def _publish(
        self, span: Span, view: memoryview, expert: tuple[int, int] | None, or_fail: bool
    ) -> ObjectEntry | None:
        entry = None
        try:
            entry = self._keeper.publish(span, view, expert, evict=not or_fail)
        except (NoSpace, DiskError) as e:
            if or_fail:
                raise
            self._stop_keeping(e)
        if entry is None:
            self._stats.add(unkept_spans=1)
        return entry

    def _stop_keeping(self, error: DeltafinError) -> None:
        """Several threads may find the disk full at once; it is said once."""
        with self._lock:
            first, self._keeps = self._keeps, False
        if first:
            log.warning("%s; going on without keeping what is fetched", error)

    def _complaint(self, span: Span, view: memoryview, expert: tuple[int, int] | None, anew: bool) -> str | None:
        """Why fetched bytes cannot be right: they contradict a digest on record, or cannot be an expert."""
        if (contradiction := self._digests.contradiction(span, view, unproven=not anew)) is not None:
            return contradiction
        return None if expert is None else implausible(np.frombuffer(view, np.uint8), self._layout)
