"""What a node says about itself and about any recent request."""

from tests.node.fleet import PART_BYTES, Engine, at_rest, digests, eventually, fill_tier

from kvferry.client.admin import AdminClient
from kvferry.client.messages import Report
from kvferry.node.node import Node
from kvferry.testing.memory_tier import MemoryTier


def test_explain_tells_what_was_reused_from_where_and_why_it_ended(
    node: Node, engine: Engine, tier: MemoryTier
) -> None:
    chunks = digests(8)
    engine.save(chunks[:3])
    at_rest(node)
    fill_tier(tier, chunks[3:5])
    answer = engine.lookup(chunks, "cmpl-abc-0-12345678", first_chunk=1)
    engine.load(answer, chunks)
    engine.scheduler.report(Report(request_id="cmpl-abc-0-12345678", loaded_tokens=512, note="seen"))
    at_rest(node)
    with AdminClient(node.settings.socket_path) as admin:
        (record,) = admin.explain("cmpl-abc")
        assert admin.explain("nothing") == []
    assert record["chunks"] == 8
    assert record["engine_chunks"] == 1
    assert record["reused_chunks"] == {"memory": 2, "valkey": 2}
    assert record["reused_bytes"] == {"memory": 2 * PART_BYTES, "valkey": 2 * PART_BYTES}
    assert record["first_missing_chunk"] == 5
    assert record["reason"] == "absent"
    assert record["load_reason"] == "complete"
    assert record["report"]["note"] == "seen"
    assert record["load_s"] > 0


def test_a_miss_says_when_the_chunk_was_evicted(node: Node, engine: Engine, tier: MemoryTier) -> None:
    wanted = digests(2)
    engine.save(wanted)
    at_rest(node)
    tier.parts.clear()
    for batch in range(6):
        engine.save(digests(20, f"other{batch}"))
        at_rest(node)
    answer = engine.lookup(wanted)
    assert answer.count < 2
    assert answer.reason.value == "evicted"


def test_status_names_the_engines_and_counts_by_tier(node: Node, engine: Engine, tier: MemoryTier) -> None:
    chunks = digests(4)
    fill_tier(tier, chunks)
    engine.load(engine.lookup(chunks), chunks)
    engine.load(engine.lookup(chunks, "again"), chunks)
    at_rest(node)
    with AdminClient(node.settings.socket_path) as admin:
        status = admin.status()
    assert status["counters"]["hit_tokens"] == {"valkey": 512, "memory": 512}
    assert status["counters"]["hit_bytes"]["memory"] == 4 * PART_BYTES
    assert sorted((engine["role"], engine["label"]) for engine in status["engines"]) == [
        ("scheduler", "model"),
        ("worker", "model"),
    ]
    assert status["epoch"] == node.epoch
    assert status["tier"]["name"] == "valkey"


def test_dropping_memory_leaves_pinned_parts_and_the_tier_alone(
    node: Node, engine: Engine, tier: MemoryTier
) -> None:
    chunks = digests(4)
    engine.save(chunks)
    at_rest(node)
    answer = engine.lookup(chunks[:1], "holds")
    with AdminClient(node.settings.socket_path) as admin:
        assert admin.drop("memory")["dropped_bytes"] == 3 * PART_BYTES
    engine.scheduler.end(answer.load_id)
    eventually(lambda: node.statistics().loads == 0, "ended")
    assert len(tier.parts) == 4
