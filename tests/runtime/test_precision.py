"""Float32 stays float32, and the caller's torch stays the caller's."""

from __future__ import annotations

import numpy as np
import torch

from deltafin.runtime import Segment
from deltafin.runtime.reference.precision import full_precision
from deltafin.runtime.reference.spine import linear, widen

IDS = [3, 141, 59, 26, 5]


def test_settings_of_the_program_neither_change_the_logits_nor_are_changed(tiny):
    expected = tiny.forward([Segment(tiny.sequence(), IDS)])
    precision = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("medium")
        torch.set_default_dtype(torch.float64)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            found = tiny.forward([Segment(tiny.sequence(), IDS)])
            assert torch.is_autocast_enabled("cpu")
        assert torch.get_float32_matmul_precision() == "medium"
        assert torch.is_grad_enabled()
    finally:
        torch.set_default_dtype(torch.float32)
        torch.set_float32_matmul_precision(precision)
    assert (found == expected).all()


def test_every_bfloat16_widens_to_itself():
    bits = np.arange(1 << 16, dtype=np.uint16)
    found = widen(bits, torch.device("cpu")).numpy().view(np.uint32)
    assert (found == bits.astype(np.uint32) << 16).all()


def test_a_matrix_of_many_tiles_multiplies_as_a_whole(monkeypatch):
    monkeypatch.setattr("deltafin.runtime.reference.spine.TILE_WEIGHTS", 24)
    rng = np.random.default_rng(2)
    weight = (rng.integers(0, 1 << 16, (13, 8), dtype=np.uint16) & 0x83FF) | 0x3F00
    x = torch.from_numpy(rng.standard_normal((3, 8)).astype(np.float32))
    expected = x.double() @ widen(weight, x.device).double().T
    assert torch.allclose(linear(x, weight).double(), expected, atol=1e-5)


def test_a_pass_multiplies_in_float32_even_where_the_program_allows_less():
    matmul = torch.backends.cuda.matmul
    found = matmul.fp32_precision
    try:
        matmul.fp32_precision = "tf32"
        with full_precision(torch.device("cpu")):
            assert matmul.fp32_precision == "ieee"
        assert matmul.fp32_precision == "tf32"
    finally:
        matmul.fp32_precision = found
