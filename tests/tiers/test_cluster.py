"""A real Cluster: slots move, shards die, stripes spread."""

import threading
from pathlib import Path

from tests.servers import CLUSTER_OPTIONS, Cluster, must, running_cluster, start_server

from kvferry.identity.stripes import stripe_plan
from kvferry.testing.expectations import eventually
from kvferry.testing.tier_contract import fetch_all, probe_all, some_bytes, some_ref, store_all
from kvferry.tiers.contract import Outcome
from kvferry.tiers.valkey.jobs import stripe_key
from kvferry.tiers.valkey.slots import key_slot
from kvferry.tiers.valkey.tier import ValkeyTier

PART_BYTES = 8 << 20


def test_the_slot_of_a_key_is_what_the_server_says(cluster: Cluster) -> None:
    for seed in range(50):
        key = stripe_key(some_ref(1, seed).key, seed)
        assert cluster.servers[0].ask("CLUSTER", "KEYSLOT", key) == key_slot(key)


def test_the_stripes_of_parts_spread_over_all_shards(cluster: Cluster, cluster_tier: ValkeyTier) -> None:
    parts = [(some_ref(PART_BYTES, seed), some_bytes(PART_BYTES, seed)) for seed in range(6)]
    assert store_all(cluster_tier, parts) == [Outcome.OK] * 6
    counts = [len(server.key_names()) for server in cluster.servers]
    assert sum(counts) == 6 * len(stripe_plan(PART_BYTES))
    assert min(counts) > 0


def test_reads_and_writes_go_on_through_a_slot_migration(cluster: Cluster, cluster_tier: ValkeyTier) -> None:
    ref = some_ref(200_000, 10)
    data = some_bytes(200_000, 10)
    slot = key_slot(stripe_key(ref.key, 0))
    target = (cluster.owner(slot) + 1) % 3
    source = cluster.begin_move(slot, target)
    try:
        assert store_all(cluster_tier, [(ref, data)]) == [Outcome.OK]  # absent at the source: ASK
        assert fetch_all(cluster_tier, [ref])[0][1] == data
        assert probe_all(cluster_tier, [ref]) == [Outcome.OK]
        cluster.move_keys(slot, source, target)
        assert fetch_all(cluster_tier, [ref])[0][1] == data
    finally:
        cluster.end_move(slot, target)
    assert fetch_all(cluster_tier, [ref])[0][1] == data  # MOVED
    assert fetch_all(cluster_tier, [ref])[0][1] == data
    assert not cluster_tier.statistics().failed


def test_a_dead_shard_costs_its_own_stripes_only() -> None:
    with running_cluster("--cluster-require-full-coverage", "no") as cluster:
        tier = ValkeyTier.connect(cluster.settings())
        try:
            parts = [(some_ref(200_000, seed), some_bytes(200_000, seed)) for seed in range(24)]
            assert store_all(tier, parts) == [Outcome.OK] * 24
            victim = cluster.servers[1]
            homes = [
                {cluster.owner(key_slot(stripe_key(ref.key, s.index))) for s in stripe_plan(ref.nbytes)}
                for ref, _ in parts
            ]
            victim.stop()
            refs = [ref for ref, _ in parts]
            for _ in range(3):
                found = [result.outcome for result, _ in fetch_all(tier, refs, deadline_s=2.0)]
                for home, outcome in zip(homes, found, strict=True):
                    if 1 in home:
                        assert outcome in (Outcome.FAILED, Outcome.REFUSED, Outcome.LATE)
                    else:
                        assert outcome is Outcome.OK
            eventually(lambda: tier.statistics().state == "degraded", "degraded")
            assert str(victim.port) in tier.statistics().detail["breaker_open"]
        finally:
            tier.close()


def test_a_shard_that_dies_while_idle_shows_and_costs_no_request_to_find_out() -> None:
    with running_cluster() as cluster:
        tier = ValkeyTier.connect(cluster.settings(idle_s=0.1))
        try:
            dead = cluster.servers[0]
            dead.pause()
            eventually(lambda: tier.statistics().state == "degraded", "degraded")
            assert str(dead.port) in tier.statistics().detail["breaker_open"]
            assert not tier.statistics().failed
            dead.resume()
            eventually(lambda: tier.statistics().state == "up", "up")
        finally:
            dead.resume()
            tier.close()


def test_a_failover_costs_no_part(tmp_path: Path) -> None:
    with running_cluster() as cluster:
        replica = start_server(tmp_path, *CLUSTER_OPTIONS)
        tier = ValkeyTier.connect(cluster.settings())
        try:
            cluster.become_replica(replica, 0)
            parts = [(some_ref(200_000, seed), some_bytes(200_000, seed)) for seed in range(12)]
            assert store_all(tier, parts) == [Outcome.OK] * 12
            must(cluster.servers[0].ask("WAIT", "1", "5000"))
            must(replica.ask("CLUSTER", "FAILOVER"))
            eventually(
                lambda: b"role:master" in bytes(str(replica.ask("INFO", "replication")), "ascii"),
                "the failover",
            )
            for (_, data), (result, memory) in zip(
                parts, fetch_all(tier, [r for r, _ in parts]), strict=True
            ):
                assert result.outcome is Outcome.OK
                assert memory == data
            assert (
                store_all(tier, [(some_ref(1000, seed), some_bytes(1000, 1)) for seed in range(20, 40)])
                == [Outcome.OK] * 20
            )
            eventually(lambda: str(replica.port) in tier.statistics().detail["shards"], "the new shard")
            gone = str(cluster.servers[0].port)  # a replica now: it costs no threads and no sockets
            eventually(lambda: gone not in tier.statistics().detail["shards"], "the old shard's end")
            eventually(lambda: not [t for t in threading.enumerate() if gone in t.name], "its threads' end")
        finally:
            tier.close()
            replica.stop()
