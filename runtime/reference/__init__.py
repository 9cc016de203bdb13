"""The model in plain torch: float32 activations, slow, meant to be read beside K3's equations.

It is the second opinion for native kernels and the path for devices that have none. It promises a
tolerance, not bits: torch may order a sum differently for another number of rows or threads. It holds one
layer's spine and one expert at a time, and keeps no weights between passes.

`Reference` is the whole door; importing this package imports torch.
"""

from deltafin.runtime.reference.passes import Reference

__all__ = ["Reference"]
