"""Norms, mixtures, activations, router and head: the same bytes however they are cut, the order that the documentation
gives, and float64 within a tolerance."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from deltafin.cext import _math

F = np.float32
ROOT = Path(__file__).resolve().parents[2]
WIDTHS = [1, 3, 15, 16, 17, 31, 32, 33, 100, 257]
NEAR = {"rtol": 3e-6, "atol": 1e-7}


def floats(rng, *shape, scale=1.0):
    return (rng.standard_normal(shape) * scale).astype(F)


def wild(rng, *shape):
    """Finite values of every magnitude, subnormals and zeros of both signs among them."""
    x = rng.integers(0, 1 << 32, shape, dtype=np.uint32)
    x[rng.random(shape) < 0.1] &= 0x80000000
    x[rng.random(shape) < 0.1] &= 0x807FFFFF
    x[(x & 0x7F800000) == 0x7F800000] &= 0xBFFFFFFF
    return x.view(F)


def bf16(x):
    return (np.ascontiguousarray(x, F).view(np.uint32) >> 16).astype(np.uint16)


def widened(bits):
    return (bits.astype(np.uint32) << 16).view(F)


def empty(*shape, dtype=F):
    out = np.empty(shape, dtype)
    out.view(np.uint8).fill(0xFF)
    return out


def into(function, out, *args):
    function(out, *args)
    return [out]


def fma(a, b, c):
    """Twice rounded, which for these values makes no difference."""
    return (np.asarray(a, np.float64) * b + c).astype(F)


def tree(lane):
    a = lane[:8] + lane[8:]
    b = a[:4] + a[4:]
    c = b[:2] + b[2:]
    return c[0] + c[1]


def dot(w, x):
    lane = np.zeros(16, F)
    for k in range(0, len(w), 16):
        n = min(16, len(w) - k)
        lane[:n] = fma(w[k : k + n], x[k : k + n], lane[:n])
    return tree(lane)


def inverse_rms(v, eps):
    return F(1) / np.sqrt(dot(v, v) / F(len(v)) + F(eps))


def exp(x):
    out = empty(*np.shape(np.atleast_1d(x)))
    _math.exp(out, np.atleast_1d(np.asarray(x, F)))
    return out


# Element by element


@pytest.mark.parametrize("n", WIDTHS)
def test_elementwise_bytes_do_not_depend_on_the_cut(n, everywhere):
    rng = np.random.default_rng(n)
    for a, b in [(floats(rng, 5, n, scale=3), floats(rng, 5, n, scale=30)), (wild(rng, 5, n), wild(rng, 5, n))]:
        everywhere(lambda a=a, b=b: into(_math.add, empty(5, n), a, b))
        everywhere(lambda a=a, b=b: into(_math.sigmoid_gate, empty(5, n), a, b))
        everywhere(lambda a=a, b=b: into(_math.situ, empty(5, n), a, b, 4.0, 25.0))
        bits = bf16(a)
        (wide,) = everywhere(lambda bits=bits: into(_math.widen_bf16, empty(5, n), bits))
        assert wide.tobytes() == widened(bits).tobytes()


def test_elementwise_results_may_replace_an_argument(settings):
    rng = np.random.default_rng(0)
    a, b = floats(rng, 7, 37), floats(rng, 7, 37)
    for function, more in [(_math.add, ()), (_math.sigmoid_gate, ()), (_math.situ, (4.0, 25.0))]:
        (want,) = into(function, empty(7, 37), a, b, *more)
        for replaced in (0, 1):
            args = [a.copy(), b.copy()]
            function(args[replaced], *args, *more)
            assert args[replaced].tobytes() == want.tobytes()


def test_situ_and_gate_agree_with_float64():
    rng = np.random.default_rng(0)
    g, u = floats(rng, 10000, scale=8), floats(rng, 10000, scale=60)
    sigmoid = 1 / (1 + np.exp(-g.astype(float)))
    (got,) = into(_math.situ, empty(10000), g, u, 4.0, 25.0)
    want = 4 * np.tanh(g.astype(float) / 4) * sigmoid * 25 * np.tanh(u.astype(float) / 25)
    np.testing.assert_allclose(got, want, rtol=2e-6)
    (got,) = into(_math.sigmoid_gate, empty(10000), u, g)
    np.testing.assert_allclose(got, u * sigmoid, rtol=5e-7)


def test_situ_follows_the_written_order():
    rng = np.random.default_rng(0)
    g, u, beta, linear = floats(rng, 500, scale=8), floats(rng, 500, scale=60), F(4.7), F(24.3)
    tanh_g, tanh_u, sig = empty(500), empty(500), empty(500)
    _math.tanh(tanh_g, g / beta)
    _math.tanh(tanh_u, u / linear)
    _math.sigmoid(sig, g)
    (got,) = into(_math.situ, empty(500), g, u, float(beta), float(linear))
    assert got.tobytes() == (((beta * tanh_g) * sig) * (linear * tanh_u)).tobytes()


# Rows


@pytest.mark.parametrize("n", [*WIDTHS, 7168])
def test_norm_and_mix_bytes_do_not_depend_on_the_cut(n, everywhere):
    rng = np.random.default_rng(n)
    rows = 6
    w, proj = bf16(floats(rng, n)), bf16(floats(rng, n))
    sources = tuple(floats(rng, rows, n, scale=2.0**i) for i in range(5))
    for x in (sources[0], wild(rng, rows, n) * F(1e-20)):
        everywhere(lambda x=x: into(_math.rms_norm, empty(rows, n), x, w, 1e-5))
    everywhere(lambda: into(_math.rms_norm, empty(rows, n), sources[1], widened(proj), 1e-6))
    for count in (1, 2, 5):
        everywhere(lambda count=count: into(_math.mix, empty(rows, n), sources[:count], w, proj, 1e-5))
    outputs, weights = floats(rng, rows, 5, n), floats(rng, rows, 5)
    everywhere(lambda: into(_math.combine, empty(rows, n), outputs, weights))


@pytest.mark.parametrize("n", [17, 48, 517])
def test_norm_mix_and_combine_follow_the_written_order(n):
    rng = np.random.default_rng(n)
    rows, count, eps = 4, 5, 1e-5
    w, proj = bf16(floats(rng, n)), bf16(floats(rng, n))
    sources = tuple(floats(rng, rows, n) for _ in range(count))
    (got,) = into(_math.rms_norm, empty(rows, n), sources[0], w, eps)
    assert got.tobytes() == np.stack([(v * inverse_rms(v, eps)) * widened(w) for v in sources[0]]).tobytes()

    (got,) = into(_math.mix, empty(rows, n), sources, w, proj[None], eps)
    u = widened(w) * widened(proj)
    for r in range(rows):
        v = [s[r] for s in sources]
        z = np.array([inverse_rms(s, eps) * dot(u, s) for s in v], F)
        e = exp(z - z.max())
        total = e[0]
        for j in range(1, count):
            total = total + e[j]
        want = (e[0] / total) * v[0]
        for j in range(1, count):
            want = fma(e[j] / total, v[j], want)
        assert got[r].tobytes() == want.tobytes()

    outputs, weights = floats(rng, rows, count, n), floats(rng, rows, count)
    (got,) = into(_math.combine, empty(rows, n), outputs, weights)
    want = np.zeros((rows, n), F)
    for j in range(count):
        want = fma(weights[:, j, None], outputs[:, j], want)
    assert got.tobytes() == want.tobytes()


def test_norm_and_mix_agree_with_float64():
    rng = np.random.default_rng(3)
    n, eps = 7168, 1e-5
    w, proj = bf16(floats(rng, n)), bf16(floats(rng, n, scale=0.02))
    v = np.stack([floats(rng, 3, n, scale=2.0**i) for i in range(9)])
    d = v.astype(float)
    r = 1 / np.sqrt((d**2).mean(-1, keepdims=True) + eps)
    (got,) = into(_math.rms_norm, empty(3, n), v[2], w, eps)
    np.testing.assert_allclose(got, (d * r)[2] * widened(w), **NEAR)
    z = (d * r) @ (widened(w).astype(float) * widened(proj))
    a = np.exp(z - z.max(0))
    want = ((a / a.sum(0))[..., None] * d).sum(0)
    (got,) = into(_math.mix, empty(3, n), tuple(v), w, proj, eps)
    assert np.sqrt(((got - want) ** 2).mean() / (want**2).mean()) < 1e-6


def test_a_row_is_computed_as_if_alone(settings):
    rng = np.random.default_rng(4)
    n = 100
    w = bf16(floats(rng, n))
    v = tuple(floats(rng, 9, n) for _ in range(3))
    (together,) = into(_math.mix, empty(9, n), v, w, w, 1e-5)
    for r in range(9):
        (alone,) = into(_math.mix, empty(1, n), tuple(s[r : r + 1] for s in v), w, w, 1e-5)
        assert alone.tobytes() == together[r].tobytes()


def test_one_source_is_copied_bit_for_bit():
    x = np.array([[0x7FC01234, 0x80000000, 5, 0x3F800000]], np.uint32).view(F)
    w = np.zeros(4, np.uint16)
    assert into(_math.mix, empty(1, 4), (x,), w, w, 1e-5)[0].tobytes() == x.tobytes()


def test_weights_may_lie_at_any_address():
    rng = np.random.default_rng(5)
    n = 50
    bits = bf16(floats(rng, n))
    odd = np.frombuffer(b"x" + bits.tobytes(), np.uint8)[1:].view(np.uint16)
    x = floats(rng, 2, n)
    assert (
        into(_math.rms_norm, empty(2, n), x, odd, 1e-5)[0].tobytes()
        == into(_math.rms_norm, empty(2, n), x, bits, 1e-5)[0].tobytes()
    )


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_the_first_row_that_is_not_finite_is_named(bad, settings):
    rng = np.random.default_rng(0)
    for isa in _math.isas():
        _math.set_isa(isa)
        for n in (1, 16, 33, 1000):
            for threads, grain in ((1, 0), (3, 1)):
                _math.set_threads(threads)
                _math.set_grain(grain)
                x = wild(rng, 40, n) if isa == "scalar" else np.full((40, n), np.finfo(F).max)
                assert _math.all_finite(x) == -1
                x[17, n - 1] = bad
                x[31, 0] = bad
                assert _math.all_finite(x) == 17
    assert _math.all_finite(empty(0, 5)) == -1


# Router


def routed(scores, bias, k, scaling=1.0):
    ids, weights = empty(len(scores), k, dtype=np.int32), empty(len(scores), k)
    assert _math.route(ids, weights, scores, bias, scaling) == -1
    return [ids, weights]


@pytest.mark.parametrize("experts", [1, 2, 15, 17, 512, 895, 896])
def test_router_chooses_the_largest_keys_and_of_equals_the_lower_number(experts, everywhere):
    rng = np.random.default_rng(experts)
    scores = np.round(floats(rng, 20, experts), 1)  # many ties
    bias = np.round(floats(rng, experts, scale=0.1), 1)
    for k in {1, min(16, experts), experts}:
        ids, weights = everywhere(lambda k=k: routed(scores, bias, k, 2.5))
        p = empty(*scores.shape)
        _math.sigmoid(p, scores)
        for r in range(len(scores)):
            order = np.lexsort((np.arange(experts), -(p[r] + bias)))[:k]
            assert ids[r].tolist() == sorted(order.tolist())
            mine = p[r][ids[r]]
            total = mine[0]
            for other in mine[1:]:
                total = total + other
            assert weights[r].tobytes() == ((mine / (total + F(1e-20))) * F(2.5)).tobytes()


def test_router_cases(tmp_path, everywhere):
    out = tmp_path / "cases.json"
    subprocess.run([sys.executable, ROOT / "tests/faults/router_cases.py", out], check=True, stdout=subprocess.DEVNULL)
    for case in json.loads(out.read_text()):
        scores, bias = np.array([case["logits"]], F), np.array(case["bias"], F)
        ids, weights = everywhere(lambda scores=scores, bias=bias: routed(scores, bias, 16))
        want = dict(zip(case["ids"], case["weights"], strict=True))
        assert ids[0].tolist() == sorted(want), case["name"]
        np.testing.assert_allclose(weights[0], [want[e] for e in sorted(want)], rtol=1e-5)


def test_router_takes_infinite_scores_and_biases_and_names_rows_with_nan(settings):
    scores = np.array([[0, np.inf, -np.inf, 1], [0, 0, 0, 0]], F)
    ids, weights = routed(scores, np.array([0, 0, np.inf, -np.inf], F), 2)
    assert ids.tolist() == [[1, 2], [0, 2]]
    assert weights[0].tolist() == [1.0, 0.0]
    many = np.zeros((50, 33), F)
    many[[20, 31], [32, 0]] = np.nan
    ids, weights = empty(50, 4, dtype=np.int32), empty(50, 4)
    for threads, grain in ((1, 0), (3, 1)):
        _math.set_threads(threads)
        _math.set_grain(grain)
        assert _math.route(ids, weights, many, np.zeros(33, F), 1.0) == 20


# Head


@pytest.mark.parametrize("vocab", [1, 15, 16, 1023, 1024, 1025, 5000])
def test_log_probabilities_do_not_depend_on_how_tiles_are_joined(vocab, everywhere):
    rng = np.random.default_rng(vocab)
    logits = floats(rng, 5, vocab, scale=5)
    targets = rng.integers(0, vocab, 5)

    def compute(step):
        top, total, out = np.full(5, -np.inf, F), np.zeros(5, F), empty(5)
        for first in range(0, vocab, step):
            _math.log_prob_tiles(top, total, np.ascontiguousarray(logits[:, first : first + step]), first)
        _math.log_prob_finish(out, np.ascontiguousarray(logits[np.arange(5), targets]), top, total)
        return [out, top, total]

    whole = everywhere(lambda: compute(1 << 20))
    for step in (1024, 2048):
        assert [a.tobytes() for a in compute(step)] == [a.tobytes() for a in whole]
    d = logits.astype(float)
    want = d[np.arange(5), targets] - np.log(np.exp(d - d.max(1, keepdims=True)).sum(1)) - d.max(1)
    np.testing.assert_allclose(whole[0], want, rtol=1e-6, atol=2e-6)


def test_log_probabilities_follow_the_written_order():
    rng = np.random.default_rng(0)
    logits = floats(rng, 1, 2500, scale=5)
    top, total = np.full(1, -np.inf, F), np.zeros(1, F)
    _math.log_prob_tiles(top, total, logits, 0)
    m, t = F(-np.inf), F(0)
    for first in range(0, 2500, 1024):
        tile = logits[0, first : first + 1024]
        new = max(m, tile.max())
        e, lane = exp(tile - new), np.zeros(16, F)
        for k in range(0, len(e), 16):
            lane[: len(e[k : k + 16])] += e[k : k + 16]
        t = fma(t, exp(m - new)[0], tree(lane))
        m = new
    assert (top[0], total[0]) == (m, t)


@pytest.mark.parametrize("n", [1, 15, 16, 17, 1024, 1025, 5000])
def test_argmax_takes_the_lowest_of_equals(n, everywhere):
    rng = np.random.default_rng(n)
    logits = np.concatenate([np.round(floats(rng, 10, n)), np.full((1, n), -np.inf, F), np.zeros((1, n), F)])
    logits[-1, n // 2] = -0.0
    (got,) = everywhere(lambda: into(_math.argmax, empty(12, dtype=np.int64), logits))
    assert got.tolist() == logits.argmax(1).tolist()


@pytest.mark.parametrize("where", [0, 7, 40])
def test_nan_among_logits_gives_some_index_and_a_nan_probability(where, settings):
    logits = np.zeros((1, 41), F)
    logits[0, where] = np.nan
    for isa in _math.isas():
        _math.set_isa(isa)
        (at,) = into(_math.argmax, empty(1, dtype=np.int64), logits)
        assert 0 <= at[0] < 41
        top, total = np.full(1, -np.inf, F), np.zeros(1, F)
        _math.log_prob_tiles(top, total, logits, 0)
        assert np.isnan(top[0] + total[0])


# Other compilers, other processors


@pytest.fixture(scope="module")
def replay(tmp_path_factory):
    """`replay(compiler, isas, *flags, under=())` is what replay_vector.c prints for each, when built and run so."""
    built = {}  # by compiler and flags

    def run(compiler, isas, *flags, under=()):
        for program in (compiler, *under):
            if shutil.which(program) is None:
                pytest.skip(f"{program} is not installed")
        if (compiler, flags) not in built:
            out = tmp_path_factory.mktemp("replay") / "replay"
            sources = [ROOT / "tests/cext/replay_vector.c", *sorted((ROOT / "cext").glob("vector_*.c"))]
            options = ["-O3", "-std=c11", "-ffp-contract=off", f"-I{ROOT / 'cext'}", *flags]
            subprocess.run([compiler, *options, *sources, "-lm", "-o", out], check=True)
            built[compiler, flags] = out
        words = [*under, built[compiler, flags]]
        return [subprocess.run([*words, isa], check=True, capture_output=True, text=True).stdout for isa in isas]

    return run


@pytest.fixture(scope="module")
def digests(replay):
    """Those of one compiler, whichever is here: cc would be built twice, as most often it is gcc or clang."""
    return replay(next(filter(shutil.which, ("gcc", "clang")), "cc"), ["scalar"])[0]


@pytest.mark.parametrize("compiler", ["gcc", "clang"])
def test_every_compiler_gives_the_same_bytes(compiler, replay, digests):
    assert set(replay(compiler, _math.isas())) == {digests}


def test_an_emulated_arm_processor_gives_the_same_bytes(replay, digests):
    assert set(replay("aarch64-linux-gnu-gcc", ["scalar", "neon"], "-static", under=("qemu-aarch64",))) == {digests}


@pytest.mark.slow
def test_sanitizers_find_nothing_in_the_kernels(replay, digests):
    flags = ("-O1", "-fsanitize=address,undefined", "-fno-sanitize-recover=all")
    assert set(replay("gcc", _math.isas(), *flags)) == {digests}


# The door


def good_calls():
    """Every function of this file's kernels with arguments that it takes; results first."""
    f = lambda *shape: np.zeros(shape, F)  # noqa: E731
    u = np.zeros(5, np.uint16)
    return {
        "exp": [f(3, 5), f(3, 5)],
        "log": [f(3, 5), f(3, 5)],
        "tanh": [f(3, 5), f(3, 5)],
        "sigmoid": [f(3, 5), f(3, 5)],
        "widen_bf16": [f(5), u],
        "add": [f(3, 5), f(3, 5), f(3, 5)],
        "sigmoid_gate": [f(3, 5), f(3, 5), f(3, 5)],
        "situ": [f(3, 5), f(3, 5), f(3, 5), 4.0, 25.0],
        "rms_norm": [f(3, 5), f(3, 5), u, 1e-5],
        "mix": [f(3, 5), (f(3, 5), f(3, 5)), u, u.copy(), 1e-5],
        "combine": [f(3, 5), f(3, 2, 5), f(3, 2)],
        "all_finite": [f(3, 5)],
        "route": [np.zeros((3, 2), np.int32), f(3, 2), f(3, 5), f(5), 1.0],
        "argmax": [np.zeros(3, np.int64), f(3, 5)],
        "log_prob_tiles": [f(3), f(3), f(3, 5), 1024],
        "log_prob_finish": [f(3), f(3), f(3), f(3)],
    }


def spoilt(value):
    """What must be refused in place of `value`."""
    if isinstance(value, tuple):
        yield list(value)
        yield ()
        for bad in spoilt(value[0]):
            yield (bad, *value[1:])
        return
    if not isinstance(value, np.ndarray):
        yield from ("x", None)
        return
    yield from (None, 1.5, "x", value.tolist())
    yield value.astype(np.float64)
    yield value[None, None, None, None]
    yield np.zeros((*value.shape[:-1], value.shape[-1] + 1), value.dtype)
    yield np.zeros((value.shape[0] + 1, *value.shape[1:]), value.dtype)
    yield np.zeros((*value.shape, 2), value.dtype)[..., 0]


def fits_too(name, value, bad):
    """Logits may be of any width, and what is only looked at of any size."""
    if not isinstance(bad, np.ndarray) or bad.dtype != value.dtype or bad.ndim != 2 or not bad.flags.c_contiguous:
        return False
    return name == "all_finite" or (name in ("argmax", "log_prob_tiles") and bad.shape[0] == value.shape[0])


@pytest.mark.parametrize("name", good_calls())
def test_wrong_arguments_are_refused(name):
    function, args = getattr(_math, name), good_calls()[name]
    function(*args)
    for wrong in (args[:-1], [*args, 1]):
        with pytest.raises(TypeError):
            function(*wrong)
    for i, value in enumerate(args):
        for bad in spoilt(value):
            if fits_too(name, value, bad):
                continue
            with pytest.raises((TypeError, ValueError)):
                function(*args[:i], bad, *args[i + 1 :])


@pytest.mark.parametrize("name", sorted(set(good_calls()) - {"all_finite"}))
def test_results_must_be_writable_and_apart_from_what_is_read(name):
    function, args = getattr(_math, name), good_calls()[name]
    out = args[0].copy()
    out.flags.writeable = False
    with pytest.raises(ValueError, match="read-only"):
        function(out, *args[1:])
    memory = np.zeros(1000, np.uint8)
    for i, value in enumerate(args[1:], 1):
        if isinstance(value, np.ndarray):
            shared = args.copy()
            shared[0] = memory[: out.nbytes].view(out.dtype).reshape(out.shape)
            at = value.itemsize if out.nbytes > value.itemsize else 0
            shared[i] = memory[at : at + value.nbytes].view(value.dtype).reshape(value.shape)
            with pytest.raises(ValueError, match="shares memory"):
                function(*shared)


def test_no_rows_are_no_work():
    for name, args in good_calls().items():
        if name == "widen_bf16":
            continue
        rows = [
            a[:0]
            if isinstance(a, np.ndarray) and a.shape[0] == 3
            else tuple(v[:0] for v in a)
            if isinstance(a, tuple)
            else a
            for a in args
        ]
        getattr(_math, name)(*rows)


def test_tiles_start_at_multiples_of_1024():
    with pytest.raises(ValueError, match="1024"):
        _math.log_prob_tiles(np.zeros(1, F), np.zeros(1, F), np.zeros((1, 8), F), 1000)


def test_flush_to_zero_of_the_caller_changes_nothing(settings):
    x = np.array([1e-40, -1e-42, 3e-39, 1.0], F)
    _math.set_threads(2)
    _math.set_grain(1)
    (want,) = into(_math.add, empty(4), x, x)
    _math.test_set_flush(True)
    try:
        (got,) = into(_math.add, empty(4), x, x)
    finally:
        _math.test_set_flush(False)
    assert got.tobytes() == want.tobytes() == (x + x).tobytes()
