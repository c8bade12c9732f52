"""Nodes with a disk behind them and no Valkey: warm again after any end."""

import json
import signal
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest
from tests.node.fleet import Engine, NodeProcess, at_rest, digests, eventually, save_in_turns, settings

from kvferry.cli.main import main
from kvferry.client.messages import LoadEnd, Reason
from kvferry.client.messages import Tier as Place
from kvferry.node.node import Node

DISK_BYTES = 128 << 20


def _node(path: Path, stack: ExitStack) -> tuple[Node, Engine]:
    node = Node(replace(settings(path), disk=path / "kv", disk_bytes=DISK_BYTES))
    stack.callback(node.close)
    node.start()
    engine = Engine(node.settings.socket_path)
    stack.callback(engine.close)
    return node, engine.connected()


def test_a_node_killed_and_started_again_serves_what_the_disk_holds(
    tmp_path: Path, stack: ExitStack, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every byte right, more than the pool holds, and counted as found on disk."""
    chunks = digests(80)
    socket = ["--socket", str(tmp_path / "node.sock")]

    def start() -> tuple[NodeProcess, Engine]:
        extra = ["--disk", str(tmp_path / "kv"), "--disk-size", str(DISK_BYTES)]
        process = NodeProcess(tmp_path / "node.sock", extra=extra)
        stack.callback(process.close)
        engine = Engine(process.socket_path)
        stack.callback(engine.close)
        return process, engine.connected()

    def status() -> dict[str, object]:
        capsys.readouterr()
        assert main(["status", "--json", *socket]) == 0
        found: dict[str, object] = json.loads(capsys.readouterr().out)
        return found

    def stored() -> int:
        tier = status()["tier"]
        assert isinstance(tier, dict)
        parts = tier["stored_parts"]
        assert isinstance(parts, int)
        return parts

    process, engine = start()
    for begin in range(0, 80, 10):
        assert engine.save(chunks[begin : begin + 10], prefix=chunks[:begin]) == 10
        eventually(lambda end=begin + 10: stored() == end, "written")  # type: ignore[misc]
    process.signal(signal.SIGKILL)
    process.process.wait()
    engine.close()
    _, engine = start()
    answer = engine.lookup(chunks)
    assert (answer.count, answer.tiers) == (80, (Place.DISK,) * 80)
    assert engine.load(answer, chunks) == [LoadEnd(Reason.COMPLETE, 80)]
    found = status()
    assert isinstance(found["tier"], dict)
    assert (found["tier"]["name"], found["tier"]["state"]) == ("disk", "up")
    assert isinstance(found["counters"], dict)
    assert found["counters"]["hit_chunks"] == {"disk": 80}
    assert main(["status", *socket]) == 0
    assert "disk" in capsys.readouterr().out


def test_what_left_the_pool_is_loaded_from_disk(tmp_path: Path, stack: ExitStack) -> None:
    node, engine = _node(tmp_path, stack)
    old, new = digests(20, "old"), digests(60, "new")
    assert engine.save(old) == 20
    eventually(lambda: node.statistics().counters.stored_parts == 20, "written")
    save_in_turns(node, engine, new)
    answer = engine.lookup(old)
    assert (answer.count, set(answer.tiers) - {Place.MEMORY}) == (20, {Place.DISK})
    assert engine.load(answer, old) == [LoadEnd(Reason.COMPLETE, 20)]
    at_rest(node)
