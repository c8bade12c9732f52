"""Each kind of wrong tier is caught, by the test that is named for the property it breaks."""

import re
from collections.abc import Iterator

import pytest
from tests.testing import broken_tiers as broken
from tests.testing.suites import failure, names_of

from kvferry.testing import census, expectations
from kvferry.testing.memory_tier import MemoryStore, MemoryTier
from kvferry.testing.tier_contract import TierContract

# How long the suite waits for what never comes. Longer only where a slow machine did not get there.
WAITS_S = (1.0, 20.0)

PLANTED: list[tuple[type[MemoryTier], str, str]] = [
    (broken.IgnoresPartNumber, "test_parts_are_told_apart_by_every_field_of_their_names", "name 1 is"),
    (broken.ShortensNames, "test_parts_are_told_apart_by_every_field_of_their_names", "name [13] is"),
    (broken.Truncates, "test_what_is_stored_comes_back_byte_for_byte", "came back different"),
    (broken.MakesUpChecksums, "test_what_is_stored_comes_back_byte_for_byte", "other checksums"),
    (broken.LeavesChecksumsToTheCaller, "test_what_is_stored_comes_back_byte_for_byte", "CORRUPT"),
    (broken.WritesOnAMiss, "test_what_was_never_stored_is_a_miss_and_leaves_memory_alone", "was written"),
    (broken.MixesUpAProbe, "test_a_probe_tells_present_from_absent_in_order", "wrong answers"),
    (broken.OverwritesWhatIsThere, "test_storing_what_is_there_is_ok", "bytes changed"),
    (broken.RemovesNothing, "test_a_removed_part_is_a_miss", "never happened .*removal"),
    (broken.RemovesWhatIsNotThere, "test_a_removal_tells_what_was_there", "removing told"),
    (broken.PublishesHalf, "test_while_a_part_is_being_stored_nobody_sees_half_of_it", "half of it"),
    (broken.DropsCompletions, "test_every_item_is_reported_exactly_once", r"items \[13\] of 21 were not"),
    (broken.ReportsTwice, "test_every_item_is_reported_exactly_once", "more than once"),
    (broken.NeverCallsBack, "test_a_probe_tells_present_from_absent_in_order", "not reported"),
    (broken.IgnoresDeadlines, "test_a_deadline_already_past_ends_everything_as_late", "fetch: "),
    (broken.FinishesAfterReport, "test_after_done_no_memory_is_touched", "touched after done"),
    (broken.AcceptsAnySize, "test_memory_of_another_size_is_refused_at_once", "DID NOT RAISE"),
    (broken.CountsInFlightForEver, "test_statistics_tell_stored_fetched_and_missed_apart", "in flight"),
    (broken.CallsFailuresMisses, "test_a_failure_is_never_a_miss", "a fetch that failed is"),
    (broken.ProbesFailuresAsMisses, "test_a_failure_is_never_a_miss", "a probe that failed is"),
    (broken.CountsFailuresAsMisses, "test_a_failure_is_never_a_miss", "counted as a miss"),
    (broken.LosesErrors, "test_a_store_that_failed_says_so_and_leaves_nothing_wrong", "stores that failed"),
    (
        broken.KeepsHalfOfWhatFailed,
        "test_a_store_that_failed_says_so_and_leaves_nothing_wrong",
        "afterwards it is",
    ),
    (broken.WritesLate, "test_late_bytes_go_nowhere", "written after its item was reported"),
    (broken.IgnoresCancel, "test_a_cancelled_operation_does_not_wait_for_its_deadline", "not reported"),
    (broken.TrustsWhatItReads, "test_a_damaged_part_is_corrupt_and_then_a_miss", "after a bit flip it is"),
    (broken.KeepsDamage, "test_a_damaged_part_is_corrupt_and_then_a_miss", "never happened .*removal"),
    (broken.TrustsWhatItReads, "test_a_part_under_another_name_is_corrupt", "under another name it is"),
    (broken.ForgetsTheRestAtClose, "test_close_ends_what_is_left_and_may_be_repeated", "not reported"),
    (broken.ClosesWhenAnswered, "test_close_during_an_outage_reports_everything_and_returns", "not return"),
    (broken.LeaksAThread, "test_a_closed_tier_leaves_no_thread_and_no_descriptor", "left-behind"),
]


@pytest.fixture
def leaked_threads_end() -> Iterator[None]:
    broken.LeaksAThread.ENDS.clear()
    yield
    broken.LeaksAThread.ENDS.set()


@pytest.mark.usefixtures("leaked_threads_end")
@pytest.mark.parametrize(
    ("tier_class", "test", "says"), PLANTED, ids=[kind.__name__ for kind, _, _ in PLANTED]
)
def test_a_planted_defect_is_caught(
    tier_class: type[MemoryTier], test: str, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []
    for wait_s in WAITS_S:
        monkeypatch.setattr(expectations, "WAIT_S", wait_s)
        monkeypatch.setattr(census, "SETTLE_S", wait_s)
        store = MemoryStore(tier_class)
        tier = store.open()
        try:
            found.append(failure(TierContract, test, store=store, tier=tier))
        finally:
            tier.close()
        if re.search(says, found[-1]):
            return
    pytest.fail(f"{test} says {found}")


def test_every_test_of_the_suite_catches_something() -> None:
    assert not set(names_of(TierContract)) - {test for _, test, _ in PLANTED}
