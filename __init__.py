"""Deltafin runs the whole of Kimi K3 on one ordinary machine, exactly as released.

    import deltafin

    with deltafin.open("demo") as model:
        seq = model.sequence()
        ids = model.tokenizer.encode("The capital of France is")
        for token in model.generate(seq, ids, max_new=16):
            print(model.tokenizer.decode([token]), end="", flush=True)

The names below come from `deltafin.runtime` and are loaded on first use; the errors are in `deltafin.errors`.
docs/api.md describes all of it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

__version__ = "0.1.0"

__all__ = [
    "Checkpoint",
    "Chosen",
    "Generation",
    "Model",
    "NGram",
    "Observer",
    "Runner",
    "Sampling",
    "Segment",
    "Sequence",
    "StreamDecoder",
    "Tokenizer",
    "__version__",
    "open",
]

if TYPE_CHECKING:
    from deltafin.runtime import (
        Checkpoint,
        Chosen,
        Generation,
        Model,
        NGram,
        Observer,
        Runner,
        Sampling,
        Segment,
        Sequence,
        StreamDecoder,
        Tokenizer,
        open,
    )


def __getattr__(name: str) -> object:
    """Loads the runtime when one of its names is first asked for, so that the commands start quickly."""
    if name in __all__:
        from deltafin import runtime

        return getattr(runtime, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
