"""Heat: how often each expert was used lately, from real runs. Advisory: it only decides what goes first and where.

One small file for each model in the cache, `heat/`; its format is in docs/store.md. A pass counts as one use of each
expert that it read; a generated token is one pass, a prompt as many as it takes. Counts halve every `HALF_LIFE` passes.
"""

from __future__ import annotations

import hashlib
import logging
import re
import struct
import zlib
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import numpy.typing as npt

from deltafin.indexer import Catalog, discard, disk_error, make_directory, publish, read_small, temporary

log = logging.getLogger(__name__)

HALF_LIFE = 8192  # passes: some hours of use
FOLDER = "heat"
_HEADER = struct.Struct("<4sIII32s")  # magic, layers, experts, half-life, SHA-256 of the model's identity
_CHECK = struct.Struct("<I")
_MAGIC = b"DfH1"

Counts = npt.NDArray[np.float32]  # [layers, experts]
Uses = Mapping[tuple[int, int], int]  # by (layer, expert)


def model_file(cache: Path, folder: str, identity: str, ending: str) -> Path:
    """Where something that concerns one model is kept in the cache."""
    name = re.sub(r"[^A-Za-z0-9.@-]", "_", identity)[:80]
    return cache / folder / f"{name}.{hashlib.sha256(identity.encode()).hexdigest()[:8]}.{ending}"


class Heat:
    """The counts of one model. A missing file is all zeros, a damaged one too, with a line."""

    def __init__(self, cache: Path, catalog: Catalog) -> None:
        config = catalog.config
        self.path = model_file(cache, FOLDER, catalog.identity, "heat")
        self._shape = config.num_layers, config.num_experts
        self._header = _HEADER.pack(_MAGIC, *self._shape, HALF_LIFE, hashlib.sha256(catalog.identity.encode()).digest())

    def read(self) -> Counts:
        """The counts as they were last written."""
        layers, experts = self._shape
        try:
            raw = read_small(self.path, _HEADER.size + 4 * layers * experts + _CHECK.size)
        except FileNotFoundError:
            return np.zeros(self._shape, np.float32)
        except OSError as e:
            log.warning("%s: cannot be read (%s); all experts count as cold", self.path, e.strerror)
            return np.zeros(self._shape, np.float32)
        body, check = raw[: -_CHECK.size], raw[-_CHECK.size :]
        if (
            len(raw) == _HEADER.size + 4 * layers * experts + _CHECK.size
            and body.startswith(self._header)
            and zlib.crc32(body) == _CHECK.unpack(check)[0]
        ):
            counts = np.frombuffer(body, np.float32, offset=_HEADER.size).reshape(self._shape)
            if np.isfinite(counts).all() and (counts >= 0).all():
                return counts.copy()
        log.warning("%s: damaged; all experts count as cold, and it is written anew", self.path)
        return np.zeros(self._shape, np.float32)

    def add(self, uses: Uses, passes: int) -> None:
        """Takes in a run of so many passes. Of two processes at the same instant one may get lost; no harm is done.

        Raises NoSpace or DiskError.
        """
        if not uses:
            return
        counts = decayed(self.read(), passes)
        for (layer, expert), count in uses.items():
            counts[layer, expert] += count
        body = self._header + counts.tobytes()
        part = temporary(self.path.parent, self.path.name)
        try:
            make_directory(self.path.parent)
            part.write_bytes(body + _CHECK.pack(zlib.crc32(body)))
            publish(part, self.path)
        except OSError as e:
            raise disk_error(e, self.path) from None
        finally:
            discard(part)


def decayed(counts: Counts, passes: int) -> Counts:
    """Counts after so many more passes."""
    return (counts * np.float32(0.5 ** (passes / HALF_LIFE))).astype(np.float32)
