"""A disk tier opened with another size than before: only the oldest goes, and only what has no room."""

import contextlib
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeAlias

import pytest
from tests.tiers.disks import DiskStore, check, files_in, found_right, taken

from kvferry.identity.names import PartRef
from kvferry.testing.expectations import eventually
from kvferry.testing.tier_calls import some_bytes, some_ref, store_all
from kvferry.tiers.contract import Outcome
from kvferry.tiers.disk.files import SegmentFiles
from kvferry.tiers.disk.format import FIRST_RECORD, record_bytes
from kvferry.tiers.disk.opening import open_log
from kvferry.tiers.disk.settings import DiskSettings
from kvferry.tiers.disk.tier import DiskTier

MIB = 1 << 20
PART_BYTES = MIB // 4
LOGGER = "kvferry.tiers.disk"

Stores: TypeAlias = Callable[[DiskSettings], DiskStore]


@pytest.fixture
def stores() -> Iterator[Stores]:
    """Makes them."""
    with contextlib.ExitStack() as stack:
        yield lambda settings: stack.enter_context(contextlib.closing(DiskStore(settings)))


def settings_of(directory: Path, size_mib: int, segment_mib: int | None = None) -> DiskSettings:
    segment_bytes = segment_mib * MIB if segment_mib else None
    return DiskSettings(directory / "disk", size_mib * MIB, segment_bytes, stall_s=60.0, close_s=60.0)


def keep(tier: DiskTier, seeds: range) -> None:
    parts: list[tuple[PartRef, memoryview]] = [
        (some_ref(PART_BYTES, n), some_bytes(PART_BYTES, n)) for n in seeds
    ]
    assert set(store_all(tier, parts)) == {Outcome.OK}


def found(tier: DiskTier, seeds: range) -> list[int]:
    return [n for n in seeds if found_right(tier, some_ref(PART_BYTES, n), n)]


def segment_sizes(directory: Path) -> list[int]:
    """MiB, rounded."""
    found = files_in(directory / "disk")
    return sorted(
        round(status.st_size / MIB) for name, status in found.items() if name.startswith("segment-")
    )


@pytest.mark.parametrize(
    ("before", "after", "kept_segments"),
    [
        pytest.param((50, 5), (16, 4), 2, id="segments of another size"),
        pytest.param((40, 4), (20, 4), 4, id="segments of the same size"),
        pytest.param((50, 5), (16, 1), 2, id="much smaller segments"),
        pytest.param((16, 1), (64, 16), 7, id="much larger segments"),
        pytest.param((99, 10), (8, 2), 0, id="none has room"),
    ],
)
def test_what_was_stored_last_is_kept_as_far_as_there_is_room_and_one_line_says_what_went(
    tmp_path: Path,
    stores: Stores,
    before: tuple[int, int],
    after: tuple[int, int],
    kept_segments: int,
    caplog: pytest.LogCaptureFixture,
) -> None:
    store = stores(settings_of(tmp_path, *before))
    tier = store.open()
    per_segment, segments = (before[1] * MIB - FIRST_RECORD) // record_bytes(PART_BYTES), 7
    stored = range(per_segment * segments - 1)  # the last one has room for another part
    keep(tier, stored)
    assert len(tier._books.log.segments.in_use) == segments
    tier.close()

    store.settings = settings_of(tmp_path, *after)
    files = SegmentFiles.open(store.settings.directory)
    with caplog.at_level(logging.WARNING, LOGGER):
        log = open_log(files, store.settings)
    files.close()
    went = segments - kept_segments
    line = f"let go the oldest {went} of its segments"
    assert [line in message for message in caplog.messages] == [True] * (went > 0)
    assert set(log.records) == {some_ref(PART_BYTES, n) for n in [*stored][per_segment * went :]}
    assert taken(tmp_path / "disk") <= store.settings.size_bytes
    check(log)
    tier = store.open()

    for start in range(1000, 1000 + 5 * after[0], 10):  # more than it holds
        keep(tier, range(start, start + 10))
        assert taken(tmp_path / "disk") <= store.settings.size_bytes
    assert found(tier, range(start, start + 10)) == [*range(start, start + 10)]
    check(tier._books.log)
    before_close = set(tier._books.log.records)
    tier.close()

    caplog.clear()
    with caplog.at_level(logging.WARNING, LOGGER):
        tier = store.open()
    assert not caplog.messages
    assert set(tier._books.log.records) == before_close
    tier.close()


def test_segments_of_the_size_before_leave_first_and_make_room_for_others(
    tmp_path: Path, stores: Stores
) -> None:
    store = stores(settings_of(tmp_path, 50, 5))
    tier = store.open()
    keep(tier, range(100))
    tier.close()
    store.settings = settings_of(tmp_path, 16, 4)
    tier = store.open()
    keep(tier, range(200, 203))
    assert set(segment_sizes(tmp_path)) == {4, 5}
    for start in range(300, 360, 10):
        keep(tier, range(start, start + 10))
    eventually(lambda: set(segment_sizes(tmp_path)) == {4}, "the end of the old ones")
    assert found(tier, range(350, 360)) == [*range(350, 360)]
    tier.close()


def test_a_larger_size_is_used_to_its_end_though_there_were_small_segments(
    tmp_path: Path, stores: Stores
) -> None:
    """Of which only so many can be open."""
    store = stores(settings_of(tmp_path, 16, 1))
    tier = store.open()
    keep(tier, range(20))
    tier.close()
    store.settings = settings_of(tmp_path, 1024)
    tier = store.open()
    segments = tier._books.log.segments
    assert 256 * segments.segment_bytes > 1000 * MIB
    keep(tier, range(20, 40))
    assert found(tier, range(40)) == [*range(40)]
    tier.close()
