"""The metrics of a keeper."""

from collections.abc import Callable, Mapping

from kvferry.keeper.app import ProcessStatistics
from kvferry.keeper.statistics import KeeperStatistics, LineStatistics
from kvferry.observe.metric import Kind, Metric, Sample, bounded

Row = Metric[ProcessStatistics]


def _gauge(name: str, text: str, read: Callable[[KeeperStatistics], float]) -> Row:
    return Metric(f"kvferry_keeper_{name}", Kind.GAUGE, text, (), lambda whole: [((), read(whole.keeper))])


def _counter(name: str, text: str, read: Callable[[KeeperStatistics], float]) -> Row:
    return Metric(f"kvferry_keeper_{name}", Kind.COUNTER, text, (), lambda whole: [((), read(whole.keeper))])


def _by(label: str, name: str, text: str, read: Callable[[KeeperStatistics], Mapping[str, float]]) -> Row:
    return Metric(
        f"kvferry_keeper_{name}", Kind.COUNTER, text, (label,), lambda whole: bounded(read(whole.keeper))
    )


def _lines(whole: ProcessStatistics) -> list[tuple[str, LineStatistics]]:
    lines = (("disk", whole.keeper.keep), ("objects", whole.keeper.flush))
    return [(name, line) for name, line in lines if line is not None]


def _line(kind: Kind, name: str, text: str, field: str) -> Row:
    """Of the copies to one tier."""

    def read(whole: ProcessStatistics) -> list[Sample]:
        return [((tier,), float(getattr(line, field))) for tier, line in _lines(whole)]

    return Metric(f"kvferry_keeper_{name}", kind, text, ("tier",), read)


def _line_failures(whole: ProcessStatistics) -> list[Sample]:
    return [
        ((tier, *labels), value) for tier, line in _lines(whole) for labels, value in bounded(line.failed)
    ]


def _tier(kind: Kind, name: str, text: str, field: str) -> Row:
    def read(whole: ProcessStatistics) -> list[Sample]:
        return [((tier.name,), float(getattr(tier, field))) for tier in whole.keeper.tiers]

    return Metric(f"kvferry_keeper_tier_{name}", kind, text, ("tier",), read)


def _tier_failures(whole: ProcessStatistics) -> list[Sample]:
    return [
        ((tier.name, *labels), value) for tier in whole.keeper.tiers for labels, value in bounded(tier.failed)
    ]


def _tier_up(whole: ProcessStatistics) -> list[Sample]:
    values = {"up": 1.0, "degraded": 0.5}
    return [((tier.name,), values.get(tier.state, 0.0)) for tier in whole.keeper.tiers]


def _trouble_seconds(whole: ProcessStatistics) -> list[Sample]:
    return [((trouble.tier, trouble.word), trouble.seconds) for trouble in whole.troubles]


def _trouble_episodes(whole: ProcessStatistics) -> list[Sample]:
    return [
        ((tier, word), count)
        for tier, counts in whole.trouble_episodes.items()
        for word, count in counts.items()
    ]


def _peers(whole: ProcessStatistics) -> list[Sample]:
    roles: dict[str, float] = {"node": 0, "admin": 0}
    for peer in whole.server.peers:
        roles[peer.role] = roles.get(peer.role, 0) + 1
    return bounded(roles)


def _scanned(name: str, text: str, kind: Kind, field: str) -> Row:
    def read(whole: ProcessStatistics) -> list[Sample]:
        scan = whole.keeper.scan
        return [] if scan is None else [((), float(getattr(scan, field)))]

    return Metric(f"kvferry_keeper_scan_{name}", kind, text, (), read)


KEEPER_METRICS: tuple[Row, ...] = (
    Metric(
        "kvferry_keeper_info",
        Kind.GAUGE,
        "1; version and name are its labels.",
        ("version", "name"),
        lambda whole: [((whole.version, whole.name), 1)],
    ),
    Metric(
        "kvferry_keeper_uptime_seconds",
        Kind.GAUGE,
        "Since this keeper process started.",
        (),
        lambda whole: [((), whole.uptime_s)],
    ),
    Metric("kvferry_keeper_peers", Kind.GAUGE, "Connected nodes and admins.", ("role",), _peers),
    Metric(
        "kvferry_keeper_refused_connections",
        Kind.COUNTER,
        "Connections refused or cut off.",
        ("cause",),
        lambda whole: bounded(whole.server.refused),
    ),
    _counter("told_parts", "Parts that nodes told of as stored.", lambda keeper: keeper.told_stored_parts),
    _counter("likely_parts", "Of them, likely to be used again.", lambda keeper: keeper.told_likely_parts),
    _counter("used_parts", "Parts that nodes told of as used.", lambda keeper: keeper.told_used_parts),
    _counter("removed_parts", "Parts deleted in every tier.", lambda keeper: keeper.removed_parts),
    _counter(
        "dropped_told_parts",
        "Of what nodes told, dropped since too much waited.",
        lambda keeper: keeper.told_dropped_parts,
    ),
    _by("place", "located_parts", "Parts asked for, by where they were.", lambda keeper: keeper.located),
    _by(
        "tier",
        "staged_parts",
        "Parts brought into Valkey, by the tier that had them.",
        lambda keeper: keeper.stages.staged_parts,
    ),
    _by("tier", "staged_bytes", "Their bytes.", lambda keeper: keeper.stages.staged_bytes),
    _by(
        "outcome",
        "stage_outcomes",
        "Parts that requests wanted in Valkey, by what became of it.",
        lambda keeper: keeper.stages.outcomes,
    ),
    _gauge("running_stages", "Requests that wait for parts now.", lambda keeper: keeper.stages.requests),
    _counter(
        "promoted_parts",
        "Parts from objects put on the disk too.",
        lambda keeper: keeper.stages.promoted_parts,
    ),
    _line(Kind.GAUGE, "backlog_parts", "Parts that wait to be copied to the tier.", "parts"),
    _line(Kind.GAUGE, "backlog_bytes", "Their bytes.", "nbytes"),
    _line(Kind.GAUGE, "backlog_oldest_seconds", "How long the oldest of them waits.", "oldest_s"),
    _line(Kind.COUNTER, "copied_parts", "Parts copied to the tier.", "copied_parts"),
    _line(Kind.COUNTER, "copied_bytes", "Their bytes.", "copied_bytes"),
    _line(Kind.COUNTER, "present_parts", "Parts not copied: the tier had them.", "there_parts"),
    _line(Kind.COUNTER, "gone_parts", "Parts that left Valkey before they were copied.", "gone_parts"),
    _line(Kind.COUNTER, "dropped_parts", "Parts not copied: the backlog was full.", "dropped_parts"),
    Metric(
        "kvferry_keeper_copy_failures",
        Kind.COUNTER,
        "Attempts to copy a part that failed, by cause.",
        ("tier", "cause"),
        _line_failures,
    ),
    Metric("kvferry_keeper_tier_up", Kind.GAUGE, "1 up, 0.5 degraded, 0 down.", ("tier",), _tier_up),
    Metric(
        "kvferry_keeper_trouble_seconds",
        Kind.GAUGE,
        "For how long the tier has been unreachable, failing, degraded or denied; none: it is well.",
        ("tier", "trouble"),
        _trouble_seconds,
    ),
    Metric(
        "kvferry_keeper_trouble_episodes",
        Kind.COUNTER,
        "How often that began.",
        ("tier", "trouble"),
        _trouble_episodes,
    ),
    _tier(Kind.GAUGE, "inflight_bytes", "Bytes under way to and from the tier.", "inflight_bytes"),
    _tier(Kind.COUNTER, "fetched_parts", "Parts read from the tier.", "fetched_parts"),
    _tier(Kind.COUNTER, "fetched_bytes", "Bytes read from the tier.", "fetched_bytes"),
    _tier(Kind.COUNTER, "stored_parts", "Parts written to the tier.", "stored_parts"),
    _tier(Kind.COUNTER, "stored_bytes", "Bytes written to the tier.", "stored_bytes"),
    Metric(
        "kvferry_keeper_tier_failures",
        Kind.COUNTER,
        "Operations on the tier that failed, by cause.",
        ("tier", "cause"),
        _tier_failures,
    ),
    _scanned("passes", "Looks through all of Valkey.", Kind.COUNTER, "passes"),
    _scanned("keys", "Keys looked at.", Kind.COUNTER, "keys"),
    _scanned("found_parts", "Parts worth a copy that nobody had told of.", Kind.COUNTER, "found_parts"),
    _gauge("buffer_bytes", "Memory that parts pass through, in use.", lambda keeper: keeper.buffer_bytes),
    _gauge("buffer_limit_bytes", "Of so much.", lambda keeper: keeper.buffer_limit_bytes),
    Metric(
        "kvferry_keeper_defects",
        Kind.COUNTER,
        "Errors inside the keeper that it survived; please report them.",
        (),
        lambda whole: [((), whole.keeper.defects + whole.server.defects)],
    ),
)
