"""Latent attention: the same bytes on every cut of the work and of the sequence, the written order, and float64."""

from __future__ import annotations

import numpy as np
import pytest

from deltafin.cext import _math

F = np.float32
BLOCK = 256
# heads, nope, rope, v, rank
SHAPES = [
    (1, 1, 1, 1, 1),
    (2, 8, 4, 8, 16),
    (3, 5, 3, 6, 17),
    (5, 16, 8, 4, 33),
    (7, 32, 16, 32, 100),
    (13, 24, 8, 20, 64),
]


def floats(rng, *shape, scale=1.0):
    return (rng.standard_normal(shape) * scale).astype(F)


def bf16(x):
    return (np.ascontiguousarray(x, F).view(np.uint32) >> 16).astype(np.uint16)


def widened(bits):
    return (bits.astype(np.uint32) << 16).view(F)


def empty(*shape):
    return np.full(shape, np.nan, F)


def fma(a, b, c):
    """Twice rounded, which for these values makes no difference."""
    return (np.asarray(a, np.float64) * b + c).astype(F)


def tree(lane):
    a = lane[..., :8] + lane[..., 8:]
    b = a[..., :4] + a[..., 4:]
    c = b[..., :2] + b[..., 2:]
    return c[..., 0] + c[..., 1]


def dots(w, x):
    """dot of every row of w with x."""
    lane = np.zeros((len(w), 16), F)
    for k in range(0, len(x), 16):
        n = min(16, len(x) - k)
        lane[:, :n] = fma(w[:, k : k + n], x[k : k + n], lane[:, :n])
    return tree(lane)


def exp(x):
    x = np.atleast_1d(np.asarray(x, F))
    out = empty(*x.shape)
    _math.exp(out, x)
    return out


def cache(keys):
    """Blocks of 256 for keys [n, width]; what lies beyond is NaN, so that reading it would show."""
    blocks = []
    for first in range(0, len(keys), BLOCK):
        block = empty(BLOCK, keys.shape[1])
        some = keys[first : first + BLOCK]
        block[: len(some)] = some
        blocks.append(block)
    return tuple(blocks)


def absorb(q, kv_b, width):
    query = empty(*q.shape[:2], width)
    _math.mla_absorb(query, q, kv_b)
    return [query]


def attend(query, blocks, position, rank):
    out = empty(*query.shape[:2], rank)
    _math.mla_attend(out, query, blocks, position)
    return [out]


def values(attended, kv_b, v):
    out = empty(len(attended), attended.shape[1] * v)
    _math.mla_values(out, attended, kv_b)
    return [out]


@pytest.mark.parametrize(("heads", "nope", "rope", "v", "rank"), SHAPES)
def test_bytes_do_not_depend_on_the_cut(heads, nope, rope, v, rank, everywhere):
    rng = np.random.default_rng(rank)
    kv_b = bf16(floats(rng, heads * (nope + v), rank))
    for rows in (1, 2, 8):
        q = floats(rng, rows, heads, nope + rope)
        (query,) = everywhere(lambda q=q: absorb(q, kv_b, rank + rope))
        for position in (0, 3, 250, 700):
            blocks = cache(floats(rng, position + rows, rank + rope))
            (lat,) = everywhere(lambda a=(query, blocks, position): attend(*a, rank))
            assert np.isfinite(lat).all()
        everywhere(lambda lat=lat: values(lat, kv_b, v))


def test_bytes_do_not_depend_on_the_cut_at_true_dimensions(settings):
    rng = np.random.default_rng(0)
    heads, nope, rope, v, rank = 96, 128, 64, 128, 512
    kv_b = bf16(floats(rng, heads, nope + v, rank, scale=0.05))
    (query,) = absorb(floats(rng, 2, heads, nope + rope), kv_b, rank + rope)
    blocks = cache(floats(rng, 301, rank + rope))
    _math.set_isa("avx2" if "avx2" in _math.isas() else "scalar")
    (lat,) = attend(query, blocks, 299, rank)
    for isa in _math.isas():
        for threads, grain in ((1, 0), (3, 3000)):
            _math.set_isa(isa)
            _math.set_threads(threads)
            _math.set_grain(grain)
            if isa != "scalar":
                assert attend(query, blocks, 299, rank)[0].tobytes() == lat.tobytes()
            else:
                some = np.ascontiguousarray(query[:, :7])
                assert attend(some, blocks, 299, rank)[0].tobytes() == np.ascontiguousarray(lat[:, :7]).tobytes()


@pytest.mark.parametrize("position", [0, 255, 256, 511])
def test_a_segment_may_be_cut_anywhere(position, settings):
    rng = np.random.default_rng(position)
    rows, heads, rank, rope = 7, 7, 40, 8
    query = floats(rng, rows, heads, rank + rope)
    keys = floats(rng, position + rows, rank + rope)
    (whole,) = attend(query, cache(keys), position, rank)
    for isa in _math.isas():
        _math.set_isa(isa)
        for cut in range(1, rows):
            for begin, end in ((0, cut), (cut, rows)):
                seen = cache(keys[: position + end])
                (part,) = attend(query[begin:end], seen, position + begin, rank)
                assert part.tobytes() == whole[begin:end].tobytes()


def test_heads_are_computed_as_if_alone(settings):
    rng = np.random.default_rng(0)
    query, blocks = floats(rng, 2, 9, 48), cache(floats(rng, 300, 48))
    (together,) = attend(query, blocks, 298, 40)
    for isa in _math.isas():
        _math.set_isa(isa)
        for h in range(9):
            (alone,) = attend(np.ascontiguousarray(query[:, h : h + 1]), blocks, 298, 40)
            assert alone.tobytes() == together[:, h : h + 1].tobytes()


def test_scores_of_any_size_stay_finite(everywhere):
    rng = np.random.default_rng(1)
    query = floats(rng, 3, 4, 24, scale=300)
    for scale in (1e-30, 1.0, 100.0):
        blocks = cache(floats(rng, 600, 24, scale=scale))
        (lat,) = everywhere(lambda b=blocks: attend(query, b, 590, 16))
        assert np.isfinite(lat).all()


@pytest.mark.parametrize("position", [0, 20, 300])
def test_bits_follow_the_written_order(position):
    rng = np.random.default_rng(2)
    rows, heads, nope, rope, v, rank = 2, 3, 6, 5, 4, 37
    kv_b = bf16(floats(rng, heads, nope + v, rank))
    q = floats(rng, rows, heads, nope + rope)
    (query,) = absorb(q, kv_b, rank + rope)
    scale = F(1 / np.sqrt(np.float64(nope + rope)))
    w = widened(kv_b)
    for r in range(rows):
        for h in range(heads):
            qa = np.zeros(rank, F)
            for n in range(nope):
                qa = fma(q[r, h, n], w[h, n], qa)
            assert query[r, h].tobytes() == (np.concatenate([qa, q[r, h, nope:]]) * scale).tobytes()

    keys = floats(rng, position + rows, rank + rope)
    (got,) = attend(query, cache(keys), position, rank)
    for r in range(rows):
        for h in range(heads):
            m, total, lat = F(-np.inf), F(0), np.zeros(rank, F)
            for first in range(0, position + r + 1, BLOCK):
                seen = keys[first : min(first + BLOCK, position + r + 1)]
                s = dots(seen, query[r, h])
                new = max(m, s.max())
                fade, p = exp(m - new)[0], exp(s - new)
                lane = np.zeros(16, F)
                for k in range(0, len(p), 16):
                    lane[: len(p[k : k + 16])] += p[k : k + 16]
                total = fma(total, fade, tree(lane))
                lat = lat * fade
                for i in range(len(seen)):
                    lat = fma(p[i], seen[i, :rank], lat)
                m = new
            assert got[r, h].tobytes() == (lat / total).tobytes()

    (out,) = values(got, kv_b, v)
    for r in range(rows):
        want = np.concatenate([dots(w[h, nope:], got[r, h]) for h in range(heads)])
        assert out[r].tobytes() == want.tobytes()


def test_float64_agrees_at_true_dimensions():
    rng = np.random.default_rng(3)
    rows, heads, nope, rope, v, rank, position = 3, 6, 128, 64, 128, 512, 700
    kv_b = bf16(floats(rng, heads, nope + v, rank, scale=0.05))
    q, keys = floats(rng, rows, heads, nope + rope), floats(rng, position + rows, rank + rope)
    (query,) = absorb(q, kv_b, rank + rope)
    (lat,) = attend(query, cache(keys), position, rank)
    (out,) = values(lat, kv_b, v)
    w, d = widened(kv_b).astype(float), keys.astype(float)
    k_nope, value = (
        np.einsum("hnc,sc->shn", w[:, :nope], d[:, :rank]),
        np.einsum("hvc,sc->shv", w[:, nope:], d[:, :rank]),
    )
    scores = np.einsum("rhn,shn->rhs", q[..., :nope].astype(float), k_nope)
    scores = (scores + np.einsum("rhp,sp->rhs", q[..., nope:].astype(float), d[:, rank:])) / np.sqrt(nope + rope)
    scores[np.arange(len(keys)) > position + np.arange(rows)[:, None, None] + np.zeros((1, heads, 1))] = -np.inf
    p = np.exp(scores - scores.max(-1, keepdims=True))
    want = np.einsum("rhs,shv->rhv", p / p.sum(-1, keepdims=True), value).reshape(rows, -1)
    assert np.sqrt(((out - want) ** 2).mean() / (want**2).mean()) < 2e-6


@pytest.mark.parametrize("rank", [1, 16, 33, 512])
def test_latents_are_normalised_and_the_key_part_is_not(rank, everywhere):
    rng = np.random.default_rng(rank)
    kv, norm = floats(rng, 5, rank + 7), bf16(floats(rng, rank))

    def compute():
        out = empty(5, rank + 7)
        _math.mla_latents(out, kv, norm, 1e-6)
        return [out]

    (out,) = everywhere(compute)
    want = empty(5, rank)
    _math.rms_norm(want, np.ascontiguousarray(kv[:, :rank]), norm, 1e-6)
    assert np.ascontiguousarray(out[:, :rank]).tobytes() == want.tobytes()
    assert np.ascontiguousarray(out[:, rank:]).tobytes() == np.ascontiguousarray(kv[:, rank:]).tobytes()
    in_place = kv.copy()
    _math.mla_latents(in_place, in_place, norm, 1e-6)
    assert in_place.tobytes() == out.tobytes()


def good_calls():
    f = lambda *shape: np.zeros(shape, F)  # noqa: E731
    kv_b = np.zeros((2, 9, 8), np.uint16)  # nope 5, v 4
    return {
        "mla_latents": [f(3, 11), f(3, 11), np.zeros(8, np.uint16), 1e-6],
        "mla_absorb": [f(3, 2, 11), f(3, 2, 8), kv_b],
        "mla_attend": [f(3, 2, 8), f(3, 2, 11), (f(256, 11), f(256, 11)), 300],
        "mla_values": [f(3, 2, 4), f(3, 2, 8), kv_b],
    }


@pytest.mark.parametrize("name", good_calls())
def test_wrong_arguments_are_refused(name):
    function, args = getattr(_math, name), good_calls()[name]
    function(*args)
    with pytest.raises(TypeError):
        function(*args[:-1])
    for i, value in enumerate(args):
        bad = [None, "x"]
        if isinstance(value, np.ndarray):
            bad += [value.astype(np.float64), value[None, None], value.tolist(), np.zeros((*value.shape, 2), F)[..., 0]]
            if value.ndim > 1:  # a norm says itself how long a latent is
                bad.append(np.zeros((value.shape[0] + 1, *value.shape[1:]), value.dtype))
            if value.ndim == 3 and value.dtype == F:  # kv_b may have more rows: its values
                bad.append(np.zeros((value.shape[0], value.shape[1] + 1, value.shape[2]), value.dtype))
            if (name, i) != ("mla_attend", 0):  # nothing to compute
                bad.append(value[..., :0].copy())
        if name == "mla_attend" and i == 2:
            bad += [value[:1], list(value), (value[0], value[1][:, :4].copy()), (value[0], value[1][:100])]
        if name == "mla_attend" and i == 3:
            bad += [510, -1, 1 << 62, 1 << 80, 1.0]
        for wrong in bad:
            with pytest.raises((TypeError, ValueError)):
                function(*args[:i], wrong, *args[i + 1 :])


def test_the_cache_is_not_where_results_go():
    args = good_calls()["mla_attend"]
    args[0] = args[2][1].reshape(-1)[:48].reshape(3, 2, 8)
    with pytest.raises(ValueError, match="shares memory"):
        _math.mla_attend(*args)
