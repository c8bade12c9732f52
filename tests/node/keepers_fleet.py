"""Hosts that share one Valkey and real keepers, for tests of what lies below Valkey."""

from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path

from tests.node.fleet import Engine, settings
from tests.servers import Server

from kvferry.addresses import Address
from kvferry.client.messages import NamespaceInfo
from kvferry.config import NodeSettings
from kvferry.identity.sealing import KeyRing
from kvferry.keeper.app import KeeperProcess
from kvferry.keeper.settings import KeeperSettings
from kvferry.keeper.statistics import KeeperStatistics, LineStatistics
from kvferry.node.node import Node
from kvferry.testing.expectations import eventually
from kvferry.testing.proxy import Proxy
from kvferry.tiers.valkey.url import parse_url

DISK_BYTES = 128 << 20
PART_BYTES = 256 << 10
SMALL = NamespaceInfo(b"test" + b"k" * 12, (PART_BYTES,), 128, "test", "small")
MIXED = NamespaceInfo(
    b"test" + b"x" * 12, (PART_BYTES, 64 << 10, 128 << 10), 128, "test", "mixed", trailing=(0, 2, 1)
)
ANY_PORT = Address("127.0.0.1", 0)


@dataclass
class KeptFleet:
    """keepers: nodes know those that were started before them; through ``proxies``, if there are any.

    keys: of nodes that encrypt.
    """

    path: Path
    server: Server
    stack: ExitStack
    keys: KeyRing | None = None
    keepers: list[KeeperProcess] = field(default_factory=list[KeeperProcess])
    proxies: list[Proxy] = field(default_factory=list[Proxy])
    nodes: list[Node] = field(default_factory=list[Node])

    def keeper(
        self, *, disk: bool = True, objects: bool = False, listen: Address = ANY_PORT
    ) -> KeeperProcess:
        """One more, with a disk of its own; objects: a directory that all share."""
        name = f"keeper{len(self.keepers)}"
        started = KeeperProcess(
            KeeperSettings(
                valkey=parse_url(self.server.url),
                listen=listen,
                name=name,
                disk=self.path / name if disk else None,
                disk_bytes=DISK_BYTES if disk else None,
                objects=f"file://{self.path / 'objects'}" if objects else None,
                key_ids=() if self.keys is None else tuple(key.key_id for key in self.keys.keys),
                metrics_port=0,
            )
        )
        self.stack.callback(started.close)
        started.start()
        self.keepers.append(started)
        return started

    def host(self, namespace: NamespaceInfo = SMALL, *, deadline_cap_ms: int = 30_000) -> tuple[Node, Engine]:
        """One more node, with an engine, once it knows the keepers."""
        node = Node(self.settings(deadline_cap_ms))
        self.stack.callback(node.close)
        node.start()
        self.nodes.append(node)
        engine = Engine(node.settings.socket_path, namespace)
        self.stack.callback(engine.close)
        eventually(lambda: keepers_up(node) == len(self.keepers), "keepers that are up")
        return node, engine.connected()

    def settings(self, deadline_cap_ms: int) -> NodeSettings:
        """Of the next node."""
        place = self.path / f"host{len(self.nodes)}"
        place.mkdir(mode=0o700)
        return replace(
            settings(place, deadline_cap_ms=deadline_cap_ms),
            valkey=parse_url(self.server.url),
            encryption_keys=self.keys,
            keepers=tuple(self.addresses()),
        )

    def addresses(self) -> list[Address]:
        """Where nodes find the keepers."""
        if self.proxies:
            return [Address("127.0.0.1", proxy.port) for proxy in self.proxies]
        return [keeper.address for keeper in self.keepers]

    def proxy(self, keeper: KeeperProcess) -> Proxy:
        """Between the keeper and the nodes that are started from now on."""
        proxy = Proxy((keeper.address.host, keeper.address.port))
        self.stack.callback(proxy.close)
        self.proxies.append(proxy)
        return proxy

    def kept(self, parts: int, *, in_objects: bool = False) -> None:
        """Wait until so many parts were copied, to the disks or to objects, and no more are due."""

        def settled() -> bool:
            lines = [line(keeper.statistics().keeper, in_objects=in_objects) for keeper in self.keepers]
            return sum(one.copied_parts for one in lines) >= parts and not any(one.parts for one in lines)

        eventually(settled, f"{parts} parts below Valkey")

    def empty_valkey(self) -> None:
        """As if everything had been evicted."""
        self.server.ask("FLUSHALL")


def line(statistics: KeeperStatistics, *, in_objects: bool) -> LineStatistics:
    """Copies to objects, or to the disk."""
    found = statistics.flush if in_objects else statistics.keep
    assert found is not None
    return found


def keepers_up(node: Node) -> int:
    """How many a node is connected to."""
    found = node.statistics().keepers
    return 0 if found is None else found.up
