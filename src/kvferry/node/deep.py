"""A fetch of parts that lie behind the tier: keepers stage them into it, and they are fetched from there.

    STAGING ──staged──► FETCHING (a tier's transfer writes to the slot) ──its done──► done
       └──not staged, cancelled, or the deadline has come──► done

Nobody writes to a slot while its part is STAGING, so such a part may be given up at once, whatever the
keepers are doing; what they report of it later is not listened to.
"""

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial

from kvferry.loop import Timer
from kvferry.node.counters import Counters
from kvferry.node.keepers import Keepers
from kvferry.node.state import NodeState
from kvferry.node.wire import Tier as Place
from kvferry.tiers.contract import FetchItem, FetchResult, Outcome, Tier, Transfer

Done = Callable[[int, FetchResult], None]


class DeepFetch:
    """A ``Transfer`` of one batch; loop thread only, but for what is reported. Begins when it is made.

    place: where the keepers said that all of it is. done: once per item, on any thread.
    """

    def __init__(
        self,
        state: NodeState,
        items: Sequence[FetchItem],
        *,
        keepers: Keepers,
        tier: Tier,
        place: Place,
        deadline: float,
        done: Done,
    ) -> None:
        self._post = state.loop.post
        self._counters: Counters = state.counters
        self._items = items
        self._tier = tier
        self._place = place.name.lower()
        self._deadline = deadline
        self._done = done
        self._staging = set(range(len(items)))
        self._reports: deque[tuple[int, Outcome]] = deque()
        self._called = False  # whether ``_take_reports`` is on its way
        self._fetches: list[Transfer] = []
        self._timer: Timer = state.loop.at(deadline, self._late)
        refs = [item.ref for item in items]
        self._stage: Transfer = keepers.stage(refs, deadline=deadline, done=self._report)

    def cancel(self) -> None:
        """See ``Transfer``. What is being fetched ends when the tier says so."""
        for fetch in self._fetches:
            fetch.cancel()
        self._give_up()

    def _report(self, index: int, outcome: Outcome) -> None:
        """On the keepers' thread: many come at a time, and are taken together."""
        self._reports.append((index, outcome))
        if not self._called:
            self._called = True
            self._post(self._take_reports)

    def _take_reports(self) -> None:
        self._called = False  # before the look: what is reported from here on calls again
        staged: list[int] = []
        while self._reports:
            index, outcome = self._reports.popleft()
            if index not in self._staging:
                continue  # given up, or said twice
            self._staging.remove(index)
            if outcome is Outcome.OK:
                staged.append(index)
            else:
                self._counters.stage_failed[outcome.value] += 1
                self._done(index, FetchResult(outcome, ()))
        if not self._staging:
            self._timer.cancel()
        if staged:
            self._fetch(sorted(staged))

    def _fetch(self, staged: Sequence[int]) -> None:
        self._counters.staged_parts[self._place] += len(staged)

        def done(at: int, result: FetchResult) -> None:
            self._done(staged[at], result)

        items = [self._items[index] for index in staged]
        self._fetches.append(self._tier.fetch(items, deadline=self._deadline, done=done))

    def _late(self) -> None:
        self._counters.stage_failed[Outcome.LATE.value] += len(self._staging)
        self._give_up()

    def _give_up(self) -> None:
        self._timer.cancel()
        self._stage.cancel()
        given_up, self._staging = self._staging, set()
        for index in sorted(given_up):
            self._post(partial(self._done, index, FetchResult(Outcome.LATE, ())))
