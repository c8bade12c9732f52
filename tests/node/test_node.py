"""A node with engines on real sockets and a tier in memory."""

from contextlib import ExitStack
from pathlib import Path

import pytest
from tests.node.conftest import make_engine
from tests.node.fleet import (
    NAMESPACE,
    PART_BYTES,
    POOL_BYTES,
    TWO_PARTS,
    WAIT_S,
    Engine,
    at_rest,
    content,
    digests,
    eventually,
    fill_tier,
    settings,
)

from kvferry.client import scheduler
from kvferry.client.messages import LoadEnd, Pending, Prefill, ReadyPart, Reason, Tier
from kvferry.identity.names import PartKey
from kvferry.node.node import Node
from kvferry.testing.memory_tier import MemoryTier
from kvferry.tiers.contract import Outcome


def _key(digest: bytes, part: int = 0) -> PartKey:
    return PartKey(NAMESPACE.namespace, digest, part)


def _engine(node: Node, stack: ExitStack, name: str) -> Engine:
    engine = Engine(node.settings.socket_path, name=name)
    stack.callback(engine.close)
    return engine.connected()


def test_what_one_engine_saves_another_loads_from_memory(
    node: Node, engine: Engine, stack: ExitStack
) -> None:
    other = _engine(node, stack, "other")
    chunks = digests(8)
    assert engine.save(chunks) == 8
    eventually(lambda: node.statistics().counters.committed_parts == 8, "commit")
    answer = other.lookup([*chunks, *digests(2, "question")])
    assert (answer.count, answer.reason) == (8, Reason.ABSENT)
    assert answer.tiers == (Tier.MEMORY,) * 8
    assert all(place is not None for parts in answer.parts for place in parts)
    assert other.load(answer, chunks) == [LoadEnd(Reason.COMPLETE, 8)]
    at_rest(node)


def test_a_chunk_that_exists_is_not_stored_twice(node: Node, engine: Engine, tier: MemoryTier) -> None:
    chunks = digests(4)
    assert engine.save(chunks) == 4
    at_rest(node)
    assert engine.save(chunks) == 0
    engine.lookup(chunks)
    assert tier.statistics().stored_parts == 4


def test_what_is_in_the_tier_is_not_written_back_again(node: Node, engine: Engine, tier: MemoryTier) -> None:
    chunks = digests(4)
    fill_tier(tier, chunks)
    assert engine.save(chunks) == 4
    at_rest(node)
    assert tier.statistics().stored_parts == 0
    assert node.statistics().counters.store_present_parts == 4


def test_commits_reach_the_tier_and_come_back_from_it(node: Node, engine: Engine, tier: MemoryTier) -> None:
    chunks = digests(6)
    engine.save(chunks)
    eventually(lambda: len(tier.parts) == 6, "write-back")
    at_rest(node)
    assert tier.parts[_key(chunks[3])] == content(chunks[3], 0)
    engine_drop(node)
    answer = engine.lookup(chunks)
    assert (answer.count, answer.reason, answer.tiers) == (6, Reason.COMPLETE, (Tier.VALKEY,) * 6)
    assert engine.load(answer, chunks) == [LoadEnd(Reason.COMPLETE, 6)]
    again = engine.lookup(chunks, "r2")
    assert again.tiers == (Tier.MEMORY,) * 6
    engine.load(again, chunks)
    at_rest(node)


def engine_drop(node: Node) -> None:
    from kvferry.client.admin import AdminClient

    with AdminClient(node.settings.socket_path) as admin:
        assert admin.drop("memory")["dropped_bytes"] > 0


def test_memory_and_tier_together_serve_one_prefix(node: Node, engine: Engine, tier: MemoryTier) -> None:
    chunks = digests(9)
    fill_tier(tier, chunks[3:6])
    engine.save(chunks[:3])
    engine.save(chunks[6:])
    eventually(lambda: node.statistics().counters.committed_parts == 6, "commit")
    answer = engine.lookup(chunks)
    assert answer.count == 9
    assert answer.tiers == (Tier.MEMORY,) * 3 + (Tier.VALKEY,) * 3 + (Tier.MEMORY,) * 3
    assert engine.load(answer, chunks) == [LoadEnd(Reason.COMPLETE, 9)]
    at_rest(node)


def test_a_hole_ends_the_prefix(node: Node, engine: Engine, tier: MemoryTier) -> None:
    chunks = digests(8)
    fill_tier(tier, chunks[:3] + chunks[4:])
    answer = engine.lookup(chunks)
    assert (answer.count, answer.reason) == (3, Reason.ABSENT)
    engine.load(answer, chunks)
    assert node.statistics().counters.missed_chunks == 5
    at_rest(node)


def test_what_the_engine_has_itself_is_not_loaded(node: Node, engine: Engine, tier: MemoryTier) -> None:
    chunks = digests(6)
    fill_tier(tier, chunks[4:])
    answer = engine.lookup(chunks, first_chunk=4)
    assert (answer.first_chunk, answer.count) == (4, 2)
    assert engine.load(answer, chunks) == [LoadEnd(Reason.COMPLETE, 6)]
    at_rest(node)


def test_a_chunk_counts_only_with_all_its_parts(node: Node, stack: ExitStack, tier: MemoryTier) -> None:
    engine = Engine(node.settings.socket_path, TWO_PARTS)
    stack.callback(engine.close)
    engine.connected()
    chunks = digests(4)
    engine.save(chunks[:2])
    fill_tier(tier, chunks[2:], TWO_PARTS)
    del tier.parts[PartKey(TWO_PARTS.namespace, chunks[3], 1)]
    eventually(lambda: node.statistics().counters.committed_parts == 4, "commit")
    answer = engine.lookup(chunks)
    assert answer.count == 3
    assert engine.load(answer, chunks) == [LoadEnd(Reason.COMPLETE, 3)] * 2
    at_rest(node)


def test_two_engines_that_want_one_missing_prefix_cause_one_fetch(
    node: Node, engine: Engine, stack: ExitStack, tier: MemoryTier
) -> None:
    other = _engine(node, stack, "other")
    chunks = digests(5)
    fill_tier(tier, chunks)
    first = engine.lookup(chunks)
    second = other.lookup(chunks)
    assert engine.load(first, chunks) == other.load(second, chunks) == [LoadEnd(Reason.COMPLETE, 5)]
    assert tier.statistics().fetched_parts == 5
    assert node.statistics().counters.missed_chunks == 0
    at_rest(node)


def test_the_death_of_the_first_passes_the_fetch_on(
    node: Node, engine: Engine, stack: ExitStack, tier: MemoryTier
) -> None:
    doomed = _engine(node, stack, "doomed")
    chunks = digests(5)
    fill_tier(tier, chunks)
    fetching = _hold_after_probe(tier)
    first = doomed.lookup(chunks, "doomed")
    second = engine.lookup(chunks, "second")
    assert first.count == second.count == 5
    doomed.close()
    eventually(lambda: node.statistics().loads == 1, "the dead engine's load is gone")
    fetching()
    assert engine.load(second, chunks) == [LoadEnd(Reason.COMPLETE, 5)]
    assert tier.statistics().fetched_parts == 5
    at_rest(node)


def _hold_after_probe(tier: MemoryTier):  # type: ignore[no-untyped-def]
    """Let probes through and hold fetches, until the returned function is called."""
    real = tier.fetch
    held: list[tuple] = []  # type: ignore[type-arg]
    tasks: list[object] = []

    class Held:
        def cancel(self) -> None:
            for task in tasks:
                task.cancel()  # type: ignore[attr-defined]

    def fetch(items, *, deadline, done):  # type: ignore[no-untyped-def]
        held.append((items, deadline, done))
        return Held()

    def release() -> None:
        tier.fetch = real  # type: ignore[method-assign]
        for items, deadline, done in held:
            tasks.append(real(items, deadline=deadline, done=done))

    tier.fetch = fetch  # type: ignore[method-assign]
    return release


def test_a_prefix_larger_than_the_pool_streams_through_it(
    node: Node, engine: Engine, tier: MemoryTier
) -> None:
    chunks = digests(160)  # 160 MiB through a pool of 64
    fill_tier(tier, chunks)
    answer = engine.lookup(chunks)
    assert answer.count == 160
    assert engine.load(answer, chunks) == [LoadEnd(Reason.COMPLETE, 160)]
    assert tier.statistics().fetched_parts == 160
    at_rest(node)


def test_a_full_pool_is_at_once_a_partial_hit(
    node: Node, engine: Engine, tier: MemoryTier, stack: ExitStack
) -> None:
    held = []
    for name in ("one half", "the other half"):  # no engine alone may hold more
        other = make_engine(node.settings.socket_path, stack, name)
        fill_tier(tier, digests(32, name))
        held.append((other, other.lookup(digests(32, name))))
    eventually(lambda: node.statistics().catalogue.pinned_bytes == POOL_BYTES, "all of it is pinned")
    chunks = digests(3)
    fill_tier(tier, chunks)
    answer = engine.lookup(chunks)
    assert (answer.count, answer.reason) == (0, Reason.POOL_FULL)
    assert node.statistics().counters.failed["pool-full"] == 1
    for other, holding in held:
        other.scheduler.end(holding.load_id)
    eventually(lambda: node.statistics().loads == 0, "the pool is free")
    answer = engine.lookup(chunks, "again")
    assert engine.load(answer, chunks) == [LoadEnd(Reason.COMPLETE, 3)]
    assert node.statistics().counters.missed_chunks == 0
    at_rest(node)


def test_gone_between_lookup_and_load_ends_the_load_there(
    node: Node, engine: Engine, tier: MemoryTier
) -> None:
    chunks = digests(5)
    fill_tier(tier, chunks)
    real = tier.probe

    def probe(refs, *, deadline, done):  # type: ignore[no-untyped-def]
        def lie(outcomes):  # type: ignore[no-untyped-def]
            tier.parts.pop(_key(chunks[3]), None)
            done(outcomes)

        real(refs, deadline=deadline, done=lie)

    tier.probe = probe  # type: ignore[method-assign]
    answer = engine.lookup(chunks)
    assert answer.count == 5
    assert engine.load(answer, chunks) == [LoadEnd(Reason.GONE, 3)]
    counters = node.statistics().counters
    assert counters.failed["gone"] == 1
    assert counters.missed_chunks == 0
    at_rest(node)


def test_a_failing_fetch_is_counted_by_cause_and_not_as_a_miss(
    node: Node, engine: Engine, tier: MemoryTier
) -> None:
    chunks = digests(4)
    fill_tier(tier, chunks)
    real = tier.probe

    def probe(refs, *, deadline, done):  # type: ignore[no-untyped-def]
        def then(outcomes):  # type: ignore[no-untyped-def]
            tier.fail(_key(chunks[2]), Outcome.CORRUPT)
            done(outcomes)

        real(refs, deadline=deadline, done=then)

    tier.probe = probe  # type: ignore[method-assign]
    answer = engine.lookup(chunks)
    assert engine.load(answer, chunks) == [LoadEnd(Reason.CORRUPT, 2)]
    assert node.statistics().counters.failed["corrupt"] == 1
    assert node.statistics().counters.missed_chunks == 0
    at_rest(node)


def test_a_tier_that_is_down_leaves_memory_hits(node: Node, engine: Engine, tier: MemoryTier) -> None:
    chunks = digests(6)
    engine.save(chunks[:4])
    at_rest(node)
    for chunk in chunks[4:]:
        tier.fail(_key(chunk), Outcome.REFUSED)
    answer = engine.lookup(chunks)
    assert (answer.count, answer.reason) == (4, Reason.TIER_DOWN)
    assert engine.load(answer, chunks) == [LoadEnd(Reason.COMPLETE, 4)]
    assert node.statistics().counters.failed["tier-down"] == 1
    assert node.statistics().counters.missed_chunks == 0
    at_rest(node)


def test_a_tier_that_hangs_costs_a_lookup_its_bounded_wait_only(
    node: Node, engine: Engine, tier: MemoryTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    chunks = digests(4)
    engine.save(chunks[:2])
    at_rest(node)
    tier.hold()
    monkeypatch.setattr(scheduler, "GRACE_S", WAIT_S)  # it is the node's own bound that is seen here
    engine.scheduler._wait_s = 0.2
    answer = engine.lookup(chunks)
    assert (answer.count, answer.reason) == (2, Reason.DEADLINE)
    engine.load(answer, chunks)
    assert node.statistics().counters.failed["deadline"] == 1
    assert node.statistics().counters.missed_chunks == 0
    tier.release()
    at_rest(node)


def test_a_fetch_past_its_deadline_ends_the_load_and_keeps_its_slots_until_done(
    tmp_path: Path, stack: ExitStack, tier: MemoryTier
) -> None:
    node = Node(settings(tmp_path, deadline_cap_ms=50), tier=tier)
    stack.callback(node.close)
    node.start()
    engine = _engine(node, stack, "engine")
    chunks = digests(3)
    fill_tier(tier, chunks)
    done_at_last = _hold_after_probe(tier)
    answer = engine.lookup(chunks)
    ends = engine.load(answer, chunks)
    assert ends in ([LoadEnd(Reason.DEADLINE, 0)], [LoadEnd(Reason.STALLED, 0)])
    eventually(lambda: node.statistics().loads == 0, "load ended")
    now = node.statistics()
    assert now.catalogue.filling_parts == 3
    assert now.counters.failed["deadline"] + now.counters.failed["stalled"] == 1
    assert now.counters.missed_chunks == 0
    done_at_last()
    at_rest(node)


def test_a_corrupt_copy_removes_the_part_everywhere(node: Node, engine: Engine, tier: MemoryTier) -> None:
    chunks = digests(4)
    engine.save(chunks)
    at_rest(node)
    answer = engine.lookup(chunks)
    stream = engine.worker.load(answer.ticket(0))
    part = stream.next(1.0)
    assert isinstance(part, ReadyPart)
    stream.copied(part.index)
    part = stream.next(1.0)
    assert isinstance(part, ReadyPart)
    stream.corrupt(part.index)
    assert stream.next(1.0) == LoadEnd(Reason.CORRUPT, 2) or stream.next(1.0).reason is Reason.CORRUPT  # type: ignore[union-attr]
    stream.close()
    engine.scheduler.end(answer.load_id)
    eventually(lambda: _key(chunks[1]) not in tier.parts, "removed from the tier")
    assert engine.lookup(chunks, "again").count == 1
    assert node.statistics().counters.corrupt_parts == 1


def test_a_quick_engine_recomputes_what_a_slow_tier_would_take_longer_to_load(
    node: Node, engine: Engine, tier: MemoryTier
) -> None:
    chunks = digests(4)
    fill_tier(tier, chunks)
    ticket = node._app.state.fetch_rate.begin(1 << 20, 0.0)
    node._app.state.fetch_rate.end(ticket, 100.0)  # 10 kB/s
    node._app.state.fetch_rate.probing(node._app.state.loop.clock())
    answer = engine.lookup(chunks, prefill=Prefill(0.0, 1e-6, 0.0))
    assert answer.count == 0
    assert answer.reason is Reason.CHEAPER
    assert node.statistics().counters.recomputed_chunks == 4
    at_rest(node)


def test_an_aborted_request_gives_everything_back(node: Node, engine: Engine, tier: MemoryTier) -> None:
    chunks = digests(10)
    fill_tier(tier, chunks)
    release = _hold_after_probe(tier)
    answer = engine.lookup(chunks)
    stream = engine.worker.load(answer.ticket(0))
    assert stream.next(0.0) is Pending.PENDING
    stream.close()
    engine.scheduler.end(answer.load_id)
    release()
    at_rest(node)
    assert node.statistics().catalogue.used_bytes <= PART_BYTES * 10


def test_a_stored_part_is_pinned_until_it_is_written_and_the_backlog_is_bounded(
    node: Node, engine: Engine, tier: MemoryTier
) -> None:
    tier.hold()
    chunks = digests(40)
    assert engine.save(chunks) == 40
    eventually(lambda: node.statistics().counters.committed_parts == 40, "commit")
    now = node.statistics()
    assert now.writeback_backlog_bytes == 32 * PART_BYTES  # half of the pool
    assert now.counters.store_dropped_parts == 8
    assert now.catalogue.pinned_bytes == 32 * PART_BYTES
    tier.release()
    at_rest(node)
    assert tier.statistics().stored_parts == 32


def test_a_window_that_waits_for_a_busy_engine_is_no_stall(
    node: Node, engine: Engine, tier: MemoryTier
) -> None:
    chunks = digests(60)
    fill_tier(tier, chunks)
    answer = engine.lookup(chunks)
    assert answer.count == 60
    eventually(lambda: node.statistics().fetches == 0, "the window is full")
    live = node._app.loads._loads[answer.load_id]
    live.stall_s = 0.02
    looked = live.progress
    eventually(lambda: live.progress > looked + 0.1, "the timer looked several times")
    assert engine.load(answer, chunks) == [LoadEnd(Reason.COMPLETE, 60)]
    at_rest(node)
