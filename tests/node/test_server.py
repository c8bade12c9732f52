"""Who may connect, and what a broken or hostile client costs."""

import os
import random
import socket
import stat
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from tests.node.fleet import NAMESPACE, Engine, NodeProcess, at_rest, digests, eventually, settings

from kvferry.client.admin import AdminClient
from kvferry.client.handshake import Handshake, Identity, open_socket
from kvferry.errors import MisconfiguredError, RefusedError
from kvferry.frames import LENGTH, FrameBuffer, refusal_text
from kvferry.node import server
from kvferry.node.framing import encode
from kvferry.node.node import Node
from kvferry.node.peers import Peer
from kvferry.node.wire import MAX_FRAME_BYTES, PROTOCOL, EndLoad, Lookup, Ping, Prefill, Role


def _refusal(sock: socket.socket) -> str:
    """The node's last words before it closes."""
    sock.settimeout(5.0)
    frames = FrameBuffer()
    text = None
    while data := sock.recv(1 << 16):
        for payload in frames.feed(data):
            text = refusal_text(payload) or text
    assert text is not None, "closed without a word"
    return text


def _raw(node: Node) -> socket.socket:
    return open_socket(node.settings.socket_path, 5.0)


def _greeted(node: Node) -> socket.socket:
    sock = _raw(node)
    handshake = Handshake(sock, Identity(role=Role.WORKER, engine="raw", namespace=NAMESPACE), timeout_s=5.0)
    handshake.run()
    handshake.close_descriptor()
    return sock


def test_directory_and_socket_are_private(node: Node) -> None:
    path = node.settings.socket_path
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_missing_directory_is_made_private(tmp_path: Path, stack: ExitStack) -> None:
    node = Node(settings(tmp_path / "deeper" / "run"))
    stack.callback(node.close)
    assert stat.S_IMODE(node.settings.socket_path.parent.stat().st_mode) == 0o700


def test_a_directory_that_others_can_write_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    with pytest.raises(MisconfiguredError, match="chmod 700"):
        Node(settings(tmp_path))


def test_a_live_nodes_socket_is_refused_in_one_line(node: Node, tmp_path: Path) -> None:
    with pytest.raises(MisconfiguredError, match="a node already runs at"):
        Node(settings(tmp_path))


def test_a_dead_nodes_socket_is_replaced(tmp_path: Path, stack: ExitStack) -> None:
    process = NodeProcess(tmp_path / "node.sock")
    stack.callback(process.close)
    eventually((tmp_path / "node.sock").exists, "the socket")
    process.process.kill()
    process.process.wait()
    assert (tmp_path / "node.sock").exists()
    node = Node(settings(tmp_path))
    stack.callback(node.close)
    node.start()
    with AdminClient(tmp_path / "node.sock") as admin:
        assert admin.status()["pid"] == os.getpid()


def test_a_socket_path_too_long_is_refused(tmp_path: Path) -> None:
    deep = tmp_path / ("x" * 120)
    with pytest.raises(MisconfiguredError, match="shorter"):
        Node(settings(deep))


def test_closing_leaves_no_socket_behind(tmp_path: Path) -> None:
    node = Node(settings(tmp_path))
    node.close()
    assert not node.settings.socket_path.exists()


def test_another_protocol_version_is_told_so_on_both_sides(node: Node) -> None:
    class OtherHello(msgspec.Struct, tag="Hello"):
        protocol: int = PROTOCOL + 1
        version: str = "9.9"
        something_new: int = 1

    payload = msgspec.msgpack.encode(OtherHello())
    with _raw(node) as sock:
        sock.sendall(LENGTH.pack(len(payload)) + payload)
        text = _refusal(sock)
    assert "9.9" in text
    assert "install the same version" in text
    eventually(lambda: node.statistics().counters.refused_connections["version"] == 1, "counted")


def test_a_wrong_token_is_refused(tmp_path: Path, stack: ExitStack) -> None:
    node = Node(settings(tmp_path), token="right")
    stack.callback(node.close)
    node.start()
    with pytest.raises(RefusedError, match="token"):
        AdminClient(node.settings.socket_path, token="wrong")
    with AdminClient(node.settings.socket_path, token="right") as admin:
        assert admin.status()["counters"]["refused_connections"] == {"token": 1}


def test_another_users_process_is_refused(tmp_path: Path, stack: ExitStack) -> None:
    node = Node(settings(tmp_path), peer_of=lambda sock: Peer(os.getuid() + 1, frozenset()))
    stack.callback(node.close)
    node.start()
    with pytest.raises(RefusedError, match="serves user"):
        AdminClient(node.settings.socket_path)


def test_the_first_message_must_be_hello(node: Node) -> None:
    with _raw(node) as sock:
        sock.sendall(encode(Ping()))
        assert "first message" in _refusal(sock)


def test_silence_instead_of_hello_ends_the_connection(
    tmp_path: Path, stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "HELLO_TIMEOUT_S", 0.05)
    node = Node(settings(tmp_path))
    stack.callback(node.close)
    node.start()
    with _raw(node) as sock:
        assert "no hello" in _refusal(sock)


def test_a_frame_over_the_limit_is_refused_before_it_is_read(node: Node) -> None:
    with _greeted(node) as sock:
        sock.sendall(LENGTH.pack(MAX_FRAME_BYTES + 1))
        assert "exceeds the limit" in _refusal(sock)


def test_an_unknown_field_is_refused(node: Node) -> None:
    payload = msgspec.msgpack.encode({"type": "EndLoad", "load_id": 1, "extra": 2})
    with _greeted(node) as sock:
        sock.sendall(LENGTH.pack(len(payload)) + payload)
        assert "malformed" in _refusal(sock)


def test_a_namespace_that_was_not_attached_is_refused(node: Node) -> None:
    lookup = Lookup(
        ticket=1,
        request_id="r",
        namespace=b"?" * 16,
        chunks=digests(1)[0],
        first_chunk=0,
        prompt_tokens=128,
        prefill=Prefill(0.0, 0.0, 0.0),
    )
    with _greeted(node) as sock:
        sock.sendall(encode(lookup))
        assert "not attached" in _refusal(sock)


def test_other_part_sizes_under_the_same_namespace_are_refused(node: Node, engine: Engine) -> None:
    identity = Identity(role=Role.WORKER, namespace=replace(NAMESPACE, part_bytes=(4096,)))
    with _raw(node) as sock:
        handshake = Handshake(sock, identity, timeout_s=5.0)
        with pytest.raises(RefusedError, match="other sizes"):
            handshake.run()
        handshake.close_descriptor()


@pytest.mark.parametrize("seed", range(20))
def test_garbage_costs_its_own_connection_and_nothing_else(node: Node, seed: int) -> None:
    rng = random.Random(seed)
    with _greeted(node) as sock:
        payload = rng.randbytes(rng.randrange(1, 400))
        if seed % 2:
            frame = bytearray(encode(EndLoad(load_id=rng.randrange(1 << 60))))
            for _ in range(3):
                frame[rng.randrange(4, len(frame))] = rng.randrange(256)
            sock.sendall(frame)
            sock.shutdown(socket.SHUT_WR)
            while sock.recv(1 << 16):
                pass
        else:
            sock.sendall(LENGTH.pack(len(payload)) + payload)
            assert "malformed" in _refusal(sock)
    with AdminClient(node.settings.socket_path) as admin:
        assert admin.status()["defects"] == 0


def test_a_client_that_never_reads_is_cut_off(
    node: Node, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "MAX_UNSENT_BYTES", 1 << 16)
    with _greeted(node) as sock:
        sock.settimeout(5.0)
        try:
            for _ in range(200):
                sock.sendall(encode(Ping()) * 1000)
        except OSError:
            pass  # cut off while we were still talking
        eventually(lambda: node.statistics().counters.refused_connections["slow-reader"] == 1, "cut off")
    assert engine.lookup(digests(1)).count == 0
    at_rest(node)


def test_connections_are_bounded(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "MAX_CONNECTIONS", 2)
    with _greeted(node), _greeted(node), _raw(node) as third:
        assert "connections already" in _refusal(third)
