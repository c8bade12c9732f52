"""What a keeper's disk has and the bucket lacks gets there by itself, within bounds, and nothing else."""

import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.keeper.fleet import Answers
from tests.keeper.rig import EAGER, NAMESPACE, contents, fill, holds, idle, prompt
from tests.servers import free_ports, running_server

from kvferry.addresses import Address
from kvferry.identity.names import PartRef
from kvferry.keeper import peer, reconcile
from kvferry.keeper.access import KeeperAccess
from kvferry.keeper.client import Keepers
from kvferry.keeper.forms import Form, Plain, Sealed
from kvferry.keeper.keeper import Keeper
from kvferry.keeper.limits import Limits
from kvferry.keeper.wire import Where
from kvferry.testing.expectations import eventually
from kvferry.testing.memory_tier import MemoryTier
from kvferry.testing.processes import Program
from kvferry.testing.s3 import start_obstore
from kvferry.testing.tier_calls import fetch_all, probe_all, store_all
from kvferry.tiers.contract import Outcome
from kvferry.tiers.disk.settings import DiskSettings
from kvferry.tiers.disk.tier import DiskTier
from kvferry.tiers.objects.settings import ObjectSettings
from kvferry.tiers.objects.tier import ObjectTier
from kvferry.tiers.valkey.tier import ValkeyTier


@pytest.fixture(scope="module", autouse=True)
def obstore() -> None:
    """What it keeps for the life of the process is no leak of a test."""
    start_obstore()


KEY_IDS = (b"kid1", b"kid2")
SMALL = 500


class Disk(MemoryTier):
    """Lists what it holds, and what it does not hold any more."""

    def __init__(self, names: Sequence[PartRef]) -> None:
        super().__init__("disk")
        self.names = names
        for name in names:
            self.parts[name.key] = bytes(contents(name))

    def parts_within(self, seconds: float) -> Iterator[Sequence[PartRef]]:
        assert seconds == reconcile.LATELY_S
        for at in range(0, len(self.names), 100):
            yield self.names[at : at + 100]


class Objects(MemoryTier):
    """Knows what it lacks."""

    asked = 0

    def lacks(self, refs: Sequence[PartRef]) -> Sequence[PartRef]:
        self.asked += 1
        return [ref for ref in refs if ref.key not in self.parts]


def keeper(
    disk: MemoryTier, objects: MemoryTier | None, *, form: Form | None = None, limits: Limits = EAGER
) -> Keeper:
    return Keeper(valkey=MemoryTier("valkey"), disk=disk, objects=objects, limits=limits, form=form)


@pytest.fixture(autouse=True)
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reconcile, "PAGE_S", 0.005)


def looked(objects: Objects, passes: int) -> None:
    eventually(lambda: objects.asked >= passes, "pages")


@settings(max_examples=15, deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.booleans()), max_size=30), st.booleans())
def test_whatever_the_disk_has_and_objects_lack_is_there_soon(
    parts: list[tuple[bool, bool]], encrypted: bool
) -> None:
    """Under its name below. Of each: whether the disk still has it, and objects have."""
    refs = prompt("a", len(parts), nbytes=SMALL)
    form: Form = Sealed(KEY_IDS) if encrypted else Plain()
    names = [form.names(ref)[-1] for ref in refs]
    disk, objects = Disk(names), Objects("objects")
    for name, (kept, there) in zip(names, parts, strict=True):
        if not kept:
            del disk.parts[name.key]
        if there:
            objects.parts[name.key] = bytes(contents(name))
    made = keeper(disk, objects, form=form)
    try:
        wanted = [name for name, (kept, there) in zip(names, parts, strict=True) if kept or there]
        eventually(lambda: holds(objects, wanted), "in objects")
        idle(made)
        assert set(objects.parts) == {name.key for name in wanted}
        assert set(disk.parts) == {name.key for name, (kept, _) in zip(names, parts, strict=True) if kept}
        flush = made.statistics().flush
        assert flush is not None
        assert flush.copied_parts == sum(kept and not there for kept, there in parts)
    finally:
        made.close()


def test_it_shows_in_the_backlog_and_takes_no_more_than_its_share_of_it() -> None:
    refs = prompt("a", 900, nbytes=SMALL)
    disk, objects = Disk(refs), Objects("objects")
    objects.hold()
    limits = replace(EAGER, backlog_parts=400)
    made = keeper(disk, objects, limits=limits)

    def backlog() -> int:
        flush = made.statistics().flush
        assert flush is not None
        assert flush.parts <= 400 // reconcile.ROOM_DIVISOR
        assert not flush.dropped_parts
        return flush.parts

    try:
        eventually(lambda: backlog() == 400 // reconcile.ROOM_DIVISOR, "queued")
        objects.release()
        eventually(lambda: backlog() >= 0 and holds(objects, refs), "in objects")
    finally:
        objects.release()
        made.close()


def test_what_is_removed_or_dropped_on_its_way_is_not_there_afterwards(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whatever it is called below."""
    for form in (Plain(), Sealed(KEY_IDS)):
        refs = prompt("a", 4, nbytes=SMALL)
        disk, objects = Disk([form.names(ref)[0] for ref in refs]), Objects("objects")
        disk.hold()
        made = keeper(disk, objects, form=form)
        try:
            looked(objects, 1)
            removed = Answers()
            made.remove(refs[:2], done=removed)
            eventually(lambda made=made: made.statistics().removed_parts == 2, "told")  # type: ignore[misc]
            made.statistics()  # its thread has done what was asked of it before
            disk.release()
            removed.wait()
            idle(made)
            assert set(objects.parts) == {form.names(ref)[0].key for ref in refs[2:]}
        finally:
            disk.release()
            made.close()


def test_what_is_being_dropped_is_left_alone_until_that_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reconcile, "REST_S", 0.005)
    refs = prompt("a", 4, nbytes=SMALL)
    disk, objects = Disk(refs), Objects("objects")
    disk.hold()  # what the first pass finds waits
    made = keeper(disk, objects)
    try:
        done = Answers()
        made.drop("objects", namespace=NAMESPACE, older_than_s=None, done=done)
        done.wait()
        disk.release()
        looked(objects, objects.asked + 3)
        idle(made)
        assert not objects.parts
        made.drop_ended(NAMESPACE)
        eventually(lambda: holds(objects, refs), "in objects")
    finally:
        disk.release()
        made.close()


def test_real_tiers_name_what_was_used_lately_and_lack_what_was_never_there(tmp_path: Path) -> None:
    """And asking is no use of it."""
    refs = prompt("a", 6)
    (tmp_path / "bucket").mkdir(mode=0o700)
    disk = DiskTier.open(DiskSettings(tmp_path / "disk", 64 << 20))
    objects = ObjectTier.open(ObjectSettings(f"file://{tmp_path / 'bucket'}", linger_s=0.01))
    try:
        fill(disk, refs)
        assert {ref for page in disk.parts_within(1e6) for ref in page} == set(refs)
        assert not [ref for page in disk.parts_within(-60.0) for ref in page]
        disk.remove(refs[:1])
        assert {ref for page in disk.parts_within(1e6) for ref in page} == set(refs[1:])
        fill(objects, refs[:3])
        assert objects.lacks(refs) == refs[3:]
        assert probe_all(objects, refs[:3]) == [Outcome.OK] * 3
    finally:
        disk.close()
        objects.close()
    assert not objects.lacks(refs), "nobody knows"


def test_a_bucket_that_is_nearly_full_lacks_nothing_that_it_has_no_room_for(tmp_path: Path) -> None:
    (tmp_path / "bucket").mkdir(mode=0o700)
    refs = prompt("a", 8, nbytes=1 << 20)
    objects = ObjectTier.open(
        ObjectSettings(f"file://{tmp_path / 'bucket'}", linger_s=0.01, pack_bytes=1 << 20, max_bytes=8 << 20)
    )
    try:
        assert len(objects.lacks(refs)) == 7
        store_all(objects, [(ref, contents(ref)) for ref in refs[:6]])
        assert not objects.lacks(refs[6:])
    finally:
        objects.close()


def test_after_a_kill_all_that_the_disk_has_is_in_the_bucket_though_nobody_asks_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever of it had waited for the bucket, and what never could: there was none."""
    monkeypatch.setattr(peer, "GIVE_UP_S", 600.0)
    refs = prompt("a", 40, nbytes=100_000)
    address = Address("127.0.0.1", free_ports(1)[0])
    bucket = ["--objects", f"file://{tmp_path / 'bucket'}"]
    env = {name: value for name, value in os.environ.items() if not name.startswith("KVFERRY_")}
    with running_server() as server, ExitStack() as stack:
        keepers = Keepers([address], access=KeeperAccess(), node="node")
        stack.callback(keepers.close)
        node = ValkeyTier.connect(server.settings())
        stack.callback(node.close)

        def started(disk: str, *options: str) -> Program:
            command = [
                *(sys.executable, "-m", "kvferry", "keeper", "--valkey", server.url),
                *("--listen", str(address), "--metrics-port", "0"),
                *("--disk", str(tmp_path / disk), "--disk-size", "128MiB", *options),
            ]
            program = Program(
                "keeper",
                command,
                directory=tmp_path,
                ready=lambda: keepers.statistics().up == 1,
                env=env,
            )
            stack.callback(program.close)
            program.start()
            return program

        def killed(program: Program) -> None:
            program.kill()
            eventually(lambda: keepers.statistics().up == 0, "gone")

        def where() -> list[Where]:
            answers = Answers()
            keepers.locate(refs, deadline=time.monotonic() + 60.0, done=answers)
            return list(answers.wait()[0][0])  # type: ignore[call-overload]

        program = started("disk")
        fill(node, refs)
        keepers.used(refs[:20])
        eventually(lambda: where().count(Where.DISK) == 20, "on the disk")
        killed(program)
        program = started("disk", *bucket)
        keepers.used(refs[20:])
        eventually(lambda: where().count(Where.DISK) == 40, "on the disk")
        killed(program)  # what waits for the bucket is on the disk alone
        server.ask("FLUSHALL")
        program = started("disk", *bucket)
        other = ObjectTier.open(ObjectSettings(f"file://{tmp_path / 'bucket'}", refresh_s=0.2))
        stack.callback(other.close)
        eventually(lambda: not other.lacks(refs), "in the bucket")
        found = fetch_all(other, refs)
        assert [(one.outcome, data) for one, data in found] == [(Outcome.OK, contents(ref)) for ref in refs]
        killed(program)
