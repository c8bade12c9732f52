"""The lengths that a load may have, and how long each would take. Pure.

Where every chunk is needed whole, any number of chunks from the head is a length, and ``Runs`` finds the few
that are worth a look. Where a boundary needs parts of the last chunks before it only, some lengths are
impossible and the bytes of the others follow no line: ``Listed`` looks at every one that it is given.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from kvferry.costs.rates import UNKNOWN_RATE, TierRate

PROBE_CHUNKS = 4

Rates = Mapping[str, TierRate]


@dataclass(frozen=True, slots=True)
class TierRun:
    """Consecutive chunks of a prefix that lie in one tier. chunk_bytes: all parts of one chunk."""

    tier: str
    chunks: int
    chunk_bytes: int


@dataclass(frozen=True, slots=True)
class Length:
    """So many chunks from the head can be loaded. tier_bytes: what each tier has to bring for it."""

    chunks: int
    tier_bytes: Mapping[str, int]


class Trial(NamedTuple):
    """A length that tries ``tiers``, which deserve it. No other measured tier brings more for it."""

    chunks: int
    tiers: tuple[str, ...]


class Lengths(Protocol):
    """All of one found prefix."""

    def longest(self, most: int) -> int:
        """The longest of at most ``most`` chunks; 0 for none."""
        ...

    def tier_bytes(self, chunks: int) -> Mapping[str, int]:
        """What each tier has to bring for that length."""
        ...

    def seconds(self, chunks: int, rates: Rates) -> float | None:
        """Time to load that length; tiers work side by side. None when no tier is known."""
        ...

    def fitting(self, most: int, rates: Rates, *, within_s: float) -> int:
        """The longest of at most ``most`` chunks that is predicted to be here in time; 0 for none."""
        ...

    def candidates(
        self, fitting: int, rates: Rates, *, whole: int, queued_s: float, cap_s: float
    ) -> set[int]:
        """Lengths up to ``fitting``, among which the best is. whole: chunks that the prompt fills."""
        ...

    def trial(self, after: int, most: int, rates: Rates) -> Trial | None:
        """A longer length than ``after`` that tries a tier that deserves it."""
        ...


class Runs:
    """Any length. Longer ones never end sooner."""

    def __init__(self, runs: Sequence[TierRun]) -> None:
        self._runs = runs

    def longest(self, most: int) -> int:
        """See ``Lengths``."""
        return min(sum(run.chunks for run in self._runs), most)

    def tier_bytes(self, chunks: int) -> Mapping[str, int]:
        """See ``Lengths``."""
        wanted: dict[str, int] = {}
        for run, taken in self._taken(chunks):
            wanted[run.tier] = wanted.get(run.tier, 0) + taken * run.chunk_bytes
        return wanted

    def seconds(self, chunks: int, rates: Rates) -> float | None:
        """See ``Lengths``."""
        return _seconds(self.tier_bytes(chunks), rates)

    def fitting(self, most: int, rates: Rates, *, within_s: float) -> int:
        """See ``Lengths``."""
        if (self.seconds(most, rates) or 0.0) <= within_s:
            return most
        low, high = 0, most  # low fits, high does not
        while high - low > 1:
            middle = (low + high) // 2
            if (self.seconds(middle, rates) or 0.0) <= within_s:
                low = middle
            else:
                high = middle
        return low

    def candidates(
        self, fitting: int, rates: Rates, *, whole: int, queued_s: float, cap_s: float
    ) -> set[int]:
        """See ``Lengths``. Ends of runs, and where a load stops being hidden behind work or another tier."""
        del cap_s  # what is shorter fits as well
        found = {fitting, min(whole, fitting), self.fitting(fitting, rates, within_s=queued_s)}
        end = 0
        for run in self._runs:
            end += run.chunks
            if end < fitting:
                hidden = self.seconds(end, rates) or 0.0  # what other tiers bring in the same time
                found |= {end, self.fitting(fitting, rates, within_s=hidden)}
        return found

    def trial(self, after: int, most: int, rates: Rates) -> Trial | None:
        """See ``Lengths``. The tier of the first chunk that is not to be loaded, and what follows."""
        most = min(most, after + PROBE_CHUNKS)
        tiers: dict[str, None] = {}
        stop, end = 0, after
        for run in self._runs:
            stop += run.chunks
            if stop <= after:
                continue
            if end == most:
                break
            rate = rates.get(run.tier, UNKNOWN_RATE)
            if rate.probe_due:
                tiers[run.tier] = None
            elif not tiers or rate.bytes_per_s is not None:
                break
            end = min(most, stop)
        return Trial(end, tuple(tiers)) if tiers else None

    def _taken(self, chunks: int) -> Iterator[tuple[TierRun, int]]:
        for run in self._runs:
            taken = min(run.chunks, chunks)
            if taken <= 0:
                return
            yield run, taken
            chunks -= taken


class Listed:
    """Those of a list, shortest first."""

    def __init__(self, lengths: Sequence[Length]) -> None:
        self._lengths = lengths
        self._tier_bytes = {length.chunks: length.tier_bytes for length in lengths}

    def longest(self, most: int) -> int:
        """See ``Lengths``."""
        return max((length.chunks for length in self._lengths if length.chunks <= most), default=0)

    def tier_bytes(self, chunks: int) -> Mapping[str, int]:
        """See ``Lengths``."""
        return self._tier_bytes.get(chunks, {})

    def seconds(self, chunks: int, rates: Rates) -> float | None:
        """See ``Lengths``."""
        return _seconds(self.tier_bytes(chunks), rates)

    def fitting(self, most: int, rates: Rates, *, within_s: float) -> int:
        """See ``Lengths``. A longer one may end sooner, where its state lies nearer."""
        for length in reversed(self._lengths):
            if length.chunks <= most and (_seconds(length.tier_bytes, rates) or 0.0) <= within_s:
                return length.chunks
        return 0

    def candidates(
        self, fitting: int, rates: Rates, *, whole: int, queued_s: float, cap_s: float
    ) -> set[int]:
        """See ``Lengths``."""
        del whole, queued_s
        return {
            length.chunks
            for length in self._lengths
            if length.chunks <= fitting and (_seconds(length.tier_bytes, rates) or 0.0) <= cap_s
        }

    def trial(self, after: int, most: int, rates: Rates) -> Trial | None:
        """See ``Lengths``. Of a few chunks more, if there is one, else the next."""
        loaded = self.tier_bytes(after)
        longer = [length for length in self._lengths if after < length.chunks <= most]
        due = [length for length in longer if _is_worth_a_trial(length, loaded, rates)]
        few = [length for length in due if length.chunks <= after + PROBE_CHUNKS]
        chosen = few[-1] if few else due[0] if due else None
        return None if chosen is None else Trial(chosen.chunks, tuple(_due(chosen, rates)))


def _due(length: Length, rates: Rates) -> list[str]:
    tiers = (tier for tier, nbytes in length.tier_bytes.items() if nbytes)
    return [tier for tier in tiers if rates.get(tier, UNKNOWN_RATE).probe_due]


def _is_worth_a_trial(length: Length, loaded: Mapping[str, int], rates: Rates) -> bool:
    """It tells of a tier that deserves it, and takes more from no other that is known to be too slow."""
    due = _due(length, rates)
    more = (tier for tier, nbytes in length.tier_bytes.items() if nbytes > loaded.get(tier, 0))
    return bool(due) and all(
        tier in due or rates.get(tier, UNKNOWN_RATE).bytes_per_s is None for tier in more
    )


def _seconds(tier_bytes: Mapping[str, int], rates: Rates) -> float | None:
    times = [rates.get(tier, UNKNOWN_RATE).seconds(nbytes) for tier, nbytes in tier_bytes.items()]
    known = [time for time in times if time is not None]
    return max(known) if known else None
