"""How a node is let in by keepers, and how it knows that they are its own."""

from typing import TYPE_CHECKING

from kvferry.access import Access

if TYPE_CHECKING:
    from kvferry.certificates import Contexts


class KeeperAccess(Access):
    """Of a node, to its keepers."""

    __slots__ = ()

    def contexts(self) -> "Contexts | None":
        """Makes one for each connection. Raises MisconfiguredError for files that cannot be used."""
        from kvferry.keeper.tls import ENDS

        return self.contexts_for(ENDS)
