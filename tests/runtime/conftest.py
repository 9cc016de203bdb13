"""Opened models, each computed with once, and stores that spoil what they hand out."""

from __future__ import annotations

import importlib.util
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from deltafin.indexer import Span
from deltafin.runtime import Model, Observer
from deltafin.runtime.native import opening
from deltafin.store import Store, open_store

Tensors = Mapping[str, np.ndarray]


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    """Small products gain nothing from threads, whose spinning barriers cost tenfold when cores are shared."""
    import torch

    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def tiny(open_model, tiny_dir) -> Iterator[Model]:
    with open_model(tiny_dir) as model:
        yield model


@pytest.fixture(scope="session")
def k93(open_model, k93_dir) -> Iterator[Model]:
    with open_model(k93_dir) as model:
        yield model


@pytest.fixture(scope="session")
def tiny_torch(open_model, tiny_dir) -> Iterator[Model]:
    """On the plain torch implementation, the second opinion."""
    with open_model(tiny_dir, device="torch") as model:
        yield model


@pytest.fixture(scope="session")
def k93_torch(open_model, k93_dir) -> Iterator[Model]:
    with open_model(k93_dir, device="torch") as model:
        yield model


@pytest.fixture(scope="session")
def demo(open_model, demo_dir) -> Iterator[Model]:
    with open_model(demo_dir) as model:
        yield model


@pytest.fixture(scope="session")
def faults() -> Callable[[str], ModuleType]:
    """Loads a script of tests/faults, which is no package."""

    def load(name: str) -> ModuleType:
        path = Path(__file__).parents[1] / "faults" / f"{name}.py"
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    return load


class Recorder(Observer):
    """Keeps everything it is shown."""

    wants_hidden = True

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.spans = []
        self.layers: list[int] = []
        self.route_ids: dict[int, np.ndarray] = {}
        self.route_weights: dict[int, np.ndarray] = {}
        self.vectors: dict[tuple[str, int], np.ndarray] = {}

    def rows(self, spans):
        self.calls.append("rows")
        self.spans.append(list(spans))

    def layer(self, layer, num_layers):
        self.calls.append(f"layer {layer}")
        self.layers.append(layer)

    def routes(self, layer, ids, weights):
        self.calls.append(f"routes {layer}")
        self.route_ids[layer], self.route_weights[layer] = ids, weights

    def hidden(self, layer, point, values):
        self.calls.append(f"{point} {layer}")
        self.vectors[point, layer] = values

    def finished(self):
        self.calls.append("finished")


@pytest.fixture
def recorder() -> Recorder:
    return Recorder()


@pytest.fixture(scope="session")
def new_recorder() -> type[Recorder]:
    return Recorder


class SpoiledStore:
    """A real store, opened once more, of which a test may replace what is read and the order in which it lands.

    All that a backend computes with but the embedding passes through `Store.read`; there it is spoiled, on the
    thread that reads, in whatever pieces it comes. A replacement may raise, as a drive would.
    """

    def __init__(self, pristine: Store) -> None:
        self._pristine = pristine
        self._store = store = open_store(pristine.model, cache_dir=pristine.roots[0].path)
        self._read, store.read = store.read, self._spoiled_read
        self.on_spine: Callable[[int, Tensors], Tensors] | None = None  # layer, all tensors
        self.on_head: Callable[[int, np.ndarray], np.ndarray] | None = None  # first row, bits
        self.on_expert: Callable[[int, int, np.ndarray], np.ndarray] | None = None  # layer, number, bytes
        self.on_landing: Callable[[Iterator], Iterator] | None = None  # (number, bytes) as they land
        self.reads: Counter[Span] = Counter()
        catalog, self._head = store.catalog, store.catalog.head()
        self._groups = {layer: catalog.spine(layer) for layer in range(catalog.config.num_layers)}
        self._layers = {span: layer for layer, group in self._groups.items() for span in group.spans}

    def __getattr__(self, name):
        return getattr(self._store, name)

    def experts(self, layer, ids):
        landing = self._store.experts(layer, ids)
        return landing if self.on_landing is None else SpoiledLanding(landing, self.on_landing)

    def _spoiled_read(self, span, slot, *, expert=None, **keywords):
        content = self._read(span, slot, expert=expert, **keywords)
        self.reads[span] += 1
        if expert is not None and self.on_expert is not None:
            content[:] = self.on_expert(*expert, content.copy())
        elif span in self._layers and self.on_spine is not None:
            self._spoil_spine(span, content)
        elif span in self._head.spans and self.on_head is not None:
            first = self._head.spans.index(span) * self._head.rows_per_span
            bits = content.view(np.uint16).reshape(-1, self._head.tensor.shape[1])
            bits[:] = self.on_head(first, bits.copy())
        return content

    def _spoil_spine(self, span, content) -> None:
        layer = self._layers[span]
        prefix = f"language_model.model.layers.{layer}."
        tensors = self.on_spine(layer, self._pristine.spine(layer))
        for place in self._groups[layer].tensors:
            begin = max(place.offset, span.offset)
            end = min(place.offset + place.nbytes, span.offset + span.nbytes)
            if place.shard == span.shard and begin < end:
                raw = tensors[place.name.removeprefix(prefix)].tobytes()
                part = np.frombuffer(raw, np.uint8)[begin - place.offset : end - place.offset]
                content[begin - span.offset : end - span.offset] = part


class SpoiledLanding:
    """Experts as a test lets them land."""

    def __init__(self, landing, on_landing) -> None:
        self._landing = landing
        self._experts = iter(on_landing(landing))

    def __getattr__(self, name):
        return getattr(self._landing, name)

    def __iter__(self):
        return self._experts


@pytest.fixture
def spoil() -> Iterator[Callable[[Model], SpoiledStore]]:
    """`spoil(model)` opens the model's store once more, to be spoiled; closed when the test ends."""
    stores: list[SpoiledStore] = []

    def open_(model: Model) -> SpoiledStore:
        stores.append(SpoiledStore(model.store))
        return stores[-1]

    yield open_
    for store in stores:
        store.close()


@pytest.fixture
def spoiled(spoil, tiny) -> SpoiledStore:
    return spoil(tiny)


@pytest.fixture
def nothing_stays(monkeypatch) -> None:
    """Models opened from now on have memory for what is on its way, and read everything again in each pass."""
    plan_memory = opening.plan_memory

    def plan(*args):
        none = {"resident": (), "resident_nbytes": 0, "ring_nbytes": 0}
        return replace(plan_memory(*args), **none, resident_experts=0, resident_experts_nbytes=0)

    monkeypatch.setattr(opening, "plan_memory", plan)


@pytest.fixture(params=["cpu", "torch"])
def spoiled_model(request, spoiled, nothing_stays) -> Iterator[Model]:
    with Model(spoiled, device=request.param) as model:
        yield model
