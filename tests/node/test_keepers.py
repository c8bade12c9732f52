"""A node, real keepers and a real Valkey: what Valkey has lost comes back from the disk, or the bucket."""

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from tests.node.fleet import at_rest, digests
from tests.node.keepers_fleet import PART_BYTES, KeptFleet
from tests.servers import Server, running_server

from kvferry.cli.main import main
from kvferry.client.messages import LoadEnd, Reason
from kvferry.client.messages import Tier as Place
from kvferry.testing.expectations import eventually


@pytest.fixture(scope="module")
def shared_server() -> Iterator[Server]:
    with running_server("--maxmemory", "1gb", "--maxmemory-policy", "allkeys-lru") as server:
        yield server


@pytest.fixture
def fleet(shared_server: Server, tmp_path: Path, stack: ExitStack) -> KeptFleet:
    shared_server.ask("FLUSHALL")
    return KeptFleet(tmp_path, shared_server, stack)


def _keep(fleet: KeptFleet, chunks: list[bytes], *, in_objects: bool = False) -> None:
    """Stored by one host, used by another, kept below Valkey, and gone from there."""
    here, engine = fleet.host()
    assert engine.save(chunks) == len(chunks)
    eventually(lambda: here.statistics().counters.stored_parts == len(chunks), "write-back")
    there, other = fleet.host()
    answer = other.lookup(chunks)
    assert answer.tiers == (Place.VALKEY,) * len(chunks)
    assert other.load(answer, chunks) == [LoadEnd(Reason.COMPLETE, len(chunks))]
    fleet.kept(len(chunks), in_objects=in_objects)
    at_rest(here)
    at_rest(there)
    fleet.empty_valkey()


def test_what_valkey_evicted_is_loaded_from_a_keepers_disk(
    fleet: KeptFleet, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every byte right, told apart in answers, counts and explain; and then it is in Valkey again."""
    chunks = digests(20)
    fleet.keeper()
    _keep(fleet, chunks)
    node, engine = fleet.host()
    answer = engine.lookup([*chunks, *digests(1, "question")], "cmpl-deep")
    assert (answer.count, answer.reason, answer.tiers) == (20, Reason.ABSENT, (Place.DISK,) * 20)
    assert engine.load(answer, chunks) == [LoadEnd(Reason.COMPLETE, 20)]
    at_rest(node)
    counters = node.statistics().counters
    assert (counters.hit_chunks, counters.staged_parts) == ({"disk": 20}, {"disk": 20})
    assert counters.fetched_bytes == {"disk": 20 * PART_BYTES}
    assert not counters.failed and not counters.stage_failed
    assert main(["explain", "cmpl-deep", "--socket", str(node.settings.socket_path)]) == 0
    assert "disk      20 chunks" in capsys.readouterr().out
    _, other = fleet.host()
    assert other.lookup(chunks).tiers == (Place.VALKEY,) * 20
