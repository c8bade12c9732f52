"""What a node has given out and must get back: leases, pins, reservations, slots, transfers."""

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Protocol

from kvferry.node.counters import NodeStatistics

WAIT_S = 60.0
_POLL_S = 0.005


class Watched(Protocol):
    """What is used of ``Node``."""

    def statistics(self) -> NodeStatistics:
        """A snapshot."""
        ...

    def check(self) -> None:
        """Raise BrokenError when the pool's books do not balance."""


@dataclass(frozen=True, slots=True)
class Holdings:
    """A snapshot. Everything here is 0 at a node that nobody uses.

    loads: leases of lookups' answers. reservations: slots being filled. overdue_reservations: slots whose
    reservation expired while their engine may still write. unlinked_parts: slots waiting for their last pin.
    """

    loads: int
    fetches: int
    pins: int
    reservations: int
    overdue_reservations: int
    unlinked_parts: int
    writeback_parts: int
    tier_bytes: int

    @classmethod
    def of(cls, statistics: NodeStatistics | Mapping[str, Any]) -> "Holdings":
        """From a node's statistics, or from the document that ``kvferry status --json`` prints."""
        if isinstance(statistics, NodeStatistics):
            statistics = asdict(statistics)
        held, tier = statistics["catalogue"], statistics["tier"]
        return cls(
            loads=statistics["loads"],
            fetches=statistics["fetches"],
            pins=held["pins"],
            reservations=held["filling_parts"],
            overdue_reservations=statistics["overdue_reservations"],
            unlinked_parts=held["unlinked_parts"],
            writeback_parts=statistics["writeback_backlog_parts"],
            tier_bytes=tier["inflight_bytes"] if tier else 0,
        )

    def beyond(self, before: "Holdings") -> list[str]:
        """What differs from ``before``, in words."""
        return [
            f"{field.name} {now} instead of {then}"
            for field in fields(self)
            if (now := getattr(self, field.name)) != (then := getattr(before, field.name))
        ]


NOTHING = Holdings(0, 0, 0, 0, 0, 0, 0, 0)


def wait_for_baseline(
    read: Callable[[], Holdings], baseline: Holdings = NOTHING, *, timeout_s: float | None = None
) -> None:
    """Wait until ``read()`` gives the baseline again. AssertionError, naming each difference, otherwise.

    timeout_s: WAIT_S if not given, here and below.
    """
    give_up = time.monotonic() + (WAIT_S if timeout_s is None else timeout_s)
    while difference := read().beyond(baseline):
        if time.monotonic() >= give_up:
            raise AssertionError("the node does not get back: " + ", ".join(difference))
        time.sleep(_POLL_S)


def at_rest(node: Watched, *, timeout_s: float | None = None) -> None:
    """Wait until the node holds nothing; then its books must balance and no defect may be counted."""
    wait_for_baseline(lambda: Holdings.of(node.statistics()), timeout_s=timeout_s)
    _check_books(node)


@contextlib.contextmanager
def returns_everything(node: Watched, *, timeout_s: float | None = None) -> Iterator[None]:
    """AssertionError when, after the body, the node holds other than before it, however long one waits."""
    before = Holdings.of(node.statistics())
    yield
    wait_for_baseline(lambda: Holdings.of(node.statistics()), before, timeout_s=timeout_s)
    _check_books(node)


def _check_books(node: Watched) -> None:
    node.check()
    defects = node.statistics().defects
    if defects:
        raise AssertionError(f"the node counted {defects} defects: see its log")
