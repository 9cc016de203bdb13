"""Answers on the wire: whole, or as a stream. Neither falls silent, and neither works on for a client that has left.

Both are ASGI responses that submit their request, watch the connection while they wait, and take the request back if
its client goes away.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from deltafin.errors import DeltafinError
from deltafin.runtime.openai import Chunks, Task, write_line
from deltafin.runtime.server import sse
from deltafin.runtime.server.errors import ApiError, NotAsAsked, api_error
from deltafin.runtime.server.jobs import Began, Ended, Failed, Job, News, Update
from deltafin.runtime.server.logs import record_of
from deltafin.runtime.server.mailbox import Gone, Mailbox
from deltafin.runtime.server.metrics import Meters
from deltafin.runtime.server.refusing import Stopped
from deltafin.runtime.server.services import Services
from deltafin.runtime.server.telling import place_headers, progress_of

log = logging.getLogger("deltafin.server")

# Tokens that come faster than that are written together: nobody reads so fast, and each write takes time from the
# thread that computes.
_BEAT_S = 0.025
# What begins at once is seen to have begun, and what fails at once has a status of its own.
_FIRST_S = 0.05


class Reply(Response):
    """One request's way through the engine. Raises, while nothing has been sent, what `Engine.submit` raises."""

    def __init__(self, services: Services, meters: Meters, task: Task) -> None:
        super().__init__()
        self._services, self._meters, self._task = services, meters, task
        self._made_at, self._begun = time.monotonic(), False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        engine, mailbox, record = self._services.engine, Mailbox(each=self._task.stream), record_of(scope)
        job = engine.submit(self._task, secrets.token_hex(12), mailbox.put)
        watch = asyncio.create_task(_watch(receive, mailbox))
        try:
            await self._reply(job, mailbox, _Wire(send, self._services.settings.keep_alive_s))
        except Gone:
            record.left = True
        finally:
            watch.cancel()
            engine.leave(job)  # which means nothing once it is over
            record.tokens = (len(self._task.ids), job.answer.cached, len(job.answer.tokens))
            if self._services.settings.logs_prompts:
                self._log_texts(job, record.id)

    async def _reply(self, job: Job, mailbox: Mailbox, wire: _Wire) -> None:
        raise NotImplementedError

    def _log_texts(self, job: Job, request: str) -> None:
        """All that the model has read and written, markup and all, in one line."""
        tokenizer = self._services.serving.tokenizer
        prompt, answer = tokenizer.decode(self._task.ids), tokenizer.decode(c.token for c in job.answer.tokens)
        log.info("%s", write_line({"request": request, "prompt": prompt, "answer": answer}).decode().rstrip("\n"))

    def _saw(self, updates: Sequence[Update]) -> None:
        """For the meters."""
        if not self._begun and any(isinstance(update, News | Ended) for update in updates):
            self._begun = True
            self._meters.first_token(time.monotonic() - self._made_at)


class WholeReply(Reply):
    """One JSON object. If it takes long, white space goes before it, which JSON allows."""

    async def _reply(self, job: Job, mailbox: Mailbox, wire: _Wire) -> None:
        while True:
            updates = await mailbox.take(wire.left_s)
            self._saw(updates)
            match updates[-1] if updates else None:
                case Ended():
                    await self._whole(job, wire)
                    return
                case Failed(error):
                    await self._failed(error, wire)
                    return
            if wire.left_s <= 0:
                if not wire.started:
                    await wire.start(_JSON | place_headers(self._services, job))
                await wire.write(b" ")

    async def _whole(self, job: Job, wire: _Wire) -> None:
        # With the alternatives of many tokens this takes a while, in which others are not to wait.
        body = await asyncio.to_thread(_whole_body, job, late=wire.started)
        if not wire.started:
            await wire.start(_JSON | {"Content-Length": str(len(body)), "X-Deltafin-Queue-Position": "0"})
        await wire.write(body, last=True)

    async def _failed(self, error: Exception, wire: _Wire) -> None:
        told = _told(error)
        if not wire.started:
            raise told
        # The status has been sent, and it was 200. Without its last chunk no client takes the body for an answer.
        await wire.write(write_line(told.as_json()))


class StreamedReply(Reply):
    """Server-sent events, with comments where there is nothing to say."""

    async def _reply(self, job: Job, mailbox: Mailbox, wire: _Wire) -> None:
        chunks = Chunks(job.answer, self._services.serving, int(job.created))
        updates = await mailbox.take(_FIRST_S)
        if updates and isinstance(failed := updates[-1], Failed):
            raise _told(failed.error)
        await wire.start(_STREAM | place_headers(self._services, job))
        await wire.write(self._progress(job, chunks) + b"".join(map(sse.data, chunks.begin())))
        updates = [update for update in updates if not isinstance(update, Began)]  # which has just been told
        while not (updates and isinstance(updates[-1], Ended | Failed)):
            await self._write(updates, job, chunks, wire)
            if wire.left_s <= 0:
                await wire.write(self._progress(job, chunks))
            updates = await mailbox.take(wire.left_s, wire.rest_s)
        await self._write(updates, job, chunks, wire, last=True)

    async def _write(
        self, updates: Sequence[Update], job: Job, chunks: Chunks, wire: _Wire, *, last: bool = False
    ) -> None:
        self._saw(updates)
        if written := b"".join(self._written(update, job, chunks) for update in updates):
            await wire.write(written, last=last)

    def _written(self, update: Update, job: Job, chunks: Chunks) -> bytes:
        match update:
            case Began():
                return self._progress(job, chunks)
            case News(events, chosen):
                return b"".join(map(sse.data, chunks.news(events, chosen)))
            case Ended(events, chosen):
                last = sse.DONE if job.answer.fits() else sse.data(NotAsAsked().as_json())
                return b"".join(map(sse.data, chunks.end(events, chosen))) + last
            case Failed(error):
                return sse.data(_told(error).as_json())

    def _progress(self, job: Job, chunks: Chunks) -> bytes:
        told = progress_of(self._services, job)
        return sse.data(chunks.progress(told)) if self._task.stream_progress else sse.comment(told)


class _Wire:
    """One response: remembers whether its head was sent, and when the connection has been silent for too long."""

    def __init__(self, send: Send, keep_alive_s: float) -> None:
        self._send, self._keep_alive_s = send, keep_alive_s
        self._due = time.monotonic() + keep_alive_s
        self._wrote_at = 0.0
        self.started = False

    @property
    def left_s(self) -> float:
        """Until something must be written."""
        return max(0.0, self._due - time.monotonic())

    @property
    def rest_s(self) -> float:
        """Until tokens that come one by one are worth another write."""
        return max(0.0, self._wrote_at + _BEAT_S - time.monotonic())

    async def start(self, headers: Mapping[str, str]) -> None:
        self.started = True
        raw = [(name.lower().encode(), value.encode()) for name, value in headers.items()]
        await self._send({"type": "http.response.start", "status": 200, "headers": raw})

    async def write(self, body: bytes, *, last: bool = False) -> None:
        await self._send({"type": "http.response.body", "body": body, "more_body": not last})
        self._wrote_at = time.monotonic()
        self._due = self._wrote_at + self._keep_alive_s


# A proxy is asked not to collect what comes before it passes it on.
_UNBUFFERED = {"X-Accel-Buffering": "no"}
_JSON = _UNBUFFERED | {"Content-Type": "application/json"}
_STREAM = _UNBUFFERED | {"Content-Type": "text/event-stream; charset=utf-8"}


def _whole_body(job: Job, *, late: bool) -> bytes:
    """An answer that is over. Raises NotAsAsked; of a `late` one, whose status has been sent, it says so beside it."""
    answer = job.answer.as_json(int(job.created))
    if not job.answer.fits():
        refusal = NotAsAsked(answer)
        if not late:
            raise refusal
        # Not cut off as a failure is: clients would ask once more, for hours, and the same would come.
        answer = {**answer, "error": refusal.as_json()["error"]}
    return write_line(answer)


async def _watch(receive: Receive, mailbox: Mailbox) -> None:
    """The body has been read, so there is nothing to come but the end of the connection."""
    with suppress(Exception):
        while (await receive())["type"] != "http.disconnect":
            pass
    mailbox.hang_up()


def _told(error: Exception) -> ApiError:
    if not isinstance(error, DeltafinError | MemoryError):
        log.error("an answer failed for a reason of our own", exc_info=error)
    elif not isinstance(error, ApiError | Stopped):
        log.warning("an answer failed: %s", error)  # with the folders that clients are not told
    return api_error(error)
