"""A keeper over a real Valkey, a real disk and a bucket in a directory; nodes encrypt, or they do not."""

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.keeper.rig import contents, fill, idle, locate, prompt, stage
from tests.servers import Server, must, running_server

from kvferry.identity.names import PartRef
from kvferry.identity.sealing import KeyRing, SealingKey
from kvferry.identity.stripes import stripe_plan
from kvferry.keeper.forms import Form, Plain, Sealed
from kvferry.keeper.keeper import Keeper
from kvferry.keeper.limits import Limits
from kvferry.keeper.wire import Where
from kvferry.testing.expectations import eventually
from kvferry.testing.s3 import start_obstore
from kvferry.testing.tier_calls import fetch_all
from kvferry.tiers.contract import Dropped, Outcome
from kvferry.tiers.disk.settings import DiskSettings
from kvferry.tiers.disk.tier import DiskTier
from kvferry.tiers.objects.settings import ObjectSettings
from kvferry.tiers.objects.tier import ObjectTier
from kvferry.tiers.valkey.protection import AsStored, Checksums, Protection
from kvferry.tiers.valkey.protection import Sealed as SealedProtection
from kvferry.tiers.valkey.tier import ValkeyTier

PART = 3_000_000  # two stripes
LIMITS = Limits(buffer_bytes=32 << 20, copy_share=1.0, retry_s=0.5)
KEYS = (SealingKey(b"a" * 32), SealingKey(b"b" * 32))
KEY_IDS = tuple(key.key_id for key in KEYS)


@pytest.fixture(scope="module", autouse=True)
def bucket_threads() -> None:
    """They are the process's own, from their first use on."""
    start_obstore()


@pytest.fixture(scope="module")
def shared() -> Iterator[Server]:
    with running_server("--maxmemory", "200mb", "--maxmemory-policy", "allkeys-lru") as server:
        yield server


@pytest.fixture
def server(shared: Server) -> Server:
    shared.ask("FLUSHALL")
    return shared


class Host:
    """A storage host: its directories outlive its keeper."""

    def __init__(self, server: Server, directory: Path, *, keys: bool) -> None:
        self.server = server
        self.directory = directory
        self.keys = keys
        protection: Protection = SealedProtection(KeyRing(KEYS)) if keys else Checksums()
        self.node = ValkeyTier.connect(server.settings(protection=protection))
        self.keeper = self.opened()

    def opened(self) -> Keeper:
        protection: Protection = AsStored(KEY_IDS) if self.keys else Checksums()
        form: Form = Sealed(KEY_IDS) if self.keys else Plain()
        valkey = ValkeyTier.connect(self.server.settings(protection=protection, no_touch=True))
        bucket = self.directory / "bucket"
        bucket.mkdir(mode=0o700, exist_ok=True)
        return Keeper(
            valkey=valkey,
            disk=DiskTier.open(DiskSettings(self.directory / "disk", 256 << 20)),
            objects=ObjectTier.open(ObjectSettings(f"file://{bucket}", linger_s=0.05)),
            limits=LIMITS,
            form=form,
            keyspace=valkey.keyspace(),
        )

    def restart(self) -> None:
        self.keeper.close()
        self.keeper = self.opened()

    def copied(self, refs: list[PartRef]) -> None:
        """They were told of and are in both lower tiers."""
        self.keeper.stored(refs, positions=range(len(refs)), likely=[True] * len(refs))

        def both() -> bool:
            now = self.keeper.statistics()
            assert now.keep is not None
            assert now.flush is not None
            return min(now.keep.copied_parts, now.flush.copied_parts) >= len(refs)

        eventually(both, "copies")
        idle(self.keeper)

    def came_back(self, refs: list[PartRef]) -> None:
        """Staged, and what the node finds then is what it stored."""
        assert stage(self.keeper, refs) == [Outcome.OK] * len(refs)
        for ref, (result, memory) in zip(refs, fetch_all(self.node, refs), strict=True):
            assert result.outcome is Outcome.OK
            assert memory == contents(ref)

    def dropped(self, tier: str, *, alone: bool = False) -> Dropped:
        found: list[Dropped] = []
        ready = threading.Event()

        def done(dropped: Dropped) -> None:
            found.append(dropped)
            ready.set()

        self.keeper.drop(tier, namespace=None, older_than_s=None, alone=alone, done=done)
        assert ready.wait(60)
        return found[0]

    def close(self) -> None:
        self.keeper.close()
        self.node.close()


@pytest.fixture(params=[False, True], ids=["plain", "encrypted"])
def host(request: pytest.FixtureRequest, server: Server, tmp_path: Path) -> Iterator[Host]:
    made = Host(server, tmp_path, keys=request.param)
    yield made
    made.close()


def test_parts_come_back_as_they_were_from_the_disk_and_from_objects(host: Host) -> None:
    refs = prompt("a", 8, nbytes=PART)
    fill(host.node, refs)
    host.copied(refs)
    must(host.server.ask("FLUSHALL"))
    assert locate(host.keeper, refs) == [Where.DISK] * 8
    host.came_back(refs)

    assert host.dropped("disk", alone=True).parts == 8
    must(host.server.ask("FLUSHALL"))
    eventually(lambda: locate(host.keeper, refs) == [Where.OBJECTS] * 8, "in objects alone, after the drop")
    host.came_back(refs)
    eventually(lambda: locate(host.keeper, refs) == [Where.DISK] * 8, "on the disk again")

    assert host.dropped("objects").parts == 8
    assert host.dropped("disk").parts == 8
    assert host.dropped("valkey").parts == 8
    assert host.server.key_names() == []
    assert locate(host.keeper, refs) == [Where.ABSENT] * 8


def test_what_was_kept_outlives_the_keeper(host: Host) -> None:
    refs = prompt("a", 6, nbytes=PART)
    fill(host.node, refs)
    host.copied(refs)
    host.restart()
    must(host.server.ask("FLUSHALL"))
    assert locate(host.keeper, refs) == [Where.DISK] * 6
    host.came_back(refs)


def test_copying_does_not_make_a_value_look_used(host: Host) -> None:
    refs = prompt("a", 2, nbytes=PART)
    fill(host.node, refs)
    names = host.server.key_names()
    assert len(names) == 2 * len(stripe_plan(PART))

    for name in names:
        dump = must(host.server.ask("DUMP", name))
        assert isinstance(dump, bytes)
        must(host.server.ask("RESTORE", name, "0", dump, "REPLACE", "IDLETIME", "1000"))
    host.copied(refs)
    for name in names:
        assert must(host.server.ask("OBJECT", "IDLETIME", name)) >= 1000  # type: ignore[operator]


def test_a_full_valkey_refuses_stages_and_loses_nothing(tmp_path: Path) -> None:
    with running_server("--maxmemory", "40mb", "--maxmemory-policy", "noeviction") as small:
        host = Host(small, tmp_path, keys=False)
        try:
            refs = prompt("a", 16, nbytes=PART)
            for ref in refs:
                fill(host.node, [ref])
                host.keeper.used([ref])
                eventually(lambda ref=ref: locate(host.keeper, [ref]) == [Where.DISK], "a copy")  # type: ignore[misc]
                must(small.ask("FLUSHALL"))
            outcomes = stage(host.keeper, refs)
            assert set(outcomes) == {Outcome.OK, Outcome.REFUSED}
            must(small.ask("FLUSHALL"))
            assert locate(host.keeper, refs) == [Where.DISK] * 16
            host.came_back(refs[:4])
        finally:
            host.close()
