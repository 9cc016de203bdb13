"""exp, log, tanh and sigmoid: their error over the whole of float32, and bits that follow from the documentation."""

from __future__ import annotations

import re
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest

from deltafin.cext import _math

F = np.float32
NAN = 0x7FC00000
KERNELS: dict[str, Callable[..., None]] = {n: getattr(_math, n) for n in ("exp", "log", "tanh", "sigmoid")}
# in units of the last place of the exact result; docs/arithmetic.md promises them
BOUNDS = {"exp": 1.02, "log": 0.83, "tanh": 2.61, "sigmoid": 2.41}


def exact(name: str, x: np.ndarray) -> np.ndarray:
    with np.errstate(all="ignore"):
        x = x.astype(np.float64)
        if name != "sigmoid":
            return getattr(np, name)(x)
        e = np.exp(-abs(x))
        return np.where(x < 0, e, 1.0) / (1.0 + e)


def compute(name: str, x: np.ndarray) -> np.ndarray:
    out = np.empty_like(x)
    KERNELS[name](out, x)
    return out


def worst_error(name: str, x: np.ndarray) -> float:
    """In ulp; infinities, NaN and zeros must be exactly right."""
    got, want = compute(name, x), exact(name, x)
    with np.errstate(over="ignore"):
        rounded = want.astype(F)
    undefined = np.isnan(rounded)
    assert (got.view(np.uint32)[undefined] == NAN).all()
    fixed = np.isinf(rounded) | ((rounded == 0) & (want == 0))
    assert got[fixed].tobytes() == rounded[fixed].tobytes()
    rest = ~(undefined | fixed)
    if not rest.any():
        return 0.0
    _, exponent = np.frexp(want[rest])
    ulp = np.ldexp(1.0, np.maximum(exponent - 24, -149))
    return float((abs(got[rest] - want[rest]) / ulp).max())


def all_floats(first: int, count: int, step: int = 1) -> np.ndarray:
    return (np.arange(count, dtype=np.uint64) * step + first).astype(np.uint32).view(F)


@pytest.mark.parametrize("name", KERNELS)
def test_error_stays_within_its_bound_over_all_magnitudes(name, settings):
    x = all_floats(1, (1 << 32) // 1021, 1021)
    assert worst_error(name, x) <= BOUNDS[name]


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize(
    "around", [0.0, 1.0, -1.0, 0.5**0.5, 2**0.5, 9.01, 10.0, -17.0, 88.722839, 89.0, -87.33655, -103.97208, -104.0]
)
def test_error_stays_within_its_bound_near_every_cut_off(name, around):
    bits = int(np.array([around], F).view(np.uint32)[0])
    near = all_floats(max(bits - 20000, 0), 40000)
    assert worst_error(name, near) <= BOUNDS[name]


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("name", KERNELS)
def test_error_stays_within_its_bound_for_every_float(name):
    step = 1 << 22
    assert max(worst_error(name, all_floats(first, step)) for first in range(0, 1 << 32, step)) <= BOUNDS[name]


@pytest.mark.parametrize("name", KERNELS)
def test_bits_are_the_same_on_every_instruction_set(name, everywhere):
    rng = np.random.default_rng(1)
    special = np.array([0, 0x80000000, 1, 0x80000001, 0x7F800000, 0xFF800000, NAN, 0xFFC00001, 0x7F800001], np.uint32)
    x = np.concatenate([rng.integers(0, 1 << 32, 4001, dtype=np.uint32), special]).view(F)
    ordinary = (rng.standard_normal(1003) * 30).astype(F)
    everywhere(lambda: [compute(name, x), compute(name, ordinary)])
    for n in range(40):
        everywhere(lambda n=n: [compute(name, ordinary[:n])])


@pytest.mark.parametrize(
    ("name", "x", "y"),
    [
        ("exp", 0.0, 1.0),
        ("exp", -0.0, 1.0),
        ("exp", np.inf, np.inf),
        ("exp", -np.inf, 0.0),
        ("exp", 88.72284, np.inf),
        ("exp", -104.0, 0.0),
        ("exp", -103.9, 1e-45),
        ("log", 1.0, 0.0),
        ("log", 0.0, -np.inf),
        ("log", -0.0, -np.inf),
        ("log", -1.0, np.nan),
        ("log", np.inf, np.inf),
        ("log", -np.inf, np.nan),
        ("tanh", 0.0, 0.0),
        ("tanh", -0.0, -0.0),
        ("tanh", 1e-45, 1e-45),
        ("tanh", np.inf, 1.0),
        ("tanh", -np.inf, -1.0),
        ("tanh", 30.0, 1.0),
        ("sigmoid", 0.0, 0.5),
        ("sigmoid", -0.0, 0.5),
        ("sigmoid", np.inf, 1.0),
        ("sigmoid", -np.inf, 0.0),
        ("sigmoid", 120.0, 1.0),
        ("sigmoid", -104.0, 0.0),
    ],
)
def test_special_values(name, x, y):
    assert compute(name, np.array([x], F)).tobytes() == np.array([y], F).tobytes()


@pytest.mark.parametrize("name", KERNELS)
def test_any_nan_becomes_the_one_nan(name):
    x = np.array([0x7FC00000, 0xFFC00000, 0x7F800001, 0xFFFFFFFF, 0x7FD12345], np.uint32).view(F)
    assert (compute(name, x).view(np.uint32) == NAN).all()


# What follows computes as docs/arithmetic.md says, in exact fractions that are rounded once an operation.


def rounded(value: Fraction) -> Fraction:
    """To the nearest float32, ties to even; no overflow in what is computed here."""
    if value == 0:
        return value
    size = abs(value)
    exponent = size.numerator.bit_length() - size.denominator.bit_length()
    exponent -= size < Fraction(2) ** exponent  # 2^exponent <= size < 2^(exponent + 1)
    ulp = Fraction(2) ** max(exponent - 23, -149)
    return round(value / ulp) * ulp  # Python rounds ties to even


def fma(a: Fraction, b: Fraction, c: Fraction) -> Fraction:
    return rounded(a * b + c)


def constant(text: str) -> Fraction:
    return Fraction(float.fromhex(text))


def exp_reduced(x: Fraction) -> tuple[Fraction, int]:
    magic = constant("0x1.8p+23")
    n = rounded(x * constant("0x1.715476p+0") + magic) - magic
    r = fma(-n, constant("0x1.62e430p-1"), x)
    r = fma(-n, constant("-0x1.05c610p-29"), r)
    q = constant("0x1.6a4002p-10")
    for c in ("0x1.1239ecp-7", "0x1.5558bep-5", "0x1.555492p-3", "0x1.fffffcp-2"):
        q = fma(q, r, constant(c))
    return fma(rounded(r * r), q, r), int(n)


def exp_as_written(x: Fraction) -> Fraction:
    t, n = exp_reduced(max(min(x, Fraction(89)), Fraction(-104)))
    half = n >> 1
    return rounded(rounded(rounded(t + 1) * Fraction(2) ** half) * Fraction(2) ** (n - half))


def log_as_written(x: Fraction) -> Fraction:
    e = 0
    if x < Fraction(2) ** -126:
        x, e = x * 2**25, -25
    root_half = Fraction(float(np.array([0x3F3504F3], np.uint32).view(F)[0]))
    while x < root_half:
        x, e = x * 2, e - 1
    while x >= 2 * root_half:
        x, e = x / 2, e + 1
    f = x - 1
    s = rounded(f / rounded(f + 2))
    z = rounded(s * s)
    q = constant("0x1.f1355cp-3")
    for c in ("0x1.23d3f0p-2", "0x1.999c26p-2", "0x1.555554p-1"):
        q = fma(q, z, constant(c))
    half_square = rounded(rounded(f / 2) * f)
    tail = fma(s, fma(z, q, half_square), rounded(e * constant("0x1.7f7d1cp-20")))
    y = rounded(f - rounded(half_square - tail))
    return fma(Fraction(e), constant("0x1.62e4p-1"), y)


def tanh_as_written(x: Fraction) -> Fraction:
    a = min(abs(x), Fraction(10))
    t, n = exp_reduced(2 * a)
    scale = Fraction(2) ** n
    t = fma(scale, t, rounded(scale - 1))
    y = rounded(t / rounded(t + 2))
    return -y if x < 0 else y


def sigmoid_as_written(x: Fraction) -> Fraction:
    e = exp_as_written(-abs(x))
    return rounded((e if x < 0 else Fraction(1)) / rounded(1 + e))


@pytest.mark.parametrize("name", KERNELS)
def test_bits_follow_from_the_documentation(name):
    rng = np.random.default_rng(2)
    x = np.concatenate(
        [rng.standard_normal(300) * 3, rng.standard_normal(300) * 40, np.exp2(rng.uniform(-149, 6, 300))]
    )
    x = x.astype(F)[abs(x) < 88]
    if name == "log":
        x = abs(x)
    as_written = globals()[f"{name}_as_written"]
    want = np.array([float(as_written(Fraction(float(v)))) for v in x], F)
    assert (compute(name, x) == want).all()


def test_the_documentation_names_the_constants_of_the_code():
    root = Path(__file__).resolve().parents[2]
    code = set(re.findall(r"0x[0-9a-f.]+p[+-]\d+", (root / "cext" / "elementary.h").read_text()))
    page = (root / "docs" / "arithmetic.md").read_text()
    assert code and all(c in page for c in code - {"0x1p-126", "0x1p+25"})
