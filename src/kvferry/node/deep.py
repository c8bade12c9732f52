"""A fetch from the tier and from what lies behind it: keepers stage what the tier has not, or has lost since.

    STAGING ──staged──► FETCHING (a tier's transfer writes to the slot) ──its done──► done
       ▲ │                 └─ it is gone: evicted since it was seen or staged ─┐
       └─┼─────────────────────────────────────────────────────────────────────┘ MAX_STAGES times at most
         └──not staged, cancelled, or the deadline has come──► done

What the tier had when it was asked begins as FETCHING. Nobody writes to a slot while its part is STAGING, so
such a part may be given up at once, whatever the keepers are doing; what they report of it later is not
listened to.
"""

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial

from kvferry.breaker import SILENCE
from kvferry.costs.rates import MIN_SILENCE_S
from kvferry.loop import Timer
from kvferry.node.counters import Counters
from kvferry.node.keepers import Keepers
from kvferry.node.state import NodeState
from kvferry.node.wire import Tier as Place
from kvferry.tiers.contract import FetchItem, FetchResult, Outcome, Tier, Transfer

MAX_STAGES = 2
"""Of one part: a tier that loses everything at once is not filled for ever."""
COMING_S = 0.1
"""While what was lost is being staged, whoever waits hears so this often: less than any stall timeout."""

Done = Callable[[int, FetchResult], None]
Lost = Callable[[Sequence[int]], None]


class DeepFetch:
    """A ``Transfer`` of one batch; loop thread only, but for what is reported. Begins when it is made.

    place: where all of it was said to be; the tier itself, or behind it. done: once per item, on any thread.
    lost: told of items that the tier has lost, when that shows and from then on until they are staged.
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
        lost: Lost,
    ) -> None:
        self._loop = state.loop
        self._counters: Counters = state.counters
        self._detours = state.detours
        self._items = items
        self._keepers = keepers
        self._tier = tier
        self._place = place.name.lower()
        self._deadline = deadline
        self._done = done
        self._tell_lost = lost
        self._staging: dict[int, int] = {}  # by item, which stage of it is waited for
        self._stages = [0] * len(items)  # begun, by item
        self._lost: set[int] = set()  # of those in ``_staging``
        self._lost_at = 0.0
        self._reports: deque[tuple[int, int, Outcome]] = deque()
        self._misses: deque[int] = deque()
        self._called = False  # whether ``_take_reports`` is on its way
        self._over = False
        self._fetches: list[Transfer] = []
        self._staged: list[Transfer] = []
        self._timer: Timer | None = None
        self._coming: Timer | None = None
        every = range(len(items))
        if place is state.behind:
            self._fetch(every)
        else:
            self._stage(every)

    def cancel(self) -> None:
        """See ``Transfer``. What is being fetched ends when the tier says so."""
        for fetch in self._fetches:
            fetch.cancel()
        self._give_up()

    # ---- on other threads: many come at a time, and are taken together

    def _report(self, index: int, stage: int, outcome: Outcome) -> None:
        self._reports.append((index, stage, outcome))
        self._call()

    def _fetched(self, index: int, result: FetchResult) -> None:
        if result.outcome is Outcome.MISS and self._stages[index] < MAX_STAGES:
            self._misses.append(index)
            self._call()
        else:
            self._done(index, result)

    def _call(self) -> None:
        if not self._called:
            self._called = True
            self._loop.post(self._take_reports)

    # ---- on the loop's

    def _take_reports(self) -> None:
        self._called = False  # before the look: what is reported from here on calls again
        staged: list[int] = []
        while self._reports:
            index, stage, outcome = self._reports.popleft()
            if self._staging.get(index) != stage:
                continue  # given up, or said twice
            del self._staging[index]
            if index in self._lost:
                self._lost.remove(index)
                self._detours.succeeded()  # they answer, whatever it is
            if outcome is Outcome.OK:
                staged.append(index)
            else:
                self._counters.stage_failed[outcome.value] += 1
                self._done(index, FetchResult(outcome, ()))
        if staged:
            self._counters.staged_parts[self._place] += len(staged)
            self._fetch(sorted(staged))
        missed: list[int] = []
        while self._misses:
            missed.append(self._misses.popleft())
        if missed and not self._may_stage():
            for index in missed:
                self._done(index, FetchResult(Outcome.MISS, ()))
        elif missed:
            self._lost_at = self._loop.clock()
            self._lost.update(missed)
            self._stage(sorted(missed))
            self._say_lost()
        if not self._staging:
            self._stop_timers()

    def _may_stage(self) -> bool:
        """What is lost: not too late, nor in vain lately, but for a trial."""
        now, detours = self._loop.clock(), self._detours
        if self._over or now >= self._deadline or (detours.is_open and not detours.probe_due(now)):
            return False
        if detours.is_open:
            detours.probe_failed(now)  # unless it turns out otherwise
        return True

    def _fetch(self, wanted: Sequence[int]) -> None:
        items = [self._items[index] for index in wanted]

        def done(at: int, result: FetchResult) -> None:
            self._fetched(wanted[at], result)

        self._fetches.append(self._tier.fetch(items, deadline=self._deadline, done=done))

    def _stage(self, wanted: Sequence[int]) -> None:
        stages: list[int] = []
        for index in wanted:
            self._stages[index] += 1
            self._staging[index] = self._stages[index]
            stages.append(self._stages[index])
        if self._timer is None:
            self._timer = self._loop.at(self._deadline, self._late)

        def done(at: int, outcome: Outcome) -> None:
            self._report(wanted[at], stages[at], outcome)

        refs = [self._items[index].ref for index in wanted]
        self._staged.append(self._keepers.stage(refs, deadline=self._deadline, done=done))

    def _say_lost(self) -> None:
        """That they take longer is no stall."""
        if self._coming is not None:
            self._coming.cancel()
        self._coming = None
        if self._lost and not self._over:
            self._tell_lost(sorted(self._lost))
            self._coming = self._loop.at(self._loop.clock() + COMING_S, self._say_lost)

    def _late(self) -> None:
        self._counters.stage_failed[Outcome.LATE.value] += len(self._staging)
        self._give_up()

    def _give_up(self) -> None:
        now = self._loop.clock()
        if self._lost and now >= self._deadline and now >= self._lost_at + MIN_SILENCE_S:
            self._detours.failed(SILENCE, now)
        self._over = True
        self._stop_timers()
        for stage in self._staged:
            stage.cancel()
        given_up, self._staging = self._staging, {}
        self._lost.clear()
        for index in sorted(given_up):
            self._loop.post(partial(self._done, index, FetchResult(Outcome.LATE, ())))

    def _stop_timers(self) -> None:
        for timer in (self._timer, self._coming):
            if timer is not None:
                timer.cancel()
        self._timer = self._coming = None
