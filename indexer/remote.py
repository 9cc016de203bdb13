"""Byte ranges of files over HTTP, from the Hugging Face hub or any server of the same shape.

What `RemoteFiles` promises: a view is filled with exactly the bytes asked for, or an error says why not.
It takes only 206 with the asked Content-Range and identity encoding; continues a short body where it
ended; pauses all threads together when the server says so (Retry-After, RateLimit); asks the hub once
per file and reuses the signed link it names until the link is refused; and gives up within a budget.

The token goes only to the hub's own origin. Signed links and tokens appear in no error and no log, which
is why errors of the HTTP library are named by kind and never quoted.
"""

from __future__ import annotations

import contextlib
import email.utils
import logging
import random
import re
import threading
import time
import urllib.parse
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import requests
import urllib3

from deltafin.errors import NetworkError, Refused

log = logging.getLogger(__name__)

READ_NBYTES = 1 << 20
_MAX_HOPS = 5
_REDIRECTS = (301, 302, 303, 307, 308)
_TRY_AGAIN = (408, 425, 429, 500, 502, 503, 504)
_CONTENT_RANGE = re.compile(r"bytes (\d{1,19})-(\d{1,19})/(\d{1,19}|\*)")
_SHA256 = re.compile(r"[0-9a-f]{64}")
# What address parsers read in different ways: backslashes, spaces and control characters.
_HOSTILE = re.compile(r"[\\\x00-\x20\x7f]")
# A body slower than this on average, looked at after a while, is given up: it would hold a worker for days.
_SLOWEST_NBYTES_S = 1024
_SLOW_AFTER_S = 60.0
_NBYTES = re.compile(r"[0-9]{1,19}")


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """How long to insist: `attempts` failures in a row that brought no byte, `total_attempts` for one range."""

    attempts: int = 7
    total_attempts: int = 40
    first_contact_attempts: int = 3  # while the server has never answered: it is probably the wrong address
    backoff_s: float = 0.5
    max_backoff_s: float = 30.0
    max_pause_s: float = 300.0  # cap on what Retry-After may ask
    connect_timeout_s: float = 10.0
    read_timeout_s: float = 30.0


@dataclass(frozen=True, slots=True)
class Answer:
    """What the server said about the file along with its bytes; None where it said nothing."""

    file_nbytes: int | None = None
    etag: str | None = None
    sha256: str | None = None
    commit: str | None = None


@dataclass(frozen=True, slots=True)
class Expected:
    """What is already known of a file; an answer that contradicts it stops the work."""

    file_nbytes: int | None = None
    etag: str | None = None
    commit: str | None = None


@dataclass(slots=True)
class RemoteStats:
    """Counters since the start; `requests` counts every HTTP exchange, redirects too."""

    requests: int = 0
    ranges: int = 0
    nbytes: int = 0
    retries: int = 0
    pauses: int = 0


class _Again(Exception):
    """This attempt failed in a way that another may not."""

    def __init__(self, reason: str, pause_s: float | None = None) -> None:
        super().__init__(reason)
        self.pause_s = pause_s


class RemoteFiles:
    """Files under one base address, e.g. `https://huggingface.co/ORG/NAME/resolve/COMMIT`. Thread-safe."""

    def __init__(self, base_url: str, token: str | None = None, policy: RetryPolicy | None = None) -> None:
        self._base = base_url.rstrip("/")
        self._origin = _origin(self._base)
        self._token = token
        self._policy = policy or RetryPolicy()
        self.stats = RemoteStats()
        self._lock = threading.Lock()
        self._sessions: list[requests.Session] = []
        self._local = threading.local()
        self._links: dict[str, str] = {}  # file -> where it was found: a signed link, or the hub itself
        self._asking: dict[str, threading.Lock] = {}  # file -> held while one thread asks the hub for it
        self._resume_at = 0.0  # time.monotonic() before which no thread may send
        self._bodies: set[requests.Response] = set()  # being read; a silent or slow one is cut off by `stop`
        self._stopped = threading.Event()
        self._ever_answered = False

    @property
    def pause_left_s(self) -> float:
        """Seconds for which the server has asked everybody to wait; 0 when work goes on."""
        return max(0.0, self._resume_at - time.monotonic())

    def stop(self) -> None:
        """Ends waits and transfers of all threads soon; they raise NetworkError."""
        self._stopped.set()
        # Without the lock, which the thread that a signal interrupts may hold. Copying a set is one step.
        for response in self._bodies.copy():
            # It may have ended meanwhile; urllib3 before 2.3 cannot do this, and there the read timeout ends it.
            with contextlib.suppress(AttributeError, OSError, RuntimeError, ValueError):
                response.raw.shutdown()

    def close(self) -> None:
        self.stop()
        with self._lock:
            sessions, self._sessions = self._sessions, []
        for session in sessions:
            session.close()

    # ---- whole small files ------------------------------------------------------------------------

    def read_file(self, file: str, max_nbytes: int, expected: Expected) -> bytes:
        """A whole file of at most `max_nbytes`, by one GET without a range."""
        parts: list[bytes] = []

        def attempt() -> None:
            parts.clear()
            response, _ = self._open(file, None, expected)
            with response:
                if response.status_code != 200:
                    raise _Again(f"status {response.status_code} where 200 was due")
                _require_identity(response)
                for piece in self._pieces(response, max_nbytes + 1):
                    parts.append(bytes(piece))
            if sum(map(len, parts)) > max_nbytes:
                raise Refused(f"{self._where(file)}: larger than the {max_nbytes} bytes such a file may have")
            length = response.headers.get("Content-Length")
            if length is not None and length != str(sum(map(len, parts))):
                raise _Again("the body was cut short")

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
                answer = _merge(answer, Answer(file_nbytes=file_nbytes))
                want = got_last - first + 1
                for piece in self._pieces(response, want):
                    view[filled : filled + len(piece)] = piece
                    filled += len(piece)
            at_end = answer.file_nbytes is not None and offset + filled >= answer.file_nbytes
            if filled < len(view) and not at_end:
                raise _Again(f"{len(view) - filled} of {len(view)} bytes are missing")

        self._insist(file, attempt, lambda: filled)
        with self._lock:
            self.stats.ranges += 1
        return answer

    def _insist(self, file: str, attempt: Callable[[], None], progress: Callable[[], int]) -> None:
        """Repeats `attempt` until it succeeds or the policy's budget is spent."""
        policy, in_a_row, waited_s = self._policy, 0, 0.0
        for total in range(1, policy.total_attempts + 1):
            before = progress()
            self._wait_for_pause()
            try:
                return attempt()
            except _Again as e:
                reason, pause_s = str(e), e.pause_s
            in_a_row = 1 if progress() > before else in_a_row + 1
            limit = policy.attempts if self._ever_answered else policy.first_contact_attempts
            if in_a_row >= limit or total == policy.total_attempts or waited_s > 4 * policy.max_pause_s:
                raise NetworkError(
                    f"{self._where(file)}: gave up after {total} attempts ({reason}); "
                    "what was fetched is kept: run the same command again to go on"
                )
            with self._lock:
                self.stats.retries += 1
            backoff_s = min(policy.max_backoff_s, policy.backoff_s * 2 ** (in_a_row - 1))
            backoff_s *= random.uniform(0.5, 1.0)
            if pause_s is None:
                log.info("%s: %s; trying again in %.1f s", file, reason, backoff_s)
                waited_s += backoff_s
                self._stopped.wait(backoff_s)
            else:
                pause_s = max(pause_s, backoff_s)  # "Retry-After: 0", or a date that is past on our clock
                waited_s += pause_s
                self._pause_everybody(min(pause_s, policy.max_pause_s), reason)

    def _pause_everybody(self, seconds: float, reason: str) -> None:
        with self._lock:
            self._resume_at = max(self._resume_at, time.monotonic() + seconds)
            self.stats.pauses += 1
        log.warning("the server asks to wait %.0f s (%s)", seconds, reason)

    def _wait_for_pause(self) -> None:
        while (left := self.pause_left_s) > 0 and not self._stopped.is_set():
            self._stopped.wait(left)
        if self._stopped.is_set():
            raise NetworkError("stopped")

    # ---- one exchange -----------------------------------------------------------------------------

    def _open(self, file: str, span: tuple[int, int] | None, expected: Expected) -> tuple[requests.Response, Answer]:
        """Sends the request where the file was found before, or asks the hub; one thread asks for all."""
        with self._lock:
            url = self._links.get(file)
            asking = self._asking.setdefault(file, threading.Lock())
        if url is not None:
            return self._follow(url, file, span, expected)
        with asking:
            with self._lock:
                url = self._links.get(file, f"{self._base}/{urllib.parse.quote(file)}")
            return self._follow(url, file, span, expected)

    def _follow(
        self, url: str, file: str, span: tuple[int, int] | None, expected: Expected
    ) -> tuple[requests.Response, Answer]:
        """Sends the request, following redirects by hand; returns a 200 or 206 whose body is unread."""
        answer = Answer()
        for _ in range(_MAX_HOPS):
            ours = _origin(url) == self._origin
            try:
                response = self._send(url, span, with_token=ours)
            except _Again:
                self._forget_link(file)  # dead or cut off: the hub may know a better one
                raise
            if ours:
                answer = _merge(answer, _answer(response))
                self._check_identity(file, answer, expected, response)
            if response.status_code in _REDIRECTS:
                target = self._redirect_target(file, url, response)
                response.close()
                url = target
                continue
            if response.status_code in (200, 206):
                with self._lock:
                    self._links[file] = url
                return response, answer
            response.close()
            self._complain(file, response, span, ours, expected)
        raise Refused(f"{self._where(file)}: the server redirects without end")

    def _send(self, url: str, span: tuple[int, int] | None, *, with_token: bool) -> requests.Response:
        headers = {"Accept-Encoding": "identity", "User-Agent": "deltafin"}
        if span is not None:
            headers["Range"] = f"bytes={span[0]}-{span[1]}"
        if with_token and self._token:
            headers["Authorization"] = f"Bearer {self._token}"
        with self._lock:
            self.stats.requests += 1
        timeouts = (self._policy.connect_timeout_s, self._policy.read_timeout_s)
        try:
            response = self._session().get(url, headers=headers, allow_redirects=False, stream=True, timeout=timeouts)
        except (requests.RequestException, urllib3.exceptions.HTTPError, ValueError) as e:
            raise _Again(f"{urllib.parse.urlsplit(url).hostname}: {_kind(e)}") from None
        except OSError as e:  # requests raises it bare for a certificate bundle that is not there
            raise Refused(f"{self._base_host()}: cannot connect ({str(e)[:200]})") from None
        self._ever_answered = True
        return response

    def _session(self) -> requests.Session:
        session: requests.Session | None = getattr(self._local, "session", None)
        if session is None:
            session = _Session()
            session.auth = _no_netrc
            self._local.session = session
            with self._lock:
                self._sessions.append(session)
        return session

    def _pieces(self, response: requests.Response, nbytes: int) -> Iterator[bytes]:
        """The body in pieces, at most `nbytes` of it; a broken connection ends the attempt."""
        left, started = nbytes, time.monotonic()
        with self._lock:
            self._bodies.add(response)
        try:
            while left:
                if self._stopped.is_set():
                    raise NetworkError("stopped")
                try:
                    piece = response.raw.read(min(left, READ_NBYTES))
                except (urllib3.exceptions.HTTPError, OSError) as e:
                    raise _Again(_kind(e)) from None
                if not piece:
                    return
                left -= len(piece)
                with self._lock:
                    self.stats.nbytes += len(piece)
                yield piece
                lasted = time.monotonic() - started
                if lasted > _SLOW_AFTER_S and nbytes - left < lasted * _SLOWEST_NBYTES_S:
                    raise _Again("the server sends less than 1 KB/s")
        finally:
            with self._lock:
                self._bodies.discard(response)

    def _forget_link(self, file: str) -> None:
        with self._lock:
            self._links.pop(file, None)

    def _redirect_target(self, file: str, url: str, response: requests.Response) -> str:
        here = _origin(url)[0]
        location = response.headers.get("Location", "")
        try:
            if _HOSTILE.search(location):
                raise ValueError
            target = urllib.parse.urljoin(url, location)
            scheme = _origin(target)[0]
            if urllib3.util.parse_url(target).auth is not None:
                raise ValueError
        except (ValueError, urllib3.exceptions.LocationParseError):
            raise Refused(f"{self._where(file)}: the server redirects to something that is no plain address") from None
        if scheme not in ("http", "https") or (scheme == "http" and here == "https"):
            raise Refused(f"{self._where(file)}: refusing a redirect from {here} to {scheme!r}")
        return target

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
            raise _Again("the server ignored the range and sent the whole file")
        _require_identity(response)
        shown = response.headers.get("Content-Range", "")
        m = _CONTENT_RANGE.fullmatch(shown)
        if m is None:
            raise _Again(f"status 206 without a usable Content-Range ({shown[:60]!r})")
        got_first, got_last = int(m[1]), int(m[2])
        if got_first != first or not first <= got_last <= last:
            raise _Again(f"asked for bytes {first} to {last}, got {got_first} to {got_last}")
        if m[3] != "*" and file_nbytes is not None and int(m[3]) != file_nbytes:
            raise Refused(
                f"{self._where(file)}: the server's file has {m[3]} bytes, indexed with {file_nbytes}; "
                "rebuild the catalog with df-index build"
            )
        length = _nbytes(response.headers.get("Content-Length"))
        if length is not None and length > got_last - first + 1:
            raise _Again("the body is longer than its Content-Range")
        return got_last, None if m[3] == "*" else int(m[3])

    def _complain(
        self, file: str, response: requests.Response, span: tuple[int, int] | None, ours: bool, expected: Expected
    ) -> None:
        """Raises what an unwanted status means."""
        status = response.status_code
        if status in _TRY_AGAIN:
            raise _Again(f"status {status}", _pause_s(response))
        if not ours:
            self._forget_link(file)  # expired or refused: ask the hub for a new one
            raise _Again(f"the link that the hub gave was refused with status {status}")
        where = self._where(file)
        if status == 416 and span is not None:
            total = _nbytes(response.headers.get("Content-Range", "").rpartition("/")[2])
            if total is None or total > span[1]:
                raise _Again(f"status 416 for bytes {span[0]} to {span[1]}, which the file has")
            known = expected.file_nbytes
            advice = "" if known is None else f" (indexed with {known}); rebuild the catalog with df-index build"
            raise Refused(
                f"{where}: asked for bytes {span[0]} to {span[1]}, but the server's file has {total} bytes{advice}"
            )
        if status in (401, 403):
            hint = "the token was not accepted" if self._token else "set HF_TOKEN or run 'hf auth login'"
            raise Refused(
                f"{where}: access refused (status {status}); {hint}, and accept the repository's terms if it is gated"
            )
        if status in (404, 410):
            raise Refused(f"{where}: no such file on the server (status {status})")
        raise Refused(f"{where}: unexpected status {status}")

    def _where(self, file: str) -> str:
        """The file and host for an error, without user info or query."""
        return f"{file} from {self._base_host()}"

    def _base_host(self) -> str:
        return self._origin[1]


class _Session(requests.Session):
    """Leaves redirects alone: requests reads their whole body and parses their address even if told not to follow."""

    def get_redirect_target(self, resp: requests.Response) -> None:
        return None


def _no_netrc(request: requests.PreparedRequest) -> requests.PreparedRequest:
    """As a session's `auth` it keeps requests from reading ~/.netrc and adding credentials for other hosts."""
    return request


def _origin(url: str) -> tuple[str, str, int | None]:
    """Scheme, host and port as the parser reads them that will open the connection.

    Two parsers may disagree about hostile addresses, and the one that decides about the token must not be
    another than the one that connects. ValueError for what is no address.
    """
    parts = urllib3.util.parse_url(url)
    scheme = (parts.scheme or "").lower()
    return scheme, (parts.host or "").lower(), parts.port or {"http": 80, "https": 443}.get(scheme)


def _kind(e: Exception) -> str:
    """What went wrong, without the address: it may be a signed link."""
    if isinstance(e, (requests.Timeout, urllib3.exceptions.TimeoutError, TimeoutError)):
        return "the server fell silent"
    if isinstance(e, ValueError):
        return "the server's redirect leads to something that is no address"
    if isinstance(e, requests.exceptions.SSLError):
        return "TLS failed: the certificate was not accepted"
    if isinstance(e, requests.exceptions.ProxyError):
        return "the proxy refused the connection"
    if isinstance(e, urllib3.exceptions.HTTPError):
        return "the connection broke off"
    text = repr(e)
    for sign, meaning in (
        ("NameResolution", "the name cannot be resolved"),
        ("refused", "connection refused"),
        ("reset", "connection reset"),
    ):
        if sign in text:
            return meaning
    return "the connection failed"


def _header_etag(response: requests.Response) -> str | None:
    value = response.headers.get("X-Linked-ETag") or response.headers.get("ETag")
    return value.removeprefix("W/").strip('"') if value else None


def _answer(response: requests.Response) -> Answer:
    """Identity headers of an answer by the hub's own origin."""
    if response.status_code >= 400:
        return Answer()
    etag = _header_etag(response)
    linked = response.headers.get("X-Linked-ETag", "").strip('"')
    return Answer(
        file_nbytes=_nbytes(response.headers.get("X-Linked-Size")),
        etag=etag,
        sha256=linked if _SHA256.fullmatch(linked) else None,
        commit=response.headers.get("X-Repo-Commit"),
    )


def _nbytes(header: str | None) -> int | None:
    """A size as a server states it; None if it is no plain number that a file could have."""
    return int(header) if header is not None and _NBYTES.fullmatch(header) else None


def _merge(old: Answer, new: Answer) -> Answer:
    return Answer(
        new.file_nbytes if new.file_nbytes is not None else old.file_nbytes,
        new.etag or old.etag,
        new.sha256 or old.sha256,
        new.commit or old.commit,
    )


def _require_identity(response: requests.Response) -> None:
    encoding = response.headers.get("Content-Encoding", "identity")
    if encoding.lower() != "identity":
        raise _Again(f"the body is encoded as {encoding!r} although identity was asked for")


def _pause_s(response: requests.Response) -> float | None:
    """Seconds that Retry-After (number or date) or RateLimit (`t=`) asks to wait."""
    value = response.headers.get("Retry-After", "").strip()
    try:
        if value:
            return max(0.0, float(value))
    except ValueError:
        try:
            when = email.utils.parsedate_to_datetime(value)
            return max(0.0, when.timestamp() - time.time())
        except (ValueError, TypeError):
            pass
    if response.status_code == 429 and (m := re.search(r"\bt=(\d{1,6})", response.headers.get("RateLimit", ""))):
        return float(m[1])
    return None
