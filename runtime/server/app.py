"""The application: OpenAI's API over one engine."""

from __future__ import annotations

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware

from deltafin import __version__
from deltafin.errors import DeltafinError
from deltafin.runtime.server.bodies import Bodies
from deltafin.runtime.server.errors import ApiError, api_error
from deltafin.runtime.server.guard import BodyLimits, Heads, Keys
from deltafin.runtime.server.logs import RequestLog
from deltafin.runtime.server.metrics import Meters
from deltafin.runtime.server.routes import answer_routes
from deltafin.runtime.server.schema import describe
from deltafin.runtime.server.services import Services

# That scripts of other origins may read.
_SHOWN_HEADERS = (
    "X-Request-Id",
    "X-Deltafin-Queue-Position",
    "X-Deltafin-Estimate-Seconds",
    "X-Deltafin-Missing-Experts",
    "Retry-After",
)


def create_app(services: Services) -> FastAPI:
    """For `services`, whose engine has been started. Opens and closes nothing."""
    settings, meters = services.settings, Meters(services)
    bodies = Bodies(settings)
    app = FastAPI(title="Deltafin", version=__version__, docs_url=None, redoc_url=None, redirect_slashes=False)
    app.include_router(answer_routes(services, meters, bodies))
    if services.batches is not None:
        from deltafin.runtime.server.batch_routes import batch_routes

        app.include_router(batch_routes(services.batches, bodies))
    describe(app, with_key=settings.api_key is not None)
    app.add_exception_handler(DeltafinError, _error)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(RequestValidationError, _invalid)
    # The last one added stands first.
    app.add_middleware(BodyLimits, settings=settings)
    app.add_middleware(Keys, settings=settings)
    if settings.cors_origins:  # a browser asks without a key whether it may ask with one
        app.add_middleware(
            CORSMiddleware,
            allow_origins=settings.cors_origins,
            allow_methods=["*"],
            allow_headers=["*"],
            expose_headers=_SHOWN_HEADERS,
        )
    app.add_middleware(Heads, settings=settings)
    app.add_middleware(RequestLog, services=services, meters=meters)
    return app


async def _error(request: Request, error: Exception) -> Response:
    return api_error(error).response()


async def _http_error(request: Request, error: Exception) -> Response:
    """Of the framework's own: no such path, or no such method there."""
    assert isinstance(error, HTTPException)
    path = request.scope["path"][:100]
    hint = "" if path.startswith("/v1/") else "; OpenAI's API is below /v1"
    told = {404: f"there is nothing at {path}{hint}", 405: f"{request.method[:20]} is not for this path"}
    message = told.get(error.status_code, str(error.detail))
    return ApiError(error.status_code, message, headers=error.headers).response()


async def _invalid(request: Request, error: Exception) -> Response:
    """Parameters of a path or query that are not what was declared."""
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    name = str(first["loc"][-1])
    return ApiError(400, f"{name}: {first['msg']}", param=name).response()
