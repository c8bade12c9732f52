"""``kvferry drop`` and ``kvferry warm`` over real parts: a node, Valkey, a keeper with disk and objects."""

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
from kvferry.keeper.admin import KeeperAdmin
from kvferry.keeper.app import KeeperProcess
from kvferry.keeper.client import KeeperAccess, Keepers
from kvferry.keeper.settings import KeeperSettings
from kvferry.keeper.wire import DropTier, Where
from kvferry.node.node import Node
from kvferry.testing.servers import Server, running_server
from kvferry.tiers.objects.settings import ObjectSettings
from kvferry.tiers.objects.tier import ObjectTier
from kvferry.tiers.valkey.tier import ValkeyTier

PART_BYTES = 64 << 10
SPACE = NamespaceInfo(b"test" + b"w" * 12, (PART_BYTES,), 128, "test", "model")
OTHER = NamespaceInfo(b"test" + b"o" * 12, (PART_BYTES,), 128, "test", "other")
CHUNKS = 6


class Fleet:
    """All of it in this process, but for Valkey."""

    def __init__(self, directory: Path, server: Server, stack: ExitStack) -> None:
        self.server = server
        self.socket = directory / "node.sock"
        self.keeper = KeeperProcess(
            KeeperSettings(
                valkey=server.settings().url,
                disk=directory / "disk",
                disk_bytes=64 << 20,
                objects=f"file://{directory / 'objects'}",
                listen=Address("127.0.0.1", 0),
                name="store",
                metrics_port=0,
            )
        )
        stack.callback(self.keeper.close)
        self.keeper.start()
        keepers = Keepers([self.keeper.address], access=KeeperAccess(), node="test")
        self.node = Node(settings(directory), tier=ValkeyTier.connect(server.settings()), keepers=keepers)
        stack.callback(self.node.close)
        self.node.start()
        self.engines = []
        for space in (SPACE, OTHER):
            engine = Engine(self.socket, space, name=space.label)
            stack.callback(engine.close)
            self.engines.append(engine.connected())
        eventually(lambda: keepers.statistics().up == 1, "the keeper is up")

    def refs(self, chunks: Sequence[bytes], space: NamespaceInfo = SPACE) -> list[PartRef]:
        return [PartRef(PartKey(space.namespace, chunk, 0), PART_BYTES) for chunk in chunks]

    def keep(self, name: str, *, other: bool = False, chunks: int = CHUNKS) -> list[bytes]:
        """A prompt in memory, Valkey, on the disk and in objects, asked for by a request of that name."""
        prompt, space = digests(chunks, name), OTHER if other else SPACE
        engine = self.engines[other]
        engine.save(prompt)
        at_rest(self.node)
        refs = self.refs(prompt, space)
        copied = self.copied
        self.keeper._keeper.stored(refs, positions=range(chunks), likely=[True] * chunks)
        eventually(
            lambda: all(now >= before + chunks for now, before in zip(self.copied, copied, strict=True)),
            "on the disk and in objects",
        )
        answer = engine.lookup(prompt, name)
        engine.scheduler.end(answer.load_id)
        assert answer.count == chunks
        return prompt

    @property
    def copied(self) -> tuple[int, int]:
        """Parts, to the disk and to objects."""
        now = self.keeper.statistics().keeper
        assert now.keep is not None
        assert now.flush is not None
        return now.keep.copied_parts, now.flush.copied_parts

    def where(self, chunks: Sequence[bytes], space: NamespaceInfo = SPACE) -> set[Where]:
        found: list[Where] = []
        self.keeper._keeper.locate(self.refs(chunks, space), deadline=1e18, done=found.extend)
        eventually(lambda: len(found) == len(chunks), "located")
        return set(found)

    def in_valkey(self, chunks: Sequence[bytes]) -> int:
        names = b" ".join(self.server.key_names())
        return sum(chunk.hex().encode() in names for chunk in chunks)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The first use of objects leaves a process with what all later ones share."""
    ObjectTier.open(ObjectSettings(f"file://{tmp_path_factory.mktemp('first')}")).close()
    with running_server("--maxmemory", "200mb", "--maxmemory-policy", "volatile-ttl") as started:
        yield started


@pytest.fixture
def fleet(server: Server, tmp_path: Path) -> Iterator[Fleet]:
    with ExitStack() as stack:
        yield Fleet(tmp_path, server, stack)
    server.ask("FLUSHALL")


@pytest.fixture
def run(fleet: Fleet, capsys: pytest.CaptureFixture[str]) -> Callable[..., dict[str, Any]]:
    """A command with --json at the fleet's node; what it prints."""

    def asked(*argv: str, code: int = 0) -> dict[str, Any]:
        assert main([*argv, "--json", "--socket", str(fleet.socket)]) == code, capsys.readouterr().err
        said: dict[str, Any] = json.loads(capsys.readouterr().out)
        return said

    return asked


Run = Callable[..., dict[str, Any]]


def test_a_prompt_is_dropped_from_one_tier_and_found_in_the_next(fleet: Fleet, run: Run) -> None:
    """By the request that asked for it; what others asked for stays."""
    chunks, others = fleet.keep("cmpl-one"), fleet.keep("cmpl-others")
    for tier in ("memory", "valkey"):
        assert run("drop", tier, "--request", "cmpl-one")["dropped_parts"] == CHUNKS
    assert fleet.in_valkey(chunks) == 0
    assert fleet.where(chunks) == {Where.DISK}
    assert run("drop", "disk", "--request", "cmpl-one")["dropped_parts"] == CHUNKS
    assert fleet.where(chunks) == {Where.OBJECTS}
    engine = fleet.engines[0]
    assert [end.reason for end in engine.load(engine.lookup(chunks, "again"), chunks)] == [Reason.COMPLETE]
    assert run("drop", "objects", "--request", "cmpl-one")["dropped_bytes"] == CHUNKS * PART_BYTES
    assert fleet.where(chunks) <= {Where.ABSENT, Where.DISK}  # promoted when it was loaded
    assert fleet.in_valkey(others) == CHUNKS
    assert fleet.where(others) == {Where.DISK}


def test_what_is_dropped_from_all_tiers_is_found_in_none(fleet: Fleet, run: Run) -> None:
    chunks, others = fleet.keep("cmpl-gone"), fleet.keep("cmpl-kept", other=True)
    said = run("drop", "all", "--namespace", SPACE.namespace.hex())
    assert said["dropped_parts"] >= 4 * CHUNKS
    assert {each["tier"] for each in said["from"]} == {"objects", "disk", "valkey", "memory"}
    assert fleet.in_valkey(chunks) == 0
    assert fleet.where(chunks) == {Where.ABSENT}
    assert fleet.engines[0].lookup(chunks, "gone").count == 0
    assert not fleet.keeper._keeper._drops.among(fleet.refs(chunks)), "what is stored now is kept"
    assert fleet.in_valkey(others) == CHUNKS
    assert fleet.where(others, OTHER) == {Where.DISK}
    answer = fleet.engines[1].lookup(others, "kept")
    fleet.engines[1].scheduler.end(answer.load_id)
    assert answer.count == CHUNKS


def test_a_prompt_dropped_everywhere_is_counted_once(fleet: Fleet, run: Run) -> None:
    """It goes through the tiers twice, and what went in the first round is not there in the second."""
    fleet.keep("cmpl-once")
    said = run("drop", "all", "--request", "cmpl-once")
    assert {each["tier"]: each["dropped_parts"] for each in said["from"]} == dict.fromkeys(
        ("objects", "disk", "valkey", "memory"), CHUNKS
    )
    assert run("drop", "valkey", "--request", "cmpl-once")["dropped_parts"] == 0


def test_all_without_a_node_is_not_all(fleet: Fleet, capsys: pytest.CaptureFixture[str]) -> None:
    chunks = fleet.keep("cmpl-left")
    nobody = str(fleet.socket.with_name("nobody.sock"))
    asked = ["drop", "all", "--keepers", str(fleet.keeper.address), "--socket", nobody]
    assert main([*asked, "--json"]) == 1
    out, err = capsys.readouterr()
    said = {each["tier"]: each for each in json.loads(out)["from"]}
    assert set(said) == {"objects", "disk", "valkey", "memory"}
    assert [tier for tier, each in said.items() if each["error"]] == ["memory"]
    assert "kvferry: memory of this node: untouched, for " in err
    assert "run kvferry drop memory on its host" in err
    assert fleet.in_valkey(chunks) == 0
    assert fleet.where(chunks) == {Where.ABSENT}


def test_all_without_keepers_is_not_all(fleet: Fleet, capsys: pytest.CaptureFixture[str]) -> None:
    """What can be reached is dropped, and what cannot is told, for people and programs."""
    chunks = fleet.keep("cmpl-kept")
    asked = ["drop", "all", "--keepers", "127.0.0.1:1", "--socket", str(fleet.socket)]
    assert main([*asked, "--json"]) == 1
    out, err = capsys.readouterr()
    said = {each["tier"]: each for each in json.loads(out)["from"]}
    assert said["memory"]["dropped_parts"] == CHUNKS
    assert "keeper 127.0.0.1:1: " in said["all"]["error"]
    assert "kvferry: all of the keepers: untouched, for keeper 127.0.0.1:1: " in err
    assert set(said) == {"memory", "all"}
    assert fleet.in_valkey(chunks) == CHUNKS
    assert main([*asked, "--json", "--valkey", str(fleet.server.settings().url)]) == 1
    said = {each["tier"]: each for each in json.loads(capsys.readouterr().out)["from"]}
    assert said["valkey"]["dropped_parts"] == CHUNKS
    assert fleet.in_valkey(chunks) == 0


def test_a_drop_that_dies_between_two_tiers_blocks_nothing(fleet: Fleet) -> None:
    """Only as long as its connection lasts nothing of the namespace is kept."""
    refs = fleet.refs(fleet.keep("cmpl-died"))
    drops = fleet.keeper._keeper._drops
    with KeeperAdmin(fleet.keeper.address, access=KeeperAccess()) as admin:
        assert admin.drop(DropTier.OBJECTS, namespace=SPACE.namespace).parts >= CHUNKS
        assert drops.among(refs) == frozenset(refs)
    eventually(lambda: not drops.among(refs), "kept again")


def test_what_is_young_survives_a_drop_by_age(fleet: Fleet, run: Run) -> None:
    chunks = fleet.keep("cmpl-young")
    for tier in ("memory", "valkey", "disk", "objects", "all"):
        assert run("drop", tier, "--older-than", "1h")["dropped_parts"] == 0
    assert fleet.in_valkey(chunks) == CHUNKS
    assert fleet.where(chunks) == {Where.DISK}


def test_a_valkey_without_keepers_is_emptied_by_the_command_itself(
    fleet: Fleet, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    chunks, others = fleet.keep("cmpl-alone"), fleet.keep("cmpl-others", other=True)
    space = SPACE.namespace.hex()
    assert (
        run("drop", "valkey", "--namespace", space, "--valkey", fleet.server.url)["dropped_parts"] >= CHUNKS
    )
    assert (fleet.in_valkey(chunks), fleet.in_valkey(others)) == (0, CHUNKS)
    monkeypatch.setenv("KVFERRY_VALKEY", fleet.server.url)
    nobody = str(fleet.socket.with_name("nobody.sock"))
    assert main(["drop", "valkey", "--socket", nobody]) == 0
    assert fleet.in_valkey(others) == 0


def test_a_request_is_warmed_into_memory_from_wherever_it_is(fleet: Fleet, run: Run) -> None:
    chunks = fleet.keep("cmpl-warm")
    for tier in ("memory", "valkey", "disk"):
        run("drop", tier, "--request", "cmpl-warm")
    said = run("warm", "--request", "cmpl-warm", "--into", "memory")
    assert [(step["tier"], step["parts"], step["failed"]) for step in said["into"]] == [
        ("valkey", CHUNKS, {}),
        ("memory", CHUNKS, {}),
    ]
    assert (said["parts"], said["bytes"]) == (CHUNKS, CHUNKS * PART_BYTES)
    assert fleet.in_valkey(chunks) == CHUNKS
    run("drop", "valkey", "--request", "cmpl-warm")
    engine = fleet.engines[0]
    answer = engine.lookup(chunks, "warmed")
    assert list(answer.tiers) == [0] * CHUNKS
    assert [end.reason for end in engine.load(answer, chunks)] == [Reason.COMPLETE]
    again = run("warm", "--request", "cmpl-warm", "--into", "memory")
    assert again["into"][1]["there_parts"] == CHUNKS


def test_what_valkey_alone_has_is_warmed_into_memory(fleet: Fleet, run: Run) -> None:
    fleet.keep("cmpl-above")
    for tier in ("memory", "disk", "objects"):
        run("drop", tier, "--request", "cmpl-above")
    said = run("warm", "--request", "cmpl-above", "--into", "memory")
    assert (said["into"][1]["parts"], said["into"][1]["failed"]) == (CHUNKS, {})


def test_what_nobody_has_any_more_is_told_as_failed(fleet: Fleet, run: Run) -> None:
    fleet.keep("cmpl-lost")
    run("drop", "all", "--request", "cmpl-lost")
    said = run("warm", "--request", "cmpl-lost", code=1)
    assert said["into"][0]["failed"] == {"absent": CHUNKS}
    said = run("warm", "--request", "cmpl-lost", "--into", "memory", code=1)
    assert said["into"][-1]["failed"] == {"absent": CHUNKS}


def test_what_was_reused_most_is_warmed_first_within_its_bytes(fleet: Fleet, run: Run) -> None:
    hot, cold = fleet.keep("cmpl-hot"), fleet.keep("cmpl-cold")
    for _ in range(5):
        fleet.keeper._keeper.used(fleet.refs(hot))
    run("drop", "memory")
    run("drop", "valkey", "--request", "cmpl-hot")
    run("drop", "valkey", "--request", "cmpl-cold")
    assert fleet.in_valkey([*hot, *cold]) == 0
    said = run("warm", "--most-reused", "24h", "--max", str(CHUNKS * PART_BYTES))
    assert (said["parts"], said["into"][0]["parts"]) == (CHUNKS, CHUNKS)
    assert (fleet.in_valkey(hot), fleet.in_valkey(cold)) == (CHUNKS, 0)
    said = run("warm", "--most-reused", "24h", "--max", "1GiB", "--into", "memory")
    assert said["into"][1]["parts"] >= CHUNKS
    answer = fleet.engines[0].lookup(hot, "hot")
    fleet.engines[0].scheduler.end(answer.load_id)
    assert list(answer.tiers) == [0] * CHUNKS


def test_tables_are_for_people(fleet: Fleet, capsys: pytest.CaptureFixture[str]) -> None:
    fleet.keep("cmpl-shown")
    socket = ["--socket", str(fleet.socket)]
    assert main(["warm", "--request", "cmpl-shown", "--into", "memory", *socket]) == 0
    text = capsys.readouterr().out
    assert text.splitlines()[0] == f"{CHUNKS} parts, 384 KiB"
    assert text.splitlines()[1].split() == ["into", "parts", "bytes", "there", "time", "failed"]
    assert main(["drop", "all", "--request", "cmpl-shown", *socket]) == 0
    text = capsys.readouterr().out
    assert text.startswith("dropped ")
    assert "from objects (" in text


def test_a_keeper_that_is_not_there_is_one_line(fleet: Fleet, capsys: pytest.CaptureFixture[str]) -> None:
    socket = ["--socket", str(fleet.socket)]
    for argv in (["drop", "disk"], ["warm", "--most-reused", "1h", "--max", "1GiB"]):
        assert main([*argv, "--keepers", "127.0.0.1:1", *socket]) == 1
        err = capsys.readouterr().err
        assert err.startswith("kvferry: keeper 127.0.0.1:1: ")
        assert "is it running there?" in err
        assert err.count("\n") == 1
