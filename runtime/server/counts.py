"""What an engine did so far."""

from __future__ import annotations

from dataclasses import asdict, dataclass


@dataclass(slots=True)
class Counts:
    """Changed by the engine, under its lock where several threads do; others read single numbers.

    Of the requests that were taken, all but those that wait or ride now are in one of `answered`, `failed`, `left`.
    """

    submitted: int = 0
    answered: int = 0
    failed: int = 0
    left: int = 0  # requests whose clients went away
    left_layers: int = 0  # most layers that began between a client's going and the end of the work for it
    refused: int = 0  # for want of a place to wait
    prompt_tokens: int = 0  # of requests begun
    cached_tokens: int = 0  # of these, not computed
    computed_tokens: int = 0  # rows of prompts, answers and guesses that passes have computed
    tokens: int = 0  # drawn, for requests
    drafted: int = 0
    accepted: int = 0
    passes: int = 0
    pass_s: float = 0.0
    together: int = 0  # most answers that were under way at once

    def as_json(self) -> dict[str, float]:
        return asdict(self)
