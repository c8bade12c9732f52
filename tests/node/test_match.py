"""A question that loads nothing: how many chunks could be loaded."""

import time
from pathlib import Path

from tests.node.fleet import Engine, at_rest, digests

from kvferry.client.messages import MatchAnswer, NamespaceInfo, Reason
from kvferry.client.scheduler import SchedulerClient
from kvferry.node.node import Node
from kvferry.testing.expectations import eventually


def test_what_memory_holds_is_matched_and_nothing_stays_pinned(node: Node, engine: Engine) -> None:
    chunks = digests(5)
    assert engine.scheduler.match(chunks) == MatchAnswer(0, Reason.ABSENT)
    engine.save(chunks[:3])
    eventually(lambda: engine.scheduler.match(chunks) == MatchAnswer(3, Reason.ABSENT), "the match")
    assert engine.scheduler.match(chunks[:2]) == MatchAnswer(2, Reason.COMPLETE)
    at_rest(node)


def test_without_a_node_nothing_is_matched_at_once(tmp_path: Path) -> None:
    client = SchedulerClient(
        socket_path=tmp_path / "none.sock",
        engine="e",
        namespace=NamespaceInfo(b"test" + b"n" * 12, (4096,), 128, "test"),
    )
    try:
        began = time.monotonic()
        assert client.match(digests(2)).reason in (Reason.NODE_DOWN, Reason.BREAKER)
        assert time.monotonic() - began < 60.0
    finally:
        client.close()


def test_a_chunk_that_is_no_digest_costs_no_connection(engine: Engine) -> None:
    assert engine.scheduler.match([b"short"]) == MatchAnswer(0, Reason.REFUSED)
    assert engine.scheduler.connected
