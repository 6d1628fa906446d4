"""What `/metrics` tells, in a registry of its own. Everything is there, at zero, before the first request."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TypeAlias

from prometheus_client import (
    CollectorRegistry,
    Counter,
    GCCollector,
    Histogram,
    PlatformCollector,
    ProcessCollector,
)
from prometheus_client.exposition import generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from peg.engine import EngineStats
from peg.failure import EngineState
from peg.plan import FinishReason, Terminal

ReadEngine: TypeAlias = Callable[[], tuple[EngineState, EngineStats | None]]
"""The engine's state, and a reading of it once it has started."""

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

    def __init__(self, read: ReadEngine, model_name: str) -> None:
        self._registry = CollectorRegistry(auto_describe=False)
        self._model_name = model_name
        for process in (ProcessCollector, PlatformCollector, GCCollector):
            process(registry=self._registry)
        self._registry.register(_EngineCollector(read, model_name))
        self._first_token = self._histogram("time_to_first_token_seconds", "From arrival to the first token.", _SECONDS)
        self._gap = self._histogram("inter_token_latency_seconds", "From one token to the next.", _GAPS)
        self._latency = self._histogram("e2e_request_latency_seconds", "From arrival to the last token.", _SECONDS)
        self._prompt = self._histogram("request_prompt_tokens", "Prompt tokens of a sequence.", _TOKENS)
        self._generated = self._histogram("request_generation_tokens", "Tokens that a sequence generated.", _TOKENS)
        self._n = self._histogram("request_params_n", "Choices asked for.", _CHOICES)
        self._max_tokens = self._histogram("request_params_max_tokens", "max_tokens asked for.", _TOKENS)
        self._finished = Counter(
            "peg:request_success", "Sequences that ended.", ("model_name", "finished_reason"), registry=self._registry
        )
        for reason in _FINISHED.values():
            self._finished.labels(model_name, reason)
        self._http = Counter(
            "peg:http_requests", "HTTP requests answered.", ("method", "route", "status"), registry=self._registry
        )

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        family = Histogram(f"peg:{name}", text, ("model_name",), registry=self._registry, buckets=buckets)
        return family.labels(self._model_name)

    def asked(self, n: int, max_tokens: int | None) -> None:
        """A generating request was accepted."""
        self._n.observe(n)
        if max_tokens is not None:
            self._max_tokens.observe(max_tokens)

    def tokens(self, count: int, since_s: float, *, first: bool) -> float:
        """A sequence got `count` tokens; `since_s` is its arrival or its token before. The time now."""
        now_s = time.monotonic()
        if first:
            self._first_token.observe(now_s - since_s)
            count -= 1
            since_s = now_s
        for _ in range(count):
            self._gap.observe((now_s - since_s) / count)
        return now_s

    def ended(self, terminal: Terminal, arrived_s: float) -> None:
        """A sequence got its terminal."""
        self._finished.labels(self._model_name, _FINISHED[terminal.reason]).inc()
        self._latency.observe(time.monotonic() - arrived_s)
        self._prompt.observe(terminal.prompt_tokens)
        self._generated.observe(terminal.completion_tokens)

    def rejected(self) -> None:
        """The engine refused a request."""
        self._finished.labels(self._model_name, _FINISHED[FinishReason.REJECTED]).inc()

    def answered(self, method: str, route: str, status: int) -> None:
        """An HTTP request was answered. `route` is the route's pattern, so that paths cannot grow the labels."""
        self._http.labels(method, route, status).inc()

    def exposition(self) -> bytes:
        """The page for Prometheus."""
        return generate_latest(self._registry)


class _EngineCollector(Collector):
    """Reads the engine. Before it has started the same names are there, at zero."""

    def __init__(self, read: ReadEngine, model_name: str) -> None:
        self._read = read
        self._model_name = model_name

    def collect(self) -> Iterator[Metric]:
        state, stats = self._read()
        yield self._states(state)
        running = waiting = prompt_tokens = generated_tokens = preemptions = 0
        if stats is not None:
            running, waiting = stats.scheduler.running, stats.scheduler.waiting
            counters = stats.scheduler.counters
            prompt_tokens, generated_tokens = counters.prompt_tokens, counters.generated_tokens
            preemptions = counters.preemptions
        groups = () if stats is None else stats.scheduler.groups
        usage = max((group.used / group.total for group in groups if group.total), default=0.0)
        yield self._gauge("num_requests_running", "Sequences in the batch.", running)
        yield self._gauge("num_requests_waiting", "Sequences that wait for a place.", waiting)
        yield self._gauge("kv_cache_usage_perc", "The fullest KV group, 0 to 1.", usage)
        yield self._blocks([group.used for group in groups])
        yield self._counter("prompt_tokens", "Prompt tokens computed.", prompt_tokens)
        yield self._counter("generation_tokens", "Tokens generated.", generated_tokens)
        yield self._counter("num_preemptions", "Sequences set back for memory.", preemptions)

    def _states(self, state: EngineState) -> Metric:
        family = GaugeMetricFamily("peg:engine_state", "1 for the state that the engine is in.", labels=["state"])
        for each in EngineState:
            family.add_metric([each], float(each is state))
        return family

    def _blocks(self, used: Sequence[int]) -> Metric:
        family = GaugeMetricFamily("peg:kv_blocks_used", "Blocks taken, by KV group.", labels=["group"])
        for group, blocks in enumerate(used):
            family.add_metric([str(group)], blocks)
        return family

    def _gauge(self, name: str, text: str, value: float) -> Metric:
        family = GaugeMetricFamily(f"peg:{name}", text, labels=["model_name"])
        family.add_metric([self._model_name], value)
        return family

    def _counter(self, name: str, text: str, value: float) -> Metric:
        family = CounterMetricFamily(f"peg:{name}", text, labels=["model_name"])
        family.add_metric([self._model_name], value)
        return family
