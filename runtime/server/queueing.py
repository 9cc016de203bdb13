"""Where a request stands, and how long its first token may take."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from deltafin.runtime.server.jobs import Job
from deltafin.runtime.server.pace import Pace
from deltafin.runtime.server.room import Room


@dataclass(frozen=True, slots=True)
class Place:
    """Of one request now."""

    ahead: int | None  # requests that wait before it; None: it rides
    first_token_s: float | None  # an estimate; None if nothing is known yet, 0 if it is there


def place_of(
    job: Job,
    ahead: int,
    waiting: Sequence[Job],
    running: Sequence[Job],
    room: Room,
    pace: Pace,
    pass_left_s: float | None,
    most_rows: int,
) -> Place:
    """`ahead` is its index in `waiting`, or -1; `pass_left_s` what is left of the pass under way."""
    if ahead < 0:
        return Place(None, _running_s(job, pace, pass_left_s, most_rows))
    own = _prompt_s(len(job.task.ids), pace, most_rows)
    wait = _until_room_s(waiting[:ahead], running, room, pace)
    if own is None or wait is None or pass_left_s is None:
        return Place(ahead, None)
    return Place(ahead, pass_left_s + wait + own)


def _running_s(job: Job, pace: Pace, pass_left_s: float | None, most_rows: int) -> float | None:
    generation = job.generation
    if generation is None or generation.chosen:
        return 0.0
    further = _prompt_s(max(0, generation.waiting - most_rows), pace, most_rows)
    return None if pass_left_s is None or further is None else pass_left_s + further


def _prompt_s(rows: int, pace: Pace, most_rows: int) -> float | None:
    """Seconds of the passes that compute so many rows."""
    passes = math.ceil(rows / most_rows)
    each = pace.of_pass(min(rows, most_rows))
    return None if each is None and passes else passes * (each or 0.0)


def _until_room_s(before: Sequence[Job], running: Sequence[Job], room: Room, pace: Pace) -> float | None:
    """Until so many answers are over that the requests before it, and it, have room."""
    over = len(before) + 1 - (room.sequences - len(running))  # that must be over first
    tokens = sum(j.taken for j in running) + sum(j.task.tokens for j in before)
    if over <= 0 and tokens <= room.tokens:
        return 0.0
    pass_s = pace.of_pass(max(1, len(running)))
    if pass_s is None:
        return None
    left = sorted(_tokens_left(j, pace) for j in running)
    rounds, place = divmod(max(0, over - 1), max(1, len(left)))
    first = left[place] if left else pace.answer_tokens
    return (first + rounds * pace.answer_tokens) * pass_s


def _tokens_left(job: Job, pace: Pace) -> float:
    chosen = 0 if job.generation is None else len(job.generation.chosen)
    return max(1.0, min(pace.answer_tokens, job.task.max_new) - chosen)
