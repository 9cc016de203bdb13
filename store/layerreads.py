"""The reads of one layer's experts: planned together, each begun when there is a slot for it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Protocol

from deltafin.errors import DeltafinError, DiskError
from deltafin.indexer import Span
from deltafin.store.arena import Slot
from deltafin.store.drive import Drive
from deltafin.store.local import Copy, Local, Piece
from deltafin.store.parts import PartedRead, PartRead

CLOSED = "the store was closed while it was being read"
# A token's 16, and of a prompt's many so many that drives stay evenly busy.
_PLANNED_AT_ONCE = 32


class ReadSpan(Protocol):
    """Brings a whole span into a slot from wherever it is; `first` is a copy to try before all others."""

    def __call__(
        self, span: Span, slot: Slot, *, expert: tuple[int, int] | None, first: Copy | None = None
    ) -> Slot: ...


class LayerReads:
    """Reads experts from where a plan says; `line` is the queue of what comes over the network."""

    def __init__(self, local: Local, line: Drive, layer: int, spans: Mapping[int, Span], read: ReadSpan) -> None:
        self._local, self._line, self._layer, self._spans, self._read = local, line, layer, spans, read
        self._pieces: dict[int, tuple[Piece, ...]] = {}  # of those that were planned and not begun

    def order(self, experts: Sequence[int]) -> Iterator[int]:
        """All experts in the order in which to begin. Plans some at a time, by what waits at the drives just then."""
        for at in range(0, len(experts), _PLANNED_AT_ONCE):
            some = experts[at : at + _PLANNED_AT_ONCE]
            for number, pieces in self._local.plan([self._spans[expert] for expert in some]):
                self._pieces[some[number]] = pieces
                yield some[number]

    def begin(self, expert: int, slot: Slot, future: Future[Slot]) -> None:
        """Queues the read of an expert that `order` gave; the future's result is where in the slot it lies."""
        span, pieces, address = self._spans[expert], self._pieces.pop(expert), (self._layer, int(expert))
        if len(pieces) < 2:
            copy = pieces[0].copy if pieces else None
            queue = self._line if copy is None else copy.drive
            work = partial(self._read, span, slot, expert=address, first=copy)
            submit_read(queue, work, span.nbytes, True, future)
            return

        def finish(failure: BaseException | None) -> Slot:
            if failure is None and (content := self._local.joined(span, pieces, slot)) is not None:
                return content
            if failure is not None and not isinstance(failure, DeltafinError):
                raise failure
            return self._read(span, slot, expert=address)

        parts = [PartRead(p.copy.drive, p.end - p.begin, partial(self._read_piece, p, slot)) for p in pieces]
        try:
            PartedRead(future, parts, finish).submit()
        except RuntimeError:
            raise DeltafinError(CLOSED) from None

    def _read_piece(self, piece: Piece, slot: Slot) -> None:
        try:
            piece.copy.read_piece(piece.begin, piece.end, slot)
        except DiskError as e:
            self._local.failed_piece(piece.copy, e)
            raise


def submit_read(
    queue: Drive, work: Callable[[], Slot], nbytes: int, urgent: bool, future: Future[Slot] | None
) -> Future[Slot]:
    """`Drive.submit` for a read; raises DeltafinError once the drive is closed."""
    try:
        return queue.submit(work, urgent=urgent, future=future, nbytes=nbytes)
    except RuntimeError:
        raise DeltafinError(CLOSED) from None
