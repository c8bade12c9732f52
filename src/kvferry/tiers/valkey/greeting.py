"""The start-up check: are these servers Valkey, may we use them, and what should their owner know?"""

import ssl
import time
from dataclasses import dataclass, field

from kvferry.errors import KvferryError, MisconfiguredError
from kvferry.tiers.valkey.connection import Connection
from kvferry.tiers.valkey.resp import ProtocolError, ServerError
from kvferry.tiers.valkey.settings import ValkeySettings
from kvferry.tiers.valkey.stream import Until
from kvferry.tiers.valkey.topology import SlotRange, parse_slots
from kvferry.tiers.valkey.url import Address

_VERSIONS = ("valkey_version", "redis_version")


@dataclass(frozen=True, slots=True)
class ServerReport:
    """topology: empty for a single server. detail: for people, no secrets."""

    topology: tuple[SlotRange, ...] = ()
    detail: dict[str, str] = field(default_factory=dict)


def inspect_servers(settings: ValkeySettings, *, tls: ssl.SSLContext | None, deadline: float) -> ServerReport:
    """Ask the first seed that answers. MisconfiguredError, one line, if none does or it will not do.

    Seeds share the time that is left, so that some that hang leave the others theirs.
    """
    failures: list[str] = []
    for number, seed in enumerate(settings.url.seeds):
        now = time.monotonic()
        share_s = (deadline - now) / (len(settings.url.seeds) - number)
        try:
            return _inspect(seed, settings, tls=tls, deadline=now + share_s)
        except ProtocolError as error:
            raise MisconfiguredError(f"{seed} does not answer like Valkey: {error}") from error
        except MisconfiguredError:
            raise
        except KvferryError as error:
            failures.append(str(error) if str(seed) in str(error) else f"{seed}: {error}")
    raise MisconfiguredError(
        f"Valkey unreachable at {settings.url}: {'; '.join(failures)}: is it running, is the scheme right?"
    )


def _inspect(
    seed: Address, settings: ValkeySettings, *, tls: ssl.SSLContext | None, deadline: float
) -> ServerReport:
    connection = Connection.open(seed, settings, tls=tls, deadline=deadline)
    patience = Until(deadline)
    try:
        info = connection.request(b"INFO", patience=patience)
        facts = _facts(info) if isinstance(info, bytes) else {}
        if isinstance(info, ServerError) and info.code != "NOPERM":
            raise MisconfiguredError(f"{seed}: INFO failed: {info}: kvferry needs a Valkey server it may use")
        if isinstance(info, bytes) and not any(name in facts for name in _VERSIONS):
            raise MisconfiguredError(f"{seed}: answers INFO, but is neither Valkey nor Redis")
        clustered = settings.url.cluster or facts.get("cluster_enabled") == "1"
        topology: tuple[SlotRange, ...] = ()
        if clustered:
            reply = connection.request(b"CLUSTER", b"SLOTS", patience=patience)
            if isinstance(reply, ServerError):
                raise MisconfiguredError(f"{seed}: not a usable Cluster: {reply}")
            topology = parse_slots(reply, asked=seed)
            if not topology:
                raise MisconfiguredError(
                    f"{seed}: a Cluster without slots: create it first (valkey-cli --cluster create)"
                )
    finally:
        connection.close()
    return ServerReport(topology, _detail(facts, topology))


def _facts(info: bytes) -> dict[str, str]:
    pairs = (line.partition(":") for line in info.decode("utf-8", "replace").splitlines())
    return {name: value for name, colon, value in pairs if colon}


def _detail(facts: dict[str, str], topology: tuple[SlotRange, ...]) -> dict[str, str]:
    names = [name for name in _VERSIONS if name in facts]
    detail = {"server": f"{names[0].removesuffix('_version')} {facts[names[0]]}" if names else "unknown"}
    detail["mode"] = (
        f"cluster of {len({slots.address for slots in topology})} shards" if topology else "single server"
    )
    warning = _warning(facts)
    if warning:
        detail["warning"] = warning
    return detail


def _warning(facts: dict[str, str]) -> str:
    policy = facts.get("maxmemory_policy", "")
    if policy.startswith("volatile-"):
        return (
            f"maxmemory-policy {policy} never evicts kvferry's values, which have no expiry: use allkeys-lru"
        )
    if facts.get("maxmemory") == "0":
        return "maxmemory is not set: the server grows until the host runs out; set it, with allkeys-lru"
    if policy == "noeviction":
        return "maxmemory-policy noeviction: stores are refused once memory is full; use allkeys-lru"
    return ""
