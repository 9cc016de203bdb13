"""The same golden values on an accelerator, where there is one."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from deltafin.runtime import Segment
from deltafin.runtime.reference import mxfp4

cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


@cuda
def test_a_cuda_device_gives_the_golden_logits_even_where_the_program_allows_tf32(open_model, tiny_dir, golden):
    arrays = np.load(golden / "tiny" / "golden.npz")
    found = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = True
    try:
        with open_model(tiny_dir, device="cuda") as model:
            logits = model.forward([Segment(model.sequence(), arrays["p3_ids"])])
    finally:
        torch.backends.cuda.matmul.allow_tf32 = found
    assert np.abs(logits - arrays["p3_logits"]).max() < 1e-3


@cuda
def test_a_cuda_device_decodes_the_smallest_scale_exactly():
    packed = np.arange(16, dtype=np.uint8)[None]
    found = mxfp4.decode(packed, np.zeros((1, 1), np.uint8), "w", torch.device("cuda")).cpu()
    assert torch.equal(found, mxfp4.decode(packed, np.zeros((1, 1), np.uint8), "w", torch.device("cpu")))
