"""A node's connection to a keeper: who is one, what a silent one costs, what it is told."""

import socket
import threading
from collections import Counter
from types import SimpleNamespace

import msgspec
import pytest
from tests.keeper.asking import REFS, silenced, soon, staged, status
from tests.keeper.conftest import Connect, Serve
from tests.keeper.fleet import FakeKeeping, some_refs
from tests.keeper.raw import RawKeeper, raw_keeper

from kvferry.addresses import Address
from kvferry.frames import LENGTH
from kvferry.keeper import client, peer
from kvferry.keeper.access import KeeperAccess
from kvferry.keeper.framing import encode
from kvferry.keeper.server import Admission
from kvferry.keeper.wire import (
    OUTCOMES,
    PROTOCOL,
    Cancel,
    Hello,
    Ping,
    Pong,
    Refusal,
    Stage,
    Staged,
    Stored,
    ToKeeper,
    Welcome,
    Where,
)
from kvferry.testing.expectations import WAIT_S, eventually
from kvferry.tiers.contract import Outcome


@pytest.mark.parametrize(
    "said",
    [
        b"HTTP/1.1 400 Bad Request\r\n\r\n",
        LENGTH.pack(1 << 31),
        LENGTH.pack(3) + b"abc",
        encode(Pong()),
        encode(Hello(protocol=PROTOCOL, version="1")),
        b"",
    ],
)
def test_who_does_not_welcome_is_no_keeper(
    serve: Serve, connect: Connect, monkeypatch: pytest.MonkeyPatch, said: bytes
) -> None:
    monkeypatch.setattr(peer, "GREETING_S", 0.2)
    with raw_keeper(welcome=said) as wrong:
        keeping = FakeKeeping(where=dict.fromkeys(REFS, Where.DISK))
        keepers = connect([wrong.address, serve(keeping).address], up=1)
        eventually(lambda: status(keepers).error, "known to be none")
        assert staged(keepers) == [Outcome.OK] * len(REFS)
        assert status(keepers).state == "down"


@pytest.mark.parametrize(
    ("admission", "access", "words"),
    [
        (Admission(token="ours"), KeeperAccess("theirs"), "the token does not match"),
        (Admission(token="ours"), KeeperAccess(), "none was shown"),
        (Admission(key_ids=(b"abcd",)), KeeperAccess(), "the node does not encrypt"),
    ],
)
def test_a_keeper_that_does_not_want_this_node_is_asked_nothing_and_says_why(
    serve: Serve, connect: Connect, admission: Admission, access: KeeperAccess, words: str
) -> None:
    keepers = connect([serve(FakeKeeping(), admission).address], up=0, access=access)
    eventually(lambda: words in status(keepers).error, "known why")
    eventually(lambda: status(keepers).state == "refused", "left alone")
    assert staged(keepers) == [Outcome.REFUSED] * len(REFS)
    assert "ours" not in status(keepers).error


def test_a_node_that_is_known_is_let_in(serve: Serve, connect: Connect) -> None:
    server = serve(FakeKeeping(), Admission(token="ours", key_ids=(b"abcd",)))
    connect([server.address], access=KeeperAccess("ours"), key_ids=[b"abcd", b"more"])
    assert [each.node for each in server.statistics().peers] == ["node"]


def test_another_version_of_a_keeper_says_so(connect: Connect) -> None:
    class OtherRefusal(msgspec.Struct, tag="Refusal"):
        message: str = "this keeper is kvferry 9.9"
        protocol: int = 9
        something_new: int = 1

    payload = msgspec.msgpack.encode(OtherRefusal())
    with raw_keeper(welcome=LENGTH.pack(len(payload)) + payload) as other:
        keepers = connect([other.address], up=0)
        eventually(lambda: "kvferry 9.9" in status(keepers).error, "known why")


def test_a_refusal_in_the_middle_is_told_and_the_keeper_tried_again(connect: Connect) -> None:
    def refuse(message: ToKeeper) -> bytes:
        return encode(Refusal(message="enough for today")) if isinstance(message, Stored) else b""

    with raw_keeper(refuse) as keeper:
        keepers = connect([keeper.address])
        keepers.stored(REFS[:1], positions=[0], likely=[True])
        eventually(lambda: status(keepers).connects == 2, "tried again")


def test_the_first_welcome_counts_and_a_second_one_is_strange(connect: Connect) -> None:
    twice = encode(Welcome(protocol=PROTOCOL, version="1", name="first")) * 2
    with raw_keeper(welcome=twice) as keeper:
        keepers = connect([keeper.address])
        eventually(lambda: status(keepers).strange == 1, "noticed")
        assert status(keepers).name == "first"


def test_a_keeper_that_falls_silent_is_left_alone_until_it_answers(
    connect: Connect, serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    silenced(monkeypatch)
    kept = FakeKeeping(where=dict.fromkeys(REFS, Where.DISK))

    def miss(message: ToKeeper) -> bytes:
        if isinstance(message, Stage):
            every = tuple(range(len(message.parts)))
            return encode(Staged(message.ticket, every, bytes([OUTCOMES.index(Outcome.MISS)]) * len(every)))
        return encode(Pong()) if isinstance(message, Ping) else b""

    with raw_keeper(miss) as mute:
        keepers = connect([mute.address, serve(kept).address])
        mute.open.clear()
        outcomes = Counter(staged(keepers, wait_s=0.3))
        assert outcomes[Outcome.LATE]
        eventually(lambda: status(keepers).state == "silent", "noticed")
        eventually(lambda: staged(keepers) == [Outcome.OK] * len(REFS), "the other has its share")
        mute.open.set()
        eventually(lambda: status(keepers).state == "up", "answers again")
        eventually(lambda: set(staged(keepers)) == {Outcome.OK, Outcome.MISS}, "is asked again")
        assert status(keepers).connects == 1
        assert mute.of(Cancel)


def test_a_quiet_keeper_is_asked_whether_it_lives_before_anybody_needs_it(
    connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    silenced(monkeypatch)
    monkeypatch.setattr(peer, "IDLE_S", 0.1)
    with raw_keeper() as quiet:
        keepers = connect([quiet.address])
        eventually(lambda: len(quiet.of(Ping)) >= 2, "asked")
        eventually(lambda: status(keepers).state == "up", "answers")
        quiet.open.clear()
        eventually(lambda: status(keepers).state == "silent", "noticed")


def test_a_keeper_that_stays_silent_is_connected_to_anew(
    connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peer, "IDLE_S", 0.1)
    monkeypatch.setattr(peer, "PATIENCE_S", 0.1)
    monkeypatch.setattr(peer, "GIVE_UP_S", 0.1)
    silent = threading.Event()
    silent.set()
    with raw_keeper(lambda message: b"" if silent.is_set() else encode(Pong())) as keeper:
        keepers = connect([keeper.address])
        eventually(lambda: status(keepers).connects >= 2, "connected anew")
        silent.clear()
        eventually(lambda: status(keepers).state == "up", "up")


def test_what_is_told_goes_to_its_keeper_and_removals_to_all(serve: Serve, connect: Connect) -> None:
    keepings = [FakeKeeping(), FakeKeeping()]
    servers = [serve(keeping, Admission(name=f"k{at}")) for at, keeping in enumerate(keepings)]
    keepers = connect([server.address for server in servers])
    staged(keepers)
    shares = [list(keeping.stages[0].refs) for keeping in keepings]
    keepers.stored(REFS, positions=range(len(REFS)), likely=[at % 3 == 0 for at in range(len(REFS))])
    keepers.used(REFS)
    keepers.remove(REFS[:7])
    eventually(lambda: all(len(keeping.told) == 3 for keeping in keepings), "told")
    for keeping, share in zip(keepings, shares, strict=True):
        places = [REFS.index(ref) for ref in share]
        assert keeping.told == [
            ("stored", [(ref, at, at % 3 == 0) for ref, at in zip(share, places, strict=True)]),
            ("used", share),
            ("remove", REFS[:7]),
        ]


def test_a_restarting_keeper_is_told_when_it_is_back(
    serve: Serve, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peer, "MOMENT_S", 600.0)
    keeping = FakeKeeping()
    server = serve(keeping)
    keepers = connect([server.address])
    server.close()
    eventually(lambda: status(keepers).state == "down", "lost")
    keepers.used(REFS)
    eventually(lambda: status(keepers).queued_parts == len(REFS), "queued")
    keepers.used(some_refs(peer.MAX_QUEUED_PARTS, seed="more"))
    eventually(lambda: status(keepers).dropped_parts == peer.MAX_QUEUED_PARTS, "no room")
    serve(keeping, port=server.address.port)
    eventually(lambda: keeping.told, "told")
    assert keeping.told == [("used", REFS)]
    assert status(keepers).queued_parts == 0


def test_what_a_lost_keeper_misses_is_dropped_and_counted(
    serve: Serve, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peer, "MOMENT_S", 0.3)
    server = serve(FakeKeeping())
    keepers = connect([server.address])
    server.close()
    eventually(lambda: status(keepers).state == "down", "lost")
    keepers.used(REFS)

    def dropped() -> bool:
        return status(keepers).dropped_parts + keepers.statistics().dropped_parts == len(REFS)

    eventually(dropped, "forgotten")
    assert status(keepers).queued_parts == 0
    keepers.used(REFS)
    eventually(lambda: keepers.statistics().dropped_parts >= len(REFS), "told to nobody")


def test_a_keeper_that_never_reads_is_told_no_more_than_fits(
    connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peer, "MAX_TOLD_BYTES", 100_000)
    with raw_keeper() as deaf:
        keepers = connect([deaf.address])
        deaf.open.clear()
        many = some_refs(5000)

        def flooded() -> bool:
            keepers.used(many)
            return status(keepers).dropped_parts >= 10 * len(many)

        eventually(flooded, "no more than fits")
        assert status(keepers).state == "up"


def test_what_other_threads_tell_is_bounded_until_it_is_on_its_way(
    serve: Serve, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "MAX_UNTOLD_PARTS", 2 * len(REFS))
    keeping = FakeKeeping(where=dict.fromkeys(REFS, Where.DISK))
    keepers = connect([serve(keeping).address])
    blocked, release = threading.Event(), threading.Event()

    def block(index: int, outcome: Outcome) -> None:
        blocked.set()
        release.wait(WAIT_S)

    keepers.stage(REFS[:1], deadline=soon(), done=block)
    assert blocked.wait(WAIT_S)
    for _ in range(5):
        keepers.used(REFS)
    assert keepers.statistics().dropped_parts == 3 * len(REFS)
    release.set()
    eventually(lambda: len(keeping.told) == 2, "told")


class _NoThread(threading.Thread):
    """The host has none left."""

    left = 2

    def start(self) -> None:
        if _NoThread.left:
            _NoThread.left -= 1
            raise RuntimeError("can't start new thread")
        super().start()


def test_a_keeper_is_dialled_again_when_no_thread_could_be_had_for_it(
    serve: Serve, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_NoThread, "left", 2)
    monkeypatch.setattr(peer, "threading", SimpleNamespace(Thread=_NoThread))
    connect([serve(FakeKeeping()).address])
    assert _NoThread.left == 0


def test_a_keeper_is_dialled_again_whatever_the_resolver_failed_with(
    serve: Serve, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    dial, failures = peer.connect, [RuntimeError("can't start new thread"), MemoryError()]

    def failing(address: Address, until: float) -> socket.socket:
        if failures:
            raise failures.pop()
        return dial(address, until)

    monkeypatch.setattr(peer, "connect", failing)
    connect([serve(FakeKeeping()).address])
    assert not failures


def test_a_keeper_that_drops_each_connection_is_tried_ever_later_and_complained_of_once(
    connect: Connect, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(peer, "GOOD_S", 600.0)
    serve_on, drops = RawKeeper._serve, threading.Event()
    drops.set()

    def serve_once(keeper: RawKeeper, sock: socket.socket) -> None:
        if not drops.is_set():
            serve_on(keeper, sock)
        elif sock.recv(1 << 16):
            sock.sendall(encode(Welcome(protocol=PROTOCOL, version="raw", name="raw")))

    monkeypatch.setattr(RawKeeper, "_serve", serve_once)
    with caplog.at_level("WARNING", "kvferry.keepers"), raw_keeper() as keeper:
        keepers = connect([keeper.address], up=0)
        eventually(lambda: status(keepers).connects >= 5, "tried again")
        found = keepers._peers[0]._breaker
        eventually(lambda: found._wait_s == found.max_wait_s, "as late as can be")
        assert len(caplog.records) == 1
        monkeypatch.setattr(peer, "GOOD_S", 0.05)
        drops.clear()
        eventually(lambda: not status(keepers).error, "a good one in the end")
        assert status(keepers).state == "up"
        assert len(caplog.records) == 2
