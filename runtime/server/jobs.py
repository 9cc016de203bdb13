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
# Called in the engine's thread, in order; must return at once. One that raises has left.
Listener = Callable[[Update], None]


@dataclass(eq=False, slots=True, repr=False)
class Job:
    """Made by `Engine.submit`. Only the engine changes it."""

    number: int
    task: Task
    answer: Answer
    listener: Listener
    state: State = "waiting"
    generation: Generation | None = None  # while it runs: nobody outside is to hold the memory of its sequence
    start: Start = field(default_factory=Start)
    taken: int = 0  # of the room
    created: float = field(default_factory=time.time)  # seconds since 1970
    events: list[Event] = field(default_factory=list)  # since the last news
    told: int = 0  # tokens that were news
    error: Exception | None = None  # of our own, while what came was put into the answer
    left_at: int | None = None  # layers that had begun when its client left
    out_at: int | None = None  # and when the passes knew

    def __repr__(self) -> str:
        """Without what was asked: it may come into a log."""
        return f"Job({self.number}, {self.state})"

    def ends(self, chosen: Chosen) -> bool:
        """For its `Generation`: takes a token that is no stop token."""
        try:
            self.events += self.answer.push(chosen)
        except Exception as e:  # must not end the pass for the others
            self.error = e
            return True
        return self.answer.ended

    def finish(self, generation: Generation) -> News:
        """What its last tokens have added. Raises whatever went wrong while the answer was written."""
        assert generation.finish is not None
        if self.error is not None:
            raise self.error
        self.events += self.answer.finish(generation.chosen, generation.finish)
        return self.news()

    def layers_for_nobody(self, now: int) -> int:
        """Layers that began between the leaving of its client and the end of the work, which is now if not before."""
        assert self.left_at is not None
        return (now if self.out_at is None else self.out_at) - self.left_at

    @property
    def has_news(self) -> bool:
        return bool(self.events) or len(self.answer.tokens) > self.told

    def news(self) -> News:
        """What came since the last time."""
        tokens = self.answer.tokens
        news = News(tuple(self.events), tuple(tokens[self.told :]))
        self.events, self.told = [], len(tokens)
        return news
