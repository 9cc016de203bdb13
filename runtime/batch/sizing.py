"""How many answers ride together: as many as memory holds, since they share what a pass reads.

On a machine that cannot hold the weights a further sequence adds little to what a pass reads, and brings more tokens
than a byte of the spine that stays could save. What comes before them: rows enough that all ride in one pass, and slots
enough that the reads of an expert's layer can all be on their way.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from deltafin.runtime.memory import (
    KEY_BLOCK,
    ROWS_SHARE,
    SLOTS_SHARE,
    Planned,
    Want,
    latents_nbytes,
    least_budget,
    row_nbytes,
    wanted_slots,
)
from deltafin.store import LayerPieces, slot_nbytes

# Unless more are asked for: a pass of so many rows reads nearly every expert, and further ones only take memory.
MOST_TOGETHER = 256
PROMPT_ROWS = 256  # of a pass, for prompts beside the answers


@dataclass(frozen=True, slots=True)
class Size:
    """What a model is opened for."""

    want: Want
    sequences: int  # of answers; one more is wanted where beginnings are shared
    tokens: int  # of all answers together, each counted in whole blocks
    most_tokens: int  # of one prompt and its answer: what memory holds of a single sequence
    shared: Mapping[bytes, int] = field(default_factory=dict)  # see Sharing


def blocks(tokens: int) -> int:
    """Tokens as memory counts them, in whole blocks of the latent cache."""
    return -(-tokens // KEY_BLOCK) * KEY_BLOCK


def choose_size(
    catalog: Planned,
    layers: Sequence[LayerPieces],
    budget: int,
    threads: int,
    lengths: Sequence[int],
    most: int,
    beside: int = 0,
) -> Size:
    """For sequences of `lengths` tokens, at most `most` together, within a budget of bytes.

    One that is too long for it by itself is left out. `beside` is the length of a beginning that is to be kept, too, if
    there is room. One sequence is always planned for; the model then says what lacks if that is too much.
    """
    needs = _Needs(catalog, layers, budget, threads)
    fitting = np.array([blocks(n) for n in lengths if 0 < n <= needs.most_tokens], np.int64)
    if not len(fitting):
        return Size(Want(rows=1, tokens=1, sequences=1), 1, blocks(1), needs.most_tokens)
    longest, mean = int(fitting.max()), float(fitting.mean())

    def tokens(count: int) -> int:
        return max(longest, blocks(math.ceil(mean * count)))

    def want(count: int) -> Want:
        rows = count + min(PROMPT_ROWS, longest)
        return Want(rows=rows, tokens=tokens(count) + blocks(beside), sequences=count + (beside > 0))

    if beside and not needs.fits(want(1)):
        beside = 0
    low, high = 1, min(most, len(fitting))
    while low < high:  # the most that fit
        middle = (low + high + 1) // 2
        low, high = (middle, high) if needs.fits(want(middle)) else (low, middle - 1)
    found = want(low)
    return Size(replace(found, rows=min(found.rows, needs.rows(found))), low, tokens(low), needs.most_tokens)


class _Needs:
    """What of a budget other things than sequences need."""

    def __init__(self, catalog: Planned, layers: Sequence[LayerPieces], budget: int, threads: int) -> None:
        self._catalog, self._layers, self._budget, self._threads = catalog, layers, budget, threads
        self._slots = int(wanted_slots(catalog.config) * slot_nbytes(catalog.expert_nbytes) / SLOTS_SHARE)
        spare = budget - self._least(Want(rows=1, tokens=1, sequences=1))
        block = latents_nbytes(catalog.config, KEY_BLOCK)
        self.most_tokens = min(catalog.config.max_positions, KEY_BLOCK * (1 + max(0, spare) // block))

    def fits(self, want: Want) -> bool:
        """Whether there is room for all its rows in one pass, and for the reads of an expert's layer."""
        rows = int(want.rows * row_nbytes(self._catalog.config) / ROWS_SHARE)
        return self._least(want) + rows + self._slots <= self._budget

    def rows(self, want: Want) -> int:
        """Of a pass, where there is little room: more than surely fit would be planned one at a time."""
        spare = max(0, self._budget - self._least(want))
        return 1 + int(ROWS_SHARE * ROWS_SHARE * spare) // row_nbytes(self._catalog.config)

    def _least(self, want: Want) -> int:
        return least_budget(self._catalog, self._layers, want, self._threads)
