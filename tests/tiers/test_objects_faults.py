"""A bucket in trouble, of a real S3 server: it asks for less, says no, is silent, drips, hangs up."""

import itertools
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
from tests.tiers.objects import QUICK, ObjectStore, found_right
from tests.tiers.s3_front import DENIED, NO_BUCKET, NO_ROOM, SKEWED, SLOW_DOWN, Answer, Front

from kvferry.errors import MisconfiguredError
from kvferry.testing import expectations
from kvferry.testing.expectations import eventually
from kvferry.testing.faults import Cut, Ending
from kvferry.testing.proxy import Proxy
from kvferry.testing.s3 import S3Server
from kvferry.testing.tier_calls import (
    UNTOUCHED,
    Results,
    empty_memory,
    fetch_all,
    probe_all,
    some_bytes,
    some_ref,
    store_all,
)
from kvferry.tiers.contract import Dropped, FetchItem, Outcome, StoreItem
from kvferry.tiers.objects.names import Kind
from kvferry.tiers.objects.settings import ObjectSettings
from kvferry.tiers.objects.tier import ObjectTier

_PLACES = itertools.count()
IMPATIENT: dict[str, Any] = QUICK | {"stall_s": 0.5}
"""Of a tier whose store is silent on purpose."""
FAR = time.monotonic() + 36_000.0
NOT_HAD = (Outcome.FAILED, Outcome.REFUSED)
PART = (some_ref(300_000, 1), some_bytes(300_000, 1))
OTHER = (some_ref(300_000, 2), some_bytes(300_000, 2))


@pytest.fixture
def proxy(s3: S3Server) -> Iterator[Proxy]:
    with Proxy(("127.0.0.1", s3.port)) as made:
        yield made


@pytest.fixture
def front(s3: S3Server) -> Iterator[Front]:
    with Front(s3.port) as made:
        yield made


@pytest.fixture
def place() -> str:
    return f"faults/{next(_PLACES)}"


def _open(settings: ObjectSettings) -> ObjectTier:
    return ObjectTier.open(settings)


def _opened(s3: S3Server, place: str, port: int, **values: Any) -> ObjectTier:
    """With a part."""
    tier = _open(s3.settings(place, port=port, **(QUICK | values)))
    eventually(lambda: store_all(tier, [PART]) == [Outcome.OK], "a part in a bucket that is well")
    return tier


@contextmanager
def _impatient(tier: ObjectTier) -> Iterator[None]:
    """It was patient while its store was well, on whatever machine."""
    books = tier._books
    patient, books.settings = books.settings, replace(books.settings, stall_s=0.5)
    yield
    books.settings = patient


def _fetch_without_deadline(tier: ObjectTier) -> Results:
    """Its results are outcomes."""
    results = Results(1)
    item = FetchItem(PART[0], empty_memory(PART[0].nbytes))
    tier.fetch([item], deadline=FAR, done=lambda n, result: results.done(n, result.outcome))
    return results


def _packs(verb: str, answer: Answer, *, times: int = 1 << 30) -> Any:
    """Answers of a front: of packs alone, so often."""
    left = itertools.count(1)
    return lambda asked, path: answer if asked == verb and "/packs/" in path and next(left) <= times else None


# -- 25: 503 SlowDown --------------------------------------------------------------------------------------


def test_a_store_that_asks_for_less_now_and_then_is_asked_again(
    s3: S3Server, front: Front, place: str
) -> None:
    tier = _opened(s3, place, front.port)
    try:
        front.answers = _packs("PUT", SLOW_DOWN, times=2)
        assert store_all(tier, [OTHER]) == [Outcome.OK]
        front.answers = _packs("GET", SLOW_DOWN, times=2)
        assert found_right(tier, PART[0], 1)
        found = tier.statistics()
        assert found.detail["retries"] == "4"
        assert found.detail["failed_requests"] == "4 slow_down"
        assert found.failed == {}
    finally:
        tier.close()


def test_a_store_that_goes_on_asking_for_less_gets_little_and_costs_a_refusal(
    s3: S3Server, front: Front, place: str
) -> None:
    tier = _opened(s3, place, front.port)
    try:
        front.answers = lambda verb, path: SLOW_DOWN
        front.asked.clear()
        assert store_all(tier, [OTHER]) == [Outcome.REFUSED]
        eventually(lambda: tier.statistics().state == "down", "it is left out")
        asked = front.puts()
        assert asked <= 5
        for _ in range(50):
            assert store_all(tier, [OTHER]) == [Outcome.REFUSED]
            assert fetch_all(tier, [PART[0]])[0][0].outcome is Outcome.REFUSED
        assert front.puts() == asked
        front.answers = lambda verb, path: None
        eventually(lambda: store_all(tier, [OTHER]) == [Outcome.OK], "it is used again")
        assert found_right(tier, PART[0], 1)
    finally:
        tier.close()


# -- 26: trickle and black hole ----------------------------------------------------------------------------


def test_a_fetch_that_trickles_ends_in_time_and_the_store_is_left_out_until_it_is_well(
    s3: S3Server, proxy: Proxy, place: str
) -> None:
    tier = _opened(s3, place, proxy.port)
    try:
        with _impatient(tier):
            proxy.replies.rate_bytes_s = 2000.0  # 150 s for the part
            patient = _fetch_without_deadline(tier)
            result, memory = fetch_all(tier, [PART[0]], deadline_s=0.3)[0]
            assert result.outcome in (Outcome.LATE, *NOT_HAD)
            assert memory == empty_memory(memory.nbytes)
            assert patient.wait()[0] in NOT_HAD
            eventually(lambda: tier.statistics().state == "down", "it is left out")
        proxy.heal()
        eventually(lambda: found_right(tier, PART[0], 1), "it is used again")
    finally:
        tier.close()


def test_a_store_that_trickles_ends_in_time(s3: S3Server, proxy: Proxy, place: str) -> None:
    tier = _opened(s3, place, proxy.port)
    try:
        with _impatient(tier):
            proxy.requests.rate_bytes_s = 2000.0
            results = Results(1)
            tier.store([StoreItem(*OTHER, ())], deadline=FAR, done=results.done)
            assert store_all(tier, [OTHER], deadline_s=0.3)[0] in (Outcome.LATE, *NOT_HAD)
            assert results.wait()[0] in NOT_HAD
            eventually(lambda: tier.statistics().state == "down", "it is left out")
        proxy.heal()
        eventually(lambda: store_all(tier, [OTHER]) == [Outcome.OK], "it is used again")
    finally:
        tier.close()


def test_nothing_waits_for_a_black_hole(s3: S3Server, proxy: Proxy, place: str) -> None:
    tier = _opened(s3, place, proxy.port)
    ended = Results(2)
    try:
        with _impatient(tier):
            proxy.black_hole = True
            patient = _fetch_without_deadline(tier)
            tier.remove([OTHER[0]], done=lambda outcomes: ended.done(0, list(outcomes)))
            tier.drop(done=lambda dropped: ended.done(1, dropped))
            assert store_all(tier, [OTHER], deadline_s=0.3)[0] in (Outcome.LATE, *NOT_HAD)
            assert patient.wait()[0] in NOT_HAD
            eventually(lambda: tier.statistics().state == "down", "it is left out")
            assert probe_all(tier, [PART[0]]) == [Outcome.REFUSED]
            assert fetch_all(tier, [OTHER[0]])[0][0].outcome is Outcome.REFUSED
    finally:
        tier.close()
    (removed,), dropped = ended.wait()
    assert removed in (Outcome.MISS, Outcome.LATE, Outcome.FAILED)
    assert isinstance(dropped, Dropped)
    assert dropped.outcome in (Outcome.LATE, Outcome.FAILED)


def test_close_waits_for_no_answer(s3: S3Server, proxy: Proxy, place: str) -> None:
    tier = _opened(s3, place, proxy.port, stall_s=3600.0)
    proxy.black_hole = True
    results = _fetch_without_deadline(tier)
    closing = threading.Thread(target=tier.close)
    closing.start()
    closing.join(expectations.WAIT_S)
    assert not closing.is_alive()
    assert results.wait() == [Outcome.LATE]


# -- 27: late bytes ----------------------------------------------------------------------------------------


def test_bytes_that_come_too_late_go_nowhere(s3: S3Server, proxy: Proxy, place: str) -> None:
    tier = _opened(s3, place, proxy.port)
    try:
        proxy.replies.black_hole = True
        asked, passed = proxy.requests.passed_bytes, proxy.replies.passed_bytes
        results = Results(1)
        item = FetchItem(PART[0], empty_memory(PART[0].nbytes))
        transfer = tier.fetch([item], deadline=FAR, done=results.done)
        eventually(lambda: proxy.requests.passed_bytes > asked, "the request")
        transfer.cancel()
        assert results.wait()[0].outcome is Outcome.LATE
        proxy.heal()
        eventually(lambda: proxy.replies.passed_bytes - passed > PART[0].nbytes, "the late answer")
        assert found_right(tier, PART[0], 1)
        assert bytes(item.into) == bytes([UNTOUCHED]) * item.into.nbytes
    finally:
        tier.close()


# -- connections -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", [Ending.CLOSE, Ending.RESET])
def test_a_connection_that_ends_in_the_middle_costs_another_try(
    s3: S3Server, proxy: Proxy, place: str, how: Ending
) -> None:
    tier = _opened(s3, place, proxy.port)
    try:
        cut = proxy.replies.once(Cut(100_000, how))
        assert found_right(tier, PART[0], 1)
        assert cut.fired == 1
        cut = proxy.requests.once(Cut(100_000, how))
        assert store_all(tier, [OTHER]) == [Outcome.OK]
        assert cut.fired == 1
        assert found_right(tier, OTHER[0], 2)
    finally:
        tier.close()


# -- a store that says no ----------------------------------------------------------------------------------


@pytest.mark.parametrize("answer", [DENIED, SKEWED, NO_BUCKET])
def test_a_store_that_says_no_is_left_out_and_nothing_is_called_a_miss(
    s3: S3Server, front: Front, place: str, answer: Answer
) -> None:
    tier = _opened(s3, place, front.port)
    try:
        front.answers = lambda verb, path: answer
        ((found, _),) = fetch_all(tier, [PART[0]])
        assert found.outcome in (Outcome.REFUSED, Outcome.FAILED)
        eventually(lambda: tier.statistics().state == "down", "it is left out")
        assert answer.code in tier.statistics().detail["warning"]
        assert fetch_all(tier, [OTHER[0]])[0][0].outcome is Outcome.REFUSED
        assert tier.statistics().missed_parts == 0
        front.answers = lambda verb, path: None
        eventually(lambda: found_right(tier, PART[0], 1), "it is used again")
    finally:
        tier.close()


@pytest.mark.parametrize("answer", [DENIED, NO_ROOM])
def test_a_store_that_takes_nothing_more_is_still_read(
    s3: S3Server, front: Front, place: str, answer: Answer
) -> None:
    tier = _opened(s3, place, front.port)
    try:
        front.answers = lambda verb, path: answer if verb == "PUT" else None
        assert store_all(tier, [OTHER]) == [Outcome.REFUSED]
        assert tier.statistics().state == "degraded"
        assert found_right(tier, PART[0], 1)
        asked = front.puts()
        assert store_all(tier, [OTHER]) == [Outcome.REFUSED]
        assert front.puts() == asked
    finally:
        tier.close()


# -- start -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (DENIED, "access denied"),
        (SKEWED, "clock"),
        (NO_BUCKET, "no such bucket"),
        (NO_ROOM, "no room"),
        (SLOW_DOWN, "fewer requests"),
    ],
)
def test_a_store_that_says_no_at_start_is_one_line(
    s3: S3Server, front: Front, place: str, answer: Answer, words: str
) -> None:
    front.answers = lambda verb, path: answer
    with pytest.raises(MisconfiguredError, match=words) as found:
        _open(s3.settings(place, port=front.port, **QUICK))
    assert "\n" not in str(found.value)


@pytest.mark.parametrize("wrong", [{"access_key": "nobody"}, {"secret_key": "not this one"}])
def test_wrong_credentials_are_one_line_without_them(s3: S3Server, place: str, wrong: dict[str, str]) -> None:
    with pytest.raises(MisconfiguredError, match="AWS_ACCESS_KEY_ID") as found:
        _open(s3.settings(place, **(QUICK | wrong)))
    assert "\n" not in str(found.value)
    assert not any(value in str(found.value) for value in wrong.values())


def test_a_bucket_that_may_only_be_read_is_refused_at_start(s3: S3Server, front: Front, place: str) -> None:
    front.answers = lambda verb, path: DENIED if verb == "PUT" else None
    with pytest.raises(MisconfiguredError, match="write"):
        _open(s3.settings(place, port=front.port, **QUICK))


def test_a_store_that_does_not_answer_at_start_is_one_line(s3: S3Server, proxy: Proxy, place: str) -> None:
    proxy.black_hole = True
    with pytest.raises(MisconfiguredError, match="no answer") as found:
        _open(s3.settings(place, port=proxy.port, **IMPATIENT))
    proxy.heal()
    proxy.refusing = True
    with pytest.raises(MisconfiguredError) as refused:
        _open(s3.settings(place, port=proxy.port, **IMPATIENT))
    assert "\n" not in f"{found.value}{refused.value}"


def test_a_store_too_slow_to_be_read_in_time_at_start_is_one_line(
    s3: S3Server, proxy: Proxy, place: str
) -> None:
    proxy.replies.rate_bytes_s = 100.0
    with pytest.raises(MisconfiguredError, match="no answer"):
        _open(s3.settings(place, port=proxy.port, **QUICK, open_s=0.3))


def test_the_environment_says_where_the_store_is_and_who_asks(
    s3: S3Server, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in s3.environment().items():
        monkeypatch.setenv(name, value)
    settings = ObjectSettings(f"s3://{place}", **QUICK)
    tier = _open(settings)
    tier.close()
    monkeypatch.setenv("AWS_ENDPOINT_URL", "127.0.0.1:9000")
    with pytest.raises(MisconfiguredError, match="https://HOST"):
        _open(settings)


# -- kill ---------------------------------------------------------------------------------------------------


def test_a_pack_whose_upload_was_cut_off_is_not_there(s3: S3Server, proxy: Proxy, place: str) -> None:
    tier = _opened(s3, place, proxy.port)
    proxy.requests.once(Cut(200_000, Ending.STALL))
    results = Results(1)
    tier.store([StoreItem(*OTHER, ())], deadline=FAR, done=results.done)
    passed = proxy.requests.passed_bytes
    eventually(lambda: proxy.requests.passed_bytes >= passed + 100_000, "half of the pack")
    tier.close()
    assert results.wait() == [Outcome.LATE]
    store = ObjectStore(s3.settings(place, **QUICK))
    try:
        again = store.open()
        assert probe_all(again, [PART[0], OTHER[0]]) == [Outcome.OK, Outcome.MISS]
        assert found_right(again, PART[0], 1)
    finally:
        store.close()


def test_a_removal_is_written_down_once_the_store_takes_something_again(
    s3: S3Server, front: Front, place: str
) -> None:
    tier = _opened(s3, place, front.port, refresh_s=0.05)
    try:
        results = Results(1)
        front.answers = lambda verb, path: NO_ROOM if verb == "PUT" else None
        tier.remove([PART[0]], done=lambda outcomes: results.done(0, list(outcomes)))
        assert results.wait() == [[Outcome.FAILED]]
        assert probe_all(tier, [PART[0]]) == [Outcome.MISS]
        front.answers = lambda verb, path: None
        store = ObjectStore(s3.settings(place, **QUICK))
        eventually(lambda: not store.paths(Kind.PACK), "the list of removals, and then its deletion")
        assert len(store.paths(Kind.REMOVED)) <= 1  # two listings later that goes as well
    finally:
        tier.close()
