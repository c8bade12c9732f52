"""Encrypted values in a real server: nothing readable there, nothing wrong from there; keys that change."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.servers import Cluster, Server

from kvferry.identity.header import HEADER_BYTES
from kvferry.identity.names import PartRef
from kvferry.identity.sealing import KeyRing, SealingKey
from kvferry.identity.stripes import part_checksums, stripe_plan
from kvferry.testing.tier_contract import (
    Results,
    empty_memory,
    fetch_all,
    probe_all,
    some_bytes,
    some_ref,
    store_all,
)
from kvferry.tiers.contract import FetchItem, FetchResult, Outcome, StoreItem
from kvferry.tiers.valkey.jobs import stripe_key
from kvferry.tiers.valkey.protection import Sealed
from kvferry.tiers.valkey.tier import ValkeyTier

OLD, NEW, OTHER = (SealingKey(bytes([number]) * 32) for number in (1, 2, 3))
PART_BYTES = 3 << 20
WAIT_S = 20.0
Connect = Callable[..., ValkeyTier]


@pytest.fixture
def connect(server: Server) -> Iterator[Connect]:
    """A tier with these keys (the first encrypts); none: without encryption."""
    with ExitStack() as stack:

        def make(*keys: SealingKey) -> ValkeyTier:
            more = {"protection": Sealed(KeyRing(keys))} if keys else {}
            tier = ValkeyTier.connect(server.settings(**more))
            stack.callback(tier.close)
            return tier

        yield make


def name(ref: PartRef, stripe: int, key: SealingKey | None) -> bytes:
    return stripe_key(ref.key, stripe, f":{key.key_id.hex()}".encode() if key else b"")


def stored(tier: ValkeyTier, seed: int, nbytes: int = PART_BYTES) -> tuple[PartRef, memoryview]:
    part = (some_ref(nbytes, seed), some_bytes(nbytes, seed))
    assert store_all(tier, [part]) == [Outcome.OK]
    return part


def outcome_of(tier: ValkeyTier, part: tuple[PartRef, memoryview]) -> Outcome:
    result, memory = fetch_all(tier, [part[0]])[0]
    if result.outcome is Outcome.OK:
        assert memory == part[1], "wrong bytes passed as OK"
        assert result.checksums == part_checksums(part[1])
    return result.outcome


def eventually(condition: Callable[[], bool]) -> None:
    give_up = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < give_up, "did not happen"
        time.sleep(0.02)


@pytest.mark.parametrize("nbytes", [1, 4096, 200_000, PART_BYTES, 10 << 20])
def test_what_is_stored_comes_back_and_shows_nothing_in_the_server(
    server: Server, connect: Connect, nbytes: int
) -> None:
    ref = some_ref(nbytes, 1)
    plain = memoryview(bytearray(b"kvferry plain text " * (nbytes // 19 + 1))[:nbytes])
    before = bytes(plain)
    tier = connect(NEW)
    assert store_all(tier, [(ref, plain)]) == [Outcome.OK]
    assert outcome_of(tier, (ref, plain)) is Outcome.OK
    assert plain == before, "the pool's own bytes were changed"
    keys = [name(ref, stripe.index, NEW) for stripe in stripe_plan(nbytes)]
    assert sorted(server.key_names()) == sorted(keys)
    if nbytes == 1:
        return  # any byte occurs
    for key in keys:
        value = server.ask("GET", key)
        assert isinstance(value, bytes)
        assert b"kvferry plain" not in value
        assert before[:16] not in value


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_flip_of_any_stored_bit_is_corrupt_and_removed(
    server: Server, connect: Connect, data: st.DataObject
) -> None:
    tier = connect(NEW)
    part = stored(tier, 2, 200_000)
    stripe = data.draw(st.sampled_from(stripe_plan(200_000)))
    anywhere = st.integers(0, HEADER_BYTES + stripe.nbytes - 1)
    offset = data.draw(st.one_of(st.integers(0, HEADER_BYTES - 1), anywhere))
    key = name(part[0], stripe.index, NEW)
    before = server.ask("GETRANGE", key, str(offset), str(offset))
    assert isinstance(before, bytes)
    server.ask("SETRANGE", key, str(offset), bytes([before[0] ^ (1 << data.draw(st.integers(0, 7)))]))
    assert outcome_of(tier, part) is Outcome.CORRUPT
    assert key not in server.key_names()
    assert outcome_of(tier, part) is Outcome.MISS
    failed = tier.statistics().failed
    assert failed.get("corrupt_header", 0) + failed.get("corrupt_checksum", 0) == 1
    tier.close()


@pytest.mark.parametrize("kept", [0, 1, HEADER_BYTES - 1, HEADER_BYTES, 100_000])
def test_a_truncated_value_is_corrupt_and_its_payload_never_copied(
    server: Server, connect: Connect, kept: int
) -> None:
    tier = connect(NEW)
    part = stored(tier, 3, 200_000)
    key = name(part[0], 0, NEW)
    value = server.ask("GET", key)
    assert isinstance(value, bytes)
    server.ask("SET", key, value[:kept])
    result, memory = fetch_all(tier, [part[0]])[0]
    assert result.outcome is Outcome.CORRUPT
    first = stripe_plan(200_000)[0].nbytes
    assert memory[:first] == empty_memory(first)


def test_a_value_under_another_part_stripe_or_key_is_corrupt(server: Server, connect: Connect) -> None:
    tier, both = connect(NEW), connect(OTHER, NEW)
    for number, swapped in enumerate(("part", "stripe", "key")):
        part, other = stored(tier, 10 + number), stored(tier, 20 + number)
        target = name(part[0], 0, NEW)
        reader = tier
        if swapped == "part":
            source = name(other[0], 0, NEW)
        elif swapped == "stripe":
            source = name(part[0], 1, NEW)
        else:
            source, target, reader = name(part[0], 0, NEW), name(part[0], 0, OTHER), both
        server.ask("COPY", source, target, "REPLACE")
        assert outcome_of(reader, part) is Outcome.CORRUPT, swapped
        assert outcome_of(tier, other) is Outcome.OK


def test_a_plain_value_under_an_encrypted_name_is_refused(server: Server, connect: Connect) -> None:
    """Nobody who can write to the server gets a node with a key to take what is not encrypted."""
    plain, tier = connect(), connect(NEW)
    part = stored(plain, 30, 1000)
    server.ask("COPY", name(part[0], 0, None), name(part[0], 0, NEW))
    assert outcome_of(tier, part) is Outcome.CORRUPT
    assert server.key_names() == [name(part[0], 0, None)]


def test_an_encrypted_value_under_a_plain_name_is_refused(server: Server, connect: Connect) -> None:
    plain, tier = connect(), connect(NEW)
    part = stored(tier, 31, 1000)
    server.ask("COPY", name(part[0], 0, NEW), name(part[0], 0, None))
    assert outcome_of(plain, part) is Outcome.CORRUPT
    assert outcome_of(tier, part) is Outcome.OK


def test_nodes_with_other_keys_or_none_leave_each_others_values_alone(
    server: Server, connect: Connect
) -> None:
    tiers = [connect(), connect(OLD), connect(NEW)]
    part = (some_ref(PART_BYTES, 40), some_bytes(PART_BYTES, 40))
    for number, tier in enumerate(tiers):
        assert outcome_of(tier, part) is Outcome.MISS
        assert probe_all(tier, [part[0]]) == [Outcome.MISS]
        assert store_all(tier, [part]) == [Outcome.OK]
        assert len(server.key_names()) == (number + 1) * len(stripe_plan(PART_BYTES))
    assert [outcome_of(tier, part) for tier in tiers] == [Outcome.OK] * 3
    tiers[1].remove([part[0]])
    eventually(lambda: len(server.key_names()) == 2 * len(stripe_plan(PART_BYTES)))
    assert [outcome_of(tier, part) for tier in tiers] == [Outcome.OK, Outcome.MISS, Outcome.OK]
    assert all(not tier.statistics().failed for tier in tiers)


def test_a_rotated_key_is_readable_until_it_is_removed_and_then_a_miss(
    server: Server, connect: Connect
) -> None:
    part = stored(connect(OLD), 50)
    before = sorted(server.key_names())
    rotated = connect(NEW, OLD)
    assert probe_all(rotated, [part[0]]) == [Outcome.OK]
    assert outcome_of(rotated, part) is Outcome.OK
    assert store_all(rotated, [part]) == [Outcome.OK]
    assert sorted(server.key_names()) == before, "what can be read is not stored again"
    removed = connect(NEW)
    assert probe_all(removed, [part[0]]) == [Outcome.MISS]
    assert outcome_of(removed, part) is Outcome.MISS
    assert sorted(server.key_names()) == before, "what it cannot read it leaves alone"
    assert store_all(removed, [part]) == [Outcome.OK]
    assert outcome_of(removed, part) is Outcome.OK
    assert removed.statistics().failed == {}
    rotated.remove([part[0]])
    eventually(lambda: not server.key_names())


def test_during_a_rotation_nodes_that_are_ahead_and_behind_share(connect: Connect) -> None:
    behind, ahead = connect(OLD, NEW), connect(NEW, OLD)
    theirs, ours = stored(behind, 60), stored(ahead, 61)
    assert [outcome_of(tier, part) for tier in (behind, ahead) for part in (theirs, ours)] == [Outcome.OK] * 4


def test_a_part_may_be_stored_half_under_each_key(server: Server, connect: Connect) -> None:
    rotated = connect(NEW, OLD)
    part = stored(connect(OLD), 62)
    server.ask("UNLINK", name(part[0], 1, OLD))
    assert outcome_of(rotated, part) is Outcome.MISS
    assert store_all(rotated, [part]) == [Outcome.OK]
    keys = [OLD, NEW, OLD]
    assert sorted(server.key_names()) == sorted(name(part[0], i, key) for i, key in enumerate(keys))
    assert outcome_of(rotated, part) is Outcome.OK


def test_damage_under_an_old_key_removes_that_value_alone(server: Server, connect: Connect) -> None:
    rotated = connect(NEW, OLD)
    part = stored(connect(OLD), 63, 1000)
    server.ask("SETRANGE", name(part[0], 0, OLD), "500", b"damage")
    assert outcome_of(rotated, part) is Outcome.CORRUPT
    assert server.key_names() == []
    assert store_all(rotated, [part]) == [Outcome.OK]
    assert server.key_names() == [name(part[0], 0, NEW)]


def test_keys_are_told_from_each_other_in_a_cluster_too(cluster: Cluster) -> None:
    """The names of one stripe under two keys live on different shards."""
    tiers = [
        ValkeyTier.connect(cluster.settings(protection=Sealed(KeyRing(keys))))
        for keys in ((OLD,), (NEW, OLD), (NEW,))
    ]
    try:
        parts = [(some_ref(6 << 20, seed), some_bytes(6 << 20, seed)) for seed in range(70, 76)]
        assert store_all(tiers[0], parts) == [Outcome.OK] * 6
        assert [outcome_of(tiers[1], part) for part in parts] == [Outcome.OK] * 6
        assert [outcome_of(tiers[2], part) for part in parts] == [Outcome.MISS] * 6
    finally:
        for tier in tiers:
            tier.close()


def test_what_changed_in_memory_since_its_commit_is_not_encrypted(server: Server, connect: Connect) -> None:
    """Encryption would make damage look sound; others in the same pipeline go through."""
    tier = connect(NEW)
    parts = [(some_ref(PART_BYTES, seed), some_bytes(PART_BYTES, seed)) for seed in range(80, 84)]
    checksums = [part_checksums(data) for _, data in parts]
    parts[1][1][PART_BYTES - 1] ^= 1
    results = Results(len(parts))
    items = [StoreItem(ref, data, sums) for (ref, data), sums in zip(parts, checksums, strict=True)]
    tier.store(items, deadline=time.monotonic() + WAIT_S, done=results.done)
    wanted = [Outcome.OK, Outcome.REFUSED, Outcome.OK, Outcome.OK]
    assert results.wait() == wanted
    assert tier.statistics().failed == {"corrupt_source": 1}
    assert [outcome_of(tier, part) for part in (parts[0], *parts[2:])] == [Outcome.OK] * 3
    eventually(lambda: len(server.key_names()) == 3 * len(stripe_plan(PART_BYTES)))
    assert tier.statistics().inflight_bytes == 0


def test_encrypted_bytes_are_never_seen_in_the_pool(connect: Connect) -> None:
    """A reader of the slot sees old bytes or plain ones: those who map the pool are told nothing else."""
    tier = connect(NEW)
    part = (some_ref(2 << 20, 90), memoryview(bytearray(2 << 20)))
    assert store_all(tier, [part]) == [Outcome.OK]
    memory = memoryview(bytearray(2 << 20))
    done = threading.Event()
    found: list[FetchResult] = []

    def finished(_: int, result: FetchResult) -> None:
        found.append(result)
        done.set()

    tier.fetch([FetchItem(part[0], memory)], deadline=time.monotonic() + WAIT_S, done=finished)
    while not done.is_set():
        assert not any(memory[:: 1 << 12])
    assert found[0].outcome is Outcome.OK


def test_no_key_shows_in_what_the_tier_tells(connect: Connect) -> None:
    tier = connect(NEW, OLD)
    shown = f"{tier.statistics()!r} {tier._settings!r}"
    assert NEW.key_id.hex() in shown
    assert OLD.key_id.hex() in shown
    assert "02" * 8 not in shown
    assert "\\x02" * 4 not in shown
