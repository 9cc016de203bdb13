"""Opened models, each computed with once, and stores that spoil what they hand out."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from deltafin.runtime import Model, Observer


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
    """A real store of which a test may replace one answer."""

    def __init__(self, store) -> None:
        self._store = store
        self.on_spine = lambda layer, tensors: tensors
        self.on_experts = lambda layer, landing: landing
        self.on_head = lambda tiles: tiles

    def __getattr__(self, name):
        return getattr(self._store, name)

    def spine(self, layer):
        return self.on_spine(layer, self._store.spine(layer))

    def experts(self, layer, ids):
        yield from self.on_experts(layer, self._store.experts(layer, ids))

    def head(self):
        yield from self.on_head(self._store.head())

    def close(self) -> None:
        """The model it was taken from closes the store."""


@pytest.fixture
def spoiled(tiny) -> SpoiledStore:
    return SpoiledStore(tiny.store)


@pytest.fixture
def spoiled_model(spoiled) -> Iterator[Model]:
    with Model(spoiled) as model:
        yield model
