"""A keeper that is killed at any point: what it says it has afterwards is there, with the right bytes."""

import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

import pytest
from tests.keeper.fleet import Answers
from tests.keeper.rig import contents, fill, prompt
from tests.servers import Server, free_ports, must, running_server

from kvferry.addresses import Address
from kvferry.identity.names import PartRef
from kvferry.keeper import peer
from kvferry.keeper.access import KeeperAccess
from kvferry.keeper.client import Keepers
from kvferry.keeper.wire import Where
from kvferry.testing.expectations import eventually
from kvferry.testing.processes import Program
from kvferry.testing.tier_calls import fetch_all
from kvferry.tiers.contract import Outcome
from kvferry.tiers.valkey.tier import ValkeyTier

REFS = prompt("a", 60, nbytes=400_000)


class Fleet:
    """A Valkey, a keeper process with a disk, and a node's side of both."""

    def __init__(self, server: Server, directory: Path, stack: ExitStack) -> None:
        self.server = server
        address = Address("127.0.0.1", free_ports(1)[0])
        self.keepers = Keepers([address], access=KeeperAccess(), node="node")
        stack.callback(self.keepers.close)
        command = [
            *(sys.executable, "-m", "kvferry", "keeper", "--valkey", server.url, "--listen", str(address)),
            *("--disk", str(directory / "disk"), "--disk-size", "128MiB", "--metrics-port", "0"),
        ]
        env = {name: value for name, value in os.environ.items() if not name.startswith("KVFERRY_")}
        self.keeper = Program("keeper", command, directory=directory, ready=self.is_up, env=env)
        stack.callback(self.keeper.close)
        self.valkey = ValkeyTier.connect(server.settings())
        stack.callback(self.valkey.close)
        self.keeper.start()

    def is_up(self) -> bool:
        return self.keepers.statistics().up == 1

    def kill(self) -> None:
        self.keeper.kill()
        eventually(lambda: not self.is_up(), "gone")

    def held(self) -> list[PartRef]:
        answers = Answers()
        self.keepers.locate(REFS, deadline=time.monotonic() + 60.0, done=answers)
        ((found,),) = answers.wait()
        return [ref for ref, where in zip(REFS, found, strict=True) if where is Where.DISK]

    def stage(self, refs: Sequence[PartRef]) -> Answers:
        answers = Answers()
        self.keepers.stage(refs, deadline=time.monotonic() + 60.0, done=answers)
        return answers

    def in_valkey(self, refs: Sequence[PartRef]) -> int:
        """How many parts a node finds there: each as it was, or not at all."""
        found = 0
        for ref, (result, data) in zip(refs, fetch_all(self.valkey, refs), strict=True):
            assert result.outcome in (Outcome.OK, Outcome.MISS)
            if result.outcome is Outcome.OK:
                assert data == contents(ref)
                found += 1
        return found


@pytest.fixture
def fleet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Fleet]:
    monkeypatch.setattr(peer, "GIVE_UP_S", 600.0)
    with (
        running_server("--maxmemory", "100mb", "--maxmemory-policy", "allkeys-lru") as server,
        ExitStack() as stack,
    ):
        yield Fleet(server, tmp_path, stack)


def test_whatever_it_was_doing(fleet: Fleet) -> None:
    fill(fleet.valkey, REFS)
    for kept in (1, 30):  # while it copies
        fleet.keepers.used(REFS)
        eventually(lambda kept=kept: len(fleet.held()) >= kept, "copies")  # type: ignore[misc]
        fleet.kill()
        fleet.keeper.start()
    fleet.keepers.used(REFS)
    eventually(lambda: len(fleet.held()) == len(REFS), "the rest")

    must(fleet.server.ask("FLUSHALL"))
    answers = fleet.stage(REFS)
    answers.wait(20)
    fleet.kill()  # while it stages
    told = [outcome for _, outcome in answers.wait(len(REFS))]
    assert len(REFS) >= fleet.in_valkey(REFS) >= told.count(Outcome.OK) >= 20
    fleet.keeper.start()
    assert fleet.held() == REFS
    assert [outcome for _, outcome in fleet.stage(REFS).wait(len(REFS))] == [Outcome.OK] * len(REFS)
    assert fleet.in_valkey(REFS) == len(REFS)
