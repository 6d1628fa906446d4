"""A histogram that costs a token next to nothing."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from itertools import accumulate

from prometheus_client.metrics_core import HistogramMetricFamily


class Histogram:
    """Counts values by bucket; `bounds` are the largest values that each bucket holds. Owned by the loop.

    prometheus_client's own takes a lock and walks the buckets for each value: ten times as long.
    """

    def __init__(self, name: str, text: str, bounds: tuple[float, ...]) -> None:
        self._name = name
        self._text = text
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        """Count a value, several times over where so many were alike."""
        self._counts[bisect_left(self._bounds, value)] += times
        self._sum += value * times

    def family(self, labels: Mapping[str, str]) -> HistogramMetricFamily:
        """The histogram as Prometheus reads it."""
        bounds = [*(str(float(bound)) for bound in self._bounds), "+Inf"]
        buckets = list(zip(bounds, map(float, accumulate(self._counts)), strict=True))
        family = HistogramMetricFamily(self._name, self._text, labels=list(labels))
        family.add_metric(list(labels.values()), buckets, self._sum)
        return family
