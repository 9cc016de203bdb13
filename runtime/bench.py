"""How fast are the kernels, and how fast could they be?

Every rate stands beside the limit that was measured in the same run on the same memory: reading for one row, where
each weight is used once, and multiply-adds in registers for more. Limits and kernels take turns, and of each the best
turn counts, so that a busy machine disturbs both alike.
"""

from __future__ import annotations

import mmap
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt

from deltafin.cext import _math
from deltafin.errors import BadRequest

ROWS = (1, 4, 16, 64, 256)
PREFETCHES = (0, 4096)  # bytes ahead: the read limit is the faster of these
LEAST_ARENA = 192 << 20  # of weights, and at least four times the largest cache
MOST_ARENA = 1 << 30
READ_PART = 64 << 20  # of the arena in one turn
FMA_STEPS = 100_000
PACKED_ROWS = 96  # of a bf12 matrix, before they repeat
MOST_FLOP = 1.5e9  # in one turn of one thread: longer matrices are cut

Floats = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Matrix:
    """A matrix of K3 in the format in which it is kept."""

    format: str
    tensor: str
    n: int
    k: int
    together: int = 1  # for one row: how many are multiplied in one job of the threads

    @property
    def row_nbytes(self) -> int:
        if self.format == "bf12":  # codes, base and start; the exceptions, one of 10,000 weights, are not counted
            return self.k // 32 * 48 + 5
        bits = {"mxfp4": 4.25, "int8": 8, "bf16": 16, "f32": 32}[self.format]
        return int(self.k * bits / 8)


MATRICES = (
    Matrix("mxfp4", "experts w1, w3", 3072, 3584),
    Matrix("mxfp4", "experts w2", 3584, 3072),
    Matrix("mxfp4", "w1 of 16 experts", 3072, 3584, 16),
    Matrix("bf16", "q_proj", 12288, 7168),
    Matrix("bf16", "o_proj", 7168, 12288),
    Matrix("bf12", "q_proj", 12288, 7168),
    Matrix("bf12", "o_proj", 7168, 12288),
    Matrix("int8", "q_proj", 12288, 7168),
    Matrix("f32", "q_proj", 6144, 7168),
)


@dataclass(frozen=True, slots=True)
class Rate:
    """Billions a second: bytes of stored weights for one row, floating-point operations for more."""

    matrix: Matrix
    rows: int
    threads: int
    unit: str
    rate: float
    limit: float
    alone: float  # the ratio of one thread

    @property
    def ratio(self) -> float:
        """Of what the threads can read or compute at most."""
        return self.rate / self.limit

    @property
    def scaling(self) -> float:
        """Of the rate at which the threads would be as near their limit as one alone is to its own."""
        return self.ratio / self.alone


@dataclass(frozen=True, slots=True)
class Report:
    isa: str
    turns: int
    arena_nbytes: int
    rates: tuple[Rate, ...]


def kernels(
    *,
    isa: str | None = None,
    threads: int | None = None,
    turns: int = 15,
    progress: Callable[[int], None] = lambda done: None,
) -> Report:
    """Measures every format and number of rows with one thread and with `threads` (all by default)."""
    with _settings(isa):
        arena = _Arena(_arena_nbytes())
        rates: list[Rate] = []
        for count in _thread_counts(threads):
            _math.set_threads(count)
            for matrix in MATRICES:
                rates += _measure(matrix, count, turns, arena, rates)
                progress(len(rates))
        return Report(_math.isa(), turns, arena.words.nbytes, tuple(rates))


def case_count(threads: int | None = None) -> int:
    """How many rates `kernels` measures."""
    return len(_thread_counts(threads)) * len(MATRICES) * len(ROWS)


@dataclass(frozen=True, slots=True)
class Brief:
    """What a plan needs: medians of a few turns with all threads."""

    seconds: dict[str, tuple[float, ...]]  # format -> a weight's, for each number of rows
    memory_rate: float  # bytes a second that are read
    turns: int


def brief(matrices: Sequence[Matrix], rows: Sequence[int], *, turns: int = 5) -> Brief:
    """Measures few cases, with the threads that are set; a second or two."""
    with _settings(None):
        arena = _Arena(_arena_nbytes())
        cases: dict[tuple[Matrix, int], _Case] = {}
        for matrix in matrices:
            weights = _Packed(arena.words.nbytes, matrix) if matrix.format == "bf12" else arena
            for count in rows:
                cases[matrix, count] = _Case(matrix, count, _math.threads(), arena, weights)
        times: dict[tuple[Matrix, int], list[float]] = {key: [] for key in cases}
        reads: list[float] = []
        for turn in range(turns):
            part = arena.bytes(turn * READ_PART % arena.words.nbytes, READ_PART)
            start = time.perf_counter()
            _math.limit_read(part, PREFETCHES[1])
            reads.append(part.size / (time.perf_counter() - start))
            for key, case in cases.items():
                start = time.perf_counter()
                case.run()
                times[key].append((time.perf_counter() - start) / case.weights)
        seconds = {m.format: tuple(statistics.median(times[m, count]) for count in rows) for m in matrices}
        return Brief(seconds, statistics.median(reads), turns)


def _thread_counts(threads: int | None) -> list[int]:
    return sorted({1, threads or _math.threads()})


@contextmanager
def _settings(isa: str | None) -> Iterator[None]:
    found = _math.isa(), _math.threads(), _math.grain()
    try:
        if isa is not None and isa not in _math.isas():
            raise BadRequest(f"no kernels for {isa} on this processor; there are {', '.join(_math.isas())}")
        _math.set_isa(isa or found[0])
        _math.set_grain(0)
        yield
    finally:
        _math.set_isa(found[0])
        _math.set_threads(found[1])
        _math.set_grain(found[2])


# ---- memory -------------------------------------------------------------------------------------------


def _arena_nbytes() -> int:
    """Larger than what any cache can hold on to."""
    return min(MOST_ARENA, max(LEAST_ARENA, 4 * _cache_nbytes()))


def _cache_nbytes() -> int:
    sizes = [0]
    for file in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        text = file.read_text().strip()
        sizes.append(int(text.rstrip("KMG")) << {"K": 10, "M": 20, "G": 30}.get(text[-1], 0))
    return max(sizes)


def _memory(nbytes: int) -> npt.NDArray[np.uint8]:
    """On large pages where the system gives them."""
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)  # shared memory has no huge pages
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(memory, np.uint8)


class _Arena:
    """Memory full of weights that are ordinary numbers in every format but bf12."""

    def __init__(self, nbytes: int) -> None:
        self.words = _memory(nbytes).view(np.uint16)
        rng = np.random.default_rng(3)
        block = rng.integers(0, 1 << 16, 1 << 20, dtype=np.uint16) & 0x83FF | 0x3C00  # |bf16| in 2^-7 .. 2
        for start in range(0, self.words.size, block.size):
            part = self.words[start : start + block.size]
            part[:] = block[: part.size]
        self.scales = rng.integers(118, 127, nbytes // 16, dtype=np.uint8)
        self.row_scales = np.ones(1 << 16, np.float32)

    def bytes(self, start: int, nbytes: int) -> npt.NDArray[np.uint8]:
        return self.words.view(np.uint8)[start : start + nbytes]

    def planes(self, matrix: Matrix, n: int, number: int) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint8]]:
        """The number-th MXFP4 matrix of n rows that lies in the arena: codes and scales."""
        k = matrix.k
        start = number * n * k // 2
        packed = self.bytes(start, n * k // 2).reshape(n, k // 2)
        return packed, self.scales[start // 16 :][: n * k // 32].reshape(n, k // 32)

    def multiply(self, matrix: Matrix, n: int, number: int) -> Callable[[Floats, Floats], None]:
        """The product with the number-th matrix of n rows that lies in the arena."""
        k = matrix.k
        if matrix.format == "mxfp4":
            planes = self.planes(matrix, n, number)
            return lambda out, x: _math.matmul_mxfp4(out, x, *planes)
        nbytes = n * matrix.row_nbytes
        stored = self.bytes(number * nbytes, nbytes)
        if matrix.format == "bf16":
            words = stored.view(np.uint16).reshape(n, k)
            return lambda out, x: _math.matmul_bf16(out, x, words)
        if matrix.format == "int8":
            integers, row_scale = stored.view(np.int8).reshape(n, k), self.row_scales[:n]
            return lambda out, x: _math.matmul_int8(out, x, integers, row_scale)
        floats = stored.view(np.float32).reshape(n, k)
        return lambda out, x: _math.matmul_f32(out, x, floats)


class _Packed:
    """Memory full of normally distributed weights in bf12: a few rows, again and again."""

    def __init__(self, nbytes: int, matrix: Matrix) -> None:
        weights = np.random.default_rng(5).standard_normal((PACKED_ROWS, matrix.k), np.float32)
        codes, base, counts, columns, values = _bf12((weights.view(np.uint32) >> 16).astype(np.uint16))
        rows = nbytes // matrix.row_nbytes
        self._codes = _memory(rows * codes.shape[1]).reshape(rows, -1)
        for start in range(0, rows, PACKED_ROWS):
            part = self._codes[start : start + PACKED_ROWS]
            part[:] = codes[: len(part)]
        self._base = np.resize(base, rows)
        self._starts = np.concatenate([[0], np.resize(counts, rows).cumsum()]).astype(np.uint32)
        self._columns = np.resize(columns, self._starts[-1])
        self._values = np.resize(values, self._starts[-1])

    def multiply(self, matrix: Matrix, n: int, number: int) -> Callable[[Floats, Floats], None]:
        """The product with the number-th matrix of n rows."""
        rows = slice(number * n, (number + 1) * n)
        starts = self._starts[rows.start : rows.stop + 1]
        exceptions = slice(starts[0], starts[-1])
        columns, values = self._columns[exceptions], self._values[exceptions]
        planes = self._codes[rows], self._base[rows], starts - starts[0], columns, values
        return lambda out, x: _math.matmul_bf12(out, x, *planes)


def _bf12(bits: npt.NDArray[np.uint16]) -> tuple[npt.NDArray[np.generic], ...]:
    """Codes, base, exceptions in each row, their columns and values."""
    n, k = bits.shape
    exponents = (bits >> 7 & 255).astype(np.int16)
    offsets = exponents.max(axis=1, keepdims=True) - exponents
    excepted = (exponents == 0) | (offsets > 15)
    nibbles = np.where(excepted, 0, offsets).reshape(n, k // 32, 2, 16)
    codes = (bits >> 8 & 128 | bits & 127).reshape(n, k // 32, 32)
    codes = np.concatenate([codes, nibbles[:, :, 0] | nibbles[:, :, 1] << 4], axis=2).astype(np.uint8)
    columns = np.nonzero(excepted)[1].astype(np.uint16)
    return codes.reshape(n, -1), exponents.max(axis=1).astype(np.uint8), excepted.sum(axis=1), columns, bits[excepted]


# ---- time ---------------------------------------------------------------------------------------------


def _measure(matrix: Matrix, threads: int, turns: int, arena: _Arena, before: Sequence[Rate]) -> list[Rate]:
    """All numbers of rows of a matrix and both limits, in turn. One thread is timed by what it used."""
    clock = time.thread_time if threads == 1 else time.perf_counter
    weights = _Packed(arena.words.nbytes, matrix) if matrix.format == "bf12" else arena
    cases = {rows: _Case(matrix, rows, threads, arena, weights) for rows in ROWS}
    best = dict.fromkeys(ROWS, 0.0)
    read = fma = 0.0
    for turn in range(turns):
        for number, ahead in enumerate(PREFETCHES):  # each another part: the last may be in a cache
            start_at = (turn * len(PREFETCHES) + number) * READ_PART % arena.words.nbytes
            part = arena.bytes(start_at, READ_PART)
            start = clock()
            _math.limit_read(part, ahead)
            read = max(read, part.size / (clock() - start))
        start = clock()
        flop = _math.limit_fma(4 * threads, FMA_STEPS)
        fma = max(fma, flop / (clock() - start))
        for rows, case in cases.items():
            start = clock()
            case.run()
            best[rows] = max(best[rows], case.work / (clock() - start))
    alone = {rate.rows: rate.ratio for rate in before if rate.matrix == matrix}
    rates = []
    for rows in ROWS:
        rate, limit = best[rows] / 1e9, (read if rows == 1 else fma) / 1e9
        unit = "GB/s" if rows == 1 else "GFLOP/s"
        rates.append(Rate(matrix, rows, threads, unit, rate, limit, alone.get(rows, rate / limit)))
    return rates


class _Case:
    """One matrix, or for one row as many as make a good part of the arena, times some rows."""

    def __init__(self, matrix: Matrix, rows: int, threads: int, arena: _Arena, weights: _Arena | _Packed) -> None:
        n = matrix.n
        if rows > 1:
            n = min(n, max(512, int(MOST_FLOP * threads / (2 * rows * matrix.k)) // 96 * 96))
        n = min(n, arena.words.nbytes // (2 * matrix.row_nbytes))
        together = matrix.together if rows == 1 else 1
        held = arena.words.nbytes // (n * matrix.row_nbytes * together)
        x = np.random.default_rng(rows).standard_normal((rows, matrix.k), np.float32)
        outs = [np.empty((rows, n), np.float32) for _ in range(together)]
        self._next = 0
        self._calls: list[Callable[[], None]] = []  # together they walk through the arena
        for call in range(held):
            if together == 1:
                self._calls.append(partial(weights.multiply(matrix, n, call), outs[0], x))
            else:
                planes = [arena.planes(matrix, n, call * together + i) for i in range(together)]
                products = [(out, x, *pair) for out, pair in zip(outs, planes, strict=True)]
                self._calls.append(partial(_math.matmul_mxfp4_each, products))
        self._calls_a_turn = max(1, READ_PART // (n * matrix.row_nbytes * together)) if rows == 1 else 1
        self.weights = self._calls_a_turn * together * n * matrix.k  # of a turn
        self.work = self._calls_a_turn * together * (n * matrix.row_nbytes if rows == 1 else 2 * rows * n * matrix.k)

    def run(self) -> None:
        for _ in range(self._calls_a_turn):
            self._calls[self._next]()
            self._next = (self._next + 1) % len(self._calls)
