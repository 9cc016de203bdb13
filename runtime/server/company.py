"""Who rides in the passes besides single requests: batches, where there is room left."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from deltafin.runtime.generation import Generation, Runner, Step
from deltafin.runtime.server.room import Room


class Company(Protocol):
    """Answers that nobody waits for by the minute. All calls come from the engine's thread, between passes.

    The engine holds no lock then. Who raises is not asked again: its answers leave, and its room is given back.
    """

    def ready(self) -> bool:
        """Whether there is something that could ride now, if there is room."""

    def join(self, runner: Runner, room: Room) -> None:
        """Adds answers to the runner as long as there is room, which it takes; `room` is the same each time."""

    def owns(self, generation: Generation) -> bool:
        """Whether an answer in the runner is one of these."""

    def took(self, steps: Sequence[Step]) -> None:
        """What a pass brought for its answers; those that are finished have left the runner: give their room back."""

    def step_back(self, runner: Runner, room: Room) -> bool:
        """Takes one answer out of the runner, gives its room back, and does it again later. False if there is none."""

    def failed(self, generation: Generation, error: Exception, *, alone: bool) -> None:
        """An answer has left the runner, since its pass failed. `alone`: the pass was for it only; it is to blame.

        Its room is to be given back.
        """

    def close(self) -> None:
        """There will be no more passes."""
