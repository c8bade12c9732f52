"""Who may ask a keeper, what a broken or hostile peer costs, and that it costs nobody else anything."""

import contextlib
import json
import logging
import random
import socket
import struct
import threading
from contextlib import ExitStack

import msgspec
import pytest
from tests.keeper.conftest import Serve
from tests.keeper.fleet import ANY_PORT, FakeKeeping, some_refs
from tests.keeper.raw import ADMIN, HELLO, RawPeer

from kvferry import link, listening
from kvferry.errors import MisconfiguredError
from kvferry.frames import LENGTH
from kvferry.keeper import requests, server
from kvferry.keeper.framing import encode
from kvferry.keeper.server import Admission, Server
from kvferry.keeper.wire import (
    MAX_FRAME_BYTES,
    MAX_HELLO_BYTES,
    OUTCOMES,
    PROTOCOL,
    Cancel,
    Document,
    Drop,
    DropTier,
    Hello,
    Locate,
    Located,
    MostReused,
    Parts,
    Ping,
    Pong,
    Refusal,
    Remove,
    Reused,
    Stage,
    Staged,
    StatusQuery,
    Stored,
    Used,
    Welcome,
    Where,
)
from kvferry.testing.expectations import WAIT_S, eventually
from kvferry.tiers.contract import Outcome

REFS = some_refs(6, parts=2)
(PARTS,) = Parts.of(REFS)
OLD, NEW = b"old1", b"new1"


@pytest.fixture
def keeping() -> FakeKeeping:
    return FakeKeeping(where=dict.fromkeys(REFS[:4], Where.DISK))


@pytest.fixture
def keeper(keeping: FakeKeeping, serve: Serve) -> Server:
    return serve(keeping)


def _refusal(peer: RawPeer) -> str:
    """The keeper's last words."""
    said = peer.ended()
    assert said, "closed without a word"
    assert isinstance(said[-1], Refusal)
    return said[-1].message


def _well(keeper: Server) -> None:
    """Somebody else is served as ever."""
    with RawPeer(keeper.address) as peer:
        assert isinstance(peer.receive(), Welcome)
        peer.send(Ping())
        assert isinstance(peer.receive(), Pong)
    assert keeper.statistics().defects == 0


def _refused(keeper: Server, cause: str) -> int:
    return keeper.statistics().refused.get(cause, 0)


def test_a_node_is_welcomed_by_name_and_its_questions_are_answered(
    keeper: Server, keeping: FakeKeeping
) -> None:
    with RawPeer(keeper.address) as peer:
        welcome = peer.receive()
        assert isinstance(welcome, Welcome)
        assert (welcome.protocol, welcome.name) == (PROTOCOL, "k")
        peer.send(Locate(ticket=7, parts=PARTS, deadline_s=5.0))
        assert peer.receive() == Located(ticket=7, where=bytes([1] * 4 + [0] * 8))
        peer.send(Stage(ticket=8, parts=PARTS, deadline_s=5.0))
        found: dict[int, Outcome] = {}
        while len(found) < len(REFS):
            staged = peer.receive()
            assert isinstance(staged, Staged)
            assert staged.ticket == 8
            found |= {
                index: OUTCOMES[code] for index, code in zip(staged.indexes, staged.outcomes, strict=True)
            }
        assert found == {at: Outcome.OK if at < 4 else Outcome.MISS for at in range(12)}
        eventually(lambda: keeper.statistics().peers[0].asked == 0, "nothing is left of them")


def test_what_nodes_tell_arrives_as_it_was(keeper: Server, keeping: FakeKeeping) -> None:
    with RawPeer(keeper.address) as peer:
        peer.send(Stored(parts=PARTS, positions=tuple(range(12)), likely=b"\1\0" * 6))
        peer.send(Used(parts=PARTS))
        peer.send(Remove(parts=PARTS))
        eventually(lambda: len(keeping.told) == 3, "told")
    assert keeping.told == [
        ("stored", [(ref, at, at % 2 == 0) for at, ref in enumerate(REFS)]),
        ("used", REFS),
        ("remove", REFS),
    ]


def test_admins_ask_what_nodes_may_not(keeper: Server, keeping: FakeKeeping) -> None:
    with RawPeer(keeper.address, ADMIN) as peer:
        peer.receive()
        peer.send(StatusQuery(ticket=1))
        assert peer.receive() == Document(ticket=1, json=b"{}")
        peer.send(Drop(ticket=2, tier=DropTier.DISK, older_than_s=60.0))
        answer = peer.receive()
        assert isinstance(answer, Document)
        assert json.loads(answer.json) == {"dropped_parts": 3, "dropped_bytes": 3000, "outcome": "ok"}
        assert keeping.told == [("drop", ("disk", None, 60.0))]
        peer.send(MostReused(ticket=3, within_s=60.0, max_bytes=1 << 20))
        assert peer.receive() == Reused(ticket=3, parts=Parts.of(REFS[:4])[0], last=True)
    with RawPeer(keeper.address) as peer:
        peer.receive()
        peer.send(Drop(ticket=2, tier=DropTier.DISK))
        assert "unexpected Drop from a node" in _refusal(peer)
    assert len(keeping.told) == 1


def test_a_node_that_is_gone_wants_nothing_any_more(serve: Serve) -> None:
    keeping = FakeKeeping(held=True)
    keeper = serve(keeping)
    with RawPeer(keeper.address) as peer:
        peer.send(Stage(ticket=1, parts=PARTS, deadline_s=60.0))
        eventually(lambda: keeping.stages, "asked")
    assert keeping.stages[0].cancelled.wait(WAIT_S)
    keeping.stages[0].done(0, Outcome.LATE)
    _well(keeper)


def test_a_cancelled_stage_is_cancelled_and_still_answered(serve: Serve) -> None:
    keeping = FakeKeeping(held=True)
    keeper = serve(keeping)
    with RawPeer(keeper.address) as peer:
        peer.receive()
        peer.send(Stage(ticket=1, parts=Parts.of(REFS[:1])[0], deadline_s=60.0))
        peer.send(Cancel(ticket=1))
        peer.send(Cancel(ticket=99))
        eventually(lambda: keeping.stages and keeping.stages[0].cancelled.is_set(), "cancelled")
        keeping.stages[0].done(0, Outcome.LATE)
        assert peer.receive() == Staged(1, (0,), bytes([OUTCOMES.index(Outcome.LATE)]))


def test_questions_beyond_the_bound_are_answered_at_once(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(requests, "MAX_ASKED_PARTS", 20)
    keeping = FakeKeeping(held=True)
    keeper = serve(keeping)
    with RawPeer(keeper.address) as peer:
        peer.receive()
        peer.send(Stage(ticket=1, parts=PARTS, deadline_s=60.0))
        peer.send(Stage(ticket=2, parts=PARTS, deadline_s=60.0))
        refused = peer.receive()
        assert isinstance(refused, Staged)
        assert (refused.ticket, len(refused.indexes)) == (2, 12)
        assert {OUTCOMES[code] for code in refused.outcomes} == {Outcome.REFUSED}
        peer.send(Locate(ticket=3, parts=PARTS, deadline_s=60.0))
        assert peer.receive() == Located(ticket=3, where=bytes([Where.UNKNOWN] * 12))
        for index in range(12):
            keeping.stages[0].done(index, Outcome.OK)
        eventually(lambda: keeper.statistics().peers[0].asked == 0, "room again")
        peer.send(Stage(ticket=4, parts=PARTS, deadline_s=60.0))
        eventually(lambda: len(keeping.stages) == 2, "taken")


@pytest.mark.parametrize(("shown", "words"), [("", "none was shown"), ("mark-of-another", "does not match")])
def test_a_wrong_token_is_refused_and_never_shown(
    serve: Serve, shown: str, words: str, caplog: pytest.LogCaptureFixture
) -> None:
    keeper = serve(FakeKeeping(), Admission(token="mark-of-ours"))
    with caplog.at_level(logging.DEBUG):
        with RawPeer(keeper.address, msgspec.structs.replace(HELLO, token=shown)) as peer:
            message = _refusal(peer)
        with RawPeer(keeper.address, msgspec.structs.replace(HELLO, token="mark-of-ours")) as peer:
            assert isinstance(peer.receive(), Welcome)
    assert words in message
    assert "mark-of" not in message + caplog.text + repr(keeper.statistics())
    eventually(lambda: _refused(keeper, "token") == 1, "counted")


def test_a_token_where_none_is_set_is_refused(keeper: Server) -> None:
    with RawPeer(keeper.address, msgspec.structs.replace(HELLO, token="ours")) as peer:
        assert "started without one" in _refusal(peer)


@pytest.mark.parametrize(
    ("known", "shown", "words"),
    [
        ((), b"", None),
        ((OLD,), OLD, None),
        ((NEW, OLD), OLD + NEW, None),
        ((NEW, OLD), NEW + b"much", None),
        ((OLD,), NEW + OLD, f"key {NEW.hex()} and the keeper knows {OLD.hex()}"),
        ((), NEW, "knows none"),
        ((NEW,), b"", "the node does not encrypt"),
    ],
)
def test_a_node_whose_current_key_the_keeper_does_not_know_is_refused(
    serve: Serve, known: tuple[bytes, ...], shown: bytes, words: str | None
) -> None:
    keeper = serve(FakeKeeping(), Admission(key_ids=known))
    with RawPeer(keeper.address, msgspec.structs.replace(HELLO, key_ids=shown)) as peer:
        if words is None:
            assert isinstance(peer.receive(), Welcome)
        else:
            assert words in _refusal(peer)
    with RawPeer(keeper.address, ADMIN) as peer:
        assert isinstance(peer.receive(), Welcome)


def test_another_protocol_version_is_told_so(keeper: Server) -> None:
    payload = msgspec.msgpack.encode({"type": "Hello", "protocol": 99, "version": "9.9", "new": [1]})
    with RawPeer(keeper.address, None) as peer:
        peer.sock.sendall(LENGTH.pack(len(payload)) + payload)
        text = _refusal(peer)
    assert "9.9" in text
    assert "install the same version" in text
    eventually(lambda: _refused(keeper, "version") == 1, "counted")


def test_the_first_message_must_be_hello_and_the_only_one(keeper: Server) -> None:
    with RawPeer(keeper.address, None) as peer:
        peer.send(Ping())
        assert "first message" in _refusal(peer)
    with RawPeer(keeper.address) as peer:
        peer.send(HELLO)
        assert "unexpected Hello" in _refusal(peer)


def test_a_ticket_in_use_is_refused(serve: Serve) -> None:
    keeper = serve(FakeKeeping(held=True))
    with RawPeer(keeper.address) as peer:
        for _ in range(2):
            peer.send(Locate(ticket=1, parts=PARTS, deadline_s=60.0))
        assert "ticket 1 is in use" in _refusal(peer)
    _well(keeper)


def test_garbage_ends_that_connection_alone(keeper: Server) -> None:
    noise = random.Random(5)
    with RawPeer(keeper.address) as other:
        other.receive()
        for hello in (None, HELLO):
            for _ in range(20):
                with RawPeer(keeper.address, hello) as peer, contextlib.suppress(ConnectionError):
                    peer.sock.sendall(noise.randbytes(noise.randrange(1, 4000)))
                    peer.sock.shutdown(socket.SHUT_WR)
                    peer.ended()
        other.send(Ping())
        assert isinstance(other.receive(), Pong)
    _well(keeper)


@pytest.mark.parametrize(("hello", "limit"), [(None, MAX_HELLO_BYTES), (HELLO, MAX_FRAME_BYTES)])
def test_a_frame_beyond_the_limit_is_refused_by_its_length(
    keeper: Server, hello: Hello | None, limit: int
) -> None:
    with RawPeer(keeper.address, hello) as peer:
        if hello is not None:
            peer.receive()
        peer.sock.sendall(LENGTH.pack(limit + 1))
        assert f"exceeds the limit of {limit}" in _refusal(peer)


def test_a_hello_that_trickles_has_no_more_time_than_silence(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listening, "HELLO_TIMEOUT_S", 0.2)
    keeper = serve(FakeKeeping())
    ended = threading.Event()
    with RawPeer(keeper.address, None) as peer:

        def trickle() -> None:
            with contextlib.suppress(OSError):
                for byte in encode(msgspec.structs.replace(HELLO, node="n" * 500)) * 100:
                    peer.sock.sendall(bytes([byte]))
                    if ended.wait(0.02):
                        return

        thread = threading.Thread(target=trickle)
        thread.start()
        assert "no hello within" in _refusal(peer)
        ended.set()
        thread.join()
    eventually(lambda: _refused(keeper, "no-hello") == 1, "counted")
    monkeypatch.setattr(listening, "HELLO_TIMEOUT_S", 60.0)
    _well(keeper)


def test_strangers_make_room_for_each_other_and_not_for_nodes(
    serve: Serve, monkeypatch: pytest.MonkeyPatch, stack: ExitStack
) -> None:
    monkeypatch.setattr(listening, "MAX_STRANGERS", 4)
    keeper = serve(FakeKeeping())
    node = stack.enter_context(RawPeer(keeper.address))
    node.receive()
    strangers = [stack.enter_context(RawPeer(keeper.address, None)) for _ in range(6)]
    eventually(lambda: _refused(keeper, "crowded-out") == 2, "made room")
    assert "later connections" in _refusal(strangers[0])
    node.send(Ping())
    assert isinstance(node.receive(), Pong)


def test_there_are_only_so_many_connections(
    serve: Serve, monkeypatch: pytest.MonkeyPatch, stack: ExitStack
) -> None:
    monkeypatch.setattr(listening, "MAX_CONNECTIONS", 3)
    keeper = serve(FakeKeeping())
    for _ in range(3):
        assert isinstance(stack.enter_context(RawPeer(keeper.address)).receive(), Welcome)
    assert "has 3 connections already" in _refusal(stack.enter_context(RawPeer(keeper.address)))


def test_a_peer_that_never_reads_is_cut_off(stack: ExitStack, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link, "MAX_UNSENT_BYTES", 1 << 20)
    monkeypatch.setattr(requests, "MAX_RUNNING", 100)
    keeper = Server(ANY_PORT, keeping=FakeKeeping(), admission=Admission(), status=lambda: bytes(500_000))
    stack.callback(keeper.close)
    keeper.start()
    with RawPeer(keeper.address, ADMIN) as peer:
        peer.receive()
        for ticket in range(60):  # more than the kernel buffers
            peer.send(StatusQuery(ticket=ticket))
        eventually(lambda: _refused(keeper, "slow-reader") == 1, "cut off")
    _well(keeper)


def test_what_all_connections_hold_is_bounded(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listening, "MAX_HELD_BYTES", 1 << 20)
    keeper = serve(FakeKeeping())
    with RawPeer(keeper.address) as small, RawPeer(keeper.address) as large:
        for peer, nbytes in ((small, 1 << 16), (large, 3 << 20)):
            peer.receive()
            with contextlib.suppress(ConnectionError):
                peer.sock.sendall(LENGTH.pack(MAX_FRAME_BYTES) + bytes(nbytes))
        eventually(lambda: _refused(keeper, "holds-most") == 1, "cut off")
        assert large.ended() == []
        eventually(lambda: len(keeper.statistics().peers) == 1, "forgotten")
    _well(keeper)


def test_an_aborted_connection_costs_nothing(keeper: Server) -> None:
    for hello in (None, HELLO):
        with RawPeer(keeper.address, hello) as peer:
            peer.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    eventually(lambda: not keeper.statistics().peers, "forgotten")
    _well(keeper)


def test_a_keepers_own_mistake_costs_the_connection_it_came_from(
    keeper: Server, keeping: FakeKeeping
) -> None:
    def wrong(refs: object) -> None:
        raise ZeroDivisionError

    keeping.used = wrong  # type: ignore[method-assign]
    with RawPeer(keeper.address) as peer:
        peer.receive()
        peer.send(Used(parts=PARTS))
        assert peer.ended() == []
    eventually(lambda: keeper.statistics().defects == 1, "counted")
    with RawPeer(keeper.address) as peer:
        assert isinstance(peer.receive(), Welcome)


def test_an_address_in_use_and_one_of_another_host_are_refused_in_one_line(keeper: Server) -> None:
    for address, words in ((keeper.address, "is in use"), (("192.0.2.1", 0), "no address of this machine")):
        with pytest.raises(MisconfiguredError, match=words):
            Server(server.Address(*address), keeping=FakeKeeping(), admission=Admission(), status=lambda: b"")


def test_closing_ends_connections_and_work(keeping: FakeKeeping, serve: Serve) -> None:
    keeping.held = True
    keeper = serve(keeping)
    with RawPeer(keeper.address) as peer:
        peer.receive()
        peer.send(Stage(ticket=1, parts=PARTS, deadline_s=60.0))
        eventually(lambda: keeping.stages, "asked")
        keeper.close()
        assert keeping.stages[0].cancelled.is_set()
        assert peer.ended() == []
        keeping.stages[0].done(0, Outcome.OK)
