"""Which parts' recency is due for a refresh in the tier behind memory. Pure.

What host memory serves is never read from Valkey, and would look cold there: it is touched, at most
once per interval and chunk, and at most so many chunks per call.
"""

from collections import OrderedDict
from collections.abc import Sequence

REFRESH_INTERVAL_S = 30.0
MAX_REMEMBERED = 65536
MAX_PER_CALL = 2048


class RecencyRefresh:
    """Remembers when each chunk was refreshed last."""

    def __init__(self) -> None:
        self._last: OrderedDict[tuple[bytes, bytes], float] = OrderedDict()

    def knows(self, namespace: bytes, chunk: bytes) -> bool:
        """Whether it counted as refreshed lately."""
        return (namespace, chunk) in self._last

    def due(self, namespace: bytes, chunks: Sequence[bytes], now: float) -> list[bytes]:
        """The chunks to refresh now, in the order given; they count as refreshed."""
        due: list[bytes] = []
        for chunk in chunks:
            last = self._last.get((namespace, chunk))
            if last is not None and now - last < REFRESH_INTERVAL_S:
                continue
            self._last[namespace, chunk] = now
            self._last.move_to_end((namespace, chunk))
            due.append(chunk)
            if len(due) == MAX_PER_CALL:
                break
        while len(self._last) > MAX_REMEMBERED:
            self._last.popitem(last=False)
        return due
