"""Where a request stands, and how long its first token may take."""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass

from deltafin.runtime.server.jobs import Job
from deltafin.runtime.server.pace import Pace
from deltafin.runtime.server.room import Room

_UNKNOWN_S, _LONGEST_S = 30, 3600  # that a client is told to stay away: before anything is known, and at most


@dataclass(frozen=True, slots=True)
class Place:
    """Of one request now."""

    ahead: int | None  # requests that wait before it; None: it waits no more
    first_token_s: float | None  # an estimate; None if nothing is known yet, 0 if it is there


def place_of(
    job: Job,
    waiting: Sequence[Job],
    running: Sequence[Job],
    room: Room,
    pace: Pace,
    pass_left_s: float | None,
    most_rows: int,
) -> Place:
    """`waiting` and `running` are all there are; `pass_left_s` is what is left of the pass under way, 0 between two."""
    if job not in waiting:
        return Place(None, _running_s(job, pace, pass_left_s, most_rows))
    ahead = waiting.index(job)
    own = _prompt_s(len(job.task.ids), pace, most_rows)
    wait = _until_room_s(waiting[: ahead + 1], running, room, pace)
    if own is None or wait is None or pass_left_s is None:
        return Place(ahead, None)
    return Place(ahead, max(pass_left_s, wait) + own)


def retry_after_s(running: int, pace: Pace) -> int:
    """Until a place in a full queue is free: about one answer's time, shared by all that are under way."""
    together = max(1, running)
    pass_s = pace.of_pass(together)
    if pass_s is None:
        return _UNKNOWN_S
    return max(1, min(_LONGEST_S, round(pace.answer_tokens * pass_s / together)))


def _running_s(job: Job, pace: Pace, pass_left_s: float | None, most_rows: int) -> float | None:
    generation = job.generation  # once: the engine may take it away
    if job.state == "over" or (generation is not None and generation.chosen):
        return 0.0
    if pass_left_s is None:
        return None
    rows = len(job.task.ids) if generation is None else generation.waiting
    # Where a pass is under way, the first of them are in it.
    further = _prompt_s(max(0, rows - most_rows) if pass_left_s else rows, pace, most_rows)
    return None if further is None else pass_left_s + further


def _prompt_s(rows: int, pace: Pace, most_rows: int) -> float | None:
    """Seconds of the passes that compute so many rows."""
    passes = math.ceil(rows / most_rows)
    each = pace.of_pass(min(rows, most_rows))
    return None if each is None and passes else passes * (each or 0.0)


def _until_room_s(joining: Sequence[Job], running: Sequence[Job], room: Room, pace: Pace) -> float | None:
    """Until the last of those that join has room, if answers are as long as they were."""
    pass_s = pace.of_pass(max(1, len(running)))
    ends = [(_tokens_left(job, pace), job.taken) for job in running]  # in passes, and what is free then
    heapq.heapify(ends)
    now = 0.0
    for job in joining:
        while not room.fits_beside(job.task.tokens, [taken for _, taken in ends]):
            if pass_s is None:
                return None
            now = max(now, heapq.heappop(ends)[0])
        heapq.heappush(ends, (now + min(pace.answer_tokens, job.task.max_new), room.size_of(job.task.tokens)))
    return 0.0 if pass_s is None else now * pass_s


def _tokens_left(job: Job, pace: Pace) -> float:
    generation = job.generation
    chosen = 0 if generation is None else len(generation.chosen)
    return max(1.0, min(pace.answer_tokens, job.task.max_new) - chosen)
