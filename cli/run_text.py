"""df-run without --chat: continues a text."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import asdict
from typing import TYPE_CHECKING

from deltafin.cli.answering import Answering, Screen, TextReader
from deltafin.cli.options import print_json
from deltafin.cli.prompts import token_ids
from deltafin.cli.run_settings import RunSettings, saving_at_the_end
from deltafin.cli.run_stats import compare_with_plan, print_stats, run_as_json
from deltafin.errors import BadRequest

if TYPE_CHECKING:
    from pathlib import Path

    from deltafin.cli.choosing import Choosing
    from deltafin.runtime import Generation, Model, Tokenizer, TraceWriter
    from deltafin.runtime.states import Saved


class TextJob:
    """A prompt, or what a saved state left to continue."""

    def __init__(self, settings: RunSettings, text: str | None, prompt_ids: str | None, *, as_ids: bool) -> None:
        self._settings = settings
        self._text, self._prompt_ids = text, prompt_ids
        self._as_ids = as_ids
        self._ids: list[int] = []

    def read(self, tokenizer: Tokenizer | None) -> int:
        """How many tokens are given."""
        self._ids = token_ids(tokenizer, self._text, self._prompt_ids)
        return max(1, len(self._ids))

    def run(self, engine: Model, how: Choosing) -> None:
        from deltafin.runtime import TraceWriter

        settings = self._settings
        saved = self._saved(engine)
        ids = self._ids if saved is None else [*saved.pending, *self._ids]
        if not ids:
            raise BadRequest(f"{settings.states.load_state}: nothing is left to continue there; give a prompt")
        with ExitStack() as stack:
            trace = stack.enter_context(TraceWriter(settings.trace, engine.store.catalog)) if settings.trace else None
            answering, text = self._generate(engine, how, saved, ids, trace)
        outcome = answering.outcome
        outcome.text = text
        plan = compare_with_plan(engine, len(ids), outcome)
        if settings.as_json:
            shown = run_as_json(engine, ids, outcome, how.sampling)
            print_json({**shown, "plan": None if plan is None else asdict(plan)})
        if settings.stats:
            print_stats(engine, len(ids), outcome, plan)

    def _generate(
        self, engine: Model, how: Choosing, saved: Saved | None, ids: list[int], trace: TraceWriter | None
    ) -> tuple[Answering, str]:
        from deltafin.cli.watch import Watch
        from deltafin.runtime import Gate, Generation

        screen = Screen(quiet=self._settings.as_json)
        reader = TextReader(engine.tokenizer, how.stops, screen, as_ids=self._as_ids)
        watch = Watch(engine.store, trace, screen)
        answering = Answering(watch, lambda token, last: reader.push(token, last=last), engine.stop_ids, Gate())
        generation = Generation(
            engine.sequence() if saved is None else saved.seq,
            ids,
            max_new=self._settings.max_new,
            sampling=how.sampling,
            draft=how.new_draft(),
            depth=how.depth,
            ends=answering.ends,
        )
        with saving_at_the_end(lambda path: _save(engine, generation, path), self._settings.states):
            try:
                answering.run(engine, generation)
            finally:
                reader.finish()
        return answering, reader.text

    def _saved(self, engine: Model) -> Saved | None:
        if (path := self._settings.states.load_state) is None:
            return None
        from deltafin.runtime.states import load_state

        return load_state(path, engine)


def _save(engine: Model, generation: Generation, path: Path) -> None:
    """What was computed so far, if anything. A stop token is no part of the text."""
    from deltafin.runtime.states import save_state

    if not len(generation.seq):
        return  # interrupted before the first pass was done
    pending = generation.pending
    if generation.finish == "stop" and pending[-1] in engine.stop_ids:
        pending.pop()
    save_state(path, engine, generation.seq, pending)
