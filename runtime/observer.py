"""Watching a pass: for progress, traces and tests."""

from __future__ import annotations

from collections import abc
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

# Where `hidden` looks. attn_in and mlp_in: what attention and MLP read, after residual mixing and their norm;
# attn_out and mlp_out: what they return; layer_out: the running sum after the layer, which starts anew with each
# residual block; final_norm: what the head reads, with `layer` = the number of layers.
Point = Literal["attn_in", "attn_out", "mlp_in", "mlp_out", "layer_out", "final_norm"]


@dataclass(frozen=True, slots=True)
class RowSpan:
    """Consecutive rows of a pass: one segment's."""

    sequence: int  # Sequence.number
    position: int  # of the first row in that sequence
    count: int


class Observer:
    """Does nothing; override what you want to see.

    Calls come from the thread that runs the pass, in the order in which things happen. An exception raised here
    fails the pass, and its sequences stay as they were. Arrays are the observer's to keep.
    """

    wants_hidden = False  # ask for `hidden`, which copies every row several times a layer
    wants_likeliest = False  # ask for `likeliest`

    def rows(self, spans: abc.Sequence[RowSpan]) -> None:
        """A pass begins with these rows, segment after segment; row arrays below are in this order."""

    def rows_left(self, spans: abc.Sequence[RowSpan]) -> None:
        """Some have left the pass (see `Leaving`): from here on, row arrays are of these rows."""

    def layer(self, layer: int, num_layers: int) -> None:
        """A layer begins; its spine is read next."""

    def routes(self, layer: int, ids: npt.NDArray[np.int32], weights: npt.NDArray[np.float32]) -> None:
        """The chosen experts [rows, top_k] of a MoE layer by falling weight, before they are read."""

    def hidden(self, layer: int, point: Point, values: npt.NDArray[np.float32]) -> None:
        """A vector per row, [rows, hidden]."""

    def likeliest(self, ids: npt.NDArray[np.int64]) -> None:
        """With the log-probabilities of targets: the id of each row's largest logit, the lowest of equals, [rows]."""

    def finished(self) -> None:
        """Everything of the pass is computed; its sequences are committed next. Not called if the pass failed."""


class Observers(Observer):
    """Several at once, each shown everything in turn."""

    def __init__(self, *observers: Observer) -> None:
        self._observers = observers
        self.wants_hidden = any(observer.wants_hidden for observer in observers)
        self.wants_likeliest = any(observer.wants_likeliest for observer in observers)

    def rows(self, spans: abc.Sequence[RowSpan]) -> None:
        for observer in self._observers:
            observer.rows(spans)

    def rows_left(self, spans: abc.Sequence[RowSpan]) -> None:
        for observer in self._observers:
            observer.rows_left(spans)

    def layer(self, layer: int, num_layers: int) -> None:
        for observer in self._observers:
            observer.layer(layer, num_layers)

    def routes(self, layer: int, ids: npt.NDArray[np.int32], weights: npt.NDArray[np.float32]) -> None:
        for observer in self._observers:
            observer.routes(layer, ids.copy(), weights.copy())  # each may keep and change its own

    def hidden(self, layer: int, point: Point, values: npt.NDArray[np.float32]) -> None:
        for observer in self._observers:
            if observer.wants_hidden:
                observer.hidden(layer, point, values.copy())

    def likeliest(self, ids: npt.NDArray[np.int64]) -> None:
        for observer in self._observers:
            if observer.wants_likeliest:
                observer.likeliest(ids.copy())

    def finished(self) -> None:
        for observer in self._observers:
            observer.finished()


class LayerProgress(Observer):
    """Counts the layers that have begun, over all passes."""

    def __init__(self, progress: abc.Callable[[int], None]) -> None:
        self._progress = progress
        self._begun = 0

    def layer(self, layer: int, num_layers: int) -> None:
        self._progress(self._begun)
        self._begun += 1

    def finished(self) -> None:
        self._progress(self._begun)
