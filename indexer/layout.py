"""Reads every header of a source and proves that the checkpoint is complete.

The result is a `Layout`: where each tensor of the spine and each expert lies. It exists only if every
check of the original layout holds: the tensors a config calls for are all there once, with exact dtype
and shape; the six tensors of an expert lie in one shard, in order and without a gap; and the experts of
a layer form one run, sorted by expert number as text.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from deltafin.errors import BadCheckpoint
from deltafin.indexer import roles
from deltafin.indexer.answers import ShardFile
from deltafin.indexer.config import ModelConfig
from deltafin.indexer.headers import PREFIX_NBYTES, HeaderTensor, header_nbytes, parse_header, show
from deltafin.indexer.sources import Source

# The first read of a shard. Small, so that a shard that is none costs little; the rest follows exactly.
_FIRST_NBYTES = 64 << 10
_HEADER_THREADS = 8


@dataclass(frozen=True, slots=True)
class Shard:
    """One shard's identity. `sha256` is the published digest of the whole file where the source gives one."""

    name: str
    nbytes: int
    header_nbytes: int
    header_sha256: str
    etag: str | None
    sha256: str | None
    tensors: int
    data_nbytes: int
    ignored_tensors: int
    ignored_nbytes: int


@dataclass(frozen=True, slots=True)
class Place:
    """One tensor of the spine or the globals and where its bytes are."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    shard: int
    offset: int
    nbytes: int


@dataclass(slots=True)
class Layout:
    """Everything found. `experts[layer]` holds per expert (shard, offset of its span)."""

    config: ModelConfig
    shards: list[Shard]
    spine: dict[int, list[Place]]
    globals: dict[str, Place]
    experts: dict[int, npt.NDArray[np.int64]]  # [num_experts, 2]


def read_layout(
    source: Source,
    config: ModelConfig,
    progress: Callable[[int, int], None] | None = None,
    note: Callable[[ShardFile, list[HeaderTensor]], None] | None = None,
) -> Layout:
    """Reads all headers, in parallel, and checks them.

    `progress(done, total)` counts shards; `note` sees every header, one call at a time.
    """
    files = source.shard_files()
    collector = _Collector(config, note)
    lock = threading.Lock()
    done = 0

    def one(number: int) -> Shard:
        nonlocal done
        shard = collector.read_shard(source, files[number], number)
        with lock:
            done += 1
            if progress is not None:
                progress(done, len(files))
        return shard

    with ThreadPoolExecutor(_HEADER_THREADS, "headers") as pool:
        futures = [pool.submit(one, i) for i in range(len(files))]
        try:
            shards = [f.result() for f in futures]
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            source.close()  # the other threads may be in a long transfer or pause, and leaving waits for them
            raise
    return collector.finish(shards)


def read_header(source: Source, file: ShardFile) -> tuple[ShardFile, bytes, list[HeaderTensor]]:
    """One shard's header: the file with what its source said on the way, the JSON, the tensors in file order."""
    first = _FIRST_NBYTES if file.nbytes is None else min(_FIRST_NBYTES, file.nbytes)
    if first == 0:
        raise BadCheckpoint(f"{file.name}: the file is empty")
    raw, answer = source.read(file, 0, first)
    nbytes = file.nbytes if file.nbytes is not None else answer.file_nbytes
    if nbytes is None:
        raise BadCheckpoint(f"{file.name}: the server does not say how large the file is (no Content-Range total)")
    if len(raw) < min(first, nbytes):
        raise BadCheckpoint(f"{file.name}: got {len(raw)} bytes of a file that should have {nbytes}")
    file = ShardFile(file.name, nbytes, file.etag or answer.etag, file.sha256 or answer.sha256)
    n = header_nbytes(raw, nbytes, file.name)
    have = raw[PREFIX_NBYTES : PREFIX_NBYTES + n]
    if len(have) < n:
        rest, _ = source.read(file, PREFIX_NBYTES + len(have), n - len(have))
        have += rest
    if len(have) < n:
        raise BadCheckpoint(f"{file.name}: the header is cut short at {len(have)} of {n} bytes")
    return file, have, parse_header(have, nbytes, file.name)


@dataclass(slots=True)
class _Collector:
    """Sorts tensors into roles as headers arrive; `finish` checks that nothing is missing."""

    config: ModelConfig
    note: Callable[[ShardFile, list[HeaderTensor]], None] | None
    spine: dict[int, dict[str, Place]] = field(default_factory=dict)
    globals: dict[str, Place] = field(default_factory=dict)
    # Per layer [num_experts, 6]: offset of each part, -1 = not seen; and the shard each was seen in.
    offsets: dict[int, npt.NDArray[np.int64]] = field(default_factory=dict)
    part_shards: dict[int, npt.NDArray[np.int32]] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)
    expert_layout: tuple[roles.ExpertPart, ...] = ()

    def __post_init__(self) -> None:
        self.expert_layout = roles.expert_layout(self.config)  # asked for half a million times

    def read_shard(self, source: Source, file: ShardFile, number: int) -> Shard:
        file, raw, tensors = read_header(source, file)
        assert file.nbytes is not None
        ignored = [t for t in tensors if roles.is_ignored(t.name)]
        with self.lock:
            for t in tensors:
                self._place(t, number, file.name)
            if self.note is not None:
                self.note(file, tensors)
        return Shard(
            name=file.name,
            nbytes=file.nbytes,
            header_nbytes=len(raw),
            header_sha256=hashlib.sha256(raw).hexdigest(),
            etag=file.etag,
            sha256=file.sha256,
            tensors=len(tensors),
            data_nbytes=sum(t.nbytes for t in tensors),
            ignored_tensors=len(ignored),
            ignored_nbytes=sum(t.nbytes for t in ignored),
        )

    def _place(self, t: HeaderTensor, shard: int, file: str) -> None:
        place = roles.classify(t.name)
        if isinstance(place, roles.ExpertName):
            self._place_expert(t, place, shard, file)
        elif place is not None:
            wanted = self._spine_shapes(place.layer).get(place.short)
            self._check(t, wanted, file)
            self._add(self.spine.setdefault(place.layer, {}), place.short, t, shard, file)
        elif not roles.is_ignored(t.name):
            self._check(t, roles.global_shapes(self.config).get(t.name), file)
            self._add(self.globals, t.name, t, shard, file)

    def _place_expert(self, t: HeaderTensor, place: roles.ExpertName, shard: int, file: str) -> None:
        c = self.config
        if place.layer not in c.moe_layers or place.expert >= c.num_experts:
            raise BadCheckpoint(f"{file}: tensor {t.name} belongs to no layer or expert that config.json has")
        part = self.expert_layout[place.part]
        self._check(t, ("U8", part.shape), file)
        if place.layer not in self.offsets:
            shape = (c.num_experts, len(roles.EXPERT_PARTS))
            self.offsets[place.layer] = np.full(shape, -1, np.int64)
            self.part_shards[place.layer] = np.full(shape, -1, np.int32)
        offsets = self.offsets[place.layer]
        if offsets[place.expert, place.part] >= 0:
            raise BadCheckpoint(f"{file}: tensor {t.name} is in another shard too")
        offsets[place.expert, place.part] = t.offset
        self.part_shards[place.layer][place.expert, place.part] = shard

    def _spine_shapes(self, layer: int) -> roles.Shapes:
        return roles.spine_shapes(self.config, layer) if layer < self.config.num_layers else {}

    def _check(self, t: HeaderTensor, wanted: tuple[str, tuple[int, ...]] | None, file: str) -> None:
        if wanted is None:
            raise BadCheckpoint(f"{file}: tensor {show(t.name)} is unknown in a checkpoint with this config.json")
        if (t.dtype, t.shape) != wanted:
            raise BadCheckpoint(
                f"{file}: tensor {t.name} is {t.dtype} {show(list(t.shape))}, expected {wanted[0]} {list(wanted[1])}"
            )

    def _add(self, places: dict[str, Place], name: str, t: HeaderTensor, shard: int, file: str) -> None:
        if name in places:
            raise BadCheckpoint(f"{file}: tensor {t.name} is in another shard too")
        places[name] = Place(name, t.dtype, t.shape, shard, t.offset, t.nbytes)

    # ---- when all headers are read ----------------------------------------------------------------

    def finish(self, shards: list[Shard]) -> Layout:
        self._check_nothing_missing()
        experts = {layer: self._expert_spans(layer, shards) for layer in self.config.moe_layers}
        spine = {
            layer: sorted(places.values(), key=lambda p: (p.shard, p.offset)) for layer, places in self.spine.items()
        }
        return Layout(self.config, shards, dict(sorted(spine.items())), self.globals, experts)

    def _check_nothing_missing(self) -> None:
        missing = [name for name in roles.global_shapes(self.config) if name not in self.globals]
        for layer in range(self.config.num_layers):
            have = self.spine.get(layer, {})
            missing += [f"{roles.LAYER_PREFIX}{layer}.{s}" for s in self._spine_shapes(layer) if s not in have]
        complete = 0
        for layer in self.config.moe_layers:
            seen = self.offsets.get(layer)
            if seen is None:
                missing.append(f"all experts of layer {layer}")
                continue
            whole = (seen >= 0).all(axis=1)
            complete += int(whole.sum())
            for expert in np.flatnonzero(~whole):
                absent = [p for i, p in enumerate(roles.EXPERT_PARTS) if seen[expert, i] < 0]
                missing.append(f"expert {expert} of layer {layer} ({', '.join(absent)})")
        if missing:
            total = len(self.config.moe_layers) * self.config.num_experts
            more = f" and {len(missing) - 5} more" if len(missing) > 5 else ""
            raise BadCheckpoint(
                f"the checkpoint is incomplete, {complete} of {total} experts are whole; "
                f"missing: {'; '.join(missing[:5])}{more}"
            )

    def _expert_spans(self, layer: int, shards: list[Shard]) -> npt.NDArray[np.int64]:
        """Checks how the experts of a layer lie and returns (shard, offset) of each."""
        c, offsets, in_shard = self.config, self.offsets[layer], self.part_shards[layer]
        layout = self.expert_layout
        first = offsets[:, 0]
        file = shards[int(in_shard[0, 0])].name
        want = first[:, None] + np.array([p.offset for p in layout])
        if bad := np.argwhere((offsets != want) | (in_shard != in_shard[:, :1])).tolist():
            expert, part = bad[0]
            raise BadCheckpoint(
                f"{shards[in_shard[expert, part]].name}: tensor "
                f"{roles.LAYER_PREFIX}{layer}.block_sparse_moe.experts.{expert}.{layout[part].name} starts at byte "
                f"{offsets[expert, part]}, expected {want[expert, part]}, right behind the expert's tensor before it"
            )
        if len(np.unique(in_shard)) > 1:
            raise BadCheckpoint(f"the experts of layer {layer} lie in several shards; expected all in {file}")
        run = np.array(sorted(range(c.num_experts), key=str))
        gaps = np.flatnonzero(np.diff(first[run]) != roles.expert_nbytes(c))
        if len(gaps):
            a, b = run[gaps[0]], run[gaps[0] + 1]
            raise BadCheckpoint(
                f"{file}: expert {b} of layer {layer} starts at byte {first[b]}, expected "
                f"{first[a] + roles.expert_nbytes(c)}, right behind expert {a}, its neighbour in text order"
            )
        return np.stack([in_shard[:, 0].astype(np.int64), first], axis=1)
