"""Float32 means float32, whatever the calling program has switched on."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

# Products on CUDA devices, and those on CPUs that would round to bfloat16.
_PRODUCTS = (torch.backends.cuda.matmul, torch.backends.mkldnn.matmul)  # type: ignore[attr-defined]
_FULL = ("none", "ieee")


@contextmanager
def full_precision(device: torch.device) -> Iterator[None]:
    """Inside, no TF32, no autocast and no autograd; the caller's settings are put back at the end.

    TF32 keeps 10 bits of each factor. Attention residuals amplify a rounding about threefold a layer, so that
    would change tokens. The setting is the process's, so another thread's products are exact meanwhile, too.
    """
    reduced = [(products, products.fp32_precision) for products in _PRODUCTS if products.fp32_precision not in _FULL]
    for products, _ in reduced:
        products.fp32_precision = "ieee"
    try:
        with torch.inference_mode(), torch.autocast(device.type, enabled=False):
            yield
    finally:
        for products, found in reduced:
            products.fp32_precision = found
