"""A follower on an event loop of its own, for tests that are not asynchronous."""

import asyncio
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from tests.feed.view import View

from kvferry.addresses import Address
from kvferry.feed.access import FeedAccess
from kvferry.router.feed.follower import FollowerStatistics
from kvferry.router.feed.followers import Followers
from kvferry.testing.expectations import WAIT_S, eventually

T = TypeVar("T")


class Following:
    """One node's feed. view: read it between events only (``eventually``)."""

    def __init__(self, address: Address, access: FeedAccess | None = None) -> None:
        self.view = View()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self.name = str(address)
        self._followers = self._call(lambda: self._begin(address, access))

    async def _begin(self, address: Address, access: FeedAccess | None) -> Followers:
        followers = Followers(self.view, access)
        followers.follow(address)
        return followers

    def _call(self, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        return asyncio.run_coroutine_threadsafe(work(), self._loop).result(WAIT_S)

    @property
    def state(self) -> FollowerStatistics:
        async def ask() -> FollowerStatistics:
            (only,) = self._followers.statistics()
            return only

        return self._call(ask)

    def followed(self) -> "Following":
        """Itself, once it knows what the node knows."""
        eventually(lambda: self.state.state == "followed" and self.view.resets, "followed")
        return self

    def prefetch(self, namespace: bytes, chunks: list[bytes]) -> bool:
        async def ask() -> bool:
            return self._followers.prefetch(self.name, namespace, b"".join(chunks))

        return self._call(ask)

    def cut(self) -> None:
        """As when the network breaks the connection."""

        async def abort() -> None:
            writer = self._followers._followers[self.name]._writer
            if writer is not None:
                writer.transport.abort()

        self._call(abort)

    def close(self) -> None:
        self._call(self._followers.close)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(WAIT_S)
        self._loop.close()
