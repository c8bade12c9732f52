"""How a node is let in by keepers, and how it knows that they are its own."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvferry.values import TlsFiles

if TYPE_CHECKING:
    from kvferry.certificates import Contexts


@dataclass(frozen=True, slots=True)
class KeeperAccess:
    """token: what keepers want shown; empty: none. tls: None speaks plainly, else keepers are verified."""

    token: str = field(default="", repr=False)
    tls: TlsFiles | None = None

    def contexts(self) -> "Contexts | None":
        """Makes one for each connection. Raises MisconfiguredError for files that cannot be used."""
        if self.tls is None:
            return None
        from kvferry.keeper.tls import node_contexts

        return node_contexts(self.tls)
