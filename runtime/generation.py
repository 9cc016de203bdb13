"""Answers under way: what each is fed next, and the tokens that come of it, any number of answers to a pass.

The tokens of an answer depend on its prompt, its `Sampling` and the model, and on nothing else: not on the answers
that ride along, on how its prompt was cut, or on what a draft proposed.
"""

from __future__ import annotations

import logging
from collections import abc
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import TYPE_CHECKING, Literal

import numpy as np
import numpy.typing as npt

from deltafin.errors import BadRequest, Missing, NoMemory
from deltafin.runtime.draft import Draft
from deltafin.runtime.drafted import DraftedExperts
from deltafin.runtime.gate import Drafted, Gate
from deltafin.runtime.leaving import Leaving
from deltafin.runtime.observer import Observer, Observers
from deltafin.runtime.sampling import Chosen, Sampler, Sampling
from deltafin.runtime.segment import Checkpoint, Segment
from deltafin.runtime.sequence import Sequence

if TYPE_CHECKING:
    from deltafin.runtime.model import Model

log = logging.getLogger(__name__)

Floats = npt.NDArray[np.float32]

DEPTH = 4  # proposals a pass verifies at most, unless asked otherwise
PROMPTS_SHARE = 0.25  # of a pass's rows, at least, where answers alone would fill it

Gone = abc.Callable[[], abc.Collection[int]]

# Why an answer ended: with a stop token or because `ends` said so, or with its last permitted token.
Finish = Literal["stop", "length"]


class Generation:
    """One answer. `chosen` grows with every step of its `Runner`, until `finish` says why it is over.

    The last chosen token is never fed: `seq` then holds everything before it, and whoever goes on begins with it.
    After a step that failed, or was interrupted, the next one goes on where this one stood. (In the moment between a
    pass and the first choice an interrupt loses what there was to choose from. Then the next step says so, and a new
    `Generation` with `so_far` goes on.)
    """

    def __init__(
        self,
        seq: Sequence,
        ids: abc.Sequence[int],
        *,
        max_new: int,
        sampling: Sampling | None = None,
        stop_ids: abc.Collection[int] | None = None,
        draft: Draft | None = None,
        depth: int = DEPTH,
        ends: abc.Callable[[Chosen], bool] | None = None,
        so_far: abc.Sequence[Chosen] = (),
        checkpoint: Checkpoint | None = None,
    ) -> None:
        """Continue `seq` after `ids`, at least one. Raises BadRequest if the model has not as many positions.

        `ends` is asked about every token in order, stop tokens excepted; True makes it the last one. `so_far` are
        tokens of the same answer from an earlier life: they count, and are fed with the prompt instead of drawn.
        `checkpoint` counts from the first of `ids`.
        """
        model: Model = seq.owner  # type: ignore[assignment]
        ids = tuple(ids)
        if max_new < 1:
            raise BadRequest(f"max_new is {max_new}; expected at least 1")
        if not ids:
            raise BadRequest("the prompt is empty; a model needs at least one token to continue")
        given = len(seq) + len(ids)
        if given + max_new - 1 > model.config.max_positions:
            raise BadRequest(
                f"{given} tokens and {max_new} new ones exceed the model's {model.config.max_positions} positions"
            )
        if depth < 0:
            raise BadRequest(f"the depth of drafts is {depth}; expected 0 (none) or more")
        self.seq = seq
        self.ids = ids
        self.max_new = max_new
        self.chosen: list[Chosen] = []
        self.finish: Finish | None = None
        self.draft, self.depth = draft, depth
        self._sampler = Sampler(
            sampling or Sampling(), vocab_size=model.config.vocab_size, forbidden=model.reserved_ids
        )
        self._stop_ids = model.stop_ids if stop_ids is None else frozenset(stop_ids)
        self._ends = ends
        self._checkpoint = checkpoint
        self._before = seq.ids if draft is not None else []  # what a draft sees besides the tokens of this answer
        self._start = len(seq)
        for chosen in so_far:
            if self.finish is None:
                self._add(chosen)

    @property
    def sampling(self) -> Sampling:
        return self._sampler.sampling

    @property
    def tokens(self) -> list[int]:
        """The chosen ids."""
        return [c.token for c in self.chosen]

    @property
    def pending(self) -> list[int]:
        """The tokens that are not fed yet: the rest of the prompt, or the last chosen one."""
        return self._after(len(self.seq) - self._start)

    @property
    def waiting(self) -> int:
        """How many tokens are to be fed before the next one can be chosen: one, but for prompts."""
        return len(self.ids) + len(self.chosen) - (len(self.seq) - self._start)

    def segment(self, room: int | None, most_drafted: int) -> Segment:
        """What the next pass is to compute of this answer: at most `room` rows, at least one.

        Proposals, at most `most_drafted`, only come where nothing else is waiting, and no checkpoint is ahead.
        """
        at = len(self.seq) - self._start
        waiting = self._after(at)
        if room is not None and len(waiting) > room:
            return Segment(self.seq, waiting[:room], tail=0, checkpoint=self._mark(at, room))
        left = self.max_new - len(self.chosen) - 1
        most = min(most_drafted, self.depth, left)
        most = most if room is None else min(most, room - len(waiting))
        if (mark := self._mark(at, len(waiting))) is not None:
            return Segment(self.seq, waiting, checkpoint=mark)
        drafted: abc.Sequence[int] = ()
        if self.draft is not None and most > 0 and len(waiting) == 1 and self._checkpoint is None:
            drafted = self._proposals(most)
        return Segment(self.seq, [*waiting, *drafted], tail=1 + len(drafted), drafted=len(drafted))

    def take(self, segment: Segment, logits: Floats) -> list[Chosen]:
        """The tokens that come of a pass, given `logits` [tail, vocab] of its segment; none if the prompt goes on."""
        drafted = segment.ids[len(segment) - segment.drafted :]
        new: list[Chosen] = []
        for row, values in enumerate(logits):
            position = self._start + len(self.ids) + len(self.chosen)
            self._add(self._sampler.choose(values, position))
            new.append(self.chosen[-1])
            if self.finish is not None or row == len(drafted) or new[-1].token != drafted[row]:
                break
        if self.seq.undecided_rows:  # else somebody asked for the state meanwhile, and what was chosen is fed again
            self.seq.accept(len(new) - 1)
        return new

    def _add(self, chosen: Chosen) -> None:
        self.chosen.append(chosen)
        if chosen.token in self._stop_ids or (self._ends is not None and self._ends(chosen)):
            self.finish = "stop"
        elif len(self.chosen) >= self.max_new:
            self.finish = "length"

    def _proposals(self, most: int) -> abc.Sequence[int]:
        assert self.draft is not None
        vocab_size = self._sampler.vocab_size
        self._before += self._after(len(self._before) - self._start)
        found = list(self.draft.propose(self._before, most))[:most]
        # A draft may propose what it likes; what is no token at all only ends its proposal.
        return found[: next((n for n, token in enumerate(found) if not 0 <= token < vocab_size), len(found))]

    def _after(self, count: int) -> list[int]:
        """The tokens of prompt and answer after the first `count`."""
        return [*self.ids[count:], *(c.token for c in self.chosen[max(0, count - len(self.ids)) :])]

    def _mark(self, at: int, count: int) -> Checkpoint | None:
        """The checkpoint if it lies in the next `count` tokens; once only, since its sink takes a state once."""
        mark = self._checkpoint
        if mark is None or mark.at > at + count:
            return None
        self._checkpoint = None
        return Checkpoint(mark.at - at, mark.sink) if mark.at > at else None


@dataclass(frozen=True, slots=True)
class Step:
    """What one step brought an answer."""

    generation: Generation
    new: list[Chosen]
    drafted: int = 0  # proposals that were verified
    accepted: int = 0  # of these


@dataclass(frozen=True, slots=True)
class _Ride:
    """What a pass computed for one answer."""

    generation: Generation
    segment: Segment
    logits: Floats  # [tail, vocab]

    @property
    def is_open(self) -> bool:
        """Whether nothing was chosen from it yet."""
        return self.generation.waiting == 0 or not self.segment.tail


class Runner:
    """The answers of one model that ride together: one step is one pass for all of them.

    A step holds a row of every answer, proposals for it, and as much of waiting prompts as there are rows left, so
    that a long prompt does not hold up the others; where there are more answers than rows they ride by turns. Answers
    join and leave between steps.
    """

    def __init__(self, model: Model, gate: Gate | None = None) -> None:
        """`gate` decides how many proposals pay; without one there are as many as each answer's depth."""
        self.model = model
        self.gate = gate
        self.active: list[Generation] = []
        self._drafting = True  # until proposals have failed for want of memory, or of an expert
        self._rides: list[_Ride] = []  # of the last pass, until all have what came of it
        self._taken: list[Step] = []  # of these, what has come already

    def add(self, generation: Generation) -> None:
        if generation.seq.owner is not self.model:
            raise BadRequest("an answer's sequence belongs to another model; add it to a runner of that one")
        if generation.finish is None:
            self.active.append(generation)

    def remove(self, generation: Generation) -> None:
        """Between steps; its sequence stays what it is."""
        self.active.remove(generation)

    def step(self, observer: Observer | None = None, gone: Gone | None = None) -> list[Step]:
        """One pass; what came of it for each answer that was in it. Those that are finished have left.

        `gone` is asked when a layer begins, for the numbers of sequences whose answers nobody wants any more. They
        leave the pass at once, and the runner with it; they have no step then, and their sequences are as before.
        After a step that was interrupted while tokens were chosen, or failed there, this makes no pass: it chooses
        those that were left open, and returns them with those that were not.
        """
        self.active = [g for g in self.active if g.finish is None]
        if self.is_choosing:
            return self._take()
        self._rides = []
        segments = self._segments()
        if not segments:
            return []
        experts = DraftedExperts({g.seq.number: len(g.seq) + len(s) - s.drafted for g, s in segments if s.drafted})
        leaving = None if gone is None else Leaving(gone)
        try:
            logits = self._forward(segments, experts, observer, leaving)
        except (NoMemory, Missing) as e:  # a guess may want an expert that is not here, and never ends a run
            if not any(segment.drafted for _, segment in segments):
                raise
            log.warning("%s; going on without proposals", e)
            self._drafting = False
            segments = [(generation, _undrafted(segment)) for generation, segment in self._staying(segments, leaving)]
            if not segments:
                return []
            logits = self._forward(segments, experts, observer, leaving)
        staying = self._staying(segments, leaving)
        self._rides = _rides(staying, logits)
        steps = self._take()
        if len(staying) == len(segments):  # else the pass took less than its rows do
            self._tell_gate(steps, segments, experts)
        return steps

    def _staying(
        self, segments: list[tuple[Generation, Segment]], leaving: Leaving | None
    ) -> list[tuple[Generation, Segment]]:
        """Those that did not leave the pass; the others leave the runner."""
        if leaving is None or not leaving.left:
            return segments
        self.active = [g for g in self.active if g.seq.number not in leaving.left]
        return [(g, s) for g, s in segments if g.seq.number not in leaving.left]

    @property
    def is_drafting(self) -> bool:
        """False once proposals have failed for want of memory, or of an expert."""
        return self._drafting

    @property
    def is_choosing(self) -> bool:
        """Whether a step was interrupted or failed while tokens were chosen, so that the next one goes on with that."""
        return bool(self._taken) or any(ride.is_open and ride.generation in self.active for ride in self._rides)

    @property
    def unchosen(self) -> list[Generation]:
        """Whose rows are computed and have no token yet, in the order of choosing; a step that fails there has failed
        for the first of them.
        """
        return [r.generation for r in self._rides if r.generation.waiting == 0 and r.generation in self.active]

    def _take(self) -> list[Step]:
        for ride in self._rides:
            if ride.is_open and ride.generation in self.active:
                new = ride.generation.take(ride.segment, ride.logits)
                self._taken.append(Step(ride.generation, new, ride.segment.drafted, max(0, len(new) - 1)))
        steps, self._taken, self._rides = self._taken, [], []
        self.active = [g for g in self.active if g.finish is None]
        return steps

    def _forward(
        self,
        segments: list[tuple[Generation, Segment]],
        experts: DraftedExperts,
        observer: Observer | None,
        leaving: Leaving | None,
    ) -> Floats:
        if self.gate is not None and any(segment.drafted for _, segment in segments):
            observer = experts if observer is None else Observers(experts, observer)
        return self.model.forward([s for _, s in segments], logits="tails", observer=observer, leaving=leaving)

    def _tell_gate(
        self, steps: list[Step], segments: list[tuple[Generation, Segment]], experts: DraftedExperts
    ) -> None:
        if self.gate is None or self.model.last_pass is None:
            return
        drafts = [
            Drafted(step.drafted, step.accepted, experts.added(step.generation.seq.number))
            for step in steps
            if step.drafted
        ]
        answers = sum(1 for _, segment in segments if len(segment) - segment.drafted == 1 and segment.tail)
        self.gate.saw(drafts, self.model.last_pass, answers)

    def _segments(self) -> list[tuple[Generation, Segment]]:
        if any(g.waiting == 0 for g in self.active):
            raise BadRequest(
                "an answer lost what was computed for its next token when a step was interrupted; begin it anew, with "
                "so_far=its chosen tokens"
            )
        room, segments, depth = self.model.most_rows, [], self._depth()
        answers, prompts = self._riders(room)
        for number, generation in enumerate([*answers, *prompts]):
            if room == 0:
                break
            others = max(0, len(answers) - number - 1)  # whose row is not taken by proposals
            segment = generation.segment(None if room is None else max(1, room - others), depth)
            segments.append((generation, segment))
            room = None if room is None else room - len(segment)
        return segments

    def _riders(self, rows: int | None) -> tuple[list[Generation], list[Generation]]:
        """Answers with a row each, which keeps them going, and prompts, which share the other rows.

        Where answers would leave none to prompts, prompts get a part, and answers ride by turns.
        """
        answers = [g for g in self.active if g.waiting == 1]
        prompts = [g for g in self.active if g.waiting > 1]
        if rows is not None and len(answers) + bool(prompts) > rows:
            answers = answers[: rows - (max(1, int(PROMPTS_SHARE * rows)) if prompts else 0)]
            riding = {id(g) for g in answers}
            self.active.sort(key=lambda g: id(g) in riding)  # behind the others, the next time
        return answers, prompts

    def _depth(self) -> int:
        """Most proposals for an answer in the next pass."""
        asked = max((g.depth for g in self.active if g.draft is not None), default=0)
        if not self._drafting or asked == 0:
            return 0
        return asked if self.gate is None else self.gate.depth(asked)


def _rides(segments: list[tuple[Generation, Segment]], logits: Floats) -> list[_Ride]:
    ends = accumulate(segment.tail for _, segment in segments)
    return [_Ride(g, s, logits[end - s.tail : end]) for (g, s), end in zip(segments, ends, strict=True)]


def _undrafted(segment: Segment) -> Segment:
    """The same without its proposals."""
    if not segment.drafted:
        return segment
    return replace(segment, ids=segment.ids[: len(segment) - segment.drafted], tail=1, drafted=0)
