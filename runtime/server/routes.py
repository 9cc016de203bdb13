"""Answers to requests, models, health and metrics."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse, PlainTextResponse

from deltafin.runtime.openai import CHAT, TEXT, Endpoint, Task, read_body
from deltafin.runtime.server.bodies import Bodies
from deltafin.runtime.server.errors import ApiError
from deltafin.runtime.server.guard import is_trusted
from deltafin.runtime.server.health import health_of
from deltafin.runtime.server.metrics import CONTENT_TYPE, Meters
from deltafin.runtime.server.replies import StreamedReply, WholeReply
from deltafin.runtime.server.schema import answers, body_of, errors, health_schema, model_schema, models_schema, shown
from deltafin.runtime.server.services import Services

_SEED_BITS = 53  # so that every client reads back the number that it was sent


def answer_routes(services: Services, meters: Meters, bodies: Bodies) -> APIRouter:
    router = APIRouter()
    since = int(time.time())

    def understood(endpoint: Endpoint) -> Callable[[object], Task]:
        def read(body: object) -> Task:
            _check_model(body, services)
            return read_body(endpoint, body, services.serving, seed=secrets.randbits(_SEED_BITS))

        return read

    @router.post(CHAT, responses=answers(CHAT), openapi_extra=body_of(CHAT, services))
    async def create_chat_completion(request: Request) -> Response:
        return _answer(await bodies.read(request, understood(CHAT)), services, meters)

    @router.post(TEXT, responses=answers(TEXT), openapi_extra=body_of(TEXT, services))
    async def create_completion(request: Request) -> Response:
        return _answer(await bodies.read(request, understood(TEXT)), services, meters)

    @router.head("/v1/models", include_in_schema=False)
    @router.get("/v1/models", responses=shown(models_schema(), "The model, which is one"))
    async def list_models() -> Response:
        return JSONResponse({"object": "list", "data": [_model(services.serving.name, since)]})

    @router.get("/v1/models/{model:path}", responses=shown(model_schema(), "The model") | errors(404))
    async def retrieve_model(model: str) -> Response:
        if not services.serves(model):
            raise _unknown(model, services)
        return JSONResponse(_model(services.serving.name, since))

    @router.head("/health", include_in_schema=False)  # what watches servers often asks so
    @router.get("/health", responses=shown(health_schema(), "Whether answers can be expected; 503 if not"))
    async def health(request: Request) -> Response:
        status, told = health_of(services)
        return JSONResponse(told if is_trusted(request.scope) else {"status": told["status"]}, status)

    @router.get("/metrics", response_class=PlainTextResponse)
    def metrics() -> Response:  # in a thread: batches are asked, which may be waiting for the drive
        return Response(meters.text(), media_type=CONTENT_TYPE)

    return router


def _answer(task: Task, services: Services, meters: Meters) -> Response:
    return (StreamedReply if task.stream else WholeReply)(services, meters, task)


def _check_model(body: object, services: Services) -> None:
    """Of what is an object; the rest `read_body` refuses."""
    if not isinstance(body, dict):
        return
    name = body.get("model")
    if name is None:
        raise ApiError(400, f'model is missing; "{services.serving.name}" is served here', param="model")
    if isinstance(name, str) and not services.serves(name):
        raise _unknown(name, services)


def _unknown(name: str, services: Services) -> ApiError:
    return ApiError(
        404,
        f'there is no model {name[:60]!r} here; "{services.serving.name}" is served',
        param="model",
        code="model_not_found",
    )


def _model(name: str, since: int) -> dict[str, object]:
    return {"id": name, "object": "model", "created": since, "owned_by": "deltafin"}
