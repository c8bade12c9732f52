"""Restarts under traffic: who is asked meanwhile, how often, and what counts as lost."""

from dataclasses import replace
from typing import cast

import pytest
from tests.demo.steps_made import reply

from kvferry.bench import restart
from kvferry.bench.prompts import Prompts
from kvferry.bench.restart import Restart, Traffic
from kvferry.demo.ask import Question, Reply
from kvferry.demo.fleet import Fleet
from kvferry.demo.processes import wait_until
from kvferry.errors import RetryError

WAIT_S = 60.0
PREFIXES = ((1, 2, 3),)


class _Replica:
    def __init__(self) -> None:
        self.asked = 0

    def ask(self, question: Question) -> Reply:
        self.asked += 1
        if self.asked == 2:
            raise RetryError("the second fails")
        return reply()


class _Fleet:
    def __init__(self) -> None:
        self.replicas = {"A": _Replica(), "B": _Replica()}


def _asked(fleet: _Fleet, *, away: str | None, least: int) -> Traffic:
    with Traffic(cast(Fleet, fleet), PREFIXES, Prompts(1), away=away).running() as traffic:
        wait_until(
            lambda: all(one.asked >= least for name, one in fleet.replicas.items() if name != away),
            what="requests",
            timeout_s=WAIT_S,
        )
    return traffic


def test_a_replica_that_is_being_restarted_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(restart, "START_PAUSE_S", 0.0)
    fleet = _Fleet()
    traffic = _asked(fleet, away="A", least=5)
    assert fleet.replicas["A"].asked == 0
    assert len(traffic.replies) + len(traffic.failures) == fleet.replicas["B"].asked
    assert traffic.failures == ["the second fails"]


def test_with_none_away_all_are_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(restart, "PAUSE_S", 0.0)
    fleet = _Fleet()
    traffic = _asked(fleet, away=None, least=3)
    assert len(traffic.failures) == 2


def test_an_engine_that_serves_can_sleep_between_two_requests_while_another_starts() -> None:
    assert restart.START_PAUSE_S > restart.SPIN_S


def test_what_was_reusable_and_is_not_any_more_is_lost() -> None:
    good = Restart("node", 1.0, wanted=8, before=8, after=8, sources={}, requests=1, failed=0, slowest_s=0.1)
    assert restart.faults([good]) == []
    assert restart.faults([replace(good, after=4)]) == ["node: 4 tokens reusable after, 8 before, of 8"]
    assert len(restart.faults([replace(good, before=4, after=4)])) == 1
