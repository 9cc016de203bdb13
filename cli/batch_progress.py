"""What a batch shows on stderr: answers done, tokens a second, how long it may take; within a pass the layer."""

from __future__ import annotations

import shutil
import sys
import time
from typing import TYPE_CHECKING

from deltafin.cli.progress import human_seconds
from deltafin.runtime import Observer

if TYPE_CHECKING:
    from deltafin.runtime.batch import Batch

_TERMINAL_EVERY_S = 0.2
_LINE_EVERY_S = 30.0


class BatchProgress(Observer):
    """Told of every pass. On a terminal it rewrites one line; elsewhere it prints one now and then."""

    def __init__(self, batch: Batch) -> None:
        self._batch = batch
        self._terminal = sys.stderr.isatty()
        self._printed = time.monotonic()
        self._shown = False
        self._where = ""

    def layer(self, layer: int, num_layers: int) -> None:
        self._where = f", layer {layer + 1} of {num_layers}"
        self.update()

    def update(self) -> None:
        now = time.monotonic()
        if now - self._printed < (_TERMINAL_EVERY_S if self._terminal else _LINE_EVERY_S):
            return
        self._printed = now
        if not self._terminal:
            print(self._status(), file=sys.stderr, flush=True)
            return
        columns = shutil.get_terminal_size().columns
        sys.stderr.write(f"\r\x1b[K{self._status()[: columns - 1]}")
        sys.stderr.flush()
        self._shown = True

    def clear(self) -> None:
        if self._shown:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()
            self._shown = False

    def _status(self) -> str:
        counts, batch = self._batch.counts, self._batch
        done = counts.requests - counts.open
        left = batch.left_s()
        ending = "" if left is None else f", about {human_seconds(left)} left"
        rate = f"{counts.tokens_per_s:.3g} tokens/s" if counts.tokens else "no token yet"
        return f"{done:,} of {counts.requests:,} answered, {batch.under_way} under way, {rate}{ending}{self._where}"
