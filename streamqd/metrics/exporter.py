"""Render the table of metrics for Prometheus. No other module imports prometheus_client."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector

from streamqd.metrics.table import METRICS, Metric
from streamqd.metrics.view import MetricsView


class Exporter(Collector):
    """Renders the table of metrics with the figures of one view."""

    def __init__(self, view: MetricsView) -> None:
        self._view = view
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)

    def render(self, accept: str = "") -> tuple[bytes, str]:
        """Return the metrics as text and their content type.

        `accept` is the Accept header of the request, which determines the format.
        """
        encode, content_type = choose_encoder(accept)
        return encode(self._registry), content_type

    def collect(self) -> Iterator[Family]:
        """Yield every metric in the table. prometheus_client calls this method at each scrape."""
        for metric in METRICS:
            if metric.kind == "histogram":
                yield _histogram_family(metric, self._view)
            else:
                kind = CounterMetricFamily if metric.kind == "counter" else GaugeMetricFamily
                family = kind(metric.name, metric.help, labels=metric.labels)
                for labels, value in metric.read(self._view):
                    family.add_metric(labels, value)
                yield family


def _histogram_family(metric: Metric, view: MetricsView) -> Family:
    family = HistogramMetricFamily(metric.name, metric.help, labels=metric.labels)
    for labels, (bounds, counts, seconds) in metric.read(view):
        total = 0
        buckets = []
        for bound, count in zip(bounds, counts, strict=False):
            total += count
            if bound:
                buckets.append((repr(bound), float(total)))
        buckets.append(("+Inf", float(total + counts[-1])))
        family.add_metric(labels, buckets, sum_value=seconds)
    return family
