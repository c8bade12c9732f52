"""A network that cuts, corrupts, inserts and falls silent at any byte, either way: never a wrong byte."""

import random
from collections.abc import Iterator

import pytest
from tests.servers import Server

from kvferry.addresses import Address
from kvferry.testing.expectations import eventually
from kvferry.testing.faults import Corrupt, Cut, Ending, Fault, Insert
from kvferry.testing.proxy import Proxy
from kvferry.testing.relay import Side
from kvferry.testing.tier_contract import FAILURES, fetch_all, probe_all, some_bytes, some_ref, store_all
from kvferry.tiers.contract import Outcome
from kvferry.tiers.valkey.settings import ValkeySettings
from kvferry.tiers.valkey.tier import ValkeyTier
from kvferry.tiers.valkey.url import ValkeyUrl

PART_BYTES = 200_000
REF, DATA = some_ref(PART_BYTES, 1), some_bytes(PART_BYTES, 1)
# What garbage may do to a fetch: it is found out, or was in something that a second attempt made good.
SPOILED = FAILURES | {Outcome.CORRUPT, Outcome.OK}


@pytest.fixture
def proxy(server: Server) -> Iterator[Proxy]:
    with Proxy(("127.0.0.1", server.port)) as made:
        yield made


@pytest.fixture
def tier(proxy: Proxy) -> Iterator[ValkeyTier]:
    url = ValkeyUrl((Address("127.0.0.1", proxy.port),))
    made = ValkeyTier.connect(ValkeySettings(url))
    yield made
    made.close()


def fetched(tier: ValkeyTier, *, deadline_s: float = 15.0) -> Outcome:
    result, memory = fetch_all(tier, [REF], deadline_s=deadline_s)[0]
    assert result.outcome is not Outcome.OK or memory == DATA, "wrong bytes passed as OK"
    return result.outcome


def whole_again(tier: ValkeyTier) -> None:
    """Once nothing is wrong any more, the part can be stored and read."""
    eventually(lambda: store_all(tier, [(REF, DATA)]) == [Outcome.OK], "a store")
    eventually(lambda: fetched(tier) is Outcome.OK, "a fetch")


def places(seed: int, count: int) -> list[int]:
    """Bytes of a request and its reply: half of them among the first, where the protocol is."""
    source = random.Random(seed)
    return [source.choice([source.randrange(300), source.randrange(PART_BYTES)]) for _ in range(count)]


@pytest.mark.parametrize("how", [Ending.CLOSE, Ending.RESET])
def test_a_reply_cut_at_any_byte_is_retried_and_never_wrong(
    proxy: Proxy, tier: ValkeyTier, how: Ending
) -> None:
    whole_again(tier)
    for place in places(7, 20):
        cut = proxy.replies.once(Cut(place, how))
        assert fetched(tier) is Outcome.OK
        assert cut.fired == 1


@pytest.mark.parametrize("how", [Ending.STALL, Ending.VANISH])
def test_a_server_that_falls_silent_at_any_byte_costs_the_deadline(
    proxy: Proxy, tier: ValkeyTier, how: Ending
) -> None:
    for place in (0, 3, 60_000):
        whole_again(tier)
        cut = proxy.replies.once(Cut(place, how))
        assert fetched(tier, deadline_s=0.3) in FAILURES
        assert cut.fired == 1
        proxy.reset()
        proxy.heal()


def test_a_store_that_is_not_taken_costs_the_deadline(proxy: Proxy, tier: ValkeyTier) -> None:
    for place in (0, 3, 60_000):
        whole_again(tier)
        tier.remove([REF])
        eventually(lambda: probe_all(tier, [REF]) == [Outcome.MISS], "its removal")
        cut = proxy.requests.once(Cut(place, Ending.STALL))
        assert store_all(tier, [(REF, DATA)], deadline_s=0.3)[0] in FAILURES
        assert cut.fired == 1
        proxy.reset()
        proxy.heal()


@pytest.mark.parametrize("fault", [Corrupt, Insert])
def test_garbage_in_a_reply_is_found_out(
    proxy: Proxy, tier: ValkeyTier, fault: type[Corrupt | Insert]
) -> None:
    whole_again(tier)
    for place in places(8, 25):
        proxy.replies.once(fault(place, 3))
        assert fetched(tier) in SPOILED
        proxy.heal()
        whole_again(tier)


@pytest.mark.parametrize("fault", [Corrupt, Insert])
def test_garbage_in_a_request_stores_nothing_that_is_read_as_good(
    proxy: Proxy, tier: ValkeyTier, fault: type[Corrupt | Insert]
) -> None:
    """A server may take a spoiled value, under a spoiled name even: nobody reads it as another."""
    for place in places(9, 25):
        proxy.requests.once(fault(place, 3))
        store_all(tier, [(REF, DATA)])
        fetched(tier)
        proxy.heal()
        whole_again(tier)
        tier.remove([REF])
        eventually(lambda: probe_all(tier, [REF]) == [Outcome.MISS], "its removal")


@pytest.mark.parametrize("fault", [Cut(0), Cut(5, Ending.RESET), Corrupt(0), Insert(0)])
def test_connections_that_all_break_at_once_are_a_failure_and_no_miss(
    proxy: Proxy, tier: ValkeyTier, fault: Fault
) -> None:
    whole_again(tier)
    missed = tier.statistics().missed_parts
    proxy.replies.always(fault)
    proxy.reset()
    assert fetched(tier) in FAILURES
    assert probe_all(tier, [REF])[0] in FAILURES
    assert tier.statistics().missed_parts == missed
    proxy.heal()
    whole_again(tier)


def test_a_server_that_vanishes_while_idle_costs_one_deadline_at_most(proxy: Proxy, tier: ValkeyTier) -> None:
    """Half-open connections: nobody told us, and what is asked there is never answered."""
    whole_again(tier)
    proxy.vanish(Side.SERVER)
    assert fetched(tier, deadline_s=0.5) in FAILURES | {Outcome.OK}
    whole_again(tier)


def test_latency_and_a_low_rate_are_no_fault(proxy: Proxy, tier: ValkeyTier) -> None:
    for way in (proxy.requests, proxy.replies):
        way.latency_s, way.rate_bytes_s = 0.02, 2e6
    whole_again(tier)
    assert tier.statistics().state == "up"
    assert not tier.statistics().failed


def test_an_end_that_comes_late_holds_nothing_up(proxy: Proxy, tier: ValkeyTier) -> None:
    """The server's side is gone long before we are told."""
    proxy.replies.close_delay_s = 0.2
    whole_again(tier)
    proxy.requests.once(Cut(0))
    whole_again(tier)
