"""Whether bytes that no digest vouches for can be an expert at all.

Catches what really arrives in place of weights: zeros after an interrupted transfer, a web page, a span
from the wrong place. In the released model the scales of one matrix lie within 16 neighbouring powers
of two, so a spread of 64 accuses nothing that is sound.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from deltafin.indexer import ExpertPart

_WIDEST_SPREAD = 64
_NOT_A_NUMBER = 255


def implausible(expert: npt.NDArray[np.uint8], layout: tuple[ExpertPart, ...]) -> str | None:
    """What is wrong with the bytes of an expert, or None."""
    for part in layout:
        if not part.name.endswith("weight_scale"):
            continue
        scales = expert[part.offset : part.offset + part.nbytes]
        low, high = int(scales.min()), int(scales.max())
        if high == _NOT_A_NUMBER:
            return f"{part.name} holds a scale of 255, which is no number"
        if high == 0:
            return f"{part.name} is all zeros"
        if high - low > _WIDEST_SPREAD:
            return f"{part.name} has scales from {low} to {high}, too far apart for one matrix"
    return None
