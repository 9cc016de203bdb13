"""From the last hidden vectors to logits, one tile of the vocabulary at a time."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from deltafin.cext import _math
from deltafin.runtime.native.products import Bits, Floats, linear, multiply
from deltafin.store import Bf16, Block

# Part of the arithmetic: the sum of exponentials goes tile by tile, counted from vocabulary row 0.
SUM_TILE = 1024


def logits(y: Floats, blocks: Iterator[Block], vocab_size: int) -> Floats:
    """[rows, vocab] for y [rows, hidden]."""
    out = np.empty((len(y), vocab_size), np.float32)
    for block in blocks:
        multiply(out, y, block)
    return out


def target_log_probs(y: Floats, blocks: Iterator[Block], targets: npt.NDArray[np.int64]) -> Floats:
    """[rows]: each row's log-probability of its target, by a running maximum and sum over the tiles."""
    rows = np.arange(len(y))
    top = np.full(len(y), -np.inf, np.float32)
    total = np.zeros(len(y), np.float32)
    chosen = np.zeros(len(y), np.float32)
    for first, bits in _whole_tiles(blocks):
        tile = linear(y, bits)  # [rows, some]
        _math.log_prob_tiles(top, total, tile, first)
        inside = (targets >= first) & (targets < first + len(bits))
        chosen[inside] = tile[rows[inside], targets[inside] - first]
    out = np.empty(len(y), np.float32)
    _math.log_prob_finish(out, chosen, top, total)
    return out


def _whole_tiles(blocks: Iterator[Block]) -> Iterator[tuple[int, Bits]]:
    """The same rows with the number of the first, in pieces that are multiples of SUM_TILE, but for the last."""
    held: Bits | None = None
    first = 0
    for block in blocks:
        assert isinstance(block.weights, Bf16)
        bits = block.weights.bits
        held, first = (bits, block.first) if held is None else (np.concatenate([held, bits]), first)
        whole = len(held) // SUM_TILE * SUM_TILE
        if whole:
            yield first, held[:whole]
            # A copy: the block's memory is read into again.
            first, held = first + whole, held[whole:].copy() if whole < len(held) else None
        elif held is bits:
            held = bits.copy()
    if held is not None:
        yield first, held
