"""What a `Model` needs from whatever does the arithmetic."""

from __future__ import annotations

from collections import abc
from typing import Protocol

import numpy as np
import numpy.typing as npt

from deltafin.runtime.clock import PassTimes
from deltafin.runtime.leaving import Leaving
from deltafin.runtime.memory import MemoryPlan
from deltafin.runtime.observer import Observer
from deltafin.runtime.segment import Logits, Part
from deltafin.runtime.traffic import StateTraffic
from deltafin.store import PackSet


class Backend(Protocol):
    """Computes passes over one open store. Keeps nothing between passes but weights."""

    @property
    def plan(self) -> MemoryPlan | None:
        """What its memory is spent on; None if it has no budget."""

    @property
    def packs(self) -> PackSet | None:
        """What it takes the spine from where there are packs; None is the released bytes."""

    @property
    def times(self) -> PassTimes | None:
        """Of the last pass; None if it does not take them."""

    @property
    def traffic(self) -> StateTraffic | None:
        """Of states so far; None if it does not count."""

    @property
    def most_rows(self) -> int | None:
        """How many rows a pass may have; None is any number."""

    def new_state(self) -> object:
        """The state of a sequence that has seen nothing."""

    def detached(self, state: object) -> object:
        """The same state for another pass before the last one counts: memory of older states stays as it is."""

    def accept(self, state: object, count: int) -> object:
        """The state after a pass over a part with proposals, of which the first `count` count.

        `state` is what `run` left of that part, and the sequence's state before it is still its state: it may be
        asked again.
        """

    def copied(self, state: object) -> object:
        """The same state in memory of its own."""

    def run(
        self, parts: abc.Sequence[Part], logits: Logits, observer: Observer | None, leaving: Leaving | None = None
    ) -> tuple[npt.NDArray[np.float32] | None, list[object]]:
        """One pass: the asked logits, and each part's state after it, or what `accept` takes if it has proposals.

        None for a part that keeps none, or has left; of those that have left there are no logits.

        The states that the sequences hold now must stay usable: the pass may yet fail.
        """

    def close(self) -> None:
        """Lets go of its memory."""
