"""Byte ranges of files over HTTP, from the Hugging Face hub or any server of the same shape.

What `RemoteFiles` promises: a view is filled with exactly the bytes asked for, or an error says why not.
It takes only 206 with the asked Content-Range and identity encoding; continues a short body where it
ended; pauses all threads together when the server says so (Retry-After, RateLimit); asks the hub once
per file and uses the signed link it names until that expires or is refused; and gives up within a budget.

The token goes only to the hub's own origin. Signed links and tokens appear in no error and no log.
"""

from __future__ import annotations

import logging
import random
import threading
import time
import urllib.parse
from collections.abc import Callable
from dataclasses import dataclass, field

import requests

from deltafin.errors import NetworkError, Refused
from deltafin.indexer.answers import (
    Answer,
    Expected,
    clock_of,
    content_range,
    encoding_of,
    identity_of,
    merged,
    pause_s,
    quota_spent_s,
    size_in,
)
from deltafin.indexer.links import Links, origin, redirect_target
from deltafin.indexer.transfer import Again, Transfers

log = logging.getLogger(__name__)

_MAX_HOPS = 5
_REDIRECTS = (301, 302, 303, 307, 308)
_TRY_AGAIN = (408, 425, 429, 500, 502, 503, 504)
_THROTTLED = (429, 503)
# Whoever has waited so long for another thread's vain question to the hub does not ask it again at once.
_WAITED_S = 1.0


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """How long to insist: `attempts` failures in a row that brought no byte, `total_attempts` for one range."""

    attempts: int = 7
    total_attempts: int = 40
    first_contact_attempts: int = 3  # while the server has never answered: it is probably the wrong address
    backoff_s: float = 0.5
    max_backoff_s: float = 30.0
    max_pause_s: float = 300.0  # cap on what Retry-After may ask
    waits: bool = True  # False: a server that asks to wait is given up
    connect_timeout_s: float = 10.0
    read_timeout_s: float = 30.0


@dataclass(slots=True)
class RemoteStats:
    """Counters since the start; `requests` counts every HTTP exchange, redirects too. Thread-safe."""

    requests: int = 0
    ranges: int = 0
    nbytes: int = 0
    retries: int = 0
    pauses: int = 0
    throttled: int = 0  # answers 429 and 503
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False, compare=False)

    def add(self, **amounts: int) -> None:
        with self._lock:
            for name, amount in amounts.items():
                setattr(self, name, getattr(self, name) + amount)


class Denied(Refused):
    """The server's no to a file: `status`, and the hub's own `code` for it, "" where it gives none."""

    def __init__(self, message: str, response: requests.Response) -> None:
        super().__init__(message)
        self.status = response.status_code
        self.code = response.headers.get("X-Error-Code", "")


class RemoteFiles:
    """Files under one base address, e.g. `https://huggingface.co/ORG/NAME/resolve/COMMIT`. Thread-safe."""

    def __init__(
        self,
        base_url: str,
        token: str | None = None,
        policy: RetryPolicy | None = None,
        stats: RemoteStats | None = None,
    ) -> None:
        self._base = base_url.rstrip("/")
        self._origin = origin(self._base)
        self._token = token
        self._policy = policy or RetryPolicy()
        self.stats = stats or RemoteStats()
        self.on_arrival: Callable[[], None] | None = None  # called often while bytes arrive, from any thread
        self._transfers = Transfers(self._policy.connect_timeout_s, self._policy.read_timeout_s)
        self._links = Links()
        self._lock = threading.Lock()
        self._resume_at = 0.0  # time.monotonic() before which no thread may send
        self._ask_hub_at = 0.0  # the same for requests to the hub itself: its quota is spent, links still work
        self._ever_answered = False

    @property
    def pause_left_s(self) -> float:
        """Seconds for which the server has asked everybody to wait; 0 when work goes on."""
        return max(0.0, self._resume_at - time.monotonic())

    def stop(self) -> None:
        """Ends waits and transfers of all threads soon; they raise NetworkError."""
        self._transfers.stop()

    def resume(self) -> None:
        """Transfers may begin again. Those that were stopped may still be on their way out; they end as failed ones."""
        self._transfers.resume()

    def close(self) -> None:
        self._transfers.close()

    def blame(self, answer: Answer, complaint: str) -> bool:
        """Says that the bytes which came with `answer` are wrong; True if another source will be asked next."""
        return False

    # ---- whole small files ------------------------------------------------------------------------

    def read_file(self, file: str, max_nbytes: int, expected: Expected) -> bytes:
        """A whole file of at most `max_nbytes`, by one GET without a range. `file` may be quoted and have a query."""
        parts: list[bytes] = []

        def attempt() -> None:
            parts.clear()
            response, _ = self._open(file, None, expected)
            with response:
                if response.status_code != 200:
                    raise Again(f"status {response.status_code} where 200 was due")
                _require_identity(response)
                for piece in self._transfers.pieces(response, max_nbytes + 1):
                    parts.append(piece)
                    self.stats.add(nbytes=len(piece))
            if sum(map(len, parts)) > max_nbytes:
                raise Refused(f"{self._where(file)}: larger than the {max_nbytes} bytes such a file may have")
            length = response.headers.get("Content-Length")
            if length is not None and length != str(sum(map(len, parts))):
                raise Again("the body was cut short")

        self._insist(file, attempt, lambda: 0)
        return b"".join(parts)

    # ---- ranges -----------------------------------------------------------------------------------

    def read_into(self, file: str, offset: int, view: memoryview, expected: Expected) -> Answer:
        """Fills `view` with the bytes of `file` from `offset` on, as far as the file goes.

        Only where `expected.file_nbytes` is unknown can the file end first: compare `Answer.file_nbytes`.
        """
        assert len(view) > 0, "an empty range is never sent"
        filled = 0
        answer = Answer()

        def attempt() -> None:
            nonlocal filled, answer
            first, last = offset + filled, offset + len(view) - 1
            response, answer = self._open(file, (first, last), expected)
            with response:
                got_last, file_nbytes = self._check_range(file, response, first, last, expected.file_nbytes)
                answer = merged(answer, Answer(file_nbytes=file_nbytes))
                for nbytes in self._transfers.receive(response, view[filled : got_last + 1 - offset]):
                    filled += nbytes
                    self._arrived(nbytes)
            at_end = answer.file_nbytes is not None and offset + filled >= answer.file_nbytes
            if filled < len(view) and not at_end:
                raise Again(f"{len(view) - filled} of {len(view)} bytes are missing")

        self._insist(file, attempt, lambda: filled)
        self.stats.add(ranges=1)
        return answer

    def _arrived(self, nbytes: int) -> None:
        self.stats.add(nbytes=nbytes)
        if self.on_arrival is not None:
            self.on_arrival()

    def _insist(self, file: str, attempt: Callable[[], None], progress: Callable[[], int]) -> None:
        """Repeats `attempt` until it succeeds or the policy's budget is spent."""
        policy, in_a_row, waited_s, hurried = self._policy, 0, 0.0, False
        for total in range(1, policy.total_attempts + 1):
            before = progress()
            self._wait_until(lambda: self._resume_at)
            try:
                return attempt()
            except Again as e:
                again = e
            in_a_row = 1 if progress() > before else in_a_row + 1
            limit = policy.attempts if self._ever_answered else policy.first_contact_attempts
            unwilling = again.pause_s is not None and not policy.waits
            if in_a_row >= limit or total == policy.total_attempts or waited_s > 4 * policy.max_pause_s or unwilling:
                raise NetworkError(self._gave_up(file, total, again))
            self.stats.add(retries=1)
            if again.at_once and not hurried:  # once: where every link dies young, hurrying would not end
                hurried = True
                log.info("%s: %s; asking for another", file, again)
                continue
            waited_s += self._back_off(file, again, in_a_row)

    def _gave_up(self, file: str, attempts: int, again: Again) -> str:
        if not self._ever_answered:
            return (
                f"{self._where(file)}: no answer in {attempts} attempts ({again}); "
                "check the connection and the address (HF_ENDPOINT, a mirror, a proxy)"
            )
        return (
            f"{self._where(file)}: gave up after {attempts} attempts ({again}); "
            "what was fetched is kept: run the same command again to go on"
        )

    def _back_off(self, file: str, again: Again, in_a_row: int) -> float:
        """Waits, or has everybody wait if the server asks for it; returns for how long."""
        policy = self._policy
        backoff_s = min(policy.max_backoff_s, policy.backoff_s * 2.0 ** (in_a_row - 1)) * random.uniform(0.5, 1.0)
        if again.pause_s is None:
            log.info("%s: %s; trying again in %.1f s", file, again, backoff_s)
            self._transfers.stopped.wait(backoff_s)
            return backoff_s
        asked_s = max(again.pause_s, backoff_s)  # "Retry-After: 0", or a date that is past on our clock
        self._pause_everybody(min(asked_s, policy.max_pause_s), str(again))
        return asked_s

    def _pause_everybody(self, seconds: float, reason: str) -> None:
        with self._lock:
            self._resume_at = max(self._resume_at, time.monotonic() + seconds)
        self.stats.add(pauses=1)
        log.warning("the server asks to wait %.0f s (%s)", seconds, reason)

    def _wait_until(self, moment: Callable[[], float]) -> None:
        """Waits for a moment that may still be put off. Raises NetworkError when stopped."""
        stopped = self._transfers.stopped
        while (left := moment() - time.monotonic()) > 0 and not stopped.is_set():
            stopped.wait(left)
        if stopped.is_set():
            raise NetworkError("stopped")

    # ---- one exchange -----------------------------------------------------------------------------

    def _open(self, file: str, span: tuple[int, int] | None, expected: Expected) -> tuple[requests.Response, Answer]:
        """Sends the request where the file was found before, or asks the hub; one thread asks for all."""
        if (url := self._links.get(file)) is not None:
            return self._follow(url, file, span, expected, known=True)
        asking, failures, begun = self._links.asking(file), self._links.asking(file).failures, time.monotonic()
        with asking.lock:
            if (url := self._links.get(file)) is not None:
                return self._follow(url, file, span, expected, known=True)
            if asking.failures > failures and time.monotonic() - begun > _WAITED_S:
                raise Again(asking.reason)  # else a silent hub would keep the threads waiting one after the other
            try:
                return self._follow(self._address(file), file, span, expected, known=False)
            except Again as e:
                asking.failures, asking.reason = asking.failures + 1, str(e)
                raise

    def _address(self, file: str) -> str:
        path, mark, query = file.partition("?")
        return f"{self._base}/{urllib.parse.quote(path, safe='/%')}{mark}{query}"

    def _follow(
        self, url: str, file: str, span: tuple[int, int] | None, expected: Expected, *, known: bool
    ) -> tuple[requests.Response, Answer]:
        """Sends the request, following redirects by hand; returns a 200 or 206 whose body is unread.

        `known`: the address was found before, so a refusal there means that it has expired, and nothing else.
        """
        answer, clock = Answer(), None
        for _ in range(_MAX_HOPS):
            ours = origin(url) == self._origin
            try:
                response = self._send(url, span, ours=ours)
            except Again:
                self._links.forget(file, url)  # dead or cut off: the hub may know a better one
                raise
            if ours:
                answer = merged(answer, identity_of(response))
                self._check_identity(file, answer, expected, response)
            if response.status_code in _REDIRECTS:
                clock = clock_of(response)
                url = self._redirected(file, url, response)
                continue
            if response.status_code in (200, 206):
                self._links.keep(file, url, clock)
                return response, answer
            response.close()
            if not ours and response.status_code not in _TRY_AGAIN:
                self._links.forget(file, url)
                reason = f"the link that the hub gave was refused with status {response.status_code}"
                raise Again(reason, at_once=known)
            self._complain(file, response, span, expected)
        raise Refused(f"{self._where(file)}: the server redirects without end")

    def _send(self, url: str, span: tuple[int, int] | None, *, ours: bool) -> requests.Response:
        headers = {"Accept-Encoding": "identity", "User-Agent": "deltafin"}
        if span is not None:
            headers["Range"] = f"bytes={span[0]}-{span[1]}"
        if ours:
            if (left_s := self._ask_hub_at - time.monotonic()) > 0:
                log.warning("the hub's quota of requests is spent; asking it again in %.0f s", left_s)
            self._wait_until(lambda: self._ask_hub_at)
            if self._token:
                headers["Authorization"] = f"Bearer {self._token}"
        self.stats.add(requests=1)
        response = self._transfers.get(url, headers)
        self._ever_answered = True
        if response.status_code in _THROTTLED:
            self.stats.add(throttled=1)
        elif ours and (spent_s := quota_spent_s(response)) is not None:
            self._ask_hub_at = time.monotonic() + min(spent_s, self._policy.max_pause_s)
        return response

    def _redirected(self, file: str, url: str, response: requests.Response) -> str:
        response.close()
        try:
            return redirect_target(url, response.headers.get("Location", ""))
        except ValueError as e:
            raise Refused(f"{self._where(file)}: {e}") from None

    def _check_identity(self, file: str, answer: Answer, expected: Expected, response: requests.Response) -> None:
        """Stops when the hub serves another file than the one that was indexed."""
        for what, got, want in (
            ("ETag", answer.etag, expected.etag),
            ("size", answer.file_nbytes, expected.file_nbytes),
            ("commit", answer.commit, expected.commit),
        ):
            if got is not None and want is not None and got != want:
                response.close()
                raise Refused(
                    f"{self._where(file)}: the file changed on the server ({what} {got}, indexed with {want}); "
                    "nothing of it was used; rebuild the catalog with df-index build"
                )

    def _check_range(
        self, file: str, response: requests.Response, first: int, last: int, file_nbytes: int | None
    ) -> tuple[int, int | None]:
        """The last byte that this 206 holds (it may end early if it says so honestly) and the file's size."""
        if response.status_code != 206:
            raise Again("the server ignored the range and sent the whole file")
        _require_identity(response)
        held = content_range(response)
        if held is None:
            shown = response.headers.get("Content-Range", "")[:60]
            raise Again(f"status 206 without a usable Content-Range ({shown!r})")
        if held.first != first or not first <= held.last <= last:
            raise Again(f"asked for bytes {first} to {last}, got {held.first} to {held.last}")
        if held.file_nbytes is not None and file_nbytes is not None and held.file_nbytes != file_nbytes:
            raise Refused(
                f"{self._where(file)}: the server's file has {held.file_nbytes} bytes, indexed with {file_nbytes}; "
                "rebuild the catalog with df-index build"
            )
        length = size_in(response.headers.get("Content-Length"))
        if length is not None and length > held.last - first + 1:
            raise Again("the body is longer than its Content-Range")
        return held.last, held.file_nbytes

    def _complain(
        self, file: str, response: requests.Response, span: tuple[int, int] | None, expected: Expected
    ) -> None:
        """Raises what an unwanted status means."""
        status, where = response.status_code, self._where(file)
        if status in _TRY_AGAIN:
            raise Again(f"status {status}", pause_s(response))
        if status == 416 and span is not None:
            total = size_in(response.headers.get("Content-Range", "").rpartition("/")[2])
            if total is None or total > span[1]:
                raise Again(f"status 416 for bytes {span[0]} to {span[1]}, which the file has")
            known = expected.file_nbytes
            advice = "" if known is None else f" (indexed with {known}); rebuild the catalog with df-index build"
            raise Refused(
                f"{where}: asked for bytes {span[0]} to {span[1]}, but the server's file has {total} bytes{advice}"
            )
        if status in (401, 403):
            hint = "the token was not accepted" if self._token else "set HF_TOKEN or run 'hf auth login'"
            raise Denied(
                f"{where}: access refused (status {status}); {hint}, and accept the repository's terms if it is gated",
                response,
            )
        if status in (404, 410):
            raise Denied(f"{where}: no such file on the server (status {status})", response)
        raise Refused(f"{where}: unexpected status {status}")

    def _where(self, file: str) -> str:
        """The file and host for an error, without user info or query."""
        return f"{file.partition('?')[0]} from {self._origin[1]}"


def _require_identity(response: requests.Response) -> None:
    if (encoding := encoding_of(response)) is not None:
        raise Again(f"the body is encoded as {encoding!r} although identity was asked for")
