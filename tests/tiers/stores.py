"""Valkey as the tier contract sees it: real servers that can be stopped, and values that can be changed."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from tests.servers import Server, must

from kvferry.identity.names import PartRef
from kvferry.identity.stripes import stripe_plan
from kvferry.testing.tier_contract import Damage
from kvferry.tiers.valkey.jobs import stripe_key
from kvferry.tiers.valkey.settings import ValkeySettings
from kvferry.tiers.valkey.tier import ValkeyTier


class ValkeyStore:
    """``TierStore`` over one server or all shards of a Cluster. settings: of a new tier."""

    def __init__(self, servers: Sequence[Server], settings: Callable[[], ValkeySettings]) -> None:
        self._servers = servers
        self._settings = settings
        self._suffix = settings().protection.suffixes[0]

    def open(self) -> ValkeyTier:
        return ValkeyTier.connect(self._settings())

    @contextmanager
    def outage(self) -> Iterator[None]:
        for server in self._servers:
            server.pause()
        try:
            yield
        finally:
            for server in self._servers:
                server.resume()

    def damage(self, ref: PartRef, how: Damage) -> None:
        """Its last stripe."""
        key = self._key(ref, stripe_plan(ref.nbytes)[-1].index)
        owner, value = self._find(key)
        middle = len(value) // 2
        match how:
            case Damage.BIT_FLIP:
                value = value[:middle] + bytes([value[middle] ^ 1]) + value[middle + 1 :]
            case Damage.TRUNCATION:
                value = value[:-1]
            case Damage.EXTENSION:
                value += b"x"
        must(owner.ask("SET", key, value))

    def misplace(self, source: PartRef, under: PartRef) -> None:
        """Every stripe."""
        for stripe in stripe_plan(source.nbytes):
            _, value = self._find(self._key(source, stripe.index))
            owner, _ = self._find(self._key(under, stripe.index))
            must(owner.ask("SET", self._key(under, stripe.index), value))

    def _key(self, ref: PartRef, stripe: int) -> bytes:
        return stripe_key(ref.key, stripe, self._suffix)

    def _find(self, key: bytes) -> tuple[Server, bytes]:
        """The shard that has the key, and its value."""
        for server in self._servers:
            value = server.ask("GET", key)
            if isinstance(value, bytes):
                return server, value
        raise AssertionError(f"no server has {key!r}")
