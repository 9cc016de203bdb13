"""Opens a model for a batch: its memory goes to sequences first."""

from __future__ import annotations

from dataclasses import replace

from deltafin.cext import _math
from deltafin.runtime.batch.requests import Requests
from deltafin.runtime.batch.sharing import worth_sharing
from deltafin.runtime.batch.sizing import MOST_TOGETHER, PROMPT_ROWS, Size, choose_size
from deltafin.runtime.memory import default_budget
from deltafin.runtime.model import Model
from deltafin.runtime.native import RELEASED, matrices
from deltafin.runtime.openai import Serving
from deltafin.store import PackSet, Store, spine_pieces


def open_model(
    store: Store,
    serving: Serving,
    requests: Requests,
    *,
    ram: int | None = None,
    threads: int | None = None,
    packs: PackSet | None = None,
    most: int | None = None,
) -> tuple[Model, Size]:
    """The model, and how many answers of the scanned `requests` ride together in it: at most `most`.

    `packs` are what the spine is taken from, as `serving` was made for. Raises BadRequest if `ram` is too little.
    """
    config = store.catalog.config
    budget = default_budget() if ram is None else ram
    layers = spine_pieces(store.catalog, lambda layer: matrices(config, layer), packs)
    worth = worth_sharing(requests, PROMPT_ROWS)
    size = choose_size(
        store.catalog,
        layers,
        budget,
        threads or _math.threads(),
        requests.lengths,
        most or MOST_TOGETHER,
        max((length for key, _, length in requests.beginnings() if key in worth), default=0),
    )
    if size.want.sequences > size.sequences:
        size = replace(size, shared=worth)
    model = Model(
        store,
        ram=budget,
        threads=threads,
        want=size.want,
        spine=RELEASED if packs is None else packs,
        tokenizer=serving.tokenizer,
    )
    return model, size
