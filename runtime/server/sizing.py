"""How many answers a server computes together, and how long they may get."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from deltafin.errors import BadRequest
from deltafin.runtime.batch.sizing import blocks, choose_size
from deltafin.runtime.memory import Planned, Want, least_budget
from deltafin.store import LayerPieces

PARALLEL = 8  # unless more are asked for: a token of each costs about twice what one costs alone
CONTEXT = 8192  # tokens of a request that memory is planned for; others may be longer, and then fewer ride


@dataclass(frozen=True, slots=True)
class ServerSize:
    """What a model is opened for, and what the engine may take of it."""

    want: Want
    sequences: int  # of answers at once, and of those that are kept in memory after their end
    tokens: int  # of all of them
    most_tokens: int  # of one prompt with its answer


def server_size(
    catalog: Planned,
    layers: Sequence[LayerPieces],
    budget: int,
    threads: int,
    *,
    parallel: int | None = None,
    context: int | None = None,
) -> ServerSize:
    """Within a budget of bytes, for at most `parallel` answers; `context` is the most tokens of one.

    Fewer ride where memory holds no more, unless `parallel` was asked for. Raises BadRequest where too little fits.
    """
    one = choose_size(catalog, layers, budget, threads, [1], 1)
    most_tokens = min(one.most_tokens, catalog.config.max_positions)
    if context is not None:
        if context > most_tokens:
            raise BadRequest(f"--context {context}: there is memory for {most_tokens} tokens; give more --ram or less")
        most_tokens = context
    each = min(CONTEXT, most_tokens)
    size = choose_size(catalog, layers, budget, threads, [each] * (parallel or PARALLEL), parallel or PARALLEL)
    if parallel is not None and size.sequences < parallel:
        least = least_budget(catalog, layers, Want(rows=1, tokens=parallel * blocks(each), sequences=parallel), threads)
        raise BadRequest(
            f"--parallel {parallel}: there is memory for {size.sequences} answers of {each} tokens at once; give "
            f"--ram {-(-least // 10**9) + 1}GB or more, a smaller --context, or fewer"
        )
    return ServerSize(size.want, size.sequences, size.tokens, most_tokens)
