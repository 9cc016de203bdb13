"""Block attention residuals: what K3 has instead of `x + f(x)`.

A row keeps a running sum of the outputs of its block of layers and the finished sums of earlier blocks. Every
attention and MLP reads a softmax mixture of all of them. Rows never meet here, so nothing outlives the pass.
"""

from __future__ import annotations

import torch
from torch import Tensor

from deltafin.runtime.reference.norm import inverse_rms


class Residual:
    """The block vectors and the running sum of every row of a pass."""

    def __init__(self, embedding: Tensor, eps: float) -> None:
        self.blocks: list[Tensor] = []  # each [rows, hidden]
        self.running: Tensor | None = embedding  # [rows, hidden]; None just after a block was closed
        self.eps = eps

    def mix(self, norm: Tensor, proj: Tensor) -> Tensor:
        """Scores come from normalised sources, the mixture is of the raw ones."""
        assert self.running is not None
        sources = [*self.blocks, self.running]
        if len(sources) == 1:
            return self.running  # a softmax over one source: layer 0
        u = norm * proj.flatten()  # [hidden]
        scores = torch.stack([(v * inverse_rms(v, self.eps)) @ u for v in sources])  # [sources, rows]
        weights = scores.softmax(dim=0).unsqueeze(-1)  # [sources, rows, 1]
        mixed = weights[0] * sources[0]
        for weight, source in zip(weights[1:], sources[1:], strict=True):
            mixed += weight * source
        return mixed  # [rows, hidden]

    def close_block(self) -> None:
        """The running sum becomes a block vector; the next output starts a new sum rather than adding to it."""
        assert self.running is not None
        self.blocks.append(self.running)
        self.running = None

    def add(self, output: Tensor) -> Tensor:
        # Never in place: observers keep what they were shown, and a block vector may be the same tensor.
        self.running = output if self.running is None else self.running + output
        return self.running
