"""How near do reads from several roots come to the ideal split? On roots that are held to rates, all on one drive.

Every root holds every expert: one layer of Kimi K3's true size whose 896 experts share a few objects of invented bytes.
A layer's reads should take what its bytes take at the sum of the rates; no plan can be faster.
"""

from __future__ import annotations

import os
import random
import shutil
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from deltafin.errors import NoSpace
from deltafin.indexer import (
    Blueprint,
    Location,
    build_catalog,
    catalog_path,
    clear_stale,
    disk_error,
    k3_config,
    make_directory,
    temporary,
)
from deltafin.store.opening import open_store
from deltafin.store.roots import Root
from deltafin.store.space import free_nbytes
from deltafin.store.store import Store

RATES = (100e6, 200e6, 400e6)  # of the roots, in bytes a second: 1 : 2 : 4
LAYERS = 40
EXPERTS = 16  # that a token asks for in a layer
WARM_LAYERS = 2  # before those that count: the first reads of a process are compared with their digests
DISTINCT = 16  # objects
_NAME = "roots"
_LAYER = 1
_LOCATION = Location(repo="deltafin/roots", commit="0" * 40)  # nobody has it, and nobody is asked


@dataclass(frozen=True, slots=True)
class RootShare:
    """What one root did."""

    rate: float
    nbytes: int
    ideal_nbytes: float

    @property
    def ratio(self) -> float:
        return self.nbytes / self.ideal_nbytes


@dataclass(frozen=True, slots=True)
class Report:
    layers: int
    layer_nbytes: int
    ideal_s: float  # of a layer
    layer_s: tuple[float, ...]
    roots: tuple[RootShare, ...]
    split_spans: int  # spans that were read in parts

    @property
    def median(self) -> float:
        """Of the layers' times, by the ideal."""
        return statistics.median(self.layer_s) / self.ideal_s

    @property
    def worst(self) -> float:
        return max(self.layer_s) / self.ideal_s


@contextmanager
def several_roots(
    directory: Path, rates: Sequence[float] = RATES, *, distinct: int = DISTINCT
) -> Iterator[tuple[Store, list[Path]]]:
    """A store with full copies in as many roots as there are rates, and the roots; all is removed at the end.

    It lies where unfinished files do: if this process is killed, whoever opens the directory next as a cache or
    measures it removes it. Raises NoSpace, DiskError.
    """
    tmp = directory / "tmp"
    try:
        make_directory(tmp)
        clear_stale(tmp)
        folder = temporary(tmp, "roots")
        folder.mkdir()
    except OSError as e:
        raise disk_error(e, tmp) from None
    try:
        places = [folder / f"root-{number}" for number in range(len(rates))]
        blueprint = Blueprint(_LOCATION, k3_config(_LAYER + 1))
        build_catalog(blueprint, catalog_path(places[0], _NAME), _NAME, wait=True)
        for place in places:
            make_directory(place)
        with open_store(_NAME, cache_dir=places[0], roots=places[1:], offline=True, environ={}) as store:
            _fill(store, places, distinct)
        with open_store(_NAME, cache_dir=places[0], roots=places[1:], offline=True, environ={}) as store:
            for root, rate in zip(store.roots, rates, strict=True):
                root.drive.rate = rate
            store.reserve(EXPERTS, 0)
            yield store, places
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        with suppress(OSError):  # others have files in it
            tmp.rmdir()


def measure(
    store: Store, layers: int = LAYERS, *, seed: int = 1, measured: Callable[[int], None] = lambda layers: None
) -> Report:
    """Reads the experts of so many tokens' layer, one after the other; `measured` hears of layers."""
    choose = random.Random(seed)
    every = range(store.catalog.config.num_experts)
    for _ in range(WARM_LAYERS):
        _read_layer(store, choose.sample(every, EXPERTS))
    before = [root.drive.stats.nbytes for root in store.roots]
    split = store.stats.snapshot().get("split_spans", 0)
    took = []
    for _ in range(layers):
        took.append(_read_layer(store, choose.sample(every, EXPERTS)))
        measured(1)
    rates = [root.drive.rate or root.drive.expected_rate for root in store.roots]
    layer_nbytes = EXPERTS * store.catalog.expert_nbytes
    shares = [
        RootShare(rate, root.drive.stats.nbytes - nbytes, layers * layer_nbytes * rate / sum(rates))
        for root, rate, nbytes in zip(store.roots, rates, before, strict=True)
    ]
    return Report(
        layers=layers,
        layer_nbytes=layer_nbytes,
        ideal_s=layer_nbytes / sum(rates),
        layer_s=tuple(took),
        roots=tuple(shares),
        split_spans=store.stats.snapshot().get("split_spans", 0) - split,
    )


def _read_layer(store: Store, experts: Sequence[int]) -> float:
    start = time.perf_counter()
    for _ in store.experts(_LAYER, experts):
        pass
    return time.perf_counter() - start


def _fill(store: Store, places: Sequence[Path], distinct: int) -> None:
    """Some objects of random bytes in the first root, linked into the others, and records of them for every expert."""
    first, spans = store.roots[0], store.catalog.expert_spans(_LAYER, range(store.catalog.config.num_experts))
    needed = distinct * store.catalog.expert_nbytes
    if (free := free_nbytes(first.path)) < 2 * needed:
        raise NoSpace(f"{first.path}: test files take {needed} bytes, but {free} are free; choose another --dir")
    invent = np.random.default_rng(os.getpid())
    for number in range(distinct):
        keys = [store.key(span) for span in spans[number::distinct]]
        entry = first.publish(keys[0], memoryview(invent.bytes(store.catalog.expert_nbytes)))
        first.alias(keys[1:], entry)
        for place in places[1:]:
            root = Root(place, writable=True)
            try:
                make_directory(root.object_path(entry).parent)
                os.link(first.object_path(entry), root.object_path(entry))
            except OSError as e:
                raise disk_error(e, place, "cannot link a test file") from None
            root.alias(keys, entry)
            root.drive.close()
