"""A disk in Valkey's place, as routers hear of it: held by that node alone, and what it has is prefetched."""

import json
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest
from tests.feed.following import Following
from tests.node.fleet import NAMESPACE, Engine, at_rest, digests, save_in_turns, settings

from kvferry.addresses import Address
from kvferry.cli.main import main
from kvferry.feed.wire import Level
from kvferry.node import feed
from kvferry.node.node import Node
from kvferry.testing.expectations import eventually

DISK_BYTES = 128 << 20


def started(path: Path, stack: ExitStack) -> tuple[Node, Following, Engine]:
    path.mkdir(mode=0o700)
    own = replace(
        settings(path), disk=path / "kv", disk_bytes=DISK_BYTES, feed_listen=Address("127.0.0.1", 0)
    )
    node = Node(own)
    stack.callback(node.close)
    node.start()
    engine = Engine(node.settings.socket_path)
    stack.callback(engine.close)
    assert node.feed_address is not None
    following = Following(node.feed_address)
    stack.callback(following.close)
    return node, following.followed(), engine.connected()


def test_it_is_told_of_and_nobody_else_s(tmp_path: Path) -> None:
    with ExitStack() as stack:
        one, follows_one, engine = started(tmp_path / "one", stack)
        _, follows_other, _ = started(tmp_path / "other", stack)
        chunks = digests(5)
        engine.save(chunks)
        eventually(lambda: follows_one.view.at(Level.DISK) == set(chunks), "on disk")
        assert not follows_one.view.at(Level.VALKEY)
        assert not follows_other.view.at(Level.DISK)
        behind = follows_one.state.behind, follows_other.state.behind
        assert len({*behind, ""}) == 3
        one.close()
        again = Node(one.settings)
        stack.callback(again.close)
        again.start()
        assert again.feed_address is not None
        following = Following(again.feed_address)
        stack.callback(following.close)
        assert following.followed().state.behind == behind[0]


def test_what_it_has_is_brought_for_a_request_on_its_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(feed, "SPARED_S", -3600.0)
    with ExitStack() as stack:
        node, following, engine = started(tmp_path / "node", stack)
        old, new = digests(5, "old"), digests(60, "new")
        engine.save(old)
        at_rest(node)
        save_in_turns(node, engine, new)
        assert main(["drop", "memory", "--socket", str(node.settings.socket_path)]) == 0
        eventually(lambda: not following.view.at(Level.MEMORY) & set(old), "gone from memory")
        following.prefetch(NAMESPACE.namespace, old)
        eventually(lambda: following.view.at(Level.MEMORY) >= set(old), "brought")
        at_rest(node)


def test_it_can_be_dropped_whole_though_it_is_told_of(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with ExitStack() as stack:
        node, following, engine = started(tmp_path / "node", stack)
        engine.save(digests(5))
        eventually(lambda: len(following.view.at(Level.DISK)) == 5, "on disk")
        assert main(["drop", "disk", "--socket", str(node.settings.socket_path), "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["dropped_parts"] == 5
