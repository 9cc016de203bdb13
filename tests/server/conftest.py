"""Servers in this process: the demo model, its engine, and the application on a free port of loopback."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import uvicorn
from fastapi import FastAPI

from deltafin.runtime import Model
from deltafin.runtime.model import load_tokenizer
from deltafin.runtime.native.opening import choose_packs
from deltafin.runtime.openai import Serving, serving_of
from deltafin.runtime.server import Company, Engine, ServerSize, Starts, open_model
from deltafin.runtime.server.app import create_app
from deltafin.runtime.server.listening import uvicorn_config
from deltafin.runtime.server.missing import MissingExperts
from deltafin.runtime.server.services import Services
from deltafin.runtime.server.settings import Settings
from deltafin.runtime.states import PrefixStore
from deltafin.store import Store, open_store
from tests.server.engines import Asking, size_of


@dataclass
class Served:
    """A server that answers at `url`, and what is behind it."""

    url: str
    port: int
    model_name: str
    services: Services
    engine: Engine
    model: Model
    app: FastAPI
    close: Callable[[], None]

    @property
    def serving(self) -> Serving:
        return self.services.serving


def serve(
    store: Store,
    *,
    keep_states: int | None = 0,
    most_waiting: int = 64,
    drafting: bool = True,
    parallel: int | None = None,
    context: int | None = None,
    max_new: int = 256,
    ram: int | None = None,
    name: str | None = None,
    aliases: frozenset[str] = frozenset(),
    data: Path | None = None,
    company: Sequence[Company] = (),
    **settings: object,
) -> Served:
    """Starts one on an open store, which it does not close. `data` is the folder of files and batches, if any."""
    packs = choose_packs(store, None)
    serving = serving_of(store, load_tokenizer(store), packs, max_new)
    model, size, serving = open_model(store, serving, ram=ram, packs=packs, parallel=parallel, context=context)
    if name is not None:
        serving = replace(serving, name=name)
    starts = Starts(model, PrefixStore(keep_states))
    engine = Engine(model, serving, size, starts=starts, most_waiting=most_waiting, drafting=drafting)
    chosen = Settings(**{"port": 0, **settings})
    batches = None
    if data is not None:
        from deltafin.runtime.server.batches import BatchService

        batches = BatchService(data, engine, serving, chosen)
    missing = MissingExperts(store)
    services = Services(engine, serving, chosen, missing, batches, aliases)
    engine.start(*company, *([] if batches is None else [batches]))
    app = create_app(services)
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    server = uvicorn.Server(uvicorn_config(app, chosen))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, name="http", daemon=True)
    thread.start()
    while not server.started and thread.is_alive():
        time.sleep(0.005)

    def close() -> None:
        engine.close()  # first, so that whoever waits is told
        server.should_exit = True
        thread.join(20)
        if batches is not None:
            batches.close()
        missing.close()

    return Served(f"http://127.0.0.1:{port}", port, serving.name, services, engine, model, app, close)


class Brake:
    """Company that asks for nothing and takes its time to say so: the engine stands between two passes, as long as a
    test likes.
    """

    def __init__(self) -> None:
        self._free = threading.Event()
        self._free.set()
        self._held = threading.Event()

    def hold(self) -> None:
        """From the next pass on, or from when a request comes."""
        self._held.clear()
        self._free.clear()

    def wait(self) -> None:
        """Until the engine stands."""
        assert self._held.wait(20)

    def release(self) -> None:
        self._free.set()

    def ready(self) -> bool:
        return False

    def join(self, runner, room) -> None:
        if not self._free.is_set():
            self._held.set()
            assert self._free.wait(60)

    def owns(self, generation) -> bool:
        return False

    def took(self, steps) -> None:
        pass

    def step_back(self, runner, room) -> bool:
        return False

    def failed(self, generation, error, *, alone) -> None:
        raise AssertionError

    def close(self) -> None:
        pass


@pytest.fixture
def brake() -> Iterator[Brake]:
    """For `new_server(company=[brake])`."""
    brake = Brake()
    yield brake
    brake.release()


@pytest.fixture(scope="session")
def server_of() -> Callable[..., Served]:
    """`serve`, for fixtures that open a store of their own: it is for one model."""
    return serve


@pytest.fixture(scope="session")
def demo_store(tmp_path_factory, demo_dir) -> Iterator[Store]:
    with open_store(demo_dir, cache_dir=tmp_path_factory.mktemp("cache")) as store:
        yield store


@pytest.fixture(scope="session")
def server(demo_store) -> Iterator[Served]:
    """One for all tests that leave it as it was."""
    served = serve(demo_store, context=8192)
    yield served
    served.close()


@pytest.fixture(scope="session")
def file_server(demo_dir, tmp_path_factory) -> Iterator[Served]:
    """One that keeps files, none larger than a mebibyte, for tests that look at their own."""
    folder = tmp_path_factory.mktemp("files")
    with open_store(demo_dir, cache_dir=folder / "cache") as store:
        served = serve(store, data=folder / "data", most_file_nbytes=1 << 20)
        yield served
        served.close()


@pytest.fixture
def new_server(demo_dir, tmp_path) -> Iterator[Callable[..., Served]]:
    """`new_server(keep_alive_s=0.2, ..)` is a server of a test's own, with a cache of its own."""
    running: list[tuple[Served, Store]] = []

    def start(store: Store | None = None, **settings: object) -> Served:
        own = open_store(demo_dir, cache_dir=tmp_path / "server-cache") if store is None else None
        served = serve(store if own is None else own, **settings)
        running.append((served, own))
        return served

    yield start
    for served, own in running:
        served.close()
        if own is not None:
            own.close()


@pytest.fixture(scope="session")
def demo(open_model, demo_dir) -> Iterator[Model]:
    """For engines without HTTP, one after the other."""
    with open_model(demo_dir) as model:
        yield model


@pytest.fixture(scope="session")
def tiny(open_model, tiny_dir) -> Iterator[Model]:
    """The same, of a third of the size."""
    with open_model(tiny_dir) as model:
        yield model


@pytest.fixture
def new_engine(tiny, demo) -> Iterator[Callable[..., Asking]]:
    """`new_engine(size_of(2), most_waiting=3, ..)` has started, and is closed after the test.

    It answers raw prompts of ids below 500 with a tiny model; `chat` is for the demo, which knows words.
    """
    running: list[Asking] = []

    def start(
        size: ServerSize | None = None,
        *,
        chat: bool = False,
        keep_states: int = 0,
        start: bool = True,
        company: Sequence[Company] = (),
        **keywords: object,
    ) -> Asking:
        model = demo if chat else tiny
        serving = serving_of(model.store, demo.tokenizer, model.packs, 50)
        running.append(Asking(model, serving, size or size_of(), keep_states, **keywords))
        if start:
            running[-1].engine.start(*company)
        return running[-1]

    yield start
    for asking in running:
        asking.close()
