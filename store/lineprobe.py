"""How fast does the line bring a model's bytes? A few seconds of ranges, thrown away."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import count

from deltafin.errors import Missing
from deltafin.indexer import Source

SECONDS = 4.0
THREADS = 8
FIRST_NBYTES = 512 << 10  # of a range; so little that a slow line has brought one of each thread in time
MOST_NBYTES = 8 << 20
QUICK_S = 1.0  # a range that was here sooner is followed by one twice as long


def probe_line(source: Source, *, seconds: float = SECONDS) -> float:
    """Bytes a second, over parallel ranges of the largest file. Keeps nothing. Raises NetworkError, Missing."""
    files = source.shard_files()
    file = max(files, key=lambda shard: shard.nbytes or 0)
    file_nbytes = file.nbytes
    if file_nbytes is None:  # the server tells sizes only with its answers
        _, answer = source.read(file, 0, 8)
        file_nbytes = answer.file_nbytes or 0
    if file_nbytes < FIRST_NBYTES:
        raise Missing(f"{file.name}: too small to measure a line with; give its rate with --line")
    last_start = file_nbytes - FIRST_NBYTES
    started = time.monotonic()
    end = started + seconds
    lock, numbers = threading.Lock(), count()
    total = 0
    last = started

    def work(_number: int) -> None:
        nonlocal total, last, end
        nbytes = FIRST_NBYTES
        try:
            while (begun := time.monotonic()) < end:
                offset = next(numbers) * MOST_NBYTES % (last_start + 1)
                data, _ = source.read(file, offset, min(nbytes, file_nbytes - offset))
                with lock:
                    total += len(data)
                    last = time.monotonic()
                if last - begun < QUICK_S:
                    nbytes = min(2 * nbytes, MOST_NBYTES)
        finally:
            end = 0.0  # after a failure, or Ctrl-C, nobody waits for the others' time

    with ThreadPoolExecutor(THREADS, "line") as pool:
        list(pool.map(work, range(THREADS)))
    return total / (last - started)
