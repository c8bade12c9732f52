"""Edges of a node: shared and absent parts, probe limits, recency behind memory, domains, dying clients."""

import socket
import threading
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest
from tests.node.fleet import (
    NAMESPACE,
    PART_BYTES,
    POOL_BYTES,
    WAIT_S,
    Engine,
    at_rest,
    content,
    digests,
    eventually,
    fill_tier,
    settings,
)

from kvferry.client.admin import AdminClient
from kvferry.client.messages import LoadEnd, NamespaceInfo, ReadyPart, Reason, ReserveOutcome
from kvferry.client.stream import LoadStream
from kvferry.client.worker import WorkerClient
from kvferry.errors import RefusedError
from kvferry.identity.names import PartKey
from kvferry.identity.stripes import part_checksums
from kvferry.loop import Loop
from kvferry.node import saves, search
from kvferry.node.node import Node
from kvferry.secret import Secret
from kvferry.testing.memory_tier import MemoryTier

SOME_ABSENT = NamespaceInfo(b"test" + b"z" * 12, (PART_BYTES, 0, PART_BYTES), 128, "test", "hybrid")


def _second_rank(node: Node, stack: ExitStack, namespace: NamespaceInfo = NAMESPACE) -> WorkerClient:
    worker = WorkerClient(socket_path=node.settings.socket_path, engine="engine", rank=1, namespace=namespace)
    stack.callback(worker.close)
    assert worker.wait_connected(WAIT_S)
    return worker


def test_chunks_past_the_probe_limit_do_not_count_as_found(
    node: Node, engine: Engine, tier: MemoryTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(search, "MAX_PROBED_PARTS", 3)
    chunks = digests(5)
    fill_tier(tier, chunks)
    answer = engine.lookup(chunks)
    assert (answer.count, answer.reason) == (3, Reason.LIMIT)
    engine.load(answer, chunks)
    at_rest(node)


def test_ranks_that_share_a_part_both_get_it_whoever_joins_first(
    node: Node, engine: Engine, tier: MemoryTier, stack: ExitStack
) -> None:
    second = _second_rank(node, stack)
    chunks = digests(4)
    fill_tier(tier, chunks)
    answer = engine.lookup(chunks)
    streams = [worker.load(answer.ticket(0)) for worker in (engine.worker, second)]
    for stream in streams:
        assert drain_quietly(stream, chunks) is Reason.COMPLETE
        stream.close()
    engine.scheduler.end(answer.load_id)
    at_rest(node)


def drain_quietly(stream: LoadStream, chunks: list[bytes]) -> Reason:
    """As ranks that share a part do: nobody tells the node what it has copied."""
    while True:
        step = stream.next(WAIT_S)
        if isinstance(step, LoadEnd):
            return step.reason
        assert isinstance(step, ReadyPart)
        assert bytes(step.view) == content(chunks[step.index], 0)


def test_a_rank_that_joins_late_still_gets_what_a_sharing_rank_was_sent(
    node: Node, engine: Engine, tier: MemoryTier, stack: ExitStack
) -> None:
    second = _second_rank(node, stack)
    chunks = digests(4)
    fill_tier(tier, chunks)
    answer = engine.lookup(chunks)
    for worker in (engine.worker, second):
        stream = worker.load(answer.ticket(0))
        assert drain_quietly(stream, chunks) is Reason.COMPLETE
        stream.close()
    engine.scheduler.end(answer.load_id)
    at_rest(node)


def test_after_a_load_from_valkey_the_head_is_its_most_recent_chunk(
    node: Node, engine: Engine, tier: MemoryTier
) -> None:
    chunks = digests(4)
    fill_tier(tier, chunks)
    engine.load(engine.lookup(chunks), chunks)
    at_rest(node)
    newest_first = [key.chunk for key in reversed(tier.parts)]
    assert newest_first == chunks


def test_parts_of_no_bytes_do_not_exist(node: Node, tier: MemoryTier, stack: ExitStack) -> None:
    engine = Engine(node.settings.socket_path, namespace=SOME_ABSENT)
    stack.callback(engine.close)
    engine.connected()
    chunks = digests(3, "some")
    assert engine.save(chunks) == 6
    assert {end.reason for end in engine.load(engine.lookup(chunks), chunks)} == {Reason.COMPLETE}
    others = digests(3, "in the tier alone")
    for digest in others:
        for part in (0, 2):
            tier.parts[PartKey(SOME_ABSENT.namespace, digest, part)] = content(digest, part)
    answer = engine.lookup(others, "from the tier")
    assert answer.count == 3
    assert {end.reason for end in engine.load(answer, others)} == {Reason.COMPLETE}
    at_rest(node)


def test_a_node_serves_the_trust_domain_of_its_first_engine_alone(
    node: Node, engine: Engine, stack: ExitStack
) -> None:
    del engine
    foreign = NamespaceInfo(b"f" * 16, (PART_BYTES,), 128, "another", "model")
    worker = WorkerClient(socket_path=node.settings.socket_path, engine="x", rank=0, namespace=foreign)
    stack.callback(worker.close)
    eventually(lambda: worker.last_error, "refusal")
    assert "trust domain 'test'" in worker.last_error
    assert "'another'" in worker.last_error
    assert worker.mapping is None


def test_a_slot_of_a_lost_connection_is_not_given_away_while_its_engine_may_still_write(
    node: Node, stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(saves, "QUARANTINE_S", 0.5)
    chunk = digests(1)
    first = Engine(node.settings.socket_path, name="first")
    second = Engine(node.settings.socket_path, name="second")
    stack.callback(second.close)
    first.connected()
    second.connected()
    [slot] = first.worker.reserve([], chunk, part=0, timeout_s=WAIT_S)
    assert slot.view is not None
    slot.view[:] = b"x" * PART_BYTES
    first.close()
    eventually(lambda: all(e.engine != "first" for e in node.statistics().engines), "the first is gone")
    [again] = second.worker.reserve([], chunk, part=0, timeout_s=WAIT_S)
    assert again.outcome is ReserveOutcome.BUSY
    at_rest(node)
    assert second.save(chunk) == 1
    at_rest(node)


def test_a_slot_whose_reservation_expired_is_not_given_away_while_its_engine_may_still_write(
    node: Node, stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(saves, "RESERVATION_LEASE_S", 0.1)
    monkeypatch.setattr(saves, "QUARANTINE_S", 0.1)
    chunk = digests(1)
    stopped = Engine(node.settings.socket_path, name="stopped").connected()
    other = Engine(node.settings.socket_path, name="other").connected()
    stack.callback(other.close)
    [slot] = stopped.worker.reserve([], chunk, part=0, timeout_s=WAIT_S)
    assert slot.view is not None
    eventually(lambda: node.statistics().counters.reservations_expired == 1, "expiry")
    assert node.statistics().overdue_reservations == 1
    monkeypatch.setattr(saves, "RESERVATION_LEASE_S", 60.0)
    assert stopped.worker.reserve([], chunk, part=0, timeout_s=WAIT_S)[0].outcome is ReserveOutcome.BUSY
    assert other.save(chunk) == 1  # the part may be stored by others, in a slot of its own
    rest = digests(POOL_BYTES // PART_BYTES - 2, "all the other slots")
    assert other.save(rest) == len(rest)
    slot.view[:] = b"x" * PART_BYTES  # the stopped writer goes on
    for chunks in (chunk, rest):
        other.load(other.lookup(chunks), chunks)  # compares every byte
    node.check()
    stopped.close()
    eventually(lambda: node.statistics().overdue_reservations == 0, "gone with its connection")
    eventually(lambda: node.statistics().catalogue.filling_parts == 0, "the slot is back")


@pytest.mark.parametrize("ends", ["commit", "abandon"])
def test_an_overdue_slot_returns_when_its_engine_is_done_with_it(
    node: Node, engine: Engine, monkeypatch: pytest.MonkeyPatch, ends: str
) -> None:
    monkeypatch.setattr(saves, "RESERVATION_LEASE_S", 0.1)
    chunk = digests(1)
    engine.connected().worker.reserve([], chunk, part=0, timeout_s=WAIT_S)
    eventually(lambda: node.statistics().overdue_reservations == 1, "expiry")
    assert [e.reservations for e in node.statistics().engines if e.role == "worker"] == [1]
    if ends == "commit":
        engine.worker.commit(0, [(chunk[0], part_checksums(memoryview(bytes(PART_BYTES))))])
    else:
        engine.worker.abandon(0, chunk)
    eventually(lambda: node.statistics().overdue_reservations == 0, "the slot is back")
    at_rest(node)
    held = node.statistics().catalogue
    assert (held.ready_parts, held.filling_parts, held.used_bytes) == (0, 0, 0)
    monkeypatch.setattr(saves, "RESERVATION_LEASE_S", 60.0)
    assert engine.save(chunk) == 1


def test_a_refused_commit_publishes_nothing_of_its_message(
    node: Node, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(saves, "QUARANTINE_S", 0.1)
    good, bad = digests(2)
    slots = engine.worker.reserve([], [good, bad], part=0, timeout_s=WAIT_S)
    for slot in slots:
        assert slot.view is not None
        slot.view[:] = content(slot.digest, 0)
    checksums = part_checksums(memoryview(content(good, 0)))
    engine.worker.commit(0, [(good, checksums), (bad, ())])
    at_rest(node)
    assert node.statistics().catalogue.ready_parts == 0


def test_a_watcher_whose_clean_up_fails_too_does_not_end_the_loop() -> None:
    class Broken:
        def ready(self, events: int) -> None:
            raise RuntimeError("planted")

        def crashed(self) -> None:
            loop.unwatch(theirs)
            raise RuntimeError("planted too")

    loop = Loop(after_turn=lambda: None)
    ours, theirs = socket.socketpair()
    loop.watch(theirs, 1, Broken())
    done = threading.Event()
    thread = threading.Thread(target=loop.run)
    thread.start()
    ours.send(b"x")
    eventually(lambda: loop.defects == 2, "both defects counted")
    loop.post(done.set)
    assert done.wait(WAIT_S)
    loop.stop()
    thread.join()
    loop.close()
    loop.stop()  # a late signal changes nothing
    ours.close()
    theirs.close()


def test_the_setting_names_the_domain_before_any_engine_comes(tmp_path: Path, stack: ExitStack) -> None:
    node = Node(replace(settings(tmp_path), domain="mine"))
    stack.callback(node.close)
    node.start()
    engine = Engine(node.settings.socket_path)
    stack.callback(engine.close)
    eventually(lambda: engine.worker.last_error, "refusal")
    assert "'mine'" in engine.worker.last_error
    assert not engine.worker.connected


def test_the_settings_token_is_asked_of_clients(tmp_path: Path, stack: ExitStack) -> None:
    node = Node(replace(settings(tmp_path), token=Secret("open sesame")))
    stack.callback(node.close)
    node.start()
    with pytest.raises(RefusedError, match="token"):
        AdminClient(node.settings.socket_path, token="wrong")
    AdminClient(node.settings.socket_path, token="open sesame").close()
