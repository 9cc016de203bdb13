"""What df-run shows while a token is being computed: the layer and the bytes read so far.

Beside streamed text on a terminal the status stands behind the cursor and is wiped before the next
piece of text; on a terminal of its own it rewrites one line; elsewhere it is a line now and then.
"""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

import numpy as np
import numpy.typing as npt

from deltafin.cli.progress import human_nbytes
from deltafin.runtime import Observer, RowSpan

if TYPE_CHECKING:
    from deltafin.store import Store

_TERMINAL_EVERY_S = 0.1
_LINE_EVERY_S = 30.0
_QUIET_S = 0.5  # a token that is there sooner needs no status


class Cursor(Protocol):
    """Where streamed text has left the cursor, of stdout and of stderr."""

    column: int
    error_column: int


class Watch(Observer):
    """Hands everything on to `inner` and shows how far the pass is."""

    def __init__(self, store: Store, inner: Observer | None, cursor: Cursor) -> None:
        self._store, self._inner, self._cursor = store, inner, cursor
        self._terminal = sys.stderr.isatty()
        self._one_terminal = self._terminal and sys.stdout.isatty()
        self._shown = self._beside = False  # whether a status is there, and whether text stands before it
        self._token = 0
        self._pass = 0  # of this token: a prompt may take several
        self._began = self._printed = time.monotonic()
        self._nbytes_before = 0

    def rows(self, spans: Sequence[RowSpan]) -> None:
        self._pass += 1
        self._began = time.monotonic()
        self._nbytes_before = self._nbytes()
        if self._inner is not None:
            self._inner.rows(spans)

    def layer(self, layer: int, num_layers: int) -> None:
        now = time.monotonic()
        every = _TERMINAL_EVERY_S if self._terminal else _LINE_EVERY_S
        if now - self._began >= _QUIET_S and now - self._printed >= every:
            self._printed = now
            read = human_nbytes(self._nbytes() - self._nbytes_before)
            number = f"pass {self._pass}, " if self._pass > 1 else ""
            self._show(f"token {self._token + 1}: {number}layer {layer + 1} of {num_layers}, {read}{self._waiting()}")
        if self._inner is not None:
            self._inner.layer(layer, num_layers)

    def routes(self, layer: int, ids: npt.NDArray[np.int32], weights: npt.NDArray[np.float32]) -> None:
        if self._inner is not None:
            self._inner.routes(layer, ids, weights)

    def finished(self) -> None:
        if self._inner is not None:
            self._inner.finished()

    def token(self, count: int) -> None:
        """`count` tokens are out; the status goes before text follows."""
        self._token = count
        self._pass = 0
        self.clear()

    def clear(self) -> None:
        if self._shown:
            sys.stderr.write("\x1b[K" if self._beside else "\r\x1b[K")
            sys.stderr.flush()
            self._shown = False

    def _show(self, status: str) -> None:
        if not self._terminal:
            print(status, file=sys.stderr, flush=True)
            return
        columns = shutil.get_terminal_size().columns
        column = self._cursor.column if self._one_terminal else self._cursor.error_column
        self._beside = self._one_terminal or column > 0
        if not self._beside:
            sys.stderr.write(f"\r\x1b[K{status[: columns - 1]}")
        elif (room := columns - column % columns - 4) > 0:
            # Save the cursor, write behind it, come back: the text goes on where it was.
            sys.stderr.write(f"\x1b7  {status[:room]}\x1b[K\x1b8")
        sys.stderr.flush()
        self._shown = True

    def _nbytes(self) -> int:
        return self._store.stats.read_nbytes

    def _waiting(self) -> str:
        pause_s = self._store.pause_left_s
        return f", the server asks to wait {pause_s:.0f} s" if pause_s else ""
