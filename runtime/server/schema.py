"""The API described as OpenAPI: what each field may be is what the readers of runtime.openai take."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from deltafin.runtime.openai import CHAT, Endpoint, Serving
from deltafin.runtime.server.services import Services

Schema = dict[str, object]
_Operation = dict[str, Any]  # of a document that FastAPI has made

_DESCRIBED = {
    400: "The request cannot be done as it asks; `param` names the field",
    401: "The API key is missing or wrong",
    403: "From a web page or for a host that may not ask",
    404: "There is no such thing here",
    408: "The body did not come",
    409: "Something that is needed is in use",
    413: "The body is too large",
    415: "The body is of a type that is not read",
    422: "The answer is not the JSON that `response_format` asks for; it is told as `answer`",
    429: "The queue is full; Retry-After says when to try again",
    500: "A fault of the server's own",
    503: "Not now: shutting down, out of memory or disk, weights or network missing",
}
_ERROR: Schema = {"$ref": "#/components/schemas/Error"}
_KEY = "key"


def errors(*statuses: int) -> dict[int | str, dict[str, object]]:
    """Responses of a route, beside those that all have."""
    return {status: _error(_DESCRIBED[status]) for status in statuses}


def answers(endpoint: Endpoint) -> dict[int | str, dict[str, object]]:
    """Responses of a route that answers with a model."""
    written = {
        "application/json": {"schema": _completion(endpoint == CHAT)},
        "text/event-stream": {},
    }
    return {
        200: {"description": "The answer; with `stream` its chunks and [DONE]", "content": written},
        **errors(400, 401, 404, 408, 413, 415, 422, 429, 503),
    }


def body_of(endpoint: Endpoint, services: Services) -> dict[str, object]:
    """A route's `openapi_extra`: the body of its requests."""
    serving = services.serving
    own = _chat_fields() if endpoint == CHAT else _text_fields(serving)
    needed = ["model", "messages" if endpoint == CHAT else "prompt"]
    schema: Schema = {
        "type": "object",
        "required": needed,
        "properties": {"model": {"enum": services.names}, **own, **_decoding_fields(serving)},
        "additionalProperties": False,
    }
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def describe(app: FastAPI, *, with_key: bool) -> None:
    """Replaces what FastAPI would say by itself: errors are ours on every route, and a key may be needed."""

    def described() -> dict[str, object]:
        if app.openapi_schema is None:
            app.openapi_schema = _described(app, with_key)
        return app.openapi_schema

    app.openapi = described  # type: ignore[method-assign]


def _described(app: FastAPI, with_key: bool) -> dict[str, object]:
    found = get_openapi(title=app.title, version=app.version, description=app.description, routes=app.routes)
    components = found.setdefault("components", {})
    schemas = components.setdefault("schemas", {})
    for name in ("HTTPValidationError", "ValidationError"):
        schemas.pop(name, None)
    schemas["Error"] = _error_object()
    for path, operation in _operations(found):
        responses: dict[str, object] = operation.setdefault("responses", {})
        if "HTTPValidationError" in str(responses.get("422")):
            del responses["422"]
        for status, what in (("4XX", "The request is at fault"), ("5XX", "The server cannot, or not now")):
            responses.setdefault(status, _error(what))
        if with_key and path != "/health":
            operation["security"] = [{_KEY: []}]
    if with_key:
        components["securitySchemes"] = {_KEY: {"type": "http", "scheme": "bearer"}}
    # What it says of its own health with 503 is no error object.
    if health := found["paths"].get("/health"):
        health["get"]["responses"]["503"] = health["get"]["responses"]["200"]
    return found


def _operations(schema: Mapping[str, dict[str, dict[str, _Operation]]]) -> Iterator[tuple[str, _Operation]]:
    for path, item in schema["paths"].items():
        for operation in item.values():
            yield path, operation


def _error(what: str) -> dict[str, object]:
    return {"description": what, "content": {"application/json": {"schema": _ERROR}}}


def _error_object() -> Schema:
    error = _object(
        message={"type": "string"}, type={"type": "string"}, param=_or_null("string"), code=_or_null("string")
    )
    return {"type": "object", "required": ["error"], "properties": {"error": error, "answer": {"type": "object"}}}


def health_schema() -> Schema:
    status: Schema = {"enum": ["ok", "stalled", "failed", "stopping"]}
    more = {
        "model": {"type": "string"},
        "engine_alive": {"type": "boolean"},
        "since_last_layer_s": {"type": "number"},
        **dict.fromkeys(("running", "waiting", "missing_experts"), _count()),
    }
    return {"type": "object", "required": ["status"], "properties": {"status": status, **more}}


def model_schema() -> Schema:
    text: Schema = {"type": "string"}
    return _object(id=text, object={"const": "model"}, created=_count(), owned_by=text)


def models_schema() -> Schema:
    return _object(object={"const": "list"}, data={"type": "array", "items": model_schema()})


def shown(schema: Schema, what: str) -> dict[int | str, dict[str, object]]:
    """The response of a route that succeeds."""
    return {200: {"description": what, "content": {"application/json": {"schema": schema}}}}


# ---- fields of requests


def _decoding_fields(serving: Serving) -> dict[str, Schema]:
    most = serving.max_positions
    nothing: Schema = {"description": "Says who asks; has no effect"}
    return {
        "max_tokens": _integer(1, most),
        "max_completion_tokens": _integer(1, most),
        "temperature": {**_number(0, 100), "description": "0, and nothing, is greedy"},
        "top_p": _number(0, 1),
        "min_p": _number(0, 1),
        "top_k": _integer(-1, 2**31 - 1),
        "seed": {**_integer(-(2**63), 2**64 - 1), "description": "Drawn and told if there is none"},
        "logit_bias": {
            **_or_null("object"),
            "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100},
        },
        "stop": {
            "anyOf": [_or_null("string"), {"type": "array", "maxItems": 4, "items": {"type": "string", "minLength": 1}}]
        },
        "stream": _or_null("boolean"),
        "stream_options": {
            **_or_null("object"),
            "properties": {
                "include_usage": _or_null("boolean"),
                "include_progress": _or_null("boolean"),
                "include_obfuscation": _one_of(False),
            },
            "additionalProperties": False,
        },
        "n": _one_of(1),
        "frequency_penalty": _one_of(0),
        "presence_penalty": _one_of(0),
        "store": _one_of(False),
        "service_tier": _one_of("auto", "default"),
        "return_token_ids": _or_null("boolean"),
        **dict.fromkeys(
            ("user", "metadata", "safety_identifier", "prompt_cache_key", "prompt_cache_retention"), nothing
        ),
    }


def _chat_fields() -> dict[str, Schema]:
    return {
        "messages": {"type": "array", "minItems": 1, "items": _message()},
        "tools": {"type": ["array", "null"], "items": _tool()},
        "tool_choice": _one_of("none", "auto", "required"),
        "parallel_tool_calls": _one_of(True),
        "response_format": _response_format(),
        "reasoning_effort": _one_of("none", "low", "high", "max"),
        "thinking": {
            **_or_null("object"),
            "properties": {"type": {"enum": ["enabled", "disabled"]}},
            "required": ["type"],
            "additionalProperties": False,
        },
        "logprobs": _or_null("boolean"),
        "top_logprobs": _integer(0, 20),
        "modalities": {"enum": [["text"], None]},
        "verbosity": _one_of("medium"),
    }


def _text_fields(serving: Serving) -> dict[str, Schema]:
    token: Schema = {"type": "integer", "minimum": 0, "maximum": serving.vocab_size - 1}
    ids: Schema = {"type": "array", "minItems": 1, "items": token}
    text: Schema = {"type": "string", "minLength": 1}
    alone: Schema = {"type": "array", "minItems": 1, "maxItems": 1, "items": {"anyOf": [text, ids]}}
    return {
        "prompt": {"anyOf": [text, ids, alone]},
        "logprobs": _integer(0, 20),
        "best_of": _one_of(1),
        "echo": _one_of(False),
        "suffix": _one_of(""),
    }


def _message() -> Schema:
    part = _object(type={"const": "text"}, text={"type": "string"})
    content: Schema = {"anyOf": [_or_null("string"), {"type": "array", "items": part}]}
    calls: Schema = {"type": ["array", "null"], "items": {"type": "object", "description": "A call as it was answered"}}
    said: dict[str, object] = {"content": content, "name": _or_null("string")}
    asking = {"role": {"enum": ["system", "developer", "user"]}, **said}
    answer = {"role": {"const": "assistant"}, **said, "reasoning_content": _or_null("string"), "tool_calls": calls}
    result = {"role": {"const": "tool"}, **said, "tool_call_id": _or_null("string")}
    return {
        "type": "object",
        "required": ["role"],
        "anyOf": [{"properties": fields} for fields in (asking, answer, result)],
    }


def _tool() -> Schema:
    function: Schema = {
        "type": "object",
        "required": ["name"],
        "properties": {
            "name": {"type": "string", "minLength": 1},
            "description": _or_null("string"),
            "parameters": _or_null("object"),
            "strict": _one_of(False),
        },
    }
    return _object(type={"const": "function"}, function=function)


def _response_format() -> Schema:
    schema = {"schema": {"type": "object"}, "name": {}, "description": {}, "strict": _one_of(False)}
    return {
        **_or_null("object"),
        "required": ["type"],
        "properties": {
            "type": {"enum": ["text", "json_object", "json_schema"]},
            "json_schema": {
                "type": "object",
                "required": ["schema"],
                "properties": schema,
                "additionalProperties": False,
            },
        },
        "additionalProperties": False,
    }


# ---- answers


def _completion(chat: bool) -> Schema:
    text: Schema = {"type": "string"}
    message: Schema = {
        "type": "object",
        "required": ["role", "content"],
        "properties": {
            "role": {"const": "assistant"},
            "content": _or_null("string"),
            "refusal": {"type": "null"},
            "reasoning_content": text,
            "tool_calls": {"type": "array", "items": {"type": "object"}},
        },
    }
    reasons = ["stop", "length", "tool_calls"] if chat else ["stop", "length"]
    choice = _object(
        index={"const": 0},
        **({"message": message} if chat else {"text": text}),
        logprobs=_or_null("object"),
        finish_reason={"enum": reasons},
    )
    usage = _object(**dict.fromkeys(("prompt_tokens", "completion_tokens", "total_tokens"), _count()))
    return _object(
        id=text,
        object={"const": "chat.completion" if chat else "text_completion"},
        created=_count(),
        model=text,
        choices={"type": "array", "minItems": 1, "maxItems": 1, "items": choice},
        usage=usage,
        system_fingerprint=text,
    )


# ---- words of JSON schema


def _object(**fields: object) -> Schema:
    """With all of these; there may be more."""
    return {"type": "object", "required": list(fields), "properties": fields}


def _or_null(kind: str) -> Schema:
    return {"type": [kind, "null"]}


def _integer(low: int, high: int) -> Schema:
    return {**_or_null("integer"), "minimum": low, "maximum": high}


def _number(low: float, high: float) -> Schema:
    return {**_or_null("number"), "minimum": low, "maximum": high}


def _one_of(*values: object) -> Schema:
    return {"enum": [*values, None]}


def _count() -> Schema:
    return {"type": "integer", "minimum": 0}
