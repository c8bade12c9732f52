"""What a node counts, and the snapshot that status and metrics are made of."""

from collections import Counter
from dataclasses import dataclass, field

from kvferry.keeper.client import KeepersStatistics
from kvferry.node.feedserver import FeedStatistics
from kvferry.node.ledger import LedgerStatistics
from kvferry.pool.entries import CatalogueStatistics
from kvferry.tiers.contract import TierStatistics


@dataclass(slots=True)
class Counters:
    """Since start. A failure is never counted as a miss. Keyed counters: by tier, or by cause."""

    lookups: int = 0
    lookup_chunks: int = 0
    hit_chunks: Counter[str] = field(default_factory=Counter[str])
    hit_tokens: Counter[str] = field(default_factory=Counter[str])
    hit_bytes: Counter[str] = field(default_factory=Counter[str])
    missed_chunks: int = 0
    missed_tokens: int = 0
    recomputed_chunks: int = 0  # there, but cheaper to recompute
    failed: Counter[str] = field(default_factory=Counter[str])
    loads: int = 0
    loads_expired: int = 0
    reservations_expired: int = 0
    shared_fetches: int = 0
    fetched_parts: int = 0
    fetched_bytes: Counter[str] = field(default_factory=Counter[str])
    staged_parts: Counter[str] = field(default_factory=Counter[str])  # brought into the tier by keepers
    stage_failed: Counter[str] = field(default_factory=Counter[str])
    reserved_parts: int = 0
    reserve_declined: Counter[str] = field(default_factory=Counter[str])
    committed_parts: int = 0
    committed_bytes: int = 0
    stored_parts: int = 0
    stored_bytes: int = 0
    store_present_parts: int = 0  # in the tier already: not stored again
    store_failed: Counter[str] = field(default_factory=Counter[str])
    store_dropped_parts: int = 0  # backlog full
    corrupt_parts: int = 0
    refused_connections: Counter[str] = field(default_factory=Counter[str])
    engine_failed_tokens: int = 0


@dataclass(frozen=True, slots=True)
class EngineStatus:
    """A connected engine process. held_bytes: pool bytes its loads hold."""

    engine: str
    role: str
    rank: int
    pid: int
    version: str
    label: str
    domain: str
    loads: int
    reservations: int
    namespace: str


@dataclass(frozen=True, slots=True)
class NamespaceStatus:
    """A namespace that an engine attached since start, and that ``drop`` may name. namespace: hexadecimal."""

    namespace: str
    label: str
    domain: str
    chunk_tokens: int


@dataclass(frozen=True, slots=True)
class NodeStatistics:
    """A frozen snapshot of a node. tier: None for a node that has memory alone.

    keepers, feed: None where it has none. quota, write_rate (bytes per second): of what it may do in the
    tier; None: no limit.
    """

    pid: int
    version: str
    epoch: int
    uptime_s: float
    socket_path: str
    pool_bytes: int
    huge_bytes: int
    prepared_bytes: int
    catalogue: CatalogueStatistics
    tier: TierStatistics | None
    engines: tuple[EngineStatus, ...]
    namespaces: tuple[NamespaceStatus, ...]
    counters: Counters
    loads: int
    fetches: int
    writeback_backlog_bytes: int
    writeback_backlog_parts: int
    overdue_reservations: int
    defects: int
    keepers: KeepersStatistics | None = None
    quota: LedgerStatistics | None = None
    write_rate: int | None = None
    feed: FeedStatistics | None = None
