"""Other compilers and another processor, emulated, make the same bytes of the same matrices."""

from __future__ import annotations

import shutil
import struct
import subprocess
from pathlib import Path

import numpy as np
import pytest

from deltafin.cext import _math

ROOT = Path(__file__).resolve().parents[2]
FLAGS = ["-std=c11", "-Wall", "-Wextra", "-Werror", "-ffp-contract=off", "-fvisibility=hidden"]
SOURCES = ["matmul_scalar.c", "matmul_avx2.c", "matmul_avx512.c", "matmul_neon.c", "mxfp4_table.c"]
SHAPES = [  # rows, n, k, gap after a row of x and of the result
    (1, 9, 1056, 0),
    (2, 5, 96, 3),
    (3, 7, 544, 1),
    (4, 6, 512, 2),
    (5, 13, 1088, 0),
    (70, 8, 160, 5),
    (261, 3, 64, 0),
]


def _needs(*programs: str) -> None:
    for program in programs:
        if shutil.which(program) is None:
            pytest.skip(f"{program} is not installed")


def _build(out: Path, compiler: str, *flags: str) -> Path:
    sources = [str(ROOT / "cext" / name) for name in SOURCES]
    words = [compiler, *FLAGS, *flags, f"-I{ROOT / 'cext'}", str(ROOT / "tests/cext/replay.c"), *sources, "-lm"]
    subprocess.run([*words, "-o", str(out)], check=True, timeout=240)
    return out


@pytest.fixture(scope="module")
def dumped(pack_bf12) -> tuple[bytes, bytes]:
    """Cases of every format, with odd lengths, subnormal numbers and zeros of both signs; what scalar makes of them."""
    isa = _math.isa()
    _math.set_isa("scalar")
    rng = np.random.default_rng(11)
    cases, results = [], []
    for number, (rows, n, full_k, gap) in enumerate(SHAPES):
        for form, name in enumerate(("mxfp4", "bf16", "f32", "int8", "bf12")):
            k = full_k if name in ("mxfp4", "bf12") else full_k - number * 3
            room = rng.standard_normal((rows, k + gap)).astype(np.float32)
            room[rng.random(room.shape) < 0.1] *= np.float32(1e-42)
            room[rng.random(room.shape) < 0.1] = -0.0
            if name == "mxfp4":
                planes = rng.integers(0, 256, (n, k // 2), np.uint8), rng.integers(0, 140, (n, k // 32), np.uint8)
            elif name == "bf16":
                planes = ((rng.standard_normal((n, k)).astype(np.float32).view(np.uint32) >> 16).astype(np.uint16),)
            elif name == "f32":
                planes = (rng.standard_normal((n, k)).astype(np.float32),)
            elif name == "bf12":
                weights = rng.standard_normal((n, k)).astype(np.float32)
                weights[rng.random((n, k)) < 0.01] *= np.float32(1e-39)
                weights[n // 2] = 0.0
                planes = pack_bf12((weights.view(np.uint32) >> 16).astype(np.uint16))
            else:
                planes = rng.integers(-128, 128, (n, k), np.int8), rng.standard_normal(n).astype(np.float32)
            out = np.empty((rows, n), np.float32)
            getattr(_math, f"matmul_{name}")(out, np.ascontiguousarray(room[:, :k]), *planes)
            cases.append(struct.pack("8Q", form, rows, n, k, k + gap, n + gap, planes[0].nbytes, planes[-1].size))
            cases += [room.tobytes(), *(plane.tobytes() for plane in planes)]
            results.append(out.tobytes())
    _math.set_isa(isa)
    return b"".join(cases), b"".join(results)


def _replays(words: list[str], dumped: tuple[bytes, bytes]) -> None:
    done = subprocess.run(words, input=dumped[0], capture_output=True, timeout=240)
    assert done.returncode == 0, done.stderr.decode()
    assert done.stdout == dumped[1]


@pytest.mark.parametrize(
    ("compiler", "optimise"),
    [
        ("clang", "-O3"),
        pytest.param("clang", "-O0", marks=pytest.mark.slow),
        pytest.param("gcc", "-O3", marks=pytest.mark.slow),  # as the package is, which made what is compared with
        pytest.param("gcc", "-O0", marks=pytest.mark.slow),
    ],
)
def test_compilers_agree(compiler, optimise, dumped, tmp_path):
    _needs(compiler)
    program = _build(tmp_path / "replay", compiler, optimise)
    for isa in _math.isas():
        _replays([str(program), isa], dumped)


@pytest.mark.parametrize("optimise", ["-O3", pytest.param("-O0", marks=pytest.mark.slow)])
def test_neon_under_emulation_agrees(optimise, dumped, tmp_path):
    _needs("aarch64-linux-gnu-gcc", "qemu-aarch64")
    program = _build(tmp_path / "replay", "aarch64-linux-gnu-gcc", "-static", optimise)
    for isa in ("neon", "scalar"):
        _replays(["qemu-aarch64", str(program), isa], dumped)


@pytest.mark.slow
@pytest.mark.parametrize("compiler", ["gcc", "clang"])
def test_kernels_are_clean_under_sanitizers(compiler, dumped, tmp_path):
    _needs(compiler)
    sanitize = ["-O1", "-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
    program = _build(tmp_path / "replay", compiler, *sanitize)
    for isa in _math.isas():
        _replays([str(program), isa], dumped)
