"""Another machine, or another setting, in words: `--what-if ram=128GB,drive=7GB/s`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from deltafin.errors import BadRequest
from deltafin.store import PackFormat

_RATE = re.compile(r"(\d{1,12}(?:\.\d{1,9})?)\s*([KMGT]?)(i?)(bit|b|B)(?:/s|ps)?", re.IGNORECASE)
_SIZE = re.compile(r"(\d{1,12}(?:\.\d{1,9})?)\s*(?:([KMGTP])(i?)B?|B)?", re.IGNORECASE)
_KNOWN = "ram=SIZE, drive=RATE, drives=RATE, cores=N, line=RATE and spine=released, bf16, bf12 or int8"


@dataclass(frozen=True, slots=True)
class Changes:
    """What is otherwise than found here."""

    ram: int | None = None  # the most memory to take
    more_drives: tuple[float, ...] = ()  # bytes a second of drives that are added and hold all of the model, too
    drives: float | None = None  # bytes a second of all drives together, in place of what was measured
    cores: int | None = None
    line: float | None = None  # bytes a second
    spine: str | None = None

    @property
    def any(self) -> bool:
        return self != Changes()


def parse_changes(texts: Sequence[str]) -> Changes:
    """`["ram=128GB,drive=7GB/s"]`; a drive is added with each `drive`, everything else may be said once."""
    changes = Changes()
    said: set[str] = set()
    for part in (part.strip() for text in texts for part in text.split(",")):
        name, equals, value = (piece.strip() for piece in part.partition("="))
        if not equals or not value or name not in ("ram", "drive", "drives", "cores", "line", "spine"):
            raise BadRequest(f"--what-if {part!r}: expected {_KNOWN}")
        if name in said:
            raise BadRequest(f"--what-if {name} is given twice; give it once")
        if name != "drive":
            said.add(name)
        changes = _changed(changes, name, value)
    if changes.drives is not None and changes.more_drives:
        raise BadRequest("--what-if drive has no effect beside drives, which is all drives together; leave one out")
    return changes


def _changed(changes: Changes, name: str, value: str) -> Changes:
    if name == "ram":
        return replace(changes, ram=parse_size(value, "--what-if ram"))
    if name == "drive":
        return replace(changes, more_drives=(*changes.more_drives, parse_rate(value, "--what-if drive")))
    if name == "drives":
        return replace(changes, drives=parse_rate(value, "--what-if drives"))
    if name == "line":
        return replace(changes, line=parse_rate(value, "--what-if line"))
    if name == "cores":
        if not re.fullmatch(r"[1-9]\d{0,3}", value):
            raise BadRequest(f"--what-if cores {value!r}: expected a number from 1 to 9999")
        return replace(changes, cores=int(value))
    if value not in ("released", *PackFormat):
        raise BadRequest(f"--what-if spine {value!r}: expected released, {', '.join(PackFormat)}")
    return replace(changes, spine=value)


def parse_rate(text: str, option: str) -> float:
    """Bytes a second from 100Mbit/s, 1Gbit/s, 7GB/s; a small b alone is refused as ambiguous. Raises BadRequest."""
    m = _RATE.fullmatch(text.strip())
    if m is None or m[4] == "b" or (m[4].lower() == "bit" and m[3]):
        raise BadRequest(f"{option} {text!r} is no rate; write 100Mbit/s, 1Gbit/s or 7GB/s")
    unit = float((1024 if m[3] else 1000) ** " KMGT".index(m[2].upper() or " "))
    rate = float(m[1]) * unit / (8 if m[4].lower() == "bit" else 1)
    if rate <= 0:
        raise BadRequest(f"{option} {text!r}: nothing ever comes at that rate")
    return rate


def parse_size(text: str, option: str) -> int:
    """Bytes from 500MB, 1.5TB, 20GiB or a plain number. Raises BadRequest."""
    m = _SIZE.fullmatch(text.strip())
    if m is None:
        raise BadRequest(f"{option} {text!r} is no size; write 500MB, 1.5TB or a number of bytes")
    nbytes = int(float(m[1]) * (1024 if m[3] else 1000) ** (" KMGTP".index((m[2] or " ").upper())))
    if nbytes <= 0:
        raise BadRequest(f"{option} {text!r}: expected more than nothing")
    return nbytes
