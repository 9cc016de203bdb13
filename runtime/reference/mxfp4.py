"""MXFP4 to float32, exactly.

A byte holds two e2m1 codes, the low nibble the even column. One scale byte s covers 32 consecutive columns of
a row and stands for 2^(s-127). Byte 0 is 2^-127, a float32 subnormal and not zero; byte 255 is the format's NaN,
which no weight has, so it means damage. With scales from 253 up the largest codes leave float32's range and
become infinity, as IEEE rounding says.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from deltafin.errors import Corrupt

GROUP = 32
NAN_SCALE = 255

_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_VALUES = np.array([*_MAGNITUDES, *(-m for m in _MAGNITUDES)], dtype=np.float32)
# packed byte -> its two values, even column first
_PAIRS = np.stack([_VALUES[np.arange(256) & 15], _VALUES[np.arange(256) >> 4]], axis=1)  # [256, 2]
_SCALES = np.ldexp(np.float32(1), np.minimum(np.arange(256), NAN_SCALE - 1) - 127)  # [256]; the last is never used


def decode(
    packed: npt.NDArray[np.uint8], scale: npt.NDArray[np.uint8], name: str, device: torch.device
) -> Tensor:  # packed [out, in/2], scale [out, in/32] -> [out, in]
    """`name` is the matrix's, without the suffix: an error tells which tensor is damaged."""
    if (scale == NAN_SCALE).any():
        row, group = (int(i) for i in np.argwhere(scale == NAN_SCALE)[0])
        raise Corrupt(
            f"{name}.weight_scale: row {row}, group {group} is 255, which is no scale; "
            "the bytes are damaged: verify the store and fetch them again"
        )
    rows, half = packed.shape
    pairs = torch.from_numpy(_PAIRS).to(device)
    scales = torch.from_numpy(_SCALES).to(device)
    values = pairs.index_select(0, _index(packed, device))  # [out * in/2, 2]
    factors = scales.index_select(0, _index(scale, device))  # [out * in/32]
    values = values.view(rows, half * 2 // GROUP, GROUP)
    values *= factors.view(rows, -1, 1)
    return values.view(rows, half * 2)


def _index(codes: npt.NDArray[np.uint8], device: torch.device) -> Tensor:
    return torch.from_numpy(codes).to(device).flatten().int()
