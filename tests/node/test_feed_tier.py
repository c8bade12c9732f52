"""What a tier answers is told to who watches, and to who asked as before."""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack

import pytest

from kvferry.identity.names import PartKey, PartRef
from kvferry.identity.stripes import part_checksums
from kvferry.node.feedtier import WatchedTier
from kvferry.testing.expectations import WAIT_S
from kvferry.testing.memory_tier import MemoryTier
from kvferry.tiers.contract import FetchItem, Outcome, StoreItem

DATA = bytes(range(64))
THERE, ABSENT, NEW = (PartRef(PartKey(bytes(16), bytes([n]) * 32, 0), len(DATA)) for n in range(3))


class Watch:
    """Writes down what it is told, in order."""

    def __init__(self) -> None:
        self.seen: list[tuple[PartRef, Outcome]] = []

    def __call__(self, refs: Sequence[PartRef], outcomes: Sequence[Outcome]) -> None:
        self.seen += zip(refs, outcomes, strict=True)


@pytest.fixture
def inner() -> Iterator[MemoryTier]:
    with ExitStack() as stack:
        tier = MemoryTier("valkey")
        stack.callback(tier.close)
        tier.parts[THERE.key] = DATA
        yield tier


@pytest.fixture
def watch() -> Watch:
    return Watch()


@pytest.fixture
def tier(inner: MemoryTier, watch: Watch) -> WatchedTier:
    return WatchedTier(inner, watch)


def _done(begin: Callable[[Callable[..., None]], object]) -> tuple[object, ...]:
    """What ``done`` was called with."""
    called = threading.Event()
    found: list[object] = []

    def done(*what: object) -> None:
        found.extend(what)
        called.set()

    begin(done)
    assert called.wait(WAIT_S)
    return tuple(found)


def _deadline() -> float:
    return time.monotonic() + WAIT_S


def test_a_probe_is_told(tier: WatchedTier, watch: Watch) -> None:
    (outcomes,) = _done(lambda done: tier.probe([THERE, ABSENT], deadline=_deadline(), done=done))
    assert outcomes == [Outcome.OK, Outcome.MISS]
    assert watch.seen == [(THERE, Outcome.OK), (ABSENT, Outcome.MISS)]


def test_a_fetch_tells_what_is_gone_since(tier: WatchedTier, watch: Watch) -> None:
    for ref, seen in ((THERE, []), (ABSENT, [(ABSENT, Outcome.MISS)])):
        item = FetchItem(ref, memoryview(bytearray(ref.nbytes)))
        _done(lambda done, item=item: tier.fetch([item], deadline=_deadline(), done=done))  # type: ignore[misc]
        assert watch.seen == seen


def test_a_store_tells_what_is_there_now(tier: WatchedTier, watch: Watch, inner: MemoryTier) -> None:
    inner.fail(ABSENT.key, Outcome.REFUSED)
    for ref in (NEW, ABSENT):
        item = StoreItem(ref, memoryview(DATA), part_checksums(memoryview(DATA)))
        _done(lambda done, item=item: tier.store([item], deadline=_deadline(), done=done))  # type: ignore[misc]
    assert watch.seen == [(NEW, Outcome.OK)]


def test_what_is_to_go_is_gone_at_once_and_once_it_went(
    tier: WatchedTier, watch: Watch, inner: MemoryTier
) -> None:
    inner.hold()
    called = threading.Event()
    tier.remove([THERE], done=lambda outcomes: called.set())
    assert watch.seen == [(THERE, Outcome.MISS)]  # nobody is sent there from now on
    inner.release()
    assert called.wait(WAIT_S)
    assert watch.seen == [(THERE, Outcome.MISS)] * 2  # it may have been stored meanwhile
