"""One request on its way through the engine, and what its client is told meanwhile."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from deltafin.runtime.chat import Event
from deltafin.runtime.generation import Generation
from deltafin.runtime.openai import Answer, Task
from deltafin.runtime.sampling import Chosen
from deltafin.runtime.server.starting import Start

State = Literal["waiting", "running", "over"]


@dataclass(frozen=True, slots=True)
class Began:
    """It rides in the passes from now on; of its prompt, the first `cached` tokens need not be computed."""

    cached: int


@dataclass(frozen=True, slots=True)
class News:
    """What one pass brought: the tokens, and what they add to the answer. Stop tokens come with `Ended`."""

    events: tuple[Event, ...]
    chosen: tuple[Chosen, ...]


@dataclass(frozen=True, slots=True)
class Ended:
    """The answer is whole: `Job.answer.as_json` may be asked. `events` and `chosen` are the rest of it."""

    events: tuple[Event, ...]
    chosen: tuple[Chosen, ...]


@dataclass(frozen=True, slots=True)
class Failed:
    """There will be no more. A `DeltafinError`, or anything else where we are at fault."""

    error: Exception


Update = Began | News | Ended | Failed
# Called in the engine's thread, in order; must return at once and raise nothing.
Listener = Callable[[Update], None]


@dataclass(eq=False, slots=True)
class Job:
    """Made by `Engine.submit`. Only the engine's thread changes it."""

    number: int
    task: Task
    answer: Answer
    listener: Listener
    state: State = "waiting"
    generation: Generation | None = None
    start: Start = field(default_factory=Start)
    taken: int = 0  # of the room
    created: float = field(default_factory=time.time)  # seconds since 1970
    events: list[Event] = field(default_factory=list)  # since the last news
    told: int = 0  # tokens that were news
    left_at: int | None = None  # layers that had begun when its client left

    def ends(self, chosen: Chosen) -> bool:
        """For its `Generation`: takes a token that is no stop token."""
        self.events += self.answer.push(chosen)
        return self.answer.ended

    def news(self) -> News:
        """What came since the last time."""
        tokens = self.answer.tokens
        news = News(tuple(self.events), tuple(tokens[self.told :]))
        self.events, self.told = [], len(tokens)
        return news
