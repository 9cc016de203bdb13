"""The file of a state: what comes in which order, and how long it is. Byte by byte: docs/state.md.

Everything follows from the identity, the model's config and the number of tokens, so a reader computes the header that
it wants to see and compares; nothing that a file says decides how much is read or allocated.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import xxhash

from deltafin.errors import BadRequest
from deltafin.indexer import ModelConfig
from deltafin.runtime.native import KEY_BLOCK, KdaState, Latents
from deltafin.runtime.states.identifying import VERSION, Identity

MAGIC = b"DfStat\r\n"
PREFIX = struct.Struct("<8sII16s")  # magic, version, bytes of the JSON, XXH3-128 of the JSON
DIGEST_NBYTES = 16
MOST_JSON_NBYTES = 256 << 10  # a letter for each of at most 65,534 layers, and little else
_PIECE_NBYTES = 1 << 20

LayerState = KdaState | Latents
Ids = npt.NDArray[np.uint32]
Floats = npt.NDArray[np.float32]


class Size(NamedTuple):
    """Bytes of a state's parts; they lie in this order."""

    head: int  # prefix and JSON
    ids: int
    layers: int
    digests: int  # one a layer, and one of all that the layers' do not cover

    @property
    def whole(self) -> int:
        return sum(self)


def head_bytes(identity: Identity, config: ModelConfig, tokens: int, pending: int = 0) -> bytes:
    """Prefix and JSON as they begin a file."""
    text = encode_json({**header(identity, config, tokens, pending), "model": identity.weights.model})
    return PREFIX.pack(MAGIC, VERSION, len(text), xxhash.xxh3_128(text).digest()) + text


def header(identity: Identity, config: ModelConfig, tokens: int, pending: int) -> dict[str, object]:
    """What the JSON says, but for the model's name, which is for people."""
    return {
        **identity.as_json(),
        "history": [config.conv_kernel - 1, 3 * config.kda_width],
        "latent": config.kv_lora_rank + config.qk_rope_head_dim,
        "layers": "".join("K" if config.is_kda(layer) else "M" for layer in range(config.num_layers)),
        "memory": [config.kda_heads, config.kda_head_dim, config.kda_head_dim],
        "pending": pending,
        "tokens": tokens,
    }


def encode_json(value: object) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()


def sizes(head_nbytes: int, config: ModelConfig, tokens: int, pending: int = 0) -> Size:
    return Size(
        head=head_nbytes,
        ids=4 * (tokens + pending),
        layers=sum(layer_nbytes(config, layer, tokens) for layer in range(config.num_layers)),
        digests=DIGEST_NBYTES * (config.num_layers + 1),
    )


def state_nbytes(identity: Identity, config: ModelConfig, tokens: int) -> int:
    """What the file of a state of so many tokens takes."""
    return sizes(len(head_bytes(identity, config, tokens)), config, tokens).whole


def layer_nbytes(config: ModelConfig, layer: int, tokens: int) -> int:
    if not config.is_kda(layer):
        return 4 * tokens * (config.kv_lora_rank + config.qk_rope_head_dim)
    history = (config.conv_kernel - 1) * 3 * config.kda_width
    return 4 * (history + config.kda_heads * config.kda_head_dim**2)


def new_layer(config: ModelConfig, layer: int, tokens: int) -> LayerState:
    """Memory for a layer's state after so many tokens, still to be filled."""
    if config.is_kda(layer):
        history = np.empty((config.conv_kernel - 1, 3 * config.kda_width), np.float32)
        memory = np.empty((config.kda_heads, config.kda_head_dim, config.kda_head_dim), np.float32)
        return KdaState(history, memory)
    width = config.kv_lora_rank + config.qk_rope_head_dim
    blocks = tuple(np.empty((KEY_BLOCK, width), np.float32) for _ in range(0, tokens, KEY_BLOCK))
    return Latents(blocks, tokens)


def layer_bytes(state: LayerState) -> list[memoryview]:
    """The bytes of a layer as a file holds them, in order; nothing is copied."""
    if isinstance(state, KdaState):
        arrays = [state.history, state.memory]
    else:
        ends = range(0, state.length, KEY_BLOCK)  # a checkpoint may share blocks with a longer state
        arrays = [block[: state.length - at] for at, block in zip(ends, state.blocks, strict=False)]
    return [_bytes_of(array) for array in arrays]


def _bytes_of(array: Floats) -> memoryview:
    assert array.dtype == np.float32 and array.flags.c_contiguous
    return array.reshape(-1).view(np.uint8).data


def pieces(view: memoryview) -> Iterator[memoryview]:
    """What is read or written at once: hashed while it is still in the processor's cache."""
    return (view[at : at + _PIECE_NBYTES] for at in range(0, len(view), _PIECE_NBYTES))


def ids_array(ids: Sequence[int], config: ModelConfig) -> Ids:
    """Token ids as a file holds them. Raises BadRequest for what is none of the model's."""
    try:
        found = np.array(ids, np.int64)
    except (OverflowError, TypeError, ValueError):
        raise BadRequest("token ids must be integers of the vocabulary") from None
    outside = np.flatnonzero((found < 0) | (found >= config.vocab_size))
    if len(outside):
        at = int(outside[0])
        raise BadRequest(f"id {int(found[at])} at {at} is outside the vocabulary of {config.vocab_size}")
    return found.astype("<u4")
