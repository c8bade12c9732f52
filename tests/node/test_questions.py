"""What people ask of a node beyond status: a request's chunks, drops by prompt and age, parts to fetch."""

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.node.conftest import make_engine
from tests.node.fleet import NAMESPACE, PART_BYTES, Engine, at_rest, digests, eventually, fill_tier, settings
from tests.node.machine_keepers import ScriptedKeepers
from tests.node.machine_tier import ScriptedTier, Value

from kvferry.client.admin import AdminClient
from kvferry.client.messages import Reason, Report
from kvferry.errors import RefusedError
from kvferry.identity.names import DIGEST_BYTES, PartKey
from kvferry.keeper.wire import Where
from kvferry.node import search
from kvferry.node.ages import MAX_STEPS, Ages
from kvferry.node.node import Node
from kvferry.node.prompts import Prompts
from kvferry.testing.memory_tier import MemoryTier
from kvferry.tiers.contract import FetchItem, FetchResult, Outcome

SPACE = NAMESPACE.namespace


def chunks_in_memory(node: Node) -> int:
    return node.statistics().catalogue.ready_parts


@pytest.fixture
def admin(node: Node, stack: ExitStack) -> AdminClient:
    return stack.enter_context(AdminClient(node.settings.socket_path))


def test_the_chunks_of_a_request_are_known_by_its_id_or_the_beginning_of_it(
    engine: Engine, admin: AdminClient
) -> None:
    chunks = digests(5)
    engine.lookup(chunks, "cmpl-abc-0-12345678")
    for wanted in ("cmpl-abc-0-12345678", "cmpl-abc", "abc"):
        prompt = admin.prompt(wanted)
        assert prompt["chunks"] == [chunk.hex() for chunk in chunks]
        assert (prompt["namespace"], prompt["part_bytes"]) == (SPACE.hex(), [PART_BYTES])
    engine.lookup(chunks, "cmpl-abd-0-12345678")
    with pytest.raises(RefusedError, match="2 requests begin with ab"):
        admin.prompt("ab")
    with pytest.raises(RefusedError, match="no request 'nobody'"):
        admin.prompt("nobody")


def test_of_a_request_that_asked_for_nothing_the_node_says_so(engine: Engine, admin: AdminClient) -> None:
    engine.scheduler.report(Report(request_id="short"))
    eventually(lambda: admin.explain("short"), "reported")
    engine.lookup([], "empty")
    for request_id in ("short", "empty"):
        with pytest.raises(RefusedError, match="no chunks are known"):
            admin.prompt(request_id)


def test_a_request_that_is_refused_for_its_size_is_not_remembered(
    engine: Engine, admin: AdminClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(search, "MAX_PENDING_CHUNKS_PER_CONNECTION", 10)
    assert engine.lookup(digests(11), "too many").reason is Reason.LIMIT
    with pytest.raises(RefusedError, match="no chunks are known"):
        admin.prompt("too many")


def test_dropping_a_prompt_leaves_the_rest(node: Node, engine: Engine, admin: AdminClient) -> None:
    mine, others = digests(4), digests(3, "other")
    engine.save(mine)
    engine.save(others)
    at_rest(node)
    said = admin.drop("memory", namespace=SPACE, chunks=b"".join(mine[:2]))
    assert (said["dropped_parts"], said["dropped_bytes"]) == (2, 2 * PART_BYTES)
    assert chunks_in_memory(node) == 5
    assert engine.lookup(others, "others").count == 3


def test_what_is_dropped_while_it_is_loaded_is_found_by_nobody_and_the_load_goes_on(
    node: Node, engine: Engine, tier: MemoryTier, admin: AdminClient
) -> None:
    chunks = digests(3)
    engine.save(chunks)
    at_rest(node)
    tier.parts.clear()
    answer = engine.lookup(chunks, "holds")
    assert admin.drop("memory", namespace=SPACE, chunks=b"".join(chunks))["dropped_parts"] == 3
    assert engine.lookup(chunks, "later").count == 0
    assert [end.reason for end in engine.load(answer, chunks)] == [Reason.COMPLETE]
    eventually(lambda: node.statistics().catalogue.used_bytes == 0, "memory is given back")


def test_the_tier_behind_forgets_a_prompt_and_memory_keeps_it(
    node: Node, engine: Engine, tier: MemoryTier, admin: AdminClient
) -> None:
    chunks = digests(4)
    engine.save(chunks)
    at_rest(node)
    assert len(tier.parts) == 4
    said = admin.drop("valkey", namespace=SPACE, chunks=b"".join(chunks[1:]))
    assert (said["dropped_parts"], said["outcome"]) == (3, "ok")
    assert len(tier.parts) == 1
    assert chunks_in_memory(node) == 4
    with pytest.raises(RefusedError, match="not disk"):
        admin.drop("disk")
    assert admin.drop("valkey", namespace=b"", older_than_s=1e6)["dropped_parts"] == 0
    assert admin.drop("valkey", namespace=SPACE)["dropped_parts"] == 1


class NamedPartsOnly(MemoryTier):
    """As Valkey: what it forgets must be named."""

    drop = None  # type: ignore[assignment]


def test_a_tier_that_cannot_look_for_what_to_forget_says_who_can(tmp_path: Path, stack: ExitStack) -> None:
    node = Node(settings(tmp_path), tier=NamedPartsOnly("valkey"))
    stack.callback(node.close)
    node.start()
    admin = stack.enter_context(AdminClient(node.settings.socket_path))
    with pytest.raises(RefusedError, match="keepers drop the rest"):
        admin.drop("valkey")


def test_what_was_used_lately_survives_a_drop_by_age(
    tmp_path: Path, stack: ExitStack, tier: MemoryTier
) -> None:
    """A chunk counts from when it was stored or last used, whichever is later."""
    later_s = [0.0]
    node = Node(settings(tmp_path), tier=tier, clock=lambda: time.monotonic() + later_s[0])
    stack.callback(node.close)
    node.start()
    engine = Engine(node.settings.socket_path)
    stack.callback(engine.close)
    engine.connected()
    admin = stack.enter_context(AdminClient(node.settings.socket_path))
    old, used, new = digests(3, "old"), digests(2, "used"), digests(2, "new")
    engine.save(old)
    engine.save(used)
    at_rest(node)
    later_s[0] += 1000
    assert admin.drop("memory", older_than_s=2000)["dropped_parts"] == 0
    engine.load(engine.lookup(used, "uses"), used)
    engine.save(new)
    at_rest(node)
    later_s[0] += 100
    assert admin.drop("memory", older_than_s=500, namespace=SPACE)["dropped_parts"] == 3
    assert chunks_in_memory(node) == 4
    assert engine.lookup(new, "new").count == 2


@given(st.lists(st.tuples(st.floats(0, 50), st.integers(0, 5)), max_size=200), st.floats(0, 3000))
def test_an_age_never_calls_old_what_was_stamped_later(steps: list[tuple[float, int]], when: float) -> None:
    ages, now, stamp = Ages(), 0.0, 0
    stamped: list[float] = []
    for wait_s, stamps in steps:
        now += wait_s
        for _ in range(stamps):
            stamp += 1
            stamped.append(now)
        ages.note(now, stamp + 1)
    mark = ages.mark_at(when)
    assert all(stamped[number - 1] <= when for number in range(1, min(mark, stamp + 1)))


def test_ages_are_bounded_and_go_far_back() -> None:
    ages = Ages()
    for second in range(5 * MAX_STEPS):
        ages.note(float(second), second + 1)
    assert len(ages._times) <= MAX_STEPS
    assert ages._times == sorted(ages._times)
    assert 0 < ages.mark_at(100.0) <= 101


def test_parts_that_the_tier_has_are_fetched_and_found_without_it(
    node: Node, engine: Engine, tier: MemoryTier, admin: AdminClient
) -> None:
    chunks = digests(6)
    fill_tier(tier, chunks[:4])
    engine.save(chunks[4:5])
    at_rest(node)
    said = admin.fetch(SPACE, b"".join(chunks), (0,) * 6, within_s=30.0)
    assert (said["fetched_parts"], said["fetched_bytes"]) == (4, 4 * PART_BYTES)
    assert (said["there_parts"], said["failed"]) == (1, {"absent": 1})
    tier.parts.clear()
    answer = engine.lookup(chunks, "warm")
    assert answer.count == 5
    assert [end.reason for end in engine.load(answer, chunks)] == [Reason.COMPLETE]
    at_rest(node)


def test_what_is_fetched_does_not_evict_what_was_fetched_before(
    node: Node, engine: Engine, tier: MemoryTier, admin: AdminClient
) -> None:
    del engine
    held = node.statistics().pool_bytes // PART_BYTES
    chunks = digests(2 * held)
    fill_tier(tier, chunks)
    mark, fetched, reasons = 0, 0, set[str]()
    for at in range(0, len(chunks), 8):
        some = chunks[at : at + 8]
        said = admin.fetch(SPACE, b"".join(some), (0,) * len(some), within_s=30.0, mark=mark)
        mark = said["mark"]
        fetched += said["fetched_parts"]
        reasons |= set(said["failed"])
    assert reasons <= {"pool-full", "limit"}
    assert 0 < fetched <= held
    assert node.statistics().catalogue.evicted_parts == 0


def test_a_part_that_is_fetched_and_wrong_is_removed_below_the_tier_too(
    tmp_path: Path, stack: ExitStack, tier: MemoryTier
) -> None:
    keepers = ScriptedKeepers(ScriptedTier())
    node = Node(settings(tmp_path), tier=tier, keepers=keepers)
    stack.callback(node.close)
    node.start()
    make_engine(node.settings.socket_path, stack)
    admin = stack.enter_context(AdminClient(node.settings.socket_path))
    chunks = digests(2)
    keys = [PartKey(SPACE, chunk, 0) for chunk in chunks]
    fill_tier(tier, chunks)
    tier.fail(keys[0], Outcome.CORRUPT)
    for key in keys:
        keepers.values[key] = Value(key, b"", ()), Where.DISK
    said = admin.fetch(SPACE, b"".join(chunks), (0,) * 2, within_s=30.0)
    assert (said["fetched_parts"], said["failed"]) == (1, {"corrupt": 1})
    assert list(keepers.values) == keys[1:]
    at_rest(node)


class HeldFetches(MemoryTier):
    """Its first fetch begins when the test says so."""

    def __init__(self) -> None:
        super().__init__("valkey")
        self.first: Callable[[], object] | None = None
        self.fetches = 0

    def fetch(
        self, items: Sequence[FetchItem], *, deadline: float, done: Callable[[int, FetchResult], None]
    ) -> Any:
        self.fetches += 1
        begin = partial(super().fetch, items, deadline=deadline, done=done)
        if self.fetches > 1:
            return begin()
        self.first = begin
        return None


def test_a_load_waits_for_what_is_being_fetched_and_fetches_nothing_twice(
    tmp_path: Path, stack: ExitStack
) -> None:
    tier = HeldFetches()
    node = Node(settings(tmp_path), tier=tier)
    stack.callback(node.close)
    node.start()
    engine = Engine(node.settings.socket_path)
    stack.callback(engine.close)
    engine.connected()
    admin = stack.enter_context(AdminClient(node.settings.socket_path))
    chunks = digests(3)
    fill_tier(tier, chunks)
    said: list[dict[str, Any]] = []
    asks = threading.Thread(
        target=lambda: said.append(admin.fetch(SPACE, b"".join(chunks), (0,) * 3, within_s=60.0))
    )
    asks.start()
    eventually(lambda: tier.first is not None, "fetching")
    answer = engine.lookup(chunks, "waits")
    assert answer.count == 3
    assert tier.first is not None
    tier.first()
    assert [end.reason for end in engine.load(answer, chunks)] == [Reason.COMPLETE]
    asks.join()
    assert said[0]["fetched_parts"] == 3
    assert tier.fetches == 1
    at_rest(node)


def test_a_fetch_of_what_there_cannot_be_is_refused(engine: Engine, admin: AdminClient) -> None:
    del engine
    with pytest.raises(RefusedError, match="no parts of that namespace"):
        admin.fetch(SPACE, bytes(DIGEST_BYTES), (5,), within_s=1.0)
    with pytest.raises(RefusedError, match="no parts of that namespace"):
        admin.fetch(SPACE, bytes(DIGEST_BYTES), (0, 0), within_s=1.0)
    with pytest.raises(RefusedError, match="start one first"):
        admin.fetch(b"?" * 16, bytes(DIGEST_BYTES), (0,), within_s=1.0)


@given(
    st.lists(st.tuples(st.integers(0, 9), st.integers(0, 40)), max_size=60),
    st.integers(1, 50),
    st.integers(1, 12),
)
def test_prompts_remember_the_newest_within_their_bounds(
    asked: list[tuple[int, int]], most: int, most_prompts: int
) -> None:
    prompts = Prompts(most, most_prompts)
    for name, chunks in asked:
        prompts.remember(f"r{name}", SPACE, bytes(DIGEST_BYTES * chunks))
        held = [prompt for number in range(10) if (prompt := prompts.get(f"r{number}")) is not None]
        assert sum(len(prompt.digests) for prompt in held) <= most * DIGEST_BYTES
        assert len(held) == len(prompts) <= most_prompts
        assert all(prompt.digests for prompt in held)
        newest = prompts.get(f"r{name}")
        if 0 < chunks <= most:
            assert newest is None or len(newest.digests) >= chunks * DIGEST_BYTES
