"""What engines live through: nodes that die, stop, restart; engines that die. Real processes."""

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest
from tests.node.fleet import (
    WAIT_S,
    Engine,
    NodeProcess,
    at_rest,
    digests,
    drain,
    eventually,
    fill_tier,
    settings,
)

from kvferry.client.messages import (
    LoadEnd,
    LookupAnswer,
    LookupRequest,
    Pending,
    Prefill,
    ReadyPart,
    Reason,
    ReserveOutcome,
)
from kvferry.node import loading, saves
from kvferry.node.node import Node
from kvferry.testing.memory_tier import MemoryTier

NodeStarter = Callable[[], NodeProcess]


def _ask(engine: Engine, chunks: list[bytes], request_id: str) -> None:
    engine.scheduler.lookup(
        LookupRequest(
            request_id=request_id,
            chunks=chunks,
            first_chunk=0,
            prompt_tokens=len(chunks) * 128,
            prefill=Prefill(0.0, 1.0, 0.0),
        )
    )


def _whole_answer(engine: Engine, chunks: list[bytes]) -> LookupAnswer:
    """The answer once everything saved has been published."""
    answers = [engine.lookup(chunks)]

    def whole() -> bool:
        if answers[-1].count < len(chunks):
            engine.scheduler.end(answers[-1].load_id)
            answers.append(engine.lookup(chunks, os.urandom(4).hex()))
        return answers[-1].count == len(chunks)

    eventually(whole, "all that was saved is found")
    return answers[-1]


def _engine(tmp_path: Path, stack: ExitStack) -> Engine:
    engine = Engine(tmp_path / "node.sock")
    stack.callback(engine.close)
    return engine


def test_without_a_node_every_answer_is_zero_at_once(tmp_path: Path, stack: ExitStack) -> None:
    engine = _engine(tmp_path, stack)
    _ask(engine, digests(3), "r")
    answer = engine.scheduler.poll("r")
    assert answer is not None
    assert (answer.count, answer.reason) == (0, Reason.NODE_DOWN)
    slots = engine.worker.reserve([], digests(2), part=0, timeout_s=1.0)
    assert [slot.outcome for slot in slots] == [ReserveOutcome.FULL] * 2


def test_a_node_that_starts_later_is_found(
    tmp_path: Path, stack: ExitStack, node_process: NodeStarter
) -> None:
    engine = _engine(tmp_path, stack)
    assert not engine.scheduler.connected
    node_process()
    engine.connected()
    chunks = digests(2)
    assert engine.save(chunks) == 2
    eventually(lambda: engine.lookup(chunks, os.urandom(4).hex()).count == 2, "a hit")


def test_a_killed_node_ends_every_stream_at_once_and_its_memory_stays_readable(
    tmp_path: Path, stack: ExitStack, node_process: NodeStarter
) -> None:
    process = node_process()
    engine = _engine(tmp_path, stack).connected()
    chunks = digests(4)
    engine.save(chunks)
    answer = _whole_answer(engine, chunks)
    stream = engine.worker.load(answer.ticket(0))
    first = stream.next(WAIT_S)
    assert isinstance(first, ReadyPart)
    process.signal(signal.SIGKILL)
    process.process.wait()
    eventually(lambda: not (engine.worker.connected or engine.scheduler.connected), "the loss is noticed")
    ending = stream.next(WAIT_S)
    assert isinstance(ending, LoadEnd)
    assert ending.reason is Reason.NODE_DOWN
    assert len(bytes(first.view)) == len(first.view)
    stream.close()
    # Perhaps not with the first poll: a process that dies may still take a connection.
    after = engine.lookup(chunks, "after")
    assert (after.count, after.reason) == (0, Reason.NODE_DOWN)


def test_a_restarted_node_is_another_epoch_and_old_handles_are_refused(
    tmp_path: Path, stack: ExitStack, node_process: NodeStarter
) -> None:
    process = node_process()
    engine = _engine(tmp_path, stack).connected()
    chunks = digests(3)
    engine.save(chunks)
    answer = _whole_answer(engine, chunks)
    before = engine.worker.epoch
    process.signal(signal.SIGKILL)
    process.process.wait()
    node_process()
    eventually(lambda: engine.worker.connected and engine.worker.epoch != before, "reconnected")
    stream = engine.worker.load(answer.ticket(0))
    assert stream.next(WAIT_S) == LoadEnd(Reason.EPOCH, 0)
    stream.close()
    eventually(lambda: engine.scheduler.connected, "reconnected")
    assert engine.save(chunks) == 3


def test_a_stopped_node_costs_one_deadline_and_later_requests_nothing(
    tmp_path: Path, stack: ExitStack, node_process: NodeStarter
) -> None:
    process = node_process()
    engine = _engine(tmp_path, stack).connected()
    chunks = digests(3)
    engine.save(chunks)
    process.signal(signal.SIGSTOP)
    engine.scheduler._wait_s = 0.2
    _ask(engine, chunks, "first")
    assert engine.scheduler.poll("first") is None
    eventually(lambda: _reason(engine, "first") is Reason.TIMEOUT, "the client's own deadline")
    for number in range(20):
        _ask(engine, chunks, f"later{number}")
        answer = engine.scheduler.poll(f"later{number}")
        assert answer is not None, "a later request had to wait"
        assert (answer.count, answer.reason) == (0, Reason.BREAKER)
    slots = engine.worker.reserve([], digests(1, "new"), part=0, timeout_s=0.05)
    assert slots[0].outcome is ReserveOutcome.FULL
    process.signal(signal.SIGCONT)
    engine.scheduler._wait_s = WAIT_S
    eventually(lambda: engine.lookup(chunks, os.urandom(4).hex()).count == 3, "hits come back by themselves")


def _reason(engine: Engine, request_id: str) -> Reason | None:
    answer = engine.scheduler.poll(request_id)
    return None if answer is None else answer.reason


def test_a_node_stopped_for_long_is_reconnected_to(
    tmp_path: Path, stack: ExitStack, node_process: NodeStarter
) -> None:
    process = node_process()
    engine = _engine(tmp_path, stack).connected()
    engine.scheduler._connection.breaker._give_up_s = engine.scheduler._wait_s = 0.2
    process.signal(signal.SIGSTOP)
    _ask(engine, digests(1), "r")
    eventually(lambda: _reason(engine, "r") is Reason.TIMEOUT, "deadline")
    eventually(lambda: not engine.scheduler.connected, "given up")
    process.signal(signal.SIGCONT)
    eventually(lambda: engine.scheduler.connected, "reconnected")


def _die_mid_store(path: Path) -> None:
    engine = Engine(path, name="doomed").connected()
    slots = engine.worker.reserve([], digests(5), part=0, timeout_s=WAIT_S)
    assert all(slot.outcome is ReserveOutcome.RESERVED for slot in slots)
    os.kill(os.getpid(), signal.SIGKILL)


def _die_mid_load(path: Path) -> None:
    engine = Engine(path, name="doomed").connected()
    answer = engine.lookup(digests(5))
    stream = engine.worker.load(answer.ticket(0))
    assert stream.next(WAIT_S) is not Pending.PENDING
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
@pytest.mark.parametrize("death", [_die_mid_store, _die_mid_load])
def test_a_killed_engine_gives_back_all_it_held(
    node: Node, engine: Engine, death: Callable[[Path], None]
) -> None:
    if death is _die_mid_load:
        engine.save(digests(5))
        at_rest(node)
    child = multiprocessing.get_context("fork").Process(target=death, args=(node.settings.socket_path,))
    child.start()
    child.join(WAIT_S)
    assert child.exitcode == -signal.SIGKILL
    child.close()
    eventually(lambda: len(node.statistics().engines) == 2, "the dead engine is gone")
    at_rest(node)
    lost = node.statistics().counters.store_failed["engine-gone"]
    assert lost == (5 if death is _die_mid_store else 0)
    expected = 5 if death is _die_mid_load else 0
    assert engine.lookup(digests(5)).count == expected


def test_a_reservation_nobody_fills_is_reclaimed_and_its_late_commit_is_not_published(
    tmp_path: Path, stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(saves, "RESERVATION_LEASE_S", 0.1)
    node = Node(settings(tmp_path))
    stack.callback(node.close)
    node.start()
    engine = _engine(tmp_path, stack).connected()
    chunks = digests(3)
    slots = engine.worker.reserve([], chunks, part=0, timeout_s=WAIT_S)
    eventually(lambda: node.statistics().counters.reservations_expired == 3, "expiry")
    engine.worker.commit(0, [(slot.digest, (b"x" * 16, b"y" * 16)) for slot in slots])
    eventually(lambda: node.statistics().counters.store_failed["lease-ended"] == 3, "late commit counted")
    at_rest(node)
    assert engine.lookup(chunks).count == 0


def test_a_load_nobody_ends_is_reclaimed(
    tmp_path: Path, stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loading, "LEASE_GRACE_S", 0.05)
    node = Node(settings(tmp_path, deadline_cap_ms=50))
    stack.callback(node.close)
    node.start()
    engine = _engine(tmp_path, stack).connected()
    chunks = digests(3)
    engine.save(chunks)
    eventually(lambda: node.statistics().catalogue.ready_parts == 3, "commit")
    answer = engine.lookup(chunks)
    assert answer.count == 3
    eventually(lambda: node.statistics().counters.loads_expired == 1, "expiry")
    at_rest(node)
    engine.scheduler.end(answer.load_id)
    assert engine.lookup(chunks, "again").count == 3


def test_a_cancelled_lookup_leaves_nothing_behind(node: Node, engine: Engine, tier: MemoryTier) -> None:
    chunks = digests(3)
    fill_tier(tier, chunks)
    for number in range(10):
        _ask(engine, chunks, f"r{number}")
        engine.scheduler.cancel(f"r{number}")
    eventually(lambda: node.statistics().counters.lookups == 10, "all asked")
    at_rest(node)


def test_answers_nobody_fetches_are_bounded(
    node: Node, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kvferry.client import scheduler

    monkeypatch.setattr(scheduler, "MAX_UNCLAIMED", 4)
    chunks = digests(2)
    engine.save(chunks)
    at_rest(node)
    for number in range(12):
        _ask(engine, chunks, f"r{number}")
    eventually(lambda: node.statistics().counters.loads == 12, "all answered")
    eventually(lambda: node.statistics().loads == 4, "the oldest were ended")


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_a_forked_child_does_not_use_its_parents_connection(node: Node, engine: Engine) -> None:
    chunks = digests(2)
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        _ask(engine, chunks, "child")
        answer = engine.scheduler.poll("child")
        os.write(writer, answer.reason.value.encode() if answer is not None else b"none")
        os._exit(0)
    os.waitpid(child, 0)
    os.close(writer)
    assert os.read(reader, 100) == b"node-down"
    os.close(reader)
    assert engine.lookup(chunks).reason is Reason.ABSENT


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_a_child_forked_while_other_threads_hold_the_locks_is_answered(engine: Engine) -> None:
    done = threading.Event()

    def hold() -> None:
        while not done.is_set():
            for lock in (engine.scheduler._connection.lock, engine.worker._connection.lock):
                with lock:
                    time.sleep(0.001)  # as a thread that is not given the processor just then

    holders = [threading.Thread(target=hold) for _ in range(3)]
    for holder in holders:
        holder.start()
    try:
        for _ in range(20):
            child = os.fork()
            if child == 0:
                signal.alarm(20)  # ends a child that hangs
                engine.scheduler.statistics()
                engine.worker.statistics()
                _ask(engine, digests(1), "child")
                slots = engine.worker.reserve([], digests(1), part=0, timeout_s=0.2)
                os._exit(0 if slots[0].view is None else 1)
            assert os.waitpid(child, 0)[1] == 0
    finally:
        done.set()
        for holder in holders:
            holder.join()


def test_a_stream_that_stalls_ends_by_itself(node: Node, engine: Engine, tier: MemoryTier) -> None:
    chunks = digests(3)
    fill_tier(tier, chunks)
    real = tier.fetch

    def fetch(items, *, deadline, done):  # type: ignore[no-untyped-def]
        return real([], deadline=deadline, done=done)  # never calls done

    tier.fetch = fetch  # type: ignore[method-assign]
    answer = engine.lookup(chunks)
    ticket = answer.ticket(0)._replace(stall_s=0.05)
    stream = engine.worker.load(ticket)
    ending = drain(stream, chunks)
    assert ending == LoadEnd(Reason.STALLED, 0)
    stream.close()
    engine.scheduler.end(answer.load_id)


def test_closing_a_client_with_a_live_stream_ends_it(node: Node, engine: Engine, tier: MemoryTier) -> None:
    chunks = digests(3)
    engine.save(chunks)
    at_rest(node)
    answer = engine.lookup(chunks)
    stream = engine.worker.load(answer.ticket(0))
    engine.worker.close()
    ending = stream.next(WAIT_S)
    assert isinstance(ending, LoadEnd)
    assert ending.reason is Reason.CLOSED
    stream.close()


def test_later_calls_on_a_closed_client_are_harmless(node: Node, engine: Engine) -> None:
    engine.close()
    started = time.monotonic()
    _ask(engine, digests(1), "r")
    assert engine.scheduler.poll("r") is not None
    engine.scheduler.end(7)
    engine.worker.commit(0, [])
    engine.worker.abandon(0, [])
    assert engine.worker.reserve([], digests(1), part=0, timeout_s=WAIT_S)[0].outcome is ReserveOutcome.FULL
    assert time.monotonic() - started < WAIT_S / 2


@pytest.mark.parametrize(
    "bad",
    [
        {"request_id": ""},
        {"request_id": "x" * 10_000},
        {"prompt_tokens": -1},
        {"queued_s": float("nan")},
        {"queued_s": -1.0},
        {"prefill": Prefill(float("inf"), 0.0, 0.0)},
        {"chunks": [b"short"]},
    ],
)
def test_a_bad_value_costs_its_own_lookup_and_not_the_connection(
    node: Node, engine: Engine, bad: dict[str, object]
) -> None:
    values: dict[str, object] = {
        "request_id": "r",
        "chunks": digests(2),
        "first_chunk": 0,
        "prompt_tokens": 256,
        "prefill": Prefill(0.0, 1.0, 0.0),
    }
    request = LookupRequest(**{**values, **bad})  # type: ignore[arg-type]
    engine.scheduler.lookup(request)
    eventually(lambda: engine.scheduler.poll(request.request_id) is not None, "an answer")
    assert engine.lookup(digests(2), "good").reason is Reason.ABSENT
    assert engine.scheduler.statistics().connects == 1


def test_more_chunks_than_a_message_may_hold_are_asked_for_in_part(node: Node, engine: Engine) -> None:
    chunks = digests(2) * 40_000
    engine.save(chunks[:2])
    eventually(lambda: node.statistics().catalogue.ready_parts == 2, "commit")
    answer = engine.lookup(digests(2) + digests(70_000, "long"))
    assert answer.count == 2
