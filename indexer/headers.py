"""Reads the header of one safetensors shard and believes nothing in it.

A shard is: header length N (u64, little-endian), N bytes of JSON (`name -> {dtype, shape, data_offsets}`
and an optional `__metadata__`), then data. The rules checked here are the format's own: every number is
an integer in range, every tensor's length is what its shape and dtype need, and the tensors sorted by
offset cover the data from 0 to the end of the file without gap or overlap.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import NoReturn

from deltafin.errors import BadCheckpoint

PREFIX_NBYTES = 8
# The limit of the reference library. K3's largest header is 0.8 MB.
MAX_HEADER_NBYTES = 100_000_000

_TOO_LARGE = 1 << 63

_DTYPE_BITS = {
    "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6,
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8,
    "U16": 16, "I16": 16, "F16": 16, "BF16": 16,
    "U32": 32, "I32": 32, "F32": 32,
    "U64": 64, "I64": 64, "F64": 64, "C64": 64,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class HeaderTensor:
    """One tensor as its shard describes it; `offset` counts from the start of the file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


def header_nbytes(prefix: bytes, file_nbytes: int, shard: str) -> int:
    """The header length N from the first bytes of a shard, if it is possible in a file of this size.

    `prefix` holds the first 8 bytes or more; more lets the error say what the file really is.
    """
    if file_nbytes < PREFIX_NBYTES or len(prefix) < PREFIX_NBYTES:
        _refuse(shard, f"the file has {file_nbytes} bytes, too few for a shard")
    n = int.from_bytes(prefix[:PREFIX_NBYTES], "little")
    if n > file_nbytes - PREFIX_NBYTES or n > MAX_HEADER_NBYTES or n < 2:
        _refuse(shard, _what_it_is(prefix) or f"header length {n} is impossible in a file of {file_nbytes} bytes")
    return n


def parse_header(raw: bytes, file_nbytes: int, shard: str) -> list[HeaderTensor]:
    """Every tensor of a shard in file order. `raw` is the JSON part, `shard` the name that errors show."""
    fields = _load(raw, shard)
    data_start = PREFIX_NBYTES + len(raw)
    tensors = [_tensor(name, entry, data_start, shard) for name, entry in fields.items()]
    tensors.sort(key=lambda t: (t.offset, t.nbytes))
    _check_cover(tensors, data_start, file_nbytes, shard)
    return tensors


def _load(raw: bytes, shard: str) -> dict[str, object]:
    if raw[:1] != b"{":
        _refuse(shard, _what_it_is(raw) or "the header does not start with '{'")

    def unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
        fields = dict(pairs)
        if len(fields) != len(pairs):
            seen: set[str] = set()
            twice = next(k for k, _ in pairs if k in seen or seen.add(k))  # type: ignore[func-returns-value]
            _refuse(shard, f"the header names {show(twice)} twice")
        return fields

    def constant(name: str) -> NoReturn:
        _refuse(shard, f"the header contains {name}, which JSON does not have")

    try:
        fields = json.loads(raw.decode("utf-8"), object_pairs_hook=unique, parse_constant=constant)
    except UnicodeDecodeError:
        _refuse(shard, "the header is not UTF-8")
    except RecursionError:
        _refuse(shard, "the header is nested too deeply")
    except ValueError as e:
        _refuse(shard, f"the header is not JSON ({str(e)[:120]})")
    assert isinstance(fields, dict)  # it starts with '{'
    metadata = fields.pop("__metadata__", None)
    if metadata is not None and not (isinstance(metadata, dict) and all(isinstance(v, str) for v in metadata.values())):
        _refuse(shard, "__metadata__ must map strings to strings")
    return fields


def _tensor(name: str, entry: object, data_start: int, shard: str) -> HeaderTensor:
    if not isinstance(entry, dict):
        _refuse(shard, f"tensor {show(name)} is not described by an object")
    dtype, shape, span = entry.get("dtype"), entry.get("shape"), entry.get("data_offsets")
    if not isinstance(dtype, str) or dtype not in _DTYPE_BITS:
        _refuse(shard, f"tensor {show(name)} has dtype {show(dtype)}, which is unknown")
    if not isinstance(shape, list) or not all(type(d) is int and d >= 0 for d in shape):
        _refuse(shard, f"tensor {show(name)} has shape {show(shape)}; expected a list of sizes")
    if not isinstance(span, list) or len(span) != 2 or not all(type(o) is int and 0 <= o < _TOO_LARGE for o in span):
        _refuse(shard, f"tensor {show(name)} has data_offsets {show(span)}; expected [begin, end]")
    begin, end = span
    need = _numel(shape) * _DTYPE_BITS[dtype]
    if need % 8 or need >= _TOO_LARGE:
        _refuse(shard, f"tensor {show(name)} has dtype {dtype} and shape {show(shape)}, which no file can hold")
    if end - begin != need // 8:
        _refuse(
            shard,
            f"tensor {show(name)} spans bytes {begin} to {end}, but {dtype} {show(shape)} needs {need // 8} bytes",
        )
    return HeaderTensor(name, dtype, tuple(shape), data_start + begin, end - begin)


def _numel(shape: list[int]) -> int:
    """Elements of a shape; stops multiplying once no file could be that large (a header may list many sizes)."""
    if 0 in shape:
        return 0
    numel = 1
    for d in shape:
        numel *= d
        if numel >= _TOO_LARGE:
            break
    return numel


def _check_cover(tensors: list[HeaderTensor], data_start: int, file_nbytes: int, shard: str) -> None:
    at, previous = data_start, "the header"
    for t in tensors:
        if t.offset != at:
            kind = "overlaps" if t.offset < at else "leaves a gap after"
            _refuse(
                shard,
                f"tensor {show(t.name)} starts at byte {t.offset} and {kind} {show(previous)}, which ends at {at}",
            )
        at, previous = t.offset + t.nbytes, t.name
    if at > file_nbytes:
        last = next(t for t in tensors if t.offset + t.nbytes > file_nbytes)
        _refuse(
            shard,
            f"tensor {show(last.name)} ends at byte {last.offset + last.nbytes}, "
            f"but the file has {file_nbytes} bytes: it is cut short",
        )
    if at < file_nbytes:
        _refuse(
            shard, f"the tensors end at byte {at}, but the file has {file_nbytes} bytes: {file_nbytes - at} too many"
        )


def _what_it_is(prefix: bytes) -> str | None:
    """A better message for the files that people really meet in place of a shard."""
    head = prefix[:64].lstrip().lower()
    if head.startswith((b"<!doctype", b"<html", b"<?xml")):
        return "this is a web page, not a shard; was a login page downloaded?"
    if head.startswith(b"version https://git-lfs"):
        return "this is a git-lfs pointer, not the file itself; fetch it with 'git lfs pull'"
    if prefix[:2] == b"\x1f\x8b":
        return "this is gzip data, not a shard"
    return None


def show(value: object) -> str:
    """A value from the file, short and printable."""
    text = value if isinstance(value, str) and value.isprintable() else repr(value)
    return text if len(text) <= 160 else text[:157] + "..."


def _refuse(shard: str, complaint: str) -> NoReturn:
    raise BadCheckpoint(f"{shard}: {complaint}")
