"""The native backend: the same network as `runtime.reference`, in numpy arrays and `cext._math`.

Every sum has one written order (docs/arithmetic.md), so a row's bits depend on nothing but the weights
and the rows before it in its sequence. No array operation of numpy's own computes anything here: numpy
only allocates, slices and copies. Imports no torch.
"""

from deltafin.runtime.native.passes import Native

__all__ = ["Native"]
