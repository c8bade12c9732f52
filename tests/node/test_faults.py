"""Nodes and a real Valkey while one of them loses something, and clocks that jump."""

import multiprocessing
import os
import random
import signal
import time
from contextlib import ExitStack
from pathlib import Path

import pytest
from tests.node.fleet import (
    NAMESPACE,
    PART_BYTES,
    Engine,
    NodeProcess,
    at_rest,
    content,
    digests,
    eventually,
    fill_tier,
    settings,
)
from tests.servers import running_server

from kvferry.addresses import Address
from kvferry.client.admin import AdminClient
from kvferry.client.messages import LoadEnd, Reason
from kvferry.identity.names import PartKey, PartRef
from kvferry.identity.stripes import stripe_plan
from kvferry.node import estimate
from kvferry.node.node import Node
from kvferry.testing.faults import Cut, Ending
from kvferry.testing.memory_tier import MemoryTier
from kvferry.testing.proxy import Proxy
from kvferry.testing.tier_contract import fetch_all, store_all
from kvferry.tiers.contract import Outcome
from kvferry.tiers.valkey.jobs import stripe_key
from kvferry.tiers.valkey.settings import ValkeySettings
from kvferry.tiers.valkey.tier import ValkeyTier
from kvferry.tiers.valkey.url import ValkeyUrl

DAY_S = 86400.0


def _refs(chunks: list[bytes]) -> list[PartRef]:
    return [PartRef(PartKey(NAMESPACE.namespace, chunk, 0), PART_BYTES) for chunk in chunks]


@pytest.mark.parametrize("passed_bytes", [300_000, 3_300_000])
def test_a_node_killed_in_the_middle_of_a_write_leaves_a_miss_or_the_exact_bytes(
    tmp_path: Path, stack: ExitStack, passed_bytes: int
) -> None:
    server = stack.enter_context(running_server())
    proxy = stack.enter_context(Proxy(("127.0.0.1", server.port)))
    held = proxy.requests.once(Cut(passed_bytes, Ending.STALL))
    process = NodeProcess(tmp_path / "node.sock", extra=["--valkey", f"valkey://127.0.0.1:{proxy.port}/0"])
    stack.callback(process.close)
    engine = Engine(process.socket_path)
    stack.callback(engine.close)
    chunks = digests(8)
    assert engine.connected().save(chunks) == 8
    eventually(lambda: held.fired, "the write stops in the middle of a value")
    process.signal(signal.SIGKILL)
    process.process.wait()
    tier = ValkeyTier.connect(server.settings())
    stack.callback(tier.close)
    outcomes = []
    for chunk, (result, memory) in zip(chunks, fetch_all(tier, _refs(chunks)), strict=True):
        outcomes.append(result.outcome)
        assert result.outcome is not Outcome.OK or bytes(memory) == content(chunk, 0)
    assert set(outcomes) <= {Outcome.OK, Outcome.MISS}
    assert Outcome.MISS in outcomes
    assert not tier.statistics().failed


def test_what_valkey_loses_between_lookup_and_load_ends_the_load_there(
    tmp_path: Path, stack: ExitStack
) -> None:
    server = stack.enter_context(running_server())
    node = Node(settings(tmp_path), tier=ValkeyTier.connect(server.settings()))
    stack.callback(node.close)
    node.start()
    engine = Engine(node.settings.socket_path)
    stack.callback(engine.close)
    engine.connected()
    chunks = digests(60)  # half of it waits until what came before it has been copied
    for start in range(0, 60, 10):
        assert engine.save(chunks[start : start + 10], prefix=chunks[:start]) == 10
        at_rest(node)
    with AdminClient(node.settings.socket_path) as admin:
        admin.drop("memory")
    answer = engine.lookup(chunks)
    assert (answer.count, answer.reason) == (60, Reason.COMPLETE)
    lost = _refs(chunks)[50]
    for stripe in stripe_plan(lost.nbytes):
        assert server.ask("UNLINK", stripe_key(lost.key, stripe.index)) == 1
    assert engine.load(answer, chunks) == [LoadEnd(Reason.GONE, 50)]
    at_rest(node)
    counters = node.statistics().counters
    assert counters.failed[Reason.GONE.value] == 1
    assert counters.missed_chunks == 0


def _fetch_and_wait(path: Path) -> None:
    """In a process of its own, which is killed while it waits."""
    engine = Engine(path, name="doomed").connected()
    answer = engine.lookup(digests(4))
    engine.worker.load(answer.ticket(0)).next(60.0)


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_the_fetch_of_a_killed_engine_serves_the_next(
    tmp_path: Path, stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(estimate, "STALL_CAP_S", 60.0)
    server = stack.enter_context(running_server())
    proxy = stack.enter_context(Proxy(("127.0.0.1", server.port)))
    url = ValkeyUrl((Address("127.0.0.1", proxy.port),))
    tier = ValkeyTier.connect(ValkeySettings(url, stall_s=60.0))
    node = Node(settings(tmp_path, deadline_cap_ms=300_000), tier=tier)
    stack.callback(node.close)
    chunks = digests(4)
    stored = [(ref, memoryview(content(ref.key.chunk, 0))) for ref in _refs(chunks)]
    assert store_all(tier, stored) == [Outcome.OK] * 4
    doomed = multiprocessing.get_context("fork").Process(
        target=_fetch_and_wait, args=(node.settings.socket_path,)
    )
    doomed.start()
    stack.callback(doomed.close)
    stack.callback(doomed.join)
    stack.callback(doomed.kill)
    held = proxy.replies.once(Cut(100_000, Ending.STALL))  # what is stored is known, and does not come
    node.start()
    eventually(lambda: held.fired and node.statistics().fetches == 4, "the fetch is under way")
    engine = Engine(node.settings.socket_path)
    stack.callback(engine.close)
    answer = engine.connected().lookup(chunks)
    assert answer.count == 4
    doomed.kill()
    eventually(lambda: node.statistics().loads == 1, "the dead engine's load is gone")
    proxy.heal()
    assert engine.load(answer, chunks) == [LoadEnd(Reason.COMPLETE, 4)]
    at_rest(node)
    now = node.statistics()
    assert (now.counters.shared_fetches, now.tier.fetched_parts) == (4, 4)  # type: ignore[union-attr]
    assert (now.counters.missed_chunks, +now.counters.failed) == (0, {})


class JumpingClock:
    """A wall clock that is years ahead at one look, and years behind at the next."""

    def __init__(self) -> None:
        self._random = random.Random(1)

    def __call__(self) -> float:
        return 1.7e9 + self._random.uniform(-3000 * DAY_S, 3000 * DAY_S)


def test_a_wall_clock_that_jumps_changes_nothing(
    node: Node, engine: Engine, tier: MemoryTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = JumpingClock()
    monkeypatch.setattr(time, "time", clock)
    monkeypatch.setattr(time, "time_ns", lambda: int(clock() * 1e9))
    chunks, elsewhere = digests(6), digests(6, "elsewhere")
    fill_tier(tier, elsewhere)
    assert engine.save(chunks) == 6
    for number in range(5):
        for name, wanted in (("memory", chunks), ("tier", elsewhere)):
            answer = engine.lookup(wanted, f"{name}{number}")
            assert (answer.count, answer.reason) == (6, Reason.COMPLETE)
            assert engine.load(answer, wanted) == [LoadEnd(Reason.COMPLETE, 6)]
    at_rest(node)
    counters = node.statistics().counters
    assert (counters.loads_expired, counters.reservations_expired) == (0, 0)
    assert not +counters.failed
    assert engine.scheduler.statistics().connects == 1


def test_killed_processes_leave_no_shared_memory(tmp_path: Path, stack: ExitStack) -> None:
    process = NodeProcess(tmp_path / "node.sock")
    stack.callback(process.close)
    engine = Engine(process.socket_path)
    stack.callback(engine.close)
    assert engine.connected().save(digests(4)) == 4
    maps = Path(f"/proc/{process.process.pid}/maps").read_text().splitlines()
    shared = [line.split(maxsplit=5) for line in maps if line.split()[1] == "rw-s"]
    assert any("memfd:kvferry-pool" in fields[5] for fields in shared)
    named = [fields[5] for fields in shared if not fields[5].endswith("(deleted)")]
    assert not named, "memory that outlives the processes that map it"
    process.signal(signal.SIGKILL)
    process.process.wait()
    left = {path.name for path in tmp_path.iterdir()}
    assert left <= {"node.sock", "node.sock.lock"}
    assert not [name for name in os.listdir("/dev/shm") if "kvferry" in name]
