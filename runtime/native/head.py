"""From the last hidden vectors to logits, one tile of the vocabulary at a time."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from deltafin.cext import _math
from deltafin.runtime.native.products import Bits, Floats, linear

# (first vocabulary row, bfloat16 bits [rows, hidden]), ascending
Tiles = Iterator[tuple[int, Bits]]

# Part of the arithmetic: the sum of exponentials goes tile by tile, counted from vocabulary row 0.
SUM_TILE = 1024


def logits(y: Floats, tiles: Tiles, vocab_size: int) -> Floats:
    """[rows, vocab] for y [rows, hidden]."""
    out = np.empty((len(y), vocab_size), np.float32)
    for first, bits in tiles:
        out[:, first : first + len(bits)] = linear(y, bits)
    return out


def target_log_probs(y: Floats, tiles: Tiles, targets: npt.NDArray[np.int64]) -> Floats:
    """[rows]: each row's log-probability of its target, by a running maximum and sum over the tiles."""
    rows = np.arange(len(y))
    top = np.full(len(y), -np.inf, np.float32)
    total = np.zeros(len(y), np.float32)
    chosen = np.zeros(len(y), np.float32)
    for first, bits in _whole_tiles(tiles):
        tile = linear(y, bits)  # [rows, some]
        _math.log_prob_tiles(top, total, tile, first)
        inside = (targets >= first) & (targets < first + len(bits))
        chosen[inside] = tile[rows[inside], targets[inside] - first]
    out = np.empty(len(y), np.float32)
    _math.log_prob_finish(out, chosen, top, total)
    return out


def _whole_tiles(tiles: Tiles) -> Tiles:
    """The same rows in pieces that are multiples of SUM_TILE, but for the last."""
    held: Bits | None = None
    first = 0
    for at, bits in tiles:
        held, first = (bits, at) if held is None else (np.concatenate([held, bits]), first)
        whole = len(held) // SUM_TILE * SUM_TILE
        if whole:
            yield first, held[:whole]
            first, held = first + whole, held[whole:] if whole < len(held) else None
    if held is not None:
        yield first, held
