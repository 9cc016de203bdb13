"""What answers requests, out of an open store."""

from __future__ import annotations

import hashlib
import json

from deltafin.errors import BadRequest
from deltafin.runtime.openai.task import Serving
from deltafin.runtime.states import identity_of
from deltafin.runtime.tokenizer import Tokenizer
from deltafin.store import PackSet, Store


def serving_of(store: Store, tokenizer: Tokenizer | None, packs: PackSet | None, max_new: int) -> Serving:
    """For a store whose spine is taken from `packs`, None for the released bytes.

    Raises BadRequest if the model has no tokenizer.
    """
    if tokenizer is None:
        raise BadRequest(f"{store.model} has no tokenizer, so it cannot answer requests, which are text")
    config = store.catalog.config
    return Serving(
        name=store.catalog.name,  # not as the user calls it, which may be a directory of this machine
        fingerprint=fingerprint(store, packs),
        tokenizer=tokenizer,
        vocab_size=config.vocab_size,
        max_positions=config.max_positions,
        max_new=max_new,
    )


def fingerprint(store: Store, packs: PackSet | None) -> str:
    """Of all that answers depend on: the weights, what the spine was rounded to, the arithmetic."""
    text = json.dumps(identity_of(store, packs).as_json(), sort_keys=True, separators=(",", ":"))
    return f"fp_{hashlib.sha256(text.encode()).hexdigest()[:24]}"
