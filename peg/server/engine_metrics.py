"""What `/metrics` tells of the engine: read when somebody asks, at zero before it has started."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import TypeAlias

from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from peg.engine import EngineStats
from peg.failure import EngineState

ReadEngine: TypeAlias = Callable[[], tuple[EngineState, EngineStats | None]]
"""The engine's state, and a reading of it once it has started."""


class EngineCollector(Collector):
    """Reads the engine. Before it has started the same names are there, at zero."""

    def __init__(self, read: ReadEngine, labels: Mapping[str, str]) -> None:
        self._read = read
        self._labels = labels

    def collect(self) -> Iterator[Metric]:
        state, stats = self._read()
        yield self._states(state)
        scheduler = None if stats is None else stats.scheduler
        counters = None if scheduler is None else scheduler.counters
        groups = () if scheduler is None else scheduler.groups
        usage = max((group.used / group.total for group in groups if group.total), default=0.0)
        yield self._gauge("num_requests_running", "Sequences in the batch.", scheduler.running if scheduler else 0)
        yield self._gauge("num_requests_waiting", "Sequences that wait.", scheduler.waiting if scheduler else 0)
        yield self._gauge("kv_cache_usage_perc", "The fullest KV group, 0 to 1.", usage)
        yield self._blocks([group.used for group in groups])
        yield self._counter("prompt_tokens", "Prompt tokens computed.", counters.prompt_tokens if counters else 0)
        yield self._counter("generation_tokens", "Tokens generated.", counters.generated_tokens if counters else 0)
        yield self._counter(
            "num_preemptions", "Sequences set back for memory.", counters.preemptions if counters else 0
        )
        yield self._steps(counters.steps_by_size if counters else (), counters.step_tokens if counters else 0)
        yield self._cache(stats)

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

    def _steps(self, by_size: Sequence[int], tokens: int) -> Metric:
        """Entry i counts steps of up to 2 ** i tokens."""
        bounds = [*(str(float(1 << power)) for power in range(len(by_size))), "+Inf"]
        buckets = list(zip(bounds, map(float, accumulate((*by_size, 0))), strict=True))
        text = "Tokens that a step computed."
        family = HistogramMetricFamily("peg:iteration_tokens_total", text, labels=list(self._labels))
        family.add_metric(list(self._labels.values()), buckets, float(tokens))
        return family

    def _cache(self, stats: EngineStats | None) -> Metric:
        family = InfoMetricFamily("peg:cache_config", "The KV cache.", labels=list(self._labels))
        if stats is not None:
            blocks = sum(capacity.num_blocks for capacity in stats.info.groups)
            about = {"block_size": stats.info.block_size, "num_gpu_blocks": blocks, "cache_dtype": stats.info.dtype}
            family.add_metric(list(self._labels.values()), {name: str(value) for name, value in about.items()})
        return family

    def _gauge(self, name: str, text: str, value: float) -> Metric:
        family = GaugeMetricFamily(f"peg:{name}", text, labels=list(self._labels))
        family.add_metric(list(self._labels.values()), value)
        return family

    def _counter(self, name: str, text: str, value: float) -> Metric:
        family = CounterMetricFamily(f"peg:{name}", text, labels=list(self._labels))
        family.add_metric(list(self._labels.values()), value)
        return family
