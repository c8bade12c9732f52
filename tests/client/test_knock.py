"""A node that comes back is noticed by the first call after it listens, and a silent one costs one bound."""

import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from tests.node.fleet import SLOW_PREFILL, WAIT_S, Engine, NodeProcess, digests, eventually

from kvferry.client import connection
from kvferry.client.admin import AdminClient
from kvferry.client.breaker import PATIENCE_S, Breaker
from kvferry.client.messages import LoadEnd, LookupAnswer, LookupRequest, Reason, ReserveOutcome
from kvferry.demo.nodeview import NodeView

NodeStarter = Callable[[], NodeProcess]


Patience = Callable[[], None]


@pytest.fixture
def be_patient(monkeypatch: pytest.MonkeyPatch) -> Patience:
    """From then on a client by itself would try again in an hour: whatever connects was begun by a call."""

    def patient() -> None:
        monkeypatch.setattr(connection, "FIRST_BACKOFF_S", 3600.0)
        monkeypatch.setattr(connection, "MAX_BACKOFF_S", 3600.0)
        monkeypatch.setattr(connection, "HANDSHAKE_S", 60.0)

    return patient


@pytest.fixture
def restarted(
    be_patient: Patience, tmp_path: Path, stack: ExitStack, node_process: NodeStarter
) -> Iterator[Engine]:
    """An engine that has seen its node die, and does not know yet that there is a new one."""
    process = node_process()
    listens = NodeView(tmp_path / "node.sock").answers
    eventually(listens, "the node listens")
    be_patient()
    engine = Engine(tmp_path / "node.sock")
    stack.callback(engine.close)
    engine.connected()
    process.signal(signal.SIGKILL)
    process.process.wait()
    eventually(lambda: engine.worker.last_error and engine.scheduler._connection.last_error, "the loss")
    node_process()
    eventually(listens, "the new node listens")
    engine.scheduler._wait_s = WAIT_S  # a busy host is slow to shake hands
    yield engine


def _found(engine: Engine, chunks: list[bytes], *, tmp_path: Path, stack: ExitStack) -> LookupAnswer:
    """The answer that names all of these, which another engine has stored in the new node."""
    other = Engine(tmp_path / "node.sock", name="other")
    stack.callback(other.close)
    other.connected().save(chunks)
    answers: list[LookupAnswer] = []

    def found() -> bool:
        answers.append(engine.lookup(chunks, f"r{len(answers)}"))
        return answers[-1].count == len(chunks)

    eventually(found, "what the other engine stored")
    return answers[-1]


def test_the_first_lookup_after_a_restart_is_answered_by_the_new_node(restarted: Engine) -> None:
    assert restarted.lookup(digests(3)).reason is Reason.ABSENT


def test_the_first_reservation_after_a_restart_is_granted_by_the_new_node(restarted: Engine) -> None:
    slots = restarted.worker.reserve([], digests(2), part=0, timeout_s=WAIT_S)
    assert [slot.outcome for slot in slots] == [ReserveOutcome.RESERVED] * 2


def test_the_first_load_after_a_restart_waits_for_its_workers_connection(
    restarted: Engine, tmp_path: Path, stack: ExitStack
) -> None:
    chunks = digests(3)
    answer = _found(restarted, chunks, tmp_path=tmp_path, stack=stack)
    assert not restarted.worker.connected
    assert restarted.load(answer, chunks) == [LoadEnd(Reason.COMPLETE, 3)]


def test_a_ticket_of_the_old_node_ends_with_the_restart_as_its_reason(restarted: Engine) -> None:
    old = LookupAnswer("r", 7, 99, 3, 0, b"\0\0\0", ((None,),) * 3, 60.0, 60.0, 1e12, Reason.COMPLETE)  # type: ignore[arg-type]
    stream = restarted.worker.load(old.ticket(0))
    assert stream.next(WAIT_S) == LoadEnd(Reason.EPOCH, 0)
    stream.close()


def test_where_nobody_listens_a_call_is_answered_at_once(
    be_patient: Patience, tmp_path: Path, stack: ExitStack
) -> None:
    be_patient()
    engine = Engine(tmp_path / "node.sock")
    stack.callback(engine.close)
    eventually(lambda: engine.worker.last_error, "an attempt failed")
    for number in range(3):
        assert _first_poll(engine, f"r{number}") is Reason.NODE_DOWN
    stream = engine.worker.load(
        LookupAnswer("r", 7, 9, 1, 0, b"\0", ((None,),), 60.0, 60.0, 1e12, Reason.COMPLETE).ticket(0)  # type: ignore[arg-type]
    )
    assert stream.next(0.0) == LoadEnd(Reason.NODE_DOWN, 0)
    stream.close()


@pytest.mark.parametrize("path", ["/tmp/a\0b", "/tmp/\ud800", "/tmp/" + "x" * 200])
def test_a_path_that_no_socket_can_have_costs_the_engine_its_cache_and_nothing_else(
    path: str, stack: ExitStack
) -> None:
    engine = Engine(Path(path))
    stack.callback(engine.close)
    eventually(lambda: engine.worker.last_error, "an attempt failed")
    assert _first_poll(engine, "r") is Reason.NODE_DOWN
    assert engine.worker.reserve([], digests(1), part=0, timeout_s=WAIT_S)[0].outcome is ReserveOutcome.FULL


def test_a_thread_that_is_slow_to_finish_its_handshake_keeps_no_call_waiting(
    tmp_path: Path, stack: ExitStack, node_process: NodeStarter, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Engine(tmp_path / "node.sock")
    stack.callback(engine.close)
    eventually(lambda: engine.scheduler._connection.last_error, "an attempt failed")
    go_on = threading.Event()
    stack.callback(go_on.set)

    def slow_to_say(text: str, *_: object, **__: object) -> None:
        if "connected to" in text:
            go_on.wait(WAIT_S)

    monkeypatch.setattr(connection.log, "warning", slow_to_say)
    process = node_process()
    engine.connected()
    process.signal(signal.SIGKILL)
    process.process.wait()
    assert _first_poll(engine, "r") is Reason.NODE_DOWN


def test_a_ticket_says_that_the_node_lives_whatever_the_worker_took_it_for(
    restarted: Engine, tmp_path: Path, stack: ExitStack
) -> None:
    chunks = digests(2)
    answer = _found(restarted, chunks, tmp_path=tmp_path, stack=stack)
    restarted.worker._connection.silent()
    assert restarted.load(answer, chunks) == [LoadEnd(Reason.COMPLETE, 2)]


@pytest.fixture
def mute(tmp_path: Path) -> Iterator[Path]:
    """A socket that takes connections and says nothing, as of a node that is stopped."""
    path = tmp_path / "node.sock"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen(64)
        yield path


def test_a_node_that_listens_and_is_silent_costs_one_lookup_its_bound_and_later_ones_nothing(
    mute: Path, stack: ExitStack
) -> None:
    engine = Engine(mute)
    stack.callback(engine.close)
    engine.scheduler._wait_s = 0.05
    assert engine.lookup(digests(1), "first").reason in (Reason.TIMEOUT, Reason.BREAKER, Reason.NODE_DOWN)
    eventually(lambda: engine.scheduler._connection.breaker.is_open, "the silence is noticed")
    for number in range(5):
        assert _first_poll(engine, f"later{number}") is Reason.BREAKER


def test_a_call_that_waits_for_a_node_ends_when_that_node_dies_instead(
    be_patient: Patience, tmp_path: Path, stack: ExitStack
) -> None:
    """A process that dies may still take a connection, and will never answer on it."""
    listener = socket.socket(socket.AF_UNIX)
    stack.callback(listener.close)
    listener.bind(str(tmp_path / "node.sock"))
    listener.listen()
    be_patient()
    engine = Engine(tmp_path / "node.sock")
    stack.callback(engine.close)
    engine.scheduler._wait_s = 1000.0
    eventually(lambda: engine.scheduler._connection._greeting, "a handshake under way")
    assert _first_poll(engine, "r") is None
    listener.close()
    assert engine.lookup(digests(1), "r").reason is Reason.NODE_DOWN  # the same lookup's answer


def test_a_reservation_that_was_given_up_before_it_was_sent_is_never_sent(
    be_patient: Patience, tmp_path: Path, stack: ExitStack, node_process: NodeStarter
) -> None:
    process = node_process()
    eventually(NodeView(tmp_path / "node.sock").answers, "the node listens")
    process.signal(signal.SIGSTOP)
    be_patient()
    engine = Engine(tmp_path / "node.sock")
    stack.callback(engine.close)
    worker = engine.worker
    eventually(lambda: worker._connection._greeting, "a handshake under way")
    assert worker.reserve([], digests(1), part=0, timeout_s=0.01)[0].outcome is ReserveOutcome.FULL
    process.signal(signal.SIGCONT)
    engine.connected()
    assert worker.reserve([], digests(1), part=0, timeout_s=WAIT_S)[0].outcome is ReserveOutcome.RESERVED
    with AdminClient(tmp_path / "node.sock", timeout_s=WAIT_S) as admin:
        assert admin.status()["counters"]["reserved_parts"] == 1


def test_a_connection_given_up_leaves_the_breaker_open_until_the_node_answers(
    tmp_path: Path, stack: ExitStack, node_process: NodeStarter
) -> None:
    process = node_process()
    engine = Engine(tmp_path / "node.sock")
    stack.callback(engine.close)
    engine.connected()
    engine.scheduler._wait_s = 0.05
    engine.scheduler._connection.breaker._give_up_s = 0.2
    process.signal(signal.SIGSTOP)
    assert engine.lookup(digests(1), "first").reason is Reason.TIMEOUT
    eventually(lambda: not engine.scheduler.connected, "given up")
    for number in range(5):
        assert _first_poll(engine, f"later{number}") is Reason.BREAKER
    process.signal(signal.SIGCONT)
    eventually(lambda: engine.scheduler.connected, "reconnected")
    assert engine.lookup(digests(1), "last").reason is Reason.ABSENT


def test_after_a_stalled_load_a_silent_node_is_found_out_without_a_request(
    tmp_path: Path, stack: ExitStack, node_process: NodeStarter
) -> None:
    process = node_process()
    engine = Engine(tmp_path / "node.sock")
    stack.callback(engine.close)
    engine.connected()
    engine.scheduler.suspect()
    assert engine.lookup(digests(1), "before").reason is Reason.ABSENT
    process.signal(signal.SIGSTOP)
    engine.scheduler.suspect()
    eventually(lambda: engine.scheduler._connection.breaker.is_open, "silence after a suspicion")
    assert _first_poll(engine, "after") is Reason.BREAKER


def test_a_suspect_that_answers_is_left_alone_and_one_that_does_not_opens_the_breaker() -> None:
    breaker = Breaker()
    breaker.suspect(10.0)
    assert breaker.ping_due(10.0)
    breaker.heard()
    breaker.look(10.0 + 2 * PATIENCE_S)
    assert not breaker.is_open
    breaker.suspect(20.0)
    breaker.look(20.0 + PATIENCE_S / 2)
    assert not breaker.is_open
    breaker.look(20.0 + PATIENCE_S)
    assert breaker.is_open


def test_many_threads_knock_at_once_and_one_connection_comes_of_it(restarted: Engine) -> None:
    connects = restarted.scheduler.statistics().connects
    threads = [threading.Thread(target=restarted.lookup, args=(digests(1), f"r{n}")) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert restarted.scheduler.statistics().connects == connects + 1


def _first_poll(engine: Engine, request_id: str) -> Reason | None:
    """What the very first question for an answer brings."""
    engine.scheduler.lookup(LookupRequest(request_id, digests(1), 0, 133, SLOW_PREFILL))
    answer = engine.scheduler.poll(request_id)
    return None if answer is None else answer.reason


def test_closing_ends_a_call_that_waits_for_a_connection_to_come(
    tmp_path: Path, stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The call has opened a socket, and the thread that would shake hands ends before it gets to that."""
    waits = threading.Event()
    monkeypatch.setattr(connection.NodeConnection, "_pause", lambda self, seconds: waits.wait(WAIT_S))
    engine = Engine(tmp_path / "node.sock")
    stack.callback(engine.close)
    stack.callback(waits.set)
    client = engine.worker
    eventually(lambda: client.last_error, "that there is no node")
    listener = stack.enter_context(socket.socket(socket.AF_UNIX))
    listener.bind(str(tmp_path / "node.sock"))
    (tmp_path / "node.sock").chmod(0o600)
    listener.listen()
    found: list[ReserveOutcome] = []

    def reserve() -> None:
        slots = client.reserve((), digests(1), part=0, timeout_s=1000.0)
        found.extend(slot.outcome for slot in slots)

    call = threading.Thread(target=reserve)
    call.start()
    eventually(lambda: client._connection._knocked is not None, "the knock")
    closing = threading.Thread(target=client.close)
    closing.start()
    eventually(lambda: client._connection._closing, "the closing")
    waits.set()
    closing.join(WAIT_S)
    call.join(WAIT_S)
    assert found == [ReserveOutcome.FULL]
