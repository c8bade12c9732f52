"""Serves the metrics of a process in Prometheus's text format: on loopback, unless told otherwise.

Every user of the host can connect to a loopback port, so what connections may cost is bounded: how many
there are, and how long one may be silent. The page has no password, and shows numbers and names, no content.
"""

import contextlib
import errno
import ipaddress
import socket
import socketserver
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Generic
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from prometheus_client import CollectorRegistry, make_wsgi_app
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from kvferry.errors import MisconfiguredError
from kvferry.observe.metric import Kind, Metric, S

LOOPBACK = "127.0.0.1"
MAX_SCRAPES = 8
"""Connections at a time: one more, and the oldest makes room."""
SILENT_S = 5.0
JOIN_S = 5.0


class StatisticsCollector(Collector, Generic[S]):
    """Turns one snapshot per scrape into metric families."""

    def __init__(self, statistics: Callable[[], S], metrics: Sequence[Metric[S]]) -> None:
        self._statistics = statistics
        self._metrics = metrics

    def describe(self) -> Iterator[CounterMetricFamily | GaugeMetricFamily]:
        """Nothing: registering must not need a snapshot."""
        return iter(())

    def collect(self) -> Iterator[CounterMetricFamily | GaugeMetricFamily]:
        """All of them, from one and the same snapshot."""
        snapshot = self._statistics()
        for metric in self._metrics:
            kind = CounterMetricFamily if metric.kind is Kind.COUNTER else GaugeMetricFamily
            family = kind(metric.name, metric.help, labels=metric.labels)
            for labels, value in metric.read(snapshot):
                family.add_metric(labels, value)
            yield family


class _Handler(WSGIRequestHandler):
    timeout = SILENT_S

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002  (the base class's name)
        """Nothing: a scrape is no event."""


class _Server(socketserver.ThreadingMixIn, WSGIServer):
    """A thread per connection, and few of them."""

    daemon_threads = True
    block_on_close = False

    def __init__(self, address: tuple[str, int], family: socket.AddressFamily) -> None:
        self.address_family = family
        self._lock = threading.Lock()
        self._open: dict[socket.socket, None] = {}  # oldest first
        super().__init__(address, _Handler)

    def server_bind(self) -> None:
        """Without looking up this host's name, as the base class does."""
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = self.server_address[:2]  # type: ignore[assignment]
        self.setup_environ()

    def process_request(self, request: Any, client_address: Any) -> None:
        with self._lock:
            if len(self._open) >= MAX_SCRAPES:
                self._hang_up(next(iter(self._open)))
            self._open[request] = None
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        with self._lock:
            self._open.pop(request, None)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Nothing: a client that went away is no event either."""

    def hang_up_all(self) -> None:
        """End what is still open; their threads end with it."""
        with self._lock:
            for request in list(self._open):
                self._hang_up(request)

    def _hang_up(self, request: socket.socket) -> None:
        """Its own thread closes it."""
        self._open.pop(request, None)
        with contextlib.suppress(OSError):
            request.shutdown(socket.SHUT_RDWR)


class MetricsPage:
    """The HTTP server; ``close`` joins its thread."""

    def __init__(
        self,
        statistics: Callable[[], S],
        *,
        metrics: Sequence[Metric[S]],
        port: int,
        host: str = LOOPBACK,
    ) -> None:
        """host: an address of this machine. Raises MisconfiguredError when it or the port cannot be had."""
        registry = CollectorRegistry(auto_describe=False)
        registry.register(StatisticsCollector(statistics, metrics))
        six = ipaddress.ip_address(host).version == 6
        try:
            self._server = _Server((host, port), socket.AF_INET6 if six else socket.AF_INET)
        except OSError as error:
            if error.errno == errno.EADDRNOTAVAIL:
                raise MisconfiguredError(
                    f"metrics host {host} is no address of this machine; choose another --metrics-host"
                ) from error
            why = "is in use" if error.errno == errno.EADDRINUSE else f"cannot be used ({error.strerror})"
            raise MisconfiguredError(
                f"metrics port {port} {why}; choose another --metrics-port, or 0 for none"
            ) from error
        self._server.set_app(make_wsgi_app(registry))
        self.url = f"http://{f'[{host}]' if six else host}:{self._server.server_port}/metrics"
        self._thread = threading.Thread(
            target=self._server.serve_forever, name="kvferry-metrics", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """Stop serving. Idempotent."""
        self._server.shutdown()
        self._server.server_close()
        self._server.hang_up_all()
        self._thread.join(JOIN_S)
