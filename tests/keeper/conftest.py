"""Fixtures of keeper tests."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack

import pytest
from tests.keeper.fleet import FakeKeeping, started

from kvferry import listening
from kvferry.addresses import Address
from kvferry.keeper import peer
from kvferry.keeper.access import KeeperAccess
from kvferry.keeper.client import Keepers
from kvferry.keeper.server import Admission, Server
from kvferry.testing.expectations import eventually

Serve = Callable[..., Server]
Connect = Callable[..., Keepers]


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy host is no silent keeper; tests of silence have limits of their own."""
    for name in ("CONNECT_S", "GREETING_S", "PATIENCE_S"):
        monkeypatch.setattr(peer, name, 60.0)
    monkeypatch.setattr(peer, "IDLE_S", 600.0)
    monkeypatch.setattr(listening, "HELLO_TIMEOUT_S", 60.0)


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    """Closes what a test opened, last first."""
    with ExitStack() as opened:
        yield opened


@pytest.fixture
def serve(stack: ExitStack) -> Serve:
    """Starts servers over what a test keeps."""

    def start(keeping: FakeKeeping, admission: Admission | None = None, *, port: int = 0) -> Server:
        keeper = started(keeping, admission, listen=Address("127.0.0.1", port))
        stack.callback(keeper.close)
        return keeper

    return start


@pytest.fixture
def connect(stack: ExitStack) -> Connect:
    """A node's side of keepers, once so many of them are up (all, unless told)."""

    def start(
        addresses: Sequence[Address],
        *,
        up: int | None = None,
        access: KeeperAccess | None = None,
        key_ids: Sequence[bytes] = (),
    ) -> Keepers:
        keepers = Keepers(addresses, access=access or KeeperAccess(), node="node", key_ids=key_ids)
        stack.callback(keepers.close)
        wanted = len(addresses) if up is None else up
        eventually(lambda: keepers.statistics().up >= wanted, "connected")
        return keepers

    return start
