"""Which keepers share the search in Valkey: those of a list that said there that they are, lately. Pure.

Each leaves a key there that expires, and sees the others' on its way through all keys. Who was seen in
neither of the last two passes has no share. A keeper that does not see its own, since it may not write it or
Valkey has no room, takes all of the list to be there: better a gap than everything many times.
"""

from collections.abc import Iterable

from kvferry.keeper.rendezvous import owner
from kvferry.tiers.valkey.keyspace import parse_keeper


class Sharers:
    """name: of this keeper. keepers: the list; empty: it is alone."""

    def __init__(self, name: str, keepers: tuple[str, ...]) -> None:
        self._name = name
        self._all = tuple(dict.fromkeys(keepers))
        self._before: set[str] = set(self._all)
        self._now: set[str] = set()
        self._sharing = self._all

    def owns(self, chunk: bytes) -> bool:
        """Whether it is this keeper's share."""
        return not self._all or owner(chunk, self._sharing) == self._name

    def saw(self, names: Iterable[bytes]) -> None:
        """These keys are there."""
        for name in names if self._all else ():
            keeper = parse_keeper(name)
            if keeper is not None:
                self._now.add(keeper)

    def end_pass(self) -> None:
        """All keys were seen."""
        if self._name in self._now:
            here = self._before | self._now
            self._sharing = tuple(name for name in self._all if name in here)
            self._before = self._now
        else:
            self._sharing, self._before = self._all, set(self._all)
        self._now = set()
