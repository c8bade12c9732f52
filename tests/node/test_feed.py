"""What a node tells those who follow it: what is where, and what is asked, as it happens."""

import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from threading import Event
from typing import Any

import pytest
from tests.feed.following import Following
from tests.node.conftest import make_engine
from tests.node.fleet import (
    NAMESPACE,
    PART_BYTES,
    TWO_PARTS,
    WAIT_S,
    Engine,
    NodeProcess,
    at_rest,
    content,
    digests,
    fill_tier,
    save_in_turns,
    settings,
)

from kvferry.addresses import Address
from kvferry.cli.main import main
from kvferry.client.messages import Prefill, Report, ReserveOutcome
from kvferry.feed.wire import Level
from kvferry.identity.names import PartKey, PartRef
from kvferry.identity.stripes import part_checksums
from kvferry.keeper.wire import Where
from kvferry.node import feed
from kvferry.node.node import Node
from kvferry.node.prefetch import Prefetches
from kvferry.testing.expectations import eventually
from kvferry.testing.memory_tier import MemoryTier
from kvferry.tiers.contract import Outcome

LOOPBACK = Address("127.0.0.1", 0)


@pytest.fixture
def node(tmp_path: Path, stack: ExitStack, tier: MemoryTier) -> Node:
    started = Node(replace(settings(tmp_path), feed_listen=LOOPBACK), tier=tier)
    stack.callback(started.close)
    started.start()
    return started


@pytest.fixture
def follow(node: Node, stack: ExitStack) -> Callable[[], Following]:
    """Makes one more that follows."""

    def started() -> Following:
        assert node.feed_address is not None
        following = Following(node.feed_address)
        stack.callback(following.close)
        return following.followed()

    return started


def settled(node: Node) -> None:
    """At rest, with nothing that routers expect on its way."""
    counts = node._feed
    assert counts is not None
    eventually(lambda: not counts._expected and not counts._prefetching, "no prefetch under way")
    at_rest(node)


def test_what_is_asked_and_what_became_of_it_is_told_with_the_engines_ids(
    follow: Callable[[], Following], engine: Engine
) -> None:
    view = follow().view
    chunks = digests(3)
    engine.lookup(chunks, "cmpl-1", first_chunk=1, prefill=Prefill(0.5, 0.25, 0.0), engine_tokens=130)
    eventually(lambda: view.prompts, "a prompt")
    (prompt,) = view.prompts
    assert (prompt.request_id, prompt.digests, prompt.prompt_tokens) == ("cmpl-1", b"".join(chunks), 389)
    assert prompt.engine_tokens == 130
    assert view.engines[prompt.engine].name == "engine"
    space = view.spaces[prompt.space]
    assert (space.namespace, space.label) == (NAMESPACE.namespace, "model")
    assert (space.chunk_tokens, space.chunk_bytes) == (128, PART_BYTES)
    assert view.speeds[prompt.engine].per_token_s == 0.25
    engine.scheduler.report(Report(request_id="cmpl-1", prompt_tokens=389, loaded_tokens=7, reason="absent"))
    eventually(lambda: view.results, "a result")
    (result,) = view.results
    assert (result.engine, result.request_id, result.loaded_tokens) == (prompt.engine, "cmpl-1", 7)


def test_a_request_without_a_lookup_is_told_too(follow: Callable[[], Following], engine: Engine) -> None:
    view = follow().view
    assert engine.scheduler.followed
    engine.scheduler.came("r", digests(2), prompt_tokens=256, engine_tokens=256)
    eventually(lambda: view.prompts, "a prompt")
    assert (view.prompts[0].digests, view.prompts[0].engine_tokens) == (b"".join(digests(2)), 256)


def test_an_engine_that_leaves_is_told_of(node: Node, follow: Callable[[], Following]) -> None:
    view = follow().view
    with ExitStack() as stack:
        make_engine(node.settings.socket_path, stack, "short-lived")
        eventually(lambda: [up.name for up in view.engines.values()] == ["short-lived"], "up")
    eventually(lambda: not view.engines, "down")


def test_what_is_stored_is_held_in_memory_and_in_the_tier_behind_it(
    node: Node, follow: Callable[[], Following], engine: Engine, tier: MemoryTier
) -> None:
    early = follow().view
    chunks = digests(4)
    engine.save(chunks)
    for view in (early, follow().view):
        eventually(lambda view=view: view.at(Level.MEMORY) == set(chunks), "in memory")  # type: ignore[misc]
        eventually(lambda view=view: view.at(Level.VALKEY) == set(chunks), "behind it")  # type: ignore[misc]
    assert node.statistics().feed is not None


def test_a_chunk_is_held_when_all_its_parts_are(
    node: Node, follow: Callable[[], Following], stack: ExitStack
) -> None:
    view = follow().view
    engine = Engine(node.settings.socket_path, TWO_PARTS).connected()
    stack.callback(engine.close)
    chunks = digests(2)
    for part, told in ((0, set()), (1, set(chunks))):
        filled = []
        for slot in engine.workers[part].reserve([], chunks, part=part, timeout_s=WAIT_S):
            assert slot.outcome is ReserveOutcome.RESERVED
            assert slot.view is not None
            slot.view[:] = content(slot.digest, part, len(slot.view))
            filled.append((slot.digest, part_checksums(slot.view)))
        engine.workers[part].commit(part, filled)
        at_rest(node)
        engine.lookup([b"x" * 32], f"r{part}")  # what was told before this is heard
        eventually(lambda part=part: len(view.prompts) == part + 1, "heard")  # type: ignore[misc]
        assert view.at(Level.MEMORY) == told
    eventually(lambda: view.at(Level.VALKEY) == set(chunks), "behind it")


def test_what_is_evicted_and_what_is_dropped_is_gone(
    node: Node, follow: Callable[[], Following], engine: Engine
) -> None:
    view = follow().view
    for number in range(10):  # more than the pool holds
        engine.save(digests(10, str(number)))
        at_rest(node)
    held = node.statistics().catalogue.chunks
    assert held < 100
    eventually(lambda: len(view.at(Level.MEMORY)) == held, "what is left")
    from kvferry.client.admin import AdminClient

    with AdminClient(node.settings.socket_path) as admin:
        admin.drop("memory")
    eventually(lambda: not view.at(Level.MEMORY), "gone")
    assert len(view.at(Level.VALKEY)) == 100


def test_the_tier_is_believed_when_a_lookup_asks_it(
    node: Node, follow: Callable[[], Following], engine: Engine, tier: MemoryTier
) -> None:
    view = follow().view
    chunks = digests(4)
    fill_tier(tier, chunks)
    engine.scheduler.end(engine.lookup(chunks).load_id)
    eventually(lambda: view.at(Level.VALKEY) == set(chunks), "found")
    at_rest(node)
    tier.parts.clear()
    from kvferry.client.admin import AdminClient

    with AdminClient(node.settings.socket_path) as admin:
        admin.drop("memory")
    engine.lookup(chunks, "later")
    eventually(lambda: not view.at(Level.VALKEY), "found to be gone")


def test_what_a_quota_removes_is_gone(tmp_path: Path, stack: ExitStack, tier: MemoryTier) -> None:
    quota = 6 * (PART_BYTES + 65536)
    node = Node(replace(settings(tmp_path), feed_listen=LOOPBACK, valkey_quota=quota), tier=tier)
    stack.callback(node.close)
    node.start()
    assert node.feed_address is not None
    following = Following(node.feed_address)
    stack.callback(following.close)
    view = following.followed().view
    engine = make_engine(node.settings.socket_path, stack)
    for number in range(4):
        engine.save(digests(3, str(number)))
        at_rest(node)

    def same() -> bool:
        return view.at(Level.VALKEY) == {key.chunk for key in tier.parts}

    eventually(same, "the same as the tier")
    assert 0 < len(tier.parts) < 12


def test_what_keepers_have_is_told_when_they_were_asked(node: Node, follow: Callable[[], Following]) -> None:
    with ExitStack() as stack:
        make_engine(node.settings.socket_path, stack)
        view = follow().view
        eventually(lambda: view.spaces, "the space")
        a, b, c = digests(3)
        refs = [_ref(a), _ref(b), _ref(c)]
        told = node._feed
        assert told is not None
        told.located(refs, [Where.DISK, Where.OBJECTS, Where.UNKNOWN])
        eventually(lambda: view.at(Level.DISK) == {a} and view.at(Level.OBJECTS) == {b}, "found")
        told.located(refs, [Where.ABSENT, Where.UNKNOWN, Where.DISK])
        eventually(lambda: view.at(Level.DISK) == {c} and view.at(Level.OBJECTS) == {b}, "changed")


def test_a_tiers_rate_is_told_once_it_is_known(
    node: Node, follow: Callable[[], Following], engine: Engine, tier: MemoryTier
) -> None:
    view = follow().view
    for number in range(20):
        chunks = digests(4, str(number))
        fill_tier(tier, chunks)
        engine.load(engine.lookup(chunks, str(number)), chunks)
        if view.rates:
            break
        time.sleep(0.1)
    eventually(lambda: Level.VALKEY in view.rates, "a rate")
    assert view.rates[Level.VALKEY].bytes_per_s > 0


def test_what_a_router_expects_is_brought_into_memory(
    node: Node, follow: Callable[[], Following], engine: Engine, tier: MemoryTier
) -> None:
    following = follow()
    chunks = digests(5)
    fill_tier(tier, chunks)
    assert following.prefetch(NAMESPACE.namespace, chunks)
    eventually(lambda: following.view.at(Level.MEMORY) == set(chunks), "there before anybody asks")
    answer = engine.lookup(chunks)
    assert engine.load(answer, chunks)
    assert set(answer.tiers) == {0}
    assert node.statistics().feed.prefetches == 1  # type: ignore[union-attr]


def test_what_a_router_expects_evicts_nothing_that_was_used_lately(
    node: Node, follow: Callable[[], Following], engine: Engine, tier: MemoryTier
) -> None:
    following = follow()
    own = digests(60, "own")
    save_in_turns(node, engine, own)
    before = node.statistics().catalogue.evicted_parts
    wanted = digests(30, "wanted")
    fill_tier(tier, wanted)
    following.prefetch(NAMESPACE.namespace, wanted)
    eventually(lambda: node.statistics().feed.prefetches == 1, "asked")  # type: ignore[union-attr]
    settled(node)
    assert node.statistics().catalogue.evicted_parts == before


def test_what_a_router_expects_and_exists_nowhere_evicts_nothing(
    node: Node,
    follow: Callable[[], Following],
    engine: Engine,
    tier: MemoryTier,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Though all that memory holds may go for what is expected."""
    monkeypatch.setattr(feed, "SPARED_S", -3600.0)
    following = follow()
    own = digests(60, "own")
    save_in_turns(node, engine, own)
    before = node.statistics().catalogue.evicted_parts
    there = digests(30, "there")
    fill_tier(tier, there)
    for number, wanted in enumerate((digests(30, "nowhere"), there), 1):
        following.prefetch(NAMESPACE.namespace, wanted)
        eventually(lambda n=number: node.statistics().feed.prefetches == n, "asked")  # type: ignore[union-attr,misc]
        settled(node)
        assert (node.statistics().catalogue.evicted_parts > before) == (wanted is there)


def test_a_busy_node_declines_what_routers_expect(
    node: Node, follow: Callable[[], Following], engine: Engine, tier: MemoryTier, stack: ExitStack
) -> None:
    following = follow()
    chunks = digests(feed.MAX_PREFETCHES + 5)
    fill_tier(tier, chunks)
    tier.hold()
    for chunk in chunks:
        following.prefetch(NAMESPACE.namespace, [chunk])
    eventually(lambda: node.statistics().feed.prefetches_declined, "declined")  # type: ignore[union-attr]
    assert node.statistics().feed.prefetches <= feed.MAX_PREFETCHES  # type: ignore[union-attr]
    tier.release()
    at_rest(node)


def test_what_a_router_expects_is_asked_for_a_few_parts_at_a_time(
    node: Node,
    follow: Callable[[], Following],
    engine: Engine,
    tier: MemoryTier,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(feed, "PREFETCH_PARTS", 2)
    asked: list[int] = []
    begin = Prefetches.begin

    def counting(self: Prefetches, refs: list[PartRef], **how: Any) -> None:
        asked.append(len(refs))
        begin(self, refs, **how)

    monkeypatch.setattr(Prefetches, "begin", counting)
    following = follow()
    chunks = digests(7)
    fill_tier(tier, chunks)
    for _ in range(feed.MAX_PREFETCHES + 3):
        seen = node.statistics().feed.prefetches  # type: ignore[union-attr]
        following.prefetch(NAMESPACE.namespace, chunks)
        eventually(lambda seen=seen: node.statistics().feed.prefetches > seen, "begun")  # type: ignore[union-attr,misc]
        settled(node)
    assert following.view.at(Level.MEMORY) == set(chunks)
    assert max(asked) <= 2


def test_routers_that_ask_for_more_than_a_node_looks_at_are_not_heard(
    node: Node, follow: Callable[[], Following], engine: Engine
) -> None:
    """What is there already costs a look at each part as well."""
    following = follow()
    chunks = digests(2)
    engine.save(chunks)
    at_rest(node)
    asked, gate = 5 * feed.MAX_PREFETCHES, Event()
    node._loop.post(partial(gate.wait, WAIT_S))
    try:
        for _ in range(asked):
            following.prefetch(NAMESPACE.namespace, chunks)
        counts = node._feed
        assert counts is not None
        eventually(lambda: counts.prefetches_declined == asked - feed.MAX_PREFETCHES, "declined")
    finally:
        gate.set()
    eventually(lambda: node.statistics().feed.prefetches == feed.MAX_PREFETCHES, "looked at")  # type: ignore[union-attr]


def test_who_comes_later_knows_what_those_before_know(
    node: Node, follow: Callable[[], Following], engine: Engine
) -> None:
    for number in range(3):
        engine.save(digests(10, str(number)))
    at_rest(node)
    first, second = follow(), follow()
    eventually(lambda: len(first.view.at(Level.VALKEY)) == 30, "the tier's")
    eventually(lambda: first.view.said() == second.view.said(), "the same")
    assert first.view.at(Level.MEMORY) == set(digests(10, "0") + digests(10, "1") + digests(10, "2"))


def test_a_killed_node_is_another_stream(tmp_path: Path, stack: ExitStack) -> None:
    import socket as sockets

    with sockets.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    extra = ("--feed-listen", f"127.0.0.1:{port}")
    doomed = NodeProcess(tmp_path / "node.sock", extra=extra)
    stack.callback(doomed.close)
    following = Following(Address("127.0.0.1", port))
    stack.callback(following.close)
    following.followed()
    engine = make_engine(tmp_path / "node.sock", stack)
    engine.save(digests(3))
    eventually(lambda: following.view.at(Level.MEMORY) == set(digests(3)), "held")
    doomed.process.kill()
    doomed.process.wait(WAIT_S)
    again = NodeProcess(tmp_path / "node.sock", extra=extra)
    stack.callback(again.close)
    eventually(lambda: following.view.resets == 2, "begun anew")
    eventually(lambda: following.view.engines and not following.view.at(Level.MEMORY), "as it is now")


def test_status_says_who_follows(
    node: Node, follow: Callable[[], Following], capsys: pytest.CaptureFixture[str]
) -> None:
    follow()
    assert main(["status", "--socket", str(node.settings.socket_path)]) == 0
    assert f"1 routers follow at {node.feed_address}" in capsys.readouterr().out


def test_without_the_setting_nothing_is_gathered(tmp_path: Path, stack: ExitStack, tier: MemoryTier) -> None:
    node = Node(settings(tmp_path), tier=tier)
    stack.callback(node.close)
    node.start()
    engine = make_engine(node.settings.socket_path, stack)
    assert not engine.scheduler.followed
    assert node.feed_address is None
    assert node.statistics().feed is None
    assert node._tier is tier


def _ref(chunk: bytes):  # type: ignore[no-untyped-def]
    from kvferry.identity.names import PartRef

    return PartRef(PartKey(NAMESPACE.namespace, chunk, 0), PART_BYTES)


def test_an_outcome_that_says_nothing_changes_nothing(node: Node, follow: Callable[[], Following]) -> None:
    with ExitStack() as stack:
        make_engine(node.settings.socket_path, stack)
        view = follow().view
        eventually(lambda: view.spaces, "the space")
        told = node._feed
        assert told is not None
        a, b = digests(2)
        told.seen([_ref(a), _ref(b)], [Outcome.OK, Outcome.FAILED])
        eventually(lambda: view.at(Level.VALKEY) == {a}, "found")
        told.seen([_ref(a), _ref(b)], [Outcome.LATE, Outcome.OK])
        eventually(lambda: view.at(Level.VALKEY) == {a, b}, "still there")
