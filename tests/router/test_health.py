"""A worker's state follows from what was seen of it, in any order."""

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from tests.planted import must_find
from tests.runs import runs

from kvferry.router import health
from kvferry.router.health import Change, Failure, Health, Limits, Probed, State, blames

STEPS = hypothesis_settings(max_examples=runs(150), stateful_step_count=40, deadline=None, print_blob=True)
LIMITS = Limits()


def _worker() -> Health:
    return Health(now=0.0)


def _down_by(*failures: Failure) -> Health:
    worker = _worker()
    for what in failures:
        worker.failed(what, 0.0)
    assert worker.state is State.DOWN
    return worker


def test_one_failure_makes_suspect_and_a_probe_clears_it() -> None:
    worker = _worker()
    assert worker.failed(Failure.LOST, 10.0) == Change(State.UP, State.SUSPECT)
    assert worker.next_probe_at() == 10.0
    assert worker.probed(Probed.WELL, 10.1, jitter=0.0).after is State.UP


def test_requests_that_fail_in_a_row_take_it_down_though_probes_are_well_in_between() -> None:
    worker = _worker()
    for at in (1.0, 2.0):
        worker.failed(Failure.ERROR, at)
        worker.probed(Probed.WELL, at, jitter=0.0)
    assert worker.failed(Failure.SILENT, 3.0).after is State.DOWN


def test_what_failed_requests_took_down_comes_back_by_a_request() -> None:
    worker = _down_by(Failure.ERROR, Failure.ERROR, Failure.ERROR)
    assert worker.probed(Probed.WELL, 1.0, jitter=0.0).after is State.TRIAL
    assert worker.succeeded().after is State.UP


def test_waits_double_up_to_their_bound_while_trials_fail() -> None:
    worker, now, waits = _down_by(Failure.REFUSED), 0.0, []
    for _ in range(8):
        due = worker.next_probe_at()
        assert due is not None
        waits.append(due - now)
        now = due
        worker.probed(Probed.MISSED, now, jitter=1.0)
    assert waits == [1, 2, 4, 8, 16, 30, 30, 30]
    worker.probed(Probed.WELL, now, jitter=0.0)
    assert worker.state is State.UP
    worker.failed(Failure.REFUSED, now)
    assert worker.next_probe_at() == now + 1


def test_a_trial_that_fails_waits_longer() -> None:
    worker = _down_by(Failure.ERROR, Failure.ERROR, Failure.ERROR)
    worker.probed(Probed.WELL, 1.0, jitter=0.0)
    assert worker.failed(Failure.ERROR, 1.5).after is State.DOWN
    assert worker.next_probe_at() == 1.5 + 2


def test_one_missed_probe_is_forgiven_and_the_second_is_not() -> None:
    worker = _worker()
    assert worker.probed(Probed.MISSED, 1.0, jitter=0.0).after is State.SUSPECT
    assert worker.probed(Probed.MISSED, 3.0, jitter=0.0).after is State.DOWN
    assert worker.probed(Probed.WELL, 4.0, jitter=0.0).after is State.UP


def test_a_storm_of_failures_does_not_become_a_storm_of_probes() -> None:
    worker = _worker()
    worker.probed(Probed.WELL, 1.0, jitter=0.0)
    worker.failed(Failure.LOST, 1.01)
    assert worker.next_probe_at() == 1.0 + health.PROBE_GAP_S


def test_probes_of_many_workers_spread() -> None:
    times = set()
    for jitter in (-1.0, 0.0, 1.0):
        worker = _worker()
        worker.probed(Probed.WELL, 0.0, jitter=jitter)
        times.add(worker.next_probe_at())
    assert times == {1.6, 2.0, 2.4}


def test_a_refused_connection_says_once_that_all_is_lost() -> None:
    worker = _worker()
    assert worker.failed(Failure.REFUSED, 1.0) == Change(State.UP, State.DOWN, lost=True)
    assert not worker.failed(Failure.REFUSED, 1.1).lost
    assert not worker.probed(Probed.REFUSED, 2.0, jitter=0.0).lost
    assert not worker.probed(Probed.WELL, 4.0, jitter=0.0).lost
    assert worker.boot_wanted and not worker.booted(None).lost
    assert worker.failed(Failure.REFUSED, 9.0).lost


@pytest.mark.parametrize(
    ("before", "after", "lost"), [(5.0, 5.0, False), (5.0, 6.0, True), (None, 6.0, True)]
)
def test_a_worker_that_was_away_is_asked_whether_it_is_the_same_process(
    before: float | None, after: float | None, lost: bool
) -> None:
    worker = _worker()
    worker.booted(before)
    for at in (1.0, 3.0):
        worker.probed(Probed.MISSED, at, jitter=0.0)
    assert not worker.boot_wanted  # nobody answers
    worker.probed(Probed.WELL, 4.0, jitter=0.0)
    assert worker.boot_wanted
    assert worker.booted(after).lost is lost
    assert not worker.boot_wanted


def test_the_first_look_at_a_boot_loses_nothing() -> None:
    worker = _worker()
    assert worker.boot_wanted and not worker.booted(7.0).lost


def test_who_leaves_is_not_probed_and_does_not_come_back() -> None:
    worker = _worker()
    worker.drain(until=9.0)
    worker.probed(Probed.WELL, 1.0, jitter=0.0)
    worker.succeeded()
    worker.failed(Failure.REFUSED, 1.0)
    assert worker.state is State.DRAINING and worker.next_probe_at() is None and worker.drain_until == 9.0
    worker.remove()
    worker.drain(until=1.0)
    assert worker.state is State.REMOVED and worker.failures[Failure.REFUSED] == 1


@pytest.mark.parametrize(
    ("status", "blamed"),
    [(200, False), (400, False), (404, False), (429, False), (499, False), (500, True), (501, False),
     (502, True), (503, True), (504, True), (505, False)],
)  # fmt: skip
def test_what_a_client_can_cause_is_not_the_workers_fault(status: int, blamed: bool) -> None:
    assert blames(status) is blamed


class HealthMachine(RuleBasedStateMachine):
    """Against counts of what was seen in a row."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.worker = _worker()
        self.in_a_row = 0
        self.missed = 0
        self.gone = False  # refused, and not up since
        self.tried = False  # requests took it down
        self.state = State.UP

    def _seen(self, change: Change) -> None:
        assert change.before is self.state and change.after is self.worker.state
        self.state = change.after
        if self.state is State.UP:
            self.gone = False

    @rule(seconds=st.sampled_from([0.0, 0.1, 1.0, 5.0, 60.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @rule(
        what=st.sampled_from([Failure.LOST, Failure.ERROR, Failure.SILENT]),
        times=st.integers(1, LIMITS.failures),
    )
    def fail(self, what: Failure, times: int) -> None:
        for _ in range(times):
            self._fail(what)

    def _fail(self, what: Failure) -> None:
        self.in_a_row += 1
        before = self.state
        change = self.worker.failed(what, self.now)
        self._seen(change)
        assert not change.lost
        if before in (State.UP, State.SUSPECT):
            assert (self.state is State.DOWN) == (self.in_a_row >= LIMITS.failures)
            self.tried = self.state is State.DOWN
        else:
            assert self.state is State.DOWN

    @rule(probe=st.booleans())
    def refuse(self, probe: bool) -> None:
        if probe:
            self.missed += 1
            change = self.worker.probed(Probed.REFUSED, self.now, jitter=0.0)
        else:
            change = self.worker.failed(Failure.REFUSED, self.now)
        self._seen(change)
        assert self.state is State.DOWN
        assert change.lost is not self.gone
        self.gone = True
        self.tried = False

    @rule()
    def answer(self) -> None:
        before = self.state
        change = self.worker.succeeded()
        if before is not State.DOWN:
            self.in_a_row = self.missed = 0
            self.tried = False
        self._seen(change)
        assert self.state is (State.DOWN if before is State.DOWN else State.UP)

    @rule()
    def probe_well(self) -> None:
        before = self.state
        self.missed = 0
        self._seen(self.worker.probed(Probed.WELL, self.now, jitter=0.0))
        assert self.state is (State.TRIAL if self.tried else State.UP)
        if before is State.DOWN and not self.tried:
            self.in_a_row = 0

    @rule()
    def probe_missed(self) -> None:
        before = self.state
        self.missed += 1
        self._seen(self.worker.probed(Probed.MISSED, self.now, jitter=0.0))
        if before in (State.UP, State.SUSPECT):
            assert (self.state is State.DOWN) == (self.missed >= LIMITS.misses)
        else:
            assert self.state is State.DOWN

    @rule(started=st.sampled_from([None, 1.0, 2.0]))
    def boot(self, started: float | None) -> None:
        if self.worker.boot_wanted:
            self.worker.booted(started)
            assert not self.worker.boot_wanted
            assert not self.worker.booted(started).lost

    @invariant()
    def the_next_probe_is_never_far(self) -> None:
        due = self.worker.next_probe_at()
        assert due is not None and due <= self.now + LIMITS.max_wait_s

    def teardown(self) -> None:
        """Whatever was, a worker that is well again is used again."""
        self._seen(self.worker.probed(Probed.WELL, self.now, jitter=0.0))
        self._seen(self.worker.succeeded())
        assert self.state is State.UP


TestHealthMachine: Any = HealthMachine.TestCase
TestHealthMachine.settings = STEPS


def _forgiving(self: Health, how: Probed, now: float, **how_soon: float) -> Change:
    if how is Probed.WELL:
        self._wants_trial = False
    return _PROBED(self, how, now, **how_soon)


def _forgetful(self: Health, now: float) -> Change:
    self._told = False
    return _REFUSED(self, now)


_PROBED, _REFUSED = Health.probed, Health._refused


@pytest.mark.parametrize(
    ("name", "defect"),
    [("probed", _forgiving), ("_refused", _forgetful), ("boot_wanted", property(lambda _: True))],
)
def test_the_machine_finds_planted_defects(
    monkeypatch: pytest.MonkeyPatch, name: str, defect: Callable[..., object]
) -> None:
    monkeypatch.setattr(Health, name, defect)
    must_find(HealthMachine, STEPS)
