"""What a pass is asked to compute."""

from __future__ import annotations

import operator
from collections import abc
from dataclasses import dataclass
from typing import Literal

from deltafin.errors import BadRequest
from deltafin.indexer import ModelConfig
from deltafin.runtime.sequence import Sequence

# Which logits a forward returns: every row's, each segment's last row's, none, or log-probabilities of given ids.
Logits = Literal["all", "last", "none", "targets"]


@dataclass(frozen=True, slots=True)
class Segment:
    """Tokens to feed to one sequence, as consecutive rows of a pass.

    `targets`, one id per row, are whose log-probabilities `forward(..., logits="targets")` returns.
    """

    seq: Sequence
    ids: abc.Sequence[int]
    targets: abc.Sequence[int] | None = None

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
    last: bool  # whether the segment ends with it

    def __len__(self) -> int:
        return len(self.ids)


def cut(segments: abc.Sequence[Segment], most_rows: int | None) -> list[list[tuple[int, slice]]]:
    """Passes of at most `most_rows` rows: lists of (segment, its tokens), in the order of the segments."""
    assert most_rows is None or most_rows > 0
    passes: list[list[tuple[int, slice]]] = [[]]
    room = most_rows
    for number, segment in enumerate(segments):
        at = 0
        while at < len(segment):
            if room == 0:
                passes.append([])
                room = most_rows
            count = len(segment) - at if room is None else min(room, len(segment) - at)
            passes[-1].append((number, slice(at, at + count)))
            at += count
            room = None if room is None else room - count
    return passes


def check_segments(segments: abc.Sequence[Segment], logits: Logits, config: ModelConfig) -> None:
    """Refuse, before any byte is read, a pass that makes no sense."""
    if not segments:
        raise BadRequest("forward needs at least one segment")
    if logits not in ("all", "last", "none", "targets"):
        raise BadRequest(f'logits is {logits!r}; expected "all", "last", "none" or "targets"')
    if len({id(s.seq) for s in segments}) != len(segments):
        raise BadRequest("the same sequence appears twice in one forward; join its segments, or use two passes")
    for number, segment in enumerate(segments):
        if not segment.ids:
            raise BadRequest(f"segment {number} is empty; a forward needs at least one token of every sequence")
        _check_ids(segment.ids, config.vocab_size, f"segment {number}")
        end = len(segment.seq) + len(segment)
        if end > config.max_positions:
            raise BadRequest(f"segment {number} makes {end} tokens; the model has {config.max_positions} positions")
        if logits != "targets":
            continue
        if segment.targets is None or len(segment.targets) != len(segment):
            got = "no" if segment.targets is None else str(len(segment.targets))
            raise BadRequest(f"segment {number} has {len(segment)} ids and {got} targets; expected one target an id")
        _check_ids(segment.targets, config.vocab_size, f"targets of segment {number}")


def _check_ids(ids: abc.Sequence[int], vocab_size: int, what: str) -> None:
    for place, token in enumerate(ids):
        if not 0 <= token < vocab_size:
            raise BadRequest(f"{what}: id {token} at {place} is outside the vocabulary of {vocab_size}")


def _integers(ids: abc.Iterable[int]) -> tuple[int, ...]:
    try:
        return tuple(operator.index(i) for i in ids)
    except TypeError as e:
        raise BadRequest(f"token ids must be integers ({e})") from None
