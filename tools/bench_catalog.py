#!/usr/bin/env python3
"""Time what looks at all of Kimi K3's 82,432 experts at once: commands on a full-size catalog, without its weights.

    python tools/bench_catalog.py [--runs 5] [--objects] [--dir DIR]

Makes a catalog of K3's layout and an object log that has a digest for every span, proven, and runs each command as a
process of its own. With --objects there is also a file for every span, full-length and empty (sparse), so that listing
them costs what it would. Prints seconds (best, median and worst of the runs), seconds of
the processor (median), and peak memory.
"""

from __future__ import annotations

import argparse
import hashlib
import multiprocessing
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from deltafin.indexer import Blueprint, Location, build_catalog, catalog_path, k3_config, k3_ignored
from deltafin.store import open_store
from deltafin.store.objectlog import ObjectEntry, ObjectLog, pack_record
from deltafin.store.spantable import span_table

NAME = "k3"
COMMAND = "import sys; from deltafin.cli import fetch_main; sys.argv[0] = 'df-fetch'; fetch_main()"


def make(folder: Path, *, objects: bool) -> int:
    """A cache with catalog and log; returns its number of spans."""
    path = catalog_path(folder, NAME)
    if not path.exists():
        source = Blueprint(Location(repo="deltafin/k3-layout", commit="1" * 40), k3_config(), k3_ignored())
        build_catalog(source, path, NAME)
    records = []
    with open_store(NAME, cache_dir=folder, offline=True, environ={}) as store:
        table = span_table(store.catalog)
        for key, nbytes in zip(table.keys(store.shard_ids), table.nbytes.tolist(), strict=True):
            sha256 = hashlib.sha256(key).digest()
            records.append(pack_record(key, ObjectEntry(sha256, sha256[:16], nbytes, proven=True, held=objects)))
            if objects:
                _sparse(folder / "objects" / sha256.hex()[:2] / sha256.hex(), nbytes)
    (folder / "objects.log").write_bytes(b"".join(records))
    return len(records)


def _sparse(path: Path, nbytes: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    fd = os.open(path, os.O_WRONLY | os.O_CREAT, 0o644)
    try:
        os.ftruncate(fd, nbytes)
    finally:
        os.close(fd)


def run(words: list[str]) -> tuple[float, float, int]:
    """Seconds, seconds of the processor and peak bytes of a command that must succeed."""
    started = time.monotonic()
    process = subprocess.Popen(
        [sys.executable, "-c", COMMAND, *words], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    _, status, usage = os.wait4(process.pid, 0)
    took = time.monotonic() - started
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"df-fetch {' '.join(words)}: exit status {process.returncode}")
    return took, usage.ru_utime + usage.ru_stime, usage.ru_maxrss * 1024


def load(path: Path) -> float:
    """Seconds to load a log."""
    started = time.perf_counter()
    ObjectLog(path)
    return time.perf_counter() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--objects", action="store_true", help="also a sparse file for every span")
    parser.add_argument("--dir", type=Path, help="where to make it, and leave it (default: a temporary directory)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.dir or Path(temporary)
        # Not in this process: what it took at its largest would be counted as the commands'.
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
            spans = pool.submit(make, folder, objects=options.objects).result()
            loads = [pool.submit(load, folder / "objects.log").result() for _ in range(options.runs)]
        target = folder / "k3.manifest"
        where = ["--cache-dir", str(folder)]
        commands = {
            "df-fetch status": ["status", NAME, *where],
            "df-fetch status --json": ["status", NAME, "--json", *where],
            "df-fetch manifest export": ["manifest", "export", NAME, "-o", str(target), *where],
            "df-fetch manifest import": ["manifest", "import", NAME, str(target), *where],
            "df-fetch verify --quick": ["verify", NAME, "--quick", *where],
        }
        os.chdir(folder)  # a directory of the catalog's name elsewhere would be taken for the model
        print(f"{spans:,} spans, {'with' if options.objects else 'without'} their files; {options.runs} runs")
        print(f"{'':28}{'best':>8}{'median':>8}{'worst':>8}{'CPU':>8}  peak MB")
        print(_line(f"loading {spans:,} records", loads))
        for label, words in commands.items():
            times, cpu, peaks = zip(*(run(words) for _ in range(options.runs)), strict=True)
            print(f"{_line(label, times)}{statistics.median(cpu):8.2f}  {max(peaks) / 1e6:7.0f}")
        print(f"the manifest has {target.stat().st_size:,} bytes")


def _line(label: str, times: Sequence[float]) -> str:
    return f"{label:28}" + "".join(f"{t:8.2f}" for t in (min(times), statistics.median(times), max(times)))


if __name__ == "__main__":
    main()
