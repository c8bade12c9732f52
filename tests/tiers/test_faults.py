"""What real servers and networks do wrong: a wrong byte is never OK, and nothing waits for ever."""

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.servers import Server, running_server, start_server

from kvferry.addresses import Address
from kvferry.identity.header import HEADER_BYTES
from kvferry.identity.names import PartRef
from kvferry.identity.stripes import stripe_plan
from kvferry.testing.expectations import WAIT_S, eventually
from kvferry.testing.proxy import Proxy
from kvferry.testing.tier_contract import fetch_all, probe_all, some_bytes, some_ref, store_all
from kvferry.tiers.contract import Outcome
from kvferry.tiers.valkey import mover, scout
from kvferry.tiers.valkey.jobs import stripe_key
from kvferry.tiers.valkey.settings import ValkeySettings
from kvferry.tiers.valkey.tier import ValkeyTier
from kvferry.tiers.valkey.url import ValkeyUrl

PART_BYTES = 3 << 20

_contents: dict[PartRef, memoryview] = {}


@pytest.fixture
def proxy(server: Server) -> Iterator[Proxy]:
    made = Proxy(("127.0.0.1", server.port))
    yield made
    made.close()


def through(proxy: Proxy, **values: object) -> ValkeySettings:
    url = ValkeyUrl((Address("127.0.0.1", proxy.port),))
    return ValkeySettings(url, **values)  # type: ignore[arg-type]


def stored(tier: ValkeyTier, seed: int, nbytes: int = PART_BYTES) -> PartRef:
    ref = some_ref(nbytes, seed)
    _contents[ref] = some_bytes(nbytes, seed)
    assert store_all(tier, [(ref, _contents[ref])]) == [Outcome.OK]
    return ref


def outcome_of(tier: ValkeyTier, ref: PartRef, *, deadline_s: float = 30.0) -> Outcome:
    result, memory = fetch_all(tier, [ref], deadline_s=deadline_s)[0]
    if result.outcome is Outcome.OK:
        assert memory == _contents[ref], "wrong bytes passed as OK"
    return result.outcome


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_flip_of_any_stored_bit_is_corrupt_and_removed(
    server: Server, tier: ValkeyTier, data: st.DataObject
) -> None:
    ref = stored(tier, 1, 200_000)
    stripe = data.draw(st.sampled_from(stripe_plan(ref.nbytes)))
    anywhere = st.integers(0, HEADER_BYTES + stripe.nbytes - 1)
    offset = data.draw(st.one_of(st.integers(0, HEADER_BYTES - 1), anywhere))
    key = stripe_key(ref.key, stripe.index)
    before = server.ask("GETRANGE", key, str(offset), str(offset))
    assert isinstance(before, bytes)
    server.ask("SETRANGE", key, str(offset), bytes([before[0] ^ (1 << data.draw(st.integers(0, 7)))]))
    assert outcome_of(tier, ref) is Outcome.CORRUPT
    assert key not in server.key_names()
    assert outcome_of(tier, ref) is Outcome.MISS
    failed = tier.statistics().failed
    assert failed.get("corrupt_header", 0) + failed.get("corrupt_checksum", 0) >= 1


def test_a_value_under_another_key_is_corrupt(server: Server, tier: ValkeyTier) -> None:
    ref, other = stored(tier, 2), stored(tier, 3)
    server.ask("COPY", stripe_key(other.key, 0), stripe_key(ref.key, 0), "REPLACE")
    assert outcome_of(tier, ref) is Outcome.CORRUPT
    assert outcome_of(tier, other) is Outcome.OK
    assert tier.statistics().failed == {"corrupt_header": 1}
    assert tier.statistics().missed_parts == 0


def test_a_stripe_under_another_stripes_key_is_corrupt(server: Server, tier: ValkeyTier) -> None:
    ref = stored(tier, 4, PART_BYTES)
    server.ask("COPY", stripe_key(ref.key, 0), stripe_key(ref.key, 1), "REPLACE")
    assert outcome_of(tier, ref) is Outcome.CORRUPT


@pytest.mark.parametrize("kept", [0, 1, HEADER_BYTES - 1, HEADER_BYTES, 100_000])
def test_a_truncated_value_is_corrupt_and_its_payload_never_copied(
    server: Server, tier: ValkeyTier, kept: int
) -> None:
    ref = stored(tier, 5, 200_000)
    key = stripe_key(ref.key, 0)
    value = server.ask("GET", key)
    assert isinstance(value, bytes)
    server.ask("SET", key, value[:kept])
    result, memory = fetch_all(tier, [ref])[0]
    assert result.outcome is Outcome.CORRUPT
    first = stripe_plan(ref.nbytes)[0]
    assert bytes(memory[: first.nbytes]) == b"\xa5" * first.nbytes
    assert tier.statistics().failed == {"corrupt_header": 1}
    assert tier.statistics().missed_parts == 0


def test_an_oversized_value_is_corrupt(server: Server, tier: ValkeyTier) -> None:
    ref = stored(tier, 6, 200_000)
    server.ask("APPEND", stripe_key(ref.key, 0), b"x")
    assert outcome_of(tier, ref) is Outcome.CORRUPT


def test_a_key_of_another_type_is_corrupt(server: Server, tier: ValkeyTier) -> None:
    ref = some_ref(1000, 7)
    server.ask("LPUSH", stripe_key(ref.key, 0), "x")
    assert outcome_of(tier, ref) is Outcome.CORRUPT
    assert outcome_of(tier, ref) is Outcome.MISS


def test_healthy_parts_survive_a_corrupt_one_in_the_same_pipeline(server: Server, tier: ValkeyTier) -> None:
    refs = [stored(tier, seed, 200_000) for seed in range(8, 20)]
    server.ask("APPEND", stripe_key(refs[4].key, 0), b"x")
    server.ask("SETRANGE", stripe_key(refs[7].key, 0), "5000", b"damaged")
    outcomes = [result.outcome for result, _ in fetch_all(tier, refs)]
    wanted = [Outcome.OK] * 12
    wanted[4] = wanted[7] = Outcome.CORRUPT
    assert outcomes == wanted


def test_a_stripe_evicted_in_the_middle_makes_a_miss_and_is_stored_again(
    server: Server, tier: ValkeyTier
) -> None:
    refs = [stored(tier, seed) for seed in (20, 21, 22)]
    server.ask("UNLINK", stripe_key(refs[1].key, 1))
    assert probe_all(tier, refs) == [Outcome.OK, Outcome.MISS, Outcome.OK]
    assert [r.outcome for r, _ in fetch_all(tier, refs)] == [Outcome.OK, Outcome.MISS, Outcome.OK]
    stored(tier, 21)
    assert outcome_of(tier, refs[1]) is Outcome.OK


def test_out_of_memory_refuses_the_store_and_leaves_nothing_half_written() -> None:
    with running_server("--maxmemory", "12mb", "--maxmemory-policy", "noeviction") as server:
        tier = ValkeyTier.connect(server.settings())
        try:
            assert "noeviction" in tier.statistics().detail["warning"]
            parts = [(some_ref(PART_BYTES, seed), some_bytes(PART_BYTES, seed)) for seed in range(6)]
            _contents.update(parts)
            outcomes = store_all(tier, parts)
            assert Outcome.REFUSED in outcomes
            assert set(outcomes) <= {Outcome.OK, Outcome.REFUSED}
            assert tier.statistics().failed["out_of_memory"] == outcomes.count(Outcome.REFUSED)
            kept = [ref for (ref, _), outcome in zip(parts, outcomes, strict=True) if outcome is Outcome.OK]
            eventually(
                lambda: len(server.key_names()) == sum(len(stripe_plan(ref.nbytes)) for ref in kept),
                "removal",
            )
            assert [outcome_of(tier, ref) for ref in kept] == [Outcome.OK] * len(kept)  # reads go on
        finally:
            tier.close()


def test_a_user_without_permission_is_refused_and_the_stream_goes_on(server: Server) -> None:
    server.ask("ACL", "SETUSER", "reader", "on", ">pw", "~*", "+@all")
    url = ValkeyUrl((server.address,), user="reader", password="pw")
    tier = ValkeyTier.connect(ValkeySettings(url))
    server.ask("ACL", "SETUSER", "reader", "-@write")
    try:
        part = (some_ref(1000, 1), some_bytes(1000, 1))
        assert store_all(tier, [part, part]) == [Outcome.REFUSED] * 2
        assert tier.statistics().failed == {"not_allowed": 2}
        assert outcome_of(tier, part[0]) is Outcome.MISS
    finally:
        tier.close()
        server.ask("ACL", "DELUSER", "reader")


def test_a_stopped_server_costs_one_deadline_then_nothing_and_comes_back(server: Server) -> None:
    tier = ValkeyTier.connect(server.settings())
    try:
        ref = stored(tier, 30)
        server.pause()
        assert outcome_of(tier, ref, deadline_s=0.3) is Outcome.LATE
        eventually(lambda: tier.statistics().state == "down", "down")
        began = time.monotonic()
        assert outcome_of(tier, ref, deadline_s=60.0) is Outcome.REFUSED
        assert probe_all(tier, [ref], deadline_s=60.0) == [Outcome.REFUSED]
        assert time.monotonic() - began < 30.0  # no wait for the server: nothing but the deadline is far away
        server.resume()
        eventually(lambda: tier.statistics().state == "up", "up")
        assert outcome_of(tier, ref) is Outcome.OK
    finally:
        server.resume()
        tier.close()


def test_a_stopped_server_fails_stalled_long_before_a_far_deadline(server: Server) -> None:
    tier = ValkeyTier.connect(server.settings(stall_s=0.2))
    try:
        ref = stored(tier, 31)
        server.pause()
        assert outcome_of(tier, ref, deadline_s=60.0) in (Outcome.FAILED, Outcome.REFUSED)
    finally:
        server.resume()
        tier.close()


def test_a_restarted_server_is_used_again_without_help(tmp_path: Path) -> None:
    server = start_server(tmp_path)
    tier = ValkeyTier.connect(server.settings())
    try:
        ref = stored(tier, 32)
        server.stop()
        assert outcome_of(tier, ref) in (Outcome.FAILED, Outcome.REFUSED)
        server = start_server(tmp_path, port=server.port)
        eventually(lambda: outcome_of(tier, ref) is Outcome.MISS, "the new server is asked")
        stored(tier, 32)
        assert outcome_of(tier, ref) is Outcome.OK
    finally:
        tier.close()
        server.stop()


def test_connections_lost_while_idle_cost_nothing(proxy: Proxy) -> None:
    tier = ValkeyTier.connect(through(proxy))
    try:
        refs = [stored(tier, seed) for seed in (33, 34)]
        for _ in range(3):
            assert [r.outcome for r, _ in fetch_all(tier, refs)] == [Outcome.OK] * 2
            proxy.reset()
    finally:
        tier.close()


def test_a_black_hole_is_given_up_at_the_deadline(proxy: Proxy) -> None:
    tier = ValkeyTier.connect(through(proxy))
    try:
        ref = stored(tier, 36)
        proxy.black_hole = True
        assert outcome_of(tier, ref, deadline_s=0.3) is Outcome.LATE
        eventually(lambda: tier.statistics().state == "down", "down")
        proxy.black_hole = False
        eventually(lambda: tier.statistics().state == "up", "up")
        assert outcome_of(tier, ref) is Outcome.OK
    finally:
        tier.close()


def test_a_trickle_is_late_at_the_deadline_and_its_late_bytes_go_nowhere(
    server: Server, tier: ValkeyTier
) -> None:
    refs = [stored(tier, seed) for seed in (37, 38)]
    proxy = Proxy(("127.0.0.1", server.port), rate_bytes_s=2e6)
    slow = ValkeyTier.connect(through(proxy))
    try:
        found = fetch_all(slow, refs, deadline_s=0.4)
        seen = [bytes(memory) for _, memory in found]
        assert [result.outcome for result, _ in found] == [Outcome.LATE] * 2
        time.sleep(0.3)
        assert [bytes(memory) for _, memory in found] == seen
        assert slow.statistics().failed == {"late": 2}
        assert slow.statistics().state == "up"  # slow is not dead
    finally:
        slow.close()
        proxy.close()


def test_closing_while_the_server_is_stopped_ends_at_once(server: Server) -> None:
    tier = ValkeyTier.connect(server.settings(stall_s=60.0))
    try:
        ref = stored(tier, 39)
        server.pause()
        began = time.monotonic()
        results: list[Outcome] = []
        tier.probe([ref], deadline=began + 60.0, done=results.extend)
        time.sleep(0.05)
        tier.close()
        assert results == [Outcome.LATE]
    finally:
        server.resume()
        tier.close()


def test_under_real_eviction_an_answer_is_a_miss_or_the_exact_bytes() -> None:
    with running_server("--maxmemory", "24mb", "--maxmemory-policy", "allkeys-lru") as server:
        tier = ValkeyTier.connect(server.settings())
        try:
            refs = [stored(tier, seed) for seed in range(12)]
            found = [outcome_of(tier, ref) for ref in refs]
            assert set(found) == {Outcome.OK, Outcome.MISS}
            assert not tier.statistics().failed
        finally:
            tier.close()


def test_short_deadlines_find_out_a_stopped_server_too(server: Server) -> None:
    tier = ValkeyTier.connect(server.settings())
    try:
        ref = stored(tier, 30)
        server.pause()
        eventually(lambda: outcome_of(tier, ref, deadline_s=0.06) is Outcome.REFUSED, "the breaker opens")
        assert tier.statistics().state == "down"
        server.resume()
        eventually(lambda: outcome_of(tier, ref) is Outcome.OK, "it closes")
    finally:
        server.resume()
        tier.close()


def test_one_request_that_a_stopped_server_leaves_open_is_enough_to_find_it_out(server: Server) -> None:
    tier = ValkeyTier.connect(server.settings(idle_s=1000.0))
    try:
        ref = stored(tier, 31, 1000)
        server.pause()
        eventually(lambda: probe_all(tier, [ref], deadline_s=0.05) != [Outcome.OK], "one is not answered")
        eventually(lambda: tier.statistics().state == "down", "it is asked, and silent")
        server.resume()
        eventually(lambda: tier.statistics().state == "up", "it is asked again")
    finally:
        server.resume()
        tier.close()


def test_after_one_silence_questions_are_refused_until_something_is_heard(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scout, "PROBE_S", WAIT_S)  # so that the breaker does not open
    monkeypatch.setattr(mover, "SILENT_S", WAIT_S)
    tier = ValkeyTier.connect(server.settings(idle_s=1000.0))
    try:
        ref = stored(tier, 32, 1000)
        server.pause()
        eventually(lambda: probe_all(tier, [ref], deadline_s=0.05) == [Outcome.REFUSED], "one was silence")
        assert probe_all(tier, [ref] * 3, deadline_s=1000.0) == [Outcome.REFUSED] * 3
        found = tier.statistics()
        assert found.state == "up"
        assert found.failed["late"] >= 1
        assert found.failed["breaker_open"] == 4
        server.resume()
        eventually(lambda: probe_all(tier, [ref]) == [Outcome.OK], "it answered, and is asked again")
    finally:
        server.resume()
        tier.close()


def test_a_slow_server_is_asked_again_once_it_is_heard(proxy: Proxy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scout, "PROBE_S", WAIT_S)
    monkeypatch.setattr(mover, "SILENT_S", WAIT_S)
    tier = ValkeyTier.connect(through(proxy, idle_s=1000.0))
    try:
        ref = stored(tier, 33, 1000)
        proxy.replies.latency_s = 0.2
        eventually(lambda: probe_all(tier, [ref], deadline_s=0.05) == [Outcome.LATE], "too slow")
        eventually(lambda: probe_all(tier, [ref]) == [Outcome.OK], "the scout heard it")
        assert tier.statistics().state == "up"
    finally:
        tier.close()


@pytest.mark.parametrize("how", ["killed", "stopped"])
def test_a_server_that_dies_while_idle_is_down_without_a_request_and_comes_back(
    tmp_path: Path, how: str
) -> None:
    server = start_server(tmp_path)
    tier = ValkeyTier.connect(server.settings(idle_s=0.1))
    try:
        ref = stored(tier, 50, 200_000)
        if how == "killed":
            server.stop()
        else:
            server.pause()
        eventually(lambda: tier.statistics().state == "down", "down")
        assert str(server.port) in tier.statistics().detail["breaker_open"]
        assert not tier.statistics().failed
        began = time.monotonic()
        assert outcome_of(tier, ref, deadline_s=60.0) is Outcome.REFUSED
        assert time.monotonic() - began < 30.0  # no wait for the server: nothing but the deadline is far away
        if how == "killed":
            server = start_server(tmp_path, port=server.port)
        else:
            server.resume()
        eventually(lambda: tier.statistics().state == "up", "up")
        assert outcome_of(tier, ref) is (Outcome.MISS if how == "killed" else Outcome.OK)
    finally:
        tier.close()
        server.stop()


def test_a_server_is_asked_only_after_a_silence_and_once_in_that_time(server: Server) -> None:
    tier = ValkeyTier.connect(server.settings(idle_s=1000.0))
    try:
        (shard,) = tier._router.shards
        before = shard.heard_at
        stored(tier, 51, 1000)
        heard_at = shard.heard_at
        assert heard_at > before
        assert not shard.needs_probe(heard_at + 999)
        assert shard.needs_probe(heard_at + 1001)
        assert not shard.needs_probe(heard_at + 1002)
        assert shard.needs_probe(heard_at + 2002)
        shard.probe_failed("an answer came meanwhile", since=heard_at)
        assert tier.statistics().state == "up"
    finally:
        tier.close()


def test_a_user_who_may_not_ping_has_a_living_server(server: Server) -> None:
    server.ask(
        "ACL", "SETUSER", "mute", "on", ">pw", "~*", "+@read", "+set", "+unlink", "+client", "+info", "-ping"
    )
    url = ValkeyUrl((server.address,), user="mute", password="pw")
    tier = ValkeyTier.connect(ValkeySettings(url, idle_s=0.05))
    try:
        (shard,) = tier._router.shards
        heard_at = shard.heard_at
        eventually(lambda: shard.heard_at > heard_at, "an answer")
        assert tier.statistics().state == "up"
    finally:
        tier.close()
        server.ask("ACL", "DELUSER", "mute")
