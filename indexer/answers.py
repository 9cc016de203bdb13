"""What a server says of a file: its identity, which bytes an answer holds, and how long to wait."""

from __future__ import annotations

import email.utils
import re
import time
from dataclasses import dataclass

import requests

_CONTENT_RANGE = re.compile(r"bytes (\d{1,19})-(\d{1,19})/(\d{1,19}|\*)")
_SHA256 = re.compile(r"[0-9a-f]{64}")
_NBYTES = re.compile(r"[0-9]{1,19}")
_REMAINING = re.compile(r"\br=(\d{1,9})\b")
_RESET_S = re.compile(r"\bt=(\d{1,6})\b")


@dataclass(frozen=True, slots=True)
class Answer:
    """What the server said about the file along with its bytes; None where it said nothing."""

    file_nbytes: int | None = None
    etag: str | None = None
    sha256: str | None = None
    commit: str | None = None
    mirror: int | None = None  # which mirror the bytes came from; None for the hub itself


@dataclass(frozen=True, slots=True)
class Expected:
    """What is already known of a file; an answer that contradicts it stops the work."""

    file_nbytes: int | None = None
    etag: str | None = None
    commit: str | None = None


@dataclass(frozen=True, slots=True)
class ShardFile:
    """One file as its source lists it; None where the source does not say."""

    name: str
    nbytes: int | None
    etag: str | None = None
    sha256: str | None = None


@dataclass(frozen=True, slots=True)
class ContentRange:
    """The bytes `first` to `last` of a file of `file_nbytes` (None: not said)."""

    first: int
    last: int
    file_nbytes: int | None


def identity_of(response: requests.Response) -> Answer:
    """The headers that say which file this is; only to be believed of the hub's own origin."""
    if response.status_code >= 400:
        return Answer()
    linked = response.headers.get("X-Linked-ETag", "").strip('"')
    etag = response.headers.get("X-Linked-ETag") or response.headers.get("ETag")
    return Answer(
        file_nbytes=size_in(response.headers.get("X-Linked-Size")),
        etag=etag.removeprefix("W/").strip('"') if etag else None,
        sha256=linked if _SHA256.fullmatch(linked) else None,
        commit=response.headers.get("X-Repo-Commit"),
    )


def merged(old: Answer, new: Answer) -> Answer:
    """What `new` says, and `old` where `new` is silent."""
    return Answer(
        new.file_nbytes if new.file_nbytes is not None else old.file_nbytes,
        new.etag or old.etag,
        new.sha256 or old.sha256,
        new.commit or old.commit,
    )


def content_range(response: requests.Response) -> ContentRange | None:
    """The Content-Range of an answer; None if it has none that can be read."""
    m = _CONTENT_RANGE.fullmatch(response.headers.get("Content-Range", ""))
    return ContentRange(int(m[1]), int(m[2]), None if m[3] == "*" else int(m[3])) if m else None


def size_in(header: str | None) -> int | None:
    """A size as a server states it; None if it is no plain number that a file could have."""
    return int(header) if header is not None and _NBYTES.fullmatch(header) else None


def encoding_of(response: requests.Response) -> str | None:
    """How the body is encoded; None if it is not."""
    encoding = response.headers.get("Content-Encoding", "identity")
    return None if encoding.lower() == "identity" else encoding


def pause_s(response: requests.Response) -> float | None:
    """Seconds that Retry-After (number or date) or RateLimit (`t=`) asks to wait."""
    value = response.headers.get("Retry-After", "").strip()
    try:
        if value:
            return max(0.0, float(value))
    except ValueError:
        if (when := date_in(value)) is not None:
            return max(0.0, when - time.time())
    if response.status_code == 429 and (m := _RESET_S.search(response.headers.get("RateLimit", ""))):
        return float(m[1])
    return None


def quota_spent_s(response: requests.Response) -> float | None:
    """Seconds until the server answers again, where a good answer says that it was the last for now (`r=0;t=N`)."""
    said = response.headers.get("RateLimit", "")
    left, reset = _REMAINING.search(said), _RESET_S.search(said)
    return float(reset[1]) if left and reset and int(left[1]) == 0 else None


def clock_of(response: requests.Response) -> float | None:
    """The server's clock, in seconds since 1970, or up to a second more (its Date is cut to whole ones)."""
    date = date_in(response.headers.get("Date", ""))
    return None if date is None else date + 1.0


def date_in(header: str) -> float | None:
    """An HTTP date as seconds since 1970; None if it is none, or none that a clock can show."""
    try:
        return email.utils.parsedate_to_datetime(header).timestamp()
    except (ValueError, TypeError, OverflowError):
        return None
