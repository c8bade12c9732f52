"""What is wrong with a keeper's tiers: one word and a reason, told and counted once an episode."""

import logging
from dataclasses import replace

import pytest

from kvferry.errors import ClosedError
from kvferry.keeper import troubles
from kvferry.keeper.statistics import KeeperStatistics, ScanStatistics, StageStatistics
from kvferry.keeper.troubles import ADVICE, QUIET_S, Troubles, Watch
from kvferry.testing.expectations import eventually
from kvferry.tiers.contract import TierStatistics

WELL = TierStatistics("valkey", "up", 0, 0, 0, 0, 0, {}, 0, {"warning": "maxmemory-policy is noeviction"})


def keeper(*tiers: TierStatistics, scan: str = "") -> KeeperStatistics:
    stages = StageStatistics(0, 0, 0, 0, 0, 0, {}, {}, {})
    looked = ScanStatistics(error=scan)
    return KeeperStatistics(stages, None, None, looked, {}, 0, 0, 0, 0, 0, 0, 0, 0, 0, (WELL, *tiers))


def tier(name: str, state: str, **detail: str) -> TierStatistics:
    return replace(WELL, name=name, state=state, detail=detail)


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.mark.parametrize(
    ("sick", "word", "reason"),
    [
        (tier("objects", "down", warning="nobody listens"), "unreachable", "nobody listens"),
        (tier("objects", "degraded", warning="no room"), "degraded", "no room"),
        (tier("disk", "down", warning="read-only"), "failing", "read-only"),
        (tier("objects", "degraded", warning="full"), "degraded", "full"),
        (tier("valkey", "down", breaker_open="h:1: lost", warning="advice"), "unreachable", "h:1: lost"),
        (tier("valkey", "up", denied="h:1: NOPERM get"), "denied", f"h:1: NOPERM get; {ADVICE}"),
    ],
)
def test_each_kind_of_trouble_has_a_word_and_a_reason(sick: TierStatistics, word: str, reason: str) -> None:
    (found,) = Troubles().look(keeper(sick))
    assert (found.tier, found.word, found.reason) == (sick.name, word, reason)


def test_advice_about_settings_is_no_trouble() -> None:
    assert Troubles().look(keeper()) == ()


def test_a_scan_that_is_not_permitted_is_a_trouble_of_valkey() -> None:
    (found,) = Troubles().look(keeper(scan="h:1: NOPERM scan"))
    assert (found.tier, found.word) == ("valkey", "denied")
    assert ADVICE in found.reason
    assert Troubles().look(keeper(scan="h:1: the connection is lost")) == ()


def test_what_comes_and_goes_is_told_and_counted_once(caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    seen = Troubles(clock)
    full, well = keeper(tier("objects", "degraded", warning="full")), keeper(tier("objects", "up"))
    with caplog.at_level(logging.INFO, "kvferry.keeper"):
        seen.look(full)
        for _ in range(5):
            clock.now += QUIET_S / 2
            assert seen.look(well) == ()
            clock.now += QUIET_S / 4
            (now,) = seen.look(full)
        assert now.seconds == 5 * 0.75 * QUIET_S
        assert (caplog.messages, seen.episodes) == (
            ["objects is degraded: full"],
            {"objects": {"degraded": 1}},
        )
        clock.now += QUIET_S + 1
        seen.look(well)
        seen.look(full)
    assert caplog.messages[1:] == ["objects is not degraded any more", "objects is degraded: full"]
    assert seen.episodes == {"objects": {"degraded": 2}}


def test_what_a_tier_logs_itself_is_not_said_twice(caplog: pytest.LogCaptureFixture) -> None:
    seen = Troubles()
    seen.look(keeper(tier("objects", "down", warning="gone"), tier("valkey", "up", denied="NOPERM")))
    assert caplog.messages == []
    assert seen.episodes == {"objects": {"unreachable": 1}, "valkey": {"denied": 1}}


def test_the_watch_looks_by_itself_until_it_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(troubles, "LOOK_S", 0.01)
    looks: list[int] = []
    watch = Watch(lambda: looks.append(1))
    eventually(lambda: len(looks) > 2, "looks")
    watch.close()
    watch.close()
    count = len(looks)
    assert len(looks) == count

    def closed() -> None:
        raise ClosedError("closed")

    ended = Watch(closed)
    eventually(lambda: not ended._thread.is_alive(), "ended by itself")
    ended.close()
