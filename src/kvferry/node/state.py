"""What the parts of a node share: the pool, the tier, the loop, and the counts."""

import itertools
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from kvferry.costs import RateEstimate
from kvferry.identity.names import DOMAIN_TAG_BYTES, PartKey, PartRef
from kvferry.node.counters import Counters
from kvferry.node.explain import ExplainRing
from kvferry.node.loop import Loop
from kvferry.node.pins import Pins
from kvferry.node.quota import QuotaTier
from kvferry.pool.arena import Arena
from kvferry.pool.catalogue import Catalogue
from kvferry.pool.entries import Owner
from kvferry.tiers.contract import Tier

FETCHER: Owner = 1  # fills slots from the tier
WRITER: Owner = 2  # pins parts that are on their way to the tier
FIRST_OWNER = 16
MAX_REMEMBERED_EVICTIONS = 65536


@dataclass(frozen=True, slots=True)
class Namespace:
    """As an engine attached it. A part of 0 bytes does not exist. trailing: empty when all are 0."""

    namespace: bytes
    part_bytes: tuple[int, ...]
    chunk_tokens: int
    domain: str
    label: str
    trailing: tuple[int, ...] = ()

    @property
    def tag(self) -> bytes:
        """Of the trust domain (``identity.domain.domain_tag``)."""
        return self.namespace[:DOMAIN_TAG_BYTES]

    @property
    def chunk_bytes(self) -> int:
        """All parts of one chunk together."""
        return sum(self.part_bytes)

    @property
    def parts(self) -> list[int]:
        """The numbers of the parts that exist."""
        return [part for part, nbytes in enumerate(self.part_bytes) if nbytes]

    def refs(self, chunks: Sequence[bytes]) -> list[PartRef]:
        """All parts of these chunks, in order."""
        return [
            PartRef(PartKey(self.namespace, chunk, part), self.part_bytes[part])
            for chunk in chunks
            for part in self.parts
        ]


class Evictions:
    """Which chunks left host memory lately, so that a miss can say so."""

    def __init__(self) -> None:
        self._chunks: OrderedDict[tuple[bytes, bytes], None] = OrderedDict()

    def note(self, keys: Sequence[PartKey]) -> None:
        """These parts were evicted."""
        for key in keys:
            self._chunks[key.namespace, key.chunk] = None
        while len(self._chunks) > MAX_REMEMBERED_EVICTIONS:
            self._chunks.popitem(last=False)

    def has(self, namespace: bytes, chunk: bytes) -> bool:
        """Was it evicted, as far as is remembered?"""
        return (namespace, chunk) in self._chunks


@dataclass(frozen=True, slots=True)
class Limits:
    """Of what a node's trust domain may do behind its memory; None: no limit.

    tier_quota: bytes that the node may hold in the tier. write_rate: bytes per second that it may write.
    """

    tier_quota: int | None = None
    write_rate: int | None = None


@dataclass(slots=True)
class NodeState:
    """Used on the loop's thread only."""

    loop: Loop
    arena: Arena
    catalogue: Catalogue
    tier: Tier | None
    epoch: int
    deadline_cap_s: float
    limits: Limits = Limits()
    quota: QuotaTier | None = None  # the tier, when it is one
    counters: Counters = field(default_factory=Counters)
    explain: ExplainRing = field(default_factory=ExplainRing)
    evictions: Evictions = field(default_factory=Evictions)
    fetch_rate: RateEstimate = field(default_factory=RateEstimate)
    namespaces: dict[bytes, Namespace] = field(default_factory=dict[bytes, Namespace])
    owners: Iterator[Owner] = field(default_factory=lambda: itertools.count(FIRST_OWNER))
    pins: Pins = field(init=False)

    def __post_init__(self) -> None:
        """What connections hold is bounded by the pool's size."""
        self.pins = Pins(self.catalogue, pool_bytes=self.arena.nbytes)

    def note_evictions(self) -> None:
        """After reservations: remember what had to go for them."""
        evicted = self.catalogue.take_evicted()
        if evicted:
            self.evictions.note(evicted)
