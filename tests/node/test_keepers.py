"""A node, real keepers and a real Valkey: what Valkey has lost comes back from the disk, or the bucket."""

import itertools
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from tests.node.fleet import WAIT_S, Engine, at_rest, digests
from tests.node.keepers_fleet import MIXED, PART_BYTES, KeptFleet, line
from tests.servers import Server, running_server

from kvferry.cli.main import main
from kvferry.client.messages import LoadEnd, LookupAnswer, Reason
from kvferry.client.messages import Tier as Place
from kvferry.identity.sealing import KeyRing, SealingKey
from kvferry.keeper.keeper import Keeper
from kvferry.node.estimate import Estimator, Verdict
from kvferry.testing.expectations import eventually
from kvferry.testing.s3 import start_obstore


@pytest.fixture(scope="module", autouse=True)
def obstore() -> None:
    """What it keeps for the life of the process is no leak of a test."""
    start_obstore()


class Cancelled:
    """A stage that never says anything."""

    def cancel(self) -> None:
        """See ``Transfer``."""


@pytest.fixture(scope="module")
def shared_server() -> Iterator[Server]:
    with running_server("--maxmemory", "1gb", "--maxmemory-policy", "allkeys-lru") as server:
        yield server


@pytest.fixture
def fleet(shared_server: Server, tmp_path: Path, stack: ExitStack) -> KeptFleet:
    shared_server.ask("FLUSHALL")
    return KeptFleet(tmp_path, shared_server, stack)


def _keep(fleet: KeptFleet, chunks: list[bytes], *, in_objects: bool = False) -> None:
    """Stored by one host, used by another, kept below Valkey, and gone from there."""
    here, engine = fleet.host()
    assert engine.save(chunks) == len(chunks)
    eventually(lambda: here.statistics().counters.stored_parts == len(chunks), "write-back")
    there, other = fleet.host()
    answer = other.lookup(chunks)
    assert answer.tiers == (Place.VALKEY,) * len(chunks)
    assert other.load(answer, chunks) == [LoadEnd(Reason.COMPLETE, len(chunks))]
    fleet.kept(len(chunks), in_objects=in_objects)
    at_rest(here)
    at_rest(there)
    fleet.empty_valkey()


def _found_again(engine: Engine, chunks: list[bytes]) -> LookupAnswer:
    """Ask until all of it is found: how long a keeper counts as away is no matter here."""
    give_up = time.monotonic() + WAIT_S
    for number in itertools.count():
        answer = engine.lookup(chunks, f"again {number}")
        if answer.count == len(chunks):
            return answer
        assert time.monotonic() < give_up, answer
        engine.scheduler.end(answer.load_id)
    raise AssertionError


def test_what_valkey_evicted_is_loaded_from_a_keepers_disk(
    fleet: KeptFleet, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every byte right, told apart in answers, counts and explain; and then it is in Valkey again."""
    chunks = digests(20)
    fleet.keeper()
    _keep(fleet, chunks)
    node, engine = fleet.host()
    answer = engine.lookup([*chunks, *digests(1, "question")], "cmpl-deep")
    assert (answer.count, answer.reason, answer.tiers) == (20, Reason.ABSENT, (Place.DISK,) * 20)
    assert engine.load(answer, chunks) == [LoadEnd(Reason.COMPLETE, 20)]
    at_rest(node)
    counters = node.statistics().counters
    assert (counters.hit_chunks, counters.staged_parts) == ({"disk": 20}, {"disk": 20})
    assert counters.fetched_bytes == {"disk": 20 * PART_BYTES}
    assert not counters.failed and not counters.stage_failed
    assert main(["explain", "cmpl-deep", "--socket", str(node.settings.socket_path)]) == 0
    assert "disk      20 chunks" in capsys.readouterr().out
    assert main(["status", "--socket", str(node.settings.socket_path)]) == 0
    shown = capsys.readouterr().out
    assert f"keepers   1 of 1 up: {fleet.keepers[0].address}" in shown
    assert [line.split()[:2] for line in shown.splitlines() if line.startswith("disk")] == [["disk", "up"]]
    _, other = fleet.host()
    assert other.lookup(chunks).tiers == (Place.VALKEY,) * 20


def test_what_is_only_in_the_bucket_is_loaded_from_there_through_a_keeper(fleet: KeptFleet) -> None:
    chunks = digests(8)
    fleet.keeper(disk=False, objects=True)
    _keep(fleet, chunks, in_objects=True)
    node, engine = fleet.host()
    answer = engine.lookup(chunks)
    assert (answer.reason, answer.tiers) == (Reason.COMPLETE, (Place.OBJECTS,) * 8)
    assert engine.load(answer, chunks) == [LoadEnd(Reason.COMPLETE, 8)]
    at_rest(node)
    assert node.statistics().counters.staged_parts == {"objects": 8}


def test_a_prefix_lies_in_every_tier_at_once(fleet: KeptFleet) -> None:
    """Its head in memory, then in Valkey, then on two keepers' disks: one load brings all of it."""
    chunks = digests(24)
    fleet.keeper()
    fleet.keeper()
    _keep(fleet, chunks)
    _, valkey = fleet.host()
    answer = valkey.lookup(chunks[:16], "stages half of it")
    assert valkey.load(answer, chunks) == [LoadEnd(Reason.COMPLETE, 16)]
    node, engine = fleet.host()
    answer = engine.lookup(chunks[:8], "head")
    assert answer.tiers == (Place.VALKEY,) * 8
    assert engine.load(answer, chunks) == [LoadEnd(Reason.COMPLETE, 8)]
    answer = engine.lookup(chunks, "all")
    assert answer.tiers == (Place.MEMORY,) * 8 + (Place.VALKEY,) * 8 + (Place.DISK,) * 8
    assert engine.load(answer, chunks) == [LoadEnd(Reason.COMPLETE, 24)]
    at_rest(node)
    assert all(keeper.statistics().keeper.stages.asked for keeper in fleet.keepers)


def test_windows_and_states_come_back_from_a_disk_too(fleet: KeptFleet) -> None:
    """Of each only what the boundary needs."""
    chunks = digests(6)
    fleet.keeper()
    here, engine = fleet.host(MIXED)
    assert engine.save(chunks) == 18
    eventually(lambda: here.statistics().counters.stored_parts == 18, "write-back")
    there, other = fleet.host(MIXED)
    answer = other.lookup(chunks)
    assert other.load(answer, chunks) == [LoadEnd(Reason.COMPLETE, 6)] * 3
    fleet.kept(6 + 2 + 1)
    fleet.empty_valkey()
    node, third = fleet.host(MIXED)
    answer = third.lookup(chunks)
    assert (answer.count, answer.tiers) == (6, (Place.DISK,) * 6)
    assert third.load(answer, chunks) == [LoadEnd(Reason.COMPLETE, 6)] * 3
    assert node.statistics().counters.staged_parts == {"disk": 9}
    for one in (here, there, node):
        at_rest(one)


def test_encrypted_parts_come_back_from_a_disk_that_never_saw_the_key(fleet: KeptFleet) -> None:
    fleet.keys = KeyRing([SealingKey(bytes(range(32)))])
    chunks = digests(8)
    fleet.keeper()
    _keep(fleet, chunks)
    node, engine = fleet.host()
    answer = engine.lookup(chunks)
    assert answer.tiers == (Place.DISK,) * 8
    assert engine.load(answer, chunks) == [LoadEnd(Reason.COMPLETE, 8)]
    at_rest(node)


def test_a_keeper_that_says_nothing_costs_a_lookup_its_wait_and_nothing_that_valkey_has(
    fleet: KeptFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    chunks = digests(12)
    proxy = fleet.proxy(fleet.keeper())
    _keep(fleet, chunks)
    _, other = fleet.host()
    answer = other.lookup(chunks[:4], "stages the head")
    assert other.load(answer, chunks) == [LoadEnd(Reason.COMPLETE, 4)]
    monkeypatch.setattr("tests.node.fleet.LOOKUP_WAIT_S", 6.0)
    node, engine = fleet.host()
    proxy.black_hole = True
    answer = engine.lookup(chunks)
    assert (answer.count, answer.tiers) == (4, (Place.VALKEY,) * 4)
    assert answer.reason in (Reason.DEADLINE, Reason.TIER_DOWN)
    assert engine.load(answer, chunks) == [LoadEnd(Reason.COMPLETE, 4)]
    at_rest(node)
    assert node.statistics().counters.missed_chunks == 0
    proxy.black_hole = False
    proxy.release()
    answer = _found_again(engine, chunks)
    assert answer.tiers == (Place.MEMORY,) * 4 + (Place.DISK,) * 8
    assert engine.load(answer, chunks) == [LoadEnd(Reason.COMPLETE, 12)]
    at_rest(node)


@pytest.mark.parametrize("lost", [(0,), (3, 4, 9), tuple(range(12))], ids=["head", "some", "all"])
def test_what_valkey_evicts_between_probe_and_fetch_comes_from_below_and_the_load_is_whole(
    lost: tuple[int, ...], fleet: KeptFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is called what it was at the lookup."""
    chunks = digests(12)
    fleet.keeper()
    _keep(fleet, chunks)
    _, first = fleet.host()
    assert first.load(first.lookup(chunks), chunks) == [LoadEnd(Reason.COMPLETE, 12)]
    node, engine = fleet.host()
    decide, names = Estimator.decide, fleet.server.key_names()

    def evict(chunk: bytes) -> None:
        for name in names:
            if chunk.hex().encode() in name:
                fleet.server.ask("DEL", name)

    def decide_and_evict(self: Estimator, *asked: Any) -> Verdict:
        for number in lost:
            evict(chunks[number])
        return decide(self, *asked)

    monkeypatch.setattr(Estimator, "decide", decide_and_evict)
    answer = engine.lookup(chunks)
    assert answer.tiers == (Place.VALKEY,) * 12
    assert engine.load(answer, chunks) == [LoadEnd(Reason.COMPLETE, 12)]
    at_rest(node)
    counters = node.statistics().counters
    assert counters.staged_parts == {"valkey": len(lost)}
    assert not counters.failed and not counters.stage_failed


@pytest.mark.parametrize("how", ["silent", "gone"])
def test_a_keeper_lost_in_the_middle_of_a_load_costs_the_rest_of_it_and_no_more_than_its_deadline(
    how: str, fleet: KeptFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine computes what did not come. It is a failure, not a miss, and no slot stays in use."""
    chunks = digests(12)
    proxy = fleet.proxy(fleet.keeper())
    _keep(fleet, chunks)
    node, engine = fleet.host(deadline_cap_ms=1500 if how == "silent" else 60_000)
    asked = threading.Event()

    def never(self: Keeper, refs: object, **later: object) -> Cancelled:
        asked.set()
        return Cancelled()

    with monkeypatch.context() as patch:
        patch.setattr(Keeper, "stage", never)
        answer = engine.lookup(chunks)
        assert answer.tiers == (Place.DISK,) * 12
        assert asked.wait(WAIT_S)
        if how == "gone":
            proxy.refusing = True
            proxy.reset()
        (end,) = engine.load(answer, chunks)
        assert (end.chunk, end.reason in (Reason.STALLED, Reason.DEADLINE)) == (0, how == "silent")
    at_rest(node)
    counters = node.statistics().counters
    assert counters.failed[end.reason.value]
    causes = {name for name, parts in counters.stage_failed.items() if parts}
    assert causes if how == "gone" else causes <= {"late"}  # where the deadline came before the stall
    assert counters.missed_chunks == 0
    proxy.heal()
    node, engine = fleet.host()  # whose loads have time
    again = _found_again(engine, chunks)
    assert again.tiers == (Place.DISK,) * 12
    assert engine.load(again, chunks) == [LoadEnd(Reason.COMPLETE, 12)]
    at_rest(node)


def test_conversations_are_kept_and_prompts_that_come_once_are_not(fleet: KeptFleet) -> None:
    """Of the latter what they share is, for it is used."""
    keeper = fleet.keeper()
    node, engine = fleet.host()
    system = digests(2, "system")

    def serve(prompt: list[bytes], answer: list[bytes], name: str) -> None:
        found = engine.lookup(prompt, name)
        if found.count:
            engine.load(found, prompt)
        engine.save([*prompt, *answer])
        at_rest(node)

    serve(system, [], "first")
    for number in range(4):
        serve([*system, *digests(6, f"document {number}")], [], f"document {number}")
    fleet.kept(2)
    history = [*system, *digests(4, "question")]
    serve(history, [], "first turn")
    for turn in range(3):
        history += digests(1, f"question {turn}")
        serve(history, digests(1, f"answer {turn}"), f"turn {turn}")
        history += digests(1, f"answer {turn}")
    fleet.kept(2 + 4 + 2 * 3)
    told = keeper.statistics().keeper
    assert told.told_stored_parts == 2 + 4 * 6 + 4 + 2 * 3
    assert told.told_likely_parts == 2 * 3
    assert line(told, in_objects=False).copied_parts == 2 + 4 + 2 * 3
