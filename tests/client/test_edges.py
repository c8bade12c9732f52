"""Edges of the clients: defects on their threads, reservations of an older connection, odd answers."""

import pytest
from tests.node.fleet import WAIT_S, Engine, at_rest, digests, eventually

from kvferry.client.messages import LoadEnd, LoadTicket, PartPlace, Reason, ReserveOutcome
from kvferry.identity.stripes import part_checksums
from kvferry.node.node import Node
from kvferry.node.wire import Answer, Corrupt, EndLoad, FromNode, Ping


def test_a_defect_on_the_clients_thread_costs_one_connection_and_not_the_client(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(message: FromNode) -> None:
        raise RuntimeError("planted")

    with monkeypatch.context() as planted:
        planted.setattr(engine.worker, "message", broken)
        engine.worker._connection.send(Ping())
        eventually(lambda: not engine.worker.connected, "the connection is given up")
    assert engine.worker.wait_connected(WAIT_S)
    assert engine.save(digests(1)) == 1


def test_slots_reserved_on_an_older_connection_are_not_handed_out(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    connection = engine.worker._connection
    pump = connection.pump

    def answered_then_reconnected() -> None:
        pump()
        connection.connects += 1

    monkeypatch.setattr(connection, "pump", answered_then_reconnected)
    [slot] = engine.worker.reserve([], digests(1), part=0, timeout_s=WAIT_S)
    assert (slot.outcome, slot.view) == (ReserveOutcome.FULL, None)


def test_slots_of_a_connection_that_was_lost_are_not_published_on_the_next(
    node: Node, engine: Engine
) -> None:
    worker = engine.worker
    [slot] = worker.reserve([], digests(1), part=0, timeout_s=WAIT_S)
    assert slot.view is not None
    with worker._changed:
        worker._connection._lose(Reason.NODE_DOWN)
    assert worker.wait_connected(WAIT_S)
    assert not worker.commit(0, [(slot.digest, part_checksums(slot.view))])
    eventually(lambda: node.statistics().counters.store_failed["engine-gone"] == 1, "the slot comes back")
    assert node.statistics().counters.store_failed["lease-ended"] == 0


def test_a_place_outside_the_pool_ends_the_stream(engine: Engine) -> None:
    ticket = LoadTicket(1, engine.worker.epoch, 0, 0, (PartPlace(1 << 60, b""),), 0.0, 1.0)
    stream = engine.worker.load(ticket)
    assert stream.next(WAIT_S) == LoadEnd(Reason.REFUSED, 0)
    stream.close()


def test_an_answer_that_cannot_be_costs_the_connection_alone(engine: Engine) -> None:
    scheduler = engine.scheduler
    chunks = digests(1)
    with scheduler._lock:
        engine_request = "odd"
        scheduler._waiting[engine_request] = type(
            "Waiting", (), {"ticket": 7, "first_chunk": 0, "give_up": scheduler._clock() + WAIT_S}
        )()
        odd = Answer(7, engine_request, 1, 1, 0, 1 << 40, b"", (), 1.0, 1.0, Reason.COMPLETE)
        with pytest.raises(Exception, match="an answer of"):
            scheduler.message(odd)
        del scheduler._waiting[engine_request]
    assert engine.lookup(chunks).count == 0


def test_what_a_worker_said_before_its_load_ended_counts_whichever_is_read_first(
    node: Node, engine: Engine
) -> None:
    chunks = digests(2)
    engine.save(chunks)
    at_rest(node)
    answer = engine.lookup(chunks)
    app = node._app
    scheduler, worker = sorted(
        app._attached, key=lambda connection: connection.hello.role if connection.hello else ""
    )

    def both() -> None:
        app.message(scheduler, EndLoad(load_id=answer.load_id))
        app.message(worker, Corrupt(load_id=answer.load_id, part=0, chunk=1))

    app.state.loop.post(both)
    eventually(lambda: node.statistics().counters.corrupt_parts == 1, "the corrupt part is counted")
    at_rest(node)
    again = engine.lookup(chunks, "again")
    assert again.count == 1
    assert [end.reason for end in engine.load(again, chunks)] == [Reason.COMPLETE]
