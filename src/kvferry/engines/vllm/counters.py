"""What the connector counts. One list for vLLM's log line, its /metrics and docs/engines/vllm.md."""

COUNTERS: dict[str, str] = {
    "lookups": "prefixes asked for",
    "hits": "lookups that found at least one chunk",
    "misses": "lookups that found nothing, with every tier answering",
    "unanswered": "lookups that got no answer, or one that says a tier or the node is down",
    "lookup_seconds": "seconds that requests waited for the node's answers",
    "lookup_lost_seconds": "of them, waits for answers that brought nothing to load",
    "cheaper": "lookups answered with: recomputing is quicker",
    "ineligible": "requests that cannot use a cached prefix",
    "capped": "requests whose own `max_load_tokens` left nothing to ask for",
    "loads": "loads begun",
    "loads_failed": "loads that ended early, whose rest was recomputed",
    "loaded_tokens": "prompt tokens loaded instead of computed",
    "loaded_bytes": "bytes copied into the engine's blocks, all ranks",
    "load_seconds": "seconds that loads took, summed over ranks",
    "load_lost_seconds": "of them, those of loads that failed, wholly or in part",
    "stored_chunks": "chunks put into the node",
    "stored_bytes": "bytes copied out of the engine's blocks, all ranks",
    "declined_chunks": "chunks the node had no room for",
}

FAILURES = "failures"
FAILURES_TEXT = "lookups and loads that failed, wholly or in part, by `reason`"


def failure(reason: str) -> str:
    """Under which name a failure is counted, apart from those of COUNTERS. reason: one of a few words."""
    return f"{FAILURES}:{reason}"


def failure_reason(name: str) -> str | None:
    """The reason in such a name; None for a name of COUNTERS."""
    kind, _, reason = name.partition(":")
    return reason if kind == FAILURES else None


class Counts:
    """Counts since they were last taken. Used in one thread."""

    def __init__(self) -> None:
        self._values: dict[str, float] = {}

    def add(self, name: str, amount: float = 1) -> None:
        """Count something of COUNTERS, or a ``failure``."""
        self._values[name] = self._values.get(name, 0) + amount

    def take(self) -> dict[str, float]:
        """Hand over the interval's counts and start a new one."""
        taken, self._values = self._values, {}
        return {name: amount for name, amount in taken.items() if amount}
