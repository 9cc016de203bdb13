"""What a `Model` needs from whatever does the arithmetic."""

from __future__ import annotations

from collections import abc
from typing import Protocol

import numpy as np
import numpy.typing as npt

from deltafin.runtime.observer import Observer
from deltafin.runtime.segment import Logits, Segment


class Backend(Protocol):
    """Computes passes over one open store. Keeps nothing between passes but weights."""

    def new_state(self) -> object:
        """The state of a sequence that has seen nothing."""

    def run(
        self, segments: abc.Sequence[Segment], logits: Logits, observer: Observer | None
    ) -> tuple[npt.NDArray[np.float32] | None, list[object]]:
        """One pass over checked segments: the asked logits, and each segment's state after it.

        The states that the sequences hold now must stay usable: the pass may yet fail.
        """
