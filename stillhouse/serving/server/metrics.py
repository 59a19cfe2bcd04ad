"""The numbers of `GET /metrics`, in the text format of Prometheus."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from stillhouse.serving.server.request_queue import RequestQueue

PATHS = (
    "/v1/score",
    "/v1/completions",
    "/inference/v1/generate",
    "/v1/weights",
    "/v1/info",
    "/v1/head",
    "/v1/models",
    "/healthz",
    "/metrics",
)
_TOKENS = (16, 64, 256, 1024, 4096, 16384, 65536)
_SECONDS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100)


class Metrics:
    """Counts requests, batches and tokens of one server."""

    def __init__(self, queue: RequestQueue):
        self._registry = registry = CollectorRegistry()
        self._requests = Counter("stillhouse_requests", "answered requests", ["path", "status"], registry=registry)
        self._latency = Histogram(
            "stillhouse_request_seconds", "from a request's header to its answer", ["path"],
            buckets=_SECONDS, registry=registry,
        )  # fmt: skip
        self._tokens = Counter("stillhouse_tokens", "tokens that the model has read and written", registry=registry)
        self._failed = Counter("stillhouse_failed_batches", "batches whose forward pass failed", registry=registry)
        self._batch_tokens = Histogram(
            "stillhouse_batch_tokens", "tokens of a batch", buckets=_TOKENS, registry=registry
        )
        self._batch_seconds = Histogram(
            "stillhouse_batch_seconds", "time of a batch in the model", buckets=_SECONDS, registry=registry
        )
        held = Gauge("stillhouse_held_tokens", "tokens accepted and not answered completely", registry=registry)
        held.set_function(lambda: queue.held_tokens)
        waiting = Gauge("stillhouse_waiting_sequences", "sequences that wait for the model", registry=registry)
        waiting.set_function(lambda: queue.waiting)

    def request(self, path: str, status: int, seconds: float) -> None:
        """Count an answer. All unknown paths share one label, so that clients cannot create time series."""
        if path.startswith("/v1/files/"):
            label = "/v1/files"
        else:
            label = path if path in PATHS else "other"
        self._requests.labels(label, str(status)).inc()
        self._latency.labels(label).observe(seconds)

    def batch(self, tokens: int, seconds: float) -> None:
        self._tokens.inc(tokens)
        self._batch_tokens.observe(tokens)
        self._batch_seconds.observe(seconds)

    def failed_batch(self) -> None:
        self._failed.inc()

    def text(self) -> bytes:
        return generate_latest(self._registry)
