"""`drives.json`: what was measured of each drive, so that it need not be measured again.

Kept by directory, with the number of the device that was there: a file system that is mounted elsewhere is another one.
"""

from __future__ import annotations

import json
import logging
import math
import os
from dataclasses import asdict, dataclass
from pathlib import Path

from deltafin.indexer import discard, disk_error, make_directory, publish, temporary
from deltafin.store.drive import MOST_DEPTH

log = logging.getLogger(__name__)

STATE_FILE = "drives.json"
_MOST_STATE_NBYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class KnownDrive:
    device: int
    depth: int  # reads at once
    rate: float | None  # bytes a second at that depth


def load_drive(state_file: Path, root: Path) -> KnownDrive | None:
    """What was once measured for the directory `root`, if the same device is still there."""
    known = _load(state_file).get(str(root.absolute()))
    try:
        return known if known is not None and known.device == os.stat(root).st_dev else None
    except OSError:
        return None


def store_drive(state_file: Path, root: Path, depth: int, rate: float | None = None) -> None:
    """Remembers what was measured. Raises NoSpace or DiskError."""
    try:
        device = os.stat(root).st_dev
    except OSError as e:
        raise disk_error(e, root, "cannot look at it") from None
    drives = _load(state_file) | {str(root.absolute()): KnownDrive(device, depth, rate)}
    text = json.dumps({path: asdict(drive) for path, drive in drives.items()}, indent=1)
    part = temporary(state_file.parent, state_file.name)
    try:
        make_directory(state_file.parent)
        part.write_text(text + "\n")
        publish(part, state_file)
    except OSError as e:
        raise disk_error(e, state_file) from None
    finally:
        discard(part)


def _load(state_file: Path) -> dict[str, KnownDrive]:
    """Every drive by directory. Nothing depends on this file: a damaged one is left to be written anew."""
    try:
        if not state_file.is_file() or state_file.stat().st_size > _MOST_STATE_NBYTES:
            if state_file.exists():
                log.warning("%s: not a small file; depths are measured again", state_file)
            return {}
        drives = {}
        for path, known in json.loads(state_file.read_bytes()).items():
            device, depth, rate = known["device"], known["depth"], known.get("rate")
            if not isinstance(device, int) or not isinstance(depth, int) or not 0 < depth <= MOST_DEPTH:
                raise ValueError
            if rate is not None and not (isinstance(rate, int | float) and 0 < rate < math.inf):
                raise ValueError
            drives[path] = KnownDrive(device, depth, rate)
        return drives
    except OSError as e:
        log.warning("%s: cannot be read (%s); depths are measured again", state_file, e.strerror)
        return {}
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        log.warning("%s: damaged; depths are measured again", state_file)
        return {}
