"""From the last hidden vectors to logits, one tile of the vocabulary at a time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from deltafin.cext import _math
from deltafin.runtime.native.products import Floats, multiply
from deltafin.store import Bf16, Block

# Part of the arithmetic: the sum of exponentials goes tile by tile, counted from vocabulary row 0.
SUM_TILE = 1024


def logits(y: Floats, blocks: Iterator[Block], vocab_size: int) -> Floats:
    """[rows, vocab] for y [rows, hidden]."""
    out = np.empty((len(y), vocab_size), np.float32)
    for block in blocks:
        multiply(out, y, block)
    return out


@dataclass(frozen=True, slots=True)
class Scored:
    """Each row's target, and what stood against it."""

    log_probs: Floats  # [rows], of the targets
    likeliest: npt.NDArray[np.int64] | None  # [rows], the id of the largest logit, the lowest of equals; if asked for


def score(y: Floats, blocks: Iterator[Block], targets: npt.NDArray[np.int64], *, likeliest: bool = False) -> Scored:
    """Log-probabilities of `targets` [rows] by a running maximum and sum over the tiles; never all logits at once."""
    rows = np.arange(len(y))
    top = np.full(len(y), -np.inf, np.float32)
    total = np.zeros(len(y), np.float32)
    chosen = np.zeros(len(y), np.float32)
    best = _Best(len(y)) if likeliest else None
    for first, tile in _tiles(y, blocks):
        _math.log_prob_tiles(top, total, tile, first)
        inside = (targets >= first) & (targets < first + tile.shape[1])
        chosen[inside] = tile[rows[inside], targets[inside] - first]
        if best is not None:
            best.see(first, tile)
    out = np.empty(len(y), np.float32)
    _math.log_prob_finish(out, chosen, top, total)
    return Scored(out, None if best is None else best.ids)


def _tiles(y: Floats, blocks: Iterator[Block]) -> Iterator[tuple[int, Floats]]:
    """Logits [rows, SUM_TILE], the last ones fewer, with the number of the first, whatever rows the blocks hold.

    The next tile takes the memory of the one before.
    """
    tile = np.empty((len(y), SUM_TILE), np.float32)
    first = filled = 0
    for block in blocks:
        assert isinstance(block.weights, Bf16)
        bits = block.weights.bits
        while len(bits):
            some, bits = bits[: SUM_TILE - filled], bits[SUM_TILE - filled :]
            _math.matmul_bf16(tile, y, some, filled)
            filled += len(some)
            if filled == SUM_TILE:
                yield first, tile
                first, filled = first + SUM_TILE, 0
    if filled:
        yield first, np.ascontiguousarray(tile[:, :filled])


class _Best:
    """The largest logit of each row so far."""

    def __init__(self, rows: int) -> None:
        self.ids = np.zeros(rows, np.int64)
        self._values = np.full(rows, -np.inf, np.float32)
        self._rows = np.arange(rows)

    def see(self, first: int, tile: Floats) -> None:
        places = np.empty(len(tile), np.int64)
        _math.argmax(places, tile)
        values = tile[self._rows, places]
        better = values > self._values  # not of equals: tiles come ascending
        self.ids[better], self._values[better] = first + places[better], values[better]
