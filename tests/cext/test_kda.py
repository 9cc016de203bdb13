"""Kimi Delta Attention: the same bytes on every cut of the work and of the sequence, the written order, and float64."""

from __future__ import annotations

import numpy as np
import pytest

from deltafin.cext import _math

F = np.float32
SHAPES = [(1, 1), (2, 8), (3, 16), (2, 17), (1, 33), (2, 40), (2, 64), (1, 100), (2, 128)]  # heads, head_dim
TAPS = 4
LOWER_BOUND = -5.0


def floats(rng, *shape, scale=1.0):
    return (rng.standard_normal(shape) * scale).astype(F)


def empty(*shape):
    return np.full(shape, np.nan, F)


def fma(a, b, c):
    """Twice rounded, which for these values makes no difference."""
    return (np.asarray(a, np.float64) * b + c).astype(F)


def mapped(name, x):
    out = empty(*x.shape)
    getattr(_math, name)(out, x)
    return out


class Layer:
    """What a KDA layer's projections give for `rows` rows, and its small tensors."""

    def __init__(self, rng, rows, heads, dim):
        self.rows, self.heads, self.dim, self.width = rows, heads, dim, heads * dim
        self.inputs = [floats(rng, rows, self.width) for _ in range(3)]
        self.convs = [floats(rng, self.width, 1, TAPS, scale=0.5) for _ in range(3)]
        self.z, self.b, self.gate = (
            floats(rng, rows, self.width),
            floats(rng, rows, heads),
            floats(rng, rows, self.width),
        )
        self.a_log = np.concatenate([floats(rng, heads), np.zeros(3, F)])
        self.dt_bias, self.norm = floats(rng, self.width), floats(rng, dim)
        self.history = floats(rng, TAPS - 1, 3 * self.width)
        self.state = floats(rng, heads, dim, dim)

    def prepare(self, begin=0, end=None, history=None):
        history = self.history if history is None else history
        inputs = [x[begin:end] for x in self.inputs]
        out = [empty(*inputs[0].shape) for _ in range(3)]
        _math.kda_prepare(*out, *inputs, history, *self.convs, self.heads)
        new = empty(*history.shape)
        _math.kda_history(new, history, *inputs)
        return [*out, new]

    def gates(self):
        alpha, beta = empty(self.rows, self.width), empty(self.rows, self.heads)
        _math.kda_gates(alpha, beta, self.z, self.b, self.a_log, self.dt_bias, LOWER_BOUND)
        return [alpha, beta]

    def output(self, o):
        out = empty(*o.shape)
        _math.kda_output(out, o, self.gate[: len(o)], self.norm, 1e-5)
        return [out]


def recur(state, q, k, v, alpha, beta):
    out, new = empty(*q.shape), empty(*state.shape)
    _math.kda_recur(out, new, state, q, k, v, alpha, beta)
    read, before = empty(*q.shape), state.copy()
    _math.kda_read(read, state, q, k, v, alpha, beta)  # the same without a trace
    assert read.tobytes() == out.tobytes()
    assert state.tobytes() == before.tobytes()
    return [out, new]


@pytest.mark.parametrize(("heads", "dim"), SHAPES)
def test_bytes_do_not_depend_on_the_cut(heads, dim, everywhere):
    rng = np.random.default_rng(dim)
    for rows in (1, 2, 7):
        layer = Layer(rng, rows, heads, dim)
        q, k, v, _ = everywhere(layer.prepare)
        alpha, beta = everywhere(layer.gates)
        o, _ = everywhere(lambda args=(q, k, v, alpha, beta), layer=layer: recur(layer.state, *args))
        everywhere(lambda o=o, layer=layer: layer.output(o))


def test_many_rows_are_cut_into_blocks_without_a_trace(everywhere):
    layer = Layer(np.random.default_rng(0), 150, 2, 16)
    everywhere(layer.prepare)


@pytest.mark.parametrize(("heads", "dim"), [(2, 17), (2, 32), (1, 128)])
def test_recurrence_with_extreme_values(heads, dim, everywhere):
    rng = np.random.default_rng(dim)
    rows = 5
    q, k, v = (
        floats(rng, rows, heads * dim) * np.exp2(rng.integers(-60, 20, (rows, heads * dim))).astype(F) for _ in "qkv"
    )
    alpha = rng.choice(np.array([0, 1, 1e-38, 1e-45, 0.5], F), (rows, heads * dim))
    beta = rng.choice(np.array([0, 1, 0.25], F), (rows, heads))
    state = floats(rng, heads, dim, dim, scale=1e-38)
    state[rng.random(state.shape) < 0.2] = -0.0
    everywhere(lambda: recur(state, q, k, v, alpha, beta))


@pytest.mark.parametrize(("heads", "dim"), [(2, 8), (1, 33), (2, 128)])
def test_a_segment_may_be_cut_anywhere(heads, dim, settings):
    rng = np.random.default_rng(1)
    rows = 9
    layer = Layer(rng, rows, heads, dim)
    alpha, beta = layer.gates()
    q, k, v, history = layer.prepare()
    o, state = recur(layer.state, q, k, v, alpha, beta)
    for isa in _math.isas():
        _math.set_isa(isa)
        for cuts in [[c] for c in range(1, rows)] + [list(range(1, rows)), [0, 2, 2, 9]]:
            past, memory = layer.history, layer.state
            for begin, end in zip([0, *cuts], [*cuts, rows], strict=True):
                part = layer.prepare(begin, end, past)
                past = part[3]
                read, memory = recur(memory, *part[:3], alpha[begin:end], beta[begin:end])
                assert [p.tobytes() for p in part[:3]] == [w[begin:end].tobytes() for w in (q, k, v)]
                assert read.tobytes() == o[begin:end].tobytes()
            assert past.tobytes() == history.tobytes()
            assert memory.tobytes() == state.tobytes()


def test_replaying_a_prefix_of_kept_rows_gives_the_state_of_that_prefix(settings):
    layer = Layer(np.random.default_rng(2), 6, 2, 40)
    kept = [*layer.prepare()[:3], *layer.gates()]
    before = layer.state.tobytes()
    recur(layer.state, *kept)
    assert layer.state.tobytes() == before
    state, history = layer.state, layer.history
    for accepted in range(7):
        _, replayed = recur(layer.state, *(x[:accepted] for x in kept))
        assert replayed.tobytes() == state.tobytes()
        new = empty(*history.shape)
        _math.kda_history(new, layer.history, *(x[:accepted] for x in layer.inputs))
        assert new.tobytes() == history.tobytes()
        if accepted < 6:
            one = slice(accepted, accepted + 1)
            history = layer.prepare(accepted, accepted + 1, history)[3]
            _, state = recur(state, *(x[one] for x in kept))


@pytest.mark.parametrize("taps", [1, 2, 4, 7])
def test_history_is_the_last_rows_however_few_there_are(taps):
    rng = np.random.default_rng(taps)
    width = 5
    history = floats(rng, taps - 1, 3 * width)
    for rows in range(10):
        inputs = [floats(rng, rows, width) for _ in range(3)]
        new = empty(taps - 1, 3 * width)
        _math.kda_history(new, history, *inputs)
        want = np.concatenate([history, np.concatenate(inputs, 1)])[rows:]
        assert new.tobytes() == want.tobytes()


def sum_of_squares(x):
    lane = np.zeros(16, F)
    for i in range(0, len(x), 16):
        n = min(16, len(x) - i)
        lane[:n] = fma(x[i : i + n], x[i : i + n], lane[:n])
    a = lane[:8] + lane[8:]
    b = a[:4] + a[4:]
    c = b[:2] + b[2:]
    return c[0] + c[1]


@pytest.mark.parametrize(("heads", "dim"), [(2, 8), (1, 17), (2, 64)])
def test_bits_follow_the_written_order(heads, dim):
    rng = np.random.default_rng(3)
    rows = 5
    layer = Layer(rng, rows, heads, dim)
    q, k, v, _ = layer.prepare()
    for part, (got, x, conv) in enumerate(zip((q, k, v), layer.inputs, layer.convs, strict=True)):
        columns = slice(part * layer.width, (part + 1) * layer.width)
        padded = np.concatenate([layer.history[:, columns], x])
        y = np.zeros((rows, layer.width), F)
        for j in range(TAPS):
            y = fma(conv[:, 0, j], padded[j : j + rows], y)
        y = (y * mapped("sigmoid", y)).reshape(rows, heads, dim)
        if part < 2:
            for r in range(rows):
                for h in range(heads):
                    y[r, h] = y[r, h] * (F(1) / np.sqrt(sum_of_squares(y[r, h]) + F(1e-6)))
            if part == 0:
                y = y * F(1 / np.sqrt(np.float64(dim)))
        assert got.tobytes() == y.tobytes()

    alpha, beta = layer.gates()
    rate = mapped("exp", layer.a_log[:heads])
    inner = np.repeat(rate, dim) * (layer.z + layer.dt_bias)
    assert alpha.tobytes() == mapped("exp", F(LOWER_BOUND) * mapped("sigmoid", inner)).tobytes()
    assert beta.tobytes() == mapped("sigmoid", layer.b).tobytes()

    o, new = recur(layer.state, q, k, v, alpha, beta)
    for h in range(heads):
        s = layer.state[h].copy()
        mine = slice(h * dim, (h + 1) * dim)
        for t in range(rows):
            s = alpha[t, mine, None] * s
            known = np.zeros(dim, F)
            for i in range(dim):
                known = fma(k[t, mine][i], s[i], known)
            c = beta[t, h] * (v[t, mine] - known)
            s = fma(k[t, mine, None], c, s)
            read = np.zeros(dim, F)
            for i in range(dim):
                read = fma(q[t, mine][i], s[i], read)
            assert o[t, mine].tobytes() == read.tobytes()
        assert new[h].tobytes() == s.tobytes()

    (out,) = layer.output(o)
    for r in range(rows):
        for h in range(heads):
            mine = slice(h * dim, (h + 1) * dim)
            inverse = F(1) / np.sqrt(sum_of_squares(o[r, mine]) / F(dim) + F(1e-5))
            want = ((o[r, mine] * inverse) * layer.norm) * mapped("sigmoid", layer.gate[r, mine])
            assert out[r, mine].tobytes() == want.tobytes()


def test_float64_agrees_at_true_head_dimension():
    rng = np.random.default_rng(4)
    rows, heads, dim = 40, 3, 128
    layer = Layer(rng, rows, heads, dim)
    q, k, v, _ = layer.prepare()
    alpha, beta = layer.gates()
    o, new = recur(layer.state, q, k, v, alpha, beta)
    d = np.float64
    parts = []
    for part in range(3):
        columns = slice(part * layer.width, (part + 1) * layer.width)
        padded = np.concatenate([layer.history[:, columns], layer.inputs[part]]).astype(d)
        y = sum(layer.convs[part][:, 0, j] * padded[j : j + rows] for j in range(TAPS))
        parts.append((y / (1 + np.exp(-y))).reshape(rows, heads, dim))
    for i in range(2):
        parts[i] /= np.sqrt((parts[i] ** 2).sum(-1, keepdims=True) + 1e-6)
    parts[0] /= np.sqrt(dim)
    inner = np.exp(layer.a_log[:heads].astype(d))[:, None] * (layer.z.astype(d) + layer.dt_bias).reshape(
        rows, heads, dim
    )
    decay = np.exp(LOWER_BOUND / (1 + np.exp(-inner)))
    write = 1 / (1 + np.exp(-layer.b.astype(d)))
    s, read = layer.state.astype(d), []
    for t in range(rows):
        s = s * decay[t, :, :, None]
        change = parts[2][t] - np.einsum("hkv,hk->hv", s, parts[1][t])
        s = s + parts[1][t][:, :, None] * (write[t][:, None] * change)[:, None]
        read.append(np.einsum("hkv,hk->hv", s, parts[0][t]))
    read = np.stack(read)

    def rms(got, want):
        return np.sqrt(((got - want) ** 2).mean() / (want**2).mean())

    assert rms(alpha.reshape(decay.shape), decay) < 1e-6
    assert rms(o.reshape(read.shape), read) < 2e-6
    assert rms(new, s) < 2e-6
    want = read / np.sqrt((read**2).mean(-1, keepdims=True) + 1e-5) * layer.norm
    want = want.reshape(rows, -1) / (1 + np.exp(-layer.gate.astype(d)))
    assert rms(layer.output(o)[0], want) < 2e-6


def test_decay_over_the_whole_range_of_gates(everywhere):
    """-80 .. 80: from no decay at all to the lower bound, never NaN, never beyond them."""
    z = np.linspace(-80, 80, 641, dtype=F)[:, None].repeat(4, 1)
    layer = Layer(np.random.default_rng(0), len(z), 2, 2)
    layer.z, layer.dt_bias = z, np.zeros(4, F)
    layer.a_log = np.array([0, 1.5], F)
    layer.b = z[:, :2].copy()
    alpha, beta = everywhere(layer.gates)
    d = z.astype(np.float64) * np.repeat(np.exp([0, 1.5]), 2)
    np.testing.assert_allclose(alpha, np.exp(LOWER_BOUND / (1 + np.exp(-d))), rtol=1e-6)
    np.testing.assert_allclose(beta, 1 / (1 + np.exp(-z[:, :2].astype(np.float64))), rtol=4e-7)
    assert alpha.min() >= np.exp(LOWER_BOUND) * (1 - 1e-6)
    assert alpha.max() <= 1
    assert (np.diff(alpha, axis=0) <= 0).all()


def good_calls():
    rng = np.random.default_rng(0)
    layer = Layer(rng, 3, 2, 4)
    f = lambda *shape: np.zeros(shape, F)  # noqa: E731
    return {
        "kda_prepare": [f(3, 8), f(3, 8), f(3, 8), *layer.inputs, layer.history, *layer.convs, 2],
        "kda_history": [f(3, 24), layer.history, *layer.inputs],
        "kda_gates": [f(3, 8), f(3, 2), layer.z, layer.b, layer.a_log, layer.dt_bias, -5.0],
        "kda_recur": [f(3, 8), f(2, 4, 4), layer.state, f(3, 8), f(3, 8), f(3, 8), f(3, 8), f(3, 2)],
        "kda_read": [f(3, 8), layer.state, f(3, 8), f(3, 8), f(3, 8), f(3, 8), f(3, 2)],
        "kda_output": [f(3, 8), f(3, 8), f(3, 8), layer.norm, 1e-5],
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
            if not (name == "kda_gates" and i == 4):  # a_log is padded
                bad.append(np.zeros((*value.shape[:-1], value.shape[-1] + 1), F))
                bad.append(np.zeros((value.shape[0] + 1, *value.shape[1:]), F))
            if value.ndim > 1:
                bad.append(value[..., :1].copy())
        for wrong in bad:
            with pytest.raises((TypeError, ValueError)):
                function(*args[:i], wrong, *args[i + 1 :])


def test_heads_must_divide_the_width():
    args = good_calls()["kda_prepare"]
    for heads in (0, 3, 16, -1, 1 << 70):
        with pytest.raises(ValueError, match="heads"):
            _math.kda_prepare(*args[:-1], heads)


def test_a_state_is_not_updated_in_place():
    args = good_calls()["kda_recur"]
    args[1] = args[2]
    with pytest.raises(ValueError, match="shares memory"):
        _math.kda_recur(*args)
