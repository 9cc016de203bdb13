"""Files and batches keep to their own description, whatever is sent: no 500, and nothing that is not said to come."""

from __future__ import annotations

import httpx
import openai
import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis import GenerationMode

OPERATIONS = [
    ("POST", "/v1/files"),
    ("GET", "/v1/files"),
    ("GET", "/v1/files/{file_id}"),
    ("GET", "/v1/files/{file_id}/content"),
    ("DELETE", "/v1/files/{file_id}"),
    ("POST", "/v1/batches"),
    ("GET", "/v1/batches"),
    ("GET", "/v1/batches/{batch_id}"),
    ("POST", "/v1/batches/{batch_id}/cancel"),
]


@pytest.fixture(scope="module")
def api(file_server):
    return schemathesis.openapi.from_url(f"{file_server.url}/openapi.json")


@pytest.fixture
def known(file_server):
    """Values of ids that are there."""
    client = openai.OpenAI(base_url=f"{file_server.url}/v1", api_key="none", max_retries=0)
    file = client.files.create(file=("in.jsonl", b"{}\n"), purpose="batch")
    batch = client.batches.create(input_file_id=file.id, endpoint="/v1/completions", completion_window="24h")
    return {"file_id": file.id, "batch_id": batch.id}


def try_all(api, base_url, operation, mode, count, known):
    """Sends so many requests, all as the schema says or all not so; each answer must be one that it says."""
    method, path = operation
    seen = set()

    @given(case=api[path][method].as_strategy(mode))
    @settings(
        max_examples=count, deadline=None, database=None, derandomize=True, suppress_health_check=list(HealthCheck)
    )
    def run(case):
        if len(seen) % 2 == 0:  # else none is ever found
            for name in set(case.path_parameters or {}) & set(known):
                case.path_parameters[name] = known[name]
            if isinstance(case.body, dict) and "input_file_id" in case.body:
                case.body["input_file_id"] = known["file_id"]
        response = case.call_and_validate(base_url=base_url, timeout=60)
        seen.add(response.status_code)
        assert response.status_code != 500
        if response.status_code >= 400:
            assert set(response.json()["error"]) == {"message", "type", "param", "code"}

    run()
    return seen


@pytest.mark.parametrize("operation", OPERATIONS, ids=" ".join)
@pytest.mark.parametrize("count", [8, pytest.param(300, marks=pytest.mark.slow)])
def test_no_request_is_answered_otherwise_than_described(api, file_server, operation, count, known):
    seen = try_all(api, file_server.url, operation, GenerationMode.POSITIVE, count, known)
    assert seen & {200, 409}
    if operation in (("POST", "/v1/batches"), ("GET", "/v1/batches"), ("GET", "/v1/files")):
        assert 400 in try_all(api, file_server.url, operation, GenerationMode.NEGATIVE, count, known)
    assert httpx.get(f"{file_server.url}/health").status_code == 200
