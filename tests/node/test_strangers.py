"""What a connection costs before it has shown that it belongs here: few bytes, little time, few places."""

import contextlib
import logging
import os
import socket
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest
from tests.node.conftest import make_engine
from tests.node.fleet import NAMESPACE, Engine, NodeProcess, digests, eventually, settings

from kvferry import __version__
from kvferry.client.admin import AdminClient
from kvferry.client.handshake import Handshake, Identity, open_socket
from kvferry.client.worker import WorkerClient
from kvferry.errors import RefusedError, RetryError
from kvferry.frames import LENGTH, FrameBuffer, refusal_text
from kvferry.node import server
from kvferry.node.framing import encode
from kvferry.node.node import Node
from kvferry.node.wire import MAX_FRAME_BYTES, MAX_HELLO_BYTES, PROTOCOL, Hello, Ping, Role, Welcome
from kvferry.secret import MAX_SECRET_BYTES

FLOOD = 300
LIMIT_S = 60.0


def _last_words(sock: socket.socket) -> str:
    """Why the node closed this connection."""
    sock.settimeout(LIMIT_S)
    frames = FrameBuffer()
    text = None
    with contextlib.suppress(ConnectionResetError):
        while data := sock.recv(1 << 16):
            for payload in frames.feed(data):
                text = refusal_text(payload) or text
    return text or ""


def _refused(node: Node, cause: str) -> int:
    return node.statistics().counters.refused_connections[cause]


def test_the_first_frame_is_refused_by_its_length_alone(node: Node) -> None:
    with open_socket(node.settings.socket_path, LIMIT_S) as sock:
        sock.sendall(LENGTH.pack(MAX_HELLO_BYTES + 1))
        assert f"exceeds the limit of {MAX_HELLO_BYTES}" in _last_words(sock)


def test_the_longest_token_that_a_file_may_hold_fits_into_a_hello(tmp_path: Path, stack: ExitStack) -> None:
    token = "\N{SNOWMAN}" * (MAX_SECRET_BYTES // 3)
    node = Node(settings(tmp_path), token=token)
    stack.callback(node.close)
    node.start()
    identity = Identity(
        role=Role.WORKER, engine="\N{SNOWMAN}" * 512, rank=1 << 62, token=token, namespace=NAMESPACE
    )
    with open_socket(node.settings.socket_path, LIMIT_S) as sock:
        handshake = Handshake(sock, identity, timeout_s=LIMIT_S)
        handshake.run()
        handshake.close_descriptor()


def test_silent_connections_make_room_for_an_engine(
    node: Node, stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "HELLO_TIMEOUT_S", 600.0)  # so that only their number bounds them
    with ExitStack() as silent:
        for _ in range(FLOOD):
            silent.enter_context(open_socket(node.settings.socket_path, LIMIT_S))
        engine = make_engine(node.settings.socket_path, stack)
        chunks = digests(2)
        assert engine.save(chunks) == 2
        assert engine.lookup(chunks).count == 2
        held = _refused(node, "crowded-out")
        assert FLOOD - server.MAX_STRANGERS <= held <= FLOOD
    assert node.statistics().defects == 0


def test_bytes_that_trickle_in_do_not_buy_time(
    tmp_path: Path, stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "HELLO_TIMEOUT_S", 0.3)
    node = Node(settings(tmp_path))
    stack.callback(node.close)
    node.start()
    with open_socket(node.settings.socket_path, LIMIT_S) as sock, contextlib.suppress(OSError):
        sock.sendall(LENGTH.pack(MAX_HELLO_BYTES))
        for _ in range(MAX_HELLO_BYTES - 1):
            sock.send(b"x")
            time.sleep(0.01)
        pytest.fail("never cut off")
    eventually(lambda: _refused(node, "no-hello") == 1, "cut off")


def test_an_answer_that_trickles_in_does_not_buy_time(tmp_path: Path) -> None:
    welcome = encode(Welcome(protocol=PROTOCOL, version=__version__, epoch=1, pid=1, pool_bytes=1))
    done = threading.Event()

    def trickle() -> None:
        client, _ = listener.accept()
        with client, contextlib.suppress(OSError):
            for byte in welcome[:-1]:
                client.send(bytes([byte]))
                if done.wait(0.05):
                    return
            done.wait(LIMIT_S)

    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "s"))
        listener.listen()
        thread = threading.Thread(target=trickle)
        thread.start()
        try:
            with pytest.raises(RetryError):
                AdminClient(tmp_path / "s", timeout_s=0.2)
        finally:
            done.set()
            thread.join()


def test_floods_of_bad_hellos_cost_nothing_that_stays(tmp_path: Path, stack: ExitStack) -> None:
    node = Node(settings(tmp_path), token="right")
    stack.callback(node.close)
    node.start()
    hello = encode(Hello(protocol=PROTOCOL, version=__version__, role=Role.WORKER, token="wrong"))
    bad: tuple[tuple[str, bytes], ...] = (
        ("token", hello),
        ("refused", LENGTH.pack(3) + b"\xc1\xc1\xc1"),
        ("refused", LENGTH.pack(0xFFFFFFFF)),
        ("refused", encode(Ping())),
        ("version", encode(Hello(protocol=PROTOCOL + 1, version="9", role=Role.WORKER))),
    )
    for _ in range(FLOOD // len(bad)):
        for _, frame in bad:
            with open_socket(tmp_path / "node.sock", LIMIT_S) as sock:
                sock.sendall(frame)
                _last_words(sock)
    eventually(lambda: sum(node.statistics().counters.refused_connections.values()) == FLOOD, "all refused")
    assert set(node.statistics().counters.refused_connections) == {cause for cause, _ in bad}
    with AdminClient(tmp_path / "node.sock", token="right") as admin:
        assert admin.status()["defects"] == 0


def _descriptors(process: NodeProcess) -> int:
    return len(os.listdir(f"/proc/{process.process.pid}/fd"))


def _pass(sock: socket.socket, data: bytes, descriptor: int, *, copies: int) -> None:
    socket.send_fds(sock, [data], [descriptor] * copies)


@pytest.mark.parametrize("when", ["before hello", "with hello", "after hello"])
def test_descriptors_that_a_client_passes_are_not_kept(
    node_process: Callable[[], NodeProcess], stack: ExitStack, tmp_path: Path, when: str
) -> None:
    process = node_process()
    eventually((tmp_path / "node.sock").exists, "the socket")
    engine = make_engine(tmp_path / "node.sock", stack)
    before = _descriptors(process)
    mine = os.memfd_create("passed")
    stack.callback(os.close, mine)
    hello = encode(Hello(protocol=PROTOCOL, version=__version__, role=Role.ADMIN))
    with open_socket(tmp_path / "node.sock", LIMIT_S) as sock:
        if when == "before hello":
            _pass(sock, hello[:1], mine, copies=200)
            sock.sendall(hello[1:])
        elif when == "with hello":
            _pass(sock, hello, mine, copies=200)
        else:
            sock.sendall(hello)
        for _ in range(20):
            _pass(sock, encode(Ping()), mine, copies=200)
        sock.settimeout(LIMIT_S)
        sock.recv(1 << 16)
        assert engine.lookup(digests(1)).count == 0  # the node has read what was sent before
        eventually(lambda: _descriptors(process) == before + 1, "only the connection itself")


def test_a_node_without_the_right_token_is_one_line_in_the_engines_log(
    tmp_path: Path, stack: ExitStack, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvferry.client.connection.REFUSED_BACKOFF_S", 0.02)
    node = Node(settings(tmp_path), token="mark-of-a-token")
    stack.callback(node.close)
    node.start()
    for token, words in (("", "shows none"), ("mark-of-another", "does not match")):
        caplog.clear()
        before = _refused(node, "token")
        with caplog.at_level(logging.DEBUG):
            worker = WorkerClient(
                socket_path=tmp_path / "node.sock", engine="e", rank=0, namespace=NAMESPACE, token=token
            )
            stack.callback(worker.close)
            eventually(lambda before=before: _refused(node, "token") >= before + 3, "tried again")
            worker.close()
        lines = [record.getMessage() for record in caplog.records]
        assert len(lines) == 1
        assert words in lines[0]
        assert "KVFERRY_TOKEN" in lines[0]
        assert "mark-of" not in f"{lines}{worker.last_error}"


def test_a_token_that_the_node_does_not_ask_for_is_named(node: Node) -> None:
    with pytest.raises(RefusedError, match="started without one"):
        AdminClient(node.settings.socket_path, token="some")


def test_tokens_are_compared_in_constant_time(
    tmp_path: Path, stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    compared: list[tuple[bytes, bytes]] = []

    def compare(one: bytes, two: bytes) -> bool:
        compared.append((one, two))
        return one == two

    monkeypatch.setattr("kvferry.node.server.hmac.compare_digest", compare)
    node = Node(settings(tmp_path), token="right")
    stack.callback(node.close)
    node.start()
    AdminClient(node.settings.socket_path, token="right").close()
    assert compared == [(b"right", b"right")]


def test_what_holds_a_token_does_not_show_it() -> None:
    token = "mark-of-a-token"
    hello = Hello(protocol=PROTOCOL, version="1", role=Role.WORKER, token=token)
    assert token not in f"{hello!r}{hello}{Identity(role=Role.WORKER, token=token)!r}"


def test_what_all_clients_make_the_node_hold_is_bounded(
    node: Node, engine: Engine, stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "MAX_HELD_BYTES", 1 << 20)
    half = LENGTH.pack(MAX_FRAME_BYTES) + bytes(300_000)
    socks = []
    for number in range(8):
        sock = stack.enter_context(open_socket(node.settings.socket_path, LIMIT_S))
        handshake = Handshake(sock, Identity(role=Role.ADMIN, engine=str(number)), timeout_s=LIMIT_S)
        handshake.run()
        socks.append(sock)
        with contextlib.suppress(OSError):
            sock.settimeout(LIMIT_S)
            sock.sendall(half)
    eventually(lambda: _refused(node, "holds-most") >= 5, "cut off")
    assert engine.lookup(digests(1)).count == 0
    held = [connection.held_bytes for connection in list(node._server.connections.values())]
    assert sum(held) <= 1 << 20
