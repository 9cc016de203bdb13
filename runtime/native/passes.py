"""A pass on the CPU's own kernels: the walk of `runtime.reference.passes`, bit for bit reproducible."""

from __future__ import annotations

import time
from collections import abc
from contextlib import ExitStack, closing

import numpy as np
import numpy.typing as npt

from deltafin.cext import _math
from deltafin.errors import NotANumber
from deltafin.indexer import ModelConfig, expert_layout
from deltafin.runtime.clock import LayerTimes, PassTimes
from deltafin.runtime.leaving import Leaving
from deltafin.runtime.memory import MemoryPlan
from deltafin.runtime.native import head, kda, mla, moe
from deltafin.runtime.native.kda import KdaDecision, KdaState
from deltafin.runtime.native.mla import Latents, MlaDecision
from deltafin.runtime.native.products import MLP_MATRICES, Floats, Spine, mlp
from deltafin.runtime.native.residual import Residual
from deltafin.runtime.observer import Observer, Point
from deltafin.runtime.rows import Rows
from deltafin.runtime.segment import Logits, Part
from deltafin.runtime.traffic import StateTraffic
from deltafin.store import HEAD, Block, LayerPieces, PackSet, SpineReader, SpineWalk, Store

# One sequence's memory, layer by layer.
State = tuple[KdaState | Latents, ...]
# What a pass leaves of it in one layer: with proposals, what decides on them; nothing if nobody keeps it.
Left = KdaState | KdaDecision | Latents | MlaDecision | None


def matrices(config: ModelConfig, layer: int) -> tuple[str, ...]:
    """The matrices of a layer that a pass multiplies once each, in its order."""
    attention = kda.MATRICES if config.is_kda(layer) else mla.MATRICES
    return attention + (moe.MATRICES if config.is_moe(layer) else MLP_MATRICES)


class Native:
    """Computes passes over one open store with `cext._math`, within the memory of a plan."""

    def __init__(
        self,
        store: Store,
        layers: abc.Sequence[LayerPieces],
        plan: MemoryPlan,
        packs: PackSet | None = None,
    ) -> None:
        """`layers` are the spine's pieces, of which some lie in `packs`."""
        self.store = store
        self.config = store.catalog.config
        self.layout = expert_layout(self.config)
        self.plan: MemoryPlan | None = plan
        self.packs: PackSet | None = packs
        self.times: PassTimes | None = None
        self.most_rows: int | None = plan.rows
        self.traffic = StateTraffic()
        self._beginning = KdaState.empty(self.config)
        store.reserve(plan.slots, plan.resident_experts)
        self.spine = SpineReader(
            layers, store.submit_piece, store.stats, resident=plan.resident, ring_nbytes=plan.ring_nbytes
        )

    def new_state(self) -> object:
        layers = range(self.config.num_layers)
        return tuple(self._beginning if self.config.is_kda(n) else Latents() for n in layers)

    def detached(self, state: object) -> object:
        assert isinstance(state, tuple)
        return tuple(s.detached() if isinstance(s, KdaState) else s for s in state)

    def accept(self, state: object, count: int) -> object:
        assert isinstance(state, Decision)
        return state.accept(count, self.traffic)

    def copied(self, state: object) -> object:
        assert isinstance(state, tuple)
        copies = tuple(s if isinstance(s, KdaState) and s.shared else s.copied() for s in state)
        self.traffic.copied_nbytes += sum(c.nbytes for c, s in zip(copies, state, strict=True) if c is not s)
        return copies

    def run(
        self, parts: abc.Sequence[Part], logits: Logits, observer: Observer | None, leaving: Leaving | None = None
    ) -> tuple[npt.NDArray[np.float32] | None, list[object]]:
        begun = time.perf_counter()
        with ExitStack() as stack:
            if observer is not None:
                observer.rows(Rows(parts).observed)
            walk = stack.enter_context(self.spine.walk(head=logits != "none"))
            this = _Pass(self, parts, observer, walk, leaving)
            found = this.run(logits)
        this.times.total_s = time.perf_counter() - begun
        self.times = this.times
        return found

    def close(self) -> None:
        self.spine.close()


class Decision:
    """A sequence's state before the last pass, with what that pass left to compute the one after any proposal."""

    def __init__(self, part: Part, layers: tuple[Left, ...]) -> None:
        self._sure = len(part) - part.drafted
        self._layers = layers

    def accept(self, count: int, traffic: StateTraffic) -> State:
        rows = self._sure + count
        return tuple(_decided(layer, rows, traffic) for layer in self._layers)


def _decided(layer: Left, rows: int, traffic: StateTraffic) -> KdaState | Latents:
    if isinstance(layer, KdaDecision):
        return layer.accept(rows, traffic)
    assert isinstance(layer, MlaDecision)
    return layer.accept(rows)


class _Pass:
    """What the layers of one pass share."""

    def __init__(
        self,
        model: Native,
        parts: abc.Sequence[Part],
        observer: Observer | None,
        walk: SpineWalk,
        leaving: Leaving | None,
    ) -> None:
        self.store = model.store
        self.config = model.config
        self.layout = model.layout
        self.parts = parts
        self.observer = observer
        self.walk = walk
        self.leaving = leaving
        self.rows = Rows(parts)
        self.numbers = list(range(len(parts)))  # of the parts that are still here, among those that were asked for
        self.traffic = model.traffic
        self.times = PassTimes(self.rows.count)

    def run(self, logits: Logits) -> tuple[Floats | None, list[object]]:
        bits = self.store.embedding(self.rows.ids)
        embedding = np.empty(bits.shape, np.float32)
        _math.widen_bf16(embedding, bits)
        residual = Residual(embedding, self.config.rms_norm_eps)
        before = [_state(part) for part in self.parts]
        after: list[list[Left]] = [[] for _ in self.parts]
        left: list[object] = [None] * len(self.parts)
        for layer in range(self.config.num_layers):
            if self.leaving is not None and (staying := self._staying(self.leaving)) is not None:
                before, after = [before[n] for n in staying], [after[n] for n in staying]
                self._keep(staying, residual)
                if not staying:
                    return None, left
            states = self._layer(layer, residual, [state[layer] for state in before])
            for part_states, state in zip(after, states, strict=True):
                part_states.append(state)
        values = self._logits(residual, logits)
        for number, part, layers in zip(self.numbers, self.parts, after, strict=True):
            left[number] = _left(part, tuple(layers))
        return values, left

    def _staying(self, leaving: Leaving) -> list[int] | None:
        """Which of the parts stay; None if all do."""
        leavers = leaving.among(part.sequence for part in self.parts)
        return [n for n, part in enumerate(self.parts) if part.sequence not in leavers] if leavers else None

    def _keep(self, staying: list[int], residual: Residual) -> None:
        """Goes on with these parts only."""
        spans = [self.rows.spans[n] for n in staying]
        residual.keep(np.concatenate([np.arange(s.start, s.stop) for s in spans] or [np.empty(0, np.int64)]))
        self.parts = [self.parts[n] for n in staying]
        self.numbers = [self.numbers[n] for n in staying]
        self.rows = Rows(self.parts)
        if self.observer is not None:
            self.observer.rows_left(self.rows.observed)

    def _layer(self, layer: int, residual: Residual, states: list[KdaState | Latents]) -> abc.Sequence[Left]:
        """One layer's step of the residual; returns what it will remember of each part."""
        if self.observer is not None:
            self.observer.layer(layer, self.config.num_layers)
        times = LayerTimes()
        self.times.layers.append(times)
        lap = _Lap(self.walk)
        eps = self.config.rms_norm_eps
        spine = Spine(self.walk.layer(layer))

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
        times.attention_s, waited = lap.time()
        times.spine_wait_s += waited
        out = self._moe(layer, x, spine, times) if self.config.is_moe(layer) else mlp(x, spine, "mlp.", self.config)
        self._show(layer, "mlp_out", out)
        running = residual.add(out)
        self._show(layer, "layer_out", running)
        self._check(running, f"layer {layer}")
        rest, waited = lap.time()
        times.spine_wait_s += waited
        times.shared_s = rest - times.expert_s - times.expert_wait_s
        return after

    def _attention(
        self, layer: int, x: Floats, states: list[KdaState | Latents], spine: Spine
    ) -> tuple[Floats, abc.Sequence[Left]]:
        if self.config.is_kda(layer):
            memories = [s for s in states if isinstance(s, KdaState)]
            return kda.kda(x, self.parts, self.rows.spans, memories, spine, self.config, layer, self.traffic)
        caches = [s for s in states if isinstance(s, Latents)]
        return mla.mla(x, self.parts, self.rows.spans, caches, spine, self.config, layer, self.traffic)

    def _moe(self, layer: int, x: Floats, spine: Spine, times: LayerTimes) -> Floats:
        routes, bad = moe.route(x, spine, self.config)
        if bad >= 0:  # a NaN here would choose, and leave no trace
            raise NotANumber(f"router of layer {layer}: NaN or infinity in {self.rows.name(bad)}")
        self._show_routes(layer, routes)
        with closing(self.store.experts(layer, routes.experts())) as landing:
            latent, shared = moe.project(x, spine, self.config)
            begun = time.perf_counter()
            total = moe.mix_experts(latent, routes, landing, self.layout, self.config, layer)
            times.expert_wait_s = landing.wait_s
            times.expert_s = time.perf_counter() - begun - landing.wait_s
            times.reads_s, times.experts, times.reads = landing.reads_s, landing.count, landing.reads
        return moe.unproject(total, shared, spine, self.config)

    def _logits(self, residual: Residual, logits: Logits) -> Floats | None:
        lap = _Lap(self.walk)
        layer = self.walk.layer(self.config.num_layers)
        final = Spine(layer)
        mixed = residual.mix(final.bits("output_attn_res_norm.weight"), final.bits("output_attn_res_proj.weight"))
        y = final.norm("norm.weight", mixed, self.config.rms_norm_eps)  # [rows, hidden]
        self._show(self.config.num_layers, "final_norm", y)
        self._check(y, "final norm")
        if logits == "none":
            return None
        rows = list(range(self.rows.count)) if logits == "targets" else self.rows.tails
        if logits == "targets":
            targets = np.array([token for p in self.parts for token in p.targets or ()], np.int64)
            values = self._score(y, layer.blocks(HEAD), targets)
        else:
            values = head.logits(y[rows], layer.blocks(HEAD), self.config.vocab_size)
        self._check(values.reshape(len(rows), -1), "head", rows)
        self.times.head_s, _ = lap.time()
        return values

    def _score(self, y: Floats, blocks: abc.Iterator[Block], targets: npt.NDArray[np.int64]) -> Floats:
        asked = self.observer is not None and self.observer.wants_likeliest
        found = head.score(y, blocks, targets, likeliest=asked)
        if self.observer is not None and found.likeliest is not None:
            self.observer.likeliest(found.likeliest)
        return found.log_probs

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


class _Lap:
    """Splits time since the last look into computing and waiting for the spine."""

    def __init__(self, walk: SpineWalk) -> None:
        self._walk = walk
        self._at, self._waited = time.perf_counter(), walk.wait_s

    def time(self) -> tuple[float, float]:
        now, waited = time.perf_counter(), self._walk.wait_s
        wait_s = waited - self._waited
        busy_s = now - self._at - wait_s
        self._at, self._waited = now, waited
        return busy_s, wait_s


def _left(part: Part, layers: tuple[Left, ...]) -> object:
    if part.drafted:
        return Decision(part, layers)
    return layers if part.keep else None


def _state(part: Part) -> State:
    state = part.state
    assert isinstance(state, tuple)
    return state
