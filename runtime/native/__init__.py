"""The model on the CPU's own kernels (`deltafin.cext._math`): the product on a CPU, without PyTorch.

The network and its file layout mirror `runtime.reference`, the plain implementation. Every sum has one order
(docs/arithmetic.md), so a token's logits do not depend on threads, company, how a prompt was cut or what arrived when,
nor on how much of the model is in memory.
"""

from deltafin.runtime.native.kda import KdaState
from deltafin.runtime.native.mla import KEY_BLOCK, Latents
from deltafin.runtime.native.opening import RELEASED, choose_packs, open_native
from deltafin.runtime.native.passes import Native, matrices

# The version of the arithmetic: it changes with any bit of any result, so that no saved state outlives a change.
ARITHMETIC = 1

__all__ = [
    "ARITHMETIC",
    "KEY_BLOCK",
    "RELEASED",
    "KdaState",
    "Latents",
    "Native",
    "choose_packs",
    "matrices",
    "open_native",
]
