"""A real Cluster whose servers disagree, change places during reads, or leave a slot to nobody."""

import threading
import time
from collections.abc import Callable
from pathlib import Path

from tests.servers import CLUSTER_OPTIONS, Cluster, must, running_cluster, start_server

from kvferry.identity.names import PartRef
from kvferry.identity.stripes import stripe_plan
from kvferry.testing.tier_contract import fetch_all, some_bytes, some_ref, store_all
from kvferry.tiers.contract import Outcome
from kvferry.tiers.valkey.jobs import stripe_key
from kvferry.tiers.valkey.slots import key_slot
from kvferry.tiers.valkey.tier import ValkeyTier

PART_BYTES = 200_000


def until(condition: Callable[[], bool], *, within_s: float = 60.0) -> None:
    give_up = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < give_up, "did not happen"
        time.sleep(0.02)


def slots_of(ref: PartRef) -> set[int]:
    return {key_slot(stripe_key(ref.key, stripe.index)) for stripe in stripe_plan(ref.nbytes)}


def test_a_failover_in_the_middle_of_reads_costs_no_part(tmp_path: Path) -> None:
    with running_cluster() as cluster:
        replica = start_server(tmp_path, *CLUSTER_OPTIONS)
        tier = ValkeyTier.connect(cluster.settings())
        reader: threading.Thread | None = None
        stop = threading.Event()
        try:
            cluster.become_replica(replica, 0)
            parts = [(some_ref(PART_BYTES, seed), some_bytes(PART_BYTES, seed)) for seed in range(12)]
            assert store_all(tier, parts) == [Outcome.OK] * 12
            must(cluster.servers[0].ask("WAIT", "1", "5000"))
            rounds: list[bool] = []

            def read() -> None:
                while not stop.is_set():
                    found = fetch_all(tier, [ref for ref, _ in parts])
                    right = zip(parts, found, strict=True)
                    rounds.append(all(r.outcome is Outcome.OK and m == data for (_, data), (r, m) in right))

            reader = threading.Thread(target=read)
            reader.start()
            until(lambda: len(rounds) > 2)
            must(replica.ask("CLUSTER", "FAILOVER"))
            until(lambda: b"role:master" in bytes(str(replica.ask("INFO", "replication")), "ascii"))
            after = len(rounds)
            until(lambda: len(rounds) > after + 2)
            stop.set()
            reader.join()
            assert all(rounds)
            assert not tier.statistics().failed
        finally:
            stop.set()
            if reader is not None:
                reader.join()
            tier.close()
            replica.stop()


def _owned_by_each_other(cluster: Cluster, slot: int) -> None:
    """Two servers each say that the slot is the other's."""
    owner = cluster.owner(slot)
    other = (owner + 1) % 3
    must(cluster.servers[other].ask("CLUSTER", "SETSLOT", str(slot), "NODE", cluster.node_id(owner)))
    must(cluster.servers[owner].ask("CLUSTER", "SETSLOT", str(slot), "NODE", cluster.node_id(other)))


def test_servers_that_send_for_ever_to_each_other_fail_the_part_at_once() -> None:
    with running_cluster() as cluster:
        tier = ValkeyTier.connect(cluster.settings())
        try:
            ref = some_ref(1000, 3)
            _owned_by_each_other(cluster, slots_of(ref).pop())
            result, _ = fetch_all(tier, [ref], deadline_s=60.0)[0]
            assert result.outcome is Outcome.FAILED
            assert tier.statistics().failed == {"redirects": 1}
            assert tier.statistics().missed_parts == 0
        finally:
            tier.close()


def test_a_slot_that_nobody_serves_fails_its_own_parts_alone() -> None:
    with running_cluster("--cluster-require-full-coverage", "no") as cluster:
        tier = ValkeyTier.connect(cluster.settings())
        try:
            parts = [(some_ref(PART_BYTES, seed), some_bytes(PART_BYTES, seed)) for seed in range(12)]
            assert store_all(tier, parts) == [Outcome.OK] * 12
            slots = slots_of(parts[0][0])
            for server in cluster.servers:
                must(server.ask("CLUSTER", "DELSLOTS", *(str(slot) for slot in slots)))
            for _ in range(3):
                for (ref, data), (result, memory) in zip(
                    parts, fetch_all(tier, [ref for ref, _ in parts]), strict=True
                ):
                    if slots_of(ref) & slots:
                        assert result.outcome in (Outcome.FAILED, Outcome.REFUSED)
                    else:
                        assert result.outcome is Outcome.OK
                        assert memory == data
            assert tier.statistics().failed.keys() <= {"unavailable", "breaker_open"}
            assert tier.statistics().missed_parts == 0
        finally:
            tier.close()
