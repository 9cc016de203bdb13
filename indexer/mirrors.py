"""Mirrors: other servers that hold the same shards, asked in order before the hub.

A mirror vouches for nothing. It gets no token, its file must have the size that the catalog says, and of
its ETag and commit nothing is believed. One that fails is passed over, with one line, and tried again after
a minute at the earliest, the later the more often it has failed; the span is then asked of the next, from its
first byte on, so that no span is mixed of two servers' bytes.
"""

from __future__ import annotations

import logging
import re
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import urllib3

from deltafin.errors import BadRequest, NetworkError, Refused
from deltafin.indexer.answers import Answer, Expected
from deltafin.indexer.remote import RemoteFiles, RetryPolicy

log = logging.getLogger(__name__)

_ASIDE_S = 60.0
_MAX_ASIDE_S = 3600.0
_PLACEHOLDER = re.compile(r"\{([^{}]*)\}")


def mirror_address(text: str, repo: str, commit: str) -> str:
    """The base address that `text` means, with {repo} and {commit} filled in. BadRequest if it is none."""
    shown = re.sub(r"//.*@", "//...@", text[:200])[:80].partition("?")[0]  # never a password or a signature
    known = {"repo": repo, "commit": commit}
    if unknown := [name for name in _PLACEHOLDER.findall(text) if name not in known]:
        raise BadRequest(f"mirror {shown!r}: {{{unknown[0]}}} stands for nothing; use {{repo}} and {{commit}}")
    address = _PLACEHOLDER.sub(lambda m: known[m[1]], text)
    if re.search(r"[{}]", address):
        raise BadRequest(f"mirror {shown!r}: a brace stands alone; use {{repo}} and {{commit}}")
    try:
        parts = urllib3.util.parse_url(address)
        usable = parts.scheme in ("http", "https") and parts.host and parts.port != 0
    except urllib3.exceptions.LocationParseError:
        usable = False
    if not usable or re.search(r"[\\\x00-\x20\x7f]", address):
        raise BadRequest(f"mirror {shown!r}: must be an address like https://host/path, below which the shards lie")
    if parts.auth is not None or parts.query is not None or parts.fragment is not None:
        raise BadRequest(f"mirror {shown!r}: a plain address is needed, without user, password, query or fragment")
    return address.rstrip("/")


@dataclass(slots=True)
class _Aside:
    """How long something is passed over, and how often it has been."""

    until: float = 0.0  # time.monotonic()
    times: int = 0

    def extend(self, now: float) -> float:
        if now - self.until > _MAX_ASIDE_S:  # it has served well since
            self.times = 0
        lasts_s = min(_MAX_ASIDE_S, _ASIDE_S * 2.0**self.times)
        self.times, self.until = self.times + 1, now + lasts_s
        return lasts_s


@dataclass(slots=True)
class _Mirror:
    """One server, by host and port, and what of it is passed over: all, or files that it does not have as indexed."""

    host: str
    files: RemoteFiles
    whole: _Aside = field(default_factory=_Aside)
    lacking: dict[str, _Aside] = field(default_factory=dict)

    def offers(self, file: str, now: float) -> bool:
        lacking = self.lacking.get(file)
        return now >= self.whole.until and (lacking is None or now >= lacking.until)


class MirroredFiles(RemoteFiles):
    """The hub's files, asked of mirrors first. The hub is contacted only for what no mirror brings."""

    def __init__(self, mirrors: Sequence[str], base_url: str, token: str | None, policy: RetryPolicy | None) -> None:
        super().__init__(base_url, token, policy)
        # There are others to ask, so a mirror is not insisted on, and not waited for.
        p = self._policy
        less = replace(
            p,
            attempts=min(3, p.attempts),
            total_attempts=min(8, p.total_attempts),
            first_contact_attempts=2,
            waits=False,
        )
        self._mirrors = [_mirror(address, RemoteFiles(address, None, less, self.stats)) for address in mirrors]
        self._aside_lock = threading.Lock()
        for mirror in self._mirrors:
            mirror.files.on_arrival = self._tell

    def _tell(self) -> None:
        if self.on_arrival is not None:
            self.on_arrival()

    def stop(self) -> None:
        super().stop()
        for mirror in self._mirrors:
            mirror.files.stop()

    def resume(self) -> None:
        super().resume()
        for mirror in self._mirrors:
            mirror.files.resume()

    def close(self) -> None:
        super().close()
        for mirror in self._mirrors:
            mirror.files.close()

    def read_into(self, file: str, offset: int, view: memoryview, expected: Expected) -> Answer:
        """As `RemoteFiles.read_into`, from the first server that can; what is raised is the hub's own failure."""
        sized = Expected(file_nbytes=expected.file_nbytes)
        for number, mirror in enumerate(self._mirrors):
            with self._aside_lock:
                if not mirror.offers(file, time.monotonic()):
                    continue
            try:
                answer = mirror.files.read_into(file, offset, view, sized)
                if answer.file_nbytes is None:
                    raise Refused(f"{file} from {mirror.host}: the server does not say how large the file is")
            except NetworkError as e:
                if self._transfers.stopped.is_set():
                    raise
                self._pass_over(mirror, file if isinstance(e, Refused) else None, str(e))
                continue
            self._praise(mirror, file)
            return Answer(file_nbytes=answer.file_nbytes, mirror=number)
        return super().read_into(file, offset, view, expected)

    def blame(self, answer: Answer, complaint: str) -> bool:
        """Passes over the mirror that `answer` came from; False if that was the hub, behind which nobody stands."""
        if answer.mirror is None:
            return False
        mirror = self._mirrors[answer.mirror]
        self._pass_over(mirror, None, f"{mirror.host}: {complaint}")
        return True

    def _pass_over(self, mirror: _Mirror, file: str | None, reason: str) -> None:
        """Puts a mirror aside, or one file of it. Said once, not by every thread that was using it."""
        now = time.monotonic()
        with self._aside_lock:
            if not mirror.offers(file or "", now):
                return
            aside = mirror.whole if file is None else mirror.lacking.setdefault(file, _Aside())
            first = file is None or (len(mirror.lacking) == 1 and aside.times == 0)
            lasts_s = aside.extend(now)
        # Of a mirror that has only some of the shards, the first that is missing says enough.
        log.log(
            logging.WARNING if first else logging.INFO,
            "mirror passed over for %.0f s%s (%s)",
            lasts_s,
            "" if file is None else f", for {file}",
            reason.partition("; ")[0],  # what follows is advice for when nobody else could be asked
        )

    def _praise(self, mirror: _Mirror, file: str) -> None:
        with self._aside_lock:
            mirror.lacking.pop(file, None)


def _mirror(address: str, files: RemoteFiles) -> _Mirror:
    return _Mirror(urllib3.util.parse_url(address).netloc or "?", files)
