"""Figures of the server in Prometheus' text form (https://prometheus.io/docs/instrumenting/exposition_formats)."""

from collections.abc import Iterable, Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, generate_latest

from tokamac.engine.metrics import Metrics

from .model_pool import Resident

OTHER = "other"  # paths and methods that nothing answers, of which there may be any number
SECONDS = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
RATES = (1, 2, 5, 10, 20, 30, 50, 75, 100, 150, 250, 500)  # tokens per second
TOKENS = {"prompt": "prompt_tokens", "cached": "cached_tokens", "generated": "generated_tokens"}


class ServerMetrics:
    def __init__(self) -> None:
        self._registry = registry = CollectorRegistry()
        ProcessCollector(registry=registry)  # the server's own, without the engines
        self._requests = Counter("tokamac_requests", "Requests answered", ["endpoint", "status"], registry=registry)
        self._tokens = Counter("tokamac_tokens", "Tokens: of prompts, cached ones among them, generated, embedded", ["kind"],
                               registry=registry)  # fmt: skip
        self._ttft = Histogram("tokamac_ttft_seconds", "Time to the first token", buckets=SECONDS, registry=registry)
        self._queue = Histogram("tokamac_queue_seconds", "Time until a reply began", buckets=SECONDS, registry=registry)
        self._rate = Histogram(
            "tokamac_decode_tokens_per_second", "Decode rate of a reply", buckets=RATES, registry=registry
        )
        self._replies = Gauge(
            "tokamac_replies", "Replies now: active, or waiting for their turn", ["state"], registry=registry
        )
        self._loaded = Gauge("tokamac_models_loaded", "Models in memory", registry=registry)
        self._memory = Gauge(
            "tokamac_model_memory_bytes", "Memory of a model when it was loaded", ["model"], registry=registry
        )

    def add(self, endpoint: str, status: int, replies: Iterable[Metrics]) -> None:
        """Count a request that ended. status: 0 if its client left before."""
        self._requests.labels(endpoint, str(status or 499)).inc()
        for each in replies:
            for kind, field in TOKENS.items():
                self._tokens.labels(kind).inc(getattr(each, field))
            for histogram, value in (
                (self._ttft, each.ttft_s),
                (self._queue, each.queue_s),
                (self._rate, each.decode_tps),
            ):
                if value is not None:
                    histogram.observe(value)

    def add_embedded(self, tokens: int) -> None:
        self._tokens.labels("embedded").inc(tokens)

    def text(self, loaded: Sequence[Resident], busy: tuple[int, int]) -> bytes:
        """Return the page. busy: replies that run, and that wait."""
        self._loaded.set(len(loaded))
        for state, count in zip(("active", "waiting"), busy, strict=True):
            self._replies.labels(state).set(count)
        self._memory.clear()
        for each in loaded:
            if (nbytes := each.engine.memory.active_bytes) is not None:
                self._memory.labels(each.id).set(nbytes)
        return generate_latest(self._registry)
