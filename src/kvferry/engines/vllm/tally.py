"""The parts of one load on one rank, counted until the last has ended: one result for the engine."""

from kvferry.client.messages import Reason
from kvferry.engines.vllm.messages import LoadResult, LoadSpec


class LoadTally:
    """parts: how many jobs make up the load. whole: nothing of it is of use unless all of it came."""

    def __init__(self, spec: LoadSpec, *, parts: int, whole: bool) -> None:
        self._spec = spec
        self._left = parts
        self._whole = whole
        self._results: list[LoadResult] = []
        self._failed: list[int] = []

    def add(self, result: LoadResult, failed: list[int]) -> bool:
        """One part has ended; ``failed``: blocks without what was promised. Whether it was the last."""
        self._left -= 1
        self._results.append(result)
        self._failed += failed
        return not self._left

    def result(self) -> tuple[LoadResult, list[int]]:
        """Of the whole load, and the blocks that do not hold what was promised."""
        nbytes = sum(result.nbytes for result in self._results)
        seconds = max(result.seconds for result in self._results)
        reason = next((r.reason for r in self._results if r.reason != Reason.COMPLETE), str(Reason.COMPLETE))
        if reason == Reason.COMPLETE:
            return LoadResult(self._spec.request_id, self._spec.chunks, nbytes, seconds, reason), []
        if self._whole:
            return LoadResult(self._spec.request_id, 0, nbytes, seconds, reason), self._spec.blocks
        chunks = min(result.chunks for result in self._results)
        return LoadResult(self._spec.request_id, chunks, nbytes, seconds, reason), self._failed
