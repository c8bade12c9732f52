"""Serves the metrics of a node in Prometheus's text format, on loopback."""

import errno
from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from kvferry.errors import MisconfiguredError
from kvferry.node.counters import NodeStatistics
from kvferry.observe.metrics import METRICS, Kind

LOOPBACK = "127.0.0.1"
JOIN_S = 5.0


class StatisticsCollector(Collector):
    """Turns one snapshot per scrape into metric families."""

    def __init__(self, statistics: Callable[[], NodeStatistics]) -> None:
        self._statistics = statistics

    def describe(self) -> Iterator[CounterMetricFamily | GaugeMetricFamily]:
        """Nothing: registering must not need a snapshot."""
        return iter(())

    def collect(self) -> Iterator[CounterMetricFamily | GaugeMetricFamily]:
        """All of ``METRICS``, from one and the same snapshot."""
        snapshot = self._statistics()
        for metric in METRICS:
            kind = CounterMetricFamily if metric.kind is Kind.COUNTER else GaugeMetricFamily
            family = kind(metric.name, metric.help, labels=metric.labels)
            for labels, value in metric.read(snapshot):
                family.add_metric(labels, value)
            yield family


class MetricsPage:
    """The HTTP server; ``close`` joins its thread."""

    def __init__(self, statistics: Callable[[], NodeStatistics], *, port: int) -> None:
        """Raises MisconfiguredError when the port is taken or not allowed."""
        registry = CollectorRegistry(auto_describe=False)
        registry.register(StatisticsCollector(statistics))
        try:
            self._server, self._thread = start_http_server(port, addr=LOOPBACK, registry=registry)
        except OSError as error:
            why = "is in use" if error.errno == errno.EADDRINUSE else f"cannot be used ({error.strerror})"
            raise MisconfiguredError(
                f"metrics port {port} {why}; choose another --metrics-port, or 0 for none"
            ) from error
        self.url = f"http://{LOOPBACK}:{self._server.server_port}/metrics"

    def close(self) -> None:
        """Stop serving. Idempotent."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(JOIN_S)
