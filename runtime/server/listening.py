"""How uvicorn is set up for the application."""

from __future__ import annotations

import logging

import uvicorn
from fastapi import FastAPI

from deltafin.runtime.server.connections import connections_of
from deltafin.runtime.server.guard import MOST_HEAD_NBYTES
from deltafin.runtime.server.settings import Settings

MOST_CONNECTIONS = 1000  # at once; fewer where there are not so many open files
LEAVE_S = 10  # for clients to take the last bytes of a server that ends
IDLE_S = 75  # a connection may be kept between two requests


def uvicorn_config(app: FastAPI, settings: Settings, *, most_connections: int = MOST_CONNECTIONS) -> uvicorn.Config:
    """For one server; `most_connections` are answered at once, others get 503."""
    logging.getLogger("uvicorn.error").addFilter(_not_deliberate)
    return uvicorn.Config(
        app,
        host=settings.host,
        port=settings.port,
        http=connections_of(most_connections),
        ws="none",
        lifespan="off",
        access_log=False,
        log_config=None,
        server_header=False,
        proxy_headers=False,
        timeout_keep_alive=IDLE_S,
        timeout_graceful_shutdown=LEAVE_S,
        h11_max_incomplete_event_size=MOST_HEAD_NBYTES,
    )


def _not_deliberate(record: logging.LogRecord) -> bool:
    """An answer that fails after it has begun is left without an end, so that nobody takes it for whole."""
    return record.msg != "ASGI callable returned without completing response."
