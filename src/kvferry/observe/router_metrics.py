"""The metrics of a router."""

from collections.abc import Callable, Mapping

from kvferry.observe.metric import Kind, Metric, Sample, bounded
from kvferry.observe.router_feed_metrics import ROUTER_FEED_METRICS
from kvferry.observe.router_pilot_metrics import ROUTER_PILOT_METRICS
from kvferry.router.app import RouterStatistics

Row = Metric[RouterStatistics]


def _gauge(name: str, text: str, read: Callable[[RouterStatistics], float]) -> Row:
    return Metric(f"kvferry_router_{name}", Kind.GAUGE, text, (), lambda router: [((), read(router))])


def _counter(name: str, text: str, read: Callable[[RouterStatistics], float]) -> Row:
    return Metric(f"kvferry_router_{name}", Kind.COUNTER, text, (), lambda router: [((), read(router))])


def _by(
    label: str, kind: Kind, name: str, text: str, read: Callable[[RouterStatistics], Mapping[str, float]]
) -> Row:
    def samples(router: RouterStatistics) -> list[Sample]:
        return bounded(read(router))

    return Metric(f"kvferry_router_{name}", kind, text, (label,), samples)


def _load(name: str, kind: Kind, text: str, field: str) -> Row:
    """Of each worker, as the choice counts it."""

    def read(router: RouterStatistics) -> dict[str, float]:
        return {url: float(load.get(field, 0)) for url, load in router.loads.items()}

    return _by("worker", kind, f"worker_{name}", text, read)


def _words(values: Mapping[int, int]) -> dict[str, float]:
    return {str(key): value for key, value in values.items()}


ROUTER_METRICS: tuple[Row, ...] = (
    Metric(
        "kvferry_router_info",
        Kind.GAUGE,
        "1; the version is its label.",
        ("version",),
        lambda router: [((router.version,), 1)],
    ),
    _gauge("uptime_seconds", "Since this router process started.", lambda router: router.uptime_s),
    _gauge("connections", "Of clients.", lambda router: router.proxy.clients),
    _gauge("inflight_requests", "Being read, waiting or at a worker.", lambda router: router.proxy.in_flight),
    _gauge("waiting_requests", "Of them, without a place at a worker.", lambda router: router.proxy.waiting),
    _gauge("body_bytes", "Memory for bodies of requests in flight.", lambda router: router.proxy.held_bytes),
    _counter("requests", "Requests that came.", lambda router: router.proxy.requests),
    _by(
        "how",
        Kind.COUNTER,
        "ended_requests",
        "Requests that ended: done, refused (4xx), aborted (the client left), failed.",
        lambda router: router.proxy.ended,
    ),
    _by(
        "status",
        Kind.COUNTER,
        "own_answers",
        "Requests that the router answered itself, by status.",
        lambda router: _words(router.proxy.answers),
    ),
    _by(
        "event",
        Kind.COUNTER,
        "events",
        "What went otherwise than it should: see docs/router.md.",
        lambda router: router.proxy.events,
    ),
    _by(
        "worker",
        Kind.GAUGE,
        "worker_inflight_requests",
        "Requests at a worker, by its URL.",
        lambda router: {url: float(now[0]) for url, now in router.proxy.workers.items()},
    ),
    _by(
        "worker",
        Kind.GAUGE,
        "worker_connections",
        "Open connections to a worker.",
        lambda router: {url: float(now[1]) for url, now in router.proxy.workers.items()},
    ),
    _load("waiting_tokens", Kind.GAUGE, "Prompt tokens that it has to compute yet.", "waiting_tokens"),
    _load("chosen_requests", Kind.COUNTER, "Requests that were sent there.", "chosen"),
    _load("prompt_tokens", Kind.COUNTER, "Of prompts, where answers say it.", "prompt_tokens"),
    _load(
        "expected_hit_tokens",
        Kind.COUNTER,
        "Of these, expected to be cached.",
        "hit_tokens_expected",
    ),
    _load("seen_hit_tokens", Kind.COUNTER, "Of these, cached, as answers say.", "hit_tokens_seen"),
    *ROUTER_FEED_METRICS,
    *ROUTER_PILOT_METRICS,
)
