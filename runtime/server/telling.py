"""What a client is told while it waits: its place in the queue, where the pass is, and what is not on this machine."""

from __future__ import annotations

from deltafin.runtime.server.jobs import Job
from deltafin.runtime.server.queueing import Place
from deltafin.runtime.server.services import Services

Told = dict[str, object]


def position(place: Place) -> int:
    """In the queue: 1 is next, 0 is under way."""
    return 0 if place.ahead is None else place.ahead + 1


def place_headers(services: Services, job: Job) -> dict[str, str]:
    """For the head of an answer, as far as it is known when the head is sent."""
    place = services.engine.place(job)
    headers = {"X-Deltafin-Queue-Position": str(position(place))}
    if place.first_token_s:
        headers["X-Deltafin-Estimate-Seconds"] = f"{place.first_token_s:.1f}"
    return headers


def missing_headers(services: Services) -> dict[str, str]:
    missing = services.missing
    count = missing.count
    return {"X-Deltafin-Missing-Experts": f"{count} of {missing.total}"} if count else {}


def progress_of(services: Services, job: Job) -> Told:
    """Now. In the queue `estimate_s` is until the first token; then too, and after it until the pass is over."""
    engine = services.engine
    place = engine.place(job)
    if place.ahead is not None:
        return {"queue_position": position(place), "estimate_s": _rounded(place.first_token_s), **_missing(services)}
    progress, tokens = engine.progress(), len(job.answer.tokens)
    return {
        "layer": progress.layer,
        "layers": progress.num_layers,
        "read_bytes": progress.read_nbytes,
        "fetched_bytes": progress.fetched_nbytes,
        "estimate_s": _rounded(progress.left_s if tokens else place.first_token_s),
        "tokens": tokens,
        "tokens_cached": job.answer.cached,
        **_missing(services),
    }


def _missing(services: Services) -> Told:
    count = services.missing.count
    return {"experts_missing": count, "experts": services.missing.total} if count else {}


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 1)
