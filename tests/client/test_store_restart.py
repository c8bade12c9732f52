"""The blocking client and a node that is restarted under its saves."""

import signal
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

from tests.client.test_store import Copies, filler, open_store
from tests.node.fleet import WAIT_S, NodeProcess, digests, eventually

NodeStarter = Callable[[], NodeProcess]


def test_a_node_restarted_in_a_save_publishes_nothing_that_was_written_for_the_one_before(
    tmp_path: Path, stack: ExitStack, node_process: NodeStarter
) -> None:
    process = first = node_process()
    store = open_store(tmp_path / "node.sock", stack)
    chunks = digests(6)
    before = store._worker.epoch

    def fill(position: int, part: int, view: memoryview) -> None:
        nonlocal process
        if (position, part) == (2, 1) and process is first:
            process.signal(signal.SIGKILL)
            process.process.wait()
            process = node_process()
            eventually(lambda: store._worker.connected and store._worker.epoch != before, "reconnected")
        filler(chunks)(position, part, view)

    assert store.save([], chunks, fill) == 0
    assert store.load(chunks, Copies().into) == 0
    eventually(lambda: store.save([], chunks, filler(chunks)) == 6, "the next save")
    copies = Copies()
    assert store.load(chunks, copies.into) == 6
    copies.are_exact(chunks, 6)


def test_a_save_that_lost_its_node_leaves_the_slots_of_another_thread_s_save_alone(
    tmp_path: Path, stack: ExitStack, node_process: NodeStarter
) -> None:
    """Both save the same chunks: the one into the node before, the other into the one there is now."""
    process = first = node_process()
    store = open_store(tmp_path / "node.sock", stack)
    chunks = digests(6)
    before, reserved, ended = store._worker.epoch, threading.Event(), threading.Event()

    def second_fill(position: int, part: int, view: memoryview) -> None:
        reserved.set()
        assert ended.wait(WAIT_S)
        filler(chunks)(position, part, view)

    def first_fill(position: int, part: int, view: memoryview) -> None:
        nonlocal process
        if (position, part) == (2, 1) and process is first:
            process.signal(signal.SIGKILL)
            process.process.wait()
            process = node_process()
            eventually(lambda: store._worker.connected and store._worker.epoch != before, "reconnected")
            saves.append(pool.submit(store.save, [], chunks, second_fill))
            assert reserved.wait(WAIT_S)
        filler(chunks)(position, part, view)

    saves: list[Future[int]] = []
    with ThreadPoolExecutor(1) as pool:
        try:
            assert store.save([], chunks, first_fill) == 0
        finally:
            ended.set()
        assert saves[0].result(WAIT_S) == 6
    copies = Copies()
    assert store.load(chunks, copies.into) == 6
    copies.are_exact(chunks, 6)
