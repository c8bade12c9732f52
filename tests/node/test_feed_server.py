"""Who may follow a node's feed, what comes back to whom, and what broken or hostile peers cost."""

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.feed.following import Following
from tests.feed.test_pure import SPACE, chunks, gone, held
from tests.feed.view import View
from tests.tiers.authority import Authority

from kvferry import __version__, listening
from kvferry.addresses import Address
from kvferry.errors import MisconfiguredError
from kvferry.feed import log
from kvferry.feed.access import FeedAccess
from kvferry.feed.framing import decode_to_router, encode
from kvferry.feed.settings import FeedSettings
from kvferry.feed.wire import (
    MAX_FRAME_BYTES,
    MAX_HELLO_BYTES,
    PROTOCOL,
    Events,
    Hello,
    Known,
    KnownEnd,
    Level,
    Message,
    Ping,
    Pong,
    Prefetch,
    Refusal,
    ToRouter,
    Welcome,
)
from kvferry.frames import LENGTH, FrameBuffer
from kvferry.node import feedserver
from kvferry.node.feedserver import FeedServer
from kvferry.secret import Secret
from kvferry.testing.expectations import WAIT_S, eventually
from kvferry.testing.proxy import Proxy
from kvferry.values import TlsFiles

LOOPBACK = FeedSettings(listen=Address("127.0.0.1", 0))
HELLO = Hello(protocol=PROTOCOL, version=__version__)
Serve = Callable[..., FeedServer]


class Raw:
    """A blocking socket to a feed."""

    def __init__(self, server: FeedServer, hello: Message | None = HELLO) -> None:
        self.sock = socket.create_connection(server.address, timeout=WAIT_S)
        self._frames = FrameBuffer(limit=MAX_FRAME_BYTES)
        self._payloads: list[bytes] = []
        if hello is not None:
            self.sock.sendall(encode(hello))

    def receive(self) -> ToRouter | None:
        """The next message that is no Ping; None at the end."""
        while True:
            while not self._payloads:
                try:
                    data = self.sock.recv(1 << 16)
                except ConnectionError:
                    return None
                if not data:
                    return None
                self._payloads = self._frames.feed(data)
            message = decode_to_router(self._payloads.pop(0))
            if not isinstance(message, Ping):
                return message

    def snapshot(self) -> tuple[Welcome, View]:
        """Greeted, with what is known."""
        welcome, view = self.receive(), View()
        assert isinstance(welcome, Welcome)
        while welcome.snapshot and not isinstance(message := self.receive(), KnownEnd):
            assert isinstance(message, Known)
            for event in message.events:
                view.apply("", event)
        return welcome, view

    def refusal(self) -> str:
        message = self.receive()
        assert isinstance(message, Refusal), message
        assert self.receive() is None
        return message.message


@contextmanager
def raw(server: FeedServer, hello: Message | None = HELLO) -> Iterator[Raw]:
    peer = Raw(server, hello)
    try:
        yield peer
    finally:
        peer.sock.close()


@pytest.fixture
def serve(stack: ExitStack, monkeypatch: pytest.MonkeyPatch) -> Serve:
    """Starts one that publishes a space."""
    monkeypatch.setattr(listening, "HELLO_TIMEOUT_S", WAIT_S)

    def started(settings: FeedSettings = LOOPBACK, *, epoch: int = 7, prefetched: Any = None) -> FeedServer:
        server = FeedServer(settings, node="here", epoch=epoch, behind="valkey")
        stack.callback(server.close)
        server.start(prefetch=prefetched or (lambda message: None), joined=lambda: None)
        server.publish([SPACE])
        return server

    return started


@pytest.fixture
def server(serve: Serve) -> FeedServer:
    return serve()


def _told(server: FeedServer) -> int:
    return _statistics(server).events


def _statistics(server: FeedServer) -> feedserver.FeedStatistics:
    return server.statistics(dropped_events=0, prefetches=0, prefetches_declined=0)


def _refused(server: FeedServer, cause: str) -> int:
    return _statistics(server).refused.get(cause, 0)


def _well(server: FeedServer) -> None:
    """Others are served as ever."""
    with raw(server) as peer:
        assert peer.snapshot()[1].spaces == {1: SPACE}


# ---- what comes


def test_a_new_router_gets_all_that_is_known_and_then_what_happens(server: FeedServer) -> None:
    server.publish([held(chunks(3))])
    eventually(lambda: _told(server) == 2, "told")
    with raw(server) as peer:
        welcome, view = peer.snapshot()
        assert (welcome.node, welcome.epoch, welcome.next, welcome.behind) == ("here", 7, 3, "valkey")
        assert view.at(Level.MEMORY) == set(chunks(3))
        server.publish([gone(chunks(1)), held(chunks(1))])
        assert peer.receive() == Events(3, (gone(chunks(1)), held(chunks(1))))


def test_who_was_away_for_a_moment_gets_what_it_lacks(server: FeedServer) -> None:
    server.publish([held(chunks(1, str(n))) for n in range(5)])
    eventually(lambda: _told(server) == 6, "told")
    with raw(server, replace_hello(epoch=7, next=4)) as peer:
        welcome, _ = peer.snapshot()
        assert (welcome.snapshot, welcome.next) == (False, 4)
        message = peer.receive()
        assert isinstance(message, Events)
        assert (message.first, len(message.events)) == (4, 3)
    with raw(server, replace_hello(epoch=7, next=7)) as peer:
        assert not peer.snapshot()[0].snapshot


@pytest.mark.parametrize(("epoch", "following"), [(8, 2), (7, 100), (0, 0)])
def test_who_followed_another_stream_gets_all(server: FeedServer, epoch: int, following: int) -> None:
    eventually(lambda: _told(server) == 1, "told")
    with raw(server, replace_hello(epoch=epoch, next=following)) as peer:
        welcome, view = peer.snapshot()
        assert (welcome.snapshot, welcome.next, view.spaces) == (True, 2, {1: SPACE})


def test_who_was_away_for_too_long_gets_all(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log, "MAX_BYTES", 2000)
    monkeypatch.setattr(feedserver, "Log", lambda: log.Log(max_bytes=2000))
    server = serve()
    server.publish([held(chunks(1, str(n))) for n in range(50)])
    server.publish([held(chunks(1, "last"))])
    eventually(lambda: _told(server) == 52, "told")
    with raw(server, replace_hello(epoch=7, next=2)) as peer:
        assert len(peer.snapshot()[1].at(Level.MEMORY)) == 51


def test_what_routers_expect_is_heard_and_pings_are_answered(serve: Serve) -> None:
    asked: list[Prefetch] = []
    server = serve(prefetched=asked.append)
    expected = Prefetch(namespace=bytes(16), chunks=b"".join(chunks(2)))
    with raw(server) as peer:
        peer.snapshot()
        peer.sock.sendall(encode(expected) + encode(Ping()))
        assert peer.receive() == Pong()
    assert asked == [expected]


# ---- who is let in


def test_a_token_is_wanted_where_there_is_one(serve: Serve, stack: ExitStack) -> None:
    server = serve(replace(LOOPBACK, token=Secret("right")))
    for hello, words in (
        (HELLO, "this feed wants a token, none was shown"),
        (Hello(protocol=PROTOCOL, version="1", token="wrong"), "does not match"),
    ):
        with raw(server, hello) as peer:
            message = peer.refusal()
            assert words in message
            assert "right" not in message
    following = Following(server.address, FeedAccess(token="right"))
    stack.callback(following.close)
    following.followed()
    turned_away = Following(server.address, FeedAccess(token="wrong"))
    stack.callback(turned_away.close)
    eventually(lambda: turned_away.state.state == "refused", "refused")
    assert "--feed-token-file" in turned_away.state.error


def test_a_token_where_none_is_set_is_refused(server: FeedServer) -> None:
    with raw(server, Hello(protocol=PROTOCOL, version="1", token="some")) as peer:
        assert "this feed has none" in peer.refusal()


def test_another_protocol_is_refused_in_words(server: FeedServer) -> None:
    with raw(server, Hello(protocol=PROTOCOL + 1, version="9.9")) as peer:
        assert "install the same version on both sides" in peer.refusal()
    _well(server)


def test_with_tls_both_sides_show_who_they_are(
    serve: Serve, stack: ExitStack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kvferry.router.feed import follower

    for wait in ("REFUSED_WAIT_S", "LONGEST_WAIT_S"):
        monkeypatch.setattr(follower, wait, 0.1)
    ours, other = Authority(tmp_path, "ours"), Authority(tmp_path, "other")
    node, router, stranger = ours.issue("node"), ours.issue("router"), other.issue("stranger")
    server = serve(replace(LOOPBACK, tls=TlsFiles(str(ours.ca), str(node.cert), str(node.key))))

    def follow(*files: Any) -> Following:
        names = [None if name is None else str(name) for name in files]
        following = Following(server.address, FeedAccess(tls=TlsFiles(*names)))
        stack.callback(following.close)
        return following

    server.publish([held(chunks(3000))])
    following = follow(ours.ca, router.cert, router.key).followed()
    eventually(lambda: len(following.view.at(Level.MEMORY)) == 3000, "all of it")
    for files, words in (
        ((ours.ca, None, None), "wants a certificate"),
        ((ours.ca, stranger.cert, stranger.key), "certificate"),
        ((other.ca, router.cert, router.key), "not of an authority that feed_tls_ca holds"),
    ):
        refused = follow(*files)
        # Of what the node says last, a reset may be in time for more than its reason: not each time.
        eventually(lambda refused=refused, words=words: words in refused.state.error, "why")  # type: ignore[misc]
        assert refused.view.resets == 0
    plain = Following(server.address)
    stack.callback(plain.close)
    eventually(lambda: "feed_tls_ca" in plain.state.error, "told to use TLS")


# ---- who misbehaves


@pytest.mark.parametrize(
    "said",
    [
        b"GET / HTTP/1.1\r\n\r\n" * 10,
        LENGTH.pack(MAX_HELLO_BYTES + 1) + b"x" * 100,
        LENGTH.pack(3) + b"\xc1\xc1\xc1",
        encode(Ping()),
        encode(Prefetch(namespace=bytes(16), chunks=b"")),
    ],
)
def test_what_is_no_hello_is_refused(server: FeedServer, said: bytes) -> None:
    with raw(server, None) as peer:
        peer.sock.sendall(said)
        assert peer.refusal()
    eventually(lambda: _statistics(server).refused == {"refused": 1}, "counted")
    _well(server)


def test_a_guest_that_breaks_the_rules_is_cut_off(server: FeedServer) -> None:
    for said in (encode(HELLO), LENGTH.pack(MAX_FRAME_BYTES + 1), LENGTH.pack(1) + b"\xc1"):
        with raw(server) as peer:
            peer.snapshot()
            peer.sock.sendall(said)
            assert peer.refusal()
    _well(server)


def test_who_says_nothing_is_sent_away(server: FeedServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listening, "HELLO_TIMEOUT_S", 0.2)
    with raw(server, None) as peer:
        assert "no hello within" in peer.refusal()
    monkeypatch.setattr(listening, "HELLO_TIMEOUT_S", WAIT_S)
    _well(server)


def test_there_are_only_so_many_followers(
    serve: Serve, stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(feedserver, "MAX_FOLLOWERS", 3)
    server = serve()
    for _ in range(3):
        stack.enter_context(raw(server)).snapshot()
    with raw(server) as peer:
        assert "has 3 connections already" in peer.refusal()


def test_who_does_not_read_is_cut_off_and_keeps_nobody_waiting(
    serve: Serve, monkeypatch: pytest.MonkeyPatch, stack: ExitStack
) -> None:
    monkeypatch.setattr(feedserver, "Log", lambda: log.Log(max_bytes=1 << 20))
    server = serve()
    slow = stack.enter_context(raw(server))
    slow.snapshot()
    following = Following(server.address)
    stack.callback(following.close)
    following.followed()
    for number in range(400):  # far more than sockets and the log take
        some = chunks(1000, str(number % 7))
        server.publish([held(some)])
        server.publish([gone(some)])
        eventually(lambda number=number: _told(server) == 3 + 2 * number, "told")  # type: ignore[misc]
    eventually(lambda: _refused(server, "slow-reader") == 1, "cut off")
    server.publish([held(chunks(1, "last"))])
    eventually(lambda: following.view.at(Level.MEMORY) == set(chunks(1, "last")), "heard by others")
    assert _statistics(server).followers == 1


def test_a_snapshot_does_not_wait_for_who_does_not_read(server: FeedServer, stack: ExitStack) -> None:
    """And costs what the sockets take, not what is known."""
    server.publish([held(chunks(4000, str(n))) for n in range(50)])
    eventually(lambda: _told(server) == 51, "told")
    for _ in range(5):
        stack.enter_context(raw(server))
    eventually(lambda: _statistics(server).followers == 5, "they are there")
    _well(server)
    unsent = [guest.link.unsent_bytes for guest in server._listener.guests.values()]
    assert max(unsent) < 2 * feedserver.HIGH_WATER_BYTES


# ---- the router's side


def test_a_router_that_was_cut_off_goes_on_where_it_was(server: FeedServer, stack: ExitStack) -> None:
    following = Following(server.address)
    stack.callback(following.close)
    following.followed()
    server.publish([held(chunks(3))])
    eventually(lambda: following.view.at(Level.MEMORY) == set(chunks(3)), "heard")
    following.cut()
    server.publish([gone(chunks(1))])
    eventually(lambda: following.view.at(Level.MEMORY) == set(chunks(3)[1:]), "went on")
    assert (following.view.resets, following.view.losses, following.state.connects) == (1, 0, 2)


def test_a_feed_that_is_gone_is_lost_after_a_moment_and_found_again(serve: Serve, stack: ExitStack) -> None:
    first = serve()
    following = Following(first.address)
    stack.callback(following.close)
    following.followed()
    first.close()
    eventually(lambda: following.view.losses == 1, "lost")
    assert following.state.state == "absent"
    serve(replace(LOOPBACK, listen=first.address), epoch=8)
    eventually(lambda: following.view.resets == 2, "begun anew")


def test_where_nobody_is_there_a_router_stays_quiet(stack: ExitStack) -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        address = Address(*closed.getsockname()[:2])
    following = Following(address)
    stack.callback(following.close)
    eventually(lambda: following.state.error, "found out")
    assert following.state.state == "absent"
    assert not following.prefetch(bytes(16), chunks(1))


def test_events_that_are_missing_make_it_begin_anew(server: FeedServer, stack: ExitStack) -> None:
    """As a defect might lose them: the node's own log skips some."""
    following = Following(server.address)
    stack.callback(following.close)
    following.followed()
    server.publish([held(chunks(3))])
    eventually(lambda: following.view.at(Level.MEMORY) == set(chunks(3)), "heard")
    skipped = threading.Event()

    def skip() -> None:
        for told in server.picture.apply(gone(chunks(1))):
            server.log.append([told])
        for guest in server._listener.guests.values():
            guest._next = server.log.next  # type: ignore[attr-defined]
        skipped.set()

    server._loop.post(skip)
    assert skipped.wait(WAIT_S)
    server.publish([held(chunks(1, "next"))])
    wanted = {*chunks(3)[1:], *chunks(1, "next")}
    eventually(lambda: following.view.at(Level.MEMORY) == wanted, "all of it again")
    assert (following.state.gaps, following.view.resets) == (1, 2)


def test_a_node_that_is_silent_is_given_up(
    server: FeedServer, stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kvferry.router.feed import follower

    monkeypatch.setattr(follower, "SILENT_S", 0.3)
    monkeypatch.setattr(follower, "GRACE_S", 0.3)
    proxy = Proxy(server.address)
    stack.callback(proxy.close)
    following = Following(Address("127.0.0.1", proxy.port))
    stack.callback(following.close)
    following.followed()
    eventually(lambda: following.state.connects > 1, "looked again")


def test_an_address_in_use_is_said_in_one_line(server: FeedServer) -> None:
    with pytest.raises(MisconfiguredError, match="is in use; choose another --feed-listen"):
        FeedServer(replace(LOOPBACK, listen=server.address), node="", epoch=1, behind="")


def replace_hello(**changes: Any) -> Hello:
    return Hello(protocol=PROTOCOL, version=__version__, **changes)
