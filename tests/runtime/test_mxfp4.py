"""Four-bit weights decode exactly."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from deltafin.errors import Corrupt
from deltafin.runtime.reference import mxfp4

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def cases(faults):
    return {case["name"]: case for case in faults("mxfp4_vectors").build(seed=7)}


def _planes(case):
    rows, cols = case["rows"], case["cols"]
    packed = np.frombuffer(bytes.fromhex(case["packed_hex"]), np.uint8).reshape(rows, cols // 2)
    scale = np.frombuffer(bytes.fromhex(case["scale_hex"]), np.uint8).reshape(rows, cols // 32)
    return packed.copy(), scale.copy()


def test_every_value_is_the_exact_one_or_infinity_where_float32_ends(cases):
    for name, case in cases.items():
        if name in ("scale_255", "wide_rows"):
            continue
        found = mxfp4.decode(*_planes(case), "w", CPU).numpy()
        with np.errstate(over="ignore"):
            expected = np.array(case["expect"]).astype(np.float32).reshape(found.shape)
        assert (found.view(np.uint32) == expected.view(np.uint32)).all(), name


def test_the_smallest_scale_is_not_flushed_to_zero(cases):
    found = mxfp4.decode(*_planes(cases["scale_0"]), "w", CPU)
    assert found[0, 2].item() == 2.0**-127
    assert found[0, 1].item() == 2.0**-128


def test_a_scale_of_255_is_corrupt_and_named(cases):
    with pytest.raises(Corrupt, match=r"experts\.7\.w2\.weight_scale: row 0, group 0 is 255"):
        mxfp4.decode(*_planes(cases["scale_255"]), "experts.7.w2", CPU)


@pytest.mark.parametrize("rows", [1, 7, 8, 9, 64])
def test_products_are_near_the_float64_ones_for_any_number_of_rows(cases, rows):
    case = cases["wide_rows"]
    matrix = mxfp4.decode(*_planes(case), "w", CPU)
    x = torch.tensor(case["x"], dtype=torch.float32).expand(rows, -1)
    found = (x @ matrix.T).double().numpy()
    exact = np.array(case["product"])
    size = np.abs(matrix.double().numpy()) @ np.abs(np.array(case["x"]))
    assert (np.abs(found - exact) < 1e-6 * size).all()


@pytest.mark.parametrize("cols", [32, 64, 3072, 3584])
def test_random_planes_decode_as_the_format_says(faults, cols):
    rng = np.random.default_rng(cols)
    packed = rng.integers(0, 256, (5, cols // 2), dtype=np.uint8)
    scale = rng.integers(0, 253, (5, cols // 32), dtype=np.uint8)
    expected = faults("mxfp4_vectors").decode(packed, scale)
    assert (mxfp4.decode(packed, scale, "w", CPU).double().numpy() == expected).all()
