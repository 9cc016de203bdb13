"""Products with bf12 matrices have the bytes of the bf16 matrix that was packed, and malformed ones are refused."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from deltafin.cext import _math

Packed = tuple[np.ndarray, ...]
KINDS = ["normal", "wide", "sparse", "subnormal", "largest", "mixed"]
ROWS = [1, 2, 3, 4, 5, 16, 64, 65]


def _rounded(values: np.ndarray) -> np.ndarray:
    return (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)


def _bits(rng: np.random.Generator, n: int, k: int, kind: str) -> np.ndarray:
    """bf16 weights; none is infinite, so that no product is a NaN, whose payload is not promised."""
    bits = _rounded(rng.standard_normal((n, k)))
    if kind == "wide":  # most are exceptions
        bits = _rounded(np.ldexp(rng.standard_normal((n, k)), rng.integers(-60, 60, (n, k))))
    elif kind == "sparse":  # zeros of both signs
        bits[rng.random((n, k)) < 0.6] &= 0x8000
    elif kind == "subnormal":  # the base is at most 14, so that offsets of exceptions reach below zero
        bits = bits & 0x807F | rng.integers(0, rng.integers(1, 15, (n, 1)), (n, k)).astype(np.uint16) << 7
    elif kind == "largest":
        bits = bits & 0x807F | (254 - rng.integers(0, 17, (n, k))).astype(np.uint16) << 7
    elif kind == "mixed":  # whole rows of exceptions beside rows of few
        bits[::5] = 0
        bits[1::5] &= 0x807F
        bits[2::5, 1:] &= 0x83FF
        bits[3::5, [0, 15, 16, 31, -32, -17, -16, -1]] = 0x8001
    return bits


def _product(x: np.ndarray, packed: Packed) -> np.ndarray:
    out = np.full((x.shape[0], packed[1].size), np.nan, np.float32)
    _math.matmul_bf12(out, x, *packed)
    return out


def _wanted(x: np.ndarray, bits: np.ndarray) -> np.ndarray:
    out = np.full((x.shape[0], bits.shape[0]), np.nan, np.float32)
    _math.matmul_bf16(out, x, bits)
    return out


def _x(rng: np.random.Generator, rows: int, k: int, kind: str) -> np.ndarray:
    return rng.standard_normal((rows, k)).astype(np.float32) * np.float32(1e-4 if kind == "largest" else 1)


# ---- bits ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("k", [32, 64, 96, 544, 3584])
def test_every_instruction_set_and_cut_gives_the_bytes_of_bf16(k, kind, pack_bf12, everywhere):
    rng = np.random.default_rng([k, KINDS.index(kind)])
    for rows in ROWS:
        n = int(rng.integers(1, 16 if k < 3584 else 8))
        x, bits = _x(rng, rows, k, kind), _bits(rng, n, k, kind)
        packed = pack_bf12(bits)
        (found,) = everywhere(lambda x=x, packed=packed: [_product(x, packed)])
        assert found.tobytes() == _wanted(x, bits).tobytes()
        assert np.isfinite(found).all()


def test_rows_as_long_as_the_model_s_are_the_same(pack_bf12, everywhere):
    rng = np.random.default_rng(1)
    for rows, n, k in ((1, 27, 7168), (3, 5, 7168), (4, 6, 7168), (7, 7, 7168), (1, 2, 33792), (66, 1, 33792)):
        x, bits = _x(rng, rows, k, "normal"), _bits(rng, n, k, "normal")
        packed = pack_bf12(bits)
        assert 0 < packed[3].size < n * k / 1000
        (found,) = everywhere(lambda x=x, packed=packed: [_product(x, packed)])
        assert found.tobytes() == _wanted(x, bits).tobytes()


def test_an_exception_in_any_column_is_put_in_its_place(pack_bf12, everywhere):
    rng = np.random.default_rng(2)
    bits = _bits(rng, 64, 64, "normal") & 0x807F | 0x3F80
    bits[np.arange(64), np.arange(64)] = 0x0001
    packed = pack_bf12(bits)
    assert packed[3].tolist() == list(range(64))
    for rows in (1, 2, 3, 4, 5):
        x = _x(rng, rows, 64, "normal")
        (found,) = everywhere(lambda x=x: [_product(x, packed)])
        assert found.tobytes() == _wanted(x, bits).tobytes()


def test_arrays_may_lie_at_any_address(pack_bf12, everywhere):
    rng = np.random.default_rng(3)
    bits = _bits(rng, 11, 96, "mixed")
    for offset in (1, 2, 3, 7):
        moved = []
        for array in pack_bf12(bits):
            room = np.empty(array.nbytes + offset, np.uint8)
            room[offset:] = np.frombuffer(array.tobytes(), np.uint8)
            moved.append(np.frombuffer(room, array.dtype, offset=offset).reshape(array.shape))
        for rows in (1, 3, 6):
            x = _x(rng, rows, 96, "normal")
            (found,) = everywhere(lambda x=x, moved=tuple(moved): [_product(x, moved)])
            assert found.tobytes() == _wanted(x, bits).tobytes()


def test_no_rows_outputs_or_elements_is_no_error(pack_bf12):
    for rows, n, k in ((0, 3, 64), (2, 0, 64), (6, 3, 0), (1, 3, 0)):
        found = _product(np.empty((rows, k), np.float32), pack_bf12(np.ones((n, k), np.uint16)))
        assert (found == 0).all()


def test_flush_to_zero_set_by_the_caller_changes_nothing(pack_bf12, settings):
    rng = np.random.default_rng(5)
    bits = _bits(rng, 40, 64, "subnormal") & 0x807F
    for isa in _math.isas():
        _math.set_isa(isa)
        for threads in (1, 3):
            _math.set_threads(threads)
            for rows in (1, 6):
                x = _x(rng, rows, 64, "normal")
                wanted = _wanted(x, bits)
                assert wanted.any()
                _math.test_set_flush(True)
                try:
                    found = _product(x, pack_bf12(bits))
                finally:
                    _math.test_set_flush(False)
                assert found.tobytes() == wanted.tobytes()


# ---- blocks of rows -----------------------------------------------------------------------------------


def _block(packed: Packed, start: int, stop: int) -> Packed:
    codes, base, starts, columns, values = packed
    exceptions = slice(starts[start], starts[stop])
    relative = starts[start : stop + 1] - starts[start]
    return codes[start:stop], base[start:stop], relative, columns[exceptions], values[exceptions]


@pytest.mark.parametrize("rows", [1, 4, 6])
def test_blocks_of_a_matrix_give_the_bytes_of_the_whole(rows, pack_bf12, everywhere):
    rng = np.random.default_rng(rows)
    x, bits = _x(rng, rows, 224, "normal"), _bits(rng, 61, 224, "mixed")
    packed = pack_bf12(bits)

    def in_blocks() -> list[np.ndarray]:
        out = np.full((rows, 70), 7, np.float32)
        for start, stop in ((40, 61), (0, 1), (1, 40), (40, 40)):
            _math.matmul_bf12(out, x, *_block(packed, start, stop), 5 + start)
        return [out]

    (found,) = everywhere(in_blocks)
    assert found[:, 5:66].tobytes() == _wanted(x, bits).tobytes()
    assert (found[:, :5] == 7).all() and (found[:, 66:] == 7).all()


# ---- arguments ----------------------------------------------------------------------------------------


def _good(pack_bf12) -> dict[str, np.ndarray]:
    packed = pack_bf12(_bits(np.random.default_rng(0), 3, 64, "sparse"))
    arrays = {"out": np.zeros((2, 3), np.float32), "x": np.zeros((2, 64), np.float32)}
    return {**arrays, **dict(zip(("codes", "base", "starts", "columns", "values"), packed, strict=True))}


def _damages() -> list[Callable[[np.ndarray], object]]:
    return [
        lambda a: a.astype(np.float64),
        lambda a: a.astype(a.dtype.newbyteorder()) if a.itemsize > 1 else a.astype(np.int16),
        lambda a: a.astype(np.int32),
        lambda a: np.concatenate([a, a], axis=-1)[..., ::2],  # not contiguous
        lambda a: np.concatenate([a, a[:1]]),  # one row more
        lambda a: np.concatenate([a, a], axis=-1),
        lambda a: a[..., 1:].copy(),
        lambda a: a[:1].copy(),
        lambda a: a[:0].copy(),
        lambda a: a.reshape(-1, 1) if a.ndim == 1 else a.ravel(),
        lambda a: a[None],
        lambda a: a[()].ravel()[0],  # a scalar
        lambda _: None,
        lambda _: "text",
        lambda a: a.tolist(),
    ]


def test_a_wrong_argument_is_an_exception_that_names_an_argument(pack_bf12):
    good = _good(pack_bf12)
    for argument in good:
        for change in _damages():
            arguments = {**good, argument: change(good[argument])}
            with pytest.raises((TypeError, ValueError), match="|".join(good)):
                _math.matmul_bf12(*arguments.values())
    _math.matmul_bf12(*good.values())


def test_the_number_of_arguments_is_checked(pack_bf12):
    arguments = [*_good(pack_bf12).values()]
    for wrong in (arguments[:-1], [*arguments, 0, 0], []):
        with pytest.raises(TypeError, match="7 or 8 arguments"):
            _math.matmul_bf12(*wrong)


def test_a_first_column_past_the_result_is_refused(pack_bf12):
    _, x, *packed = _good(pack_bf12).values()
    out = np.zeros((2, 5), np.float32)
    with pytest.raises(ValueError, match="first must be from 0 to 2, not 3"):
        _math.matmul_bf12(out, x, *packed, 3)


def test_a_length_that_is_no_multiple_of_32_is_refused():
    out, x, codes = np.zeros((1, 2), np.float32), np.zeros((1, 48), np.float32), np.zeros((2, 72), np.uint8)
    none = np.zeros(0, np.uint16)
    with pytest.raises(ValueError, match="multiple of 32"):
        _math.matmul_bf12(out, x, codes, np.zeros(2, np.uint8), np.zeros(3, np.uint32), none, none)


MALFORMED: list[tuple[str, int, int, str]] = [  # array, index, value, message
    ("starts", 0, 1, "starts must go from 0 to 6, not from 1 to 6"),
    ("starts", 50, 5, "starts must go from 0 to 6, not from 0 to 5"),
    ("starts", 50, 7, "starts must go from 0 to 6, not from 0 to 7"),
    ("starts", 20, 2, "exceptions of row 19:"),
    ("starts", 8, 7, "exceptions of row 7:"),
    ("starts", 8, (1 << 32) - 1, "exceptions of row 7:"),
    ("columns", 2, 64, "exceptions of row 7:"),
    ("columns", 5, 65535, "exceptions of row 49:"),
    ("columns", 1, 5, "exceptions of row 7:"),
    ("columns", 1, 63, "exceptions of row 7:"),
]


@pytest.mark.parametrize("case", MALFORMED, ids=[f"{c[0]}-{c[1]}-{c[2]}" for c in MALFORMED])
def test_exceptions_that_are_not_in_order_are_refused(case, settings):
    argument, index, value, message = case
    starts = np.zeros(51, np.uint32)
    starts[8:], starts[50] = 3, 6
    exceptions = {"starts": starts, "columns": np.array([5, 30, 63, 0, 1, 2], np.uint16)}
    exceptions[argument][index] = value
    codes, base, values = np.zeros((50, 96), np.uint8), np.full(50, 100, np.uint8), np.zeros(6, np.uint16)
    for isa in _math.isas():
        _math.set_isa(isa)
        for threads, grain in ((1, 0), (3, 1), (3, 0), (2, 5)):
            _math.set_threads(threads)
            _math.set_grain(grain)
            for rows in (1, 9):
                out, x = np.empty((rows, 50), np.float32), np.zeros((rows, 64), np.float32)
                with pytest.raises(ValueError, match=message):
                    _math.matmul_bf12(out, x, codes, base, *exceptions.values(), values)


def test_offsets_below_an_exponent_of_zero_are_the_same_everywhere(everywhere):
    """No packer writes them, but a damaged file may: whatever the weights are then, they are the specification's."""
    rng = np.random.default_rng(8)
    base = np.arange(9, dtype=np.uint8)
    offsets = rng.integers(0, 16, (9, 3, 2, 16), np.uint8)
    offsets[offsets == base[:, None, None, None] + 1] = 0  # an exponent of 255 is not a number
    nibbles = offsets[:, :, 0] | offsets[:, :, 1] << 4
    codes = np.concatenate([rng.integers(0, 256, (9, 3, 32), np.uint8), nibbles], axis=2).reshape(9, 144)
    packed = codes, base, np.zeros(10, np.uint32), np.zeros(0, np.uint16), np.zeros(0, np.uint16)
    for rows in (1, 2, 3, 4, 5):
        x = _x(rng, rows, 96, "largest")
        (found,) = everywhere(lambda x=x: [_product(x, packed)])
        assert np.isfinite(found).all()
