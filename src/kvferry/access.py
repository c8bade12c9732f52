"""How one process of a fleet is let in by another, and how it knows that it is the right one."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvferry.values import TlsFiles

if TYPE_CHECKING:
    from kvferry.certificates import Contexts
    from kvferry.tls import Ends


@dataclass(frozen=True, slots=True)
class Access:
    """token: what the servers want shown; empty: none. tls: None speaks plainly, else they are verified."""

    token: str = field(default="", repr=False)
    tls: TlsFiles | None = None

    def contexts_for(self, ends: "Ends") -> "Contexts | None":
        """Makes one for each connection. Raises MisconfiguredError for files that cannot be used."""
        if self.tls is None:
            return None
        from kvferry.tls import client_contexts

        return client_contexts(self.tls, ends.labels)
