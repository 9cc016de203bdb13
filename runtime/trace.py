"""Router choices in a file: JSON lines under zstd, for planning what to fetch and for studying routing.

The file is a row of zstd frames. The first holds the header line; each later one holds one pass, a line for each
MoE layer, and is written whole when the pass has succeeded. So a program that was killed leaves a file whose
complete frames are complete passes; a torn last frame is left out and reported.

    {"format": "deltafin-trace", "version": 1, "model": ID, "moe_layers": [..], "top_k": K, "num_experts": N}
    {"pass": 0, "layer": 1, "rows": [[sequence, position], ..], "ids": [[..K..], ..], "weights": [[..K..], ..]}

`ids` go by falling weight. Weights are float32, written in the fewest digits that give the same float32 back.
"""

from __future__ import annotations

import errno
import json
import logging
from collections import Counter, abc
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np
import numpy.typing as npt
import zstandard

from deltafin.errors import BadRequest, DeltafinError, DiskError, NoSpace
from deltafin.indexer import Catalog, ModelConfig
from deltafin.runtime.observer import Observer, RowSpan

FORMAT = "deltafin-trace"
VERSION = 1
_READ_NBYTES = 1 << 20

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class TraceHeader:
    model: str  # the catalog's identity
    moe_layers: tuple[int, ...]
    top_k: int
    num_experts: int


@dataclass(frozen=True, slots=True)
class TraceLine:
    """What the router of one layer chose for every row of one pass."""

    number: int  # of the pass, from 0
    layer: int
    rows: tuple[tuple[int, int], ...]  # (sequence, position)
    ids: npt.NDArray[np.int32]  # [rows, top_k]
    weights: npt.NDArray[np.float32]  # [rows, top_k]


class TraceWriter(Observer):
    """Writes the passes it observes; an existing file is replaced. Close it, or use it in a `with`."""

    def __init__(self, path: str | Path, catalog: Catalog) -> None:
        self.path = Path(path)
        self._number = 0
        self._rows: list[list[int]] = []
        self._frame = _Frame()
        try:
            self._file = self.path.open("wb")
        except OSError as e:
            raise BadRequest(f"trace {self.path}: cannot be written ({e.strerror})") from None
        config = catalog.config
        header = {
            "format": FORMAT,
            "version": VERSION,
            "model": catalog.identity,
            "moe_layers": list(config.moe_layers),
            "top_k": config.top_k,
            "num_experts": config.num_experts,
        }
        first = _Frame()
        first.add(_line(header))
        self._write(first)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        try:
            self._file.close()
        except OSError as e:
            raise self._failed(e) from None

    def rows(self, spans: abc.Sequence[RowSpan]) -> None:
        self.rows_left(spans)
        self._frame = _Frame()  # whatever a failed pass left is dropped

    def rows_left(self, spans: abc.Sequence[RowSpan]) -> None:
        self._rows = [[s.sequence, s.position + i] for s in spans for i in range(s.count)]

    def routes(self, layer: int, ids: npt.NDArray[np.int32], weights: npt.NDArray[np.float32]) -> None:
        fields = {
            "pass": self._number,
            "layer": layer,
            "rows": self._rows,
            "ids": ids.tolist(),
            "weights": [[float(str(w)) for w in row] for row in weights],
        }
        self._frame.add(_line(fields))

    def finished(self) -> None:
        self._write(self._frame)
        self._frame = _Frame()
        self._number += 1

    def _write(self, frame: _Frame) -> None:
        try:
            self._file.write(frame.finish())
            self._file.flush()
        except OSError as e:
            raise self._failed(e) from None

    def _failed(self, e: OSError) -> DeltafinError:
        kind = NoSpace if e.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG) else DiskError
        return kind(f"trace {self.path}: write failed ({e.strerror}); the passes before are whole")


class _Frame:
    """One zstd frame in the making: compressed line by line, since a long prompt's lines are many."""

    def __init__(self) -> None:
        self._compressor = zstandard.ZstdCompressor(write_checksum=True).compressobj()
        self._pieces: list[bytes] = []

    def add(self, line: bytes) -> None:
        self._pieces.append(self._compressor.compress(line))

    def finish(self) -> bytes:
        return b"".join([*self._pieces, self._compressor.flush()])


class Trace:
    """A trace being read: its header, then its lines in order, one pass in memory at a time."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.torn = False  # known once the lines have been read: the file ends inside a pass
        first = next(self._frames(), None)
        if first is None:
            raise BadRequest(f"trace {self.path}: holds no header; not a trace, or its writer was killed at once")
        self.header = self._header(first)

    def __iter__(self) -> abc.Iterator[TraceLine]:
        self.torn = False
        for number, frame in enumerate(self._frames()):
            if number:
                yield from (self._parse(line) for line in frame.splitlines())

    def _frames(self) -> abc.Iterator[bytes]:
        """The content of every whole frame."""
        try:
            with self.path.open("rb") as file:
                frame, content = zstandard.ZstdDecompressor().decompressobj(), list[bytes]()
                begun = False
                while piece := file.read(_READ_NBYTES):
                    while piece:
                        content.append(frame.decompress(piece))
                        begun = True
                        piece = frame.unused_data if frame.eof else b""
                        if frame.eof:
                            yield b"".join(content)
                            frame, content = zstandard.ZstdDecompressor().decompressobj(), []
                            begun = False
                self.torn = begun
        except OSError as e:
            raise BadRequest(f"trace {self.path}: cannot be read ({e.strerror})") from None
        except zstandard.ZstdError as e:
            raise BadRequest(f"trace {self.path}: not a trace, or damaged ({e})") from None

    def _header(self, raw: bytes) -> TraceHeader:
        fields = self._object(raw)
        if fields.get("format") != FORMAT:
            raise BadRequest(f"trace {self.path}: not a {FORMAT} file")
        if fields.get("version") != VERSION:
            raise BadRequest(
                f"trace {self.path}: version {fields.get('version')!r}; this program reads version {VERSION}"
            )
        model, top_k, num_experts = fields.get("model"), fields.get("top_k"), fields.get("num_experts")
        layers = fields.get("moe_layers")
        if (
            not isinstance(model, str)
            or type(top_k) is not int
            or type(num_experts) is not int
            or not isinstance(layers, list)
            or not all(type(layer) is int for layer in layers)
        ):
            raise BadRequest(f"trace {self.path}: its header is incomplete")
        return TraceHeader(model, tuple(layers), top_k, num_experts)

    def _parse(self, raw: bytes) -> TraceLine:
        fields = self._object(raw)
        number, layer, rows = fields.get("pass"), fields.get("layer"), fields.get("rows")
        try:
            pairs, ids, weights = np.array(rows), np.array(fields.get("ids")), np.array(fields.get("weights"))
        except (ValueError, OverflowError):  # lists of unequal length
            raise BadRequest(
                f"trace {self.path}: pass {number!r}, layer {layer!r} has rows of unequal length"
            ) from None
        shape = (len(pairs) if pairs.ndim else 0, self.header.top_k)
        if (
            type(number) is not int
            or type(layer) is not int
            or layer not in self.header.moe_layers
            or (pairs.dtype.kind, pairs.shape) != ("i", (shape[0], 2))
            or (ids.dtype.kind, ids.shape) != ("i", shape)
            or (weights.dtype.kind, weights.shape) != ("f", shape)
            or (ids < 0).any()
            or (ids >= self.header.num_experts).any()
        ):
            raise BadRequest(f"trace {self.path}: pass {number!r}, layer {layer!r} does not fit the header")
        places = tuple((int(s), int(p)) for s, p in pairs)
        return TraceLine(number, layer, places, ids.astype(np.int32), weights.astype(np.float32))

    def _object(self, raw: bytes) -> dict[str, object]:
        try:
            fields: object = json.loads(raw)
        except (ValueError, RecursionError):
            fields = None
        if not isinstance(fields, dict):
            raise BadRequest(f"trace {self.path}: not a trace (a line is no JSON object)")
        return fields


def read_trace(path: str | Path) -> Trace:
    """Open a trace; everything wrong with it is a BadRequest, here or while its lines are read."""
    return Trace(path)


def expert_uses(path: str | Path, config: ModelConfig) -> Counter[tuple[int, int]]:
    """How many rows of a trace chose each (layer, expert); `config` says which model they are meant for."""
    trace = read_trace(path)
    header = trace.header
    ours = (tuple(config.moe_layers), config.top_k, config.num_experts)
    if (header.moe_layers, header.top_k, header.num_experts) != ours:
        raise BadRequest(
            f"trace {path}: of a model with {len(header.moe_layers)} MoE layers, {header.num_experts} experts, "
            f"{header.top_k} chosen; this one has {len(ours[0])}, {config.num_experts}, {config.top_k}"
        )
    uses: Counter[tuple[int, int]] = Counter()
    for line in trace:
        numbers, counts = np.unique(line.ids, return_counts=True)
        uses.update({(line.layer, int(n)): int(c) for n, c in zip(numbers, counts, strict=True)})
    if trace.torn:
        _log.warning("trace %s: ends inside a pass, which is left out; its writer was stopped", path)
    return uses


def _line(fields: abc.Mapping[str, object]) -> bytes:
    return json.dumps(fields, separators=(",", ":")).encode() + b"\n"
