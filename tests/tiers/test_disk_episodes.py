"""Trouble of a disk is told once per episode, with what to do; and files that are deleted are noticed."""

import contextlib
import errno
import logging
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.tiers.disks import DiskStore, found_right

from kvferry.testing.expectations import eventually
from kvferry.testing.tier_calls import fetch_all, probe_all, some_bytes, some_ref, store_all
from kvferry.tiers.contract import Dropped, Outcome
from kvferry.tiers.disk import books, threads
from kvferry.tiers.disk.settings import DiskSettings
from kvferry.tiers.disk.tier import DiskTier
from kvferry.tiers.disk.trouble import EPISODE_S, Episodes, Trouble

MIB = 1 << 20
PART = MIB // 2


@pytest.fixture
def store(tmp_path: Path) -> Iterator[DiskStore]:
    with contextlib.closing(
        DiskStore(DiskSettings(tmp_path / "disk", 64 * MIB, segment_bytes=4 * MIB, stall_s=60.0))
    ) as made:
        yield made


@pytest.fixture
def tier(
    store: DiskStore, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> Iterator[DiskTier]:
    """One that looks often whether its files are there, and tries a full disk again at once."""
    caplog.set_level(logging.WARNING, "kvferry.tiers.disk")
    monkeypatch.setattr(threads, "LOOK_S", 0.02)
    for module in (books, threads):
        monkeypatch.setattr(module, "FULL_S", 0.01)
    made = store.open()
    yield made
    made.close()


def stored(tier: DiskTier, seeds: range) -> set[Outcome]:
    return set(store_all(tier, [(some_ref(PART, n), some_bytes(PART, n)) for n in seeds]))


def state_is(tier: DiskTier, state: str) -> None:
    eventually(lambda: tier.statistics().state == state, f"that it is {state}")


@pytest.mark.parametrize(
    ("code", "advice"), [(errno.EIO, "smartctl"), (errno.EROFS, "remount it rw"), (errno.ENOSPC, "free some")]
)
def test_a_disk_that_fails_is_told_once_with_what_to_do_though_it_fails_again_and_again(
    store: DiskStore, tier: DiskTier, caplog: pytest.LogCaptureFixture, code: int, advice: str
) -> None:
    assert stored(tier, range(2)) == {Outcome.OK}
    for turn in range(3):
        store.troubles.write = code
        assert Outcome.OK not in stored(tier, range(10 + 4 * turn, 14 + 4 * turn))
        store.troubles.write = 0
        eventually(lambda turn=turn: stored(tier, range(30 + turn, 31 + turn)) == {Outcome.OK}, "stores")  # type: ignore[misc]
    state_is(tier, "up")
    ends = code != errno.ENOSPC
    eventually(lambda: len(caplog.messages) == 1 + ends, "that it is told")
    assert os.strerror(code) in caplog.messages[0]
    assert advice in caplog.messages[0]
    assert str(store.settings.directory) in caplog.messages[0]
    assert [line.endswith("works again") for line in caplog.messages[1:]] == [True] * ends


def test_a_part_that_cannot_be_read_is_told_once(
    store: DiskStore, tier: DiskTier, caplog: pytest.LogCaptureFixture
) -> None:
    assert stored(tier, range(4)) == {Outcome.OK}
    for n in (0, 2):
        place = store.place(some_ref(PART, n))
        store.troubles.unreadable = {(place.segment, place.offset)}
        assert fetch_all(tier, [some_ref(PART, n)])[0][0].outcome is Outcome.FAILED
        assert found_right(tier, some_ref(PART, n + 1), n + 1)
    eventually(lambda: bool(caplog.messages), "a line")
    assert [Trouble.UNREADABLE.value in line for line in caplog.messages] == [True]


def test_where_no_segment_can_be_made_it_is_told_once(
    store: DiskStore, tier: DiskTier, caplog: pytest.LogCaptureFixture
) -> None:
    assert stored(tier, range(6)) == {Outcome.OK}
    store.troubles.allocate = errno.ENOSPC
    tried = store.troubles.tried["allocate"]
    for start in range(10, 60, 5):
        assert stored(tier, range(start, start + 5)) == {Outcome.OK}
    eventually(lambda: store.troubles.tried["allocate"] > tried + 2, "more tries")
    assert [Trouble.CRAMPED.value in line for line in caplog.messages] == [True]


@pytest.mark.parametrize("how", ["deleted", "emptied", "made anew", "a segment"])
def test_files_that_are_deleted_are_noticed_and_the_tier_is_left_out_until_it_is_opened_again(
    store: DiskStore, tier: DiskTier, caplog: pytest.LogCaptureFixture, how: str
) -> None:
    """Though what is open can be read and written still."""
    directory = store.settings.directory
    assert stored(tier, range(2)) == {Outcome.OK}
    match how:
        case "deleted":
            shutil.rmtree(directory)
        case "emptied":
            for file in directory.iterdir():
                file.unlink()
        case "made anew":
            shutil.rmtree(directory)
            directory.mkdir(mode=0o700)
            (directory / "lock").touch(mode=0o600)
        case _:
            store.segment(0).unlink()
    state_is(tier, "down")
    assert probe_all(tier, [some_ref(PART, 0)]) == [Outcome.REFUSED]
    assert stored(tier, range(2, 4)) == {Outcome.REFUSED}
    before = store.troubles.tried["try_out"]
    eventually(lambda: store.troubles.tried["try_out"] > before + 1, "more trials")
    assert tier.statistics().state == "down"
    assert ["deleted or unmounted" in line and "restart" in line for line in caplog.messages] == [True]
    tier.close()
    again = store.open()
    assert probe_all(again, [some_ref(PART, 0)]) == [Outcome.MISS]
    assert stored(again, range(4)) == {Outcome.OK}
    again.close()


def test_a_directory_that_was_away_for_a_while_is_used_again_when_it_is_back(
    store: DiskStore, tier: DiskTier, caplog: pytest.LogCaptureFixture
) -> None:
    """As a disk that was unmounted."""
    directory = store.settings.directory
    assert stored(tier, range(2)) == {Outcome.OK}
    directory.rename(directory.parent / "elsewhere")
    state_is(tier, "down")
    (directory.parent / "elsewhere").rename(directory)
    state_is(tier, "up")
    assert found_right(tier, some_ref(PART, 1), 1)
    assert stored(tier, range(2, 4)) == {Outcome.OK}
    eventually(lambda: len(caplog.messages) == 2, "that it is told")
    assert "deleted or unmounted" in caplog.messages[0]
    assert caplog.messages[1].endswith("works again")


def test_a_drop_from_a_directory_that_is_gone_is_refused_and_not_waited_for(
    store: DiskStore, tier: DiskTier
) -> None:
    """A drop that nothing ends is LATE, after a minute; the tier knows better."""
    assert stored(tier, range(6)) == {Outcome.OK}
    directory = store.settings.directory
    directory.rename(directory.parent / "elsewhere")
    state_is(tier, "down")
    said: list[Dropped] = []
    tier.drop(done=said.append)
    eventually(lambda: bool(said), "it is told")
    assert said[0].outcome is Outcome.REFUSED
    (directory.parent / "elsewhere").rename(directory)
    state_is(tier, "up")
    assert probe_all(tier, [some_ref(PART, n) for n in range(6)]) == [Outcome.MISS] * 6


@given(st.lists(st.tuples(st.floats(0.0, 2 * EPISODE_S), st.sampled_from([*Trouble, None])), max_size=60))
@settings(deadline=None, max_examples=100)
def test_trouble_is_told_where_it_was_not_met_for_long_and_its_end_where_it_was_told(
    events: list[tuple[float, Trouble | None]],
) -> None:
    """None: the disk is back."""
    episodes, now = Episodes(Path("/disk")), 0.0
    met: dict[Trouble, float] = {}
    out = False
    for wait_s, trouble in events:
        now += wait_s
        if trouble is None:
            assert (episodes.back() is not None) is out
            out = False
            continue
        error = OSError(errno.EROFS if trouble is Trouble.READ_ONLY else errno.EIO, "what it was")
        told = trouble not in met or now - met[trouble] >= EPISODE_S
        met[trouble] = now
        if trouble in (Trouble.READ_ONLY, Trouble.FAILS):
            line = episodes.left_out(error, now)
            out = out or told
        else:
            line = episodes.met(trouble, error, now)
        assert (line is not None) is told
        assert line is None or ("/disk" in line and "what it was" in line)
