"""One conversation with a model: what it has read and written, and the state that goes with it."""

from __future__ import annotations

from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self

import click

from deltafin.cli.answering import Answering, Outcome
from deltafin.cli.chat_screen import ChatScreen
from deltafin.cli.choosing import Choosing
from deltafin.cli.progress import human_nbytes
from deltafin.cli.run_settings import RunSettings
from deltafin.cli.watch import Watch
from deltafin.errors import BadRequest
from deltafin.runtime import Checkpoint, Gate, Generation, Sequence, StopStrings, TraceWriter
from deltafin.runtime.chat import (
    Answer,
    ChatParser,
    ContentText,
    Conversation,
    Dialogue,
    Event,
    Message,
    ReasoningText,
    ReasoningWasContent,
    encode,
    pieces,
    prompt,
)
from deltafin.runtime.states import PrefixStore, PrefixWriter, load_state, save_state

if TYPE_CHECKING:
    from deltafin.runtime import Model


class Talk:
    """Asks and answers; keeps states at the end of what conversations share, and of each answer.

    Use it in a `with`: it closes the trace.
    """

    def __init__(
        self,
        engine: Model,
        conversation: Conversation,
        how: Choosing,
        settings: RunSettings,
        screen: ChatScreen,
        *,
        as_before: bool = False,
    ) -> None:
        """`as_before`: answers of a saved conversation think if its last one did, whatever `conversation` says."""
        self._engine, self._how, self._settings, self._screen = engine, how, settings, screen
        self._stack = ExitStack()
        self._trace: TraceWriter | None = None
        self.outcome = Outcome()  # of the last answer
        self.prompt: list[int] = []  # what was read for it
        self.given = 0  # tokens of it that were not known before
        assert engine.tokenizer is not None
        self._tokenizer = engine.tokenizer
        keep = settings.states.keep_states
        # torch has no states to keep; asked to, it says so.
        self._prefixes = PrefixStore(keep) if engine.memory is not None or keep is not None else None
        self._gate = Gate()
        self._seq: Sequence | None = None
        path = settings.states.load_state
        if path is None:
            self._dialogue = Dialogue(self._tokenizer, conversation)
        else:
            self._seq, self._dialogue = self._resume(path, conversation, as_before)

    def __enter__(self) -> Self:
        if (trace := self._settings.trace) is not None:
            self._trace = self._stack.enter_context(TraceWriter(trace, self._engine.store.catalog))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.__exit__(kind, error, trace)

    @property
    def started(self) -> bool:
        """Whether there is anything to save: an answer, if only the beginning of one."""
        return bool(self._dialogue.ids)

    def restart(self, conversation: Conversation) -> None:
        """Begins a new conversation; the old one is forgotten."""
        self._seq = None
        self._dialogue = Dialogue(self._tokenizer, conversation)

    def ask(self, *messages: Message) -> Answer | None:
        """The answer to what is said now; None if it was interrupted, and then what came of it stays said.

        An answer of which nothing had come leaves no trace, nor does its question. So it is with one that fails.
        """
        before = self._dialogue.conversation
        self.outcome = Outcome()
        reader: _Reader | None = None
        try:
            self._dialogue.add(*messages)
            self.prompt = self._dialogue.prompt()
            reader = _Reader(self._dialogue.parser(), self._how.stops, self._screen)
            self._read_answer(reader)
        finally:
            # Also after a failure: what has been computed of an answer is not lost.
            came = reader is not None and (bool(reader.parser.ids) or self.outcome.finish is not None)
            if reader is not None and came:
                self._dialogue.answered(reader.parser)
            else:
                self._dialogue.conversation = before
        if self.outcome.finish == "length":
            click.echo(f"df-run: cut after --max-new {self._settings.max_new} tokens", err=True)
        if came:
            self._keep()
        return reader.answer if self.outcome.finish is not None else None

    def save(self, path: Path) -> int:
        """Writes the state of the conversation up to its last answer; returns its bytes."""
        ids = self._dialogue.ids
        if not ids:
            raise BadRequest(f"{path}: nothing was said yet, so there is nothing to save")
        seq = self._seq = self._known(ids, len(ids))
        if seq is None:
            raise BadRequest(
                f"{path}: not written: the question that was stopped took the place of the state before it, and no "
                "other is kept; say something more, then save it"
            )
        return save_state(path, self._engine, seq, ids[len(seq) :])

    def lines(self) -> list[str]:
        """For --stats: what states did."""
        if self._prefixes is None or not (stats := self._prefixes.stats).kept + stats.restored:
            return []
        kept = f"{stats.kept} kept ({human_nbytes(stats.kept_nbytes)})"
        return [f"states    {stats.restored_tokens:,} tokens restored, {kept}"]

    def _keep(self) -> None:
        """The state after this turn, for another day; whoever does not want to wait for the drive need not."""
        if self._prefixes is not None and self._seq is not None:
            with suppress(KeyboardInterrupt):
                self._prefixes.keep(self._engine, self._seq)

    def _read_answer(self, reader: _Reader) -> None:
        """As far as it comes before an interruption."""
        try:
            self._answer(reader)
        except KeyboardInterrupt:
            self._engine.store.resume()
        finally:
            reader.finish()

    def _answer(self, reader: _Reader) -> None:
        engine, how = self._engine, self._how
        seq = self._seq = self._known(self.prompt, len(self.prompt) - 1) or self._engine.sequence()
        ids = self.prompt[len(seq) :]
        self.given = len(ids)
        watch = Watch(engine.store, self._trace, self._screen)
        answering = Answering(watch, reader.push, engine.stop_ids, self._gate)
        self.outcome = answering.outcome
        with ExitStack() as stack:
            generation = Generation(
                seq,
                ids,
                max_new=self._settings.max_new,
                sampling=how.sampling,
                draft=how.new_draft(),
                depth=how.depth,
                ends=answering.ends,
                checkpoint=self._checkpoint(len(seq), stack),
            )
            answering.run(engine, generation)

    def _known(self, ids: list[int], most: int) -> Sequence | None:
        """A sequence that has seen a beginning of `ids`, of at most so many: this conversation's own, or a kept one."""
        if self._seq is not None and 0 < len(self._seq) <= most and self._seq.ids == ids[: len(self._seq)]:
            return self._seq
        self._seq = None  # what it has seen was not answered, and its memory is wanted
        return self._prefixes.longest(self._engine, ids) if self._prefixes is not None else None

    def _checkpoint(self, known: int, stack: ExitStack) -> Checkpoint | None:
        """Keeps the state at the end of what conversations share, if it is computed now."""
        if self._prefixes is None or known:
            return None
        shared = prompt(self._dialogue.conversation, self._tokenizer).preamble
        if not 0 < shared < len(self.prompt):
            return None
        writer = self._prefixes.writer(self._engine, self.prompt[:shared])
        if writer is None:
            return None
        stack.callback(_finish, writer)
        return Checkpoint(shared, writer)

    def _resume(self, path: Path, conversation: Conversation, as_before: bool) -> tuple[Sequence, Dialogue]:
        saved = load_state(path, self._engine)
        ids = [*saved.seq.ids, *saved.pending]
        if not ids or ids[-1] != self._tokenizer.special_id("<|end_of_msg|>"):
            raise BadRequest(f"{path}: the state of a text, not of a chat; go on with it without --chat")
        if as_before:
            conversation = replace(conversation, thinking=self._thought(ids))
        return saved.seq, Dialogue(self._tokenizer, conversation, ids)

    def _thought(self, ids: list[int]) -> bool:
        """Whether the last answer of a conversation was asked to think."""
        places = {}
        for thinking in (True, False):
            opening = encode(pieces(Conversation(thinking=thinking)), self._tokenizer)
            ends = range(len(ids) - len(opening), -1, -1)
            places[thinking] = next((at for at in ends if ids[at : at + len(opening)] == opening), -1)
        return places[True] >= places[False]


def _finish(writer: PrefixWriter) -> None:
    """After the answer, or whatever ended it: a state whose layers have all been computed is good."""
    if writer.complete:
        writer.commit()
    else:
        writer.abort()


class _Reader:
    """Takes an answer's tokens apart and shows them; ends it at a stop string."""

    def __init__(self, parser: ChatParser, stops: tuple[str, ...], screen: ChatScreen) -> None:
        self.parser = parser
        self._stops = StopStrings(stops)
        self._screen = screen
        self._content: list[str] = []

    def push(self, token: int, _last: bool) -> bool:
        return any([self._show(event) for event in self.parser.push(token)])

    def finish(self) -> None:
        for event in self.parser.finish():
            self._show(event)
        self._write(self._stops.finish())
        for call in self.parser.answer.tool_calls:
            self._screen.tool_call(call)
        self._screen.end()

    @property
    def answer(self) -> Answer:
        """As it was shown: content ends before a stop string."""
        whole = self.parser.answer
        finish = "stop" if self._stops.matched is not None else whole.finish
        return Answer(whole.reasoning, "".join(self._content), whole.tool_calls, finish)

    def _show(self, event: Event) -> bool:
        if isinstance(event, ReasoningText):
            self._screen.reasoning(event.text)
        elif isinstance(event, ContentText | ReasoningWasContent):
            text, stopped = self._stops.push(event.text)
            self._write(text)
            return stopped
        return False

    def _write(self, text: str) -> None:
        self._content.append(text)
        self._screen.content(text)
