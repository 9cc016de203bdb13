"""Claims: which spans a process is fetching now, so that another one on the same cache takes others first.

A claim is a small file in `<root>/claims`, named by the span's key, that says who fetches it. It is stale, and anybody
may take it over, when its writer no longer lives or has not touched it for a minute. Nothing depends on it: where no
claim can be kept (a read-only or full disk), a span is at worst fetched twice.
"""

from __future__ import annotations

import os
import re
import threading
import time
from contextlib import suppress
from pathlib import Path

from deltafin.indexer import discard, is_alive, this_host

STALE_S = 60.0  # without a touch; also for a process that is frozen, or on a machine that shares the disk
_TOUCH_S = 10.0
_MOST_NBYTES = 200  # of a claim that is read
_BESIDE = ".next"  # the name of a claim that takes over a stale one
_PID = re.compile(r"[0-9]{1,9}")


class Claims:
    """The claims of one root. Thread-safe; close it, or its claims last until this process ends.

    A span is claimed by one thread at a time: a second one of the same process is told, too, that it is taken.
    """

    def __init__(self, root: Path) -> None:
        self._folder = root / "claims"
        self._mine = f"{this_host()} {os.getpid()}\n".encode()
        self._held: set[bytes] = set()
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._made = False  # whether the folder was there once
        self._toucher: threading.Thread | None = None
        self._clear_stale()

    def take(self, key: bytes) -> bool:
        """Claims a span unless somebody has. True also where no claim can be written: then everybody goes ahead."""
        with self._lock:
            if key in self._held:
                return False
            self._held.add(key)
            self._start_touching()
        path = self._path(key)
        try:
            taken = self._create(path) or self._take_over(path)
        except OSError:
            taken = True
        if not taken:
            with self._lock:
                self._held.discard(key)
        return taken

    def is_taken(self, key: bytes) -> bool:
        """Whether somebody is fetching a span, this process included."""
        try:
            claim = _look_at(self._path(key))
        except OSError:
            return False
        return claim is not None and self._lives(*claim)

    def release(self, key: bytes) -> None:
        """Gives a claim back that `take` gave."""
        path = self._path(key)
        with suppress(OSError):
            claim = _look_at(path)
            if claim is not None and claim[0] == self._mine:  # else it was taken over: this process slept for long
                os.unlink(path)
        with self._lock:
            self._held.discard(key)

    def close(self) -> None:
        """Gives all claims back."""
        self._closed.set()
        with self._lock:
            held = list(self._held)
        for key in held:
            self.release(key)
        if self._toucher is not None:
            self._toucher.join()

    def _path(self, key: bytes) -> str:
        return f"{self._folder}/{key.hex()}"

    def _create(self, path: str) -> bool:
        """Writes a claim; False if one is there. Raises OSError where none can be written."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
        try:
            try:
                fd = os.open(path, flags, 0o644)
            except FileNotFoundError:
                # Once, and not its parents: a root whose drive was taken away must not grow anew where it was mounted.
                if self._made:
                    raise
                with suppress(FileExistsError):
                    os.mkdir(self._folder)
                fd = os.open(path, flags, 0o644)
        except FileExistsError:
            return False
        self._made = True
        try:
            os.write(fd, self._mine)
        except OSError:
            discard(Path(path))  # a claim that says nothing would hold others up for a minute
            raise
        finally:
            os.close(fd)
        return True

    def _take_over(self, path: str) -> bool:
        """Puts our claim in the place of a stale one; False if it is not stale, or another is doing the same.

        Who may is whoever creates the file beside it. Inside, the claim is looked at again: somebody may just have
        been here. Raises OSError where nothing can be written.
        """
        claim = _look_at(path)
        if claim is not None and self._lives(*claim):
            return False
        beside = path + _BESIDE
        if not self._create(beside):
            self._remove_if_stale(beside)  # of one that was killed in here
            return False
        try:
            claim = _look_at(path)
            if claim is None:
                os.link(beside, path)  # it was given back, and may be claimed anew
            elif self._lives(*claim):
                return False
            else:
                os.replace(beside, path)
            return True
        except FileExistsError:
            return False
        finally:
            discard(Path(beside))

    def _remove_if_stale(self, path: str) -> None:
        claim = _look_at(path)
        if claim is not None and not self._lives(*claim):
            discard(Path(path))

    def _lives(self, content: bytes, touched: float) -> bool:
        if abs(time.time() - touched) > STALE_S:  # from the future: another clock, which tells nothing
            return False
        host, _, pid = content.decode(errors="replace").strip().partition(" ")
        return host != this_host() or not _PID.fullmatch(pid) or is_alive(int(pid))

    def _clear_stale(self) -> None:
        """What killed processes left; nobody may ever ask for their spans again."""
        names: list[str] = []
        with suppress(OSError):
            names = os.listdir(self._folder)
        for name in sorted(names, key=lambda name: not name.endswith(_BESIDE)):
            path = f"{self._folder}/{name}"
            with suppress(OSError):
                if name.endswith(_BESIDE):
                    self._remove_if_stale(path)
                elif self._take_over(path):
                    discard(Path(path))

    def _start_touching(self) -> None:
        if self._toucher is None and not self._closed.is_set():
            toucher = threading.Thread(target=self._touch, name="claims", daemon=True)
            with suppress(RuntimeError):  # no thread can be started: claims go stale after a minute, that is all
                toucher.start()
                self._toucher = toucher

    def _touch(self) -> None:
        while not self._closed.wait(_TOUCH_S):
            with self._lock:
                held = list(self._held)
            for key in held:
                with suppress(OSError):
                    os.utime(self._path(key))


def _look_at(path: str) -> tuple[bytes, float] | None:
    """What a claim says and when it was touched; None if there is none. OSError if something else is there."""
    try:
        fd = os.open(path, os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | os.O_NONBLOCK)
    except FileNotFoundError:
        return None
    try:
        return os.read(fd, _MOST_NBYTES), os.fstat(fd).st_mtime
    finally:
        os.close(fd)
