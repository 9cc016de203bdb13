"""Kimi Delta Attention by its recurrence, in prefill as in decode.

Each head carries a matrix S [key, value]. A token decays S per key channel, replaces what S remembers for its
key by its value (as far as beta says), and reads S with its query. Time order comes from here and from a short
causal convolution over q, k and v; both leave a state behind.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from deltafin.errors import BadCheckpoint
from deltafin.indexer import ModelConfig
from deltafin.runtime.reference.norm import l2_norm, rms_norm
from deltafin.runtime.reference.spine import Spine


@dataclass(frozen=True, slots=True)
class KdaState:
    """One sequence in one layer. Never written after it was made: a failed pass leaves the old one as it was."""

    history: Tensor  # [conv_kernel - 1, 3 * width], q, k and v before the convolution, oldest first
    memory: Tensor  # [heads, key, value]

    @staticmethod
    def empty(config: ModelConfig, device: torch.device) -> KdaState:
        heads, dim = config.kda_heads, config.kda_head_dim
        return KdaState(
            history=torch.zeros(config.conv_kernel - 1, 3 * config.kda_width, dtype=torch.float32, device=device),
            memory=torch.zeros(heads, dim, dim, dtype=torch.float32, device=device),
        )


@dataclass(frozen=True, slots=True)
class KdaRows:
    """What the recurrence reads of some rows, from which any prefix of them can be replayed."""

    qkv: Tensor  # [rows, 3 * width], before the convolution
    q: Tensor  # [rows, heads, dim], like k and v
    k: Tensor
    v: Tensor
    decay: Tensor  # [rows, heads, dim]
    beta: Tensor  # [rows, heads]

    def advance(self, state: KdaState, count: int) -> tuple[Tensor, KdaState]:
        """What the first `count` rows read [count, heads, dim], and the state after them."""
        memory = state.memory.clone()  # [heads, key, value]
        q, k, v, decay, beta = (t[:count] for t in (self.q, self.k, self.v, self.decay, self.beta))
        read = recur(memory, q, k, v, decay, beta)
        return read, KdaState(shifted(state.history, self.qkv[:count]), memory)


def kda(
    x: Tensor, spans: list[slice], states: list[KdaState], spine: Spine, config: ModelConfig, layer: int
) -> tuple[Tensor, list[KdaState], list[KdaRows]]:
    """Attention's output [rows, hidden], each segment's state after its rows, and the rows; `spans` are theirs."""
    heads, dim = config.kda_heads, config.kda_head_dim
    qkv = torch.cat([spine.linear(f"self_attn.{n}_proj.weight", x) for n in "qkv"], dim=1)  # [rows, 3 * width]
    taps = torch.cat([spine[f"self_attn.{n}_conv1d.weight"] for n in "qkv"]).squeeze(1)  # [3 * width, kernel]
    z = spine.linear("self_attn.f_b_proj.weight", spine.linear("self_attn.f_a_proj.weight", x))  # [rows, width]
    z = z + spine["self_attn.dt_bias"]
    rate = torch.exp(per_head(spine["self_attn.A_log"], heads, layer))  # [heads]
    decay = torch.exp(log_decay(z.view(-1, heads, dim), rate, config.gate_lower_bound))  # [rows, heads, key]
    beta = torch.sigmoid(spine.linear("self_attn.b_proj.weight", x))  # [rows, heads]

    read = x.new_empty(x.shape[0], heads, dim)
    after: list[KdaState] = []
    replays: list[KdaRows] = []
    for span, state in zip(spans, states, strict=True):
        mixed = causal_conv(qkv[span], state.history, taps)
        q, k, v = F.silu(mixed).view(-1, 3, heads, dim).unbind(1)  # each [rows, heads, dim]
        rows = KdaRows(qkv[span], l2_norm(q) * dim**-0.5, l2_norm(k), v, decay[span], beta[span])
        read[span], state_after = rows.advance(state, span.stop - span.start)
        after.append(state_after)
        replays.append(rows)

    out = rms_norm(read, spine["self_attn.o_norm.weight"], config.rms_norm_eps).flatten(1)  # [rows, width]
    out = out * torch.sigmoid(spine.linear("self_attn.g_proj.weight", x))
    return spine.linear("self_attn.o_proj.weight", out), after, replays


def per_head(stored: Tensor, heads: int, layer: int) -> Tensor:
    """A_log is one value per head, stored with head_dim entries; the rest must be the padding it is taken for."""
    tail = stored[heads:]
    if tail.any():
        at = heads + int(tail.nonzero()[0])
        raise BadCheckpoint(
            f"language_model.model.layers.{layer}.self_attn.A_log: entry {at} is {float(stored[at]):g}; "
            f"expected zero padding after the {heads} heads"
        )
    return stored[:heads]


def log_decay(z: Tensor, rate: Tensor, lower_bound: float) -> Tensor:
    """g in [lower_bound, 0] for z [rows, heads, key]: a scaled sigmoid, neither a clamp nor a softplus."""
    return lower_bound * torch.sigmoid(rate[:, None] * z)


def causal_conv(x: Tensor, history: Tensor, taps: Tensor) -> Tensor:
    """Each channel's last `kernel` inputs weighted by its taps, the newest by the last."""
    rows, kernel = x.shape[0], taps.shape[1]
    padded = torch.cat([history, x])  # [kernel - 1 + rows, channels]
    y = taps[:, 0] * padded[:rows]
    for j in range(1, kernel):
        y += taps[:, j] * padded[j : j + rows]
    return y


def shifted(history: Tensor, x: Tensor) -> Tensor:
    """The history after these rows."""
    return torch.cat([history, x])[x.shape[0] :].clone()


def recur(memory: Tensor, q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor) -> Tensor:
    """Walk the rows in time order, updating `memory` [heads, key, value] in place; returns what each row read."""
    read = torch.empty_like(v)  # [rows, heads, value]
    for t in range(q.shape[0]):
        memory *= decay[t].unsqueeze(-1)
        change = v[t] - torch.einsum("hkv,hk->hv", memory, k[t])  # against the decayed memory
        memory += k[t].unsqueeze(-1) * (beta[t].unsqueeze(-1) * change).unsqueeze(1)
        read[t] = torch.einsum("hkv,hk->hv", memory, q[t])  # from the updated memory
    return read
