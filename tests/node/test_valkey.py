"""Nodes with a real Valkey server behind them."""

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from tests.node.fleet import NAMESPACE, WAIT_S, Engine, at_rest, digests, eventually, settings
from tests.servers import Server, running_server

from kvferry.client import scheduler
from kvferry.client.messages import LoadEnd, Reason
from kvferry.client.messages import Tier as Place
from kvferry.identity.names import PartKey
from kvferry.node.node import Node
from kvferry.node.quota import QuotaTier
from kvferry.tiers.contract import Tier
from kvferry.tiers.valkey import mover, scout
from kvferry.tiers.valkey.jobs import stripe_key
from kvferry.tiers.valkey.tier import ValkeyTier


@pytest.fixture(scope="module")
def shared_server() -> Iterator[Server]:
    with running_server("--maxmemory", "1gb", "--maxmemory-policy", "allkeys-lru") as server:
        yield server


@pytest.fixture
def server(shared_server: Server) -> Server:
    shared_server.ask("FLUSHALL")
    return shared_server


def _host(path: Path, server: Server, stack: ExitStack, *, tier: Tier | None = None) -> tuple[Node, Engine]:
    """A node with its engine, as one host has them."""
    path.mkdir(mode=0o700)
    node = Node(settings(path), tier=tier or ValkeyTier.connect(server.settings()))
    stack.callback(node.close)
    node.start()
    engine = Engine(node.settings.socket_path)
    stack.callback(engine.close)
    return node, engine.connected()


def test_what_one_host_computes_another_loads_through_valkey(
    tmp_path: Path, server: Server, stack: ExitStack
) -> None:
    here, engine = _host(tmp_path / "here", server, stack)
    there, other = _host(tmp_path / "there", server, stack)
    chunks = digests(20)
    assert engine.save(chunks) == 20
    eventually(lambda: here.statistics().counters.stored_parts == 20, "write-back")
    answer = other.lookup([*chunks, *digests(1, "question")])
    assert (answer.count, answer.reason, answer.tiers) == (20, Reason.ABSENT, (Place.VALKEY,) * 20)
    assert other.load(answer, chunks) == [LoadEnd(Reason.COMPLETE, 20)]
    again = other.lookup(chunks, "again")
    assert again.tiers == (Place.MEMORY,) * 20
    other.scheduler.end(again.load_id)
    at_rest(here)
    at_rest(there)


def test_the_deeper_in_its_prompt_the_sooner_a_chunk_expires(
    tmp_path: Path, server: Server, stack: ExitStack
) -> None:
    """In whatever steps it was computed: 20 chunks are 4 s."""
    server.ask("CONFIG", "SET", "maxmemory-policy", "volatile-ttl")
    stack.callback(server.ask, "CONFIG", "SET", "maxmemory-policy", "allkeys-lru")
    here, engine = _host(tmp_path / "here", server, stack)
    chunks = digests(60)
    for start in (0, 20, 40):
        assert engine.save(chunks[start : start + 20], prefix=chunks[:start]) == 20
        at_rest(here)
    keys = [stripe_key(PartKey(NAMESPACE.namespace, chunks[at], 0), 0) for at in (0, 20, 40, 59)]
    expiries = [server.ask("PEXPIRETIME", key) for key in keys]
    assert all(isinstance(expiry, int) and expiry > 0 for expiry in expiries)
    assert expiries == sorted(expiries, reverse=True)  # type: ignore[type-var]


def test_a_prefix_larger_than_the_pool_streams_from_valkey(
    tmp_path: Path, server: Server, stack: ExitStack
) -> None:
    here, engine = _host(tmp_path / "here", server, stack)
    there, other = _host(tmp_path / "there", server, stack)
    chunks = digests(100)
    for start in range(0, 100, 10):
        assert engine.save(chunks[start : start + 10], prefix=chunks[:start]) == 10
        at_rest(here)
    answer = other.lookup(chunks)
    assert answer.count == 100
    assert other.load(answer, chunks) == [LoadEnd(Reason.COMPLETE, 100)]
    at_rest(there)


def test_a_stopped_valkey_costs_bounded_time_and_comes_back(
    tmp_path: Path, stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = stack.enter_context(running_server())
    node, engine = _host(tmp_path / "here", server, stack)
    chunks = digests(6)
    engine.save(chunks)
    eventually(lambda: node.statistics().counters.stored_parts == 6, "write-back")
    server.pause()
    monkeypatch.setattr(scheduler, "GRACE_S", WAIT_S)  # it is the node's own bound that is seen here
    engine.scheduler._wait_s = 0.5
    answer = engine.lookup([*chunks, *digests(2, "new")])
    assert answer.count == 6
    assert answer.reason in (Reason.DEADLINE, Reason.TIER_DOWN)
    assert engine.load(answer, chunks) == [LoadEnd(Reason.COMPLETE, 6)]
    assert node.statistics().counters.missed_chunks == 0
    server.resume()
    eventually(
        lambda: engine.lookup([*chunks, *digests(1, "new")], "again").reason is Reason.ABSENT,
        "Valkey is back",
    )


def test_one_lookup_pays_for_finding_out_that_valkey_is_silent_and_later_ones_wait_for_nothing(
    tmp_path: Path, stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scout, "PROBE_S", WAIT_S)  # so that no breaker opens meanwhile
    monkeypatch.setattr(mover, "SILENT_S", WAIT_S)
    server = stack.enter_context(running_server())
    node, engine = _host(tmp_path / "here", server, stack)
    engine.save(digests(2))
    eventually(lambda: node.statistics().counters.stored_parts == 2, "write-back")
    server.pause()
    monkeypatch.setattr(scheduler, "GRACE_S", WAIT_S)
    engine.scheduler._wait_s = 0.3
    assert engine.lookup(digests(2, "first"), "first").reason is Reason.DEADLINE
    engine.scheduler._wait_s = 1000.0  # of which nothing is used: the clients' own bound is WAIT_S
    for number in range(5):
        assert engine.lookup(digests(2, f"later {number}"), f"later {number}").reason is Reason.TIER_DOWN
    failed = node.statistics().counters.failed
    assert (failed[Reason.DEADLINE], failed[Reason.TIER_DOWN]) == (1, 5)
    assert node.statistics().counters.missed_chunks == 0
    assert node.statistics().tier.state == "up"  # type: ignore[union-attr]
    server.resume()
    eventually(
        lambda: engine.lookup(digests(2, "first"), "again").reason is Reason.ABSENT, "Valkey is asked again"
    )


def test_a_write_back_outlives_a_short_outage(tmp_path: Path, stack: ExitStack) -> None:
    server = stack.enter_context(running_server())
    node, engine = _host(tmp_path / "here", server, stack)
    server.pause()
    engine.save(digests(6))
    eventually(lambda: node.statistics().tier.state != "up", "the outage is noticed")  # type: ignore[union-attr]
    server.resume()
    eventually(lambda: node.statistics().counters.stored_parts == 6, "stored after all")
    at_rest(node)


def test_what_the_server_left_of_a_part_is_removed_and_no_longer_counts(
    tmp_path: Path, server: Server, stack: ExitStack
) -> None:
    tier = QuotaTier(ValkeyTier.connect(server.settings()), quota_bytes=1 << 30)
    stack.callback(tier.close)
    node, engine = _host(tmp_path / "here", server, stack, tier=tier)
    chunks = digests(3)
    assert engine.save(chunks) == 3
    eventually(lambda: node.statistics().counters.stored_parts == 3, "write-back")
    for chunk in chunks:  # the server evicted the first value of each
        assert server.ask("DEL", stripe_key(PartKey(NAMESPACE.namespace, chunk, 0), 0)) == 1
    assert int(server.ask("DBSIZE")) > 0
    node._loop.post(node._app.state.catalogue.drop)
    eventually(lambda: node.statistics().catalogue.ready_parts == 0, "dropped")
    answer = engine.lookup(chunks)
    assert (answer.count, answer.reason) == (0, Reason.ABSENT)
    eventually(lambda: server.ask("DBSIZE") == 0, "the rest of the parts gone")
    eventually(lambda: tier.quota().used_bytes == 0, "nothing counted")
