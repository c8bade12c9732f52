"""The disk tier: the contract suite, restarts, limits, and a disk that is full, read-only, broken or hung."""

import contextlib
import errno
import logging
import mmap
import os
import signal
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from tests.tiers.disks import DiskStore, found_right, taken

from kvferry.errors import MisconfiguredError
from kvferry.identity.names import PartRef
from kvferry.testing import expectations
from kvferry.testing.expectations import eventually
from kvferry.testing.tier_calls import (
    UNTOUCHED,
    Results,
    empty_memory,
    fetch_all,
    probe_all,
    some_bytes,
    some_ref,
    store_all,
)
from kvferry.testing.tier_contract import Damage, TierContract, TierStore
from kvferry.tiers.contract import FetchItem, FetchResult, Outcome, StoreItem
from kvferry.tiers.disk.settings import DiskSettings
from kvferry.tiers.disk.tier import DiskTier

MIB = 1 << 20
SIZE = 64 * MIB
WITHOUT_O_DIRECT = Path("/dev/shm")


@pytest.fixture
def settings(tmp_path: Path) -> DiskSettings:
    return DiskSettings(tmp_path / "disk", SIZE, stall_s=60.0, close_s=60.0)


@pytest.fixture
def store(settings: DiskSettings) -> Iterator[DiskStore]:
    with contextlib.closing(DiskStore(settings)) as made:
        yield made


@pytest.fixture
def tier(store: DiskStore) -> Iterator[DiskTier]:
    made = store.open()
    yield made
    made.close()


def parts(seeds: range, nbytes: int = MIB) -> list[tuple[PartRef, memoryview]]:
    return [(some_ref(nbytes, n), some_bytes(nbytes, n)) for n in seeds]


class TestDiskTier(TierContract):
    @pytest.fixture
    def store(self, tmp_path: Path) -> Iterator[TierStore]:
        with contextlib.closing(DiskStore(DiskSettings(tmp_path / "disk", SIZE))) as made:
            yield made


class TestDiskTierWithoutDirectIO(TierContract):
    """On tmpfs, which had no O_DIRECT until Linux 6.6 and may have it since."""

    @pytest.fixture
    def store(self) -> Iterator[TierStore]:
        with (
            tempfile.TemporaryDirectory(dir=WITHOUT_O_DIRECT) as directory,
            contextlib.closing(DiskStore(DiskSettings(Path(directory) / "disk", SIZE))) as made,
        ):
            yield made


# -- bytes ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("nbytes", [1, 4095, 4096, 4097, MIB + 17])
@pytest.mark.parametrize("shift", [0, 1, 512])
def test_memory_at_any_address_is_read_and_written_right(tier: DiskTier, nbytes: int, shift: int) -> None:
    """Aligned, as the pool's is, or not; and nothing beside it is touched."""
    ref, data = some_ref(nbytes, shift), some_bytes(nbytes, shift)
    room = nbytes + shift + 4096
    source, target = memoryview(mmap.mmap(-1, room)), memoryview(mmap.mmap(-1, room))
    source[shift : shift + nbytes] = data
    target[:] = bytes([UNTOUCHED]) * room
    stored = source[shift : shift + nbytes]
    assert store_all(tier, [(ref, stored.toreadonly() if nbytes % 2 else stored)]) == [Outcome.OK]
    results = Results(1)
    item = FetchItem(ref, target[shift : shift + nbytes])
    tier.fetch([item], deadline=time.monotonic() + 15.0, done=results.done)
    assert results.wait()[0].outcome is Outcome.OK
    assert item.into == data
    assert set(target[:shift]) | set(target[shift + nbytes :]) == {UNTOUCHED}


def test_a_part_larger_than_a_segment_is_refused(tier: DiskTier) -> None:
    assert store_all(tier, parts(range(1), 20 * MIB)) == [Outcome.REFUSED]


def test_two_stores_of_one_part_at_a_time_write_it_once(tier: DiskTier) -> None:
    results = Results(8)
    item = StoreItem(some_ref(3 * MIB, 1), some_bytes(3 * MIB, 1), ())
    tier.store([item] * 8, deadline=time.monotonic() + 15.0, done=results.done)
    assert set(results.wait()) == {Outcome.OK}
    assert tier._books.counts.written_bytes < 4 * MIB


# -- restarts ------------------------------------------------------------------------------------------


def test_what_was_stored_is_there_after_a_restart(store: DiskStore) -> None:
    """And what was removed, by a caller or because it was damaged, is not."""
    held = parts(range(6))
    tier = store.open()
    store_all(tier, held)
    removed, damaged = held[1][0], held[3][0]
    done = Results(1)
    tier.remove([removed], done=lambda found: done.done(0, list(found)))
    assert done.wait() == [[Outcome.OK]]
    store.damage(damaged, Damage.BIT_FLIP)
    assert fetch_all(tier, [damaged])[0][0].outcome is Outcome.CORRUPT
    tier.close()
    again = store.open()
    found = probe_all(again, [ref for ref, _ in held])
    assert found == [Outcome.MISS if ref in (removed, damaged) else Outcome.OK for ref, _ in held]
    assert [found_right(again, ref, n) for n, (ref, _) in enumerate(held)].count(True) == 4
    again.close()


WRITER = """
import sys, time
from pathlib import Path
from kvferry.testing.tier_calls import some_bytes, some_ref, store_all
from kvferry.tiers.disk.settings import DiskSettings
from kvferry.tiers.disk.tier import DiskTier
tier = DiskTier.open(DiskSettings(Path(sys.argv[1]), int(sys.argv[2])))
for n in range(100000):
    parts = [(some_ref(300000, m), some_bytes(300000, m)) for m in range(4 * n, 4 * n + 4)]
    print(n, [outcome.value for outcome in store_all(tier, parts)], flush=True)
"""


def test_after_a_kill_in_the_middle_of_writing_all_that_is_found_is_right(
    store: DiskStore, settings: DiskSettings
) -> None:
    """What was reported as stored is there, but for what lies behind a write that the kill cut off."""
    command = [sys.executable, "-c", WRITER, str(settings.directory), str(SIZE)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as writer:
        assert writer.stdout is not None
        reported = [writer.stdout.readline() for _ in range(20)]
        writer.send_signal(signal.SIGKILL)
        reported += writer.stdout.readlines()
    assert all("ok" in line and "refused" not in line for line in reported[:20])
    tier = store.open()
    outcomes = {}
    for n in range(4 * len(reported) + 8):
        result, memory = fetch_all(tier, [some_ref(300000, n)])[0]
        outcomes[n] = result.outcome
        assert result.outcome in (Outcome.OK, Outcome.MISS)
        assert result.outcome is Outcome.MISS or memory == some_bytes(300000, n)
    first = 4 * (len(reported) - 8)  # within the segments that are kept
    assert [outcomes[n] for n in range(max(0, first), first + 16)] == [Outcome.OK] * 16
    tier.close()


def test_another_size_keeps_what_it_can(store: DiskStore, settings: DiskSettings) -> None:
    held = parts(range(20))
    tier = store.open()
    store_all(tier, held)
    tier.close()
    store.settings = replace(settings, size_bytes=2 * SIZE)
    larger = store.open()
    assert all(found_right(larger, ref, n) for n, (ref, _) in enumerate(held))
    store_all(larger, parts(range(20, 70)))
    larger.close()
    store.settings = settings
    smaller = store.open()
    assert taken(settings.directory) <= SIZE
    assert sum(found_right(smaller, ref, n) for n, (ref, _) in enumerate(parts(range(70)))) >= 40
    smaller.close()


# -- the directory -------------------------------------------------------------------------------------


def test_the_directory_never_takes_more_than_its_size(tier: DiskTier, settings: DiskSettings) -> None:
    """While three times as much is stored; what was stored last is there, and older parts have left."""
    for start in range(0, 192, 16):
        batch = parts(range(start, start + 16))
        assert store_all(tier, batch) == [Outcome.OK] * 16
        assert taken(settings.directory) <= SIZE
        assert found_right(tier, batch[-1][0], start + 15)
    assert tier.statistics().detail["evicted_parts"] != "0"
    assert probe_all(tier, [some_ref(MIB, 0)]) == [Outcome.MISS]


def test_used_parts_outlive_unused_ones(tier: DiskTier) -> None:
    hot = parts(range(4))
    store_all(tier, [*hot, *parts(range(4, 8))])
    for start in range(100, 200, 10):
        tier.touch([ref for ref, _ in hot])
        store_all(tier, parts(range(start, start + 10)))
    assert all(found_right(tier, ref, n) for n, (ref, _) in enumerate(hot))
    assert probe_all(tier, [some_ref(MIB, n) for n in range(4, 8)]) == [Outcome.MISS] * 4


def test_files_are_this_users_alone(tier: DiskTier, settings: DiskSettings) -> None:
    store_all(tier, parts(range(1)))
    assert stat.S_IMODE(settings.directory.stat().st_mode) == 0o700
    modes = {file.name: stat.S_IMODE(file.stat().st_mode) for file in settings.directory.iterdir()}
    assert set(modes.values()) == {0o600}
    assert set(modes) == {"lock", "trial", "segment-0000"}


def test_a_directory_open_to_others_is_refused(settings: DiskSettings) -> None:
    settings.directory.mkdir(mode=0o755)
    with pytest.raises(MisconfiguredError, match="chmod 700"):
        DiskTier.open(settings)


def test_a_second_process_is_refused(tier: DiskTier, settings: DiskSettings) -> None:
    with pytest.raises(MisconfiguredError, match="another process uses it"):
        DiskTier.open(settings)


def test_a_size_that_holds_nothing_is_refused(settings: DiskSettings) -> None:
    with pytest.raises(MisconfiguredError, match="at least 64MiB"):
        DiskTier.open(replace(settings, size_bytes=SIZE - 1))


def test_without_o_direct_one_line_says_so(
    settings: DiskSettings, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As a file system says it that refuses the flag."""
    plain = os.open

    def refusing(path: object, flags: int, mode: int = 0o777) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return plain(path, flags, mode)  # type: ignore[arg-type]

    monkeypatch.setattr(os, "open", refusing)
    with caplog.at_level(logging.WARNING):
        tier = DiskTier.open(settings)
    assert len([line for line in caplog.messages if "O_DIRECT" in line]) == 1
    store_all(tier, parts(range(2)))
    assert found_right(tier, *(some_ref(MIB, 1), 1))
    assert tier.statistics().detail["direct"] == "no"
    tier.close()


# -- a disk in trouble ---------------------------------------------------------------------------------


def test_where_no_segment_can_be_made_older_ones_leave_for_new_parts(
    store: DiskStore, tier: DiskTier
) -> None:
    """The file system is full before the tier is: it goes on within what it has."""
    store_all(tier, parts(range(20)))
    store.troubles.allocate = errno.ENOSPC
    assert store_all(tier, parts(range(20, 60))) == [Outcome.OK] * 40
    assert len(tier._books.log.segments) == 2
    assert found_right(tier, some_ref(MIB, 59), 59)
    assert tier.statistics().state == "up"


def test_a_full_disk_refuses_stores_and_serves_reads(store: DiskStore, tier: DiskTier) -> None:
    """And stores again when there is room."""
    store_all(tier, parts(range(3)))
    store.troubles.write = errno.ENOSPC
    assert set(store_all(tier, parts(range(10, 16)))) == {Outcome.REFUSED}
    assert tier.statistics().state == "degraded"
    assert tier.statistics().failed == {"disk_full": 6}
    assert found_right(tier, some_ref(MIB, 1), 1)
    store.troubles.write = 0
    eventually(lambda: store_all(tier, parts(range(10, 11))) == [Outcome.OK], "room again")


def test_a_disk_that_is_full_from_the_start_refuses_at_once(store: DiskStore) -> None:
    store.troubles.allocate = errno.ENOSPC
    tier = store.open()
    assert store_all(tier, parts(range(3))) == [Outcome.REFUSED] * 3
    assert fetch_all(tier, [some_ref(MIB, 0)])[0][0].outcome is Outcome.MISS
    assert tier.statistics().state == "degraded"
    store.troubles.allocate = 0
    eventually(lambda: store_all(tier, parts(range(1))) == [Outcome.OK], "room again")
    tier.close()


@pytest.mark.parametrize("code", [errno.EROFS, errno.EIO])
def test_a_disk_that_cannot_be_written_is_quarantined(store: DiskStore, tier: DiskTier, code: int) -> None:
    """Refused at once from then on, reads too; used again when it can be written."""
    store_all(tier, parts(range(2)))
    store.troubles.write = code
    assert store_all(tier, parts(range(5, 6))) == [Outcome.FAILED]
    assert tier.statistics().state == "down"
    assert os.strerror(code) in tier.statistics().detail["warning"]
    assert fetch_all(tier, [some_ref(MIB, 0)])[0][0].outcome is Outcome.REFUSED
    assert store_all(tier, parts(range(6, 7))) == [Outcome.REFUSED]
    store.troubles.write = 0
    eventually(lambda: tier.statistics().state == "up", "the end of its quarantine")
    assert found_right(tier, some_ref(MIB, 1), 1)
    assert store_all(tier, parts(range(5, 6))) == [Outcome.OK]


def test_a_record_that_cannot_be_read_is_given_up_in_the_end(store: DiskStore, tier: DiskTier) -> None:
    store_all(tier, parts(range(2)))
    for _ in range(3):
        eventually(lambda: tier.statistics().state == "up", "the end of its quarantine")
        store.troubles.read = errno.EIO
        assert fetch_all(tier, [some_ref(MIB, 0)])[0][0].outcome is Outcome.FAILED
        store.troubles.read = 0
    eventually(lambda: tier.statistics().state == "up", "the end of its quarantine")
    assert fetch_all(tier, [some_ref(MIB, 0)])[0][0].outcome is Outcome.MISS
    assert found_right(tier, some_ref(MIB, 1), 1)


def test_used_parts_that_cannot_be_read_leave_with_their_segment(store: DiskStore, tier: DiskTier) -> None:
    hot = [ref for ref, _ in parts(range(4))]
    store_all(tier, parts(range(8)))
    tier.touch(hot)
    places = [store.place(ref) for ref in hot]
    store.troubles.unreadable = {(place.segment, place.offset) for place in places}
    for start in range(100, 300, 10):
        new = parts(range(start, start + 10))
        eventually(lambda new=new: set(store_all(tier, new)) == {Outcome.OK}, "stores")  # type: ignore[misc]
    eventually(lambda: tier.statistics().state == "up", "the end of its quarantine")
    assert probe_all(tier, hot) == [Outcome.MISS] * 4
    assert found_right(tier, some_ref(MIB, 299), 299)


def test_a_head_that_cannot_be_read_keeps_no_node_from_starting(store: DiskStore) -> None:
    """What is behind it in its segment is gone; what is before it, and other segments, are not."""
    before = store.open()
    store_all(before, parts(range(6)))
    place = store.place(some_ref(MIB, 3))
    inside = [n for n in range(6) if store.place(some_ref(MIB, n)).offset < place.offset]
    before.close()
    store.troubles.unreadable = {(place.segment, place.offset)}
    after = store.open()
    assert all(found_right(after, some_ref(MIB, n), n) for n in inside)
    assert probe_all(after, [some_ref(MIB, 3)]) == [Outcome.MISS]
    assert store_all(after, parts(range(10, 12))) == [Outcome.OK] * 2
    after.close()


def test_a_hung_disk_hangs_nobody(store: DiskStore) -> None:
    """What waits ends on time; what the disk moves ends when it lets go, and keeps its memory till then."""
    store.settings = replace(store.settings, stall_s=0.2)
    tier = store.open()
    refs = [ref for ref, _ in parts(range(12))]
    eventually(lambda: set(store_all(tier, parts(range(12)))) == {Outcome.OK}, "stores")
    items = [FetchItem(ref, empty_memory(MIB)) for ref in refs]
    ended: dict[int, FetchResult] = {}
    with store.troubles.hang():
        transfer = tier.fetch(items, deadline=time.monotonic() + 5.0, done=ended.__setitem__)
        eventually(lambda: len(ended) == 8, "the end of what waits")
        assert {result.outcome for result in ended.values()} <= {Outcome.LATE, Outcome.REFUSED}
        assert store.troubles.hanging >= 4
        eventually(lambda: tier.statistics().state == "down", "quarantine")
        transfer.cancel()
        assert probe_all(tier, refs[:1]) == [Outcome.REFUSED]
        assert store_all(tier, parts(range(20, 21))) == [Outcome.REFUSED]
        assert fetch_all(tier, refs[:1])[0][0].outcome is Outcome.REFUSED
    eventually(lambda: len(ended) == 12, "the end of what was moved")
    eventually(lambda: tier.statistics().state == "up", "the end of its quarantine")
    eventually(lambda: all(found_right(tier, ref, n) for n, ref in enumerate(refs)), "its parts")
    tier.close()


def test_close_does_not_wait_for_a_hung_disk_for_ever(
    store: DiskStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the disk still moves is reported when it lets go."""
    monkeypatch.setattr(expectations, "WAIT_S", 60.0)
    store.settings = replace(store.settings, close_s=0.5)
    tier = store.open()
    store_all(tier, parts(range(2)))
    results = Results(1)
    with store.troubles.hang():
        item = FetchItem(some_ref(MIB, 0), empty_memory(MIB))
        tier.fetch([item], deadline=time.monotonic() + 1000.0, done=results.done)
        eventually(lambda: store.troubles.hanging == 1, "the read")
        tier.close()
    results.wait()
    for thread in tier._threads:
        thread.join()
    tier._files.close()
