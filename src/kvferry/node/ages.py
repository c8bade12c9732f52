"""When the pool's marks were made: the pool itself knows an order and no time. Pure."""

from bisect import bisect_right

MIN_STEP_S = 1.0
MAX_STEPS = 4096


class Ages:
    """Marks with their times, ascending; the further back, the sparser."""

    def __init__(self) -> None:
        self._times: list[float] = []
        self._marks: list[int] = []
        self._latest: tuple[float, int] | None = None

    def note(self, now: float, mark: int) -> None:
        """By ``now`` all below ``mark`` is stamped, and nothing more until the next note."""
        if self._latest is not None and (not self._times or now >= self._times[-1] + MIN_STEP_S):
            self._keep(*self._latest)
        self._latest = now, mark

    def _keep(self, when: float, mark: int) -> None:
        self._times.append(when)
        self._marks.append(mark)
        if len(self._times) > MAX_STEPS:
            half = MAX_STEPS // 2
            self._times[:half] = self._times[:half:2]
            self._marks[:half] = self._marks[:half:2]

    def mark_at(self, when: float) -> int:
        """What is stamped below this mark was stamped by then for certain; 0 when nothing is known to be."""
        if self._latest is not None and self._latest[0] <= when:
            return self._latest[1]
        at = bisect_right(self._times, when)
        return self._marks[at - 1] if at else 0
