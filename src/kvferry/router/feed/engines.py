"""Plain engines whose own KV events are followed, and whose prompts are found in them."""

import ssl
from collections.abc import Callable, Mapping
from functools import partial

from kvferry.errors import RetryError
from kvferry.router.asking import get
from kvferry.router.contract import Asked
from kvferry.router.feed.endpoints import KvEvents
from kvferry.router.feed.follower import Knowledge
from kvferry.router.feed.kvevents import KvEventsFollower, KvEventsStatistics
from kvferry.router.feed.tokens import TokenAsker

TOKENIZE_S = 10.0


class EngineEvents:
    """All on one event loop."""

    def __init__(
        self,
        knowledge: Knowledge,
        where: KvEvents,
        *,
        tls: Callable[[], ssl.SSLContext] | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        """headers: that workers want shown."""
        self._knowledge = knowledge
        self._where = where
        self._tls = tls
        self._headers = headers
        self._followed: dict[str, tuple[KvEventsFollower, TokenAsker]] = {}

    def follow(self, worker: str) -> str | None:
        """What the knowledge calls this worker's events; None: it publishes none.

        Raises MisconfiguredError without pyzmq.
        """
        endpoints = self._where.of(worker)
        if endpoints is None:
            return None
        name = f"kv-events {worker}"
        if worker not in self._followed:
            follower = KvEventsFollower(name, *endpoints, self._knowledge)
            asker = TokenAsker(
                partial(self._tokenize, worker),
                lambda request_id, tokens, salt: follower.prompt(request_id, tokens, salt=salt),
            )
            self._followed[worker] = follower, asker
            follower.start()
            asker.start()
        return name

    def node(self, worker: str) -> str | None:
        """What the knowledge calls its events, where they are followed."""
        followed = self._followed.get(worker)
        return None if followed is None else followed[0].name

    async def unfollow(self, worker: str) -> None:
        """It is no worker any more."""
        followed = self._followed.pop(worker, None)
        for one in followed or ():
            await one.close()

    def sent(self, worker: str, asked: Asked, path: str, body: bytes) -> None:
        """A request is on its way there: which blocks it is about is found out behind it."""
        followed = self._followed.get(worker)
        if followed is not None and asked.keys:
            followed[1].sent(asked.keys[-1].name, asked.request_id, path, body, asked.salt)

    def statistics(self) -> tuple[KvEventsStatistics, ...]:
        """A snapshot of each."""
        return tuple(follower.statistics() for follower, _ in self._followed.values())

    async def close(self) -> None:
        """Idempotent."""
        for worker in list(self._followed):
            await self.unfollow(worker)

    async def _tokenize(self, worker: str, body: bytes) -> bytes:
        answer = await get(
            worker, "/tokenize", timeout_s=TOKENIZE_S, headers=self._headers, tls=self._tls, body=body
        )
        if answer.status != 200:
            raise RetryError(f"{worker}/tokenize answered {answer.status}")
        return answer.body
