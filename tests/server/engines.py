"""Engines without HTTP, for tests: on one demo model, with hooks at the boundaries of passes and layers."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

from deltafin.runtime import Generation, Model, Runner
from deltafin.runtime.batch.sizing import blocks
from deltafin.runtime.memory import Want
from deltafin.runtime.openai import CHAT, TEXT, Answer, Serving, Task, read_body
from deltafin.runtime.sampling import Chosen
from deltafin.runtime.server import Began, Ended, Engine, Failed, Job, News, ServerSize, Starts, Update
from deltafin.runtime.states import PrefixStore

LONG_S = 60.0  # until a test gives up
GUILTY = 505  # a token that no answer has


class Told:
    """A listener that remembers, and may do something at the moment it is told."""

    def __init__(self, then: Callable[[Update], None] = lambda update: None) -> None:
        self.updates: list[Update] = []
        self.over = threading.Event()
        self.job: Job | None = None
        self._then = then

    def __call__(self, update: Update) -> None:
        self.updates.append(update)
        if isinstance(update, Ended | Failed):
            self.over.set()
        self._then(update)

    def wait(self) -> Update:
        assert self.over.wait(LONG_S), "never told of an end"
        return self.updates[-1]

    def error(self) -> Exception:
        last = self.wait()
        assert isinstance(last, Failed), last
        return last.error

    def answer(self) -> dict[str, object]:
        """As the API's object, less what no two answers share."""
        last = self.wait()
        assert isinstance(last, Ended), last
        assert self.job is not None
        return plain(self.job.answer)

    @property
    def cached(self) -> int:
        return next(u.cached for u in self.updates if isinstance(u, Began))

    @property
    def chosen(self) -> list[Chosen]:
        return [c for u in self.updates if isinstance(u, News | Ended) for c in u.chosen]


class Asking:
    """One engine, whose requests are made up here."""

    def __init__(self, model: Model, serving: Serving, size: ServerSize, keep_states: int, **keywords: object) -> None:
        self.model, self.serving = model, serving
        self.engine = Engine(model, serving, size, starts=Starts(model, PrefixStore(keep_states)), **keywords)
        self._count = 0
        # In the engine's thread: when a layer begins, with its number, and when a pass has been taken in.
        self.at_layer: Callable[[int], None] = lambda layer: None
        self.after_pass: Callable[[], None] = lambda: None
        clock, took = self.engine._passes.clock, self.engine._took
        at = clock.at

        def watched_at(layer: int) -> None:
            at(layer)
            self.at_layer(layer)

        def watched_took(outcome) -> None:
            took(outcome)
            self.after_pass()

        clock.at, self.engine._took = watched_at, watched_took

    def ask(self, task: Task, then: Callable[[Update], None] = lambda update: None) -> Told:
        told = Told(then)
        self._count += 1
        told.job = self.engine.submit(task, f"{self._count}", told)
        return told

    def text(self, ids: Sequence[int], max_new: int = 4, **fields: object) -> Task:
        """A raw prompt, whose answer goes on to its last token."""
        endless = {"logit_bias": {str(token): -100 for token in (*self.model.stop_ids, GUILTY)}}
        return read_body(TEXT, {"prompt": list(ids), "max_tokens": max_new, **endless, **fields}, self.serving)

    def chat(self, *messages: dict[str, object], max_new: int = 6, **fields: object) -> Task:
        body = {"messages": list(messages), "max_tokens": max_new, "return_token_ids": True, **fields}
        return read_body(CHAT, body, self.serving)

    def alone(self, task: Task) -> tuple[dict[str, object], list[Chosen]]:
        """When nobody rides any more: passes of one model may not overlap."""
        self.settle()
        return alone(self.model, self.serving, task)

    @property
    def held(self) -> threading.Condition:
        """In `with`: the engine does nothing between passes, and this thread may ask and leave."""
        return self.engine._changed

    def settle(self) -> None:
        """Until nobody waits or rides."""
        engine, deadline = self.engine, time.monotonic() + LONG_S
        while engine.running or engine.waiting or (engine.alive and engine._passes.runner.active):
            assert time.monotonic() < deadline, f"{engine.running} ride, {engine.waiting} wait"
            time.sleep(0.002)

    def close(self) -> None:
        self.engine.close()
        self.model.store.resume()


def size_of(sequences: int = 8, tokens: int = 65536, most_tokens: int = 4096) -> ServerSize:
    """What an engine may take; the demo has memory for more."""
    want = Want(rows=sequences + 256, tokens=blocks(tokens), sequences=sequences)
    return ServerSize(want, sequences, blocks(tokens), most_tokens)


def alone(model: Model, serving: Serving, task: Task) -> tuple[dict[str, object], list[Chosen]]:
    """The answer of a task that has the model for itself, begins from nothing and is never guessed ahead."""
    answer = Answer(task, serving, "0")
    generation = Generation(model.sequence(), task.ids, max_new=task.max_new, sampling=task.sampling, ends=answer.ends)
    runner = Runner(model)
    runner.add(generation)
    while runner.active:
        runner.step()
    answer.finish(generation.chosen, generation.finish)
    return plain(answer), generation.chosen


def plain(answer: Answer) -> dict[str, object]:
    """The API's object without names, and without what was cached."""
    found = answer.as_json(0)
    del found["id"]
    found["usage"]["prompt_tokens_details"] = None
    for call in found["choices"][0].get("message", {}).get("tool_calls", []):
        call["id"] = None
    return found
