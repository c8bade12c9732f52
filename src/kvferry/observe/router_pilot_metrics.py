"""The metrics of a router's workers and pilots."""

from collections import Counter
from collections.abc import Callable, Iterator

from kvferry.observe.metric import Kind, Metric, Sample
from kvferry.router.app import RouterStatistics
from kvferry.router.health import State
from kvferry.router.pilots import MeasuredSnapshot

Row = Metric[RouterStatistics]
_QUANTILES = (0.5, 0.99)


def _states(router: RouterStatistics) -> list[Sample]:
    states = Counter(worker.state for worker in router.workers)
    return [((state.value,), states[state]) for state in State if state is not State.REMOVED]


def _failures(router: RouterStatistics) -> list[Sample]:
    return [((what.value,), count) for what, count in router.worker_failures.items()]


def _counted(name: str, text: str, read: Callable[[MeasuredSnapshot], float]) -> Row:
    def samples(router: RouterStatistics) -> list[Sample]:
        return [((told.kind, told.pool or "default"), read(told)) for told in router.pilots]

    return Metric(f"kvferry_router_pilot_{name}", Kind.COUNTER, text, ("kind", "pool"), samples)


def _quantiles(name: str, text: str, read: Callable[[MeasuredSnapshot], tuple[float, ...]]) -> Row:
    def samples(router: RouterStatistics) -> Iterator[Sample]:
        for told in router.pilots:
            ordered = sorted(read(told))
            for q in _QUANTILES if ordered else ():
                at = min(len(ordered) - 1, int(q * len(ordered)))
                yield (told.kind, told.pool or "default", str(q)), ordered[at]

    return Metric(f"kvferry_router_pilot_{name}", Kind.GAUGE, text, ("kind", "pool", "quantile"), samples)


def _ended(router: RouterStatistics) -> Iterator[Sample]:
    for told in router.pilots:
        for how, count in told.ended.items():
            yield (told.kind, told.pool or "default", how), count


ROUTER_PILOT_METRICS: tuple[Row, ...] = (
    Metric(
        "kvferry_router_workers", Kind.GAUGE, "Workers by state: see docs/router.md.", ("state",), _states
    ),
    Metric(
        "kvferry_router_worker_failures",
        Kind.COUNTER,
        "What requests met at workers, by cause.",
        ("cause",),
        _failures,
    ),
    Metric(
        "kvferry_router_pilot_requests",
        Kind.COUNTER,
        "Requests of a pilot by kind (split, original, mirror), pool and how they ended.",
        ("kind", "pool", "how"),
        _ended,
    ),
    _quantiles("ttft_seconds", "To a stream's first token; of the newest 4,096.", lambda told: told.ttft_s),
    _quantiles(
        "stream_tokens_per_second",
        "Of a stream after its first token; of the newest 4,096.",
        lambda told: told.tokens_per_s,
    ),
    _quantiles("answer_seconds", "To the end of an answer; of the newest 4,096.", lambda told: told.total_s),
    _counted("prompt_tokens", "As workers report them.", lambda told: told.prompt_tokens),
    _counted("cached_tokens", "Of them, those not computed.", lambda told: told.cached_tokens),
    _counted("skipped_copies", "Not made: too many in flight, or no worker.", lambda told: told.skipped),
)
