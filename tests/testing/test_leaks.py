"""What a test leaves behind is found, whatever kind it is; what is only slow to end is not."""

import os
import socket
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from tests.node.fleet import PART_BYTES, TWO_PARTS, Engine, digests, settings

from kvferry.client.messages import ReserveOutcome
from kvferry.node.counters import NodeStatistics
from kvferry.node.node import Node
from kvferry.testing.census import leaves_nothing
from kvferry.testing.holdings import Holdings, at_rest, returns_everything, wait_for_baseline

WAIT_S = 60.0


class Leaks:
    """Functions that leave something behind, and what cleans up after them."""

    def __init__(self, stack: ExitStack) -> None:
        self._stack = stack

    def thread(self) -> None:
        ends = threading.Event()
        thread = threading.Thread(target=ends.wait, name="forgotten")
        thread.start()
        self._stack.callback(thread.join)
        self._stack.callback(ends.set)

    def descriptor(self) -> None:
        self._stack.callback(os.close, os.open("/proc/self/status", os.O_RDONLY))

    def socket(self) -> None:
        self._stack.callback(socket.socket().close)

    def child(self) -> None:
        process = subprocess.Popen([sys.executable, "-I", "-S", "-c", "import time; time.sleep(600)"])
        self._stack.callback(process.wait)
        self._stack.callback(process.kill)

    def zombie(self) -> None:
        process = subprocess.Popen([sys.executable, "-I", "-S", "-c", ""])
        self._stack.callback(process.wait)

    def shared_memory(self) -> None:
        file = Path(f"/dev/shm/kvferry-test-{os.getpid()}")
        file.touch()
        self._stack.callback(file.unlink)


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as opened:
        yield opened


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("thread", "thread forgotten"),
        ("descriptor", "descriptor .*/status"),
        ("socket", "descriptor .*socket"),
        ("child", "child process"),
        ("zombie", "child process"),
        ("shared_memory", "/dev/shm/kvferry-test"),
    ],
)
def test_each_kind_of_leak_is_found_and_named(stack: ExitStack, kind: str, words: str) -> None:
    leak: Callable[[], None] = getattr(Leaks(stack), kind)
    with pytest.raises(AssertionError, match=f"left behind: .*{words}"), leaves_nothing(settle_s=0.1):
        leak()


def test_a_tidy_body_and_one_that_is_slow_to_end_pass() -> None:
    with leaves_nothing(settle_s=WAIT_S):
        threading.Thread(target=time.sleep, args=(0.2,)).start()
        with socket.socket():
            pass


def test_what_was_there_before_is_no_leak(stack: ExitStack) -> None:
    Leaks(stack).thread()
    Leaks(stack).descriptor()
    with leaves_nothing(settle_s=0.0):
        pass


def test_the_plugin_fails_the_test_that_leaks_and_no_other(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text(
        "from kvferry.testing import census\n"
        "census.SETTLE_S = 0.5  # for what never ends\n"
        'pytest_plugins = ["kvferry.testing.leaks"]\n'
    )
    (tmp_path / "test_some.py").write_text(
        textwrap.dedent("""
            import os, pytest

            def test_tidy(): pass

            def test_leaky(): os.open("/proc/self/status", os.O_RDONLY)

            def test_after(): pass

            @pytest.mark.may_leak("on purpose")
            def test_excused(): os.open("/proc/self/maps", os.O_RDONLY)
        """)
    )
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "--strict-markers",
        str(tmp_path),
    ]
    sources = str(Path(__file__).parents[2] / "src")
    env = {**os.environ, "PYTHONPATH": sources, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    found = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, check=False)
    assert "ERROR test_some.py::test_leaky - Failed: left behind: descriptor" in found.stdout
    assert "4 passed, 1 error" in found.stdout


@contextmanager
def node_and_engine(directory: Path) -> Iterator[tuple[Node, Engine]]:
    node = Node(settings(directory))
    try:
        node.start()
        engine = Engine(node.settings.socket_path, TWO_PARTS).connected()
        try:
            yield node, engine
        finally:
            engine.close()
    finally:
        node.close()


def test_a_load_that_is_not_ended_is_a_lease_that_does_not_return(tmp_path: Path) -> None:
    with node_and_engine(tmp_path) as (node, engine):
        chunks = digests(4)
        engine.save(chunks)
        at_rest(node)
        complaint = "loads 1 instead of 0, pins 8 instead of 0"
        with pytest.raises(AssertionError, match=complaint), returns_everything(node, timeout_s=0.1):
            answer = engine.lookup(chunks)
        with pytest.raises(AssertionError, match=complaint):
            at_rest(node, timeout_s=0.1)
        engine.load(answer, chunks)
        at_rest(node)


def test_a_slot_that_is_reserved_and_not_filled_does_not_return(tmp_path: Path) -> None:
    with node_and_engine(tmp_path) as (node, engine):
        chunk = digests(1)
        complaint = "reservations 1 instead of 0"
        with pytest.raises(AssertionError, match=complaint), returns_everything(node, timeout_s=0.1):
            (slot,) = engine.worker.reserve((), chunk, part=0, timeout_s=WAIT_S)
            assert slot.outcome is ReserveOutcome.RESERVED
        engine.worker.abandon(0, chunk)
        at_rest(node)
        assert node.statistics().catalogue.used_bytes < PART_BYTES


def test_what_was_held_before_may_still_be_held(tmp_path: Path) -> None:
    with node_and_engine(tmp_path) as (node, engine):
        chunks = digests(2)
        engine.save(chunks)
        answer = engine.lookup(chunks)
        with returns_everything(node):
            other = engine.lookup(chunks, "other")
            engine.load(other, chunks)
        engine.load(answer, chunks)


class Defective:
    """A node that counts a defect."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self.check = node.check

    def statistics(self) -> NodeStatistics:
        return replace(self._node.statistics(), defects=1)


def test_a_defect_that_the_node_counted_fails_too(tmp_path: Path) -> None:
    with node_and_engine(tmp_path) as (node, _), pytest.raises(AssertionError, match="1 defects"):
        at_rest(Defective(node))


def test_a_watched_node_that_returns_everything_passes(
    tmp_path: Path, stack: ExitStack, request: pytest.FixtureRequest
) -> None:
    node, engine = stack.enter_context(node_and_engine(tmp_path))
    watch: Callable[[Node], None] = request.getfixturevalue("watch_node")
    watch(node)
    engine.save(digests(2))


def test_holdings_read_the_document_as_they_read_the_statistics(tmp_path: Path) -> None:
    from kvferry.client.admin import AdminClient

    with node_and_engine(tmp_path) as (node, engine):
        engine.save(digests(3))
        engine.lookup(digests(3))
        with AdminClient(node.settings.socket_path) as admin:
            assert Holdings.of(admin.status()) == Holdings.of(node.statistics())
        engine.scheduler.close()
        wait_for_baseline(lambda: Holdings.of(node.statistics()))
