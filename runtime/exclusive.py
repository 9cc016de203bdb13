"""A file that one process at a time writes to: its lock goes with the process, however that ends."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
from pathlib import Path

from deltafin.errors import DeltafinError
from deltafin.indexer import disk_error

log = logging.getLogger(__name__)

_NO_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EINVAL)


def lock(fd: int, path: Path) -> None:
    """As long as `fd` is open. Raises DeltafinError if another process has the lock, or DiskError."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise DeltafinError(
            f"{path}: another process is writing to it; wait for it, or choose another output"
        ) from None
    except OSError as e:
        if e.errno not in _NO_LOCKS:
            raise disk_error(e, path, "cannot lock the output") from None
        log.warning("%s: this file system has no locks; see that no other process writes to it", path)


def is_same(fd: int, path: Path) -> bool:
    """Whether the open file is the one that has the name: it may have been moved, removed or replaced."""
    try:
        return os.path.samestat(os.fstat(fd), os.stat(path))
    except FileNotFoundError:
        return False
