"""bf12 gives back every bit, int8 is what its definition says, and neither is led astray by malformed arrays."""

from __future__ import annotations

import numpy as np
import pytest

from deltafin.cext import _io

EVERY = np.arange(65536, dtype=np.uint32).astype(np.uint16)


def bf16(values: np.ndarray) -> np.ndarray:
    """The bits of float32 values, rounded to nearest even."""
    wide = np.ascontiguousarray(values, np.float32).view(np.uint32)
    return ((wide + 0x7FFF + (wide >> 16 & 1)) >> 16).astype(np.uint16)


def normal(rng, rows: int, columns: int) -> np.ndarray:
    return bf16(rng.standard_normal((rows, columns)) * 0.02)


def packed(bits: np.ndarray) -> list[np.ndarray]:
    """codes, base, starts, columns, values"""
    rows, columns = bits.shape
    base, starts = np.empty(rows, np.uint8), np.empty(rows + 1, np.uint32)
    exceptions = _io.bf12_measure(base, starts, bits)
    codes = np.empty((rows, columns // 32 * 48), np.uint8)
    where, values = np.empty(exceptions, np.uint16), np.empty(exceptions, np.uint16)
    _io.bf12_pack(codes, where, values, bits, base, starts)
    return [codes, base, starts, where, values]


def unpacked(arrays: list[np.ndarray]) -> np.ndarray:
    rows, nbytes = arrays[0].shape
    bits = np.full((rows, nbytes // 48 * 32), 0xABCD, np.uint16)
    _io.bf12_unpack(bits, *arrays)
    return bits


def by_the_page(arrays: list[np.ndarray]) -> np.ndarray:
    """What the arrays of docs/packs.md mean, one weight at a time."""
    codes, base, starts, columns, values = arrays
    rows, groups = len(codes), codes.shape[1] // 48
    bits = np.empty((rows, groups * 32), np.uint16)
    for r in range(rows):
        for c in range(groups * 32):
            group = codes[r, c // 32 * 48 : c // 32 * 48 + 48].astype(int)
            nibbles = group[32 + c % 16]
            exponent = (int(base[r]) - (nibbles & 15 if c % 32 < 16 else nibbles >> 4)) % 256
            bits[r, c] = (group[c % 32] & 0x80) << 8 | exponent << 7 | group[c % 32] & 0x7F
        for i in range(starts[r], starts[r + 1]):
            bits[r, columns[i]] = values[i]
    return bits


# ---- bf12 -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("columns", [32, 96, 7168])
def test_every_pattern_of_bf16_in_random_mixes_comes_back_to_the_bit(columns):
    rng = np.random.default_rng(columns)
    for _ in range(3):
        mix = np.concatenate([rng.permutation(EVERY), normal(rng, 1, -len(EVERY) % columns or columns)[0]])
        bits = np.ascontiguousarray(mix[: len(mix) // columns * columns].reshape(-1, columns))
        assert (unpacked(packed(bits)) == bits).all()


def test_every_exponent_with_every_other_comes_back_to_the_bit():
    """Rows of 32 whose largest exponent is each of 256, with all that can lie below it."""
    bits = (np.arange(256)[:, None] << 7 | np.arange(32)[None, :] * 4).astype(np.uint16)
    bits = np.repeat(bits, 9, axis=0).reshape(256, 288)
    for column in range(1, 288):
        bits[:, column] = (np.maximum(0, np.arange(256) - column + 1) << 7 | column % 128) | (column % 2) << 15
    assert (unpacked(packed(bits)) == bits).all()


@pytest.mark.parametrize(
    "row",
    [
        np.zeros(32),
        np.full(32, 0x8000),  # -0
        np.arange(32),  # subnormal
        np.full(32, 0x7F80),  # infinity
        np.arange(32) + 0xFF81,  # NaNs with payloads
        np.r_[0x7F80, np.arange(31)],
        np.r_[np.full(31, 0x3F80), 0],
    ],
    ids=["zeros", "-0", "subnormal", "infinity", "NaN", "infinity and subnormal", "one zero"],
)
def test_odd_rows_beside_ordinary_ones_come_back_to_the_bit(row):
    rng = np.random.default_rng(1)
    bits = normal(rng, 5, 32)
    bits[[0, 3]] = row
    assert (unpacked(packed(bits)) == bits).all()


def test_the_arrays_are_those_of_the_page():
    rng = np.random.default_rng(2)
    bits = np.concatenate([normal(rng, 6, 96), rng.permutation(EVERY)[:384].reshape(4, 96)])
    bits[2] = 0
    arrays = packed(bits)
    codes, base, starts, columns, values = arrays
    assert (by_the_page(arrays) == bits).all()
    exponents = bits >> 7 & 0xFF
    assert (base == exponents.max(1)).all()
    apart = (exponents == 0) | (exponents.astype(int) < base[:, None].astype(int) - 15)
    assert (np.diff(starts) == apart.sum(1)).all() and starts[0] == 0
    assert (columns == np.nonzero(apart)[1]).all()
    assert (values == bits[apart]).all()
    offsets = codes.reshape(10, 3, 48)[:, :, 32:]
    offsets = np.concatenate([offsets & 15, offsets >> 4], axis=2).reshape(10, 96)
    assert (offsets[apart] == 0).all()


def test_normal_weights_take_three_quarters():
    bits = normal(np.random.default_rng(3), 512, 7168)
    assert sum(a.nbytes for a in packed(bits)) <= 0.76 * bits.nbytes


def test_packing_again_makes_the_same_bytes_whatever_lay_there():
    bits = normal(np.random.default_rng(4), 40, 96)
    first, second = packed(bits), packed(bits)
    assert [a.tobytes() for a in first] == [a.tobytes() for a in second]


def test_starts_and_base_of_other_bits_are_refused():
    rng = np.random.default_rng(5)
    bits = rng.permutation(EVERY)[:960].reshape(10, 96)
    codes, base, starts, columns, values = packed(bits)
    with pytest.raises(ValueError, match="not those of row 0"):
        _io.bf12_pack(codes, columns[1:].copy(), values[1:].copy(), bits, base, starts)
    for change in (lambda b, s: b.__setitem__(4, 3), lambda b, s: s.__setitem__(5, s[5] - 1)):
        b, s = base.copy(), starts.copy()
        change(b, s)
        with pytest.raises(ValueError, match="not those of row 4"):
            _io.bf12_pack(codes, columns, values, bits, b, s)
    wild = starts.copy()
    wild[3] = 2**32 - 1
    with pytest.raises(ValueError, match="not those of row 2"):
        _io.bf12_pack(codes, columns, values, bits, base, wild)


def test_malformed_exceptions_are_refused():
    bits = np.random.default_rng(6).permutation(EVERY)[:960].reshape(10, 96)
    arrays = packed(bits)
    for which, at, value in [(2, 5, 2**32 - 1), (2, 5, 0), (3, 7, 96), (3, 7, 65535)]:
        changed = [a.copy() for a in arrays]
        changed[which][at] = value
        with pytest.raises(ValueError, match=r"starts or columns of row \d are malformed"):
            unpacked(changed)
    double = [a.copy() for a in arrays]
    double[3][1] = double[3][0]
    with pytest.raises(ValueError, match="row 0 are malformed"):
        unpacked(double)


@pytest.mark.parametrize("columns", [0, 16, 33, 65568])
def test_a_number_of_columns_that_bf12_does_not_have_is_refused(columns):
    bits = np.zeros((2, columns), np.uint16)
    with pytest.raises(ValueError, match="multiple of 32"):
        _io.bf12_measure(np.empty(2, np.uint8), np.empty(3, np.uint32), bits)


def test_arrays_of_another_length_or_type_are_refused():
    bits = np.zeros((2, 32), np.uint16)
    with pytest.raises(ValueError, match="starts must be 3, not 2"):
        _io.bf12_measure(np.empty(2, np.uint8), np.empty(2, np.uint32), bits)
    with pytest.raises(TypeError, match="starts must be uint32"):
        _io.bf12_measure(np.empty(2, np.uint8), np.empty(3, np.int32), bits)
    with pytest.raises(ValueError, match="codes must be 48, not 32"):
        _io.bf12_unpack(bits, np.zeros((2, 32), np.uint8), *packed(bits)[1:])
    with pytest.raises(ValueError, match="q must be 32, not 16"):
        _io.int8_pack(np.empty((2, 16), np.int8), np.empty(2, np.float32), bits)


# ---- int8 -----------------------------------------------------------------------------------------------


def _model(bits: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    weights = (bits.astype(np.uint32) << 16).view(np.float32)
    scale = np.abs(weights).max(1) / np.float32(127)
    safe = np.where(scale == 0, np.float32(1), scale)
    return np.clip(np.rint(weights / safe[:, None]), -127, 127).astype(np.int8), scale


def _rounded(bits: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    q, scale = np.empty(bits.shape, np.int8), np.empty(len(bits), np.float32)
    assert _io.int8_pack(q, scale, bits) == len(bits)
    return q, scale


@pytest.mark.parametrize("columns", [1, 5, 33, 96, 1000])
def test_int8_is_what_numpy_makes_of_its_definition(columns):
    rng = np.random.default_rng(columns)
    spread = np.exp2(rng.integers(-60, 60, (200, 1)))
    for bits in (normal(rng, 200, columns), bf16(rng.standard_normal((200, columns)) * spread)):
        q, scale = _rounded(bits)
        want_q, want_scale = _model(bits)
        assert q.tobytes() == want_q.tobytes()
        assert scale.tobytes() == want_scale.tobytes()


def test_int8_of_every_finite_pattern_is_what_numpy_makes_of_it():
    finite = EVERY[(EVERY & 0x7F80) != 0x7F80]
    bits = np.random.default_rng(7).permutation(finite).reshape(-1, 20)
    bits = np.concatenate([bits, np.sort(finite & 0x7FFF).reshape(-1, 20)])  # rows of subnormal numbers too
    q, scale = _rounded(bits)
    want_q, want_scale = _model(bits)
    assert q.tobytes() == want_q.tobytes()
    assert scale.tobytes() == want_scale.tobytes()


def test_int8_rounds_halves_to_even():
    bits = bf16(np.array([[127, 0.5, 1.5, 2.5, -0.5, -1.5, -127]], np.float32))
    assert _rounded(bits)[0].tolist() == [[127, 0, 2, 2, 0, -2, -127]]


def test_a_row_of_zeros_is_exactly_zero():
    q, scale = _rounded(np.array([[0, 0x8000], [0x3F80, 0]], np.uint16))
    assert (q[0] == 0).all() and scale[0] == 0


@pytest.mark.parametrize("bad", [0x7F80, 0xFF80, 0x7F81, 0xFFFF])
def test_int8_stops_at_a_row_that_is_not_finite(bad):
    bits = normal(np.random.default_rng(8), 6, 64)
    bits[4, 63] = bad
    assert _io.int8_pack(np.empty(bits.shape, np.int8), np.empty(6, np.float32), bits) == 4


def test_int8_is_the_same_when_the_thread_flushes_to_zero():
    from deltafin.cext import _math

    bits = np.arange(1, 65, dtype=np.uint16).reshape(2, 32)  # subnormal
    want = _rounded(bits)
    _math.test_set_flush(True)
    try:
        got = _rounded(bits)
    finally:
        _math.test_set_flush(False)
    assert [a.tobytes() for a in got] == [a.tobytes() for a in want]
