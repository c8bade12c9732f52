"""What a full server keeps: heads before tails, and what was used again before what came once."""

from collections.abc import Iterator, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.servers import Server, must, running_server

from kvferry.identity.names import PartRef
from kvferry.testing.expectations import eventually
from kvferry.testing.tier_contract import fetch_all, probe_all, some_bytes, some_ref, store_all
from kvferry.tiers.contract import Outcome
from kvferry.tiers.valkey.acl import setuser
from kvferry.tiers.valkey.greeting import ServerReport
from kvferry.tiers.valkey.jobs import stripe_key
from kvferry.tiers.valkey.lifetimes import LIFE_MS, MAX_BONUS_MS, REUSED_SHARE, Lifetimes, after_info, warning
from kvferry.tiers.valkey.settings import ValkeySettings
from kvferry.tiers.valkey.tier import ValkeyTier
from kvferry.tiers.valkey.url import parse_url

PART = 32 << 10
ROOM = 100  # parts of that size, about


@pytest.fixture(scope="module")
def small() -> Iterator[Server]:
    """A server with the documented settings."""
    options = ("--maxmemory-policy", "volatile-ttl", "--maxmemory-samples", "64")
    with running_server(
        *options, "--hz", "100"
    ) as server:  # it finds out how long values last ten times sooner
        yield server


@pytest.fixture
def full(small: Server) -> Iterator[Server]:
    """The same, with little memory."""
    must(small.ask("FLUSHALL", "SYNC"))
    must(small.ask("CONFIG", "SET", "maxmemory-policy", "volatile-ttl"))
    limit(small, ROOM * PART)
    yield small
    must(small.ask("CONFIG", "SET", "maxmemory", "0", "min-replicas-to-write", "0"))


def limit(server: Server, nbytes: int) -> None:
    """Leave it so much more memory than it takes empty, about."""
    must(server.ask("CONFIG", "SET", "maxmemory", str(_EMPTY + nbytes)))


_EMPTY = 1 << 20


def parts(first: int, count: int) -> list[PartRef]:
    return [some_ref(PART, seed) for seed in range(first, first + count)]


def put(tier: ValkeyTier, refs: Sequence[PartRef]) -> list[Outcome]:
    data = some_bytes(PART, 1)
    return store_all(tier, [(ref, data) for ref in refs])


def held(server: Server, refs: Sequence[PartRef]) -> list[bool]:
    """Without using them."""
    names = set(server.key_names())
    return [stripe_key(ref.key, 0) in names for ref in refs]


def ttl_ms(server: Server, ref: PartRef) -> int:
    answer = server.ask("PTTL", stripe_key(ref.key, 0))
    assert isinstance(answer, int)
    return answer


@pytest.fixture
def tier(full: Server) -> Iterator[ValkeyTier]:
    made = ValkeyTier.connect(full.settings())
    yield made
    made.close()


def test_all_writes_are_taken_however_full_it_is(full: Server, tier: ValkeyTier) -> None:
    outcomes = [outcome for first in range(0, 5 * ROOM, 50) for outcome in put(tier, parts(first, 50))]
    assert set(outcomes) == {Outcome.OK}
    assert 0 < sum(held(full, parts(0, 5 * ROOM))) < 2 * ROOM  # it evicted


@pytest.mark.parametrize("used", [False, True], ids=["just stored", "used again"])
def test_the_tail_of_a_prefix_leaves_before_its_head(full: Server, tier: ValkeyTier, used: bool) -> None:
    prefix = parts(0, ROOM // 2)
    assert set(put(tier, prefix)) == {Outcome.OK}
    if used:
        assert set(probe_all(tier, prefix)) == {Outcome.OK}
    limit(full, ROOM * PART // 3)
    kept = held(full, prefix)
    head = kept.index(False)
    assert head >= 5
    assert sum(kept[head:]) <= sum(kept) // 5  # it draws samples, and errs a little


def test_what_was_used_again_survives_a_scan_of_five_times_the_room(full: Server) -> None:
    tier = ValkeyTier(full.settings(), tls=None, report=ServerReport(lifetimes=Lifetimes(bonus_ms=3_600_000)))
    tier._router.start()
    try:
        hot = parts(0, ROOM // 5)
        put(tier, hot)
        assert set(probe_all(tier, hot)) == {Outcome.OK}
        for first in range(1000, 1000 + 5 * ROOM, 50):
            assert set(put(tier, parts(first, 50))) == {Outcome.OK}
        assert all(held(full, hot))
    finally:
        tier.close()


def test_every_value_has_an_expiry_where_the_server_ranks_by_it(full: Server, tier: ValkeyTier) -> None:
    ref, foreign = parts(0, 2)
    put(tier, [ref])
    assert 0 < ttl_ms(full, ref) <= LIFE_MS
    must(full.ask("SET", stripe_key(foreign.key, 0), "stored by a node that knew another policy"))
    assert probe_all(tier, [foreign]) == [Outcome.OK]
    assert 0 < ttl_ms(full, foreign) <= LIFE_MS


def test_elsewhere_values_have_none(full: Server) -> None:
    must(full.ask("CONFIG", "SET", "maxmemory-policy", "allkeys-lru"))
    tier = ValkeyTier.connect(full.settings())
    try:
        put(tier, parts(0, 1))
        probe_all(tier, parts(0, 1))
        assert ttl_ms(full, parts(0, 1)[0]) == -1
    finally:
        tier.close()


def test_reads_go_on_while_the_server_takes_no_writes(full: Server, tier: ValkeyTier) -> None:
    put(tier, parts(0, 1))
    must(full.ask("CONFIG", "SET", "min-replicas-to-write", "1"))
    assert probe_all(tier, parts(0, 2)) == [Outcome.OK, Outcome.MISS]
    assert fetch_all(tier, parts(0, 1))[0][0].outcome is Outcome.OK
    assert put(tier, parts(1, 1)) == [Outcome.FAILED]


def test_the_documented_user_may_do_all_that_is_needed(full: Server) -> None:
    words = setuser("kvferry", b"", password="right").split()
    must(full.ask(*words))
    try:
        tier = ValkeyTier.connect(
            ValkeySettings(parse_url(f"valkey://kvferry:right@127.0.0.1:{full.port}"), survey_s=0.05)
        )
        try:
            assert put(tier, parts(0, 2)) == [Outcome.OK] * 2
            assert probe_all(tier, parts(0, 2)) == [Outcome.OK] * 2
            eventually(lambda: tier._router.shards[0].warning is not None, "a survey")
        finally:
            tier.close()
    finally:
        full.ask("ACL", "DELUSER", "kvferry")


def test_a_policy_changed_later_is_noticed(full: Server, caplog: pytest.LogCaptureFixture) -> None:
    must(full.ask("CONFIG", "SET", "maxmemory-policy", "noeviction"))
    tier = ValkeyTier.connect(full.settings(survey_s=0.05))
    try:
        assert "noeviction" in tier.statistics().detail["warning"]
        assert caplog.text.count("noeviction") == 1
        must(full.ask("CONFIG", "SET", "maxmemory-policy", "volatile-ttl"))
        eventually(lambda: "warning" not in tier.statistics().detail, "the warning goes")
        put(tier, parts(0, 1))
        assert ttl_ms(full, parts(0, 1)[0]) > 0
        must(full.ask("CONFIG", "SET", "maxmemory-policy", "allkeys-random"))
        eventually(lambda: caplog.text.count("allkeys-random") == 1, "a line in the log")
        must(full.ask("CONFIG", "SET", "maxmemory-policy", "volatile-ttl"))
        must(full.ask("SET", "of another", "application"))
        eventually(lambda: "no expiry" in tier.statistics().detail.get("warning", ""), "a new warning")
    finally:
        tier.close()


def test_how_long_values_are_kept_is_learned_from_the_server(full: Server) -> None:
    """Of values stored without a bonus it settles where 0.7 (1,000 s - bonus) is the bonus."""
    oldest_s = 1000
    for number in range(200):
        age_ms = number * oldest_s * 1000 // 200
        must(full.ask("PSETEX", f"kvf1:{number}", str(LIFE_MS - age_ms), "x"))
    tier = ValkeyTier.connect(full.settings(survey_s=0.05))
    try:

        def learned() -> bool:
            (shard,) = tier._router.shards
            bonus_ms = shard.lifetimes.bonus_ms if shard.lifetimes is not None else 0
            return 350_000 < bonus_ms < 470_000

        eventually(learned, "a bonus of 412 s")
        assert tier.statistics().detail["longest_unused"].endswith(" s")
        put(tier, parts(0, 1))
        assert LIFE_MS - ttl_ms(full, parts(0, 1)[0]) > 300_000
        probe_all(tier, parts(0, 1))
        assert LIFE_MS - ttl_ms(full, parts(0, 1)[0]) < 300_000
    finally:
        tier.close()


# ---- pure


@given(st.lists(st.integers(-1, 2 * LIFE_MS), max_size=20), st.integers(0, 1 << 20))
def test_expiries_are_in_bounds_whatever_the_server_says(means: list[int], rank: int) -> None:
    lifetimes = Lifetimes()
    for mean in means:
        lifetimes = lifetimes.learned(mean)
        assert 0 <= lifetimes.bonus_ms <= MAX_BONUS_MS
        assert 0 < lifetimes.stored_ms(rank) <= lifetimes.used_ms(rank) <= LIFE_MS
        assert lifetimes.stored_ms(rank + 1) <= lifetimes.stored_ms(rank)


@given(st.integers(1000, LIFE_MS // 4), st.floats(0, 1))
def test_the_bonus_settles_below_what_is_kept(kept_ms: int, new: float) -> None:
    """new: the share of values that were never used again; these rank from now less the bonus on."""
    lifetimes = Lifetimes()
    for _ in range(50):
        slack = kept_ms / 2 + new * lifetimes.bonus_ms / 2
        lifetimes = lifetimes.learned(round(LIFE_MS - slack))
    assert REUSED_SHARE / 2 * kept_ms - 100 <= lifetimes.bonus_ms <= REUSED_SHARE * kept_ms + 100


def test_what_info_leaves_out_changes_nothing() -> None:
    known = Lifetimes(5, 7)
    assert after_info(known, {}) == known
    assert after_info(None, {}) is None
    assert after_info(known, {"maxmemory_policy": "volatile-ttl"}) == known
    assert (
        after_info(None, {"maxmemory_policy": "volatile-ttl", "db0": "keys=1,avg_ttl=\u0663"}) == Lifetimes()
    )
    assert after_info(known, {"maxmemory_policy": "allkeys-lru"}) is None


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        ({"maxmemory": "0", "maxmemory_policy": "allkeys-lru"}, "maxmemory is not set"),
        ({"maxmemory": "9", "maxmemory_policy": "noeviction"}, "stores are refused"),
        ({"maxmemory": "9", "maxmemory_policy": "allkeys-lfu"}, "loses parts of prefixes"),
        (
            {"maxmemory": "9", "maxmemory_policy": "volatile-ttl", "db0": "keys=9,expires=2,avg_ttl=1"},
            "7 values have none",
        ),
        ({"maxmemory": "9", "maxmemory_policy": "volatile-ttl", "db0": "keys=2,expires=2,avg_ttl=1"}, ""),
        ({"maxmemory": "9", "maxmemory_policy": "allkeys-lru", "db0": "keys=9,expires=2,avg_ttl=1"}, ""),
        ({}, ""),
    ],
)
def test_settings_that_lose_values_are_named(facts: dict[str, str], words: str) -> None:
    found = warning(facts)
    assert words in found
    assert bool(found) == bool(words)
