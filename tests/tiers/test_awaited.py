"""A tier that does not answer at first: nothing is found until it does, and what was deleted never is."""

import logging
import threading
from collections.abc import Callable, Iterator

import pytest
from tests.tiers.objects import QUICK
from tests.tiers.s3_front import DENIED, NO_BUCKET, Answer, Front

from kvferry.errors import MisconfiguredError
from kvferry.testing.census import leaves_nothing
from kvferry.testing.expectations import eventually
from kvferry.testing.memory_tier import MemoryStore, MemoryTier
from kvferry.testing.s3 import S3Server
from kvferry.testing.tier_calls import fetch_all, probe_all, some_bytes, some_ref, store_all
from kvferry.testing.tier_contract import TierContract, TierStore
from kvferry.tiers import awaited
from kvferry.tiers.awaited import (
    AwaitedLower,
    AwaitedTier,
    UnansweredError,
    lower_opened_or_awaited,
    opened_or_awaited,
)
from kvferry.tiers.contract import Dropped, Outcome, Tier
from kvferry.tiers.objects.tier import ObjectTier

REFS = [some_ref(1000, seed) for seed in range(4)]
PARTS = [(ref, some_bytes(ref.nbytes, seed)) for seed, ref in enumerate(REFS)]


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(awaited, "MIN_PAUSE_S", 0.01)
    monkeypatch.setattr(awaited, "MAX_PAUSE_S", 0.01)


class Absent:
    """Opens a tier that holds ``PARTS`` once it is ``there``; else fails, for this reason."""

    def __init__(self) -> None:
        self.there = threading.Event()
        self.reason = "down"
        self.attempts = 0
        self.opened = MemoryTier("objects")
        store_all(self.opened, PARTS)

    def __call__(self) -> MemoryTier:
        self.attempts += 1
        if not self.there.is_set():
            raise UnansweredError(self.reason)
        return self.opened

    def tried_again(self) -> None:
        """Once an attempt has begun and ended after now."""
        wanted = self.attempts + 2
        eventually(lambda: self.attempts >= wanted, "other attempts")


@pytest.fixture
def absent() -> Iterator[Absent]:
    made = Absent()
    yield made
    made.opened.close()


@pytest.fixture
def lower(absent: Absent) -> Iterator[AwaitedLower]:
    tier = lower_opened_or_awaited("objects", absent)
    assert isinstance(tier, AwaitedLower)
    yield tier
    tier.close()


class TestAwaitedTier(TierContract):
    """Once it is there it is like any."""

    @pytest.fixture
    def store(self) -> TierStore:
        class Late(MemoryStore):
            def open(self) -> Tier:
                tries = iter([UnansweredError("down"), None])

                def opened() -> Tier:
                    if (error := next(tries)) is not None:
                        raise error
                    return MemoryStore.open(self)

                tier = opened_or_awaited("fake", opened)
                assert isinstance(tier, AwaitedTier)
                eventually(lambda: tier.tier is not None, "opened")
                return tier

        return Late()


def test_a_tier_that_answers_at_once_is_no_other(absent: Absent) -> None:
    absent.there.set()
    assert opened_or_awaited("objects", absent) is absent.opened
    assert lower_opened_or_awaited("objects", absent) is absent.opened


@pytest.mark.parametrize("either", [opened_or_awaited, lower_opened_or_awaited])
def test_what_never_will_answer_is_not_awaited(either: Callable[..., Tier]) -> None:
    def wrong() -> Tier:
        raise MisconfiguredError("no such scheme")

    with pytest.raises(MisconfiguredError, match="no such scheme"):
        either("objects", wrong)


def test_while_it_is_awaited_everything_is_refused_and_nothing_is_a_miss(lower: AwaitedLower) -> None:
    assert probe_all(lower, REFS) == [Outcome.REFUSED] * 4
    assert store_all(lower, PARTS) == [Outcome.REFUSED] * 4
    assert {result.outcome for result, _ in fetch_all(lower, REFS)} == {Outcome.REFUSED}
    now = lower.statistics()
    assert (now.state, now.missed_parts, now.failed) == ("down", 0, {"unreachable": 12})
    assert now.detail["since"].startswith("2")
    assert now.detail["warning"] == "down"


def test_when_it_answers_what_it_holds_is_found(absent: Absent, lower: AwaitedLower) -> None:
    probe_all(lower, REFS)
    absent.there.set()
    eventually(lambda: lower.tier is not None, "opened")
    assert probe_all(lower, REFS) == [Outcome.OK] * 4
    now = lower.statistics()
    assert (now.state, now.failed["unreachable"]) == ("up", 4)


def test_what_was_deleted_meanwhile_is_never_found(absent: Absent, lower: AwaitedLower) -> None:
    said: list[Dropped] = []
    lower.remove(REFS[:1])
    lower.drop(namespace=REFS[1].key.namespace, done=said.append)
    lower.drop(older_than_s=1e9, done=said.append)
    assert said == [Dropped(0, 0, Outcome.REFUSED)] * 2
    absent.there.set()
    first: list[list[Outcome]] = []

    def known() -> bool:
        found = probe_all(lower, REFS)
        if Outcome.REFUSED not in found:
            first.append(found)
        return bool(first)

    eventually(known, "opened")
    assert first == [[Outcome.MISS, Outcome.MISS, Outcome.OK, Outcome.OK]]
    lower.drop(done=said.append)
    eventually(lambda: len(said) == 3, "dropped")
    assert probe_all(lower, REFS) == [Outcome.MISS] * 4


def test_each_reason_is_told_once(
    absent: Absent, lower: AwaitedLower, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "kvferry.tiers"):
        for reason in ("down", "no such bucket", "down"):
            absent.reason = reason
            absent.tried_again()
        assert lower.statistics().detail["warning"] == "down"
        absent.there.set()
        eventually(lambda: lower.tier is not None, "opened")
        eventually(lambda: len(caplog.messages) >= 2, "told")
    assert [m for m in caplog.messages if "objects answers" not in m] == [
        "no such bucket; it is asked again until it answers"
    ]


def test_close_ends_the_attempts(absent: Absent) -> None:
    with leaves_nothing():
        lower = lower_opened_or_awaited("objects", absent)
        absent.tried_again()
        lower.close()
        attempts = absent.attempts
    assert absent.attempts == attempts
    lower.close()


def test_what_opens_as_it_closes_is_closed(absent: Absent) -> None:
    within, go_on = threading.Event(), threading.Event()

    def slowly() -> MemoryTier:
        if absent.attempts:
            within.set()
            go_on.wait()
            absent.there.set()
        return absent()

    tier = lower_opened_or_awaited("objects", slowly)
    within.wait()
    closing = threading.Thread(target=tier.close)
    closing.start()
    eventually(lambda: isinstance(tier, AwaitedLower) and tier._ending.is_set(), "closing")
    go_on.set()
    closing.join()
    assert store_all(absent.opened, PARTS[:1]) == [Outcome.LATE]


@pytest.mark.parametrize("answer", [DENIED, NO_BUCKET])
def test_a_bucket_that_is_put_right_is_used(s3: S3Server, answer: Answer) -> None:
    with Front(s3.port) as front:
        front.answers = lambda verb, path: answer
        settings = s3.settings("awaited/late", port=front.port, **QUICK)
        tier = lower_opened_or_awaited("objects", lambda: ObjectTier.open(settings))
        try:
            assert tier.statistics().state == "down"
            front.answers = lambda verb, path: None
            eventually(lambda: tier.statistics().state == "up", "opened")
            assert store_all(tier, PARTS) == [Outcome.OK] * 4
            assert probe_all(tier, REFS) == [Outcome.OK] * 4
        finally:
            tier.close()
