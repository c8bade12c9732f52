"""A Cluster's map of slots, as its servers tell it: CLUSTER SLOTS, and MOVED and ASK replies."""

import re
from typing import NamedTuple

from kvferry.addresses import Address
from kvferry.errors import MisconfiguredError
from kvferry.tiers.valkey.connection import Connection
from kvferry.tiers.valkey.resp import ProtocolError, Reply, ServerError
from kvferry.tiers.valkey.settings import ValkeySettings
from kvferry.tiers.valkey.slots import SLOTS
from kvferry.tiers.valkey.stream import Until
from kvferry.tiers.valkey.tls import Tls


class SlotRange(NamedTuple):
    """Slots ``first`` to ``last``, both included, are served by the primary at ``address``."""

    first: int
    last: int
    address: Address


def parse_slots(reply: Reply, *, asked: Address) -> tuple[SlotRange, ...]:
    """The ranges in a CLUSTER SLOTS reply; an unknown host means the server that was asked.

    ProtocolError if the reply has another shape.
    """
    if not isinstance(reply, list):
        raise ProtocolError(f"unexpected reply to CLUSTER SLOTS: {reply!r}")
    return tuple(_parse_range(entry, asked) for entry in reply)


def _parse_range(entry: Reply, asked: Address) -> SlotRange:
    match entry:
        case [int(first), int(last), [(bytes() | None) as host, int(port), *_], *_] if (
            0 <= first <= last < SLOTS and 0 < port <= 65535
        ):
            name = host.decode("utf-8", "replace") if host else ""
            return SlotRange(first, last, Address(name if name not in ("", "?") else asked.host, port))
    raise ProtocolError(f"unexpected entry in the reply to CLUSTER SLOTS: {entry!r}")


def parse_redirect(error: ServerError, *, asked: Address) -> Address | None:
    """The target of ``MOVED slot host:port`` or ``ASK slot host:port``; None if it makes no sense."""
    words = str(error).split()
    host, colon, port = words[2].rpartition(":") if len(words) >= 3 else ("", "", "")
    if not colon or not re.fullmatch("[0-9]{1,5}", port) or not 0 < int(port) <= 65535:
        return None
    return Address(host.strip("[]") or asked.host, int(port))


def ask_topology(
    address: Address, settings: ValkeySettings, *, tls: Tls | None, deadline: float
) -> tuple[SlotRange, ...]:
    """The Cluster's map, asked of one server. Raises what ``Connection.open`` does, or MisconfiguredError."""
    connection = Connection.open(address, settings, tls=tls, deadline=deadline)
    try:
        reply = connection.request(b"CLUSTER", b"SLOTS", patience=Until(deadline))
    finally:
        connection.close()
    if isinstance(reply, ServerError):
        raise MisconfiguredError(f"{address}: no Cluster map: {reply}")
    return parse_slots(reply, asked=address)
