"""The blocking client: whatever happens to the node, a call returns in time and claims no byte it lacks."""

import os
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from tests.node.fleet import (
    LOOKUP_WAIT_S,
    NAMESPACE,
    PART_BYTES,
    POOL_BYTES,
    TWO_PARTS,
    WAIT_S,
    NodeProcess,
    at_rest,
    content,
    digests,
    eventually,
    fill_tier,
    settings,
)

from kvferry.client.messages import NamespaceInfo
from kvferry.client.store import PrefixStore
from kvferry.node.node import Node
from kvferry.testing.memory_tier import MemoryTier

NodeStarter = Callable[[], NodeProcess]
ENDS_S = WAIT_S / 2  # far beyond every bound of a call, and far from for ever


class Copies:
    """What a load's callback copied, by chunk and part."""

    def __init__(self) -> None:
        self.parts: dict[tuple[int, int], bytes] = {}

    def into(self, chunk: int, part: int, view: memoryview) -> None:
        assert (chunk, part) not in self.parts
        self.parts[chunk, part] = bytes(view)

    def are_exact(self, chunks: list[bytes], count: int, namespace: NamespaceInfo = TWO_PARTS) -> None:
        for chunk in range(count):
            for part in range(len(namespace.part_bytes)):
                assert self.parts[chunk, part] == content(chunks[chunk], part)


def filler(chunks: list[bytes]) -> Callable[[int, int, memoryview], None]:
    """Writes what the names say."""

    def fill(position: int, part: int, view: memoryview) -> None:
        view[:] = content(chunks[position], part)

    return fill


def open_store(
    socket_path: Path,
    stack: ExitStack,
    namespace: NamespaceInfo = TWO_PARTS,
    *,
    connected: bool = True,
    answer_s: float = LOOKUP_WAIT_S,
) -> PrefixStore:
    store = PrefixStore(socket_path=socket_path, engine="store", namespace=namespace, answer_s=answer_s)
    stack.callback(store.close)
    assert not connected or store.wait_connected(WAIT_S)
    return store


@pytest.fixture
def store(node: Node, stack: ExitStack) -> PrefixStore:
    return open_store(node.settings.socket_path, stack)


def test_what_was_saved_is_loaded_bit_for_bit_by_another_store(
    node: Node, store: PrefixStore, stack: ExitStack
) -> None:
    chunks = digests(5)
    assert store.save([], chunks, filler(chunks)) == 5
    assert store.save([], chunks, filler(chunks)) == 5  # held already
    assert store.statistics().stored_parts == 10
    copies = Copies()
    other = open_store(node.settings.socket_path, stack)
    assert other.match([*chunks, *digests(2, "more")]) == 5
    assert other.statistics().matched == {"absent": 1}
    assert other.load(chunks, copies.into) == 5
    copies.are_exact(chunks, 5)
    assert other.statistics().ended == {"complete": 1}
    assert other.statistics().loaded_bytes == 10 * PART_BYTES
    at_rest(node)


def test_a_load_ends_before_the_first_chunk_that_lacks_a_part(node: Node, store: PrefixStore) -> None:
    chunks = digests(5)
    assert store.save([], chunks, filler(chunks), has=lambda chunk, part: (chunk, part) != (3, 1)) == 5
    copies = Copies()
    assert store.load(chunks, copies.into) == 3
    copies.are_exact(chunks, 3)
    assert store.statistics().ended == {"absent": 1}
    assert store.load(digests(2, "other"), copies.into) == 0
    at_rest(node)


def test_a_load_from_the_middle_brings_only_the_rest(
    node: Node, store: PrefixStore, tier: MemoryTier
) -> None:
    chunks = digests(6)
    assert store.save(chunks[:2], chunks[2:4], filler(chunks[2:])) == 2
    fill_tier(tier, chunks[4:], TWO_PARTS)
    copies = Copies()
    assert store.load(chunks, copies.into, first=2) == 4
    assert sorted(copies.parts) == [(chunk, part) for chunk in range(2, 6) for part in range(2)]
    at_rest(node)


def test_a_prefix_larger_than_the_pool_streams_through_it(
    node: Node, store: PrefixStore, tier: MemoryTier
) -> None:
    chunks = digests(POOL_BYTES // PART_BYTES)  # twice the pool, with two parts each
    fill_tier(tier, chunks, TWO_PARTS)
    copies = Copies()
    assert store.load(chunks, copies.into) == len(chunks)
    copies.are_exact(chunks, len(chunks))
    at_rest(node)


def test_more_than_the_pool_is_saved_a_part_at_a_time(
    node: Node, store: PrefixStore, tier: MemoryTier
) -> None:
    chunks = digests(POOL_BYTES // PART_BYTES)
    saved = 0

    def all_saved() -> bool:
        nonlocal saved
        saved += store.save(chunks[:saved], chunks[saved:], filler(chunks[saved:]))
        return saved == len(chunks)

    eventually(all_saved, "the backlog to the tier makes room")
    at_rest(node)


def test_a_damaged_part_is_not_counted_and_is_forgotten(node: Node, store: PrefixStore) -> None:
    chunks = digests(4)
    store.save([], chunks, filler(chunks))
    at_rest(node)
    pool = node._app.state.arena.view(0, POOL_BYTES)
    pool[bytes(pool).index(content(chunks[2], 1)) + 77] ^= 1
    copies = Copies()
    assert store.load(chunks, copies.into) == 2
    copies.are_exact(chunks, 2)
    assert store.statistics().ended == {"corrupt": 1}
    at_rest(node)
    assert store.load(chunks, Copies().into) == 2
    assert store.statistics().ended == {"corrupt": 1, "absent": 1}
    assert store.save([], chunks, filler(chunks)) == 4
    assert store.load(chunks, Copies().into) == 4


@pytest.mark.parametrize("at", [(0, 0), (2, 1)])
def test_what_a_callback_raises_reaches_the_caller_and_leaves_nothing_behind(
    node: Node, store: PrefixStore, at: tuple[int, int]
) -> None:
    chunks = digests(4)

    def refuse(chunk: int, part: int, view: memoryview) -> None:
        if (chunk, part) == at:
            raise KeyError("the engine's own defect")
        if not view.readonly:
            view[:] = content(chunks[chunk], part)

    with pytest.raises(KeyError):
        store.save([], chunks, refuse)
    at_rest(node)
    assert store.save([], chunks, filler(chunks)) == 4
    with pytest.raises(KeyError):
        store.load(chunks, refuse)
    at_rest(node)
    assert store.statistics().ended == {"failed": 1}
    assert store.load(chunks, Copies().into) == 4


def test_many_threads_share_one_store(node: Node, store: PrefixStore) -> None:
    prompts = [digests(3, f"prompt{number % 4}") for number in range(24)]

    def turn(chunks: list[bytes]) -> None:
        copies = Copies()
        copies.are_exact(chunks, store.load(chunks, copies.into))
        store.save([], chunks, filler(chunks))

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(turn, prompts))
    for chunks in prompts[:4]:
        copies = Copies()
        assert store.load(chunks, copies.into) == 3
        copies.are_exact(chunks, 3)
    at_rest(node)


def test_without_a_node_nothing_is_found_or_stored_at_once(tmp_path: Path, stack: ExitStack) -> None:
    store = open_store(tmp_path / "none.sock", stack, connected=False)
    chunks = digests(2)
    started = time.monotonic()
    assert store.match(chunks) == 0
    assert store.load(chunks, Copies().into) == 0
    assert store.save([], chunks, filler(chunks)) == 0
    assert time.monotonic() - started < ENDS_S
    assert store.statistics().ended == {"node-down": 1}
    assert store.statistics().declined == {"full": 2}
    assert not store.statistics().connected


def test_a_stopped_node_costs_the_call_that_meets_it_its_bound(
    tmp_path: Path, stack: ExitStack, node_process: NodeStarter
) -> None:
    process = node_process()
    store = open_store(tmp_path / "node.sock", stack, answer_s=0.25)
    chunks = digests(3)
    assert store.save([], chunks, filler(chunks)) == 3
    process.signal(signal.SIGSTOP)
    started = time.monotonic()
    assert store.load(chunks, Copies().into) == 0
    assert store.match(chunks) == 0
    assert store.save([], digests(2, "new"), filler(digests(2, "new"))) == 0
    assert store.load(chunks, Copies().into) == 0
    assert time.monotonic() - started < ENDS_S
    assert store.statistics().ended == {"timeout": 1, "breaker-open": 1}
    process.signal(signal.SIGCONT)
    eventually(lambda: store.load(chunks, Copies().into) == 3, "hits come back by themselves")


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize("after", [0, 3])
def test_a_node_lost_in_a_load_leaves_only_verified_chunks(
    tmp_path: Path, stack: ExitStack, node_process: NodeStarter, number: signal.Signals, after: int
) -> None:
    process = node_process()
    store = open_store(tmp_path / "node.sock", stack)
    chunks = digests(6)
    assert store.save([], chunks, filler(chunks)) == 6
    copies = Copies()

    def into(chunk: int, part: int, view: memoryview) -> None:
        copies.into(chunk, part, view)
        if len(copies.parts) == after + 1:
            process.signal(number)
            if number is signal.SIGKILL:
                process.process.wait()

    started = time.monotonic()
    whole = store.load(chunks, into)
    assert time.monotonic() - started < ENDS_S
    copies.are_exact(chunks, whole)
    process.close()
    node_process()
    eventually(lambda: store.statistics().connected, "the next node is found")
    eventually(lambda: store.save([], chunks, filler(chunks)) == 6, "and stores again")


def test_a_store_closed_under_a_load_ends_it(node: Node, store: PrefixStore) -> None:
    chunks = digests(4)
    store.save([], chunks, filler(chunks))
    copies = Copies()

    def into(chunk: int, part: int, view: memoryview) -> None:
        copies.into(chunk, part, view)
        closer = threading.Thread(target=store.close)
        closer.start()
        closer.join()

    copies.are_exact(chunks, store.load(chunks, into))
    assert store.load(chunks, Copies().into) == 0
    assert store.save([], chunks, filler(chunks)) == 0
    at_rest(node)


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_a_forked_child_finds_and_stores_nothing_at_once(node: Node, store: PrefixStore) -> None:
    chunks = digests(2)
    store.save([], chunks, filler(chunks))
    child = os.fork()
    if child == 0:
        signal.alarm(20)  # ends a child that hangs
        found = store.load(chunks, Copies().into)
        found += store.save([], chunks, filler(chunks))
        store.statistics()
        os._exit(found)
    assert os.waitpid(child, 0)[1] == 0
    assert store.load(chunks, Copies().into) == 2


def test_other_sizes_for_a_known_namespace_are_refused_and_say_so(
    node: Node, store: PrefixStore, stack: ExitStack
) -> None:
    other = NamespaceInfo(TWO_PARTS.namespace, (PART_BYTES,), 128, "test")
    wrong = open_store(node.settings.socket_path, stack, other, connected=False)
    eventually(lambda: "other sizes" in wrong.last_error, "the reason")
    assert wrong.load(digests(2), Copies().into) == 0


def test_a_slow_copy_of_one_part_is_no_stall_of_another(
    node: Node, tier: MemoryTier, stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    ahead_s = 0.0
    store = PrefixStore(
        socket_path=node.settings.socket_path,
        engine="store",
        namespace=TWO_PARTS,
        answer_s=LOOKUP_WAIT_S,
        clock=lambda: time.monotonic() + ahead_s,
    )
    stack.callback(store.close)
    assert store.wait_connected(WAIT_S)
    chunks = digests(1)
    store.save([], chunks, filler(chunks), has=lambda chunk, part: part == 0)
    at_rest(node)
    fill_tier(tier, chunks, TWO_PARTS)
    fetch = tier.fetch

    def held_fetch(*given: Any, **options: Any) -> Any:
        tier.hold()
        return fetch(*given, **options)

    monkeypatch.setattr(tier, "fetch", held_fetch)
    copies = Copies()

    def into(chunk: int, part: int, view: memoryview) -> None:
        nonlocal ahead_s
        copies.into(chunk, part, view)
        ahead_s += 3.0  # more than a stall timeout, less than a deadline
        tier.release()

    assert store.load(chunks, into) == 1
    copies.are_exact(chunks, 1)


WINDOWED = NamespaceInfo(
    b"test" + b"w" * 12, (PART_BYTES, PART_BYTES, PART_BYTES), 128, "test", trailing=(0, 2, 1)
)


@pytest.fixture
def windowed(node: Node, stack: ExitStack) -> PrefixStore:
    return open_store(node.settings.socket_path, stack, WINDOWED)


def kept(chunk: int, part: int) -> bool:
    """Of six chunks: the window's of all but one, the state of two boundaries."""
    return {0: True, 1: chunk != 2, 2: chunk in (1, 4)}[part]


def test_a_load_brings_of_every_part_only_what_its_boundary_needs(node: Node, windowed: PrefixStore) -> None:
    chunks = digests(6)
    assert windowed.save([], chunks, filler(chunks), has=kept) == 6
    assert windowed.match(chunks) == 5
    copies = Copies()
    assert windowed.load(chunks, copies.into) == 5
    assert sorted(copies.parts) == [(0, 0), (1, 0), (2, 0), (3, 0), (3, 1), (4, 0), (4, 1), (4, 2)]
    assert windowed.statistics().loaded_bytes == 8 * PART_BYTES
    assert windowed.match(chunks[:4]) == 2
    assert windowed.load(chunks[:4], Copies().into) == 2
    at_rest(node)


def test_a_load_to_a_boundary_serves_whole_or_not_at_all(node: Node, windowed: PrefixStore) -> None:
    chunks = digests(6)
    windowed.save([], chunks, filler(chunks), has=kept)
    at_rest(node)
    pool = node._app.state.arena.view(0, POOL_BYTES)
    pool[bytes(pool).index(content(chunks[3], 1)) + 77] ^= 1
    assert windowed.load(chunks, Copies().into) == 0
    assert windowed.statistics().ended == {"corrupt": 1}
    assert windowed.load(chunks, Copies().into) == 2
    at_rest(node)


def test_one_part_is_enough(tmp_path: Path, stack: ExitStack) -> None:
    node = Node(settings(tmp_path))
    stack.callback(node.close)
    node.start()
    store = open_store(node.settings.socket_path, stack, NAMESPACE)
    chunks = digests(3)
    assert store.save([], chunks, filler(chunks)) == 3
    copies = Copies()
    assert store.load(chunks, copies.into) == 3
    copies.are_exact(chunks, 3, NAMESPACE)
