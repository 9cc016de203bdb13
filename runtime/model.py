"""A model opened for computing: `open`, `forward`, `generate`."""

from __future__ import annotations

import json
from collections import abc
from pathlib import Path
from types import TracebackType
from typing import Literal, Self, overload

import numpy as np
import numpy.typing as npt

from deltafin.errors import BadCheckpoint, BadRequest, DeltafinError
from deltafin.indexer import ModelConfig
from deltafin.runtime.backend import Backend
from deltafin.runtime.observer import Observer
from deltafin.runtime.segment import Logits, Segment, check_segments
from deltafin.runtime.sequence import Commit, Sequence
from deltafin.runtime.tokenizer import Tokenizer
from deltafin.store import Store, open_store

Floats = npt.NDArray[np.float32]


def open(
    model: str | Path,
    *,
    offline: bool = False,
    cache_dir: str | Path | None = None,
    roots: abc.Sequence[str | Path] = (),
    revision: str | None = None,
    device: str = "cpu",
) -> Model:
    """Open a model by directory, repo id, catalog name or `demo`; close it, or use it in a `with`.

    Builds the catalog first if there is none. `device` is "cpu" for the native kernels, "torch" for the plain torch
    implementation on the CPU, or a torch device. The rest, and the errors, are `open_store`'s to explain.
    """
    store = open_store(str(model), offline=offline, cache_dir=cache_dir, roots=roots, revision=revision)
    try:
        return Model(store, device=device)
    except BaseException:
        store.close()
        raise


class Model:
    """Computes any K3-shaped model out of an open store, which it closes with itself.

    Only sequences and what one pass needs are in memory. Passes of one model may not overlap in time.
    """

    def __init__(self, store: Store, *, device: str = "cpu") -> None:
        self.store = store
        self.config: ModelConfig = store.catalog.config
        self.tokenizer = _tokenizer(store, self.config)
        self.stop_ids = _stop_ids(store, self.config, self.tokenizer)
        self._backend = _backend(store, device)
        self._sequences = 0
        self._closed = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self.store.close()

    def sequence(self) -> Sequence:
        """A conversation that has not begun."""
        self._sequences += 1
        return Sequence(self._sequences - 1, self._backend.new_state(), self)

    @overload
    def forward(
        self,
        segments: abc.Sequence[Segment],
        *,
        logits: Literal["all", "last", "targets"] = "all",
        observer: Observer | None = None,
    ) -> Floats: ...

    @overload
    def forward(
        self, segments: abc.Sequence[Segment], *, logits: Literal["none"], observer: Observer | None = None
    ) -> None: ...

    def forward(
        self, segments: abc.Sequence[Segment], *, logits: Logits = "all", observer: Observer | None = None
    ) -> Floats | None:
        """Feed each segment to its sequence in one pass over the weights.

        Returns, rows in the order of the segments: "all" logits [rows, vocab]; "last" the logits after each segment
        [segments, vocab]; "targets" the log-probability of each row's target [rows]; "none" nothing. Either every
        sequence has advanced when this returns, or it raised and none has, interrupts included.
        """
        if self._closed:
            raise BadRequest("this model is closed; open it again")
        check_segments(segments, logits, self.config)
        if any(segment.seq.owner is not self for segment in segments):
            raise BadRequest("a sequence belongs to another model; use this model's sequence()")
        values, states = self._backend.run(segments, logits, observer)
        if observer is not None:
            observer.finished()
        commit = Commit()
        for segment, state in zip(segments, states, strict=True):
            segment.seq.offer(segment.ids, state, commit)
        commit.done = True
        for segment in segments:
            segment.seq.settle()
        return values

    def generate(
        self,
        seq: Sequence,
        ids: abc.Sequence[int],
        *,
        max_new: int,
        stop_ids: abc.Collection[int] | None = None,
        observer: Observer | None = None,
    ) -> abc.Iterator[int]:
        """Continue `seq` after `ids` greedily, yielding each id as soon as it is known; equal logits: the lowest id.

        `ids` are one pass, then each new id is one. Ends after `max_new` ids or with the first of `stop_ids`, which is
        still yielded; the default is the model's own, `()` is none. The last id yielded has not been fed: `seq` then
        holds everything before it, and a caller who goes on starts the next `ids` with it.
        """
        if max_new < 1:
            raise BadRequest(f"max_new is {max_new}; expected at least 1")
        given = len(seq) + len(ids)
        if given + max_new - 1 > self.config.max_positions:
            raise BadRequest(
                f"{given} tokens and {max_new} new ones exceed the model's {self.config.max_positions} positions"
            )
        return self._generate(seq, ids, max_new, self.stop_ids if stop_ids is None else frozenset(stop_ids), observer)

    def _generate(
        self, seq: Sequence, ids: abc.Sequence[int], max_new: int, stop_ids: frozenset[int], observer: Observer | None
    ) -> abc.Iterator[int]:
        for _ in range(max_new):
            logits = self.forward([Segment(seq, ids)], logits="last", observer=observer)  # [1, vocab]
            token = int(logits[0].argmax())  # the first of equals
            yield token
            if token in stop_ids:
                return
            ids = [token]


def _backend(store: Store, device: str) -> Backend:
    """The CPU's own kernels for "cpu"; the plain torch implementation for "torch" (on the CPU) and torch's devices."""
    if device == "cpu":
        try:
            from deltafin.runtime.native import Native
        except ImportError as e:
            raise DeltafinError(f"the native kernels cannot be loaded ({e})") from None
        return Native(store)
    try:
        from deltafin.runtime.reference import Reference
    except ImportError:
        raise BadRequest(f"device {device!r} needs PyTorch; install it with: pip install torch") from None
    return Reference(store, "cpu" if device == "torch" else device)


def _tokenizer(store: Store, config: ModelConfig) -> Tokenizer | None:
    ranks = store.catalog.file("tiktoken.model")
    if ranks is None:
        return None
    names = store.catalog.file("tokenizer_config.json")
    if names is None:
        raise BadCheckpoint("tiktoken.model is there but tokenizer_config.json, which names the special ids, is not")
    return Tokenizer(ranks, names, config.vocab_size)


def _stop_ids(store: Store, config: ModelConfig, tokenizer: Tokenizer | None) -> frozenset[int]:
    """Where an answer ends: what the checkpoint's files say, and [EOS], which raw texts end with."""
    stops = {config.eos_id}
    raw = store.catalog.file("generation_config.json")
    if raw is not None:
        stops.update(_generation_eos(raw))
    if tokenizer is not None and "[EOS]" in tokenizer.special_tokens:
        stops.add(tokenizer.special_tokens["[EOS]"])
    return frozenset(stops)


def _generation_eos(raw: bytes) -> list[int]:
    """`eos_token_id` may be a number, a list of them, or absent."""
    try:
        fields: object = json.loads(raw)
    except (ValueError, RecursionError) as e:
        raise BadCheckpoint(f"generation_config.json: not JSON ({e})") from None
    eos: object = fields.get("eos_token_id", []) if isinstance(fields, dict) else None
    ids: list[object] = eos if isinstance(eos, list) else [eos]
    found = [i for i in ids if type(i) is int]
    if len(found) != len(ids):
        raise BadCheckpoint(f"generation_config.json: eos_token_id is {eos!r}; expected a token id or a list of them")
    return found
