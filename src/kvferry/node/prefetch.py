"""Parts brought into memory before anybody asks for them: from the tier behind it, within bounds.

    asked ──room, not there──► FETCHING (its slot is this room's) ──done──► committed, or abandoned
      └──there, no room, no tier──► counted

A load that wants a part on its way waits for it as for one that an engine is storing.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from kvferry.identity.names import PartRef
from kvferry.node.live import REASONS
from kvferry.node.loading import Loads
from kvferry.node.state import NodeState
from kvferry.node.wire import Reason
from kvferry.pool.entries import Declined, DeclineReason
from kvferry.tiers.contract import FetchItem, FetchResult, Outcome

WINDOW_DIVISOR = 4  # this fraction of the pool may be on its way
_THERE = (DeclineReason.EXISTS, DeclineReason.FILLING, DeclineReason.UNLINKED)


@dataclass(slots=True)
class Fetched:
    """What became of one question. there: in memory already, or on the way. failed: parts by reason."""

    mark: int
    fetched_parts: int = 0
    fetched_bytes: int = 0
    there_parts: int = 0
    failed: Counter[str] = field(default_factory=Counter[str])
    left: int = 0

    def document(self) -> dict[str, object]:
        """For the answer."""
        return {
            "mark": self.mark,
            "fetched_parts": self.fetched_parts,
            "fetched_bytes": self.fetched_bytes,
            "there_parts": self.there_parts,
            "failed": dict(self.failed),
        }


class Prefetches:
    """All of a node; loop thread only."""

    def __init__(self, state: NodeState, loads: Loads) -> None:
        self._state = state
        self._loads = loads
        self._owner = next(state.owners)
        self._window_bytes = state.arena.nbytes // WINDOW_DIVISOR
        self._fetching_bytes = 0

    def begin(
        self,
        refs: Sequence[PartRef],
        *,
        within_s: float,
        mark: int,
        done: Callable[[dict[str, object]], None],
    ) -> None:
        """``done`` once, when each of these is there, or will not be for now.

        mark: what was stored or used since is not evicted for them; 0: since now.
        """
        state = self._state
        mark = min(mark or state.catalogue.mark, state.catalogue.mark)
        said = Fetched(mark)
        items: list[FetchItem] = []
        for ref in refs:
            reason = self._reserve(ref, items, mark)
            if reason is None:
                continue
            if reason in _THERE:
                said.there_parts += 1
            else:
                said.failed[(reason if isinstance(reason, Reason) else Reason.POOL_FULL).value] += 1
        state.note_evictions()
        said.left = len(items)
        if state.tier is None or not items:
            done(said.document())
            return

        def ended(index: int, result: FetchResult) -> None:
            state.loop.post(partial(self._ended, items[index].ref, result, said, done))

        state.tier.fetch(items, deadline=state.loop.clock() + within_s, done=ended)

    def _reserve(self, ref: PartRef, items: list[FetchItem], mark: int) -> DeclineReason | Reason | None:
        """None: it is among the items now; else why not."""
        state = self._state
        if state.tier is None:
            return Reason.ABSENT
        if self._fetching_bytes and self._fetching_bytes + ref.nbytes > self._window_bytes:
            return Reason.LIMIT
        given = state.catalogue.reserve(ref.key, ref.nbytes, self._owner, spare_from=mark)
        if isinstance(given, Declined):
            return given.reason
        self._fetching_bytes += ref.nbytes
        items.append(FetchItem(ref, state.arena.view(given.slot.offset, ref.nbytes)))
        return None

    def _ended(
        self,
        ref: PartRef,
        result: FetchResult,
        said: Fetched,
        done: Callable[[dict[str, object]], None],
    ) -> None:
        """The tier is done with one part: its slot is nobody's but ours again."""
        self._fetching_bytes -= ref.nbytes
        if result.outcome is Outcome.OK:
            self._state.catalogue.commit(ref.key, self._owner, result.checksums)
            said.fetched_parts += 1
            said.fetched_bytes += ref.nbytes
        else:
            self._state.catalogue.abandon(ref.key, self._owner)
            if result.outcome is Outcome.CORRUPT and self._state.keepers is not None:
                self._state.keepers.remove([ref])  # the tier has done so
            missed = result.outcome is Outcome.MISS
            said.failed[(Reason.ABSENT if missed else REASONS[result.outcome]).value] += 1
        self._loads.room_changed()
        said.left -= 1
        if not said.left:
            done(said.document())
