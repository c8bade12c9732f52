"""How a node is let in by keepers, and how it knows that they are its own."""

import ssl
from collections.abc import Callable
from dataclasses import dataclass, field

from kvferry.tiers.valkey.url import TlsFiles


@dataclass(frozen=True, slots=True)
class KeeperAccess:
    """token: what keepers want shown; empty: none. tls: None speaks plainly, else keepers are verified."""

    token: str = field(default="", repr=False)
    tls: TlsFiles | None = None

    def contexts(self) -> Callable[[], ssl.SSLContext] | None:
        """Makes one for each connection. Raises MisconfiguredError for files that cannot be used."""
        return None
