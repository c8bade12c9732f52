"""The connector's counters in the form vLLM carries from its processes to its log and /metrics."""

from dataclasses import dataclass, field
from typing import Any

from prometheus_client import Counter
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

from kvferry.engines.vllm.counters import COUNTERS, FAILURES, FAILURES_TEXT, failure_reason


@dataclass
class KvferryStats(KVConnectorStats):  # type: ignore[misc]
    """Counts of one interval."""

    data: dict[str, Any] = field(default_factory=dict)

    def reset(self) -> None:
        """Start a new interval."""
        self.data = {}

    def aggregate(self, other: KVConnectorStats) -> "KvferryStats":
        """Add what another process or interval counted."""
        for name, amount in other.data.items():
            self.data[name] = self.data.get(name, 0) + amount
        return self

    def reduce(self) -> dict[str, int | float]:
        """For vLLM's log line: what is not zero."""
        failures = sorted(name for name in self.data if failure_reason(name))
        return {name: self.data[name] for name in (*COUNTERS, *failures) if self.data.get(name)}

    def is_empty(self) -> bool:
        """Whether nothing was counted."""
        return not any(self.data.values())


class KvferryPromMetrics(KVConnectorPromMetrics):  # type: ignore[misc]
    """``vllm:kvferry_<name>`` counters on the engine's own /metrics; failures by reason."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: dict[type[Any], type[Any]],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        counter_class = metric_types[Counter]
        self._counters = {
            name: counter_class(
                name=f"vllm:kvferry_{name}", documentation=f"kvferry: {text}.", labelnames=labelnames
            )
            for name, text in COUNTERS.items()
        }
        self._failures = counter_class(
            name=f"vllm:kvferry_{FAILURES}",
            documentation=f"kvferry: {FAILURES_TEXT}.",
            labelnames=[*labelnames, "reason"],
        )

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Add one report."""
        labels = self.per_engine_labelvalues.get(engine_idx)
        if labels is None:
            return
        for name, amount in transfer_stats_data.items():
            reason = failure_reason(name)
            if name in self._counters and amount > 0:
                self._counters[name].labels(*labels).inc(amount)
            elif reason and amount > 0:
                self._failures.labels(*labels, reason).inc(amount)
