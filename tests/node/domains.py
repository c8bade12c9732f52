"""Two trust domains, each with a node and an engine of its own, at one Valkey."""

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

from tests.node.fleet import PART_BYTES, Engine, settings
from tests.servers import Server, must

from kvferry.client.messages import NamespaceInfo
from kvferry.identity.chunks import ChunkChain
from kvferry.identity.domain import DomainKey, domain_tag
from kvferry.node.node import Node
from kvferry.tiers.valkey.acl import setuser
from kvferry.tiers.valkey.settings import ValkeySettings
from kvferry.tiers.valkey.tier import ValkeyTier
from kvferry.tiers.valkey.url import ValkeyUrl

CHUNK_TOKENS = 128


@dataclass(frozen=True)
class Domain:
    """A name, a key, and the user that its nodes are at Valkey."""

    name: str
    key: DomainKey

    @property
    def tag(self) -> bytes:
        return domain_tag(self.name, self.key.key_id)

    @property
    def namespace(self) -> NamespaceInfo:
        """Of one model: but for the domain, everything is equal in all of them."""
        return NamespaceInfo(self.tag + b"one model...", (PART_BYTES,), CHUNK_TOKENS, self.name, "model")

    def digests(self, count: int, seed: int = 0) -> list[bytes]:
        """Chunk digests of a prompt; ``seed`` chooses which."""
        chain = ChunkChain(self.key, self.namespace.namespace, chunk_tokens=CHUNK_TOKENS)
        return chain.extend([(seed << 20) + number for number in range(count * CHUNK_TOKENS)])

    def acl(self) -> str:
        """As ``kvferry flags valkey`` prints it, with the password that ``url`` uses."""
        return setuser(self.name, self.tag, password=f"password-of-{self.name}")

    def url(self, *servers: Server) -> ValkeyUrl:
        """Of these servers, as this domain's user."""
        seeds = tuple(server.address for server in servers)
        return ValkeyUrl(seeds, user=self.name, password=f"password-of-{self.name}")


BLUE = Domain("blue", DomainKey(bytes(range(32))))
GREEN = Domain("green", DomainKey(bytes(range(1, 33))))


def grant(server: Server, line: str) -> None:
    """What an operator pastes into valkey-cli."""
    assert must(server.ask(*line.split(" "))) == b"OK"


def host(path: Path, url: ValkeyUrl, stack: ExitStack) -> Node:
    """A running node at this Valkey, whoever its engines are."""
    path.mkdir(mode=0o700)
    node = Node(settings(path), tier=ValkeyTier.connect(ValkeySettings(url)))
    stack.callback(node.close)
    node.start()
    return node


def engine_of(domain: Domain, node: Node, stack: ExitStack, *, namespace: bytes | None = None) -> Engine:
    """A connected engine. namespace: what it says instead of its domain's own."""
    info = domain.namespace if namespace is None else replace(domain.namespace, namespace=namespace)
    engine = Engine(node.settings.socket_path, info, name=domain.name)
    stack.callback(engine.close)
    return engine.connected()


def names(server: Server, domain: Domain, chunks: Sequence[bytes]) -> list[str]:
    """The keys at Valkey of every stripe of these chunks that is there."""
    wanted = [f"kvf1:{domain.namespace.namespace.hex()}:{chunk.hex()}:" for chunk in chunks]
    return [key for key in sorted(k.decode() for k in server.key_names()) if key.startswith(tuple(wanted))]
