"""A node's decisions without threads or sockets: its ``App`` on a clock that only the machine moves."""

from dataclasses import dataclass, field
from hashlib import sha256
from typing import NoReturn

import xxhash
from tests.node.machine_keepers import ScriptedKeepers
from tests.node.machine_tier import ScriptedTier

from kvferry import __version__
from kvferry.errors import KvferryError
from kvferry.frames import LENGTH
from kvferry.identity.names import PartKey
from kvferry.loop import Loop
from kvferry.node.app import App
from kvferry.node.framing import decode_from_client, decode_from_node, encode
from kvferry.node.state import Namespace, NodeState
from kvferry.node.wire import PROTOCOL, Attach, FromNode, Hello, Message, Role
from kvferry.pool.catalogue import Catalogue
from kvferry.pool.slots import PAGE_BYTES, SlotAllocator

SLAB_BYTES = 4 * PAGE_BYTES
POOL_BYTES = 7 * SLAB_BYTES
DEADLINE_CAP_S = 4.0
MAX_TURNS = 50  # that one event may lead to before the node counts as spinning
READER = 3  # an owner that nothing in the node uses

WIDE = Namespace(b"test" + b"w" * 12, (PAGE_BYTES - 5, 0, 2 * PAGE_BYTES), 16, "test", "two parts")
ODD = Namespace(b"test" + b"o" * 12, (3 * PAGE_BYTES - 7,), 16, "test", "one part")
STATE = 2  # the number of a part
HYBRID = Namespace(
    b"test" + b"h" * 12, (PAGE_BYTES, 2 * PAGE_BYTES - 9, PAGE_BYTES), 16, "test", "hybrid", (0, 2, 1)
)
SPACES = (WIDE, HYBRID, ODD)

DIGESTS = [bytes([index]) * 32 for index in range(10)]
PROMPTS = (DIGESTS[:6], [*DIGESTS[:2], *DIGESTS[6:9]], [DIGESTS[9]], [*DIGESTS[:2], *DIGESTS[:2]])
KEYS = [
    PartKey(space.namespace, digest, part) for space in SPACES for digest in DIGESTS for part in space.parts
]


def part_bytes(key: PartKey) -> int:
    """Of the part with that name."""
    space = next(space for space in SPACES if space.namespace == key.namespace)
    return space.part_bytes[key.part]


def _content(key: PartKey) -> bytes:
    nbytes = part_bytes(key)
    seed = sha256(key.namespace + key.chunk + bytes([key.part])).digest()
    return (seed * (nbytes // len(seed) + 1))[:nbytes]


CONTENT = {key: _content(key) for key in KEYS}  # a name says what the bytes are
CHECKSUMS = {key: (xxhash.xxh3_128_digest(content),) for key, content in CONTENT.items()}


class Clock:
    """Moved by hand."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class PlainArena:
    """The pool's memory, unmapped and unsealed."""

    fd = -1
    closed = False

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self._memory = memoryview(bytearray(nbytes))

    def view(self, offset: int, nbytes: int) -> memoryview:
        """Writable bytes [offset, offset + nbytes)."""
        assert 0 <= offset <= offset + nbytes <= self.nbytes
        return self._memory[offset : offset + nbytes]


@dataclass(eq=False)
class Peer:
    """Stands where the node has a ``server.Connection``. inbox: what the node has sent, oldest first."""

    number: int
    hello: Hello
    inbox: list[FromNode] = field(default_factory=list[FromNode])
    alive: bool = True

    def send(self, message: Message) -> None:
        """What goes to the client is what the wire can carry."""
        if self.alive:
            self.inbox.append(decode_from_node(encode(message)[LENGTH.size :]))

    def send_now(self, message: Message, descriptor: int) -> None:
        """As ``send``."""
        del descriptor
        self.send(message)


class World:
    """One node process. tier: None for a node of memory alone."""

    def __init__(
        self,
        clock: Clock,
        *,
        tier: ScriptedTier | None,
        epoch: int,
        keepers: ScriptedKeepers | None = None,
    ) -> None:
        self.clock = clock
        self.tier = tier
        self.keepers = keepers
        self.loop = Loop(after_turn=self._after_turn, clock=clock)
        self.arena = PlainArena(POOL_BYTES)
        self.state = NodeState(
            loop=self.loop,
            arena=self.arena,  # type: ignore[arg-type]
            catalogue=Catalogue(SlotAllocator(POOL_BYTES, SLAB_BYTES)),
            tier=tier,
            keepers=keepers,
            epoch=epoch,
            deadline_cap_s=DEADLINE_CAP_S,
        )
        self.app = App(self.state, statistics=_no_statistics)
        self._numbers = 0

    def connect(self, role: Role, engine: str) -> Peer:
        """A client that has said hello and attached every namespace."""
        self._numbers += 1
        hello = Hello(protocol=PROTOCOL, version=__version__, role=role, engine=engine)
        peer = Peer(self._numbers, hello)
        self.app.welcome(peer, hello)  # type: ignore[arg-type]
        if role is not Role.ADMIN:
            for space in SPACES:
                self.say(
                    peer,
                    Attach(
                        namespace=space.namespace,
                        part_bytes=space.part_bytes,
                        chunk_tokens=space.chunk_tokens,
                        domain=space.domain,
                        label=space.label,
                        trailing=space.trailing,
                    ),
                )
        return peer

    def say(self, peer: Peer, message: Message) -> bool:
        """A client's message reaches the node. False: the node has closed that connection over it."""
        assert peer.alive
        try:
            self.app.message(peer, decode_from_client(encode(message)[LENGTH.size :]))  # type: ignore[arg-type]
        except KvferryError:
            self.hang_up(peer)
        return peer.alive

    def hang_up(self, peer: Peer) -> None:
        """The connection is gone."""
        peer.alive = False
        self.app.closed(peer)  # type: ignore[arg-type]

    def settle(self) -> None:
        """Let the loop wake up until nothing is left that it woke up for."""
        turns = 1
        self.loop.turn(0.0)
        while self.loop._posted:
            turns += 1
            assert turns < MAX_TURNS, "the loop spins"
            self.loop.turn(0.0)

    def visible(self, key: PartKey) -> tuple[memoryview, tuple[bytes, ...]] | None:
        """What a reader of the pool would see under that name."""
        slot = self.state.catalogue.pin(key, READER)
        if slot is None:
            return None
        self.state.catalogue.unpin(key, READER)
        return self.arena.view(slot.offset, slot.nbytes), slot.checksums

    def _after_turn(self) -> None:
        self.app.after_turn()

    def close(self) -> None:
        """The node process ends."""
        if self.keepers is not None:
            self.keepers.close()
        if self.tier is not None:
            self.tier.close()
        self.loop.close()


def _no_statistics() -> NoReturn:
    raise AssertionError("nobody asks for statistics here")
