"""The metrics of a node's feed."""

from collections.abc import Callable, Mapping

from kvferry.node.counters import NodeStatistics
from kvferry.node.feedserver import FeedStatistics
from kvferry.observe.metric import Kind, Metric, Sample, bounded


def _of_node(
    kind: Kind, name: str, text: str, read: Callable[[FeedStatistics], float]
) -> Metric[NodeStatistics]:
    """Nothing where the node has no feed."""
    return Metric(
        f"kvferry_feed_{name}",
        kind,
        text,
        (),
        lambda node: [] if node.feed is None else [((), read(node.feed))],
    )


def _of_node_by(
    kind: Kind, label: str, name: str, text: str, read: Callable[[FeedStatistics], Mapping[str, float]]
) -> Metric[NodeStatistics]:
    def samples(node: NodeStatistics) -> list[Sample]:
        return [] if node.feed is None else bounded(read(node.feed))

    return Metric(f"kvferry_feed_{name}", kind, text, (label,), samples)


NODE_FEED_METRICS: tuple[Metric[NodeStatistics], ...] = (
    _of_node(Kind.GAUGE, "connections", "Routers that follow this node now.", lambda feed: feed.followers),
    _of_node(Kind.COUNTER, "events", "Told to those who follow.", lambda feed: feed.events),
    _of_node(Kind.COUNTER, "snapshots", "Routers that were told everything.", lambda feed: feed.snapshots),
    _of_node_by(
        Kind.GAUGE, "level", "known_chunks", "Chunks known to be there.", lambda feed: feed.known_chunks
    ),
    _of_node_by(
        Kind.COUNTER,
        "cause",
        "refused_connections",
        "Connections of routers refused or cut off.",
        lambda feed: feed.refused,
    ),
    _of_node(
        Kind.COUNTER,
        "dropped_events",
        "Of requests, not told: the feed was behind.",
        lambda feed: feed.dropped_events,
    ),
    _of_node(Kind.COUNTER, "prefetches", "Begun because a router asked.", lambda feed: feed.prefetches),
    _of_node(
        Kind.COUNTER,
        "declined_prefetches",
        "Not begun: the node was busy with others.",
        lambda feed: feed.prefetches_declined,
    ),
    _of_node(
        Kind.COUNTER,
        "defects",
        "Errors inside the feed that it survived; please report them.",
        lambda feed: feed.defects,
    ),
)
