"""A pass: one walk through the layers with any list of segments.

Each layer's spine is read once and each expert that any row chose once, whatever the number of rows. Attention
goes segment by segment in time order; everything else is done for all rows together. States of sequences are
read, never changed: the new ones are handed back beside them.
"""

from __future__ import annotations

from collections import abc
from contextlib import closing

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from deltafin.errors import BadRequest, NotANumber
from deltafin.indexer import expert_layout
from deltafin.runtime.clock import PassTimes
from deltafin.runtime.leaving import Leaving
from deltafin.runtime.memory import MemoryPlan
from deltafin.runtime.observer import Observer, Point
from deltafin.runtime.reference import head, moe
from deltafin.runtime.reference.kda import KdaRows, KdaState, kda
from deltafin.runtime.reference.mla import Latents, mla
from deltafin.runtime.reference.mlp import mlp
from deltafin.runtime.reference.norm import rms_norm
from deltafin.runtime.reference.precision import full_precision
from deltafin.runtime.reference.residual import Residual
from deltafin.runtime.reference.spine import Spine, widen
from deltafin.runtime.rows import Rows
from deltafin.runtime.segment import Logits, Part
from deltafin.runtime.traffic import StateTraffic
from deltafin.store import PackSet, Store

# One sequence's memory, layer by layer.
State = tuple[KdaState | Latents, ...]


class Reference:
    """The plain backend on any torch device; `store` stays the caller's to close."""

    def __init__(self, store: Store, device: str) -> None:
        self.store = store
        self.config = store.catalog.config
        self.layout = expert_layout(self.config)
        try:
            self.device = torch.device(device)
            torch.empty(1, device=self.device)
        except (RuntimeError, AssertionError) as e:  # torch built without the device raises the latter
            reason = str(e).partition("\n")[0]
            raise BadRequest(f"device {device!r} cannot be used: {reason}") from None

    def new_state(self) -> object:
        layers = range(self.config.num_layers)
        return tuple(KdaState.empty(self.config, self.device) if self.config.is_kda(n) else Latents() for n in layers)

    @property
    def plan(self) -> MemoryPlan | None:
        return None

    @property
    def packs(self) -> PackSet | None:
        return None

    @property
    def times(self) -> PassTimes | None:
        return None

    @property
    def traffic(self) -> StateTraffic | None:
        return None

    @property
    def most_rows(self) -> int | None:
        return None

    def detached(self, state: object) -> object:
        return state  # every pass writes into memory of its own

    def accept(self, state: object, count: int) -> object:
        assert isinstance(state, Decision)
        return state.accept(count)

    def copied(self, state: object) -> object:
        """KDA's states are never written again, but a cache is added to, in blocks that two must not share."""
        assert isinstance(state, tuple)
        return tuple(s.copied() if isinstance(s, Latents) else s for s in state)

    def close(self) -> None:
        """Nothing is kept."""

    def run(
        self, parts: abc.Sequence[Part], logits: Logits, observer: Observer | None, leaving: Leaving | None = None
    ) -> tuple[npt.NDArray[np.float32] | None, list[object]]:
        if leaving is not None:
            raise BadRequest("leaving has no effect with torch: a pass ends with the rows that it began with")
        if any(part.checkpoint is not None for part in parts):
            raise BadRequest("checkpoints have no effect with torch: states are saved by the native kernels only")
        with full_precision(self.device):
            return _Pass(self, parts, observer).run(logits)


class Decision:
    """A sequence's state before the last pass, and its rows, from which the state after any proposal is computed."""

    def __init__(self, part: Part, after: State, rows: list[KdaRows | None]) -> None:
        self._sure = len(part) - part.drafted
        self._before, self._after, self._rows = _state(part), after, rows

    def accept(self, count: int) -> State:
        return tuple(
            self._layer(*layer, self._sure + count) for layer in zip(self._before, self._after, self._rows, strict=True)
        )

    @staticmethod
    def _layer(
        before: KdaState | Latents, after: KdaState | Latents, rows: KdaRows | None, count: int
    ) -> KdaState | Latents:
        if isinstance(before, KdaState):
            assert rows is not None
            return rows.advance(before, count)[1]
        assert isinstance(after, Latents)
        return after.shortened(before.length + count)


class _Pass:
    """What the layers of one pass share."""

    def __init__(self, model: Reference, parts: abc.Sequence[Part], observer: Observer | None) -> None:
        self.store = model.store
        self.config = model.config
        self.layout = model.layout
        self.device = model.device
        self.parts = parts
        self.observer = observer
        self.rows = Rows(parts)

    def run(self, logits: Logits) -> tuple[npt.NDArray[np.float32] | None, list[object]]:
        if self.observer is not None:
            self.observer.rows(self.rows.observed)
        residual = Residual(widen(self.store.embedding(self.rows.ids), self.device), self.config.rms_norm_eps)
        before = [_state(part) for part in self.parts]
        after: list[list[KdaState | Latents]] = [[] for _ in self.parts]
        rows: list[list[KdaRows | None]] = [[] for _ in self.parts]
        for layer in range(self.config.num_layers):
            states, replays = self._layer(layer, residual, [state[layer] for state in before])
            for number, part in enumerate(self.parts):
                if part.keep:
                    after[number].append(states[number])
                if part.drafted:
                    rows[number].append(replays[number])
        values = self._logits(residual, logits)
        left: list[object] = []
        for part, its_states, its_rows in zip(self.parts, after, rows, strict=True):
            state = tuple(its_states) if part.keep else None
            left.append(Decision(part, state, its_rows) if part.drafted and state is not None else state)
        return values, left

    def _layer(
        self, layer: int, residual: Residual, states: list[KdaState | Latents]
    ) -> tuple[abc.Sequence[KdaState | Latents], abc.Sequence[KdaRows | None]]:
        """One layer's step of the residual; returns what it will remember of each part, and KDA's rows."""
        if self.observer is not None:
            self.observer.layer(layer, self.config.num_layers)
        eps = self.config.rms_norm_eps
        spine = Spine(self.store.spine(layer), self.device)

        mixed = residual.mix(spine["self_attention_res_norm.weight"], spine["self_attention_res_proj.weight"])
        if layer % self.config.attn_res_block_size == 0:
            residual.close_block()  # after mixing: a boundary layer still reads the sum it closes
        x = rms_norm(mixed, spine["input_layernorm.weight"], eps)  # [rows, hidden]
        self._show(layer, "attn_in", x)
        out, after, replays = self._attention(layer, x, states, spine)
        self._show(layer, "attn_out", out)
        residual.add(out)

        mixed = residual.mix(spine["mlp_res_norm.weight"], spine["mlp_res_proj.weight"])
        x = rms_norm(mixed, spine["post_attention_layernorm.weight"], eps)
        self._show(layer, "mlp_in", x)
        out = self._moe(layer, x, spine) if self.config.is_moe(layer) else mlp(x, spine, "mlp.", self.config)
        self._show(layer, "mlp_out", out)
        running = residual.add(out)
        self._show(layer, "layer_out", running)
        self._check(running, f"layer {layer}")
        return after, replays

    def _attention(
        self, layer: int, x: Tensor, states: list[KdaState | Latents], spine: Spine
    ) -> tuple[Tensor, abc.Sequence[KdaState | Latents], abc.Sequence[KdaRows | None]]:
        if self.config.is_kda(layer):
            memories = [s for s in states if isinstance(s, KdaState)]
            return kda(x, self.rows.spans, memories, spine, self.config, layer)
        caches = [s for s in states if isinstance(s, Latents)]
        out, after = mla(x, self.rows.spans, caches, spine, self.config)
        return out, after, [None] * len(after)

    def _moe(self, layer: int, x: Tensor, spine: Spine) -> Tensor:
        scores = spine.linear("block_sparse_moe.gate.weight", x)  # [rows, experts]
        bias = spine["block_sparse_moe.gate.e_score_correction_bias"]
        self._check(scores + bias, f"router of layer {layer}")  # a NaN here would choose, and leave no trace
        routes = moe.route(scores, bias, self.config.top_k, self.config.routed_scaling_factor)
        self._show_routes(layer, routes)
        with closing(self.store.experts(layer, routes.experts())) as landing:
            latent, shared = moe.project(x, spine, self.config)
            total = moe.mix_experts(latent, routes, landing, self.layout, self.config, layer)
        return moe.unproject(total, shared, spine, self.config)

    def _logits(self, residual: Residual, logits: Logits) -> npt.NDArray[np.float32] | None:
        final = Spine(self.store.final(), self.device)
        mixed = residual.mix(final["output_attn_res_norm.weight"], final["output_attn_res_proj.weight"])
        y = rms_norm(mixed, final["norm.weight"], self.config.rms_norm_eps)  # [rows, hidden]
        self._show(self.config.num_layers, "final_norm", y)
        self._check(y, "final norm")
        if logits == "none":
            return None
        rows = list(range(self.rows.count)) if logits == "targets" else self.rows.tails
        with closing(self.store.head()) as tiles:
            if logits == "targets":
                targets = [token for part in self.parts for token in part.targets or ()]
                values, likeliest = head.score(y, tiles, torch.tensor(targets, device=self.device))
                if self.observer is not None and self.observer.wants_likeliest:
                    self.observer.likeliest(likeliest.cpu().numpy())
            else:
                values = head.logits(y[rows], tiles, self.config.vocab_size)
        self._check(values.view(len(rows), -1), "head", rows)
        return values.cpu().numpy()

    def _show(self, layer: int, point: Point, values: Tensor) -> None:
        if self.observer is not None and self.observer.wants_hidden:
            self.observer.hidden(layer, point, values.cpu().numpy())

    def _show_routes(self, layer: int, routes: moe.Routes) -> None:
        if self.observer is not None:
            order = routes.weights.sort(dim=1, descending=True, stable=True).indices
            ids = routes.ids.gather(1, order).int()
            self.observer.routes(layer, ids.cpu().numpy(), routes.weights.gather(1, order).cpu().numpy())

    def _check(self, values: Tensor, where: str, rows: list[int] | None = None) -> None:
        """NaN never heals: name the first layer and row that has one instead of answering from it.

        `values` holds something of each of `rows`, or of all.
        """
        sound = values.isfinite().all(dim=1)
        if sound.all():
            return
        row = int((~sound).nonzero()[0])
        row = row if rows is None else rows[row]
        raise NotANumber(f"{where}: NaN or infinity in {self.rows.name(row)}")


def _state(part: Part) -> State:
    state = part.state
    assert isinstance(state, tuple)
    return state
