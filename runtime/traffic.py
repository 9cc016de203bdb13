"""How much of sequences' states is written and copied."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class StateTraffic:
    """Bytes so far, of KDA memories, convolution histories and latents."""

    written_nbytes: int = 0  # by passes, and by decisions on proposals
    copied_nbytes: int = 0  # for a fork of a sequence
