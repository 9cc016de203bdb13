"""How likely are given texts? Log-probabilities of their tokens, of many texts in one pass over the weights.

A pass holds the rows of many texts and needs one layer's state at a time. Only a text with more rows than a pass holds
is computed in several passes, and only its state goes on between them. What a text gets does not depend on the others.
"""

from __future__ import annotations

import math
from collections import abc
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from deltafin.errors import BadRequest
from deltafin.runtime.memory import ROWS
from deltafin.runtime.model import Model
from deltafin.runtime.observer import Observer, Observers
from deltafin.runtime.segment import Segment

Floats = npt.NDArray[np.float32]
Item = TypeVar("Item")

DIVIDED = 8  # texts that take several passes, and share those in which they begin and end


@dataclass(frozen=True, slots=True)
class Text:
    """Token ids, of which those from index `first` on are scored; the ones before are only what they follow."""

    ids: abc.Sequence[int]
    first: int = 1

    def __post_init__(self) -> None:
        if not 1 <= self.first < len(self.ids):
            raise BadRequest(
                f"of {len(self.ids)} tokens none from {self.first} on can be scored: a token needs one before it, and "
                "at least one is to be scored"
            )

    @property
    def rows(self) -> int:
        """The last token is only looked for, never fed."""
        return len(self.ids) - 1


@dataclass(frozen=True, slots=True)
class Score:
    """What the model says of a text."""

    log_probs: Floats  # [scored tokens]
    greedy: bool  # whether each of them is the likeliest where it stands, the lowest id of equals

    @property
    def total(self) -> float:
        """The text's log-probability: added in float64, first token first."""
        total = 0.0
        for value in self.log_probs.tolist():
            total += value
        return total


def perplexity(log_prob: float, tokens: int) -> float:
    """exp of the mean of the negative log-probabilities of so many tokens; infinite where that is too large."""
    try:
        return math.exp(-log_prob / tokens)
    except OverflowError:
        return math.inf


def score(model: Model, texts: abc.Sequence[Text], observer: Observer | None = None) -> list[Score]:
    """Scores texts in one pass, or in several if memory holds fewer rows; see `groups`. No text's state is kept."""
    best = _Likeliest()
    segments = [Segment(model.sequence(), text.ids[:-1], text.ids[1:]) for text in texts]
    watch = best if observer is None else Observers(best, observer)
    log_probs = model.forward(segments, logits="targets", advance=False, observer=watch)
    likeliest = np.concatenate(best.found)
    scores = []
    at = 0
    for text in texts:
        rows = slice(at + text.first - 1, at + text.rows)
        targets = np.array(text.ids[text.first :], np.int64)
        scores.append(Score(log_probs[rows].copy(), bool((likeliest[rows] == targets).all())))
        at += text.rows
    return scores


class _Likeliest(Observer):
    """Collects every row's likeliest id, pass by pass."""

    wants_likeliest = True

    def __init__(self) -> None:
        self.found: list[npt.NDArray[np.int64]] = []

    def likeliest(self, ids: npt.NDArray[np.int64]) -> None:
        self.found.append(ids)


def rows_a_pass(model: Model) -> int:
    """How many rows of texts to compute at once."""
    return ROWS if model.memory is None else model.memory.rows


def groups(items: abc.Iterable[Item], rows: abc.Callable[[Item], int], most_rows: int) -> abc.Iterator[list[Item]]:
    """Items in their order, in lists that are to be computed together; `rows` says how many an item has.

    A list fills a pass. An item with more rows than a pass holds begins in what is left of one, fills as many as it
    needs and shares its last one; passes end inside of such items only, and one at a time goes on. A list has at most
    DIVIDED of them, because nothing of it is known before all of it is.
    """
    group: list[Item] = []
    room, divided = most_rows, 0
    for item in items:
        count = rows(item)
        if room < count <= most_rows or (count > most_rows and divided == DIVIDED):
            yield group
            group, room, divided = [], most_rows, 0
        group.append(item)
        divided += count > most_rows
        room = (room - count) % most_rows
        if room == 0:
            yield group
            group, room, divided = [], most_rows, 0
    if group:
        yield group


def pass_count(rows: abc.Iterable[int], most_rows: int) -> int:
    """How many passes the groups of items with so many rows take."""
    return sum(-(-sum(group) // most_rows) for group in groups(rows, lambda count: count, most_rows))
