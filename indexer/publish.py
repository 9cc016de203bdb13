"""How a file appears under its final name: whole, or not at all.

Every file that Deltafin leaves behind goes through `publish`: written under a temporary name in a
directory of the same file system, its data synced, renamed, and the directory synced. A kill at any
instant leaves at most a temporary file, which `clear_stale` removes once its writer is gone.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import re
import shutil
import socket
import stat
import time
from pathlib import Path

from deltafin.errors import DeltafinError, DiskError, NoSpace

_SUFFIX = ".part"
_PID = re.compile(r"[0-9]{1,9}")  # what kill(2) takes, and nobody else's idea of a digit
# Writers on another machine that shares the directory cannot be asked whether they live.
_FOREIGN_AGE_S = 24 * 3600
_counter = itertools.count()
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def temporary(directory: Path, stem: str) -> Path:
    """A new name in `directory`, unique to this process, that says who writes it."""
    return directory / f".{stem}.{this_host()}.{os.getpid()}.{next(_counter)}{_SUFFIX}"


def publish(part: Path, final: Path) -> None:
    """Makes the finished file `part` appear as `final`. On return it survives a power cut."""
    fd = os.open(part, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
    os.replace(part, final)
    sync_directory(final.parent)


def discard(part: Path) -> None:
    """Removes a temporary file, if it is there. For cleaning up: an error here must not hide the one before it."""
    with contextlib.suppress(OSError):
        part.unlink()


def read_small(path: Path, most_nbytes: int) -> bytes:
    """All of a regular file that may come from anywhere. OSError, at once, if it is no file or longer than that."""
    # Opening a named pipe would wait for somebody who writes.
    with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb") as f:
        if not stat.S_ISREG(os.fstat(f.fileno()).st_mode):
            raise OSError(errno.EINVAL, "not a file")
        data = f.read(most_nbytes + 1)
    if len(data) > most_nbytes:
        raise OSError(errno.EINVAL, f"longer than {most_nbytes:,} bytes")
    return data


def make_directory(directory: Path, mode: int = 0o777) -> None:
    """Makes a directory and its parents, of a `mode` like mkdir(2)'s; each new entry survives a power cut."""
    made = []
    while not directory.is_dir():
        made.append(directory)
        directory = directory.parent
    for new in reversed(made):
        new.mkdir(mode, exist_ok=True)
        sync_directory(new.parent)


def sync_directory(directory: Path) -> None:
    fd = os.open(directory, os.O_RDONLY | getattr(os, "O_DIRECTORY", 0))
    try:
        os.fsync(fd)
    except OSError as e:
        if e.errno != errno.EINVAL:  # some network file systems do not sync directories
            raise
    finally:
        os.close(fd)


def clear_stale(directory: Path) -> int:
    """Removes temporary files and folders whose writer no longer lives; returns how many."""
    removed = 0
    for path in stale_files(directory):
        with contextlib.suppress(OSError):
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink()
            removed += 1
    return removed


def stale_files(directory: Path) -> list[Path]:
    """Temporary files and folders whose writer no longer lives."""
    host = this_host()
    found = []
    try:
        entries = list(os.scandir(directory))
    except OSError:
        return []
    for entry in entries:
        fields = entry.name.rsplit(".", 4)
        if not entry.name.endswith(_SUFFIX) or len(fields) != 5:
            continue
        with contextlib.suppress(OSError):
            if fields[1] == host and _PID.fullmatch(fields[2]):
                stale = not is_alive(int(fields[2]))
            else:
                stale = time.time() - entry.stat().st_mtime > _FOREIGN_AGE_S
            if stale:
                found.append(Path(entry.path))
    return found


def disk_error(e: OSError, path: Path, what: str = "cannot write") -> DeltafinError:
    """The error to raise for a failed write or read of `path`."""
    if e.errno in _FULL:
        return NoSpace(f"{path}: {what}: {e.strerror}; free some space or choose another place, then run it again")
    error = DiskError(f"{path}: {what}: {e.strerror or e}")
    error.errno = e.errno
    return error


def this_host() -> str:
    """Where a process number means something: the machine, and the container if there is one. No dot is in it."""
    name = re.sub(r"[^A-Za-z0-9-]", "_", socket.gethostname())[:40] or "host"
    try:
        namespace = "".join(filter(str.isdigit, os.readlink("/proc/self/ns/pid")))
    except OSError:
        namespace = "0"
    return f"{name}-{namespace}"


def is_alive(pid: int) -> bool:
    """Whether a process of `this_host` still runs."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True
