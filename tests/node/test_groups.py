"""Windows and states: a prefix ends where every part accepts it, and a load of it is all or nothing."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

import pytest
from tests.node.fleet import Engine, at_rest, content, digests, settings
from tests.servers import Server, running_server

from kvferry.client.admin import AdminClient
from kvferry.client.messages import LoadEnd, LookupAnswer, MatchAnswer, NamespaceInfo, Reason, Tier
from kvferry.client.worker import WorkerClient
from kvferry.identity.names import PartKey
from kvferry.identity.stripes import part_checksums
from kvferry.node.node import Node
from kvferry.testing.expectations import eventually
from kvferry.testing.memory_tier import MemoryTier
from kvferry.tiers.contract import Outcome
from kvferry.tiers.valkey.tier import ValkeyTier

FULL, WINDOW, STATE = 0, 1, 2
SIZES = (512 << 10, 64 << 10, 3 << 20)  # of a state two stripes
HYBRID = NamespaceInfo(b"test" + b"h" * 12, SIZES, 128, "test", "hybrid", trailing=(0, 2, 1))


def key(digest: bytes, part: int) -> PartKey:
    return PartKey(HYBRID.namespace, digest, part)


def hold(tier: MemoryTier, chunks: Sequence[bytes], *, states: Sequence[int]) -> None:
    """As another host stores them: everything of all chunks, but states of some only."""
    for at, digest in enumerate(chunks):
        for part, nbytes in enumerate(SIZES):
            if part != STATE or at in states:
                tier.parts[key(digest, part)] = content(digest, part, nbytes)


def save(engine: Engine, chunks: Sequence[bytes], *, states: Sequence[int]) -> None:
    """Store a prompt, a few chunks at a time, the states as an engine that takes few checkpoints has them."""
    for part, worker in enumerate(engine.workers):
        wanted = [at for at in range(len(chunks)) if part != STATE or at in states]
        for at in wanted:
            _save_one(worker, part, chunks[: at + 1])


def _save_one(worker: WorkerClient, part: int, prompt: Sequence[bytes]) -> None:
    (slot,) = worker.reserve(prompt[:-1], prompt[-1:], part=part, timeout_s=60.0)
    if slot.view is not None:
        slot.view[:] = content(slot.digest, part, len(slot.view))
        assert worker.commit(part, [(slot.digest, part_checksums(slot.view))])


@pytest.fixture
def hybrid(node: Node, stack: ExitStack) -> Engine:
    """An engine with a full group, a window and states."""
    engine = Engine(node.settings.socket_path, HYBRID)
    stack.callback(engine.close)
    return engine.connected()


def needed(answer: LookupAnswer) -> list[int]:
    """How many chunks of each part its tickets bring."""
    return [len(answer.ticket(part).places) for part in range(len(SIZES))]


def whole(answer: LookupAnswer) -> list[LoadEnd]:
    """How the streams of a load end that brings everything."""
    return [LoadEnd(Reason.COMPLETE, answer.first_chunk + answer.count)] * len(SIZES)


def test_a_hit_ends_at_the_last_state_and_brings_no_more_than_that_needs(
    node: Node, tier: MemoryTier, hybrid: Engine
) -> None:
    chunks = digests(9)
    hold(tier, chunks, states=(2, 5))
    answer = hybrid.lookup(chunks)
    assert (answer.count, answer.reason, answer.tiers) == (6, Reason.ABSENT, (Tier.VALKEY,) * 6)
    assert needed(answer) == [6, 2, 1]
    assert hybrid.load(answer, chunks) == whole(answer)
    assert node.statistics().counters.fetched_parts == 9
    again = hybrid.lookup(chunks, "again")
    assert (again.count, again.tiers) == (6, (Tier.MEMORY,) * 6)
    assert hybrid.load(again, chunks) == whole(again)
    counters = node.statistics().counters
    nbytes = 6 * SIZES[FULL] + 2 * SIZES[WINDOW] + SIZES[STATE]
    assert (counters.hit_bytes["valkey"], counters.hit_bytes["memory"]) == (nbytes, nbytes)
    assert counters.missed_chunks == 6
    at_rest(node)


def test_the_engines_own_prefix_stands_for_what_lies_before_the_first_chunk(
    node: Node, tier: MemoryTier, hybrid: Engine
) -> None:
    chunks = digests(6)
    hold(tier, chunks, states=(5,))
    for at in range(5):  # of what comes before, the tier has nothing
        for part in (FULL, WINDOW):
            del tier.parts[key(chunks[at], part)]
    assert hybrid.lookup(chunks, "from the start").count == 0
    answer = hybrid.lookup(chunks, first_chunk=5)
    assert (answer.count, needed(answer)) == (1, [1, 1, 1])
    assert hybrid.load(answer, chunks) == whole(answer)
    at_rest(node)


@pytest.mark.parametrize(
    ("lost", "count"), [((WINDOW, 7), 6), ((WINDOW, 6), 6), ((STATE, 7), 6), ((FULL, 7), 6), ((FULL, 4), 3)]
)
def test_a_lost_part_leads_to_a_shorter_boundary(
    lost: tuple[int, int], count: int, *, node: Node, tier: MemoryTier, hybrid: Engine
) -> None:
    chunks = digests(8)
    hold(tier, chunks, states=(2, 5, 7))
    part, at = lost
    del tier.parts[key(chunks[at], part)]
    answer = hybrid.lookup(chunks)
    assert (answer.count, answer.reason) == (count, Reason.ABSENT)
    assert hybrid.load(answer, chunks) == whole(answer)
    record = _record(node, "r")
    assert (record["missing_part"], record["missing_trailing"]) == (part, HYBRID.trailing[part])
    at_rest(node)


def test_without_any_state_it_is_a_miss(node: Node, tier: MemoryTier, hybrid: Engine) -> None:
    chunks = digests(3)
    hold(tier, chunks, states=())
    answer = hybrid.lookup(chunks)
    assert (answer.count, answer.reason) == (0, Reason.ABSENT)
    assert node.statistics().counters.missed_chunks == 3
    at_rest(node)


def test_a_state_that_memory_lost_is_called_evicted_and_one_that_never_was_is_not(
    tmp_path: Path, stack: ExitStack
) -> None:
    node = Node(settings(tmp_path, pool_bytes=16 << 20))  # with nothing behind it
    stack.callback(node.close)
    node.start()
    engine = Engine(node.settings.socket_path, HYBRID)
    stack.callback(engine.close)
    engine.connected()
    chunks = digests(2)
    save(engine, chunks, states=())
    eventually(lambda: node.statistics().catalogue.ready_parts == 4, "what was saved")
    assert engine.lookup(chunks).reason is Reason.ABSENT
    save(engine, chunks, states=(1,))
    eventually(lambda: engine.scheduler.match(chunks).count == 2, "the state")
    for number in range(4):
        save(engine, digests(1, f"other {number}"), states=(0,))
    eventually(lambda: engine.scheduler.match(chunks).reason is Reason.EVICTED, "the eviction")


@pytest.mark.parametrize("part", [FULL, WINDOW, STATE])
def test_a_part_that_does_not_come_ends_the_whole_load_at_its_start(
    part: int, *, node: Node, tier: MemoryTier, hybrid: Engine
) -> None:
    chunks = digests(6)
    hold(tier, chunks, states=(5,))
    real = tier.probe

    def probe(refs, *, deadline, done):  # type: ignore[no-untyped-def]
        def seen(outcomes):  # type: ignore[no-untyped-def]
            tier.fail(key(chunks[5], part), Outcome.FAILED)
            done(outcomes)

        real(refs, deadline=deadline, done=seen)

    tier.probe = probe  # type: ignore[method-assign]
    answer = hybrid.lookup(chunks)
    assert (answer.count, answer.all_or_nothing) == (6, True)
    eventually(lambda: node.statistics().counters.failed["failed"] == 1, "the failure")
    ends = hybrid.load(answer, chunks)
    assert ends[part] == LoadEnd(Reason.FAILED, answer.start(part))
    at_rest(node)
    record = _record(node, "r")
    assert (record["failed_chunk"], record["load_reason"]) == (0, "failed")
    assert node.statistics().counters.missed_chunks == 0


@pytest.mark.parametrize("part", [WINDOW, STATE])
def test_a_corrupt_part_is_removed_everywhere_and_the_next_prefix_ends_before_it(
    part: int, *, node: Node, tier: MemoryTier, hybrid: Engine
) -> None:
    chunks = digests(6)
    hold(tier, chunks, states=(2, 5))
    answer = hybrid.lookup(chunks)
    assert answer.count == 6
    hybrid.workers[part].tell_corrupt(answer.load_id, part, 5)
    eventually(lambda: node.statistics().counters.corrupt_parts == 1, "the complaint")
    hybrid.scheduler.end(answer.load_id)
    at_rest(node)
    assert _record(node, "r")["failed_chunk"] == 0
    assert hybrid.scheduler.match(chunks) == MatchAnswer(3, Reason.ABSENT)
    at_rest(node)


def _record(node: Node, request_id: str) -> dict[str, object]:
    with AdminClient(node.settings.socket_path) as admin:
        (record,) = admin.explain(request_id)
    return record


def test_match_says_what_a_lookup_could_load(node: Node, tier: MemoryTier, hybrid: Engine) -> None:
    chunks = digests(7)
    hold(tier, chunks, states=(1, 4))
    assert hybrid.scheduler.match(chunks) == MatchAnswer(5, Reason.ABSENT)
    assert hybrid.scheduler.match(chunks[:5]) == MatchAnswer(5, Reason.COMPLETE)
    assert hybrid.scheduler.match(chunks[:1]) == MatchAnswer(0, Reason.ABSENT)
    statistics = node.statistics()
    assert (statistics.counters.lookups, statistics.counters.loads, statistics.counters.fetched_parts) == (
        0,
        0,
        0,
    )
    at_rest(node)


def test_an_engine_with_other_trailing_numbers_is_refused(node: Node, hybrid: Engine) -> None:
    other = NamespaceInfo(HYBRID.namespace, SIZES, 128, "test", "hybrid", trailing=(0, 1, 1))
    short = NamespaceInfo(b"test" + b"s" * 12, SIZES, 128, "test", "hybrid", trailing=(0, 1))
    for wrong in (other, short):
        worker = WorkerClient(socket_path=node.settings.socket_path, engine="other", rank=0, namespace=wrong)
        try:
            eventually(lambda w=worker: "trailing" in w.last_error, "the refusal")  # type: ignore[misc]
        finally:
            worker.close()
    assert hybrid.scheduler.connected


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with running_server("--maxmemory", "1gb", "--maxmemory-policy", "allkeys-lru") as running:
        yield running


def test_another_host_loads_up_to_the_last_state_through_valkey(
    tmp_path: Path, server: Server, stack: ExitStack
) -> None:
    nodes, engines = [], []
    for name in ("here", "there"):
        (tmp_path / name).mkdir(mode=0o700)
        node = Node(settings(tmp_path / name), tier=ValkeyTier.connect(server.settings()))
        stack.callback(node.close)
        node.start()
        engine = Engine(node.settings.socket_path, HYBRID)
        stack.callback(engine.close)
        nodes.append(node)
        engines.append(engine.connected())
    chunks = digests(7, "valkey")
    save(engines[0], chunks, states=(3, 5))
    eventually(lambda: nodes[0].statistics().counters.stored_parts == 16, "write-back")
    assert engines[1].scheduler.match(chunks) == MatchAnswer(6, Reason.ABSENT)
    answer = engines[1].lookup(chunks)
    assert (answer.count, needed(answer)) == (6, [6, 2, 1])
    assert engines[1].load(answer, chunks) == whole(answer)
    server.ask("FLUSHALL")
    assert engines[0].lookup(chunks, "memory").tiers == (Tier.MEMORY,) * 6
    longer = engines[1].lookup(chunks, "longer")
    assert (longer.count, longer.reason) == (6, Reason.ABSENT)
    for engine, ended in zip(engines, ("memory", "longer"), strict=True):
        engine.scheduler.cancel(ended)
    for engine in engines:
        engine.close()
    for node in nodes:
        at_rest(node)
