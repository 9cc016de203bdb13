"""All that rides beside requests, asked in such a way that requests do not suffer if it fails."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from deltafin.runtime.generation import Generation, Step
from deltafin.runtime.server.company import Company
from deltafin.runtime.server.driving import Passes
from deltafin.runtime.server.room import LentRoom, Room

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Guest:
    company: Company
    room: LentRoom


class Beside:
    """Some `Company`, each with what it has taken of a room. One that raises is not asked again."""

    def __init__(
        self, passes: Passes, room: Room, let_go: Callable[[], bool], is_request: Callable[[Generation], bool]
    ) -> None:
        """`let_go` lets go of a sequence in `room` that nobody uses; `is_request` knows the answers of requests."""
        self._passes, self._room, self._let_go, self._is_request = passes, room, let_go, is_request
        self._guests: list[_Guest] = []

    def add(self, company: Company) -> None:
        self._guests.append(_Guest(company, LentRoom(self._room, self._let_go)))

    def ready(self) -> bool:
        return any([self._ask(guest, lambda g: g.company.ready()) for guest in list(self._guests)])

    def join(self) -> None:
        self._ask_all(lambda g: g.company.join(self._passes.runner, g.room))

    def step_back(self) -> bool:
        """Whether one answer did."""
        runner = self._passes.runner
        return any(self._ask(guest, lambda g: g.company.step_back(runner, g.room)) for guest in list(self._guests))

    def took(self, steps: Sequence[Step]) -> None:
        self._ask_all(lambda g: g.company.took([step for step in steps if g.company.owns(step.generation)]))

    def failed(self, generation: Generation, error: Exception, *, alone: bool) -> None:
        def tell(guest: _Guest) -> None:
            if guest.company.owns(generation):
                guest.company.failed(generation, error, alone=alone)

        self._ask_all(tell)

    def close(self) -> None:
        self._ask_all(lambda g: g.company.close())

    def _ask_all(self, question: Callable[[_Guest], object]) -> None:
        for guest in list(self._guests):
            self._ask(guest, question)

    def _ask(self, guest: _Guest, question: Callable[[_Guest], object]) -> bool:
        """Whether it says yes."""
        try:
            return bool(question(guest))
        except Exception:
            log.exception("what rides beside requests has failed, and rides no more until the server is restarted")
        self._guests.remove(guest)
        for generation in list(self._passes.runner.active):
            if not self._is_request(generation) and not any(g.company.owns(generation) for g in self._guests):
                self._passes.remove(generation)
        guest.room.give_all()
        return False
