"""The metrics of a node."""

from collections.abc import Callable, Mapping

from kvferry.node.counters import NodeStatistics
from kvferry.observe.feed_metrics import NODE_FEED_METRICS
from kvferry.observe.metric import Kind, Metric, Sample, bounded


def _gauge(name: str, text: str, read: Callable[[NodeStatistics], float]) -> Metric[NodeStatistics]:
    return Metric(f"kvferry_{name}", Kind.GAUGE, text, (), lambda node: [((), read(node))])


def _counter(name: str, text: str, read: Callable[[NodeStatistics], float]) -> Metric[NodeStatistics]:
    return Metric(f"kvferry_{name}", Kind.COUNTER, text, (), lambda node: [((), read(node))])


def _by(
    label: str, name: str, text: str, read: Callable[[NodeStatistics], Mapping[str, float]]
) -> Metric[NodeStatistics]:
    return Metric(f"kvferry_{name}", Kind.COUNTER, text, (label,), lambda node: bounded(read(node)))


def _tier_counter(name: str, text: str, field: str) -> Metric[NodeStatistics]:
    def read(node: NodeStatistics) -> list[Sample]:
        return [] if node.tier is None else [((node.tier.name,), float(getattr(node.tier, field)))]

    return Metric(f"kvferry_tier_{name}", Kind.COUNTER, text, ("tier",), read)


def _tier_failures(node: NodeStatistics) -> list[Sample]:
    if node.tier is None:
        return []
    name = node.tier.name
    return [((name, *labels), value) for labels, value in bounded(node.tier.failed)]


def _tier_up(node: NodeStatistics) -> list[Sample]:
    values = {"up": 1.0, "degraded": 0.5}
    return [] if node.tier is None else [((node.tier.name,), values.get(node.tier.state, 0.0))]


def _tier_inflight(node: NodeStatistics) -> list[Sample]:
    return [] if node.tier is None else [((node.tier.name,), node.tier.inflight_bytes)]


def _quota(kind: Kind, name: str, text: str, field: str) -> Metric[NodeStatistics]:
    """Of the quota; nothing without one."""

    def read(node: NodeStatistics) -> list[Sample]:
        if node.tier is None or node.quota is None:
            return []
        return [((node.tier.name,), float(getattr(node.quota, field)))]

    return Metric(f"kvferry_tier_{name}", kind, text, ("tier",), read)


def _write_rate(node: NodeStatistics) -> list[Sample]:
    return [] if node.tier is None or node.write_rate is None else [((node.tier.name,), node.write_rate)]


def _keepers_up(node: NodeStatistics) -> list[Sample]:
    values = {"up": 1.0, "silent": 0.5}
    keepers = () if node.keepers is None else node.keepers.keepers
    return bounded({keeper.address: values.get(keeper.state, 0.0) for keeper in keepers})


def _untold(node: NodeStatistics) -> float:
    if node.keepers is None:
        return 0
    return node.keepers.dropped_parts + sum(keeper.dropped_parts for keeper in node.keepers.keepers)


def _engines(node: NodeStatistics) -> list[Sample]:
    roles: dict[str, float] = {"scheduler": 0, "worker": 0}
    for engine in node.engines:
        roles[engine.role] = roles.get(engine.role, 0) + 1
    return bounded(roles)


def _parts(node: NodeStatistics) -> list[Sample]:
    held = node.catalogue
    return [
        (("ready",), held.ready_parts),
        (("filling",), held.filling_parts),
        (("unlinked",), held.unlinked_parts),
    ]


METRICS: tuple[Metric[NodeStatistics], ...] = (
    Metric(
        "kvferry_node_info",
        Kind.GAUGE,
        "1; the version is its label.",
        ("version",),
        lambda node: [((node.version,), 1)],
    ),
    _gauge("uptime_seconds", "Since this node process started.", lambda node: node.uptime_s),
    _gauge("pool_bytes", "Host memory for KV.", lambda node: node.pool_bytes),
    _gauge("pool_used_bytes", "Of it, holding KV.", lambda node: node.catalogue.used_bytes),
    _gauge(
        "pool_pinned_bytes",
        "Of it, held by transfers and not evictable now.",
        lambda node: node.catalogue.pinned_bytes,
    ),
    _gauge(
        "pool_filling_bytes", "Of it, reserved and being written.", lambda node: node.catalogue.filling_bytes
    ),
    _gauge("pool_prepared_bytes", "Of the pool, faulted in already.", lambda node: node.prepared_bytes),
    _gauge("pool_huge_bytes", "Of the pool, on huge pages.", lambda node: node.huge_bytes),
    _gauge("pool_chunks", "Chunks of which a part is in the pool.", lambda node: node.catalogue.chunks),
    Metric("kvferry_pool_parts", Kind.GAUGE, "Parts in the pool, by state.", ("state",), _parts),
    _counter("pool_evicted_parts", "Parts evicted to make room.", lambda node: node.catalogue.evicted_parts),
    _counter("pool_evicted_bytes", "Bytes evicted to make room.", lambda node: node.catalogue.evicted_bytes),
    _counter(
        "pool_full_refusals",
        "Reservations declined because nothing could be evicted.",
        lambda node: node.catalogue.full_refusals,
    ),
    _counter("lookups", "Questions by engines how far a prefix reaches.", lambda node: node.counters.lookups),
    _counter("lookup_chunks", "Chunks asked for in them.", lambda node: node.counters.lookup_chunks),
    _by(
        "tier",
        "hit_chunks",
        "Chunks found, by the tier that had them.",
        lambda node: node.counters.hit_chunks,
    ),
    _by("tier", "hit_tokens", "Tokens found, by tier.", lambda node: node.counters.hit_tokens),
    _by("tier", "hit_bytes", "Bytes found, by tier.", lambda node: node.counters.hit_bytes),
    _counter(
        "missed_chunks",
        "Chunks that no tier had. Failures are not in here.",
        lambda node: node.counters.missed_chunks,
    ),
    _counter("missed_tokens", "Tokens that no tier had.", lambda node: node.counters.missed_tokens),
    _counter(
        "cheaper_recomputed_chunks",
        "Chunks found, but quicker to recompute than to load.",
        lambda node: node.counters.recomputed_chunks,
    ),
    _by(
        "cause",
        "failures",
        "Lookups, loads and chunks that failed, by cause.",
        lambda node: node.counters.failed,
    ),
    _counter(
        "corrupt_parts",
        "Parts whose checksum did not match; removed.",
        lambda node: node.counters.corrupt_parts,
    ),
    _counter(
        "engine_failed_tokens",
        "Tokens an engine recomputed after a load had failed.",
        lambda node: node.counters.engine_failed_tokens,
    ),
    _counter("loads", "Loads started.", lambda node: node.counters.loads),
    _gauge("running_loads", "Loads that hold memory now.", lambda node: node.loads),
    _counter(
        "expired_loads", "Loads whose engine never ended them.", lambda node: node.counters.loads_expired
    ),
    _counter(
        "expired_reservations",
        "Reserved slots whose engine never filled them.",
        lambda node: node.counters.reservations_expired,
    ),
    _gauge(
        "overdue_reservations",
        "Expired, but the engine may still write: their slots are out of use.",
        lambda node: node.overdue_reservations,
    ),
    _gauge("running_fetches", "Parts under way from a tier now.", lambda node: node.fetches),
    _counter(
        "shared_fetches",
        "Parts that two loads wanted and one fetch brought.",
        lambda node: node.counters.shared_fetches,
    ),
    _by(
        "tier",
        "fetched_bytes",
        "Bytes brought into the pool, by the tier that they lay in.",
        lambda node: node.counters.fetched_bytes,
    ),
    _by(
        "tier",
        "staged_parts",
        "Parts that keepers brought into Valkey, by where they lay; valkey: it had lost them since.",
        lambda node: node.counters.staged_parts,
    ),
    _by(
        "cause",
        "stage_failures",
        "Parts that they did not bring, by cause.",
        lambda node: node.counters.stage_failed,
    ),
    Metric(
        "kvferry_keeper_up",
        Kind.GAUGE,
        "1 up, 0.5 connected and silent, 0 down or refusing.",
        ("keeper",),
        _keepers_up,
    ),
    _counter("untold_parts", "Parts stored or used of which no keeper could be told.", _untold),
    _counter("committed_parts", "Parts that engines published.", lambda node: node.counters.committed_parts),
    _counter("committed_bytes", "Bytes that engines published.", lambda node: node.counters.committed_bytes),
    _by(
        "cause",
        "declined_reservations",
        "Reservations not given, by outcome.",
        lambda node: node.counters.reserve_declined,
    ),
    Metric("kvferry_tier_up", Kind.GAUGE, "1 up, 0.5 some shards fail, 0 down.", ("tier",), _tier_up),
    Metric(
        "kvferry_tier_inflight_bytes",
        Kind.GAUGE,
        "Bytes under way to and from the tier.",
        ("tier",),
        _tier_inflight,
    ),
    _tier_counter("fetched_parts", "Parts read from the tier.", "fetched_parts"),
    _tier_counter("fetched_bytes", "Bytes read from the tier.", "fetched_bytes"),
    _tier_counter("missed_parts", "Parts the tier was asked for and did not have.", "missed_parts"),
    _tier_counter("stored_parts", "Parts written to the tier.", "stored_parts"),
    _tier_counter("stored_bytes", "Bytes written to the tier.", "stored_bytes"),
    Metric(
        "kvferry_tier_failures",
        Kind.COUNTER,
        "Operations on the tier that failed, by cause.",
        ("tier", "cause"),
        _tier_failures,
    ),
    _quota(
        Kind.GAUGE, "quota_bytes", "What this node may hold in the tier; absent: no limit.", "quota_bytes"
    ),
    _quota(Kind.GAUGE, "quota_used_bytes", "Of it, what this node has stored and not removed.", "used_bytes"),
    _quota(Kind.GAUGE, "quota_chunks", "Chunks that it remembers to have stored.", "chunks"),
    _quota(Kind.COUNTER, "quota_removed_parts", "Parts removed to stay within the quota.", "removed_parts"),
    _quota(Kind.COUNTER, "quota_removed_bytes", "Bytes removed to stay within the quota.", "removed_bytes"),
    Metric(
        "kvferry_tier_write_rate_bytes",
        Kind.GAUGE,
        "What this node may write per second; absent: no limit.",
        ("tier",),
        _write_rate,
    ),
    _counter(
        "store_present_parts",
        "Parts not stored again: the tier had them.",
        lambda node: node.counters.store_present_parts,
    ),
    _counter(
        "store_dropped_parts",
        "Parts not stored: the backlog was full.",
        lambda node: node.counters.store_dropped_parts,
    ),
    _by("cause", "store_failures", "Parts not stored, by cause.", lambda node: node.counters.store_failed),
    _gauge("backlog_bytes", "Waiting to be written to the tier.", lambda node: node.writeback_backlog_bytes),
    _gauge(
        "backlog_parts", "Parts waiting to be written to the tier.", lambda node: node.writeback_backlog_parts
    ),
    Metric("kvferry_engines", Kind.GAUGE, "Connected engine processes.", ("role",), _engines),
    _by(
        "cause",
        "refused_connections",
        "Connections refused or cut off.",
        lambda node: node.counters.refused_connections,
    ),
    _counter(
        "defects", "Errors inside the node that it survived; please report them.", lambda node: node.defects
    ),
    *NODE_FEED_METRICS,
)
