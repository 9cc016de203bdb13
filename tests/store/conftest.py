"""Stores over real checkpoints, what their bytes must be, and programs that run in processes of their own."""

from __future__ import annotations

import errno
import json
import os
import shutil
import struct
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from deltafin.indexer import RetryPolicy
from deltafin.store import (
    Pack,
    PackFormat,
    PackPiece,
    PackSet,
    PackTotals,
    Store,
    all_items,
    drive,
    fetch,
    open_packs,
    open_store,
    plan_packs,
    write_packs,
)
from deltafin.store.arena import Arena, slot_nbytes
from deltafin.store.encodings import aligned

REPO = "test/model"
LAYERS = "language_model.model.layers."


@pytest.fixture(scope="session")
def policy() -> RetryPolicy:
    """As the default, but nobody has to wait for it."""
    return RetryPolicy(
        attempts=5,
        total_attempts=40,
        first_contact_attempts=2,
        backoff_s=0.01,
        max_backoff_s=0.03,
        max_pause_s=1.5,
        connect_timeout_s=2.0,
        read_timeout_s=0.3,
    )


@pytest.fixture
def opened(tmp_path, policy) -> Iterator[Callable[..., Store]]:
    """`opened(model, ..)` is open_store with a cache of the test's own; closed when the test ends."""
    stores: list[Store] = []

    def open_(model: object = REPO, *, cache_dir: Path | None = None, **keywords) -> Store:
        stores.append(
            open_store(str(model), cache_dir=cache_dir or tmp_path / "cache", **{"policy": policy, **keywords})
        )
        return stores[-1]

    yield open_
    for store in stores:
        store.close()


@pytest.fixture
def hub_store(hub, opened, tiny_dir, full_cache, tmp_path) -> Callable[..., tuple[Store, object]]:
    """`hub_store(mode, **args)`: a store of an indexed model on a hub that answers in this way.

    tiny's catalog is a copy of the one that `full_cache` was made with; that of another directory is built.
    """

    def open_(mode: str = "ok", *, directory: Path = tiny_dir, index: bool = False, **args):
        server = hub(directory)
        cache = tmp_path / "cache"
        if directory == tiny_dir and not index:
            shutil.copytree(full_cache / "catalogs", cache / "catalogs", dirs_exist_ok=True)
        found = opened(cache_dir=cache)
        server.set_mode(mode, **args)
        return found, server

    return open_


@pytest.fixture(scope="session")
def full_cache(tmp_path_factory, range_server, tiny_dir, policy) -> Path:
    """A cache that holds all of tiny, fetched once. Copy it."""
    cache = tmp_path_factory.mktemp("full") / "cache"
    with range_server.FaultServer(root=str(tiny_dir)) as server, pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_ENDPOINT", server.url)
        with open_store(REPO, cache_dir=cache, policy=policy) as store:
            fetch(store, all_items(store.catalog))
    return cache


@pytest.fixture
def full(full_cache, hub, opened, tiny_dir, tmp_path) -> tuple[Store, object]:
    """A store of a repository whose cache holds everything, and the hub that nobody has asked yet."""
    server = hub(tiny_dir)
    shutil.copytree(full_cache, tmp_path / "cache")
    return opened(), server


# ---- what the bytes must be ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Tensor:
    name: str
    dtype: str
    shape: tuple[int, ...]
    shard: Path
    offset: int
    raw: bytes


class Truth:
    """Every tensor of a checkpoint, read with a dozen lines that share nothing with the package."""

    def __init__(self, directory: Path) -> None:
        self.tensors: dict[str, Tensor] = {}
        for path in sorted(directory.glob("*.safetensors")):
            blob = path.read_bytes()
            start = 8 + struct.unpack("<Q", blob[:8])[0]
            for name, about in json.loads(blob[8:start]).items():
                if name != "__metadata__":
                    begin, end = (start + o for o in about["data_offsets"])
                    self.tensors[name] = Tensor(
                        name, about["dtype"], tuple(about["shape"]), path, begin, blob[begin:end]
                    )

    def expert(self, layer: int, expert: int) -> bytes:
        prefix = f"{LAYERS}{layer}.block_sparse_moe.experts.{expert}."
        parts = [f"{w}.weight_{part}" for w in ("w1", "w2", "w3") for part in ("packed", "scale")]
        return b"".join(self.tensors[prefix + part].raw for part in parts)

    def spine(self, layer: int) -> dict[str, Tensor]:
        prefix = f"{LAYERS}{layer}."
        return {
            name.removeprefix(prefix): tensor
            for name, tensor in self.tensors.items()
            if name.startswith(prefix) and ".experts." not in name
        }

    def table(self, name: str) -> np.ndarray:
        tensor = self.tensors[name]
        return np.frombuffer(tensor.raw, np.uint16).reshape(tensor.shape)


@pytest.fixture(scope="session")
def truth() -> Callable[[Path], Truth]:
    return Truth


@pytest.fixture(scope="session")
def tiny_truth(tiny_dir) -> Truth:
    return Truth(tiny_dir)


@pytest.fixture(scope="session")
def span_bytes() -> Callable[[Store, Path, object], bytes]:
    """The bytes of a catalog's span, straight from the shard in `directory`."""

    def read(store: Store, directory: Path, span) -> bytes:
        with open(directory / store.catalog.shards[span.shard].name, "rb") as f:
            f.seek(span.offset)
            return f.read(span.nbytes)

    return read


@pytest.fixture(scope="session")
def new_slot() -> Callable[[int], np.ndarray]:
    """`new_slot(nbytes)`: memory that a span of so many bytes can be read into."""
    return lambda nbytes: Arena(slot_nbytes(nbytes)).take(slot_nbytes(nbytes))


# ---- packs ----------------------------------------------------------------------------------------------


class Packs:
    """What tests do with packs again and again."""

    @staticmethod
    def write(store: Store, format: PackFormat = PackFormat.BF12, layers: Iterable[int] | None = None) -> PackTotals:
        layers = range(store.catalog.config.num_layers) if layers is None else layers
        return write_packs(store, plan_packs(store, format, layers))

    @staticmethod
    def found(store: Store, format: PackFormat = PackFormat.BF12) -> PackSet:
        return open_packs([root.path for root in store.roots], store.catalog, store.shard_ids, format)

    @staticmethod
    def piece(pack: Pack, piece: PackPiece) -> np.ndarray:
        """The bytes of a piece, where its arrays may lie."""
        found = aligned(piece.nbytes)
        found[:] = np.fromfile(pack.path, np.uint8, piece.nbytes, offset=piece.offset)
        return found

    @staticmethod
    def paths(cache: Path) -> list[Path]:
        return sorted((cache / "packs").rglob("*.pack"))


@pytest.fixture(scope="session")
def packs() -> type[Packs]:
    return Packs


# ---- what the server saw ------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def ranges() -> Callable[[object], Counter[tuple[str, int, int]]]:
    """How often the server delivered each (shard, first byte, length)."""

    def count(server) -> Counter[tuple[str, int, int]]:
        seen: Counter[tuple[str, int, int]] = Counter()
        for row in list(server.state.log):
            if row["status"] == 206 and row["method"] == "GET":
                first, last = map(int, row["range"].removeprefix("bytes=").split("-"))
                seen[row["path"].rpartition("/")[2], first, last - first + 1] += 1
        return seen

    return count


@pytest.fixture(scope="session")
def objects() -> Callable[[Path], dict[str, Path]]:
    """Every file among the objects of a cache, by name."""

    def files(cache: Path) -> dict[str, Path]:
        return {p.name: p for p in (cache / "objects").rglob("*") if not p.is_dir() or p.is_symlink()}

    return files


@pytest.fixture
def at_once(monkeypatch) -> list[int]:
    """How many spans were being fetched, whenever another was begun."""
    under_way, seen, lock, real = [0], [], threading.Lock(), Store.fetch

    def counted(store, *args, **keywords):
        with lock:
            under_way[0] += 1
            seen.append(under_way[0])
        try:
            real(store, *args, **keywords)
        finally:
            with lock:
                under_way[0] -= 1

    monkeypatch.setattr(Store, "fetch", counted)
    return seen


# ---- processes ------------------------------------------------------------------------------------------


@pytest.fixture
def python(tmp_path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """`python(code, *args)` runs a program in a process of its own."""

    def run(code: str, *args: object, prefix: tuple[str, ...] = (), **keywords):
        program = tmp_path / "program.py"
        program.write_text(code)
        words = [*prefix, sys.executable, str(program), *map(str, args)]
        return subprocess.run(words, capture_output=True, text=True, timeout=120, **keywords)

    return run


@pytest.fixture
def start(tmp_path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """`start("df-fetch", ..)` starts an installed command and leaves it running; killed when the test ends."""
    running: list[subprocess.Popen[str]] = []

    def begin(name: str, *args: object, cache: Path | None = None, env: dict[str, str] | None = None):
        words = [str(Path(sys.executable).with_name(name)), *map(str, args)]
        around = {**os.environ, "DELTAFIN_CACHE": str(cache or tmp_path / "cache"), **(env or {})}
        process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=around)
        running.append(process)
        return process

    yield begin
    for process in running:
        process.kill()
        process.communicate()


@pytest.fixture
def read_errors(monkeypatch) -> SimpleNamespace:
    """Reads that fail with EIO: `times` of them, for files whose path holds `where`. `seen` counts."""
    plan = SimpleNamespace(where="", times=0, seen=0)

    def failing(real):
        def read(fd, *args):
            if plan.where and plan.where in os.readlink(f"/proc/self/fd/{fd}"):
                plan.seen += 1
                if plan.seen <= plan.times:
                    raise OSError(errno.EIO, "Input/output error")
            return real(fd, *args)

        return read

    monkeypatch.setattr(os, "preadv", failing(os.preadv))  # headers, rows of the embedding
    monkeypatch.setattr(drive._io, "read", failing(drive._io.read))  # whole spans
    return plan


# ---- checkpoints that are laid out otherwise ------------------------------------------------------------


@pytest.fixture(scope="session")
def spine_first_dir(tmp_path_factory, make_checkpoint) -> Path:
    """tiny with its tensors in K3's order: F32, BF16, then U8."""
    out = tmp_path_factory.mktemp("spine-first") / "ckpt"
    make_checkpoint.generate(out, "tiny", order=make_checkpoint.Order.SPINE_FIRST)
    return out


@pytest.fixture(scope="session")
def odd_dir(tmp_path_factory, make_checkpoint) -> Path:
    """Like tiny, with an odd hidden size and padded headers: hardly a tensor starts where its type would like."""
    out = tmp_path_factory.mktemp("odd") / "ckpt"
    make_checkpoint.generate(out, "tiny", overrides={"hidden": 35})
    for path in out.glob("*.safetensors"):
        blob = path.read_bytes()
        (nbytes,) = struct.unpack("<Q", blob[:8])
        pad = b" " * (1 + 2 * (int(path.name[6:11]) % 3))
        path.write_bytes(struct.pack("<Q", nbytes + len(pad)) + blob[8 : 8 + nbytes] + pad + blob[8 + nbytes :])
    return out


@pytest.fixture(scope="session")
def small_spans() -> Callable[..., object]:
    """A context in which catalogs are built with spans so small that tensors and tables are cut, at odd places."""

    @contextmanager
    def patched() -> Iterator[None]:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("deltafin.indexer.catalog.SPINE_SPAN_NBYTES", 20_001)
            patch.setattr("deltafin.indexer.catalog.SMALL_TENSOR_NBYTES", 3_000)
            patch.setattr("deltafin.indexer.catalog.EMBEDDING_SPAN_NBYTES", 8192)
            yield

    return patched
