"""Files and batches described as OpenAPI."""

from __future__ import annotations

from typing import get_args

from deltafin.runtime.openai import ENDPOINTS
from deltafin.runtime.server.batch_records import PREFIX, TIMES, Status
from deltafin.runtime.server.files import INPUT, OUTPUT
from deltafin.runtime.server.files import PREFIX as FILE_PREFIX
from deltafin.runtime.server.schema import Schema

MOST_PAIRS, MOST_KEY, MOST_VALUE = 16, 64, 512  # of metadata: pairs, and characters

_TEXT: Schema = {"type": "string"}
_TEXT_OR_NULL: Schema = {"type": ["string", "null"]}
_COUNT: Schema = {"type": "integer", "minimum": 0}
_TIME_OR_NULL: Schema = {"type": ["integer", "null"], "description": "Seconds since 1970"}
_METADATA: Schema = {
    "type": ["object", "null"],
    "maxProperties": MOST_PAIRS,
    "propertyNames": {"maxLength": MOST_KEY},
    "additionalProperties": {"type": "string", "maxLength": MOST_VALUE},
}


def file_schema() -> Schema:
    return _object(
        id={"type": "string", "pattern": f"^{FILE_PREFIX}[0-9a-f]{{24}}$"},
        object={"const": "file"},
        bytes=_COUNT,
        created_at=_COUNT,
        filename=_TEXT,
        purpose={"enum": [INPUT, OUTPUT]},
        status={"const": "processed"},
        expires_at={"type": "null"},
        status_details={"type": "null"},
    )


def batch_schema() -> Schema:
    errors = _object(object={"const": "list"}, data={"type": "array", "items": _line_error()})
    counts = _object(total=_COUNT, completed=_COUNT, failed=_COUNT)
    usage = _object(
        input_tokens=_COUNT,
        input_tokens_details=_object(cached_tokens=_COUNT),
        output_tokens=_COUNT,
        output_tokens_details=_object(reasoning_tokens=_COUNT),
        total_tokens=_COUNT,
    )
    return _object(
        id={"type": "string", "pattern": f"^{PREFIX}[0-9a-f]{{24}}$"},
        object={"const": "batch"},
        endpoint={"enum": list(ENDPOINTS)},
        model=_TEXT,
        errors={"anyOf": [errors, {"type": "null"}]},
        input_file_id=_TEXT,
        completion_window={"const": "24h"},
        status={"enum": list(get_args(Status))},
        output_file_id=_TEXT_OR_NULL,
        error_file_id=_TEXT_OR_NULL,
        created_at=_COUNT,
        expires_at={"type": "null", "description": "There is no time by which answers are there"},
        expired_at={"type": "null"},
        **{f"{name}_at": _TIME_OR_NULL for name in TIMES},
        request_counts=counts,
        usage={"anyOf": [usage, {"type": "null"}]},
        metadata=_METADATA,
    )


def list_schema(items: Schema) -> Schema:
    return _object(
        object={"const": "list"},
        data={"type": "array", "items": items},
        first_id=_TEXT_OR_NULL,
        last_id=_TEXT_OR_NULL,
        has_more={"type": "boolean"},
    )


def deleted_schema() -> Schema:
    return _object(id=_TEXT, object={"const": "file"}, deleted={"const": True})


def upload_body() -> dict[str, object]:
    """A route's `openapi_extra`: the form that brings a file."""
    form = _object(file={"type": "string", "contentMediaType": "application/octet-stream"}, purpose={"const": INPUT})
    content = {"multipart/form-data": {"schema": {**form, "additionalProperties": False}}}
    return {"requestBody": {"required": True, "content": content}}


def batch_body() -> dict[str, object]:
    """A route's `openapi_extra`: the body that begins a batch."""
    fields = {
        "input_file_id": {**_TEXT, "description": "Of a file with the purpose batch"},
        "endpoint": {"enum": list(ENDPOINTS), "description": "Of all its requests"},
        "completion_window": {"const": "24h", "description": "Answers come when they come: nothing expires"},
    }
    schema = {**_object(**fields), "additionalProperties": False}
    schema["properties"] = {**fields, "metadata": _METADATA}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def content_response() -> dict[int | str, dict[str, object]]:
    """The response of a route that sends a file."""
    content = {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}}
    return {200: {"description": "The bytes", "content": content}}


def _line_error() -> Schema:
    return _object(code=_TEXT, message=_TEXT, param=_TEXT_OR_NULL, line={"type": ["integer", "null"]})


def _object(**properties: object) -> Schema:
    """All of it is there."""
    return {"type": "object", "required": list(properties), "properties": properties}
