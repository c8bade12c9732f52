"""How a router is let in by the feeds of nodes, and how it knows that they are its own."""

from typing import TYPE_CHECKING

from kvferry.access import Access
from kvferry.tls import Ends

if TYPE_CHECKING:
    from kvferry.certificates import Contexts

ENDS = Ends(client="router", server="node's feed", settings="feed_tls_", flag="--feed-tls-cert")


class FeedAccess(Access):
    """Of a router, to the nodes that it follows."""

    __slots__ = ()

    def contexts(self) -> "Contexts | None":
        """Makes one for each connection. Raises MisconfiguredError for files that cannot be used."""
        return self.contexts_for(ENDS)
