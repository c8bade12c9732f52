"""The feeds that a router follows, one for each node; workers of one host share it."""

from kvferry.addresses import Address
from kvferry.feed.access import FeedAccess
from kvferry.router.feed.follower import Follower, FollowerStatistics, Knowledge

MAX_FOLLOWERS = 4096


class Followers:
    """All on one event loop. access: for all of them alike. Raises MisconfiguredError for useless files."""

    def __init__(self, knowledge: Knowledge, access: FeedAccess | None = None) -> None:
        self._knowledge = knowledge
        self._access = FeedAccess() if access is None else access
        self._contexts = self._access.contexts()
        self._followers: dict[str, Follower] = {}
        self._wanted: dict[str, int] = {}

    def follow(self, address: Address) -> str:
        """Follow this feed, for one worker more. Returns what the knowledge calls its node."""
        name = str(address)
        self._wanted[name] = self._wanted.get(name, 0) + 1
        if name not in self._followers and len(self._followers) < MAX_FOLLOWERS:
            follower = Follower(address, self._knowledge, self._access, self._contexts)
            self._followers[name] = follower
            follower.start()
        return name

    async def unfollow(self, name: str) -> None:
        """For one worker less; the last one's ends it."""
        left = self._wanted.get(name, 0) - 1
        if left > 0:
            self._wanted[name] = left
            return
        self._wanted.pop(name, None)
        follower = self._followers.pop(name, None)
        if follower is not None:
            await follower.close()

    def prefetch(self, name: str, namespace: bytes, digests: bytes) -> bool:
        """Tell that node that these chunks will be wanted there. Whether it was told."""
        follower = self._followers.get(name)
        return follower is not None and follower.prefetch(namespace, digests)

    def statistics(self) -> tuple[FollowerStatistics, ...]:
        """A snapshot of each."""
        return tuple(follower.statistics() for follower in self._followers.values())

    async def close(self) -> None:
        """Hang up everywhere. Idempotent."""
        followers, self._followers = list(self._followers.values()), {}
        self._wanted.clear()
        for follower in followers:
            await follower.close()
