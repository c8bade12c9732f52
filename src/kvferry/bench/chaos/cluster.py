"""A Valkey Cluster with replicas whose servers are killed, stopped, promoted and brought back.

Ports lie below the kernel's ephemeral range: a server that is down must find its port free when it returns.
"""

import contextlib
import random
import signal
import socket
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from kvferry.addresses import Address
from kvferry.demo.processes import Child, Children, wait_until
from kvferry.errors import KvferryError, RetryError
from kvferry.testing.servers import CLUSTER_OPTIONS, SLOTS, must, valkey_binary
from kvferry.tiers.valkey.connection import Connection
from kvferry.tiers.valkey.resp import Reply, ServerError
from kvferry.tiers.valkey.settings import ValkeySettings
from kvferry.tiers.valkey.stream import Until
from kvferry.tiers.valkey.url import ValkeyUrl

SHARDS = 3
FIRST_PORT, LAST_PORT = 12000, 31000
FORM_S = 30.0
ASK_S = 3.0
MEMORY_MB = 96
OPTIONS = (
    *CLUSTER_OPTIONS,
    *("--cluster-replica-validity-factor", "0"),
    *("--cluster-allow-replica-migration", "no"),
    *("--maxmemory", f"{MEMORY_MB}mb"),
    *("--maxmemory-policy", "allkeys-lru"),
    *("--repl-backlog-size", "4mb"),
    *("--client-output-buffer-limit", "replica", "0", "0", "0"),  # on a crowded host a copy takes its time
    *("--save", ""),
    *("--appendonly", "no"),
    *("--bind", "127.0.0.1"),
    *("--daemonize", "no"),
)


@dataclass(frozen=True, slots=True)
class Shard:
    """As the Cluster sees it: indices of its primary and replicas, and its ranges of slots."""

    primary: int
    replicas: tuple[int, ...]
    ranges: tuple[tuple[int, int], ...]


class Member:
    """One server: its directory, ports and, while it runs, its process."""

    def __init__(self, index: int, home: Path, children: Children, *, port: int, bus_port: int) -> None:
        self.index = index
        self.port = port
        self._bus_port = bus_port
        self._home = home
        self._children = children
        self.child: Child | None = None
        home.mkdir()

    @property
    def address(self) -> Address:
        """Where clients reach it."""
        return Address("127.0.0.1", self.port)

    def start(self) -> None:
        """Start it; does not wait until it answers."""
        command = [str(valkey_binary()), "--port", str(self.port), "--cluster-port", str(self._bus_port)]
        command += ["--dir", str(self._home), *OPTIONS]
        self.child = self._children.start(f"valkey-{self.index}", command)

    def start_again(self) -> None:
        """Start it unless it runs: killed, or ended because its port was taken meanwhile."""
        if self.child is not None and self.child.exited():
            self.kill()
        if self.child is None:
            self.start()

    def limit(self, nbytes: str, policy: str) -> None:
        """Its memory, and what it does when that is full."""
        must(self.ask("CONFIG", "SET", "maxmemory", nbytes, "maxmemory-policy", policy))

    def settle_slots(self) -> None:
        """End migrations of slots that nobody goes on with."""
        reply = must(self.ask("CLUSTER", "NODES"))
        lines = reply.decode().splitlines() if isinstance(reply, bytes) else []
        for word in next((line.split() for line in lines if "myself" in line), []):
            if word.startswith("["):
                must(self.ask("CLUSTER", "SETSLOT", word[1:].split("-")[0], "STABLE"))

    def kill(self) -> None:
        """SIGKILL."""
        if self.child is not None:
            self.child.kill_at_once()
            self._children.stop(self.child)
            self.child = None

    def send_signal(self, number: signal.Signals) -> None:
        """To the server's process."""
        if self.child is not None:
            self.child.send_signal(number)

    def ask(self, *words: str | bytes, timeout_s: float = ASK_S) -> Reply:
        """One command, one reply; error replies are returned. Raises KvferryError when it is down."""
        deadline = time.monotonic() + timeout_s
        settings = ValkeySettings(ValkeyUrl((self.address,)))
        connection = Connection.open(self.address, settings, tls=None, deadline=deadline)
        try:
            encoded = [word.encode() if isinstance(word, str) else word for word in words]
            return connection.request(*encoded, patience=Until(deadline))
        finally:
            connection.close()

    def answers(self) -> bool:
        """Whether it does now."""
        with contextlib.suppress(KvferryError):
            return self.ask("PING", timeout_s=0.5) == b"PONG"
        return False

    def node_id(self) -> bytes:
        """Its name in the Cluster."""
        reply = must(self.ask("CLUSTER", "MYID"))
        if not isinstance(reply, bytes):
            raise RetryError(f"CLUSTER MYID answered {reply!r}")
        return reply

    def info(self, section: str) -> dict[str, str]:
        """INFO as a table."""
        reply = must(self.ask("INFO", section))
        lines = reply.decode().splitlines() if isinstance(reply, bytes) else []
        return dict(line.split(":", 1) for line in lines if ":" in line)


@dataclass(slots=True)
class ValkeyCluster:
    """Three primaries, three replicas at first; who is which changes."""

    members: list[Member] = field(default_factory=list)

    @property
    def url(self) -> str:
        """For nodes: every member is a seed, since any of them may be down."""
        return "valkey://" + ",".join(str(member.address) for member in self.members) + "/0"

    def shards(self) -> list[Shard]:
        """As the first member that answers sees it. RetryError when none does."""
        for member in self.members:
            with contextlib.suppress(KvferryError):
                reply = member.ask("CLUSTER", "SLOTS", timeout_s=1.0)
                if isinstance(reply, list):
                    return self._parse(reply)
        raise RetryError("no server of the Cluster answers")

    def whole(self) -> bool:
        """Every member answers and agrees; all slots are served, and each primary has a linked replica."""
        try:
            for member in self.members:
                info = must(member.ask("CLUSTER", "INFO", timeout_s=1.0))
                wanted = {b"cluster_state:ok", b"cluster_slots_ok:%d" % SLOTS, b"cluster_slots_fail:0"}
                if not isinstance(info, bytes) or not wanted <= set(info.split()):
                    return False
                replication = member.info("replication")
                if replication.get("role") == "slave" and replication.get("master_link_status") != "up":
                    return False
            shards = self.shards()
            return len(shards) == SHARDS and all(len(shard.replicas) == 1 for shard in shards)
        except KvferryError:
            return False

    def mend(self) -> None:
        """After a fault that ended early: every server runs, within its limits, and no slot is half moved."""
        for member in self.members:
            member.send_signal(signal.SIGCONT)
            member.start_again()
            with contextlib.suppress(KvferryError):
                wait_until(member.answers, what=f"server {member.index}", timeout_s=FORM_S)
                member.limit(f"{MEMORY_MB}mb", "allkeys-lru")
                member.settle_slots()

    def _parse(self, reply: Sequence[Reply]) -> list[Shard]:
        at = {member.port: member.index for member in self.members}
        found: dict[int, tuple[set[int], list[tuple[int, int]]]] = {}
        for entry in reply:
            match entry:
                case [int(first), int(last), [_, int(primary), *_], *others] if primary in at:
                    replicas, ranges = found.setdefault(at[primary], (set(), []))
                    for other in others:
                        match other:
                            case [_, int(port), *_] if port in at:
                                replicas.add(at[port])
                    ranges.append((first, last))
                case _:
                    raise RetryError(f"CLUSTER SLOTS answered {entry!r}")
        return [Shard(p, tuple(sorted(r)), tuple(ranges)) for p, (r, ranges) in sorted(found.items())]


@contextlib.contextmanager
def running_cluster(children: Children, rng: random.Random) -> Iterator[ValkeyCluster]:
    """Form it and wait until it is whole. The processes belong to ``children``."""
    ports = _free_ports(4 * SHARDS, rng)
    cluster = ValkeyCluster()
    for index in range(2 * SHARDS):
        home = children.directory / f"valkey-{index}"
        member = Member(index, home, children, port=ports[2 * index], bus_port=ports[2 * index + 1])
        member.start()
        cluster.members.append(member)
    for member in cluster.members:
        wait_until(member.answers, what=f"server {member.index}", timeout_s=FORM_S)
    first = cluster.members[0]
    step = -(-SLOTS // SHARDS)
    for index, member in enumerate(cluster.members):
        if index < SHARDS:
            last = min((index + 1) * step, SLOTS) - 1
            must(member.ask("CLUSTER", "ADDSLOTSRANGE", str(index * step), str(last)))
        must(member.ask("CLUSTER", "SET-CONFIG-EPOCH", str(index + 1)))
        if index:
            bus = str(ports[1])
            must(member.ask("CLUSTER", "MEET", "127.0.0.1", str(first.port), bus))
    for index in range(SHARDS, 2 * SHARDS):
        replica, primary = cluster.members[index], cluster.members[index - SHARDS]
        identity = primary.node_id()

        def joined(replica: Member = replica, identity: bytes = identity) -> bool:
            return not isinstance(replica.ask("CLUSTER", "REPLICATE", identity), ServerError)

        wait_until(joined, what=f"replica {index}", timeout_s=FORM_S)
    wait_until(cluster.whole, what="the Cluster", timeout_s=FORM_S, poll_s=0.2)
    yield cluster


def _free_ports(count: int, rng: random.Random) -> list[int]:
    """Different ports that nobody listens on now."""
    found: list[int] = []
    while len(found) < count:
        port = rng.randrange(FIRST_PORT, LAST_PORT)
        with socket.socket() as sock, contextlib.suppress(OSError):
            sock.bind(("127.0.0.1", port))
            if port not in found:
                found.append(port)
    return found
