"""Block attention residuals: what K3 has instead of `x + f(x)`. See `runtime.reference.residual`."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from deltafin.cext import _math
from deltafin.runtime.native.products import Bits, Floats


class Residual:
    """The block vectors and the running sum of every row of a pass."""

    def __init__(self, embedding: Floats, eps: float) -> None:
        self.blocks: list[Floats] = []  # each [rows, hidden]
        self.running: Floats | None = embedding  # [rows, hidden]; None just after a block was closed
        self.eps = eps

    def mix(self, norm: Bits, proj: Bits) -> Floats:
        assert self.running is not None
        out = np.empty_like(self.running)
        _math.mix(out, (*self.blocks, self.running), norm, proj, self.eps)
        return out  # [rows, hidden]

    def close_block(self) -> None:
        """The running sum becomes a block vector; the next output starts a new sum rather than adding to it."""
        assert self.running is not None
        self.blocks.append(self.running)
        self.running = None

    def keep(self, rows: npt.NDArray[np.int64]) -> None:
        """The other rows have left the pass."""
        self.blocks = [block[rows] for block in self.blocks]
        self.running = None if self.running is None else self.running[rows]

    def add(self, output: Floats) -> Floats:
        """Takes `output` over: it is changed or kept."""
        if self.running is None:
            self.running = output
        else:
            _math.add(output, self.running, output)
            self.running = output
        return self.running
