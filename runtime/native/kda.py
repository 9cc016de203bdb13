"""Kimi Delta Attention by its recurrence, in prefill as in decode; states double-buffered."""

from __future__ import annotations

from collections import abc
from dataclasses import dataclass

import numpy as np

from deltafin.cext import _math
from deltafin.errors import BadCheckpoint
from deltafin.indexer import LAYER_PREFIX, ModelConfig
from deltafin.runtime.native.products import Floats, Spine
from deltafin.runtime.segment import Part
from deltafin.runtime.traffic import StateTraffic

# In the order in which they are multiplied.
MATRICES = tuple(f"self_attn.{name}_proj.weight" for name in ("q", "k", "v", "f_a", "f_b", "b", "g", "o"))


@dataclass(frozen=True, slots=True)
class KdaState:
    """One sequence in one layer. A pass writes the next state into the buffers of the one before this."""

    history: Floats  # [conv_kernel - 1, 3 * width], q, k and v before the convolution, oldest first
    memory: Floats  # [heads, key, value]
    spare: tuple[Floats, Floats] | None = None  # history and memory that nobody reads any more
    shared: bool = False  # others begin with the same arrays: they never become spare

    @staticmethod
    def empty(config: ModelConfig) -> KdaState:
        """The beginning of any number of sequences, in any number of layers."""
        heads, dim = config.kda_heads, config.kda_head_dim
        return KdaState(
            history=np.zeros((config.conv_kernel - 1, 3 * config.kda_width), np.float32),
            memory=np.zeros((heads, dim, dim), np.float32),
            shared=True,
        )

    @property
    def nbytes(self) -> int:
        return self.history.nbytes + self.memory.nbytes

    def detached(self) -> KdaState:
        """The same, but its successor gets memory of its own."""
        return KdaState(self.history, self.memory, shared=self.shared)

    def copied(self) -> KdaState:
        return KdaState(self.history.copy(), self.memory.copy())

    def successor(self) -> KdaState:
        """The state after this one, still to be written. This one stays whole until that one is in use itself."""
        history, memory = self.spare or (np.empty_like(self.history), np.empty_like(self.memory))
        return KdaState(history, memory, None if self.shared else (self.history, self.memory))


@dataclass(frozen=True, slots=True)
class KdaRows:
    """What the recurrence reads of some rows; kept, it replays any prefix of them from the state before."""

    inputs: tuple[Floats, Floats, Floats]  # q, k, v before the convolution, each [rows, width]
    q: Floats  # [rows, width], like k and v after convolution and normalisation
    k: Floats
    v: Floats
    alpha: Floats  # [rows, width]
    beta: Floats  # [rows, heads]

    def some(self, rows: slice) -> KdaRows:
        q_in, k_in, v_in = self.inputs
        return KdaRows(
            (q_in[rows], k_in[rows], v_in[rows]),
            self.q[rows], self.k[rows], self.v[rows], self.alpha[rows], self.beta[rows],
        )  # fmt: skip

    def owned(self) -> KdaRows:
        """The same apart from the arrays of a pass, of which these may be a small part."""
        q_in, k_in, v_in = (_owned(a) for a in self.inputs)
        return KdaRows((q_in, k_in, v_in), *(_owned(a) for a in (self.q, self.k, self.v, self.alpha, self.beta)))

    def read(self, state: KdaState, out: Floats) -> None:
        """What the rows read, `out` [rows, width]; no state after them is written."""
        _math.kda_read(out, state.memory, self.q, self.k, self.v, self.alpha, self.beta)

    def advance(self, state: KdaState, out: Floats, after: KdaState, traffic: StateTraffic) -> KdaState:
        """`after` becomes the state after these rows; `out` [rows, width] gets what they read."""
        _math.kda_recur(out, after.memory, state.memory, self.q, self.k, self.v, self.alpha, self.beta)
        _math.kda_history(after.history, state.history, *self.inputs)
        traffic.written_nbytes += after.nbytes
        return after


@dataclass(frozen=True, slots=True)
class KdaDecision:
    """A layer's state before rows of which the last are proposals, and those rows."""

    before: KdaState
    rows: KdaRows

    def accept(self, count: int, traffic: StateTraffic) -> KdaState:
        """The state after the first `count` rows."""
        rows = self.rows.some(slice(0, count))
        return rows.advance(self.before, np.empty_like(rows.q), self.before.successor(), traffic)


def kda(
    x: Floats,
    parts: abc.Sequence[Part],
    spans: list[slice],
    states: list[KdaState],
    spine: Spine,
    config: ModelConfig,
    layer: int,
    traffic: StateTraffic,
) -> tuple[Floats, list[KdaState | KdaDecision | None]]:
    """Attention's output [rows, hidden] and what is left of each part; `spans` are the parts' rows.

    Left is the state after its rows; or, if some are proposals, what decides on them; or nothing if nobody keeps it.
    """
    q_in, k_in, v_in = (spine.linear(f"self_attn.{n}_proj.weight", x) for n in "qkv")  # each [rows, width]
    z = spine.linear("self_attn.f_b_proj.weight", spine.linear("self_attn.f_a_proj.weight", x))  # [rows, width]
    b = spine.linear("self_attn.b_proj.weight", x)  # [rows, heads]
    alpha, beta = np.empty_like(z), np.empty_like(b)
    rate, bias = per_head(spine.floats("self_attn.A_log"), config.kda_heads, layer), spine.floats("self_attn.dt_bias")
    _math.kda_gates(alpha, beta, z, b, rate, bias, config.gate_lower_bound)

    read = np.empty_like(z)  # [rows, width]
    after: list[KdaState | KdaDecision | None] = []
    for part, span, state in zip(parts, spans, states, strict=True):
        inputs = (q_in[span], k_in[span], v_in[span])
        rows = _prepare(inputs, alpha[span], beta[span], state, spine, config)
        after.append(_recur(part, rows, state, read[span], layer, traffic))

    gate = spine.linear("self_attn.g_proj.weight", x)
    _math.kda_output(read, read, gate, spine.floats("self_attn.o_norm.weight"), config.rms_norm_eps)
    return spine.linear("self_attn.o_proj.weight", read), after


def _recur(
    part: Part, rows: KdaRows, state: KdaState, out: Floats, layer: int, traffic: StateTraffic
) -> KdaState | KdaDecision | None:
    if part.drafted:
        rows.read(state, out)
        return KdaDecision(state, rows.owned())
    mark, after, begun = part.checkpoint, state, 0
    if mark is not None and mark.at < len(part):
        # In memory of its own: the state before the pass must stay, and its spare is for the end.
        first = rows.some(slice(0, mark.at))
        begun, after = mark.at, first.advance(state, out[: mark.at], state.detached().successor(), traffic)
        mark.sink.layer(layer, after)
    rest = rows.some(slice(begun, None))
    if not part.keep and not (mark is not None and mark.at == len(part)):
        rest.read(after, out[begun:])
        return None
    after = rest.advance(after, out[begun:], state.successor(), traffic)
    if mark is not None and mark.at == len(part):
        mark.sink.layer(layer, after)
    return after if part.keep else None


def _owned(values: Floats) -> Floats:
    return values.copy() if values.base is not None else values


def _prepare(
    inputs: tuple[Floats, Floats, Floats],
    alpha: Floats,
    beta: Floats,
    state: KdaState,
    spine: Spine,
    config: ModelConfig,
) -> KdaRows:
    q, k, v = (np.empty_like(i) for i in inputs)
    q_taps, k_taps, v_taps = (spine.floats(f"self_attn.{n}_conv1d.weight") for n in "qkv")
    _math.kda_prepare(q, k, v, *inputs, state.history, q_taps, k_taps, v_taps, config.kda_heads)
    return KdaRows(inputs, q, k, v, alpha, beta)


def per_head(stored: Floats, heads: int, layer: int) -> Floats:
    """A_log is one value per head, stored with head_dim entries; the rest must be the padding it is taken for."""
    padding = np.flatnonzero(stored[heads:])
    if len(padding):
        at = heads + int(padding[0])
        raise BadCheckpoint(
            f"{LAYER_PREFIX}{layer}.self_attn.A_log: entry {at} is {float(stored[at]):g}; "
            f"expected zero padding after the {heads} heads"
        )
    return stored[:heads]
