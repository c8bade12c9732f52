"""The list of metrics, what a scrape shows of it, and its documentation."""

import re
import socket
import subprocess
import sys
import urllib.request
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from kvferry.errors import MisconfiguredError
from kvferry.keeper.client import KeepersStatistics, KeeperStatus
from kvferry.node.counters import Counters, EngineStatus, NodeStatistics
from kvferry.node.feedserver import FeedStatistics
from kvferry.observe.exposition import MAX_SCRAPES, MetricsPage
from kvferry.observe.metric import MAX_LABEL_VALUES, Kind
from kvferry.observe.metrics import METRICS
from kvferry.pool.catalogue import Catalogue
from kvferry.pool.entries import CatalogueStatistics
from kvferry.pool.slots import SlotAllocator
from kvferry.tiers.contract import TierStatistics

ROOT = Path(__file__).parents[2]
UNITS = {
    "bytes", "chunks", "connections", "defects", "engines", "events", "failures", "fetches", "info", "loads",
    "lookups", "parts", "prefetches", "refusals", "reservations", "seconds", "snapshots", "tokens", "up",
}  # fmt: skip
IDLE_POOL_BYTES = 64 << 20


def catalogue() -> CatalogueStatistics:
    return Catalogue(SlotAllocator(IDLE_POOL_BYTES, slab_bytes=16 << 20)).statistics()


def statistics(
    *,
    tier: TierStatistics | None = None,
    counters: Counters | None = None,
    keepers: KeepersStatistics | None = None,
) -> NodeStatistics:
    return NodeStatistics(
        pid=1,
        version="0",
        epoch=1,
        uptime_s=2.5,
        socket_path="/run/node.sock",
        pool_bytes=IDLE_POOL_BYTES,
        huge_bytes=0,
        prepared_bytes=0,
        catalogue=catalogue(),
        tier=tier,
        keepers=keepers,
        engines=(EngineStatus("vllm", "worker", 0, 7, "0", "model", "default", 0, 0, ""),),
        namespaces=(),
        counters=counters or Counters(),
        loads=0,
        fetches=0,
        writeback_backlog_bytes=0,
        writeback_backlog_parts=0,
        overdue_reservations=0,
        defects=0,
    )


def valkey(**failed: int) -> TierStatistics:
    return TierStatistics("valkey", "degraded", 1, 4096, 2, 8192, 3, dict(failed), 0, {})


def keeper(address: str, state: str) -> KeeperStatus:
    """Ten parts of each kind."""
    return KeeperStatus(
        address=address,
        name="",
        version="",
        state=state,
        error="",
        connects=1,
        asked=0,
        queued_parts=10,
        dropped_parts=10,
        located_parts=10,
        staged_parts=10,
        unanswered=0,
        strange=0,
    )


def scrape(snapshot: NodeStatistics) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    page = MetricsPage(lambda: snapshot, metrics=METRICS, port=0)
    try:
        with urllib.request.urlopen(page.url, timeout=10) as answer:
            text = answer.read().decode()
    finally:
        page.close()
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_names_are_unique_and_end_in_their_unit() -> None:
    names = [metric.name for metric in METRICS]
    assert len(set(names)) == len(names)
    for name in names:
        assert re.fullmatch(r"kvferry_[a-z_]+", name)
        assert name.rsplit("_", 1)[1] in UNITS, name


def test_every_metric_reads_from_an_idle_node_without_a_tier() -> None:
    for metric in METRICS:
        for labels, value in metric.read(statistics()):
            assert len(labels) == len(metric.labels)
            assert value >= 0


def test_the_feed_of_a_node_is_counted_where_there_is_one() -> None:
    feed = FeedStatistics(
        address="127.0.0.1:9474",
        followers=2,
        events=7,
        snapshots=3,
        known_chunks={"memory": 5, "valkey": 9},
        refused={"token": 4},
        dropped_events=0,
        prefetches=1,
        prefetches_declined=6,
        defects=0,
    )
    found = scrape(replace(statistics(), feed=feed))
    assert found["kvferry_feed_connections", ()] == 2
    assert found["kvferry_feed_known_chunks", (("level", "valkey"),)] == 9
    assert found["kvferry_feed_refused_connections_total", (("cause", "token"),)] == 4
    assert found["kvferry_feed_declined_prefetches_total", ()] == 6
    assert not [name for name, _ in scrape(statistics()) if name.startswith("kvferry_feed")]


def test_a_scrape_shows_every_metric_that_has_samples() -> None:
    counters = Counters(lookups=3)
    counters.hit_bytes["valkey"] = 12
    counters.failed["deadline"] = 2
    snapshot = statistics(tier=valkey(timeout=5), counters=counters)
    found = scrape(snapshot)
    assert found["kvferry_lookups_total", ()] == 3
    assert found["kvferry_hit_bytes_total", (("tier", "valkey"),)] == 12
    assert found["kvferry_failures_total", (("cause", "deadline"),)] == 2
    assert found["kvferry_tier_failures_total", (("cause", "timeout"), ("tier", "valkey"))] == 5
    assert found["kvferry_tier_up", (("tier", "valkey"),)] == 0.5
    assert found["kvferry_engines", (("role", "worker"),)] == 1
    shown = {name for name, _ in found}
    assert {metric.exposed_name for metric in METRICS if list(metric.read(snapshot))} <= shown


def test_keepers_are_shown_one_by_one_and_what_came_from_their_tiers_by_tier() -> None:
    counters = Counters()
    counters.fetched_bytes.update(valkey=5, disk=7)
    counters.staged_parts["disk"] = 2
    counters.stage_failed["late"] = 1
    states = {"store1:9472": "up", "store2:9472": "silent", "store3:9472": "down", "store4:9472": "refused"}
    keepers = KeepersStatistics(
        keepers=tuple(keeper(address, state) for address, state in states.items()), dropped_parts=3, defects=0
    )
    found = scrape(statistics(tier=valkey(), counters=counters, keepers=keepers))
    assert found["kvferry_fetched_bytes_total", (("tier", "disk"),)] == 7
    assert found["kvferry_staged_parts_total", (("tier", "disk"),)] == 2
    assert found["kvferry_stage_failures_total", (("cause", "late"),)] == 1
    up = [found["kvferry_keeper_up", (("keeper", address),)] for address in states]
    assert up == [1, 0.5, 0, 0]
    assert found["kvferry_untold_parts_total", ()] == 3 + 4 * 10


def test_labels_are_bounded_and_nothing_is_lost() -> None:
    counters = Counters()
    for number in range(MAX_LABEL_VALUES * 3):
        counters.failed[f"cause-{number}"] = number
    (failures,) = [metric for metric in METRICS if metric.name == "kvferry_failures"]
    samples = list(failures.read(statistics(counters=counters)))
    assert len(samples) == MAX_LABEL_VALUES
    assert sum(value for _, value in samples) == counters.failed.total()


def test_counters_are_never_gauges_and_say_total() -> None:
    for metric in METRICS:
        assert metric.exposed_name.endswith("_total") == (metric.kind is Kind.COUNTER)


def test_a_port_in_use_is_named_with_a_way_out() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(MisconfiguredError, match=f"metrics port {port} is in use; choose another"):
            MetricsPage(statistics, metrics=METRICS, port=port)


def test_silent_connections_make_room_for_a_scrape_and_end_with_the_page() -> None:
    page = MetricsPage(statistics, metrics=METRICS, port=0)
    with ExitStack() as silent:
        port = int(page.url.rsplit(":", 1)[1].partition("/")[0])
        for _ in range(4 * MAX_SCRAPES):
            silent.enter_context(socket.create_connection(("127.0.0.1", port)))
        with urllib.request.urlopen(page.url, timeout=60) as answer:
            assert b"kvferry_up" in answer.read()
        page.close()


def test_a_host_that_is_not_this_machines_is_named() -> None:
    with pytest.raises(MisconfiguredError, match=r"192\.0\.2\.1 is no address of this machine"):
        MetricsPage(statistics, metrics=METRICS, port=0, host="192.0.2.1")


def test_the_page_is_on_loopback_only() -> None:
    page = MetricsPage(statistics, metrics=METRICS, port=0)
    try:
        assert page.url.startswith("http://127.0.0.1:")
    finally:
        page.close()


def test_the_reference_tables_of_the_documentation_are_current() -> None:
    done = subprocess.run(
        [sys.executable, ROOT / "tools" / "reference.py", "--check"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
