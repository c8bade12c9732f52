"""What the parts of a node share: the pool, the tier, the loop, and the counts."""

import itertools
from collections import OrderedDict
from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass, field

from kvferry.breaker import Breaker
from kvferry.costs import RateEstimate
from kvferry.identity.boundaries import Span, needed_spans
from kvferry.identity.names import DOMAIN_TAG_BYTES, PartKey, PartRef
from kvferry.keeper.wire import Where
from kvferry.loop import Loop
from kvferry.node import wire
from kvferry.node.counters import Counters
from kvferry.node.explain import ExplainRing
from kvferry.node.keepers import Keepers
from kvferry.node.pins import Pins
from kvferry.node.prompts import Prompts
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

    def trailing_of(self, part: int) -> int:
        """Which chunks a boundary needs of it: 0 for all before it, n for the last n."""
        return self.trailing[part] if self.trailing else 0

    def needed(self, boundary: int) -> list[Span]:
        """What a boundary after so many chunks needs of them."""
        return needed_spans(boundary, self.parts, self.trailing)

    def refs(self, chunks: Sequence[bytes], *, of: Container[bytes] | None = None) -> Iterator[PartRef]:
        """What a boundary after these chunks needs, in order. of: of these chunks only."""
        return (
            PartRef(PartKey(self.namespace, chunks[position], part), self.part_bytes[part])
            for span in self.needed(len(chunks))
            for position in span.chunks
            if of is None or chunks[position] in of
            for part in span.parts
        )


class Evictions:
    """Which chunks left host memory lately, so that a miss can say so.

    Parts that a boundary needs of the same chunks go together; of others a chunk may have had none.
    """

    def __init__(self) -> None:
        self._chunks: OrderedDict[tuple[bytes, bytes, int], None] = OrderedDict()

    def note(self, namespace: bytes, chunk: bytes, trailing: int) -> None:
        """A part with that trailing number was evicted."""
        self._chunks[namespace, chunk, trailing] = None
        while len(self._chunks) > MAX_REMEMBERED_EVICTIONS:
            self._chunks.popitem(last=False)

    def has(self, namespace: bytes, chunk: bytes, trailing: int) -> bool:
        """Was it evicted, as far as is remembered?"""
        return (namespace, chunk, trailing) in self._chunks


@dataclass(frozen=True, slots=True)
class Limits:
    """Of what a node's trust domain may do behind its memory; None: no limit.

    tier_quota: bytes that the node may hold in the tier. write_rate: bytes per second that it may write.
    """

    tier_quota: int | None = None
    write_rate: int | None = None


Located = Callable[[Sequence[PartRef], Sequence[Where]], None]


@dataclass(slots=True)
class NodeState:
    """Used on the loop's thread only. detours: whether keepers bring what the tier has lost."""

    loop: Loop
    arena: Arena
    catalogue: Catalogue
    tier: Tier | None
    epoch: int
    deadline_cap_s: float
    limits: Limits = Limits()
    quota: QuotaTier | None = None  # the tier, when it is one
    keepers: Keepers | None = None  # of what lies behind the tier
    located: Located | None = None  # told what keepers said of where parts are
    counters: Counters = field(default_factory=Counters)
    explain: ExplainRing = field(default_factory=ExplainRing)
    prompts: Prompts = field(default_factory=Prompts)
    evictions: Evictions = field(default_factory=Evictions)
    fetch_rate: RateEstimate = field(default_factory=RateEstimate)  # of the tier
    deep_rates: dict[wire.Tier, RateEstimate] = field(default_factory=dict[wire.Tier, RateEstimate])
    detours: Breaker = field(default_factory=lambda: Breaker(min_wait_s=1.0, max_wait_s=60.0))
    namespaces: dict[bytes, Namespace] = field(default_factory=dict[bytes, Namespace])
    owners: Iterator[Owner] = field(default_factory=lambda: itertools.count(FIRST_OWNER))
    pins: Pins = field(init=False)

    def __post_init__(self) -> None:
        """What connections hold is bounded by the pool's size."""
        self.pins = Pins(self.catalogue, pool_bytes=self.arena.nbytes)

    @property
    def behind(self) -> wire.Tier:
        """What the tier behind memory is called in answers and counts."""
        on_disk = self.tier is not None and self.tier.name == wire.Tier.DISK.name.lower()
        return wire.Tier.DISK if on_disk else wire.Tier.VALKEY

    def part_bytes(self, key: PartKey) -> int:
        """Of a part of a namespace that was attached."""
        return self.namespaces[key.namespace].part_bytes[key.part]

    def rate(self, tier: wire.Tier) -> RateEstimate:
        """How fast that tier is, all the way into memory."""
        return self.fetch_rate if tier is self.behind else self.deep_rates.setdefault(tier, RateEstimate())

    def rates(self) -> dict[str, RateEstimate]:
        """By name, of the tier and of those that keepers have brought something from."""
        deep = {tier.name.lower(): rate for tier, rate in self.deep_rates.items()}
        return {**deep, self.behind.name.lower(): self.fetch_rate}

    def note_evictions(self) -> None:
        """After reservations: remember what had to go for them."""
        for key in self.catalogue.take_evicted():
            trailing = self.namespaces[key.namespace].trailing_of(key.part)
            self.evictions.note(key.namespace, key.chunk, trailing)
