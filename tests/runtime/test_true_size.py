"""Single layers at Kimi K3's true dimensions: the same bits everywhere, and the float64 reference's values."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from deltafin.cext import _math
from deltafin.indexer import expert_layout, parse_config
from deltafin.indexer.roles import spine_shapes
from deltafin.runtime import native
from deltafin.runtime.native import kda as native_kda
from deltafin.runtime.native import mla as native_mla
from deltafin.runtime.native import moe as native_moe
from deltafin.runtime.native.products import Spine
from deltafin.runtime.native.products import mlp as native_mlp
from deltafin.runtime.reference import kda as reference_kda
from deltafin.runtime.reference import mla as reference_mla
from deltafin.runtime.reference import mlp as reference_mlp
from deltafin.runtime.reference import moe as reference_moe
from deltafin.runtime.reference import spine as reference_spine
from deltafin.runtime.reference.spine import Spine as ReferenceSpine
from deltafin.runtime.segment import Part
from deltafin.runtime.traffic import StateTraffic
from deltafin.store import SpineLayer

ROWS = 5
KDA_LAYER, MLA_LAYER, DENSE_LAYER = 1, 3, 0
EXPERTS = 6  # of 896: the rest would only cost memory
CPU = torch.device("cpu")

assert native  # the package whose parts are tested


@pytest.fixture(scope="module")
def config(golden):
    full = parse_config((golden / "k3_config.json").read_bytes())
    return dataclasses.replace(full, num_experts=EXPERTS, top_k=4)


@pytest.fixture(scope="module")
def rng():
    return np.random.default_rng(20261130)


@pytest.fixture(scope="module")
def x(rng):
    return rng.standard_normal((ROWS, 7168), np.float32)


@pytest.fixture(autouse=True)
def _settings() -> Iterator[None]:
    isa, threads, grain = _math.isa(), _math.threads(), _math.grain()
    yield
    _math.set_isa(isa)
    _math.set_threads(threads)
    _math.set_grain(grain)


@pytest.fixture
def float64(monkeypatch):
    """The plain torch functions in double precision: they take their type from what `widen` gives."""

    def widen(stored, device):
        if stored.dtype == np.uint16:
            return torch.from_numpy(stored.view(np.int16)).view(torch.bfloat16).double()
        return torch.from_numpy(stored).double()

    monkeypatch.setattr(reference_spine, "widen", widen)
    decode = reference_moe.mxfp4.decode
    monkeypatch.setattr(reference_moe.mxfp4, "decode", lambda *a: decode(*a).double())


def make_spine(config, layer, rng, only: str) -> dict[str, np.ndarray]:
    """Random weights with a matrix's usual gain of about one."""
    tensors = {}
    for name, (dtype, shape) in spine_shapes(config, layer).items():
        if not name.startswith(only):
            continue
        if dtype == "F32":
            tensors[name] = _floats(name, shape, config, rng)
        elif "norm" in name:
            tensors[name] = np.full(shape, 0x3F80, np.uint16) + rng.integers(0, 32, shape, np.uint16)
        else:
            tensors[name] = _matrix(shape, rng)
    return tensors


def native_spine(tensors: dict[str, np.ndarray]) -> Spine:
    """A layer that is all in memory."""
    return Spine(SpineLayer(tensors))


def _matrix(shape, rng) -> np.ndarray:
    """bf16 bits with random sign and mantissa and three exponents; rows of length n have norm about one."""
    bits = np.arange(1 << 16, dtype=np.uint16)
    exponent = int(np.floor(127 - 0.5 * np.log2(shape[-1]))) - 1
    values = (bits & 0x807F) | ((exponent + (bits >> 8) % 3) << 7).astype(np.uint16)
    return values[rng.integers(0, 1 << 16, shape, np.uint16)]


def _floats(name, shape, config, rng) -> np.ndarray:
    if name.endswith("A_log"):
        values = np.zeros(shape, np.float32)
        values[: config.kda_heads] = rng.uniform(-0.5, 1, config.kda_heads)
        return values
    if name.endswith("dt_bias"):
        return rng.uniform(-7, 1, shape).astype(np.float32)
    if name.endswith("o_norm.weight"):
        return rng.uniform(0.8, 1.2, shape).astype(np.float32)
    return (rng.standard_normal(shape) * 0.4).astype(np.float32)


def make_expert(config, rng) -> np.ndarray:
    span = rng.integers(0, 256, sum(p.nbytes for p in expert_layout(config)), np.uint8)
    for part in expert_layout(config):
        if part.name.endswith("scale"):
            scales = rng.integers(118, 122, part.nbytes, np.uint8)
            span[part.offset : part.offset + part.nbytes] = scales
    return span


def same_bytes_everywhere(compute, isas=None) -> np.ndarray:
    """Runs `compute` with every instruction set and several thread counts; returns its one result."""
    expected = compute()
    for count in (1, 2, 3, 5):
        _math.set_threads(count)
        assert compute().tobytes() == expected.tobytes(), count
    for isa in isas or [i for i in _math.isas() if i != "scalar"]:
        _math.set_isa(isa)
        assert compute().tobytes() == expected.tobytes(), isa
    return expected


def relative_rms(found, expected) -> float:
    expected = expected.numpy() if isinstance(expected, torch.Tensor) else expected
    return float(np.sqrt(np.mean((found - expected) ** 2) / np.mean(expected**2)))


def pieces(count: int) -> list[list[slice]]:
    """Ways to cut `count` rows of one sequence into passes."""
    return [[slice(0, count)], [slice(i, i + 1) for i in range(count)], [slice(0, 2), slice(2, count)]]


def a_part(count: int, drafted: int = 0) -> Part:
    """One sequence's rows, all of a pass; only their number matters here."""
    return Part(0, 0, 0, [0] * count, None, None, tail=0, keep=True, drafted=drafted)


def native_attention(layer, x, state, tensors, config, drafted=0):
    """(output, what is left of the one sequence) of `native_kda.kda` or `native_mla.mla`."""
    rows, part = [slice(0, len(x))], [a_part(len(x), drafted)]
    attention = native_kda.kda if config.is_kda(layer) else native_mla.mla
    y, (left,) = attention(x, part, rows, [state], native_spine(tensors), config, layer, StateTraffic())
    return y, left


def test_a_kda_layer(config, rng, x, float64):
    tensors = make_spine(config, KDA_LAYER, rng, "self_attn.")

    def compute(cuts=(slice(0, ROWS),)):
        state, out = native_kda.KdaState.empty(config), []
        for rows in cuts:
            part = np.ascontiguousarray(x[rows])
            y, state = native_attention(KDA_LAYER, part, state, tensors, config)
            out.append(y)
        flat = [*(y.ravel() for y in out), state.memory.ravel(), state.history.ravel()]
        return np.concatenate(flat)

    found = same_bytes_everywhere(compute)
    for cuts in pieces(ROWS):
        assert compute(cuts).tobytes() == found.tobytes()
    empty = reference_kda.KdaState.empty(config, CPU)
    state = reference_kda.KdaState(empty.history.double(), empty.memory.double())
    expected, (after,), _ = reference_kda.kda(
        torch.from_numpy(x).double(), [slice(0, ROWS)], [state], ReferenceSpine(tensors, CPU), config, KDA_LAYER
    )
    y, memory = found[: x.size].reshape(x.shape), found[x.size :][: after.memory.numel()]
    assert relative_rms(y, expected) < 1e-5
    assert relative_rms(memory, after.memory.flatten()) < 1e-5


def test_proposals_in_a_kda_layer(config, rng, x):
    """However many are accepted, the state is that of the accepted rows alone, and output does not change."""
    tensors = make_spine(config, KDA_LAYER, rng, "self_attn.")
    begun = native_kda.KdaState.empty(config)
    _, state = native_attention(KDA_LAYER, x[:2].copy(), begun, tensors, config)
    rest = x[2:].copy()
    y, decision = native_attention(KDA_LAYER, rest, state, tensors, config, drafted=len(rest) - 1)
    for count in range(1, len(rest) + 1):
        out, expected = native_attention(KDA_LAYER, rest[:count].copy(), state.detached(), tensors, config)
        found = decision.accept(count, StateTraffic())
        assert found.memory.tobytes() == expected.memory.tobytes()
        assert found.history.tobytes() == expected.history.tobytes()
        assert y[:count].tobytes() == out.tobytes()


def test_an_mla_layer(config, rng, x, float64):
    tensors = make_spine(config, MLA_LAYER, rng, "self_attn.")
    # A context that crosses key blocks before these rows.
    before = rng.standard_normal((300, config.kv_lora_rank + config.qk_rope_head_dim), np.float32)

    def compute(cuts=(slice(0, ROWS),)):
        state, out = native_mla.Latents().extended(before), []
        for rows in cuts:
            part = np.ascontiguousarray(x[rows])
            y, state = native_attention(MLA_LAYER, part, state, tensors, config)
            out.append(y)
        return np.concatenate(out)

    found = same_bytes_everywhere(compute)
    for cuts in pieces(ROWS):
        assert compute(cuts).tobytes() == found.tobytes()
    state = reference_mla.Latents().extended(torch.from_numpy(before).double())
    expected, _ = reference_mla.mla(
        torch.from_numpy(x).double(), [slice(0, ROWS)], [state], ReferenceSpine(tensors, CPU), config
    )
    assert relative_rms(found, expected) < 1e-5


@pytest.mark.slow
def test_the_dense_layer(config, rng, x, float64):
    tensors = make_spine(config, DENSE_LAYER, rng, "mlp.")
    found = same_bytes_everywhere(lambda: native_mlp(x, native_spine(tensors), "mlp.", config))
    row_by_row = [native_mlp(x[i : i + 1], native_spine(tensors), "mlp.", config) for i in range(ROWS)]
    assert np.concatenate(row_by_row).tobytes() == found.tobytes()
    expected = reference_mlp.mlp(torch.from_numpy(x).double(), ReferenceSpine(tensors, CPU), "mlp.", config)
    assert relative_rms(found, expected) < 1e-5


def test_a_moe_layer(config, rng, x, float64):
    tensors = make_spine(config, KDA_LAYER, rng, "block_sparse_moe.")
    experts = {number: make_expert(config, rng) for number in range(EXPERTS)}
    layout = expert_layout(config)

    def compute(rows=slice(0, ROWS), order=1):
        part, spine = np.ascontiguousarray(x[rows]), native_spine(tensors)
        routes, bad = native_moe.route(part, spine, config)
        assert bad < 0
        latent, shared = native_moe.project(part, spine, config)
        landing = iter([(n, experts[n]) for n in routes.experts()][::order])
        total = native_moe.mix_experts(latent, routes, landing, layout, config, KDA_LAYER)
        return native_moe.unproject(total, shared, spine, config)

    found = same_bytes_everywhere(compute)
    assert compute(order=-1).tobytes() == found.tobytes()
    assert np.concatenate([compute(slice(i, i + 1)) for i in range(ROWS)]).tobytes() == found.tobytes()

    xd, spine = torch.from_numpy(x).double(), ReferenceSpine(tensors, CPU)
    scores = spine.linear("block_sparse_moe.gate.weight", xd)
    bias = spine["block_sparse_moe.gate.e_score_correction_bias"]
    routes = reference_moe.route(scores, bias, config.top_k, config.routed_scaling_factor)
    latent, shared = reference_moe.project(xd, spine, config)
    landing = iter([(n, experts[n]) for n in routes.experts()])
    total = reference_moe.mix_experts(latent, routes, landing, layout, config, KDA_LAYER)
    assert relative_rms(found, reference_moe.unproject(total, shared, spine, config)) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["kda", "mla", "dense", "moe"])
def test_the_scalar_kernels_give_the_same_bits(kind, config, rng, x):
    spine_of = {"kda": (KDA_LAYER, "self_attn."), "mla": (MLA_LAYER, "self_attn."), "dense": (DENSE_LAYER, "mlp.")}
    if kind == "moe":
        span, layout = make_expert(config, rng), expert_layout(config)
        parts = native_moe._parts(span, layout)
        latent = rng.standard_normal((2, config.latent_size), np.float32)
        compute = lambda: native_moe.expert(latent, parts, "w", config)  # noqa: E731
    else:
        layer, only = spine_of[kind]
        tensors, part = make_spine(config, layer, rng, only), x[:2].copy()
        spine = native_spine(tensors)
        begun = {"kda": native_kda.KdaState.empty(config), "mla": native_mla.Latents()}
        compute = {
            "kda": lambda: native_attention(layer, part, begun["kda"], tensors, config)[0],
            "mla": lambda: native_attention(layer, part, begun["mla"], tensors, config)[0],
            "dense": lambda: native_mlp(part, spine, "mlp.", config),
        }[kind]
    expected = compute()
    _math.set_isa("scalar")
    assert compute().tobytes() == expected.tobytes()
