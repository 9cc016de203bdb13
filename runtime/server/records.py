"""Small JSON files that say what there is: each appears whole, and what is on the drive is what counts."""

from __future__ import annotations

import logging
import os
import re
import secrets
from collections.abc import Iterator
from pathlib import Path

from deltafin.errors import BadRequest
from deltafin.indexer import discard, disk_error, publish, read_small, temporary
from deltafin.runtime.openai import parse, write_line

log = logging.getLogger(__name__)

MOST_RECORD_NBYTES = 1 << 20
_PART = re.compile(r"\..*\.part", re.DOTALL)


def new_id(prefix: str) -> str:
    """A name that nobody can guess, and that is safe in a path."""
    return prefix + secrets.token_hex(12)


def write_record(path: Path, value: dict[str, object]) -> None:
    """When this returns, it is on the drive. Raises NoSpace or DiskError, and leaves what was there."""
    part = temporary(path.parent, path.name)
    try:
        with open(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(write_line(value))
        publish(part, path)
    except OSError as e:
        raise disk_error(e, path) from None
    finally:
        discard(part)


def read_records(folder: Path, prefix: str) -> Iterator[tuple[str, dict[str, object]]]:
    """Every record whose name is one of `new_id(prefix)`. One that cannot be read is said and passed over."""
    name = re.compile(re.escape(prefix) + "[0-9a-f]{24}[.]json", re.ASCII)
    for path in sorted(folder.iterdir()):
        if not name.fullmatch(path.name):
            continue
        try:
            value = parse(read_small(path, MOST_RECORD_NBYTES))
        except (OSError, BadRequest) as e:
            log.warning("%s cannot be read and is left alone: %s", path, e)
            continue
        if isinstance(value, dict):
            yield path.stem, value
        else:
            log.warning("%s is no record and is left alone", path)


def clear_parts(folder: Path) -> None:
    """Removes what was never finished. For a folder that only this process writes to."""
    for path in folder.iterdir():
        if _PART.fullmatch(path.name):
            discard(path)
