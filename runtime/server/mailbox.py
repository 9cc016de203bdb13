"""What the engine's thread tells about one request, for a task of the event loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from contextlib import suppress

from deltafin.runtime.server.jobs import News, Update


class Gone(Exception):
    """The client has left: nobody reads what would be written."""


class Mailbox:
    """Takes everything, at once, and hands it over together: a slow reader neither holds the engine up nor loses a
    token. It grows no further than the answer does.
    """

    def __init__(self, *, each: bool = True) -> None:
        """For the event loop that runs now.

        Without `each`, news after the first wake nobody: who has no use for a part of an answer is not to take time
        from the thread that computes it.
        """
        self._loop = asyncio.get_running_loop()
        self._filled = asyncio.Event()
        self._urgent = asyncio.Event()  # more than news, or nobody is left to be told
        self._lock = threading.Lock()  # of what follows
        self._updates: list[Update] = []
        self._each, self._has_news, self._resting = each, False, False
        self._gone = False

    def put(self, update: Update) -> None:
        """From any thread. Raises nothing."""
        news = isinstance(update, News)
        with self._lock:
            wakes = not news or (not (self._updates or self._resting) if self._each else not self._has_news)
            self._has_news |= news
            self._updates.append(update)
        if wakes:
            with suppress(RuntimeError):  # the loop is closed, so nobody waits
                self._loop.call_soon_threadsafe(self._ring, not news)

    def hang_up(self) -> None:
        """The client is gone. From the event loop."""
        self._gone = True
        self._ring(urgent=True)

    async def take(self, timeout_s: float, rest_s: float = 0.0) -> list[Update]:
        """All that came since the last time, in order, news in one; nothing after so many seconds. Raises Gone.

        News alone are not handed over before `rest_s` seconds, and until then wake nobody.
        """
        if rest_s > 0:
            await self._rest(rest_s)
        if not self._filled.is_set():
            with suppress(TimeoutError):
                async with asyncio.timeout(timeout_s):
                    await self._filled.wait()
        if self._gone:
            raise Gone
        self._filled.clear()
        self._urgent.clear()
        with self._lock:
            updates, self._updates = self._updates, []
        return _merged(updates)

    async def _rest(self, seconds: float) -> None:
        with self._lock:
            self._resting = True
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._urgent.wait()
        with self._lock:
            self._resting = False
            if self._updates:
                self._filled.set()

    def _ring(self, urgent: bool) -> None:
        self._filled.set()
        if urgent:
            self._urgent.set()


def _merged(updates: Sequence[Update]) -> list[Update]:
    merged: list[Update] = []
    run: list[News] = []
    for update in updates:
        if isinstance(update, News):
            run.append(update)
            continue
        merged += _one(run)
        run = []
        merged.append(update)
    return merged + _one(run)


def _one(run: Sequence[News]) -> list[Update]:
    if len(run) < 2:
        return list(run)
    events = tuple(event for news in run for event in news.events)
    return [News(events, tuple(chosen for news in run for chosen in news.chosen))]
