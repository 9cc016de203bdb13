"""The loop that serves: from the first connection until a signal, and then an end that keeps nobody hanging."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from types import FrameType
from typing import Any

import uvicorn
from fastapi import FastAPI

from deltafin.runtime.server.addresses import Listeners
from deltafin.runtime.server.engine import Engine
from deltafin.runtime.server.listening import uvicorn_config
from deltafin.runtime.server.services import Services


def serve(
    app: FastAPI,
    services: Services,
    listeners: Listeners,
    *,
    most_connections: int,
    stopping: Callable[[], None] = lambda: None,
) -> int:
    """Serves until SIGINT or SIGTERM, which it returns. For the main thread; `stopping` is called when one came.

    The engine's pass ends at the next layer, and whoever waits for an answer is told. Another SIGINT meanwhile ends
    the process at once. `listeners` listen already.
    """
    config = uvicorn_config(app, services.settings, most_connections=most_connections)
    server = _Server(config, services.engine, stopping)
    server.run(sockets=listeners.sockets)
    return server.signal or signal.SIGTERM


class _Server(uvicorn.Server):
    """Stops the engine before it waits for connections: streams end because their answers do."""

    def __init__(self, config: uvicorn.Config, engine: Engine, stopping: Callable[[], None]) -> None:
        super().__init__(config)
        self.signal: int | None = None
        self._engine, self._stopping = engine, stopping

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self.signal is None:
            self.signal = sig
            self.should_exit = True
        elif sig == signal.SIGINT:
            os._exit(128 + sig)  # no file is half written: what is not whole has no name yet

    async def shutdown(self, sockets: list[Any] | None = None) -> None:
        for server in self.servers:
            server.close()
        self._stopping()
        await asyncio.to_thread(self._engine.close)
        await super().shutdown(sockets)
