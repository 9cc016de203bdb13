"""What a pass is asked to compute."""

from __future__ import annotations

import operator
from collections import abc
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

from deltafin.errors import BadRequest
from deltafin.indexer import ModelConfig
from deltafin.runtime.sequence import Sequence

if TYPE_CHECKING:
    from deltafin.runtime.native.kda import KdaState
    from deltafin.runtime.native.mla import Latents

# Which logits a forward returns: every row's, each segment's last row's, those of its last `tail` rows, none, or
# log-probabilities of given ids.
Logits = Literal["all", "last", "tails", "none", "targets"]


class StateSink(Protocol):
    """Takes a sequence's state out of a pass, layer by layer."""

    def layer(self, layer: int, state: KdaState | Latents) -> None:
        """One layer's state; layers come once each, ascending, in the thread of the pass.

        Arrays may be read during the call only. An exception fails the pass.
        """


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """Gives `sink` the state that a sequence has after the first `at` ids of a segment."""

    at: int
    sink: StateSink


@dataclass(frozen=True, slots=True)
class Segment:
    """Tokens to feed to one sequence, as consecutive rows of a pass.

    `targets`, one id per row, are whose log-probabilities `forward(..., logits="targets")` returns; `tail` is of how
    many last rows `logits="tails"` returns logits. The last `drafted` ids are proposals: `Sequence.accept` says
    afterwards how many of them count. At least one id before them does not.
    """

    seq: Sequence
    ids: abc.Sequence[int]
    targets: abc.Sequence[int] | None = None
    tail: int = 1
    drafted: int = 0
    checkpoint: Checkpoint | None = None

    def __post_init__(self) -> None:
        # Copied, so that a list the caller goes on using cannot change under a pass.
        object.__setattr__(self, "ids", _integers(self.ids))
        if self.targets is not None:
            object.__setattr__(self, "targets", _integers(self.targets))

    def __len__(self) -> int:
        return len(self.ids)


@dataclass(frozen=True, slots=True)
class Part:
    """What one pass computes of a segment: consecutive tokens after `position` others, from `state` on."""

    segment: int  # its index in the call
    sequence: int  # Sequence.number
    position: int
    ids: abc.Sequence[int]
    targets: abc.Sequence[int] | None
    state: object
    tail: int  # of how many of its last rows logits are wanted
    keep: bool  # whether the state after it is wanted
    drafted: int = 0  # its last ids that are proposals
    checkpoint: Checkpoint | None = None  # `at` counts from the part's first id

    def __len__(self) -> int:
        return len(self.ids)


def part(
    segments: abc.Sequence[Segment], number: int, tokens: slice, state: object, logits: Logits, advance: bool
) -> Part:
    """What a pass computes of segment `number`; the last part of one that is not to advance leaves no state."""
    segment = segments[number]
    wanted = {"all": len(segment), "last": 1, "tails": segment.tail}.get(logits, 0)
    mark = segment.checkpoint
    here = mark is not None and tokens.start < mark.at <= tokens.stop
    return Part(
        segment=number,
        sequence=segment.seq.number,
        position=len(segment.seq) + tokens.start,
        ids=segment.ids[tokens],
        targets=None if segment.targets is None else segment.targets[tokens],
        state=state,
        tail=max(0, tokens.stop - max(tokens.start, len(segment) - wanted)),
        keep=advance or tokens.stop < len(segment),
        drafted=segment.drafted,
        checkpoint=Checkpoint(mark.at - tokens.start, mark.sink) if mark is not None and here else None,
    )


def cut(segments: abc.Sequence[Segment], most_rows: int | None) -> list[list[tuple[int, slice]]]:
    """Passes of at most `most_rows` rows: lists of (segment, its tokens), in the order of the segments.

    Segments with proposals stay whole.
    """
    assert most_rows is None or most_rows > 0
    passes: list[list[tuple[int, slice]]] = [[]]
    room = most_rows
    for number, segment in enumerate(segments):
        at = 0
        while at < len(segment):
            if room == 0 or (room is not None and segment.drafted and room < len(segment)):
                passes.append([])
                room = most_rows
            count = len(segment) - at if room is None else min(room, len(segment) - at)
            passes[-1].append((number, slice(at, at + count)))
            at += count
            room = None if room is None else room - count
    return passes


def check_segments(
    segments: abc.Sequence[Segment], logits: Logits, config: ModelConfig, most_rows: int | None = None
) -> None:
    """Refuse, before any byte is read, a pass that makes no sense."""
    if not segments:
        raise BadRequest("forward needs at least one segment")
    if logits not in ("all", "last", "tails", "none", "targets"):
        raise BadRequest(f'logits is {logits!r}; expected "all", "last", "tails", "none" or "targets"')
    if len({id(s.seq) for s in segments}) != len(segments):
        raise BadRequest("the same sequence appears twice in one forward; join its segments, or use two passes")
    for number, segment in enumerate(segments):
        if not segment.ids:
            raise BadRequest(f"segment {number} is empty; a forward needs at least one token of every sequence")
        _check_ids(segment.ids, config.vocab_size, f"segment {number}")
        end = len(segment.seq) + len(segment)
        if end > config.max_positions:
            raise BadRequest(f"segment {number} makes {end} tokens; the model has {config.max_positions} positions")
        _check_parts(segment, f"segment {number}", most_rows)
        if logits != "targets":
            continue
        if segment.targets is None or len(segment.targets) != len(segment):
            got = "no" if segment.targets is None else str(len(segment.targets))
            raise BadRequest(f"segment {number} has {len(segment)} ids and {got} targets; expected one target an id")
        _check_ids(segment.targets, config.vocab_size, f"targets of segment {number}")


def _check_parts(segment: Segment, name: str, most_rows: int | None) -> None:
    count = len(segment)
    if not 0 <= segment.tail <= count:
        raise BadRequest(f"{name} has {count} ids and tail {segment.tail}; expected 0 to {count}")
    if not 0 <= segment.drafted < count:
        raise BadRequest(f"{name} has {count} ids, {segment.drafted} of them drafted; expected fewer")
    if segment.drafted and most_rows is not None and count > most_rows:
        raise BadRequest(f"{name} has proposals and {count} rows; a pass holds {most_rows}")
    if segment.checkpoint is not None and (segment.drafted or not 1 <= segment.checkpoint.at <= count):
        raise BadRequest(
            f"{name}: a checkpoint is after 1 to {count} of its ids, in a segment without proposals; "
            f"got {segment.checkpoint.at} with {segment.drafted} proposals"
        )


def _check_ids(ids: abc.Sequence[int], vocab_size: int, what: str) -> None:
    for place, token in enumerate(ids):
        if not 0 <= token < vocab_size:
            raise BadRequest(f"{what}: id {token} at {place} is outside the vocabulary of {vocab_size}")


def _integers(ids: abc.Iterable[int]) -> tuple[int, ...]:
    try:
        return tuple(operator.index(i) for i in ids)
    except TypeError as e:
        raise BadRequest(f"token ids must be integers ({e})") from None
