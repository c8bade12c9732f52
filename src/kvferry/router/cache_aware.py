"""The ``cache_aware`` policy of vllm-router and SGLang's gateway, to compare with. Pure.

    requests unbalanced (most - fewest > ABS and most > REL x fewest) ──► the worker with the fewest
    else a worker whose past prompts share more than THRESHOLD of this one ──► it
    else ──► the worker whose record of past prompts is smallest

Theirs is a tree of characters; here prefixes end where ``keys`` has them end. Load is requests in flight.
Nothing is known of what a worker evicted or of what tiers share.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from kvferry.router.contract import Asked, Key
from kvferry.router.policies import Counting

MAX_NAMES = 1 << 19


@dataclass(frozen=True, slots=True)
class Thresholds:
    """Defaults are those of vllm-router."""

    match_share: float = 0.3
    requests_apart: int = 64
    requests_ratio: float = 1.5


class CacheAware(Counting):
    """A ``contract.Guide``."""

    name = "cache_aware"

    def __init__(self, thresholds: Thresholds | None = None, *, limit: int = MAX_NAMES) -> None:
        super().__init__()
        self._thresholds = thresholds or Thresholds()
        self._limit = limit
        self._names: OrderedDict[bytes, dict[str, int]] = OrderedDict()  # what each worker's record has of it
        self._recorded: dict[str, int] = {}

    def choose(self, asked: Asked, among: Sequence[str], now: float) -> str:
        """See ``Counting``."""
        del now
        chosen = self._pick(asked, among)
        self._record(asked.keys, chosen)
        return chosen

    def worker_lost(self, worker: str) -> None:
        """See ``Guide``."""
        super().worker_lost(worker)
        self._recorded.pop(worker, None)
        for name in [name for name, workers in self._names.items() if worker in workers]:
            del self._names[name][worker]
            if not self._names[name]:
                del self._names[name]

    def _pick(self, asked: Asked, among: Sequence[str]) -> str:
        requests = [self.loads.of(worker).requests for worker in among]
        most, fewest = max(requests), min(requests)
        bounds = self._thresholds
        if most - fewest > bounds.requests_apart and most > bounds.requests_ratio * fewest:
            return among[requests.index(fewest)]
        if asked.keys:
            for key in reversed(asked.keys):
                if key.length <= bounds.match_share * asked.keys[-1].length:
                    break
                for worker in reversed(self._names.get(key.name, {})):
                    if worker in among:
                        return worker
        return min(among, key=lambda worker: self._recorded.get(worker, 0))

    def _record(self, keys: Sequence[Key], worker: str) -> None:
        before = 0
        for key in keys:
            workers = self._names.setdefault(key.name, {})
            self._names.move_to_end(key.name)
            if worker not in workers:
                workers[worker] = key.length - before
                self._recorded[worker] = self._recorded.get(worker, 0) + workers[worker]
            before = key.length
        while len(self._names) > self._limit:
            for other, length in self._names.popitem(last=False)[1].items():
                if other in self._recorded:
                    self._recorded[other] -= length
