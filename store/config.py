"""Which directories are roots, and what may be written there: `--root` and the configuration file.

[cache]                     # the directory that is always a root and is written first
budget = "400GB"
reserve = "20GB"

[[root]]
path = "/mnt/nvme2/deltafin"
write = true
budget = "1.2TB"
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from deltafin.errors import BadRequest, NotFound
from deltafin.indexer import read_small

_MOST_NBYTES = 1 << 20  # of a configuration file
_MOST_PATH = 4000  # characters
_SIZE = re.compile(r"(\d{1,18}(?:\.\d{1,18})?)\s*(?:([KMGTP])(i?)B?|B)?", re.IGNORECASE)
_OPTION = re.compile(r"(?:(budget|reserve)=(.*)|write)")


@dataclass(frozen=True, slots=True)
class Limits:
    """What a directory may take, in bytes. `reserve` stays free on its disk; None is the default (`Space`)."""

    budget: int | None = None
    reserve: int | None = None


@dataclass(frozen=True, slots=True)
class RootSpec:
    """A directory with objects or original shards; with `write` objects are also kept there."""

    path: Path
    write: bool = False
    limits: Limits = Limits()
    origin: str = ""  # where it was asked for, for messages


@dataclass(frozen=True, slots=True)
class Config:
    cache: Limits = Limits()
    roots: tuple[RootSpec, ...] = ()


def parse_nbytes(text: str) -> int | None:
    """500MB, 1.5TB, 20GiB or a plain number; None for anything else."""
    m = _SIZE.fullmatch(text.strip())
    if m is None:
        return None
    base = 1024 if m[3] else 1000
    return int(float(m[1]) * base ** ("KMGTP".index(m[2].upper()) + 1 if m[2] else 0))


def parse_root(text: str) -> RootSpec:
    """`DIR` or `DIR,write,budget=500GB,reserve=20GB`. Raises BadRequest."""
    origin = f"--root {text}"
    words = [] if _is_directory(_expanded(text, origin)) else text.split(",")
    options: list[re.Match[str]] = []
    while len(words) > 1 and (m := _OPTION.fullmatch(words[-1])) is not None:
        options.append(m)
        words.pop()
    sizes: dict[str, int] = {}
    write = False
    for m in options:
        if m[1] is None:
            write = True
        elif m[1] in sizes:
            raise BadRequest(f"{origin}: {m[1]} is given twice")
        else:
            sizes[m[1]] = _nbytes(m[2], f"{origin}: {m[1]}")
    return _spec(Path(",".join(words) or text), write, Limits(**sizes), origin)


def read_config(environ: Mapping[str, str]) -> Config:
    """The file DELTAFIN_CONFIG, else `deltafin/config.toml` among the user's, if it is there.

    Raises NotFound (the named one is not), BadRequest (file and key in the message).
    """
    path = _config_path(environ)
    if path is None:
        return Config()
    try:
        known = tomllib.loads(read_small(path, _MOST_NBYTES).decode())
    except FileNotFoundError:
        raise NotFound(f"DELTAFIN_CONFIG={path}: no such file") from None
    except OSError as e:
        raise NotFound(f"{path}: cannot be read ({e.strerror})") from None
    except ValueError as e:  # not only TOMLDecodeError: text that is no UTF-8, numbers of thousands of digits
        raise BadRequest(f"{path}: not TOML: {str(e)[:200]}") from None
    except RecursionError:
        raise BadRequest(f"{path}: nested too deeply") from None
    _check_keys(known, ("cache", "root"), str(path))
    cache, roots = known.get("cache", {}), known.get("root", [])
    if not isinstance(cache, dict):
        raise BadRequest(f"{path}: cache: expected a table, [cache]")
    if not isinstance(roots, list) or not all(isinstance(root, dict) for root in roots):
        raise BadRequest(f"{path}: root: expected tables, each headed [[root]]")
    _check_keys(cache, ("budget", "reserve"), f"{path}: [cache]")
    return Config(
        _limits(cache, f"{path}: [cache]"),
        tuple(_root(root, f"{path}: [[root]] number {n}") for n, root in enumerate(roots, 1)),
    )


def chosen_roots(config: Config, given: Sequence[RootSpec], cache: Path) -> tuple[RootSpec, ...]:
    """All roots beside the cache, those of the command line first; they replace entries of the file.

    Raises NotFound for a directory that is not there: made anew on the disk below a missing mount it would fill that.
    """
    chosen: dict[Path, RootSpec] = {}
    for spec in (*given, *config.roots):
        if not _is_directory(spec.path):
            raise NotFound(f"{spec.origin}: no such directory")
        real = spec.path.resolve()
        if real == cache.resolve() and (spec.write or spec in config.roots):
            raise BadRequest(f"{spec.origin}: is the cache directory, a root already; its limits go under [cache]")
        if real in chosen and (spec in given) == (chosen[real] in given):
            raise BadRequest(f"{spec.origin}: is the same directory as {chosen[real].origin}")
        chosen.setdefault(real, spec)
    return tuple(chosen.values())


def _config_path(environ: Mapping[str, str]) -> Path | None:
    if given := environ.get("DELTAFIN_CONFIG"):
        return _expanded(given, "DELTAFIN_CONFIG")
    home = environ.get("XDG_CONFIG_HOME") or (f"{environ['HOME']}/.config" if environ.get("HOME") else None)
    if home is None or not (path := Path(home) / "deltafin" / "config.toml").is_file():
        return None
    return path


def _root(known: Mapping[str, object], origin: str) -> RootSpec:
    _check_keys(known, ("path", "budget", "reserve", "write"), origin)
    path, write = known.get("path"), known.get("write", False)
    if not isinstance(path, str) or not path or "\0" in path:
        raise BadRequest(f"{origin}: path: expected a directory as a string")
    if not _expanded(path, origin).is_absolute():
        raise BadRequest(f"{origin}: path {path!r}: expected an absolute path")
    if not isinstance(write, bool):
        raise BadRequest(f"{origin}: write: expected true or false")
    return replace(_spec(Path(path), write, _limits(known, origin), origin), origin=f"{origin}: path {path}")


def _spec(path: Path, write: bool, limits: Limits, origin: str) -> RootSpec:
    if limits != Limits() and not write:
        raise BadRequest(f"{origin}: budget and reserve have no effect where nothing is written; add write")
    if len(str(path)) > _MOST_PATH:
        raise BadRequest(f"{origin[:200]}: a path of {len(str(path)):,} characters is too long")
    return RootSpec(_expanded(str(path), origin), write, limits, origin)


def _expanded(text: str, origin: str) -> Path:
    try:
        return Path(text).expanduser()
    except RuntimeError as e:  # ~ of somebody who is not known here
        raise BadRequest(f"{origin}: {text[:200]}: {e}") from None


def _is_directory(path: Path) -> bool:
    try:
        return path.is_dir()
    except OSError:  # a name that is too long for any file
        return False


def _limits(known: Mapping[str, object], origin: str) -> Limits:
    sizes = {name: _nbytes(known[name], f"{origin}: {name}") for name in ("budget", "reserve") if name in known}
    return Limits(**sizes)


def _nbytes(value: object, where: str) -> int:
    nbytes = value if type(value) is int else parse_nbytes(value) if isinstance(value, str) else None
    if nbytes is None or nbytes < 0:
        raise BadRequest(f"{where}: {value!r} is no size; expected one like 800GB")
    return nbytes


def _check_keys(known: Mapping[str, object], allowed: Collection[str], origin: str) -> None:
    for key in known:
        if key not in allowed:
            raise BadRequest(f"{origin}: unknown key {key!r}; known are {', '.join(allowed)}")
