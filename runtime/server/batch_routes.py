"""/v1/files and /v1/batches."""

from __future__ import annotations

import asyncio
import io
from collections.abc import Iterator, Sequence
from typing import Annotated, Literal, Protocol, TypeVar
from urllib.parse import quote

from fastapi import APIRouter, Query, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse
from starlette.requests import ClientDisconnect

from deltafin.runtime.openai import ENDPOINTS
from deltafin.runtime.openai.fields import Fields, one_of
from deltafin.runtime.server.batch_records import BatchRecord
from deltafin.runtime.server.batch_schema import (
    MOST_KEY,
    MOST_PAIRS,
    MOST_VALUE,
    batch_body,
    batch_schema,
    content_response,
    deleted_schema,
    file_schema,
    list_schema,
    upload_body,
)
from deltafin.runtime.server.batches import BatchService
from deltafin.runtime.server.bodies import Bodies
from deltafin.runtime.server.errors import ApiError
from deltafin.runtime.server.files import INPUT, FileRecord
from deltafin.runtime.server.schema import errors, shown
from deltafin.runtime.server.uploads import Upload

MOST_FILES, MOST_BATCHES = 10_000, 100  # of one list
_PIECE_NBYTES = 256 << 10

Order = Literal["asc", "desc"]


class _Listed(Protocol):
    @property
    def id(self) -> str: ...

    def as_json(self) -> dict[str, object]: ...


_L = TypeVar("_L", bound=_Listed)


def batch_routes(service: BatchService, bodies: Bodies) -> APIRouter:
    """What touches the drive is done in threads: an answer that streams meanwhile goes on."""
    router = APIRouter()
    file, batch = shown(file_schema(), "The file"), shown(batch_schema(), "The batch as it is now")

    @router.post("/v1/files", responses=file | errors(400, 408, 413, 415, 503), openapi_extra=upload_body())
    async def upload_file(request: Request) -> Response:
        return JSONResponse((await _upload(request, service)).as_json())

    @router.get("/v1/files", responses=shown(list_schema(file_schema()), "Files") | errors(400, 404))
    def list_files(
        after: str | None = None,
        limit: Annotated[int, Query(ge=1, le=MOST_FILES)] = MOST_FILES,
        order: Order = "desc",
        purpose: str | None = None,
    ) -> Response:
        found = [file for file in service.files.all() if purpose is None or file.purpose == purpose]
        return JSONResponse(_page(found, after, limit, order))

    @router.get("/v1/files/{file_id}", responses=file | errors(404))
    def retrieve_file(file_id: str) -> Response:
        return JSONResponse(_file(service, file_id).as_json())

    @router.get("/v1/files/{file_id}/content", responses=content_response() | errors(404, 503))
    def retrieve_file_content(file_id: str) -> Response:
        record = _file(service, file_id)
        headers = {
            "Content-Length": str(record.nbytes),
            "Content-Disposition": f"attachment; filename*=UTF-8''{quote(record.filename, safe='')}",
            "X-Content-Type-Options": "nosniff",
        }
        return StreamingResponse(_pieces(service.files.open(file_id)), 200, headers, "application/octet-stream")

    @router.delete("/v1/files/{file_id}", responses=shown(deleted_schema(), "It is gone") | errors(404, 409))
    def delete_file(file_id: str) -> Response:
        if not service.remove_file(file_id):
            raise _no("file", file_id)
        return JSONResponse({"id": file_id, "object": "file", "deleted": True})

    @router.post("/v1/batches", responses=batch | errors(400, 404, 408, 413, 415, 429, 503), openapi_extra=batch_body())
    async def create_batch(request: Request) -> Response:
        return JSONResponse((await bodies.read(request, lambda body: _create(body, service))).as_json())

    @router.get("/v1/batches", responses=shown(list_schema(batch_schema()), "Batches") | errors(400, 404))
    def list_batches(after: str | None = None, limit: Annotated[int, Query(ge=1, le=MOST_BATCHES)] = 20) -> Response:
        return JSONResponse(_page(service.all(), after, limit, "desc"))

    @router.get("/v1/batches/{batch_id}", responses=batch | errors(404))
    def retrieve_batch(batch_id: str) -> Response:
        record = service.find(batch_id)
        if record is None:
            raise _no("batch", batch_id)
        return JSONResponse(record.as_json())

    @router.post("/v1/batches/{batch_id}/cancel", responses=batch | errors(404, 409, 503))
    def cancel_batch(batch_id: str) -> Response:
        record = service.cancel(batch_id)
        if record is None:
            raise _no("batch", batch_id)
        return JSONResponse(record.as_json())

    return router


def _create(body: object, service: BatchService) -> BatchRecord:
    """What a body asks for."""
    fields = Fields(body)
    endpoint_name, file_id = fields.choice("endpoint", ENDPOINTS), fields.text("input_file_id")
    if file_id is None:
        raise ApiError(400, "input_file_id is missing; upload a file first", param="input_file_id")
    endpoint = next((e for e in ENDPOINTS if e == endpoint_name), None)
    if endpoint is None:
        raise ApiError(400, f"endpoint is missing; expected {one_of(ENDPOINTS)}", param="endpoint")
    if fields.choice("completion_window", ("24h",)) is None:
        raise ApiError(400, 'completion_window is missing; expected "24h"', param="completion_window")
    metadata = read_metadata(fields)
    fields.finish()
    return service.create(file_id, endpoint, metadata)


def read_metadata(fields: Fields) -> dict[str, str] | None:
    """Raises BadBody if it is more than may be attached to an object."""
    inner = fields.inner("metadata")
    if inner is None:
        return None
    found: dict[str, str] = {}
    for key in inner.names():
        value = inner.text(key)
        if value is None or len(key) > MOST_KEY or len(value) > MOST_VALUE or len(inner.names()) > MOST_PAIRS:
            raise fields.wrong(
                "metadata",
                f"at most {MOST_PAIRS} names of {MOST_KEY} characters with texts of {MOST_VALUE}",
            )
        found[key] = value
    return found


async def _upload(request: Request, service: BatchService) -> FileRecord:
    upload = Upload(request.headers.get("content-type", ""), service.files.part(), service.most_file_nbytes)
    try:
        await upload.read(request.stream())
        if upload.filename is None:
            raise ApiError(400, "the form has no file; send it in a field named file", param="file")
        purpose = upload.fields.pop("purpose", None)
        if purpose != INPUT:
            told = "missing" if purpose is None else repr(purpose[:60])
            raise ApiError(400, f'purpose is {told}; expected "{INPUT}"', param="purpose")
        for name in upload.fields:
            raise ApiError(400, f"{name[:60]!r} is not supported here; leave it out", param=name[:60])
        return await asyncio.to_thread(service.add_file, upload.part, upload.filename)
    except ClientDisconnect:
        raise ApiError(400, "the upload was broken off") from None
    finally:
        upload.discard()


def _file(service: BatchService, file_id: str) -> FileRecord:
    record = service.files.find(file_id)
    if record is None:
        raise _no("file", file_id)
    return record


def _no(what: str, name: str) -> ApiError:
    return ApiError(404, f"there is no {what} {name[:60]!r}", param=f"{what}_id", code=f"{what}_not_found")


def _page(oldest_first: Sequence[_L], after: str | None, limit: int, order: Order) -> dict[str, object]:
    """The API's list of objects, from behind the one named `after` on."""
    found = list(oldest_first) if order == "asc" else list(reversed(oldest_first))
    if after is not None:
        place = next((n for n, one in enumerate(found) if one.id == after), None)
        if place is None:
            raise ApiError(404, f"after is {after[:60]!r}, which is not in this list", param="after")
        found = found[place + 1 :]
    shown = found[:limit]
    return {
        "object": "list",
        "data": [one.as_json() for one in shown],
        "first_id": shown[0].id if shown else None,
        "last_id": shown[-1].id if shown else None,
        "has_more": len(found) > limit,
    }


def _pieces(file: io.FileIO) -> Iterator[bytes]:
    with file:
        while piece := file.read(_PIECE_NBYTES):
            yield piece
