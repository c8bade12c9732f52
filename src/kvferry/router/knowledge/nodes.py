"""What the feed of one node has said of its engines and tiers. Pure."""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

from kvferry.costs import PrefillModel
from kvferry.feed.wire import Level

MAX_NODES = 4096
MAX_ENGINES = 64  # of one node
MAX_SPACES = 64
MAX_ENGINE_CHUNKS = 1 << 19  # of all engines together


@dataclass(frozen=True, slots=True)
class Space:
    """number: of the namespace, for all nodes."""

    number: int
    namespace: bytes
    label: str
    chunk_tokens: int
    chunk_bytes: int


@dataclass(frozen=True, slots=True)
class TierSpeed:
    """Of one level at one node."""

    latency_s: float
    bytes_per_s: float


class EngineChunks:
    """The chunks an engine should hold: what it used last, as far as its cache goes."""

    def __init__(self) -> None:
        self._chunks: OrderedDict[int, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._chunks)

    def used(self, chunks: Sequence[int], *, limit: int) -> list[int]:
        """These have been computed or used, heads before tails. Returns what had to go for them."""
        for chunk in reversed(chunks):  # tails go first, as in an engine
            self._chunks[chunk] = None
            self._chunks.move_to_end(chunk)
        return [self._chunks.popitem(last=False)[0] for _ in range(len(self._chunks) - limit)]


@dataclass(slots=True, eq=False)
class Engine:
    """tells: its own KV events are followed, so what it holds need not be derived."""

    name: str
    space: Space | None = None
    cache_tokens: int = 0
    prefill: PrefillModel | None = None
    tells: bool = False
    chunks: EngineChunks = field(default_factory=EngineChunks)


@dataclass(slots=True, eq=False)
class Node:
    """behind: the Valkey behind it, or its own disk. Numbers are those of the node's epoch."""

    name: str
    behind: str = ""
    spaces: dict[int, Space] = field(default_factory=dict[int, Space])
    engines: dict[int, Engine] = field(default_factory=dict[int, Engine])
    tiers: dict[Level, TierSpeed] = field(default_factory=dict[Level, TierSpeed])
    followed: bool = True
