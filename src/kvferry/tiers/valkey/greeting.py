"""The start-up check: are these servers Valkey, may we use them, and what should their owner know?"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from kvferry.addresses import Address
from kvferry.errors import KvferryError, MisconfiguredError
from kvferry.tiers.awaited import UnansweredError
from kvferry.tiers.valkey.acl import KEY_PREFIX
from kvferry.tiers.valkey.connection import Connection
from kvferry.tiers.valkey.lifetimes import Lifetimes, after_info, warning
from kvferry.tiers.valkey.login import whose
from kvferry.tiers.valkey.resp import ProtocolError, Reply, ServerError, info_facts
from kvferry.tiers.valkey.settings import ValkeySettings
from kvferry.tiers.valkey.stream import Until
from kvferry.tiers.valkey.tls import Tls
from kvferry.tiers.valkey.topology import SlotRange, parse_slots

_VERSIONS = ("valkey_version", "redis_version")
MAX_SHARDS_CHECKED = 16
_SHOWN = 3
_PROBE_KEY = f"{KEY_PREFIX}probe".encode()
_COMMAND_DENIED = "permissions to run"  # the other NOPERM is about a key


class UnreachableServersError(UnansweredError):
    """No server answers: a wrong address, or one that is down for now."""


@dataclass(frozen=True, slots=True)
class ServerReport:
    """topology: empty for a single server. detail: for people, no secrets.

    lifetimes: of what is written; None where the server does not evict by expiry, or does not say.
    informed: whether the server says what its settings are.
    """

    topology: tuple[SlotRange, ...] = ()
    lifetimes: Lifetimes | None = None
    informed: bool = False
    detail: dict[str, str] = field(default_factory=dict)


def inspect_servers(settings: ValkeySettings, *, tls: Tls | None, deadline: float) -> ServerReport:
    """Ask the first seed that answers. MisconfiguredError, one line, if it will not do.

    UnreachableServersError if none answers.
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
    plain_port = tls is None and any(seed.port for seed in settings.url.seeds)  # a Unix socket speaks no TLS
    other = "is it running, or does it speak TLS (valkeys://)?" if plain_port else "is it running?"
    raise UnreachableServersError(f"Valkey unreachable at {settings.url}: {'; '.join(failures)}: {other}")


def _inspect(seed: Address, settings: ValkeySettings, *, tls: Tls | None, deadline: float) -> ServerReport:
    connection = Connection.open(seed, settings, tls=tls, deadline=deadline)
    patience = Until(deadline)
    try:
        info = connection.request(b"INFO", patience=patience)
        if isinstance(info, ServerError) and info.code != "NOPERM":
            raise MisconfiguredError(f"{seed}: INFO failed: {info}: kvferry needs a Valkey server it may use")
        facts = info_facts(info) if isinstance(info, bytes) else {}
        if isinstance(info, bytes) and not any(name in facts for name in _VERSIONS):
            raise MisconfiguredError(f"{seed}: answers INFO, but is neither Valkey nor Redis")
        clustered = settings.url.cluster or facts.get("cluster_enabled") == "1"
        topology: tuple[SlotRange, ...] = ()
        if clustered or not facts:
            reply = connection.request(b"CLUSTER", b"SLOTS", patience=patience)
            topology = _topology(reply, seed, settings, expected=clustered)
        lifetimes = after_info(None, facts)
        denied = _denied(connection, patience, clustered=bool(topology), expiring=lifetimes is not None)
        if denied:
            raise _forbidden(seed, settings, denied)
    finally:
        connection.close()
    if topology:
        _check_shards(topology, seed, settings, tls=tls, deadline=deadline, expiring=lifetimes is not None)
    return ServerReport(topology, lifetimes, bool(facts), _detail(facts, topology))


def _check_shards(
    topology: Sequence[SlotRange],
    seed: Address,
    settings: ValkeySettings,
    *,
    tls: Tls | None,
    deadline: float,
    expiring: bool,
) -> None:
    """Users and certificates are each server's own, and the map may name what nobody reaches from here.

    One shard that is down is no reason not to start. Raises MisconfiguredError.
    """
    addresses = list(dict.fromkeys(slots.address for slots in topology))
    others = [address for address in addresses if address != seed][:MAX_SHARDS_CHECKED]
    answered = len(addresses) - len(others)  # the seed, where it is one, and those that are not asked
    failure = ""
    for number, address in enumerate(others):
        now = time.monotonic()
        share_s = (deadline - now) / (len(others) - number)
        try:
            connection = Connection.open(address, settings, tls=tls, deadline=now + share_s)
            try:
                denied = _denied(connection, Until(now + share_s), clustered=True, expiring=expiring)
            finally:
                connection.close()
        except MisconfiguredError as error:
            raise MisconfiguredError(f"a shard of {seed}: {error}") from error
        except KvferryError as error:
            failure = str(error)
            continue
        if denied:
            raise _forbidden(address, settings, denied)
        answered += 1
    if not answered:
        raise MisconfiguredError(
            f"{seed}: its Cluster names {', '.join(map(str, others[:_SHOWN]))}, where nobody answers: "
            f"{failure}: set cluster-announce-ip or -hostname, the ports and tls-cluster there to what nodes "
            "can reach"
        )


def _topology(
    reply: Reply, seed: Address, settings: ValkeySettings, *, expected: bool
) -> tuple[SlotRange, ...]:
    """The Cluster's map; empty for a single server, which answers with an error."""
    if isinstance(reply, ServerError):
        if reply.code == "NOPERM":
            raise _forbidden(seed, settings, ["cluster|slots"])
        if expected:
            raise MisconfiguredError(f"{seed}: not a usable Cluster: {reply}")
        return ()
    topology = parse_slots(reply, asked=seed)
    if not topology:
        raise MisconfiguredError(
            f"{seed}: a Cluster without slots: create it first (valkey-cli --cluster create)"
        )
    return topology


def _denied(connection: Connection, patience: Until, *, clustered: bool, expiring: bool) -> list[str]:
    """The commands that this user may not run, by trying each on a key that is never there.

    expiring: whether values will have an expiry; one of no time at all is refused and leaves nothing.
    Servers look at permissions before anything else, so that a redirect or full memory is as good as a yes.
    Whether the user may use the keys of a domain cannot be told here: which domain that is, the engines know.
    """
    probes = [
        ("get", (b"GET", _PROBE_KEY)),
        ("set", (b"SET", _PROBE_KEY, b"", b"XX")),
        ("touch", (b"TOUCH", _PROBE_KEY)),
        ("unlink", (b"UNLINK", _PROBE_KEY)),
    ]
    if expiring:
        probes.append(("psetex", (b"PSETEX", _PROBE_KEY, b"0", b"")))
        probes.append(("pexpire", (b"PEXPIRE", _PROBE_KEY, b"1")))
    if clustered:
        probes.append(("asking", (b"ASKING",)))
    replies = [(name, connection.request(*words, patience=patience)) for name, words in probes]
    return [
        name
        for name, reply in replies
        if isinstance(reply, ServerError) and reply.code == "NOPERM" and _COMMAND_DENIED in str(reply)
    ]


def _forbidden(seed: Address, settings: ValkeySettings, commands: Sequence[str]) -> MisconfiguredError:
    rules = " ".join(f"+{name}" for name in commands)
    return MisconfiguredError(
        f"{seed}: {whose(settings.url)} may not run {', '.join(commands)}: add {rules} there; "
        "kvferry flags valkey prints the whole ACL SETUSER line (with --keeper that of a keeper)"
    )


def _detail(facts: dict[str, str], topology: tuple[SlotRange, ...]) -> dict[str, str]:
    names = [name for name in _VERSIONS if name in facts]
    detail = {"server": f"{names[0].removesuffix('_version')} {facts[names[0]]}" if names else "unknown"}
    detail["mode"] = (
        f"cluster of {len({slots.address for slots in topology})} shards" if topology else "single server"
    )
    advice = warning(facts)
    if advice:
        detail["warning"] = advice
    return detail
