"""Runs a computation in every way in which it can be cut, and compares the bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import numpy.typing as npt
import pytest

from deltafin.cext import _math

Arrays = list[npt.NDArray[np.generic]]
Pack = Callable[[npt.NDArray[np.uint16]], tuple[npt.NDArray[np.generic], ...]]
CUTS = [(1, 0), (2, 1), (3, 40), (5, 700), (2, 0)]  # threads, grain


@pytest.fixture
def settings() -> Iterator[None]:
    """Whatever a test sets in `_math`, the next one finds as it was."""
    found = _math.isa(), _math.threads(), _math.grain()
    yield
    _math.set_isa(found[0])
    _math.set_threads(found[1])
    _math.set_grain(found[2])


@pytest.fixture(scope="session")
def pack_bf12() -> Pack:
    """Raw bf16 [n, k] as codes, base, starts, columns, values. The codes of exceptions are anything."""
    rng = np.random.default_rng(12)

    def pack(bits: npt.NDArray[np.uint16]) -> tuple[npt.NDArray[np.generic], ...]:
        n, k = bits.shape
        exponents = (bits >> 7 & 255).astype(np.int64)
        base = exponents.max(axis=1, initial=0)
        offsets = base[:, None] - exponents
        excepted = (exponents == 0) | (offsets > 15)
        offsets = np.where(excepted, rng.integers(0, 16, (n, k)), offsets).reshape(n, k // 32, 2, 16)
        codes = np.where(excepted, rng.integers(0, 256, (n, k)), bits >> 8 & 128 | bits & 127).reshape(n, k // 32, 32)
        nibbles = offsets[:, :, 0] | offsets[:, :, 1] << 4
        rows, columns = np.nonzero(excepted)
        return (
            np.concatenate([codes, nibbles], axis=2).astype(np.uint8).reshape(n, k // 32 * 48),
            base.astype(np.uint8),
            np.searchsorted(rows, np.arange(n + 1)).astype(np.uint32),
            columns.astype(np.uint16),
            bits[excepted],
        )

    return pack


@pytest.fixture
def everywhere(settings) -> Callable[[Callable[[], Arrays]], Arrays]:
    """`everywhere(compute)` is what the scalar kernels make of it, after all others on all cuts made the same bytes."""

    def run(compute: Callable[[], Arrays]) -> Arrays:
        _math.set_isa("scalar")
        _math.set_threads(1)
        _math.set_grain(0)
        wanted = compute()
        for isa in _math.isas():
            _math.set_isa(isa)
            for threads, grain in CUTS:
                _math.set_threads(threads)
                _math.set_grain(grain)
                for number, (got, want) in enumerate(zip(compute(), wanted, strict=True)):
                    where = f"result {number} on {isa}, {threads} threads, grain {grain}"
                    assert got.tobytes() == want.tobytes(), where
        return wanted

    return run
