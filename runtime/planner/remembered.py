"""Two small files in the cache directory: what was measured of this machine, and how plans compared with runs.

Both are advisory. A damaged one is ignored, with a line, and written anew; nothing else depends on them.
"""

from __future__ import annotations

import json
import logging
import os
import platform
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path

from deltafin.indexer import discard, disk_error, make_directory, publish, temporary
from deltafin.runtime.planner.machine import FORMATS, ROWS, Figures, Kernels, Overheads
from deltafin.store import DriveProbe

log = logging.getLogger(__name__)

FIGURES_FILE = "probes.json"
OUTCOMES_FILE = "plans.json"
MOST_OUTCOMES = 64
FRESH_S = 7 * 24 * 3600.0  # figures older than that are measured again
_MOST_NBYTES = 1 << 20
_VERSION = 1


@dataclass(frozen=True, slots=True)
class Outcome:
    """One run: seconds a token as the plan had them and as they came."""

    at: float  # unix time
    command: str
    model: str  # the identity of its weights
    tokens: int  # that were averaged
    predicted_s: float
    measured_s: float

    @property
    def error(self) -> float:
        """Of the prediction: 0.1 is a tenth too long."""
        return self.predicted_s / self.measured_s - 1


def load_figures(cache: Path, *, isa: str, threads: int, fresh_s: float = FRESH_S) -> Figures | None:
    """What was measured of this machine with these kernels and threads, if that is not too long ago."""
    found = _read(cache / FIGURES_FILE)
    if found is None:
        return None
    try:
        if found.get("machine") != _machine():
            return None
        figures = _figures(found)
    except (ValueError, LookupError, TypeError, AttributeError):
        log.warning("%s: damaged, ignored; df-plan measures again", cache / FIGURES_FILE)
        return None
    fits = (figures.kernels.isa, figures.kernels.threads) == (isa, threads)
    return figures if fits and 0 <= time.time() - figures.measured_at < fresh_s else None


def save_figures(cache: Path, figures: Figures) -> None:
    """Raises NoSpace or DiskError."""
    _write(cache / FIGURES_FILE, {"version": _VERSION, "machine": _machine(), **asdict(figures)})


def load_outcomes(cache: Path) -> list[Outcome]:
    """The last runs that were compared with their plans, oldest first."""
    found = _read(cache / OUTCOMES_FILE)
    if found is None:
        return []
    try:
        outcomes = _outcomes(found["runs"])
    except (ValueError, LookupError, TypeError, AttributeError):
        log.warning("%s: damaged, ignored; it is written anew after the next run", cache / OUTCOMES_FILE)
        return []
    return outcomes[-MOST_OUTCOMES:]


def add_outcome(cache: Path, outcome: Outcome) -> None:
    """Two processes that add at the same time may lose one. Raises NoSpace or DiskError."""
    kept = [*load_outcomes(cache), outcome][-MOST_OUTCOMES:]
    _write(cache / OUTCOMES_FILE, {"version": _VERSION, "runs": [asdict(one) for one in kept]})


def median_error(outcomes: Sequence[Outcome]) -> float | None:
    """The median of the errors' sizes, whichever way they are off."""
    return statistics.median(abs(one.error) for one in outcomes) if outcomes else None


# ---- files -----------------------------------------------------------------------------------------------


def _machine() -> dict[str, object]:
    """Caches are shared between machines, copied, and restored on others."""
    name = platform.processor()
    try:
        lines = Path("/proc/cpuinfo").read_text(errors="replace").splitlines()
        name = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), name)
    except OSError:
        pass
    return {"host": platform.node(), "processor": name, "cores": os.cpu_count()}


def _read(path: Path) -> dict[str, object] | None:
    try:
        if not path.is_file():
            return None
        if path.stat().st_size > _MOST_NBYTES:
            raise ValueError
        found = json.loads(path.read_bytes())
        if not isinstance(found, dict):
            raise ValueError
    except OSError as e:
        log.warning("%s: cannot be read (%s); ignored", path, e.strerror)
        return None
    except (ValueError, RecursionError):
        log.warning("%s: damaged, ignored; it is written anew", path)
        return None
    return found if found.get("version") == _VERSION else None


def _write(path: Path, content: dict[str, object]) -> None:
    part = temporary(path.parent, path.name)
    try:
        make_directory(path.parent)
        part.write_text(json.dumps(content, indent=1) + "\n")
        publish(part, path)
    except OSError as e:
        raise disk_error(e, path) from None
    finally:
        discard(part)


def _figures(found: dict[str, object]) -> Figures:
    kernels, overheads, drives = found["kernels"], found["overheads"], found["drives"]
    if not (isinstance(kernels, dict) and isinstance(overheads, dict) and isinstance(drives, list)):
        raise TypeError
    if not (isinstance(kernels, dict) and isinstance(overheads, dict) and isinstance(drives, list)):
        raise TypeError
    seconds = {str(f): tuple(_positive(s) for s in times) for f, times in kernels["seconds"].items()}
    if {*seconds} != FORMATS or any(len(times) != len(ROWS) for times in seconds.values()):
        raise ValueError
    rates = {name: _positive(kernels[name]) for name in ("memory_rate", "hash_rate")}
    return Figures(
        measured_at=_positive(found["measured_at"]),
        kernels=Kernels(str(kernels["isa"]), int(kernels["threads"]), seconds, **rates),
        overheads=Overheads(**{f.name: _positive(overheads[f.name], or_zero=True) for f in fields(Overheads)}),
        drives=tuple(_drive(drive) for drive in drives),
        load=_positive(found["load"], or_zero=True),
    )


def _drive(found: dict[str, object]) -> DriveProbe:
    drive = DriveProbe(**{f.name: found[f.name] for f in fields(DriveProbe)})  # type: ignore[arg-type]
    if not isinstance(drive.path, str) or not isinstance(drive.device, int):
        raise TypeError
    return replace(drive, rate=None if drive.rate is None else _positive(drive.rate))


def _outcomes(found: object) -> list[Outcome]:
    if not isinstance(found, list):
        raise TypeError
    return [_outcome(one) for one in found]


def _outcome(found: dict[str, object]) -> Outcome:
    tokens = found["tokens"]
    if not isinstance(tokens, int):
        raise TypeError
    return Outcome(
        _positive(found["at"]),
        str(found["command"]),
        str(found["model"]),
        tokens,
        _positive(found["predicted_s"]),
        _positive(found["measured_s"]),
    )


def _positive(value: object, *, or_zero: bool = False) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool) or not value >= 0 or value == float("inf"):
        raise ValueError
    if value == 0 and not or_zero:
        raise ValueError
    return float(value)
