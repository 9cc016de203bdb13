"""A pass on the CPU's own kernels: the walk of `runtime.reference.passes`, bit for bit reproducible."""

from __future__ import annotations

from collections import abc
from contextlib import closing

import numpy as np
import numpy.typing as npt

from deltafin.cext import _math
from deltafin.errors import NotANumber
from deltafin.indexer import expert_layout
from deltafin.runtime.native import head, moe
from deltafin.runtime.native.kda import KdaState, kda
from deltafin.runtime.native.mla import Latents, mla
from deltafin.runtime.native.products import Floats, Spine, mlp
from deltafin.runtime.native.residual import Residual
from deltafin.runtime.observer import Observer, Point
from deltafin.runtime.rows import Rows
from deltafin.runtime.segment import Logits, Segment
from deltafin.store import Store

# One sequence's memory, layer by layer.
State = tuple[KdaState | Latents, ...]


class Native:
    """Computes passes over one open store with `cext._math`."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.config = store.catalog.config
        self.layout = expert_layout(self.config)

    def new_state(self) -> object:
        layers = range(self.config.num_layers)
        return tuple(KdaState.empty(self.config) if self.config.is_kda(n) else Latents() for n in layers)

    def run(
        self, segments: abc.Sequence[Segment], logits: Logits, observer: Observer | None
    ) -> tuple[npt.NDArray[np.float32] | None, list[object]]:
        return _Pass(self, segments, observer).run(logits)


class _Pass:
    """What the layers of one pass share."""

    def __init__(self, model: Native, segments: abc.Sequence[Segment], observer: Observer | None) -> None:
        self.store = model.store
        self.config = model.config
        self.layout = model.layout
        self.segments = segments
        self.observer = observer
        self.rows = Rows(segments)

    def run(self, logits: Logits) -> tuple[Floats | None, list[object]]:
        if self.observer is not None:
            self.observer.rows(self.rows.observed)
        bits = self.store.embedding(self.rows.ids)
        embedding = np.empty(bits.shape, np.float32)
        _math.widen_bf16(embedding, bits)
        residual = Residual(embedding, self.config.rms_norm_eps)
        before = [_state(segment) for segment in self.segments]
        after: list[list[KdaState | Latents]] = [[] for _ in self.segments]
        for layer in range(self.config.num_layers):
            states = self._layer(layer, residual, [state[layer] for state in before])
            for segment_states, state in zip(after, states, strict=True):
                segment_states.append(state)
        return self._logits(residual, logits), [tuple(states) for states in after]

    def _layer(
        self, layer: int, residual: Residual, states: list[KdaState | Latents]
    ) -> abc.Sequence[KdaState | Latents]:
        """One layer's step of the residual; returns what it will remember of each segment."""
        if self.observer is not None:
            self.observer.layer(layer, self.config.num_layers)
        eps = self.config.rms_norm_eps
        spine = Spine(self.store.spine(layer))

        mixed = residual.mix(spine.bits("self_attention_res_norm.weight"), spine.bits("self_attention_res_proj.weight"))
        if layer % self.config.attn_res_block_size == 0:
            residual.close_block()  # after mixing: a boundary layer still reads the sum it closes
        x = spine.norm("input_layernorm.weight", mixed, eps)  # [rows, hidden]
        self._show(layer, "attn_in", x)
        out, after = self._attention(layer, x, states, spine)
        self._show(layer, "attn_out", out)
        residual.add(out)

        mixed = residual.mix(spine.bits("mlp_res_norm.weight"), spine.bits("mlp_res_proj.weight"))
        x = spine.norm("post_attention_layernorm.weight", mixed, eps)
        self._show(layer, "mlp_in", x)
        out = self._moe(layer, x, spine) if self.config.is_moe(layer) else mlp(x, spine, "mlp.", self.config)
        self._show(layer, "mlp_out", out)
        running = residual.add(out)
        self._show(layer, "layer_out", running)
        self._check(running, f"layer {layer}")
        return after

    def _attention(
        self, layer: int, x: Floats, states: list[KdaState | Latents], spine: Spine
    ) -> tuple[Floats, abc.Sequence[KdaState | Latents]]:
        if self.config.is_kda(layer):
            memories = [s for s in states if isinstance(s, KdaState)]
            return kda(x, self.rows.spans, memories, spine, self.config, layer)
        caches = [s for s in states if isinstance(s, Latents)]
        return mla(x, self.rows.spans, caches, spine, self.config)

    def _moe(self, layer: int, x: Floats, spine: Spine) -> Floats:
        routes, bad = moe.route(x, spine, self.config)
        if bad >= 0:  # a NaN here would choose, and leave no trace
            raise NotANumber(f"router of layer {layer}: NaN or infinity in {self.rows.name(bad)}")
        self._show_routes(layer, routes)
        with closing(self.store.experts(layer, routes.experts())) as landing:
            latent, shared = moe.project(x, spine, self.config)
            total = moe.mix_experts(latent, routes, landing, self.layout, self.config, layer)
        return moe.unproject(total, shared, spine, self.config)

    def _logits(self, residual: Residual, logits: Logits) -> Floats | None:
        final = Spine(self.store.final())
        mixed = residual.mix(final.bits("output_attn_res_norm.weight"), final.bits("output_attn_res_proj.weight"))
        y = final.norm("norm.weight", mixed, self.config.rms_norm_eps)  # [rows, hidden]
        self._show(self.config.num_layers, "final_norm", y)
        self._check(y, "final norm")
        if logits == "none":
            return None
        rows = self.rows.last if logits == "last" else list(range(self.rows.count))
        with closing(self.store.head()) as tiles:
            if logits == "targets":
                targets = np.array([token for s in self.segments for token in s.targets or ()], np.int64)
                values = head.target_log_probs(y, tiles, targets)
            else:
                values = head.logits(y[rows], tiles, self.config.vocab_size)
        self._check(values.reshape(len(rows), -1), "head", rows)
        return values

    def _show(self, layer: int, point: Point, values: Floats) -> None:
        if self.observer is not None and self.observer.wants_hidden:
            self.observer.hidden(layer, point, values.copy())

    def _show_routes(self, layer: int, routes: moe.Routes) -> None:
        if self.observer is not None:
            order = np.argsort(-routes.weights, axis=1, kind="stable")
            ids = np.take_along_axis(routes.ids, order, axis=1)
            self.observer.routes(layer, ids, np.take_along_axis(routes.weights, order, axis=1))

    def _check(self, values: Floats, where: str, rows: list[int] | None = None) -> None:
        """NaN never heals: name the first layer and row that has one instead of answering from it."""
        row = _math.all_finite(values)
        if row >= 0:
            raise NotANumber(f"{where}: NaN or infinity in {self.rows.name(row if rows is None else rows[row])}")


def _state(segment: Segment) -> State:
    state = segment.seq.state
    assert isinstance(state, tuple)
    return state
