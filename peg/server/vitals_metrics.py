"""What `/metrics` tells of the supervisor, in every state."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from peg.failure import CauseKind
from peg.vitals import Vitals


class VitalsCollector(Collector):
    """Failures, rebuilds, deadlines and heartbeats. Every kind of failure is there, at zero, before the first."""

    def __init__(self, read: Callable[[], Vitals]) -> None:
        self._read = read

    def collect(self) -> Iterator[Metric]:
        vitals = self._read()
        yield self._failures(vitals)
        rebuilds = CounterMetricFamily("peg:rebuilds", "Times that the engine was rebuilt.")
        rebuilds.add_metric([], len(vitals.rebuilt))
        yield rebuilds
        deadline = GaugeMetricFamily("peg:step_deadline_seconds", "What the oldest step in flight may take.")
        deadline.add_metric([], vitals.step_limit_s)
        yield deadline
        yield self._heartbeats(vitals)

    def _failures(self, vitals: Vitals) -> Metric:
        """`rank` is empty where no rank is to blame."""
        family = CounterMetricFamily("peg:engine_failures", "First causes of failures.", labels=["kind", "rank"])
        counts = {(kind, None): 0 for kind in CauseKind} | dict(vitals.failures)
        for (kind, rank), count in counts.items():
            family.add_metric([kind, "" if rank is None else str(rank)], count)
        return family

    def _heartbeats(self, vitals: Vitals) -> Metric:
        now = time.monotonic()
        text = "How long a rank has been where it is."
        family = GaugeMetricFamily("peg:rank_heartbeat_age_seconds", text, labels=["rank"])
        for beat in vitals.heartbeats:
            family.add_metric([str(beat.rank)], now - beat.since_s)
        return family
