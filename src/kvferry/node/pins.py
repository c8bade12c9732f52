"""What each connection holds of the pool for its loads, and its bound. Pure.

A connection's loads and lookups are owners of pins in the catalogue. Together they may hold a constant
share of the pool: what is pinned for them or on its way for them, each part counted once however many of
them want it. A load that reaches the bound waits for its own connection's loads; nobody else's wait for it.
"""

from collections import Counter
from collections.abc import Hashable
from dataclasses import dataclass, field

from kvferry.errors import BrokenError
from kvferry.identity.names import PartKey
from kvferry.pool.catalogue import Catalogue
from kvferry.pool.entries import Owner, Slot

SHARE_DIVISOR = 2  # one connection may hold this fraction of the pool


@dataclass(slots=True)
class _Account:
    """nbytes: of the parts in ``holders``, which counts those of ``owners`` that hold each."""

    nbytes: int = 0
    owners: set[Owner] = field(default_factory=set[Owner])
    holders: dict[PartKey, int] = field(default_factory=dict[PartKey, int])


@dataclass(slots=True)
class _Owned:
    account: _Account
    parts: dict[PartKey, int] = field(default_factory=dict[PartKey, int])  # its size


class Pins:
    """Of the whole node; loop thread only."""

    def __init__(self, catalogue: Catalogue, *, pool_bytes: int) -> None:
        self._catalogue = catalogue
        self._limit_bytes = pool_bytes // SHARE_DIVISOR
        self._owners: dict[Owner, _Owned] = {}
        self._accounts: dict[Hashable, _Account] = {}

    def open(self, owner: Owner, connection: Hashable) -> None:
        """A new owner, whose parts count as the connection's until ``release``."""
        account = self._accounts.get(connection)
        if account is None:
            account = self._accounts[connection] = _Account()
        account.owners.add(owner)
        self._owners[owner] = _Owned(account)

    def close(self, connection: Hashable) -> None:
        """The connection is gone, its loads and lookups are over: what a defect left of them is released."""
        account = self._accounts.pop(connection, None)
        for owner in [] if account is None else list(account.owners):
            self.release(owner)

    def held_bytes(self, connection: Hashable) -> int:
        """What the connection's owners hold now."""
        account = self._accounts.get(connection)
        return 0 if account is None else account.nbytes

    def has_room(self, key: PartKey, nbytes: int, owner: Owner) -> bool:
        """Whether the owner may hold this part too. One part fits in any case."""
        account = self._owners[owner].account
        return not account.nbytes or key in account.holders or account.nbytes + nbytes <= self._limit_bytes

    def pin(self, key: PartKey, owner: Owner) -> Slot | None:
        """As ``Catalogue.pin``."""
        slot = self._catalogue.pin(key, owner)
        if slot is not None:
            self.expect(key, slot.nbytes, owner)
        return slot

    def pin_in_share(self, key: PartKey, nbytes: int, owner: Owner) -> Slot | None:
        """``has_room`` and ``pin`` in one, for the many parts of a lookup; None when either says no."""
        owned = self._owners[owner]
        account = owned.account
        holders = account.holders.get(key, 0)
        if not holders and account.nbytes and account.nbytes + nbytes > self._limit_bytes:
            return None
        slot = self._catalogue.pin(key, owner)
        if slot is not None and key not in owned.parts:
            owned.parts[key] = nbytes
            account.holders[key] = holders + 1
            if not holders:
                account.nbytes += nbytes
        return slot

    def expect(self, key: PartKey, nbytes: int, owner: Owner) -> None:
        """The part is on its way for this owner, who will pin it; it counts as held from now on."""
        owned = self._owners[owner]
        if key in owned.parts:
            return
        owned.parts[key] = nbytes
        account = owned.account
        holders = account.holders.get(key, 0)
        account.holders[key] = holders + 1
        if not holders:
            account.nbytes += nbytes

    def unpin(self, key: PartKey, owner: Owner) -> None:
        """As ``Catalogue.unpin``."""
        self._catalogue.unpin(key, owner)
        self.forget(key, owner)

    def forget(self, key: PartKey, owner: Owner) -> None:
        """It does not come, or is not waited for any more."""
        owned = self._owners[owner]
        nbytes = owned.parts.pop(key, None)
        if nbytes is not None:
            _drop(owned.account, key, nbytes)

    def check(self) -> None:
        """Raise BrokenError when the books do not balance; for tests."""
        for account in {id(owned.account): owned.account for owned in self._owners.values()}.values():
            _check_account(account, [owned for owned in self._owners.values() if owned.account is account])
        idle = [account for account in self._accounts.values() if account.nbytes or account.holders]
        if any(all(owned.account is not account for owned in self._owners.values()) for account in idle):
            raise BrokenError("a connection holds a share of the pool, and none of its loads does")

    def release(self, owner: Owner) -> None:
        """End everything the owner holds. Idempotent."""
        self._catalogue.release_owner(owner)
        owned = self._owners.pop(owner, None)
        if owned is None:
            return
        owned.account.owners.discard(owner)
        for key, nbytes in owned.parts.items():
            _drop(owned.account, key, nbytes)


def _check_account(account: _Account, owners: list[_Owned]) -> None:
    holders = Counter(key for owned in owners for key in owned.parts)
    sizes = {key: nbytes for owned in owners for key, nbytes in owned.parts.items()}
    if holders != account.holders or sum(sizes.values()) != account.nbytes:
        raise BrokenError(f"a connection's share: {account.nbytes} bytes counted, {sum(sizes.values())} held")


def _drop(account: _Account, key: PartKey, nbytes: int) -> None:
    account.holders[key] -= 1
    if not account.holders[key]:
        del account.holders[key]
        account.nbytes -= nbytes
