"""The connector's counters, in the form vLLM carries from its processes to its log and /metrics."""

from dataclasses import dataclass, field
from typing import Any

from prometheus_client import Counter
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

# name: what it counts. One list for the log line, /metrics and docs/engines/vllm.md.
COUNTERS: dict[str, str] = {
    "lookups": "prefixes asked for",
    "hits": "lookups that found at least one chunk",
    "misses": "lookups that found nothing, with every tier answering",
    "unanswered": "lookups that got no answer, or one that says a tier or the node is down",
    "cheaper": "lookups answered with: recomputing is quicker",
    "ineligible": "requests that cannot use a cached prefix",
    "loads": "loads begun",
    "loads_failed": "loads that ended early, whose rest was recomputed",
    "loaded_tokens": "prompt tokens loaded instead of computed",
    "loaded_bytes": "bytes copied into the engine's blocks, all ranks",
    "load_seconds": "seconds that loads took, on the slowest rank",
    "stored_chunks": "chunks put into the node",
    "stored_bytes": "bytes copied out of the engine's blocks, all ranks",
    "declined_chunks": "chunks the node had no room for",
    "errors": "defects of the connector that switched it off",
}


@dataclass
class KvferryStats(KVConnectorStats):  # type: ignore[misc]
    """Counts since the last report."""

    data: dict[str, Any] = field(default_factory=dict)

    def reset(self) -> None:
        """Start a new interval."""
        self.data = {}

    def add(self, name: str, amount: float = 1) -> None:
        """Count something of COUNTERS."""
        self.data[name] = self.data.get(name, 0) + amount

    def aggregate(self, other: KVConnectorStats) -> "KvferryStats":
        """Add what another process or interval counted."""
        for name, amount in other.data.items():
            self.add(name, amount)
        return self

    def reduce(self) -> dict[str, int | float]:
        """For vLLM's log line: what is not zero."""
        return {name: self.data[name] for name in COUNTERS if self.data.get(name)}

    def is_empty(self) -> bool:
        """Whether nothing was counted."""
        return not any(self.data.values())

    def take(self) -> "KvferryStats | None":
        """Hand over the interval's counts and start a new one; None when there are none."""
        if self.is_empty():
            return None
        taken = KvferryStats(self.data)
        self.data = {}
        return taken


class KvferryPromMetrics(KVConnectorPromMetrics):  # type: ignore[misc]
    """``vllm:kvferry_<name>`` counters on the engine's own /metrics."""

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

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Add one report."""
        labels = self.per_engine_labelvalues.get(engine_idx)
        if labels is None:
            return
        for name, amount in transfer_stats_data.items():
            if name in self._counters and amount > 0:
                self._counters[name].labels(*labels).inc(amount)
