"""What a state depends on: the weights, what the spine was rounded to, and the arithmetic."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass

from deltafin.errors import BadRequest
from deltafin.runtime.model import Model
from deltafin.runtime.native import ARITHMETIC
from deltafin.store import PackSet, Store, Weights, weights_of

VERSION = 1  # of the file format

RELEASED = "released"


@dataclass(frozen=True, slots=True)
class Identity:
    """Two models with equal identities compute the same bits, so one may go on from the other's states."""

    weights: Weights
    spine: str  # "released" for all that gives its bits, else the encoding, with the layers if it is not all of them
    arithmetic: int = ARITHMETIC

    def as_json(self) -> dict[str, object]:
        """What must be equal, by name."""
        return {
            "arithmetic": self.arithmetic,
            "changed": self.weights.changed,
            "config": self.weights.config,
            "shards": self.weights.shards,
            "spine": self.spine,
        }

    @property
    def digest(self) -> bytes:
        """32 bytes that differ where anything does, the format of files included."""
        text = json.dumps({"format": VERSION, **self.as_json()}, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).digest()


def identity(model: Model) -> Identity:
    """What states of this model depend on. Raises BadRequest where it has none that could be kept."""
    if model.memory is None:
        raise BadRequest('states are kept for the native kernels only; open the model with device "cpu"')
    return Identity(weights_of(model.store), _spine(model))


def identity_of(store: Store, packs: PackSet | None) -> Identity:
    """`identity`, before there is a model: of one whose spine is taken from `packs`; None is the released bytes."""
    return Identity(weights_of(store), _spine_class(packs, store.catalog.config.num_layers))


def _spine(model: Model) -> str:
    return _spine_class(model.packs, model.config.num_layers)


def _spine_class(packs: PackSet | None, num_layers: int) -> str:
    if packs is None or packs.format.as_released:
        return RELEASED
    layers = sorted(packs.packs)
    if len(layers) == num_layers:
        return str(packs.format)
    return f"{packs.format} in layers {','.join(map(str, layers))}"
