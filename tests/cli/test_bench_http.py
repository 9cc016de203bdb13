"""df-bench http: a table beside the leanest clients, from a server that is gone afterwards."""

from __future__ import annotations

import os

import pytest

from deltafin.store import httpbench


@pytest.fixture(autouse=True)
def few_turns(monkeypatch) -> None:
    """Enough for a table; nobody reads the numbers."""
    monkeypatch.setattr(httpbench, "ROUNDS", 1)
    monkeypatch.setattr(httpbench, "TURN_S", 0.01)
    monkeypatch.setattr(httpbench, "AT_ONCE", (2,))


CLIENTS = ["http.client, readinto", "a socket, recv_into", "store"]


def test_the_table_has_every_client_plain_and_over_tls(df, monkeypatch):
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:1")  # not for this
    monkeypatch.setenv("OPENBLAS_NUM_THREADS", "1")  # which every command sets
    before = dict(os.environ)
    done = df("df-bench", "http")
    assert done.status == 0, done.err
    conditions, _, head, *lines = done.out.splitlines()
    assert conditions == "spans of 17,547,264 bytes over loopback, medians of 1 turns"
    assert head.split() == ["client", "at", "once", "GB/s", "least", "most", "limit", "ratio", "core-s/GB"]
    assert [line[:32].strip() for line in lines] == [f"{s}: {c}" for s in ("http", "https") for c in CLIENTS]
    assert dict(os.environ) | {"DELTAFIN_CACHE": ""} == before | {"DELTAFIN_CACHE": ""}


def test_without_openssl_tls_is_left_out_and_that_is_said(df, monkeypatch):
    monkeypatch.setattr(httpbench, "_certificate", lambda folder: (None, "there is no openssl program here"))
    done = df("df-bench", "http", "--json")
    report = done.json
    assert report["without_tls"] == "there is no openssl program here"
    assert [(line["scheme"], line["client"]) for line in report["lines"]] == [("http", client) for client in CLIENTS]
    best = max(line["rate"] for line in report["lines"] if line["client"] != "store")
    for line in report["lines"]:
        assert line["limit"] == best and line["ratio"] == pytest.approx(line["rate"] / best)
        assert line["rate"] > 0 and line["core_s_per_gb"] >= 0


def test_a_client_that_brings_other_bytes_is_not_measured(df, monkeypatch):
    """What is compared must be the same work."""
    real = httpbench._bare_socket

    def lazy(port, context):
        fetch = real(port, context)

        def half(number, view):
            fetch(number, view)
            view[1000] ^= 1

        return half

    monkeypatch.setattr(httpbench, "_bare_socket", lazy)
    monkeypatch.setattr(httpbench, "_certificate", lambda folder: (None, "no"))
    done = df("df-bench", "http")
    assert done.status == 1 and "a client brought other bytes than the server sent" in done.err
