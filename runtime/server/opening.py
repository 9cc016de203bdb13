"""Opens a model for a server: memory goes to sequences first, as in a batch, but not to more than are asked for."""

from __future__ import annotations

from dataclasses import replace

from deltafin.cext import _math
from deltafin.runtime.memory import default_budget
from deltafin.runtime.model import Model
from deltafin.runtime.native import RELEASED, matrices
from deltafin.runtime.openai import Serving
from deltafin.runtime.server.sizing import ServerSize, server_size
from deltafin.store import PackSet, Store, spine_pieces


def open_model(
    store: Store,
    serving: Serving,
    *,
    ram: int | None = None,
    threads: int | None = None,
    packs: PackSet | None = None,
    parallel: int | None = None,
    context: int | None = None,
) -> tuple[Model, ServerSize, Serving]:
    """The model, what its memory was planned for, and `serving` with the limit that follows.

    `packs` are what the spine is taken from, as `serving` was made for. Raises BadRequest if `ram` is too little.
    """
    config = store.catalog.config
    budget = default_budget() if ram is None else ram
    layers = spine_pieces(store.catalog, lambda layer: matrices(config, layer), packs)
    size = server_size(store.catalog, layers, budget, threads or _math.threads(), parallel=parallel, context=context)
    model = Model(
        store,
        ram=budget,
        threads=threads,
        want=size.want,
        spine=RELEASED if packs is None else packs,
        tokenizer=serving.tokenizer,
    )
    return model, size, replace(serving, most_tokens=size.most_tokens)
