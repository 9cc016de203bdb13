"""Where files were found: signed links, how long they hold, and which redirects are followed.

The token goes only to one origin, and a signed link is a secret of its own: what is written here never
shows an address.
"""

from __future__ import annotations

import calendar
import re
import threading
import time
import urllib.parse
from dataclasses import dataclass, field

import urllib3

Origin = tuple[str, str, int | None]  # scheme, host, port

# What address parsers read in different ways: backslashes, spaces and control characters.
_HOSTILE = re.compile(r"[\\\x00-\x20\x7f]")
# A link is renewed so long before it expires: a request sent just then must still find it alive.
_MARGIN_S = 30.0
_MARGIN_SHARE = 0.1  # of its life, where that is less


@dataclass(slots=True)
class Asking:
    """Held while one thread asks the hub for a file's link, so that the others need not ask too."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    failures: int = 0
    reason: str = ""  # of the last failure


class Links:
    """File -> where it was found: a signed link, or the hub itself. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._found: dict[str, tuple[str, float]] = {}  # address, and time.monotonic() of its renewal
        self._asking: dict[str, Asking] = {}

    def get(self, file: str) -> str | None:
        """Where the file is; None if that is unknown, or known from a link that is about to expire."""
        with self._lock:
            url, renew_at = self._found.get(file, (None, 0.0))
            return url if time.monotonic() < renew_at else None

    def keep(self, file: str, url: str, clock: float | None) -> None:
        """Remembers where a file was found. `clock` is the server's (seconds since 1970), if it said so."""
        with self._lock:
            if self._found.get(file, ("",))[0] != url:
                self._found[file] = (url, time.monotonic() + _usable_s(url, time.time() if clock is None else clock))

    def forget(self, file: str, url: str) -> None:
        """This address is dead. Another that somebody has found meanwhile stays."""
        with self._lock:
            if self._found.get(file, ("",))[0] == url:
                del self._found[file]

    def asking(self, file: str) -> Asking:
        with self._lock:
            return self._asking.setdefault(file, Asking())


def _usable_s(url: str, now: float) -> float:
    """How long a link is used before it is renewed; without end if it does not say when it expires."""
    expires = expires_at(url)
    if expires is None or expires <= now:  # it works although it has expired: the clocks differ
        return float("inf")
    left = expires - now
    return left - min(_MARGIN_S, _MARGIN_SHARE * left)


def expires_at(url: str) -> float | None:
    """When a signed link says that it expires, in seconds since 1970; None if it does not, or not readably.

    Known are `Expires` (an epoch) and a date with a number of seconds, as S3 and its kind sign; the earliest counts.
    """
    query = dict(urllib.parse.parse_qsl(urllib.parse.urlsplit(url).query))
    found = [_number(query.get("Expires"))]
    for kind in ("Amz", "Goog"):
        begun, lasts = _utc(query.get(f"X-{kind}-Date")), _number(query.get(f"X-{kind}-Expires"))
        found.append(begun + lasts if begun is not None and lasts is not None else None)
    return min((at for at in found if at is not None), default=None)


def _number(text: str | None) -> float | None:
    return float(text) if text is not None and re.fullmatch(r"[0-9]{1,12}(\.[0-9]{1,9})?", text) else None


def _utc(text: str | None) -> float | None:
    try:
        return float(calendar.timegm(time.strptime(text or "", "%Y%m%dT%H%M%SZ")))
    except ValueError:
        return None


def origin(url: str) -> Origin:
    """Scheme, host and port as the parser reads them that will open the connection.

    Two parsers may disagree about hostile addresses, and the one that decides about the token must not be
    another than the one that connects. ValueError for what is no address.
    """
    parts = urllib3.util.parse_url(url)
    scheme = (parts.scheme or "").lower()
    return scheme, (parts.host or "").lower(), parts.port or {"http": 80, "https": 443}.get(scheme)


def redirect_target(url: str, location: str) -> str:
    """Where a redirect from `url` leads. ValueError, with a reason to show, where it must not be followed."""
    here = origin(url)[0]
    try:
        if _HOSTILE.search(location):
            raise ValueError
        target = urllib.parse.urljoin(url, location)
        scheme = origin(target)[0]
        if urllib3.util.parse_url(target).auth is not None:
            raise ValueError
    except (ValueError, urllib3.exceptions.LocationParseError):
        raise ValueError("the server redirects to something that is no plain address") from None
    if scheme not in ("http", "https") or (scheme == "http" and here == "https"):
        raise ValueError(f"refusing a redirect from {here} to {scheme!r}")
    return target
