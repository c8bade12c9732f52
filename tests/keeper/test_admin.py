"""What people's programs ask of keepers: each is asked, none keeps a question for ever."""

import socket
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from tests.keeper.conftest import Serve
from tests.keeper.fleet import NAMESPACE, FakeKeeping
from tests.keeper.raw import raw_keeper
from tests.keeper.test_tls import Fleet as TlsFleet

from kvferry.errors import RefusedError, RetryError
from kvferry.keeper import admin
from kvferry.keeper.access import KeeperAccess
from kvferry.keeper.admin import Fleet, KeeperAdmin
from kvferry.keeper.framing import encode
from kvferry.keeper.server import Admission
from kvferry.keeper.wire import Document, Drop, DropTier, StatusQuery, ToKeeper
from kvferry.testing.expectations import eventually
from kvferry.tiers.contract import Dropped


def test_keepers_of_one_name_are_all_asked(serve: Serve) -> None:
    keepings = [FakeKeeping(), FakeKeeping(), FakeKeeping()]
    addresses = [serve(keeping, Admission(name="k")).address for keeping in keepings]
    with Fleet(addresses, access=KeeperAccess()) as fleet:
        said = fleet.drop(DropTier.DISK)
        fleet.drop_ended()
        fleet.tiers()  # what was sent before was read before
    assert said == {
        f"k at {addresses[0]}": Dropped(3, 3000),
        f"k at {addresses[1]}": Dropped(3, 3000),
        f"k at {addresses[2]}": Dropped(3, 3000),
    }
    assert [keeping.told for keeping in keepings] == [
        [("drop", ("disk", None, None)), ("drop ended", None)]
    ] * 3


def test_a_keeper_that_does_not_hear_that_a_drop_has_ended_is_named(serve: Serve) -> None:
    servers = [serve(FakeKeeping(), Admission(name=name)) for name in ("here", "gone")]
    with Fleet([server.address for server in servers], access=KeeperAccess()) as fleet:
        fleet.drop(DropTier.DISK)
        assert fleet.drop_ended() == {}
        servers[1].close()
        assert list(fleet.drop_ended()) == ["gone"]


def test_a_drop_under_way_when_its_connection_ends_is_over_when_it_is_done(serve: Serve) -> None:
    keeping = FakeKeeping(held=True)
    server = serve(keeping)
    with KeeperAdmin(server.address, access=KeeperAccess()) as asked:
        asked._send(Drop(ticket=1, tier=DropTier.DISK, namespace=NAMESPACE), time.monotonic() + 60.0)
        asked._send(
            Drop(ticket=2, tier=DropTier.DISK, namespace=b"a" * 16, alone=True), time.monotonic() + 60.0
        )
        eventually(lambda: len(keeping.drops) == 2, "both are under way")
    eventually(lambda: not server.connections, "gone")
    for done in keeping.drops:
        done(Dropped(3, 3000))
    eventually(
        lambda: keeping.told.count(("drop ended", NAMESPACE)) == 2, "told, as it closed and as it was done"
    )
    assert ("drop ended", b"a" * 16) not in keeping.told


def test_who_is_refused_over_tls_leaves_no_socket(
    serve: Serve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tls = TlsFleet(tmp_path)
    server = serve(FakeKeeping(), tls.admission(token="ours"))
    wrapped: list[socket.socket] = []
    wrap = admin._wrapped

    def noted(*args: object) -> socket.socket:
        wrapped.append(wrap(*args))
        return wrapped[-1]

    monkeypatch.setattr(admin, "_wrapped", noted)
    with pytest.raises(RefusedError):
        KeeperAdmin(server.address, access=tls.access(token="theirs"))
    assert [sock.fileno() for sock in wrapped] == [-1]


def test_a_keeper_that_says_ever_more_of_what_nobody_asked_is_given_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def chatter(message: ToKeeper) -> bytes:
        if not isinstance(message, StatusQuery):
            return b""
        return encode(Document(ticket=99, json=b"{}")) * 1000 + encode(Document(ticket=1, json=b"{}"))

    ticks = iter(range(10**6))
    with raw_keeper(chatter) as keeper, KeeperAdmin(keeper.address, access=KeeperAccess()) as asked:
        clock = SimpleNamespace(monotonic=lambda: float(next(ticks)))
        monkeypatch.setattr(admin, "ANSWER_S", 60.0)
        monkeypatch.setattr(admin, "time", clock)
        with pytest.raises(RetryError):
            asked.status()
        monkeypatch.setattr(admin, "time", time)
