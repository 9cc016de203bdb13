"""From the last hidden vectors to logits, one tile of the vocabulary at a time."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from deltafin.runtime.reference.spine import linear

# (first vocabulary row, bfloat16 bits [rows, hidden]), ascending
Tiles = Iterator[tuple[int, npt.NDArray[np.uint16]]]


def logits(y: Tensor, tiles: Tiles, vocab_size: int) -> Tensor:
    """[rows, vocab] for y [rows, hidden]."""
    out = y.new_empty(y.shape[0], vocab_size)
    for first, bits in tiles:
        out[:, first : first + bits.shape[0]] = linear(y, bits)
    return out


def score(y: Tensor, tiles: Tiles, targets: Tensor) -> tuple[Tensor, Tensor]:
    """[rows]: the log-probability of each row's target, by a running maximum and sum over the tiles; and the id of its
    largest logit, the lowest of equals.
    """
    rows = torch.arange(y.shape[0], device=y.device)
    top = y.new_full((y.shape[0],), -torch.inf)
    total = y.new_zeros(y.shape[0])
    chosen = y.new_zeros(y.shape[0])
    likeliest = torch.zeros_like(targets)
    for first, bits in tiles:
        tile = linear(y, bits)  # [rows, some]
        largest, places = tile.max(1)  # the first of equals
        likeliest = torch.where(largest > top, first + places, likeliest)
        new_top = torch.maximum(top, largest)
        total = total * torch.exp(top - new_top) + torch.exp(tile - new_top[:, None]).sum(1)
        top = new_top
        inside = (targets >= first) & (targets < first + bits.shape[0])
        chosen[inside] = tile[rows[inside], targets[inside] - first]
    return chosen - top - torch.log(total), likeliest
