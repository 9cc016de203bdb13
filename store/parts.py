"""One span read in parts, each by the drive that has it: one future for all of them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass
from functools import partial
from typing import Generic, TypeVar

from deltafin.store.drive import Drive

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class PartRead:
    """What one drive does of it."""

    drive: Drive
    nbytes: int
    read: Callable[[], object]


class PartedRead(Generic[T]):
    """Reads parts into one slot. Its future runs from when the first part begins until the last has ended.

    So who cancels the future before that, or waits for it after, knows that nothing writes into the slot any more.
    `finish` is told the first failure, if there was one; it runs on the thread that ended last, and its result is the
    future's. Parts that a closing drive drops end it as cancelled.
    """

    def __init__(
        self, future: Future[T], parts: Sequence[PartRead], finish: Callable[[BaseException | None], T]
    ) -> None:
        self._future = future
        self._parts = parts
        self._finish = finish
        self._lock = threading.Lock()
        self._waiting = set(range(len(parts)))
        self._running = 0
        self._begun = False
        self._cancelled = False  # as a whole, before any part had begun
        self._dropped = False  # some part
        self._failure: BaseException | None = None

    def submit(self) -> None:
        """Queues all parts, urgently. Whatever ends it early, an interrupt too, drops the parts that are not queued.

        Raises RuntimeError once a drive is closed.
        """
        queued = 0
        try:
            for number, part in enumerate(self._parts):
                turn: Future[None] = Future()
                turn.add_done_callback(partial(self._drop_if_cancelled, number))
                part.drive.submit(partial(self._run, number), urgent=True, future=turn, nbytes=part.nbytes)
                queued += 1
        finally:
            for number in range(queued, len(self._parts)):
                self._drop(number)

    def _run(self, number: int) -> None:
        with self._lock:
            if number not in self._waiting:  # dropped though it was queued: an interrupt came just then
                return
            self._waiting.remove(number)
            if not self._begun and not self._cancelled:
                self._begun = self._future.set_running_or_notify_cancel()
                self._cancelled = not self._begun
            if self._cancelled:
                return
            self._running += 1
        failure: BaseException | None = None
        try:
            self._parts[number].read()
        except BaseException as e:
            failure = e
        with self._lock:
            self._running -= 1
            self._failure = self._failure or failure
            last = self._is_over()
        if last:
            self._end()

    def _drop_if_cancelled(self, number: int, turn: Future[None]) -> None:
        if turn.cancelled():
            self._drop(number)

    def _drop(self, number: int) -> None:
        with self._lock:
            if number not in self._waiting:
                return
            self._waiting.remove(number)
            self._dropped = True
            last = self._is_over()
        if last:
            self._end()

    def _is_over(self) -> bool:
        return not self._waiting and not self._running and not self._cancelled

    def _end(self) -> None:
        if not self._begun:
            self._future.cancel()
            self._future.set_running_or_notify_cancel()  # tells those who wait for it
            return
        try:
            if self._dropped:
                raise CancelledError
            result = self._finish(self._failure)
        except BaseException as e:
            self._future.set_exception(e)
        else:
            self._future.set_result(result)
