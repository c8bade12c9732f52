"""What a metric is: a row that says what a part of a snapshot is called in Prometheus.

Names start with ``kvferry_`` and end in their unit; counters carry Prometheus's ``_total`` behind it.
The collector, the documentation's tables and the tests all read these rows: ``metrics`` has a node's,
``keeper_metrics`` a keeper's.
"""

import enum
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

# Distinct values a label may take; what comes beyond is added up as "other".
MAX_LABEL_VALUES = 32

S = TypeVar("S")

Sample = tuple[tuple[str, ...], float]


class Kind(enum.Enum):
    """What Prometheus may do with the values: rates of counters, gauges as they are."""

    COUNTER = "counter"
    GAUGE = "gauge"


@dataclass(frozen=True, slots=True)
class Metric(Generic[S]):
    """One row. labels: names of its labels. read: the samples in a snapshot, label values first."""

    name: str
    kind: Kind
    help: str
    labels: tuple[str, ...]
    read: Callable[[S], Iterable[Sample]]

    @property
    def exposed_name(self) -> str:
        """As it appears on the metrics page."""
        return self.name + ("_total" if self.kind is Kind.COUNTER else "")


def bounded(values: Mapping[str, float]) -> list[Sample]:
    """The largest MAX_LABEL_VALUES - 1 by themselves, the rest as ``other``."""
    ranked = sorted(values.items(), key=lambda item: (-item[1], item[0]))
    kept, rest = ranked, ranked[:0]
    if len(ranked) > MAX_LABEL_VALUES:
        kept, rest = ranked[: MAX_LABEL_VALUES - 1], ranked[MAX_LABEL_VALUES - 1 :]
    samples: list[Sample] = [((key,), value) for key, value in kept]
    if rest:
        samples.append((("other",), sum(value for _, value in rest)))
    return samples
