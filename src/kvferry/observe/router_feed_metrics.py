"""The metrics of what a router follows: feeds of nodes, and engines' own KV events."""

from collections import Counter
from collections.abc import Callable

from kvferry.observe.metric import Kind, Metric, bounded
from kvferry.router.app import RouterStatistics
from kvferry.router.feed.follower import FollowerStatistics
from kvferry.router.feed.kvevents import KvEventsStatistics


def _feeds(name: str, text: str, read: Callable[[FollowerStatistics], float]) -> Metric[RouterStatistics]:
    return Metric(
        f"kvferry_router_feed_{name}",
        Kind.COUNTER,
        text,
        (),
        lambda router: [((), sum(read(feed) for feed in router.feeds))],
    )


def _own(name: str, text: str, read: Callable[[KvEventsStatistics], float]) -> Metric[RouterStatistics]:
    return Metric(
        f"kvferry_router_kv_events_{name}",
        Kind.COUNTER,
        text,
        (),
        lambda router: [((), sum(read(events) for events in router.kv_events))],
    )


ROUTER_FEED_METRICS: tuple[Metric[RouterStatistics], ...] = (
    Metric(
        "kvferry_router_feeds",
        Kind.GAUGE,
        "Feeds of nodes: followed, away for a moment, absent, or refused.",
        ("state",),
        lambda router: bounded(Counter(feed.state for feed in router.feeds)),
    ),
    _feeds("events", "Heard from nodes.", lambda feed: feed.events),
    _feeds("gaps", "Times that events were missing.", lambda feed: feed.gaps),
    _feeds("snapshots", "Times that a node told everything.", lambda feed: feed.snapshots),
    _feeds("connects", "Connections to feeds that were let in.", lambda feed: feed.connects),
    _feeds("prefetches", "Sent to nodes.", lambda feed: feed.prefetches),
    Metric(
        "kvferry_router_kv_events_workers",
        Kind.GAUGE,
        "Workers whose own KV events are followed.",
        (),
        lambda router: [((), sum(events.followed for events in router.kv_events))],
    ),
    _own("batches", "Of KV events that came.", lambda events: events.batches),
    _own("gaps", "Times that batches were missing.", lambda events: events.gaps),
    _own("lost", "Of them, those that could not be had again.", lambda events: events.lost),
)
