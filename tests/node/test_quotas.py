"""What a domain may take is bounded: bytes in Valkey, writes, pins, reservations, loads, lookups."""

import time
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest
from tests.node.conftest import make_engine
from tests.node.fleet import (
    NAMESPACE,
    PART_BYTES,
    POOL_BYTES,
    WAIT_S,
    Engine,
    at_rest,
    digests,
    eventually,
    fill_tier,
    settings,
)

from kvferry.client.messages import LoadEnd, Reason, ReserveOutcome
from kvferry.identity.names import PartKey
from kvferry.node import lookups, search
from kvferry.node.estimate import Estimator
from kvferry.node.ledger import stored_bytes
from kvferry.node.node import Node
from kvferry.node.pins import SHARE_DIVISOR
from kvferry.node.saves import CONNECTION_DIVISOR, RESERVED_DIVISOR
from kvferry.node.writerate import IDLE_CREDIT_S, WriteRate
from kvferry.testing.memory_tier import MemoryTier
from kvferry.tiers.contract import Outcome

STORED_BYTES = stored_bytes(PART_BYTES)
QUOTA = 20 * STORED_BYTES
POOL_PARTS = POOL_BYTES // PART_BYTES


@pytest.fixture
def limited(tmp_path: Path, stack: ExitStack, tier: MemoryTier) -> Node:
    """A node that may hold twenty parts in the tier."""
    node = Node(replace(settings(tmp_path), valkey_quota=QUOTA), tier=tier)
    stack.callback(node.close)
    node.start()
    return node


def _held_bytes(tier: MemoryTier) -> int:
    return sum(stored_bytes(len(data)) for data in list(tier.parts.values()))


def _used(node: Node) -> int:
    quota = node.statistics().quota
    assert quota is not None
    return quota.used_bytes


# ---- bytes in Valkey


def test_a_flood_replaces_what_the_node_stored_before_and_nothing_of_others(
    limited: Node, stack: ExitStack, tier: MemoryTier
) -> None:
    engine = make_engine(limited.settings.socket_path, stack)
    others = digests(10, "of another node")
    fill_tier(tier, others)
    foreign = set(tier.parts)
    for number in range(12):
        assert engine.save(digests(5, f"prompt {number}")) == 5
        at_rest(limited)
        assert _held_bytes(tier) - 10 * STORED_BYTES <= QUOTA
        assert _used(limited) == _held_bytes(tier) - 10 * STORED_BYTES
    assert foreign <= set(tier.parts)
    newest = {PartKey(NAMESPACE.namespace, chunk, 0) for chunk in digests(5, "prompt 11")}
    assert newest <= set(tier.parts)
    now = limited.statistics()
    assert now.quota is not None
    assert now.quota.removed_parts == 60 - 20
    assert now.counters.stored_parts == 60


def test_what_is_used_stays_and_what_is_not_goes(limited: Node, stack: ExitStack, tier: MemoryTier) -> None:
    engine = make_engine(limited.settings.socket_path, stack)
    system_prompt = digests(4, "of everybody")
    engine.save(system_prompt)
    for number in range(10):
        engine.save(digests(5, f"prompt {number}"), prefix=system_prompt)
        at_rest(limited)
        answer = engine.lookup(system_prompt, f"r{number}")  # served from memory, and made recent behind it
        assert answer.count == 4
        engine.scheduler.end(answer.load_id)
    kept = {PartKey(NAMESPACE.namespace, chunk, 0) for chunk in system_prompt}
    assert kept <= set(tier.parts)
    assert _held_bytes(tier) <= QUOTA


def test_of_a_prefix_larger_than_the_quota_the_head_can_be_used(
    limited: Node, stack: ExitStack, tier: MemoryTier
) -> None:
    engine = make_engine(limited.settings.socket_path, stack)
    engine.save(digests(15, "another"))
    chunks = digests(30)
    for end in (5, 15, 30):
        engine.save(chunks[:end])
        at_rest(limited)
    assert _held_bytes(tier) <= QUOTA
    limited._loop.post(limited._app.state.catalogue.drop)
    eventually(lambda: limited.statistics().catalogue.ready_parts == 0, "dropped")
    assert engine.lookup(chunks).count == 20


def test_what_is_seen_to_be_missing_no_longer_counts(
    limited: Node, stack: ExitStack, tier: MemoryTier
) -> None:
    engine = make_engine(limited.settings.socket_path, stack)
    chunks = digests(10)
    engine.save(chunks)
    at_rest(limited)
    assert _used(limited) == 10 * STORED_BYTES
    tier.parts.clear()  # the server evicted them, or was restarted
    limited._loop.post(limited._app.state.catalogue.drop)
    eventually(lambda: limited.statistics().catalogue.ready_parts == 0, "dropped")
    answer = engine.lookup(chunks)
    assert (answer.count, answer.reason) == (0, Reason.ABSENT)
    eventually(lambda: _used(limited) == 0, "nothing counted")


def test_a_part_larger_than_the_quota_is_refused_with_a_counter_of_its_own(
    tmp_path: Path, stack: ExitStack, tier: MemoryTier
) -> None:
    node = Node(replace(settings(tmp_path), valkey_quota=PART_BYTES), tier=tier)
    stack.callback(node.close)
    node.start()
    engine = make_engine(node.settings.socket_path, stack)
    engine.save(digests(2))
    at_rest(node)
    assert not tier.parts
    assert node.statistics().counters.store_failed == {Outcome.OVER_QUOTA.value: 2}


def test_nothing_more_is_stored_while_what_has_to_go_stays(
    limited: Node, stack: ExitStack, tier: MemoryTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine(limited.settings.socket_path, stack)
    engine.save(digests(20))
    at_rest(limited)
    kept = set(tier.parts)

    def refuse(refs, *, done=None):  # type: ignore[no-untyped-def]
        done([Outcome.REFUSED for _ in refs])

    with monkeypatch.context() as patch:
        patch.setattr(tier, "remove", refuse)
        engine.save(digests(4, "more"))
        at_rest(limited)
        assert set(tier.parts) == kept
        assert limited.statistics().counters.store_failed == {"refused": 4}
        assert _used(limited) == QUOTA
    engine.save(digests(4, "later"))
    at_rest(limited)
    assert len(set(tier.parts) & kept) == 16
    assert _used(limited) == QUOTA == _held_bytes(tier)


def test_a_node_that_closes_with_stores_waiting_for_room_ends_them(
    limited: Node, stack: ExitStack, tier: MemoryTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine(limited.settings.socket_path, stack)
    engine.save(digests(20))
    at_rest(limited)
    asked: list[object] = []
    monkeypatch.setattr(tier, "remove", lambda refs, *, done=None: asked.append(done))  # and never answers
    engine.save(digests(4, "more"))
    eventually(lambda: asked, "a removal")
    limited.close()
    assert len(tier.parts) == 20


def test_after_a_restart_what_was_stored_before_is_nobodys(tmp_path: Path, stack: ExitStack) -> None:
    """And is not removed by the node: it leaves by the server's own eviction."""
    before = MemoryTier("valkey")
    first = Node(replace(settings(tmp_path), valkey_quota=QUOTA), tier=before)
    first.start()
    engine = Engine(first.settings.socket_path).connected()
    engine.save(digests(20))
    at_rest(first)
    engine.close()
    first.close()
    after = MemoryTier("valkey")
    after.parts.update(before.parts)
    second = Node(replace(settings(tmp_path), valkey_quota=QUOTA), tier=after)
    stack.callback(second.close)
    second.start()
    engine = make_engine(second.settings.socket_path, stack)
    assert _used(second) == 0
    engine.save(digests(20, "new"))
    at_rest(second)
    assert len(after.parts) == 40
    assert _used(second) == QUOTA


# ---- writes per second


def test_what_is_written_in_any_time_is_bounded_by_the_rate() -> None:
    rate, now, written = WriteRate(1000), 100.0, 0
    for step in range(1000):
        now += (step % 7) * 0.01
        if not rate.wait_s(now):
            rate.spend(300, now)
            written += 300
    assert written <= 1000 * (now - 100.0 + IDLE_CREDIT_S) + 300
    assert written >= 1000 * (now - 100.0) * 0.9
    assert WriteRate(None).wait_s(0.0) == 0.0


def test_what_is_over_the_write_rate_waits_in_the_backlog_and_is_dropped_beyond_it(
    tmp_path: Path, stack: ExitStack, tier: MemoryTier
) -> None:
    node = Node(replace(settings(tmp_path), valkey_write_rate=PART_BYTES), tier=tier)
    stack.callback(node.close)
    began = time.monotonic()
    node.start()
    engine = make_engine(node.settings.socket_path, stack)
    assert engine.save(digests(60)) == 60  # memory is not slower for it
    eventually(lambda: node.statistics().counters.committed_parts == 60, "commit")
    now = node.statistics()
    assert now.counters.stored_parts <= 2 + time.monotonic() - began
    assert now.writeback_backlog_bytes <= 30 * PART_BYTES
    dropped = now.counters.store_dropped_parts
    assert dropped >= 60 - 30 - (2 + time.monotonic() - began)
    eventually(lambda: node.statistics().counters.stored_parts >= 3, "it goes on")
    now = node.statistics()
    assert now.counters.stored_parts <= 2 + time.monotonic() - began
    assert now.write_rate == PART_BYTES


# ---- pins and loads


def test_one_engines_loads_hold_at_most_their_share_and_others_load_meanwhile(
    node: Node, stack: ExitStack, tier: MemoryTier
) -> None:
    hog = make_engine(node.settings.socket_path, stack, "hog")
    answers = []
    for number in range(4):
        chunks = digests(30, f"hog {number}")
        fill_tier(tier, chunks)
        answers.append((hog.lookup(chunks, f"r{number}"), chunks))
    eventually(lambda: node.statistics().fetches == 0, "as much as there is room for")
    assert node.statistics().catalogue.pinned_bytes == POOL_BYTES // SHARE_DIVISOR
    other = make_engine(node.settings.socket_path, stack, "other")
    chunks = digests(20, "other")
    fill_tier(tier, chunks)
    assert other.save(digests(10, "saved")) == 10
    answer = other.lookup(chunks)
    assert other.load(answer, chunks) == [LoadEnd(Reason.COMPLETE, 20)]
    for answer, chunks in answers:  # and its own go on as soon as it copies
        assert hog.load(answer, chunks) == [LoadEnd(Reason.COMPLETE, 30)]
    at_rest(node)


def test_many_loads_of_one_prefix_count_it_once(node: Node, engine: Engine, tier: MemoryTier) -> None:
    chunks = digests(POOL_PARTS // SHARE_DIVISOR)
    engine.save(chunks)
    at_rest(node)
    answers = [engine.lookup(chunks, f"r{number}") for number in range(20)]
    assert [answer.count for answer in answers] == [len(chunks)] * 20
    assert node.statistics().catalogue.pins == 20 * len(chunks)  # none of them waits for room
    for answer in answers:
        engine.scheduler.end(answer.load_id)
    at_rest(node)


def test_a_prefix_in_memory_that_is_larger_than_the_share_streams(tmp_path: Path, stack: ExitStack) -> None:
    node = Node(settings(tmp_path))  # without anything behind it
    stack.callback(node.close)
    node.start()
    engine = make_engine(node.settings.socket_path, stack)
    chunks = digests(POOL_PARTS - 4)
    assert engine.save(chunks) == len(chunks)
    eventually(lambda: node.statistics().counters.committed_parts == len(chunks), "commit")
    answer = engine.lookup(chunks)
    assert answer.count == len(chunks)
    assert node.statistics().catalogue.pinned_bytes == POOL_BYTES // SHARE_DIVISOR
    assert engine.load(answer, chunks) == [LoadEnd(Reason.COMPLETE, len(chunks))]
    at_rest(node)


def test_what_was_evicted_while_a_load_waited_for_its_share_is_a_failure_and_no_miss(
    tmp_path: Path, stack: ExitStack
) -> None:
    node = Node(settings(tmp_path))
    stack.callback(node.close)
    node.start()
    engine = make_engine(node.settings.socket_path, stack)
    chunks = digests(POOL_PARTS - 4)
    engine.save(chunks)
    eventually(lambda: node.statistics().counters.committed_parts == len(chunks), "commit")
    answer = engine.lookup(chunks)
    assert answer.count == len(chunks)
    dropped = node._app.state.catalogue.drop
    node._loop.post(dropped)
    [end] = engine.load(answer, chunks)
    assert end == LoadEnd(Reason.GONE, POOL_PARTS // SHARE_DIVISOR)
    now = node.statistics()
    assert (now.counters.missed_chunks, now.counters.failed) == (0, {"gone": 1})
    at_rest(node)


def test_an_engine_that_reserves_and_stops_holds_its_share_and_no_more(
    node: Node, engine: Engine, stack: ExitStack
) -> None:
    stopped = [make_engine(node.settings.socket_path, stack, f"stopped {n}") for n in range(3)]
    held = []
    for number, other in enumerate(stopped):
        slots = other.worker.reserve([], digests(POOL_PARTS, f"held {number}"), part=0, timeout_s=WAIT_S)
        held.append(sum(slot.outcome is ReserveOutcome.RESERVED for slot in slots))
        assert {slot.outcome for slot in slots} <= {ReserveOutcome.RESERVED, ReserveOutcome.FULL}
    assert max(held) == held[0] == POOL_PARTS // CONNECTION_DIVISOR
    assert sum(held) == POOL_PARTS // RESERVED_DIVISOR
    assert node.statistics().counters.reserve_declined["limit"] == 3 * POOL_PARTS - sum(held)
    stopped[0].worker.abandon(0, digests(POOL_PARTS, "held 0"))
    assert engine.save(digests(10)) == 10  # others go on
    assert node.statistics().catalogue.filling_bytes <= POOL_BYTES // RESERVED_DIVISOR


def test_lookups_beyond_the_bounds_are_refused_as_such_and_never_as_absent(
    node: Node, engine: Engine, tier: MemoryTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(search, "MAX_PENDING_CHUNKS_PER_CONNECTION", 10)
    tier.hold()
    before = node.statistics().counters.missed_chunks
    answer = engine.lookup(digests(11), "too many")
    assert (answer.count, answer.reason) == (0, Reason.LIMIT)
    assert node.statistics().counters.failed["limit"] == 1
    assert node.statistics().counters.missed_chunks == before
    tier.release()
    answer = engine.lookup(digests(10), "few enough")
    assert answer.reason is Reason.ABSENT
    at_rest(node)


def test_loads_beyond_the_nodes_bound_are_refused_as_such(
    node: Node, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lookups, "MAX_LOADS", 2)
    engine.save(digests(1))
    at_rest(node)
    answers = [engine.lookup(digests(1), f"r{number}") for number in range(3)]
    assert [answer.reason for answer in answers] == [Reason.COMPLETE, Reason.COMPLETE, Reason.LIMIT]
    for answer in answers:
        engine.scheduler.end(answer.load_id)
    at_rest(node)


def test_what_a_defect_leaves_pinned_is_given_back_with_its_connection(
    node: Node, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    chunks = digests(5)
    engine.save(chunks)
    at_rest(node)
    monkeypatch.setattr(Estimator, "decide", lambda *_: 1 / 0)
    assert engine.lookup(chunks).reason is Reason.NODE_DOWN
    monkeypatch.undo()
    engine.connected()
    assert node.statistics().catalogue.pins == 0
    node.check()
    assert engine.lookup(chunks, "again").count == 5
