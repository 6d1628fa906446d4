"""What `/metrics` tells, in a registry of its own. Everything is there, at zero, before the first request.

Names are vLLM's with the prefix `peg:`, so that dashboards and alerts need no more than that.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence

from prometheus_client import CollectorRegistry, Counter, GCCollector, PlatformCollector, ProcessCollector
from prometheus_client.exposition import generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from peg.plan import FinishReason
from peg.server.engine_metrics import EngineCollector, ReadEngine
from peg.server.histogram import Histogram
from peg.server.vitals_metrics import VitalsCollector
from peg.token_stream import TokenStream
from peg.vitals import Vitals

_SECONDS = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80, 160, 640, 2560)
_GAPS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1, 2.5, 10, 80)
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000)
_CHOICES = (1, 2, 5, 10, 20)
_FINISHED: Mapping[FinishReason, str] = {
    FinishReason.STOP: "stop",
    FinishReason.LENGTH: "length",
    FinishReason.CANCELLED: "abort",
    FinishReason.FAILED: "error",
    FinishReason.REJECTED: "rejected",
}


class Metrics:
    """Counts what the server sees; what the engine counts is read when somebody asks. Owned by the loop."""

    def __init__(self, read: ReadEngine, read_vitals: Callable[[], Vitals], model_name: str) -> None:
        self._labels = {"model_name": model_name, "engine": "0"}
        self._first_token = _histogram("time_to_first_token_seconds", "From arrival to the first token.", _SECONDS)
        self._gap = _histogram("inter_token_latency_seconds", "From one token to the next.", _GAPS)
        self._latency = _histogram("e2e_request_latency_seconds", "From arrival to the end.", _SECONDS)
        self._queue = _histogram("request_queue_time_seconds", "From admission to the first step.", _SECONDS)
        self._prefill = _histogram("request_prefill_time_seconds", "From the first step to the first token.", _SECONDS)
        self._decode = _histogram("request_decode_time_seconds", "From the first token to the end.", _SECONDS)
        self._inference = _histogram("request_inference_time_seconds", "From the first step to the end.", _SECONDS)
        self._prompt = _histogram("request_prompt_tokens", "Prompt tokens of a sequence.", _TOKENS)
        self._generated = _histogram("request_generation_tokens", "Tokens that a sequence generated.", _TOKENS)
        self._longest = _histogram(
            "request_max_num_generation_tokens", "Tokens of a request's longest choice.", _TOKENS
        )
        self._n = _histogram("request_params_n", "Choices asked for.", _CHOICES)
        self._max_tokens = _histogram("request_params_max_tokens", "max_tokens asked for.", _TOKENS)
        self._registry = CollectorRegistry(auto_describe=False)
        for process in (ProcessCollector, PlatformCollector, GCCollector):
            process(registry=self._registry)
        self._registry.register(EngineCollector(read, self._labels))
        self._registry.register(VitalsCollector(read_vitals))
        self._registry.register(
            _Histograms([each for each in vars(self).values() if isinstance(each, Histogram)], self._labels)
        )
        self._finished = Counter(
            "peg:request_success", "Sequences that ended.", (*self._labels, "finished_reason"), registry=self._registry
        )
        for reason in _FINISHED.values():
            self._finished.labels(*self._labels.values(), reason)
        self._http = Counter(
            "peg:http_requests", "HTTP requests answered.", ("method", "route", "status"), registry=self._registry
        )

    def asked(self, n: int, max_tokens: int | None) -> None:
        """A generating request was accepted."""
        self._n.observe(n)
        if max_tokens is not None:
            self._max_tokens.observe(max_tokens)

    def first_token(self, took_s: float) -> None:
        """A sequence has its first token, so long after its request came."""
        self._first_token.observe(took_s)

    def more_tokens(self, count: int, took_s: float) -> None:
        """A sequence got `count` tokens more, so long after the one before."""
        self._gap.observe(took_s / count, count)

    def ended(self, streams: Sequence[TokenStream], arrived_s: float) -> None:
        """Every sequence of a request has its terminal."""
        now_s = time.monotonic()
        for stream in streams:
            terminal = stream.terminal
            assert terminal is not None, f"{stream.request_id} has no terminal"
            self._count(terminal.reason)
            self._latency.observe(now_s - arrived_s)
            self._prompt.observe(terminal.prompt_tokens)
            self._generated.observe(terminal.completion_tokens)
            self._observe_phases(stream)
        if streams:
            self._longest.observe(max(stream.published_tokens for stream in streams))

    def _observe_phases(self, stream: TokenStream) -> None:
        """Where a sequence's time went, as far as it came."""
        started_s, first_s, ended_s = stream.started_s, stream.first_token_s, stream.ended_s
        assert ended_s is not None
        if started_s is None:
            return
        self._queue.observe(started_s - stream.submitted_s)
        self._inference.observe(ended_s - started_s)
        if first_s is not None:
            self._prefill.observe(first_s - started_s)
            self._decode.observe(ended_s - first_s)

    def rejected(self) -> None:
        """The engine refused a request."""
        self._count(FinishReason.REJECTED)

    def _count(self, reason: FinishReason) -> None:
        self._finished.labels(*self._labels.values(), _FINISHED[reason]).inc()

    def answered(self, method: str, route: str, status: int) -> None:
        """An HTTP request was answered. `route` is the route's pattern, so that paths cannot grow the labels."""
        self._http.labels(method, route, status).inc()

    def exposition(self) -> bytes:
        """The page for Prometheus."""
        return generate_latest(self._registry)


def _histogram(name: str, text: str, bounds: tuple[float, ...]) -> Histogram:
    return Histogram(f"peg:{name}", text, bounds)


class _Histograms(Collector):
    """Lets Prometheus read histograms that cost little."""

    def __init__(self, histograms: Sequence[Histogram], labels: Mapping[str, str]) -> None:
        self._histograms = histograms
        self._labels = labels

    def collect(self) -> Iterator[Metric]:
        return (histogram.family(self._labels) for histogram in self._histograms)
