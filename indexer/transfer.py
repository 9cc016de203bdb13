"""One HTTP exchange: a request sent, and a body read straight into the memory it is meant for.

`requests` brings sessions, proxies and TLS. Redirects are not followed, `~/.netrc` is not read, and errors
of the HTTP library are named by kind and never quoted, because they quote addresses: a signed link is one.
"""

from __future__ import annotations

import contextlib
import errno
import http.client
import logging
import os
import threading
import time
import urllib.parse
from collections.abc import Generator, Iterator

import requests
import urllib3

from deltafin.errors import DiskError, NetworkError, Refused

READ_NBYTES = 1 << 18
_OUT_OF_FILES = os.strerror(errno.EMFILE)
_TELL_EVERY_S = 0.1
# A body slower than this on average, looked at after a while, is given up: it would hold a worker for days.
_SLOWEST_NBYTES_S = 1024
_SLOW_AFTER_S = 60.0


class Again(Exception):
    """This attempt failed in a way that another may not."""

    def __init__(self, reason: str, pause_s: float | None = None, *, at_once: bool = False) -> None:
        super().__init__(reason)
        self.pause_s = pause_s  # that the server asks for
        self.at_once = at_once  # nothing is wrong with the server: the next attempt need not wait


class Transfers:
    """Requests over a session of each thread's own. Thread-safe; `stop` cuts all of them off."""

    def __init__(self, connect_timeout_s: float, read_timeout_s: float) -> None:
        self._timeouts = (connect_timeout_s, read_timeout_s)
        self._lock = threading.Lock()
        self._sessions: list[requests.Session] = []
        self._local = threading.local()
        self._bodies: set[requests.Response] = set()  # being read; a silent or slow one is cut off by `stop`
        self.stopped = threading.Event()
        for name in ("urllib3.connection", "urllib3.connectionpool"):
            logging.getLogger(name).addFilter(_without_links)  # adding it again does nothing

    def stop(self) -> None:
        """Ends the bodies that are being read; may be called from a signal handler."""
        self.stopped.set()
        # Without the lock, which the thread that a signal interrupts may hold. Copying a set is one step.
        for response in self._bodies.copy():
            # It may have ended meanwhile; urllib3 before 2.3 cannot do this, and there the read timeout ends it.
            with contextlib.suppress(AttributeError, OSError, RuntimeError, ValueError):
                response.raw.shutdown()

    def resume(self) -> None:
        """Bodies may be read again."""
        self.stopped.clear()

    def close(self) -> None:
        self.stop()
        with self._lock:
            sessions, self._sessions = self._sessions, []
        for session in sessions:
            session.close()

    def get(self, url: str, headers: dict[str, str]) -> requests.Response:
        """The answer to a GET, its body unread. Raises Again, or Refused where trying again cannot help."""
        session = self._session()
        try:
            return session.get(url, headers=headers, allow_redirects=False, stream=True, timeout=self._timeouts)
        except (requests.RequestException, urllib3.exceptions.HTTPError, ValueError) as e:
            if _OUT_OF_FILES in repr(e):  # this process's own limit: no server is at fault, and trying again is vain
                raise DiskError(f"{_host(url)}: cannot connect: too many open files; allow more (ulimit -n)") from None
            raise Again(f"{_host(url)}: {_kind(e)}") from None
        except OSError as e:  # requests raises it bare for a certificate bundle that is not there
            raise Refused(f"{_host(url)}: cannot connect ({str(e)[:200]})") from None

    def receive(self, response: requests.Response, view: memoryview) -> Iterator[int]:
        """Fills `view` from the body; yields a number of bytes whenever so many more have arrived.

        Ends before `view` is full only where the body does; a connection that breaks off raises Again.
        """
        stream = _plain_stream(response)
        if stream is None:
            for piece in self.pieces(response, len(view)):
                view[: len(piece)] = piece
                view = view[len(piece) :]
                yield len(piece)
            return
        with self._reading(response) as keeps_pace:
            filled = told = 0
            broken = None
            while filled < len(view) and stream.length and broken is None:
                try:
                    nbytes = _read_some(stream, view[filled:])
                    broken = None if nbytes else "the connection broke off"
                except (OSError, ValueError) as e:  # ValueError: `stop`, or an interpreter that ends, has closed it
                    broken = "the server fell silent" if isinstance(e, TimeoutError) else "the connection broke off"
                    nbytes = 0
                filled += nbytes
                # Over TLS a receive brings 16 KB at most: to tell of each would cost a tenth more time.
                if (
                    filled - told >= READ_NBYTES
                    or keeps_pace.is_due()
                    or broken
                    or filled == len(view)
                    or not stream.length
                ):
                    yield filled - told
                    told = filled
                    keeps_pace(filled)
            if broken is not None:
                raise Again(broken)
            if not stream.length:
                # All of the body is here, so the connection serves the next request. Else it is closed with the
                # response: what is left in it would be taken for the next answer.
                stream.close()
                response.raw.release_conn()

    def pieces(self, response: requests.Response, nbytes: int) -> Iterator[bytes]:
        """The body in pieces, at most `nbytes` of it, by way of urllib3; a broken connection raises Again."""
        with self._reading(response) as keeps_pace:
            left = nbytes
            while left:
                try:
                    piece = response.raw.read(min(left, READ_NBYTES), decode_content=False)
                except (urllib3.exceptions.HTTPError, OSError) as e:
                    raise Again(_kind(e)) from None
                if not piece:
                    return
                left -= len(piece)
                yield piece
                keeps_pace(nbytes - left)

    @contextlib.contextmanager
    def _reading(self, response: requests.Response) -> Generator[_Pace, None, None]:
        """While inside, `stop` reaches this body."""
        with self._lock:
            self._bodies.add(response)
        try:
            if self.stopped.is_set():  # it may not have seen this body
                raise NetworkError("stopped")
            yield _Pace(self.stopped)
        finally:
            with self._lock:
                self._bodies.discard(response)

    def _session(self) -> requests.Session:
        session: requests.Session | None = getattr(self._local, "session", None)
        if session is None:
            self._local.session = session = _Session()
            with self._lock:
                self._sessions.append(session)
        return session


class _Pace:
    """Looks at how fast a body comes, whenever some of it has."""

    def __init__(self, stopped: threading.Event) -> None:
        self._stopped = stopped
        self._started = self._looked = time.monotonic()

    def is_due(self) -> bool:
        return time.monotonic() - self._looked > _TELL_EVERY_S

    def __call__(self, nbytes: int) -> None:
        if self._stopped.is_set():
            raise NetworkError("stopped")
        self._looked = time.monotonic()
        lasted = self._looked - self._started
        if lasted > _SLOW_AFTER_S and nbytes < lasted * _SLOWEST_NBYTES_S:
            raise Again("the server sends less than 1 KB/s")


class _Session(requests.Session):
    """Leaves redirects alone: requests reads their whole body and parses their address even if told not to follow."""

    def __init__(self) -> None:
        super().__init__()
        self.auth = _no_netrc
        # requests knows its own variables alone; other HTTP libraries, the hub client's too, know this one.
        if not os.environ.get("REQUESTS_CA_BUNDLE") and not os.environ.get("CURL_CA_BUNDLE"):
            self.verify = os.environ.get("SSL_CERT_FILE") or True

    def get_redirect_target(self, resp: requests.Response) -> None:
        return None


def _no_netrc(request: requests.PreparedRequest) -> requests.PreparedRequest:
    """As a session's `auth` it keeps requests from reading ~/.netrc and adding credentials for other hosts."""
    return request


def _without_links(record: logging.LogRecord) -> bool:
    """Cuts the query off every address that urllib3 logs, and its traceback: at a header that it cannot read it shows
    both as a warning, which without any logging set up goes to stderr."""
    if isinstance(record.args, tuple):
        record.args = tuple(arg.partition("?")[0] if isinstance(arg, str) else arg for arg in record.args)
    record.exc_info = None
    return True


def _plain_stream(response: requests.Response) -> http.client.HTTPResponse | None:
    """The standard library's response below urllib3's, if its body can be read from the socket as it is.

    urllib3 offers only `read`, which allocates every piece and has it copied: over plain HTTP a fifth more processor
    time (docs/log.md). Where a body comes in chunks or without a length, or another urllib3 has no such response,
    `read` it is.
    """
    stream = getattr(response.raw, "_fp", None)
    if not isinstance(stream, http.client.HTTPResponse) or stream.fp is None or stream.chunked:
        return None
    return None if stream.length is None else stream


def _read_some(stream: http.client.HTTPResponse, view: memoryview) -> int:
    """What one receive brings, straight into `view`. Unlike `readinto` it returns before `view` is full, so that a
    body which trickles is noticed."""
    assert stream.length is not None
    nbytes = stream.fp.readinto1(view[: stream.length])
    stream.length -= nbytes
    return nbytes


def _host(url: str) -> str:
    return urllib.parse.urlsplit(url).hostname or "?"


def _kind(e: Exception) -> str:
    """What went wrong, without the address: it may be a signed link."""
    if isinstance(e, (requests.Timeout, urllib3.exceptions.TimeoutError, TimeoutError)):
        return "the server fell silent"
    if isinstance(e, requests.exceptions.InvalidProxyURL):
        return "the proxy's address cannot be used"
    if isinstance(e, requests.exceptions.InvalidSchema) and "SOCKS" in str(e):
        return "a SOCKS proxy needs the package PySocks"
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
