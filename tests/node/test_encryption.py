"""Nodes that encrypt what they store: engines notice nothing, and the server holds nothing readable."""

import logging
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from prometheus_client import CollectorRegistry, generate_latest
from tests.node.fleet import PART_BYTES, Engine, at_rest, content, digests, eventually, settings
from tests.servers import Server, running_server

from kvferry.client.messages import LoadEnd, Reason, Tier
from kvferry.config import load_node_settings
from kvferry.node.node import Node
from kvferry.observe.exposition import StatisticsCollector
from kvferry.observe.metrics import METRICS

KEYS = {"old": "0123456789abcdef" * 4, "new": "fedcba9876543210" * 4}
CHUNKS = digests(6)


def host(tmp_path: Path, server: Server, stack: ExitStack, *keys: str) -> tuple[Node, Engine]:
    """A node that was told of these keys as its user would, with its engine."""
    path = tmp_path / "-".join(("host", *keys))
    path.mkdir(mode=0o700)
    flags = {"valkey": server.url}
    if keys:
        file = path / "keys"
        file.write_text("".join(f"{KEYS[key]}\n" for key in keys))
        file.chmod(0o600)
        flags["encryption_key_file"] = str(file)
    told = load_node_settings(flags, environ={})
    node = Node(replace(settings(path), valkey=told.valkey, encryption_keys=told.encryption_keys))
    stack.callback(node.close)
    node.start()
    engine = Engine(node.settings.socket_path)
    stack.callback(engine.close)
    return node, engine.connected()


def save(node: Node, engine: Engine) -> None:
    assert engine.save(CHUNKS) == len(CHUNKS)
    eventually(lambda: node.statistics().counters.stored_parts == len(CHUNKS), "write-back")


def finds(engine: Engine) -> int:
    """Chunks that a lookup promises and a load brings, byte for byte."""
    answer = engine.lookup(CHUNKS)
    if answer.count:
        assert answer.tiers == (Tier.VALKEY,) * answer.count
        assert engine.load(answer, CHUNKS) == [LoadEnd(Reason.COMPLETE, answer.count)]
    return answer.count


def metrics(node: Node) -> str:
    registry = CollectorRegistry(auto_describe=False)
    registry.register(StatisticsCollector(node.statistics, METRICS))
    return generate_latest(registry).decode()


def test_a_host_with_the_key_loads_what_another_stored_and_the_server_shows_nothing(
    tmp_path: Path, stack: ExitStack, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    server = stack.enter_context(running_server())
    here, engine = host(tmp_path, server, stack, "new")
    save(here, engine)
    there, other = host(tmp_path, server, stack, "new", "old")
    assert finds(other) == len(CHUNKS)
    stored = [server.ask("GET", key) for key in server.key_names()]
    assert sum(len(value) for value in stored if isinstance(value, bytes)) > len(CHUNKS) * PART_BYTES
    for chunk in CHUNKS:
        assert not any(content(chunk, 0)[:32] in value for value in stored if isinstance(value, bytes))
    for node in (here, there):
        at_rest(node)
        statistics = node.statistics()
        status = msgspec.json.encode(statistics).decode()
        told = status + repr(node.settings) + metrics(node)
        assert "AES-256-GCM" in told
        for key in KEYS.values():
            assert key[:16] not in told
            assert key[:16] not in caplog.text


def test_rotation_keeps_what_is_stored_until_the_old_key_is_removed(tmp_path: Path, stack: ExitStack) -> None:
    server = stack.enter_context(running_server())
    save(*host(tmp_path, server, stack, "old"))
    assert finds(host(tmp_path, server, stack, "new", "old")[1]) == len(CHUNKS)
    removed, engine = host(tmp_path, server, stack, "new")
    assert finds(engine) == 0
    save(removed, engine)  # and nothing of the old key stands in the way
    assert not removed.statistics().tier.failed  # type: ignore[union-attr]


def test_hosts_without_the_key_miss_and_store_their_own(tmp_path: Path, stack: ExitStack) -> None:
    server = stack.enter_context(running_server())
    save(*host(tmp_path, server, stack, "new"))
    plain, engine = host(tmp_path, server, stack)
    assert finds(engine) == 0
    save(plain, engine)
    assert finds(host(tmp_path, server, stack, "new", "old")[1]) == len(CHUNKS)
