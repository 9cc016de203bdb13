#!/usr/bin/env python3
"""How fast a saved state of Kimi K3's size is written and read, beside the same bytes written and read plainly.

`state_speed.py FOLDER [--tokens N] [--rounds N]` makes a state of random numbers and writes it as `save_state` does,
and as many bytes as `dd conv=fsync` would; reads both back with the page cache emptied of them, the plain file into as
much fresh memory as a state takes; and so on in turns. Prints one line a round and the medians.
"""

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from deltafin.errors import DeltafinError
from deltafin.indexer import ModelConfig, k3_config, parse_config
from deltafin.runtime.states.identifying import Identity
from deltafin.runtime.states.layout import LayerState, layer_bytes, new_layer
from deltafin.runtime.states.reading import StateReader
from deltafin.runtime.states.writing import StateWriter
from deltafin.store import Weights

PLAIN_NBYTES = 8 << 20  # of one plain read or write


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--tokens", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    try:
        measure(args.folder, args.tokens, args.rounds)
    except (OSError, DeltafinError) as e:
        print(f"state_speed: {e}", file=sys.stderr)
        return 1
    return 0


def measure(folder: Path, tokens: int, rounds: int) -> None:
    config = parse_config(k3_config())
    identity = Identity(Weights("speed", "0" * 64, None, "0" * 64), "released")
    random = np.random.default_rng(1)
    layers = [_filled(new_layer(config, n, tokens), random) for n in range(config.num_layers)]
    ids = np.zeros(tokens, "<u4")
    state, plain = folder / "speed.state", folder / "speed.plain"
    found: dict[str, list[float]] = {name: [] for name in ("write", "plain write", "read", "plain read")}
    try:
        for number in range(rounds):
            nbytes = 0

            def write() -> None:
                nonlocal nbytes
                writer = StateWriter(state, folder, identity, config, ids)
                try:
                    for layer, kept in enumerate(layers):
                        writer.layer(layer, kept)
                    writer.publish()
                finally:
                    writer.discard()
                nbytes = writer.nbytes

            turns: list[tuple[str, Callable[[], object]]] = [
                ("write", write),
                ("plain write", lambda: _write_plainly(state, plain)),
                ("read", lambda: _read(state, identity, config)),
                ("plain read", lambda: _read_plainly(plain)),
            ]
            for name, turn in turns if number % 2 == 0 else [turns[n] for n in (1, 0, 3, 2)]:
                if name == "plain write" and not state.exists():
                    write()
                found[name].append(_seconds(turn, () if "write" in name else (state, plain)))
            rates = "  ".join(f"{name} {nbytes / found[name][-1] / 1e9:.2f} GB/s" for name in found)
            print(f"{nbytes:,} bytes: {rates}", flush=True)
    finally:
        for path in (state, plain):
            path.unlink(missing_ok=True)
    for one, other in (("write", "plain write"), ("read", "plain read")):
        ratios = [a / b for a, b in zip(found[one], found[other], strict=True)]
        print(f"{one}: {statistics.median(ratios):.2f} of the time of {other} ({min(ratios):.2f} to {max(ratios):.2f})")


def _filled(state: LayerState, random: np.random.Generator) -> LayerState:
    for view in layer_bytes(state):
        np.frombuffer(view, np.float32)[:] = random.random(len(view) // 4, np.float32)
    return state


def _read(path: Path, identity: Identity, config: ModelConfig) -> None:
    with StateReader(path, identity, config) as reader:
        reader.layers()


def _write_plainly(source: Path, path: Path) -> None:
    """The same number of bytes, from memory."""
    block = os.urandom(PLAIN_NBYTES)
    left = source.stat().st_size
    with open(path, "wb", buffering=0) as f:
        while left > 0:
            left -= f.write(block[:left])
        os.fsync(f.fileno())


def _read_plainly(path: Path) -> None:
    with open(path, "rb", buffering=0) as f:
        room = np.empty(path.stat().st_size, np.uint8).data
        while len(room):
            room = room[f.readinto(room[:PLAIN_NBYTES]) :]


def _seconds(turn: Callable[[], object], cold: tuple[Path, ...]) -> float:
    for path in cold:
        fd = os.open(path, os.O_RDONLY)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)
    begun = time.perf_counter()
    turn()
    return time.perf_counter() - begun


if __name__ == "__main__":
    sys.exit(main())
