"""Matrix products have the bits that docs/arithmetic.md writes down, on every instruction set, however they are cut."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from deltafin.cext import _math

FORMATS = ["mxfp4", "bf16", "f32", "int8"]
VECTORS = Path(__file__).parents[1] / "faults" / "mxfp4_vectors.py"
PRODUCT: dict[str, Callable[..., None]] = {name: getattr(_math, f"matmul_{name}") for name in FORMATS}


@pytest.fixture(scope="module")
def vectors() -> ModuleType:
    spec = importlib.util.spec_from_file_location("mxfp4_vectors", VECTORS)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _floats(rng: np.random.Generator, shape: tuple[int, ...], kind: str) -> np.ndarray:
    v = rng.standard_normal(shape).astype(np.float32)
    if kind == "wide":  # 120 binary orders of magnitude: every addition of another rounding
        v = np.ldexp(v, rng.integers(-60, 60, shape)).astype(np.float32)
    elif kind == "zeros":
        v[rng.random(shape) < 0.6] = 0.0
        v[rng.random(shape) < 0.3] *= np.float32(-0.0)
    elif kind == "subnormal":  # products and sums below the smallest normal number, and zeros of both signs
        v = (v * np.float32(1e-22)).astype(np.float32)
    elif kind == "tiny":
        v = (rng.integers(-4, 5, shape) * np.float32(1e-45)).astype(np.float32)
    elif kind == "huge":
        v = (v * np.float32(1e17)).astype(np.float32)
    return v


def _weights(rng: np.random.Generator, name: str, n: int, k: int, kind: str) -> tuple[np.ndarray, ...]:
    if kind == "tiny" and name != "mxfp4":
        kind = "plain"  # the products of x alone are tiny enough
    if name == "mxfp4":
        ranges = {"wide": (0, 190), "subnormal": (40, 75), "tiny": (120, 131), "huge": (250, 255)}
        scale = rng.integers(*ranges.get(kind, (110, 135)), (n, k // 32)).astype(np.uint8)
        packed = rng.integers(0, 256, (n, k // 2)).astype(np.uint8)
        if kind == "huge":  # codes up to 1.5 with scales up to 254 are finite
            packed &= 0xBB
        if kind == "zeros":
            packed &= 0xF8
        return packed, scale
    if name == "bf16":
        return ((_floats(rng, (n, k), kind).view(np.uint32) >> 16).astype(np.uint16),)
    if name == "f32":
        return (_floats(rng, (n, k), kind),)
    return rng.integers(-128, 128, (n, k)).astype(np.int8), _floats(rng, (n,), kind)


def _product(name: str, x: np.ndarray, weights: tuple[np.ndarray, ...]) -> np.ndarray:
    out = np.full((x.shape[0], weights[0].shape[0]), np.nan, np.float32)
    PRODUCT[name](out, x, *weights)
    return out


KINDS = ["plain", "wide", "zeros", "subnormal", "tiny", "huge"]
ROWS = [1, 2, 3, 4, 5, 7, 8, 13, 16, 33, 70]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", FORMATS)
def test_every_instruction_set_and_cut_gives_the_bytes_of_scalar(name, kind, everywhere):
    rng = np.random.default_rng([FORMATS.index(name), KINDS.index(kind)])
    for rows in ROWS:
        n, k = int(rng.integers(1, 30)), int(rng.choice([rng.integers(1, 70), rng.integers(500, 1200)]))
        k = (k + 31) // 32 * 32 if name == "mxfp4" else k
        x, weights = _floats(rng, (rows, k), kind), _weights(rng, name, n, k, kind)
        if (name, kind) == ("mxfp4", "huge"):
            x *= np.float32(1e-20)
        (found,) = everywhere(lambda x=x, weights=weights: [_product(name, x, weights)])
        assert not np.isnan(found).any()


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("k", [0, 1, 2, 7, 8, 9, 15, 16, 17, 24, 31, 32, 33, 127, 128, 129, 511, 512, 513, 1030])
def test_any_length_of_row_is_the_same_everywhere(name, k, everywhere):
    rng = np.random.default_rng(k)
    k = k // 32 * 32 if name == "mxfp4" else k
    for rows in (1, 3, 6):
        x, weights = _floats(rng, (rows, k), "plain"), _weights(rng, name, 5, k, "plain")
        everywhere(lambda x=x, weights=weights: [_product(name, x, weights)])


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("rows", [1, 4, 300])
def test_real_widths_and_more_rows_than_a_block_are_the_same_everywhere(name, rows, everywhere):
    rng = np.random.default_rng(rows)
    x, weights = _floats(rng, (rows, 3584), "plain"), _weights(rng, name, 26, 3584, "plain")
    (together,) = everywhere(lambda: [_product(name, x, weights)])
    alone = np.concatenate([_product(name, x[r : r + 1], weights) for r in range(0, rows, 37)])
    assert alone.tobytes() == together[::37].tobytes()


# ---- the written order, in exact arithmetic -----------------------------------------------------------


def _rounded(exact: Fraction) -> float:
    """The nearest binary32 of a value that is not zero, ties to even."""
    exponent = -150
    while Fraction(2) ** (exponent + 1) <= abs(exact):
        exponent += 1
    ulp = Fraction(2) ** (max(exponent, -126) - 23)
    nearest = float(round(exact / ulp) * ulp)
    return math.copysign(nearest, exact.numerator)  # of what underflows to zero, too


def _fma(a: float, b: float, c: float) -> float:
    exact = Fraction(a) * Fraction(b) + Fraction(c)
    if exact != 0:
        return _rounded(exact)
    return a * b + c  # an exact zero: its sign is the one that double arithmetic gives


def _dot(w: np.ndarray, x: np.ndarray) -> np.float32:
    lane = [0.0] * 16
    for k in range(len(x)):
        lane[k % 16] = _fma(float(w[k]), float(x[k]), lane[k % 16])
    v = [np.float32(f) for f in lane]
    for half in (8, 4, 2, 1):
        v = [v[i] + v[i + half] for i in range(half)]
    return v[0]


def _values(vectors, name: str, weights: tuple[np.ndarray, ...]) -> np.ndarray:
    if name == "mxfp4":
        return vectors.decode(*weights).astype(np.float32)
    if name == "bf16":
        return (weights[0].astype(np.uint32) << 16).view(np.float32)
    return weights[0].astype(np.float32)


@pytest.mark.parametrize("kind", ["plain", "wide", "zeros", "subnormal", "tiny"])
@pytest.mark.parametrize("name", FORMATS)
def test_products_follow_the_written_order(name, kind, vectors, everywhere):
    rng = np.random.default_rng([7, FORMATS.index(name), KINDS.index(kind)])
    k = 96 if name == "mxfp4" else 75
    x, weights = _floats(rng, (2, k), kind), _weights(rng, name, 3, k, kind)
    values = _values(vectors, name, weights)
    wanted = np.array([[_dot(w, row) for w in values] for row in x], np.float32)
    if name == "int8":
        wanted = wanted * weights[1]
    (found,) = everywhere(lambda: [_product(name, x, weights)])
    assert found.tobytes() == wanted.tobytes()


def test_a_lane_keeps_a_negative_zero_where_its_row_ends_early(everywhere):
    tiny = np.float32(1e-30)  # the products underflow to -0; another element would turn a lane into +0
    for k in range(1, 40):
        x, w = np.full((2, k), tiny), np.full((3, k), -tiny)
        (found,) = everywhere(lambda x=x, w=w: [_product("f32", x, (w,))])
        lane_is_minus_zero = k >= 16
        assert (np.signbit(found) == lane_is_minus_zero).all(), k


# ---- the format ---------------------------------------------------------------------------------------


def _planes(case: dict) -> tuple[np.ndarray, np.ndarray]:
    rows, cols = case["rows"], case["cols"]
    packed = np.frombuffer(bytes.fromhex(case["packed_hex"]), np.uint8).reshape(rows, cols // 2)
    return packed, np.frombuffer(bytes.fromhex(case["scale_hex"]), np.uint8).reshape(rows, cols // 32)


def test_known_answers_of_mxfp4(vectors, everywhere):
    for case in vectors.build(seed=7):
        if case["name"] in ("scale_255", "wide_rows"):
            continue
        packed, scale = _planes(case)
        with np.errstate(over="ignore"):
            wanted = np.array(case["expect"]).astype(np.float32).reshape(case["rows"], case["cols"])
        for column in range(case["cols"]):  # one weight at a time; the others add zero
            if np.isinf(wanted[:, [c for c in range(case["cols"]) if c != column]]).any():
                continue  # infinity times zero
            x = np.zeros((1, case["cols"]), np.float32)
            x[0, column] = 1
            (found,) = everywhere(lambda x=x, planes=(packed, scale): [_product("mxfp4", x, planes)])
            assert (found[0] == wanted[:, column]).all(), (case["name"], column)


def test_large_codes_of_the_largest_scales_are_infinite(everywhere):
    for scale, finite in ((252, 8), (253, 6), (254, 4)):
        packed = np.zeros((8, 16), np.uint8)
        packed[:, 3] = np.arange(8) << 4  # element 7 of each row is another code
        x = np.zeros((1, 32), np.float32)
        x[0, 7] = 1
        x = np.concatenate([x] * 5)
        planes = packed, np.full((8, 1), scale, np.uint8)
        (found,) = everywhere(lambda x=x, planes=planes: [_product("mxfp4", x, planes)])
        assert np.isfinite(found[:, :finite]).all()
        assert np.isinf(found[:, finite:]).all()


def test_wide_rows_are_near_the_exact_product(vectors):
    case = next(c for c in vectors.build(seed=7) if c["name"] == "wide_rows")
    packed, scale = _planes(case)
    x = np.array([case["x"]], np.float32)
    size = np.abs(vectors.decode(packed, scale)) @ np.abs(np.array(case["x"]))
    assert (np.abs(_product("mxfp4", x, (packed, scale))[0] - np.array(case["product"])) < 1e-6 * size).all()


@pytest.mark.parametrize("grain", [0, 1, 5])
@pytest.mark.parametrize("threads", [1, 3])
def test_a_scale_of_255_is_refused_with_its_place(threads, grain, settings):
    rng = np.random.default_rng(1)
    packed, scale = _weights(rng, "mxfp4", 50, 128, "plain")
    scale[41, 2] = scale[42, 0] = scale[49, 3] = 255
    _math.set_threads(threads)
    _math.set_grain(grain)
    for rows in (1, 9):
        out, x = np.empty((rows, 50), np.float32), np.zeros((rows, 128), np.float32)
        with pytest.raises(ValueError, match="scale of row 41, group 2 is 255"):
            _math.matmul_mxfp4(out, x, packed, scale)


def test_weights_may_lie_at_any_address(everywhere):
    rng = np.random.default_rng(3)
    for name in FORMATS:
        weights = _weights(rng, name, 11, 96, "plain")
        x = _floats(rng, (3, 96), "plain")
        wanted = _product(name, x, weights)
        for offset in (1, 2, 3):
            moved = []
            for w in weights:
                room = np.empty(w.nbytes + offset, np.uint8)
                room[offset:] = np.frombuffer(w.tobytes(), np.uint8)
                moved.append(np.frombuffer(room, w.dtype, offset=offset).reshape(w.shape))
            for rows in (1, 3):
                (found,) = everywhere(lambda r=rows, n=name, m=tuple(moved), x=x: [_product(n, x[:r], m)])
                assert found.tobytes() == wanted[:rows].tobytes()


@pytest.mark.parametrize("name", FORMATS)
def test_no_rows_outputs_or_elements_is_no_error(name):
    rng = np.random.default_rng(0)
    assert _product(name, np.empty((0, 64), np.float32), _weights(rng, name, 3, 64, "plain")).shape == (0, 3)
    assert _product(name, np.empty((2, 64), np.float32), _weights(rng, name, 0, 64, "plain")).shape == (2, 0)
    empty = _product(name, np.empty((6, 0), np.float32), _weights(rng, name, 3, 0, "plain"))
    assert (empty == 0).all()


# ---- a matrix in blocks of rows ------------------------------------------------------------------------


@pytest.mark.parametrize("name", FORMATS[1:])
@pytest.mark.parametrize("rows", [1, 4, 6])
def test_blocks_of_a_matrix_give_the_bytes_of_the_whole(name, rows, everywhere):
    rng = np.random.default_rng([rows, FORMATS.index(name)])
    x, weights = _floats(rng, (rows, 203), "plain"), _weights(rng, name, 61, 203, "plain")
    wanted = _product(name, x, weights)

    def in_blocks() -> list[np.ndarray]:
        out = np.full((rows, 70), 7, np.float32)
        for start, stop in ((40, 61), (0, 1), (1, 40), (40, 40)):
            PRODUCT[name](out, x, *(w[start:stop] for w in weights), 5 + start)
        return [out]

    (found,) = everywhere(in_blocks)
    assert found[:, 5:66].tobytes() == wanted.tobytes()
    assert (found[:, :5] == 7).all() and (found[:, 66:] == 7).all()


@pytest.mark.parametrize("name", FORMATS[1:])
def test_a_first_column_past_the_result_is_refused(name):
    _, x, *weights = _good(name).values()
    out = np.zeros((2, 5), np.float32)
    for wrong in (3, -1, 1 << 64):
        with pytest.raises(ValueError, match="first must be from 0 to 2"):
            PRODUCT[name](out, x, *weights, wrong)
    for other in (1.0, None, out):
        with pytest.raises(TypeError, match="first must be an int"):
            PRODUCT[name](out, x, *weights, other)
    with pytest.raises(ValueError, match="dimension 1 of out must be at least 3, not 2"):
        PRODUCT[name](np.zeros((2, 2), np.float32), x, *weights, 0)
    assert not out.any()
    PRODUCT[name](out, x, *weights, 2)


# ---- several products in one job ----------------------------------------------------------------------


def _several(seed: int) -> list[tuple[np.ndarray, ...]]:
    rng = np.random.default_rng(seed)
    shapes = [(1, 40, 96), (7, 3, 64), (0, 5, 32), (1, 0, 32), (2, 100, 544), (1, 1, 32), (70, 9, 160)]
    return [(_floats(rng, (rows, k), "plain"), *_weights(rng, "mxfp4", n, k, "plain")) for rows, n, k in shapes]


def test_several_products_at_once_have_the_bytes_of_each_alone(everywhere):
    cases = _several(1)
    wanted = [_product("mxfp4", x, planes) for x, *planes in cases]

    def together() -> list[np.ndarray]:
        outs = [np.full_like(w, np.nan) for w in wanted]
        _math.matmul_mxfp4_each([(out, *case) for out, case in zip(outs, cases, strict=True)])
        return outs

    for found, want in zip(everywhere(together), wanted, strict=True):
        assert found.tobytes() == want.tobytes()
    _math.matmul_mxfp4_each([])


def test_a_wrong_product_among_several_is_an_exception():
    good = [(np.empty((x.shape[0], packed.shape[0]), np.float32), x, packed, scale) for x, packed, scale in _several(2)]
    scale = good[4][3].copy()
    scale[99, 16] = scale[99, 15] = 255
    wrong: list[tuple[object, type[Exception], str]] = [
        ([*good, 7], TypeError, "each of products"),
        ([*good, good[0][:3]], TypeError, "each of products"),
        ([*good, [*good[0]]], TypeError, "each of products"),
        ([*good, (good[0][0], *good[1][1:])], ValueError, "out"),
        ([*good, good[0]], ValueError, "out of product 0 shares memory with out of product 7"),
        ([*good[:4], (*good[4][:3], scale), *good[5:]], ValueError, "product 4: scale of row 99, group 15 is 255"),
        (7, TypeError, "not iterable"),
    ]
    for products, kind, why in wrong:
        with pytest.raises(kind, match=why):
            _math.matmul_mxfp4_each(products)  # type: ignore[arg-type]
    _math.matmul_mxfp4_each(good)


# ---- the caller's floating-point state ----------------------------------------------------------------


@pytest.mark.parametrize("name", FORMATS)
def test_flush_to_zero_set_by_the_caller_changes_nothing_and_stays_set(name, settings):
    rng = np.random.default_rng(5)
    cases = [(rows, _floats(rng, (rows, 64), "subnormal"), _weights(rng, name, 40, 64, "subnormal")) for rows in (1, 6)]
    for isa in _math.isas():
        _math.set_isa(isa)
        for threads in (1, 3):
            _math.set_threads(threads)
            for _rows, x, weights in cases:
                wanted = _product(name, x, weights)
                assert wanted.any()
                _math.test_set_flush(True)
                try:
                    state = _math.test_fpenv()
                    found = _product(name, x, weights)
                    assert _math.test_fpenv() == state
                finally:
                    _math.test_set_flush(False)
                assert found.tobytes() == wanted.tobytes()


# ---- arguments ----------------------------------------------------------------------------------------


def _good(name: str) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    arrays = {"out": np.zeros((2, 3), np.float32), "x": np.zeros((2, 64), np.float32)}
    names = {"mxfp4": ("packed", "scale"), "int8": ("w", "row_scale")}.get(name, ("w",))
    return {**arrays, **dict(zip(names, _weights(rng, name, 3, 64, "plain"), strict=True))}


def _damages(name: str) -> list[tuple[str, Callable[[np.ndarray], object]]]:
    return [
        (argument, change)
        for argument in _good(name)
        for change in (
            lambda a: a.astype(np.float64),
            lambda a: a.astype(a.dtype.newbyteorder()) if a.itemsize > 1 else a.astype(np.int16),
            lambda a: np.concatenate([a, a], axis=-1)[..., ::2],  # not contiguous
            lambda a: np.concatenate([a, a[:1]]),  # one row more
            lambda a: np.concatenate([a, a], axis=-1),
            lambda a: np.concatenate([a] * 3, axis=-1)[..., : a.shape[-1] + 1].copy(),
            lambda a: a[:1].copy(),
            lambda a: a.reshape(-1, 1) if a.ndim == 1 else a.ravel(),
            lambda a: a[None],
            lambda a: a[()].ravel()[0],  # a scalar
            lambda _: None,
            lambda _: "text",
            lambda a: a.tolist(),
        )
    ]


@pytest.mark.parametrize("name", FORMATS)
def test_a_wrong_argument_is_an_exception_that_names_an_argument(name):
    good = _good(name)
    for argument, change in _damages(name):
        arguments = {**good, argument: change(good[argument])}
        with pytest.raises((TypeError, ValueError), match="|".join(good)):
            PRODUCT[name](*arguments.values())
    PRODUCT[name](*good.values())


@pytest.mark.parametrize("name", FORMATS)
def test_the_number_of_arguments_is_checked(name):
    arguments = [*_good(name).values()]
    for wrong in (arguments[:-1], [*arguments, 0, 0], []):
        with pytest.raises(TypeError, match="arguments"):
            PRODUCT[name](*wrong)


def test_a_read_only_result_is_refused():
    good = _good("f32")
    good["out"].flags.writeable = False
    with pytest.raises(ValueError, match="out is read-only"):
        _math.matmul_f32(*good.values())


def test_a_result_that_overlaps_an_input_is_refused():
    room = np.zeros(4 * 64, np.float32)
    x, w = room[:128].reshape(2, 64), np.zeros((64, 64), np.float32)
    with pytest.raises(ValueError, match="out shares memory with x"):
        _math.matmul_f32(room[127:255].reshape(2, 64), x, w)
    _math.matmul_f32(room[128:].reshape(2, 64), x, w)


def test_a_length_that_is_no_multiple_of_32_is_refused_for_mxfp4():
    out, x = np.zeros((1, 2), np.float32), np.zeros((1, 48), np.float32)
    with pytest.raises(ValueError, match="multiple of 32"):
        _math.matmul_mxfp4(out, x, np.zeros((2, 24), np.uint8), np.zeros((2, 1), np.uint8))
