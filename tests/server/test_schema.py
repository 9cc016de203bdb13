"""The API keeps to its own description, whatever it is sent: no 500, and nothing that is not said to come."""

from __future__ import annotations

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis import GenerationMode
from schemathesis.checks import negative_data_rejection, positive_data_acceptance

from deltafin.store import open_store

ANSWERS = ("/v1/chat/completions", "/v1/completions")


@pytest.fixture(scope="module")
def brief(server_of, demo_dir, tmp_path_factory):
    """A server whose answers are short."""
    folder = tmp_path_factory.mktemp("schema")
    with open_store(demo_dir, cache_dir=folder / "cache") as store:
        served = server_of(store, max_new=2, context=192, data=folder / "data")
        yield served
        served.close()


@pytest.fixture(scope="module")
def api(brief):
    return schemathesis.openapi.from_url(f"{brief.url}/openapi.json")


def try_all(operation, base_url, mode, count):
    """Sends so many requests, all as the schema says or all not so; each answer must be one that it says."""

    @given(case=operation.as_strategy(mode))
    @settings(
        max_examples=count, deadline=None, database=None, derandomize=True, suppress_health_check=list(HealthCheck)
    )
    def run(case):
        response = case.call_and_validate(base_url=base_url, timeout=60, excluded_checks=excluded)
        seen.add(response.status_code)
        if response.status_code >= 400 and operation.path != "/health":
            assert set(response.json()["error"]) == {"message", "type", "param", "code"}

    seen = set()
    # Fields may forbid each other, which a schema cannot say: top_p needs a temperature, a tool's result a call.
    excluded = [positive_data_acceptance]
    if operation.path == "/v1/files":
        excluded.append(negative_data_rejection)  # whatever a form has for a file is one
    run()
    return seen


@pytest.mark.parametrize("path", ANSWERS)
def test_no_request_is_answered_otherwise_than_described(api, brief, path):
    operation = api[path]["POST"]
    assert 200 in try_all(operation, brief.url, GenerationMode.POSITIVE, 12)
    assert max(try_all(operation, brief.url, GenerationMode.NEGATIVE, 12)) < 500


def test_no_other_route_answers_otherwise_than_described(api, brief):
    tried = 0
    for found in api.get_all_operations():
        operation = found.ok()
        if operation.path not in ANSWERS:
            tried += 1
            assert max(try_all(operation, brief.url, GenerationMode.POSITIVE, 4)) < 500
    assert tried >= 13
    assert httpx.get(f"{brief.url}/health").status_code == 200


@pytest.mark.slow
def test_no_request_of_many_is_answered_otherwise_than_described(api, brief):
    for found in api.get_all_operations():
        operation = found.ok()
        count = 300 if operation.path in ANSWERS else 50
        try_all(operation, brief.url, GenerationMode.POSITIVE, count)
        if operation.body:  # what a path has is a text in any case
            try_all(operation, brief.url, GenerationMode.NEGATIVE, count)
    assert httpx.get(f"{brief.url}/health").status_code == 200
