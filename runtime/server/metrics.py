"""What Prometheus reads: the application's own counts, and those of engine, store and prefixes as they are then."""

from __future__ import annotations

from collections import Counter as Counts
from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from deltafin.runtime.server.health import status_of
from deltafin.runtime.server.services import Services
from deltafin.store import SOURCES

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_SECONDS = (0.1, 0.3, 1, 3, 10, 30, 100, 300, 1000, 3000, 10000, 30000)  # a first token may take an hour
_COUNTERS = {
    "submitted": ("requests", "Requests that were queued"),
    "answered": ("answers", "Requests that were answered to the end"),
    "failed": ("failed_requests", "Requests that failed in the engine"),
    "left": ("left_requests", "Requests whose clients went away before the end"),
    "refused": ("refused_requests", "Requests that found the queue full"),
    "prompt_tokens": ("prompt_tokens", "Tokens of prompts"),
    "cached_tokens": ("cached_tokens", "Tokens of prompts that were known and not computed"),
    "computed_tokens": ("computed_tokens", "Rows that passes have computed"),
    "tokens": ("tokens", "Tokens drawn for requests"),
    "drafted": ("drafted_tokens", "Tokens that were guessed"),
    "accepted": ("accepted_tokens", "Guesses that were right"),
    "passes": ("passes", "Passes over the layers"),
    "pass_s": ("pass_seconds", "Time in passes"),
}
_PREFIXES = {
    "kept": ("states_kept", "States of prompts and chats that were written"),
    "restored": ("states_restored", "States that were gone on from"),
    "restored_tokens": ("states_restored_tokens", "Tokens that restored states had seen"),
    "evicted": ("states_evicted", "States that made way for others"),
    "damaged": ("states_damaged", "States that were found damaged and removed"),
}


class Meters:
    """Of one application; two in a process share nothing."""

    def __init__(self, services: Services) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(_Readings(services))
        self._requests = Counter(
            "deltafin_http_requests",
            "HTTP requests by route and status; left: the client went away",
            ["method", "route", "status"],
            registry=self._registry,
        )
        self._first = Histogram(
            "deltafin_first_token_seconds",
            "From a request to its first token",
            buckets=_SECONDS,
            registry=self._registry,
        )

    def request(self, method: str, route: str, status: str) -> None:
        self._requests.labels(method, route, status).inc()

    def first_token(self, seconds: float) -> None:
        self._first.observe(seconds)

    def text(self) -> bytes:
        """In Prometheus' text format."""
        return generate_latest(self._registry)


class _Readings(Collector):
    """Reads what others count, when it is asked."""

    def __init__(self, services: Services) -> None:
        self._services = services

    def describe(self) -> list[Metric]:
        return []  # so that registering reads nothing

    def collect(self) -> Iterator[Metric]:
        engine, missing = self._services.engine, self._services.missing
        counts, prefixes, store = engine.counts.as_json(), engine.prefixes.snapshot(), engine.model.store.stats
        for name, (metric, what) in _COUNTERS.items():
            yield CounterMetricFamily(f"deltafin_{metric}", what, counts[name])
        for name, (metric, what) in _PREFIXES.items():
            yield CounterMetricFamily(f"deltafin_{metric}", what, prefixes[name])
        stored = store.snapshot()
        read = CounterMetricFamily("deltafin_read_bytes", "Bytes of weights by where they came from", labels=["source"])
        for source in SOURCES:
            read.add_metric([source], stored[f"{source}_nbytes"])
        yield read
        if self._services.batches is not None:
            batches = GaugeMetricFamily("deltafin_batches", "Batches by status", labels=["status"])
            for status, count in Counts(record.status for record in self._services.batches.all()).items():
                batches.add_metric([status], count)
            yield batches
        yield _gauge("up", "Whether the engine can be expected to answer", status_of(engine) == "ok")
        yield _gauge("running", "Answers of requests under way", engine.running)
        yield _gauge("waiting", "Requests in the queue", engine.waiting)
        yield _gauge("recent", "Sequences in memory that a request may go on from", engine.recent)
        yield _gauge("most_together", "Most answers that were under way at once", counts["together"])
        yield _gauge(
            "left_layers",
            "Most layers that began between a client's going and the end of its work",
            counts["left_layers"],
        )
        yield _gauge("still_seconds", "Since a layer last began or ended, while a pass is under way", engine.still_s)
        yield _gauge("missing_experts", "Experts that are not on this machine", missing.count)
        yield _gauge("experts", "Experts of the model", missing.total)


def _gauge(name: str, what: str, value: float) -> Metric:
    return GaugeMetricFamily(f"deltafin_{name}", what, float(value))
