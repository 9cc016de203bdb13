"""Is anything wrong with this installation? Looks, changes nothing but a temporary file, and asks no server."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import resource
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from deltafin import __version__
from deltafin.cext import _math
from deltafin.errors import DeltafinError, OldCatalog
from deltafin.indexer import Catalog, catalog_path, parse_model, stale_files
from deltafin.runtime.memory import available_nbytes, cgroup_left
from deltafin.store import (
    ObjectLog,
    PackFormat,
    RootSpec,
    asked_roots,
    direct_reads,
    file_system,
    free_nbytes,
    is_offline,
    open_store,
    read_config,
    read_result,
)

# The shards of Kimi K3, sockets, and what a program has open anyway.
NEEDED_FILES = 256
LITTLE_SPACE_NBYTES = 2_000_000_000
LITTLE_MEMORY_NBYTES = 1_400_000_000  # Kimi K3 needs 1.3 GB
OLD_VERIFY_S = 90 * 24 * 3600.0
_LIBRARIES = ("numpy", "torch", "lmdb", "requests", "xxhash", "zstandard", "tiktoken", "huggingface_hub")
_PROXIES = ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY")
_WIDE = {"avx512f": "avx512", "avx2": "avx2", "asimd": "neon"}  # flags of a processor -> kernels for it


@dataclass(frozen=True, slots=True)
class Fact:
    """One line of what was found."""

    topic: str
    text: str


@dataclass(frozen=True, slots=True)
class Finding:
    """Something that needs attention, and what to do."""

    topic: str
    what: str
    do: str


@dataclass(slots=True)
class Report:
    facts: list[Fact] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)

    def say(self, topic: str, text: str) -> None:
        self.facts.append(Fact(topic, text))

    def find(self, topic: str, what: str, do: str) -> None:
        self.findings.append(Finding(topic, what, do))

    @property
    def fine(self) -> bool:
        return not self.findings


def examine(
    model: str, *, cache: Path, roots: Sequence[RootSpec], revision: str | None, environ: Mapping[str, str] = os.environ
) -> Report:
    """Everything that can be told without a server. Raises only for a model's name that makes no sense."""
    ref = parse_model(model, cache, revision=revision)
    report = Report()
    _versions(report)
    _processor(report)
    _memory(report)
    _limits(report)
    every = _every_root(report, roots, environ)
    _root(report, cache.expanduser(), writable=True)
    for root in every:
        if not os.path.exists(root.path):  # also False for a name that is too long
            report.find("root", f"{root.origin}: no such directory", "mount its drive, or leave it out")
        elif root.path.resolve() != cache.resolve():
            _root(report, root.path, writable=root.write)
    catalog = catalog_path(cache, ref.name)
    if _catalog(report, model, catalog):
        _store(report, model, cache, [root for root in roots if root.path.is_dir()], revision, environ)
    elif ref.repo is None:
        report.say("catalog", f"{model}: built when it is first used")
    else:
        report.say("catalog", f"none of {model} yet; df-index build {model} makes it")
    _network(report, environ)
    return report


# ---- the program and the machine ---------------------------------------------------------------------------


def _versions(report: Report) -> None:
    system = f"{platform.system()} {platform.release()}, {platform.machine()}"
    report.say("version", f"deltafin {__version__}, Python {platform.python_version()}, {system}")
    found = []
    for name in _LIBRARIES:
        try:
            found.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            found.append(f"no {name}")
    report.say("library", ", ".join(found))


def _processor(report: Report) -> None:
    offered = sorted({kernels for flag, kernels in _WIDE.items() if flag in _flags()})
    cores, usable = psutil.cpu_count(), len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None
    usable_text = f", {usable} of them for this process" if usable not in (None, cores) else ""
    report.say(
        "kernels",
        f"{_math.isa()} in use, of {', '.join(_math.isas())}; the processor offers "
        f"{', '.join(offered) or 'nothing wider that is known'}; {_math.threads()} threads, {cores} cores{usable_text}",
    )
    if _math.isa() == "scalar":
        do = "a processor with AVX2, AVX-512 or NEON has them; the answers are the same"
        if len(_math.isas()) > 1:
            do = "unset DELTAFIN_ISA; the answers are the same"
        report.find("kernels", "plain kernels are in use, many times slower than this program can be", do)
    if usable is not None and _math.threads() > usable:
        report.find(
            "kernels",
            f"{_math.threads()} threads compute on {usable} cores",
            f"give --threads {usable}, or let the process have more cores",
        )


def _flags() -> set[str]:
    try:
        lines = Path("/proc/cpuinfo").read_text(errors="replace").splitlines()
    except OSError:
        return set()
    line = next((line for line in lines if line.startswith(("flags", "Features"))), "")
    return set(line.partition(":")[2].split())


def _memory(report: Report) -> None:
    memory, available = psutil.virtual_memory(), available_nbytes()
    groups = cgroup_left()
    limit = f", control groups leave {min(groups) / 1e9:.1f} GB" if groups else ", no control group limits it"
    swap = psutil.swap_memory().used
    here = f"{memory.total / 1e9:.1f} GB, {available / 1e9:.1f} GB available"
    report.say("memory", f"{here}{limit}; swap in use {swap / 1e9:.1f} GB")
    if available < LITTLE_MEMORY_NBYTES:
        report.find(
            "memory",
            f"{available / 1e9:.2f} GB are available, and Kimi K3 needs 1.3 GB",
            "close other programs, or raise the limit of the control group",
        )


def _limits(report: Report) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    address, _ = resource.getrlimit(resource.RLIMIT_AS)
    size, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    report.say(
        "limits",
        f"open files {_limit(soft)} (at most {_limit(hard)}), address space {_limit(address)}, "
        f"file size {_limit(size)}, locked memory {_limit(locked)}",
    )
    if soft != resource.RLIM_INFINITY and soft < NEEDED_FILES:
        report.find("limits", f"open files: need {NEEDED_FILES}, have {soft}", f"run: ulimit -n {NEEDED_FILES * 4}")
    if size != resource.RLIM_INFINITY and size < 64 << 20:
        report.find("limits", f"no file may be longer than {size} bytes", "run: ulimit -f unlimited")


def _limit(value: int) -> str:
    return "unlimited" if value == resource.RLIM_INFINITY else f"{value:,}"


def _every_root(report: Report, given: Sequence[RootSpec], environ: Mapping[str, str]) -> list[RootSpec]:
    """The roots that were given, and those of the configuration file, in the order in which they are asked."""
    try:
        named = read_config(environ).roots
    except DeltafinError as e:
        report.find("config", str(e), "correct the file: no command that opens a model works meanwhile")
        named = ()
    roots: dict[Path, RootSpec] = {}
    for root in (*given, *named):
        roots.setdefault(root.path.resolve(), root)
    return list(roots.values())


# ---- directories ---------------------------------------------------------------------------------------------


def _root(report: Report, path: Path, *, writable: bool) -> None:
    there = path
    while not there.exists() and there != there.parent:
        there = there.parent
    if not there.is_dir():
        report.find("root", f"{there} is not a directory", "move it away, or choose another --cache-dir")
        return
    _leftovers(report, path)  # before anything opens the root and removes them
    free = free_nbytes(there)
    may_write = os.access(there, os.W_OK)
    works, why = direct_reads(path) if may_write else (None, "not tried: nothing may be written there")
    direct = {True: "direct reads work", False: "no direct reads", None: "direct reads"}[works]
    text = f"{path}: {file_system(there)}, {free / 1e9:.1f} GB free, {'' if may_write else 'not '}writable, {direct}"
    report.say("root", text + (f" ({why})" if why else "") + ("" if there == path else "; made when it is needed"))
    if writable and not may_write:
        report.find("root", f"{path} cannot be written to", "change its owner or mode, or choose another --cache-dir")
    if writable and free < LITTLE_SPACE_NBYTES:
        report.find("root", f"{path} has {free / 1e9:.2f} GB free", "free some space, or choose another --cache-dir")
    if works is False:
        report.find(
            "root", f"{path}: direct reads are refused ({why})", "use another file system for what is read most"
        )
    _log(report, path)
    _last_verify(report, path)


def _leftovers(report: Report, path: Path) -> None:
    stale = [file for folder in ("tmp", "catalogs", ".") for file in stale_files(path / folder)]
    if stale:
        report.find(
            "root",
            f"{path}: {len(stale):,} temporary files of writers that no longer live, {_nbytes(stale) / 1e6:.1f} MB",
            "nothing: they are removed when the cache is next written to; something was killed, though",
        )
    kept = [file for file in (path / "quarantine").glob("*") if file.is_file()]
    if kept:
        report.find(
            "root",
            f"{path / 'quarantine'}: {len(kept):,} files that were found damaged, {_nbytes(kept) / 1e6:.1f} MB",
            "check the drive and its cable, then remove them; what they held is fetched again when it is needed",
        )


def _nbytes(files: Sequence[Path]) -> int:
    total = 0
    for file in files:
        with suppress(OSError):
            total += file.stat().st_size
    return total


def _log(report: Report, path: Path) -> None:
    if not (path / "objects.log").exists():
        return
    try:
        log = ObjectLog(path / "objects.log")
    except DeltafinError as e:
        report.find("log", str(e), "move it away: objects without a record are fetched again")
        return
    bad = log.bad_records
    report.say("log", f"{path}: {len(log.entries):,} spans on record, {bad:,} damaged records")
    if bad:
        report.find(
            "log",
            f"{path / 'objects.log'}: {bad:,} damaged records are skipped",
            "what they named is fetched again when it is needed; run df-fetch verify, and check the drive",
        )


def _last_verify(report: Report, path: Path) -> None:
    file = path / "verify.json"
    found = read_result(path)
    if found is None:
        if os.path.lexists(file):
            report.say("verify", f"{file}: unreadable, ignored; the next df-fetch verify writes it anew")
        elif (path / "objects.log").exists():
            report.say("verify", f"{path}: never")
        return
    finished, damaged, model = found["finished"], found["damaged"], found["model"]
    assert isinstance(finished, int)
    assert isinstance(damaged, list)
    days, bad = (time.time() - finished) / 86400, len(damaged)
    repaired = ", repaired" if bad and found["sound"] else ""
    report.say("verify", f"{path}: {days:.0f} days ago, {found['mode']}, {model}: {bad:,} damaged{repaired}")
    if not found["sound"]:
        what = f"{bad:,} damaged" if bad else "what could not be repaired"
        report.find("verify", f"{path}: the last verify found {what}", f"run: df-fetch verify {model} --repair")
    if days * 86400 > OLD_VERIFY_S:
        report.find("verify", f"{path}: the last verify is {days:.0f} days old", f"run: df-fetch verify {model}")


# ---- the model -----------------------------------------------------------------------------------------------


def _catalog(report: Report, model: str, path: Path) -> bool:
    """Whether there is a catalog that is whole."""
    if not path.exists():
        return False
    try:
        with Catalog(path) as catalog:
            report.say("catalog", f"{path.name}: {catalog.identity}, whole, {path.stat().st_size / 1e6:.1f} MB")
            return True
    except OldCatalog as e:
        report.find("catalog", str(e), f"run: df-index build {model}")
    except DeltafinError as e:
        report.find("catalog", str(e), f"run: df-index build {model}")
    return False


def _store(
    report: Report,
    model: str,
    cache: Path,
    roots: Sequence[RootSpec],
    revision: str | None,
    environ: Mapping[str, str],
) -> None:
    try:
        asked_roots(roots, cache, environ)
    except DeltafinError:
        return  # said already: no command can open it
    try:
        with open_store(model, cache_dir=cache, roots=roots, offline=True, revision=revision, environ=environ) as store:
            for folder in store.shard_directories:
                here = sum(folder.has(number) for number in range(len(store.catalog.shards)))
                if not here and not folder.required:
                    continue  # a root of objects alone
                report.say("shards", f"{folder.path}: {here} of {len(store.catalog.shards)} shards as indexed")
                if here < len(store.catalog.shards) and folder.required:
                    report.find(
                        "shards", f"{folder.path}: shards are missing or changed", f"run: df-index check {model}"
                    )
            for format in PackFormat:
                packs = store.packs(format)
                if packs.packs:
                    layers = store.catalog.config.num_layers
                    report.say("packs", f"{format.label}: {len(packs.packs)} of {layers} layers")
                for complaint in packs.complaints:
                    report.find("packs", complaint, f"run: df-fetch spine {model} --as {format}")
    except DeltafinError as e:
        report.find("model", str(e), f"run: df-index check {model}")


def _network(report: Report, environ: Mapping[str, str]) -> None:
    offline = is_offline(environ)
    proxies = [name for name in environ if name.upper() in _PROXIES and environ[name]]  # values may hold passwords
    token = "set" if _has_token(environ) else "none"
    endpoint = "HF_ENDPOINT is set" if environ.get("HF_ENDPOINT") else "the hub's own address"
    report.say(
        "network",
        f"{'offline by HF_HUB_OFFLINE' if offline else 'not asked'}; token {token}; {endpoint}; proxies "
        f"{', '.join(sorted(proxies)) or 'none'}",
    )


def _has_token(environ: Mapping[str, str]) -> bool:
    """As huggingface_hub finds it; the token itself is not looked at."""
    if environ.get("HF_TOKEN") or environ.get("HUGGING_FACE_HUB_TOKEN"):
        return True
    home = environ.get("HF_HOME") or str(Path(environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "huggingface")
    file = Path(environ.get("HF_TOKEN_PATH") or Path(home).expanduser() / "token")
    try:
        return file.stat().st_size > 0
    except OSError:
        return False
