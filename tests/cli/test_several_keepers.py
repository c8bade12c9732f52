"""``kvferry warm``, ``drop`` and ``status`` over two keepers that share the work, and over the one left."""

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from tests.node.fleet import Engine, at_rest, digests, eventually, settings

from kvferry.addresses import Address
from kvferry.cli.main import main
from kvferry.client.messages import NamespaceInfo, Reason
from kvferry.identity.names import PartKey, PartRef
from kvferry.keeper.app import KeeperProcess
from kvferry.keeper.client import KeeperAccess, Keepers
from kvferry.keeper.settings import KeeperSettings
from kvferry.keeper.wire import Where
from kvferry.node.node import Node
from kvferry.testing.s3 import start_obstore
from kvferry.testing.servers import Server, running_server
from kvferry.tiers.valkey.tier import ValkeyTier

PART_BYTES = 64 << 10
SPACE = NamespaceInfo(b"test" + b"s" * 12, (PART_BYTES,), 128, "test", "model")
CHUNKS = 24
NAMES = ("one", "two")


@pytest.fixture(scope="module", autouse=True)
def obstore() -> None:
    """What it keeps for the life of the process is no leak of a test."""
    start_obstore()


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with running_server("--maxmemory", "200mb", "--maxmemory-policy", "volatile-ttl") as started:
        yield started


class Fleet:
    """A node and keepers, each with a disk of its own, and one bucket. All but Valkey in this process."""

    def __init__(
        self, directory: Path, server: Server, stack: ExitStack, names: Sequence[str] = NAMES
    ) -> None:
        self.server = server
        self.socket = directory / "node.sock"
        self.processes = []
        for at, name in enumerate(names):
            process = KeeperProcess(
                KeeperSettings(
                    valkey=server.settings().url,
                    disk=directory / f"disk{at}",
                    disk_bytes=64 << 20,
                    objects=f"file://{directory / 'objects'}",
                    listen=Address("127.0.0.1", 0),
                    name=name,
                    keepers=tuple(dict.fromkeys(names)),
                    metrics_port=0,
                )
            )
            stack.callback(process.close)
            process.start()
            self.processes.append(process)
        addresses = [process.address for process in self.processes]
        self.named = ",".join(map(str, addresses))
        self.keepers = Keepers(addresses, access=KeeperAccess(), node="test")
        self.node = Node(
            settings(directory), tier=ValkeyTier.connect(server.settings()), keepers=self.keepers
        )
        stack.callback(self.node.close)
        self.node.start()
        self.engine = Engine(self.socket, SPACE, name="engine")
        stack.callback(self.engine.close)
        self.engine.connected()
        eventually(lambda: self.keepers.statistics().up == len(names), "the keepers are up")

    def keep(self, name: str) -> list[PartRef]:
        """A prompt in every tier, each part of it with the keeper whose it is."""
        prompt = digests(CHUNKS, name)
        self.engine.save(prompt)
        at_rest(self.node)
        refs = [PartRef(PartKey(SPACE.namespace, chunk, 0), PART_BYTES) for chunk in prompt]
        self.keepers.stored(refs, positions=range(CHUNKS), likely=[True] * CHUNKS)
        eventually(lambda: sum(self.copied()) == 2 * CHUNKS, "on the disks and in objects")
        answer = self.engine.lookup(prompt, f"cmpl-{name}")
        self.engine.scheduler.end(answer.load_id)
        assert answer.count == CHUNKS
        return refs

    def copied(self) -> list[int]:
        """By line of each keeper."""
        found = [process.statistics().keeper for process in self.processes]
        return [line.copied_parts for one in found for line in (one.keep, one.flush) if line is not None]

    def where(self, refs: Sequence[PartRef]) -> set[Where]:
        found: list[Where] = []
        self.keepers.locate(refs, deadline=1e18, done=found.extend)
        eventually(lambda: len(found) == len(refs), "located")
        return set(found)

    def in_valkey(self) -> int:
        return sum(SPACE.namespace.hex().encode() in name for name in self.server.key_names())


@pytest.fixture
def fleet(server: Server, tmp_path: Path) -> Iterator[Fleet]:
    with ExitStack() as stack:
        yield Fleet(tmp_path, server, stack)
    server.ask("FLUSHALL")


@pytest.fixture
def run(fleet: Fleet, capsys: pytest.CaptureFixture[str]) -> Callable[..., dict[str, Any]]:
    """A command with --json at the fleet's node; what it prints, and its errors as ``err``."""

    def asked(*argv: str, code: int = 0) -> dict[str, Any]:
        assert main([*argv, "--json", "--socket", str(fleet.socket)]) == code, capsys.readouterr().err
        out, err = capsys.readouterr()
        said: dict[str, Any] = json.loads(out)
        return {**said, "err": err}

    return asked


Run = Callable[..., dict[str, Any]]


def test_both_warm_their_shares(fleet: Fleet, run: Run) -> None:
    refs = fleet.keep("warm")
    assert all(fleet.copied()), "each has a share"
    for tier in ("memory", "valkey"):
        assert run("drop", tier, "--request", "cmpl-warm")["dropped_parts"] == CHUNKS
    assert fleet.in_valkey() == 0
    said = run("warm", "--request", "cmpl-warm", "--into", "memory")
    assert [(step["tier"], step["parts"], step["failed"]) for step in said["into"]] == [
        ("valkey", CHUNKS, {}),
        ("memory", CHUNKS, {}),
    ]
    assert fleet.in_valkey() == CHUNKS
    prompt = [ref.key.chunk for ref in refs]
    answer = fleet.engine.lookup(prompt, "again")
    assert list(answer.tiers) == [0] * CHUNKS
    assert [end.reason for end in fleet.engine.load(answer, prompt)] == [Reason.COMPLETE]


def test_what_each_saw_reused_is_warmed(fleet: Fleet, run: Run) -> None:
    refs = fleet.keep("often")
    fleet.keepers.used(refs)
    eventually(
        lambda: sum(one.statistics().keeper.reused_parts for one in fleet.processes) == CHUNKS, "told of"
    )
    run("drop", "memory")
    run("drop", "valkey", "--request", "cmpl-often")
    said = run("warm", "--most-reused", "24h", "--max", "1GiB")
    assert (said["parts"], said["into"][0]["parts"], said["into"][0]["failed"]) == (CHUNKS, CHUNKS, {})
    assert fleet.in_valkey() == CHUNKS


def test_a_drop_reaches_both_and_says_how_much_of_each(fleet: Fleet, run: Run) -> None:
    refs = fleet.keep("drop")
    said = run("drop", "disk")
    assert {each["where"] for each in said["from"]} == {"keeper one", "keeper two"}
    assert all(each["dropped_parts"] for each in said["from"])
    assert said["dropped_parts"] == CHUNKS
    assert fleet.where(refs) == {Where.OBJECTS}
    run("drop", "all")
    assert fleet.where(refs) == {Where.ABSENT}
    assert fleet.in_valkey() == 0


def test_while_one_is_gone_the_other_does_its_part_and_the_gone_one_is_named(fleet: Fleet, run: Run) -> None:
    fleet.keep("gone")
    share = fleet.copied()[2]
    for tier in ("memory", "valkey"):
        run("drop", tier, "--request", "cmpl-gone")
    gone = fleet.processes[0]
    gone.close()
    eventually(lambda: fleet.keepers.statistics().up == 1, "left out")
    said = run("warm", "--request", "cmpl-gone", code=1)
    assert f"keeper {gone.address}: " in said["err"]
    staged, lacking = said["into"][0]["parts"], said["into"][0]["failed"].get("absent", 0)
    assert staged + lacking == CHUNKS
    assert staged >= share > 0
    said = run("drop", "disk", code=1)
    assert {each["where"]: bool(each["error"]) for each in said["from"]} == {
        "keepers": True,
        "keeper two": False,
    }
    assert f"keeper {gone.address}: " in said["err"]
    said = run("drop", "all", code=1)
    assert f"keeper {gone.address}: " in said["err"]


def test_namesakes_are_told_of_in_both_statuses(
    server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with ExitStack() as stack:
        fleet = Fleet(tmp_path, server, stack, names=("twin", "twin"))
        assert main(["status", "--socket", str(fleet.socket)]) == 0
        of_node = " ".join(capsys.readouterr().out.split())
        assert main(["status", "--keepers", fleet.named]) == 1
        of_keepers = " ".join(capsys.readouterr().out.split())
    for text in (of_node, of_keepers):
        assert f"2 keepers are called 'twin': {fleet.named.replace(',', ', ')}; give each a --name" in text


def test_a_disk_that_cannot_be_dropped_from_says_why(fleet: Fleet, run: Run, tmp_path: Path) -> None:
    """As the status of its keeper has it."""
    fleet.keep("gone")
    (tmp_path / "disk0").rename(tmp_path / "elsewhere")
    disk = fleet.processes[0].statistics
    eventually(lambda: "down" in [t.state for t in disk().keeper.tiers if t.name == "disk"], "it is noticed")
    said = run("drop", "disk", code=1)
    errors = {each["where"]: each["error"] for each in said["from"]}
    assert errors["keeper two"] == ""
    assert "No such file or directory" in errors["keeper one"]
    assert "mend that, and repeat the command" in errors["keeper one"]
    assert said["dropped_parts"] == CHUNKS
