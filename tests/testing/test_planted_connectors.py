"""Each kind of wrong connector is caught, by the test that is named for the property it breaks."""

import re
from typing import Any

import pytest
from tests.testing import broken_connectors as broken
from tests.testing.suites import failure, names_of

from kvferry.testing import connector_contract, fake_engine
from kvferry.testing.connector_contract import ConnectorContract
from kvferry.testing.memory_connector import MemoryFleet, MemoryScheduler, MemoryWorker
from kvferry.testing.memory_kv import KvStore

# How long the suite waits for what never comes. Longer only where a slow machine did not get there.
PATIENCE = ((3000, 0.5), (60_000, 20.0))  # steps, seconds of recovery

WRONG_BYTES = "reads another prefix's KV"
NEVER = "did not get there"

Defect = type[MemoryScheduler] | type[MemoryWorker] | type[KvStore]

PLANTED: list[tuple[tuple[Defect, ...], str, str]] = [
    ((broken.MixesUpBlocks,), "test_an_engine_loads_what_another_computed", WRONG_BYTES),
    ((broken.ReportsTwice,), "test_an_engine_loads_what_another_computed", "does not wait|not there"),
    ((broken.NeverReports,), "test_an_engine_loads_what_another_computed", NEVER),
    ((broken.PromisesEverything,), "test_a_prompt_that_is_stored_whole_still_computes_a_token", "no token"),
    ((broken.WantsAllOrNothing,), "test_a_longer_prompt_loads_the_prefix_that_it_shares", "0 instead of 24"),
    ((broken.LoadsOverTheEnginesOwn,), "test_only_what_the_engine_lacks_is_loaded", WRONG_BYTES),
    ((broken.HoldsWhatItFinds,), "test_only_what_the_engine_lacks_is_loaded", "free blocks in the end"),
    ((broken.StoresPromptsAlone,), "test_decoded_tokens_are_stored_too", "8 instead of 24"),
    ((broken.ReadsRankZero,), "test_ranks_load_their_own_parts", WRONG_BYTES),
    ((broken.IgnoresSalts,), "test_salts_keep_users_apart", WRONG_BYTES),
    ((broken.RaisesForASalt,), "test_a_malformed_salt_is_served_without_sharing", "no text"),
    ((broken.IgnoresCaps,), "test_a_request_loads_no_more_than_it_allows", "40 instead of 0"),
    ((broken.CountsTheEnginesOwn,), "test_a_request_loads_no_more_than_it_allows", "0 instead of 16"),
    ((broken.RaisesForACap,), "test_what_is_no_cap_changes_nothing", "no number of tokens"),
    (
        (broken.StoresNothingUnread,),
        "test_a_request_that_needs_every_position_reads_nothing",
        "0 instead of 40",
    ),
    ((broken.LosesPinsUnderPressure,), "test_scarce_blocks_neither_deadlock_nor_leak", NEVER),
    ((broken.NeverLoadsAgain,), "test_a_preempted_request_comes_back_with_its_own_bytes", "0 instead of 40"),
    (
        (broken.StoresNothingAfterPreemption,),
        "test_what_is_computed_after_a_preemption_is_stored",
        "of 56",
    ),
    (
        (broken.PinsNothing,),
        "test_blocks_of_a_preempted_request_are_not_reused_while_they_are_copied_out",
        WRONG_BYTES,
    ),
    (
        (broken.PinsEverything,),
        "test_blocks_of_a_preempted_request_are_not_reused_while_they_are_copied_out",
        NEVER,
    ),
    ((broken.ReportsEarly,), "test_an_abort_during_a_load_frees_the_blocks_once", WRONG_BYTES),
    ((broken.ReusesAnAbortedLoad,), "test_after_an_abort_the_same_prompt_has_a_load_of_its_own", WRONG_BYTES),
    ((broken.ForgetsAbortedLoads,), "test_an_abort_at_any_step_leaves_nothing", "leases"),
    ((broken.CallsFailuresGood,), "test_a_damaged_part_is_recomputed_and_asked_for_once", WRONG_BYTES),
    ((broken.AsksForEver, broken.KeepsDamage), "test_a_damaged_part_is_recomputed_and_asked_for_once", NEVER),
    (
        (broken.CallsFailuresOfRankOneGood,),
        "test_damage_on_one_rank_is_recomputed_on_all",
        WRONG_BYTES,
    ),
    ((broken.NeverStoresTwice,), "test_what_was_lost_is_stored_again", "0 instead of 40"),
    ((broken.RaisesWithoutANode,), "test_without_a_node_requests_are_served", "no node"),
    (
        (broken.CallsAGoneNodeGood,),
        "test_a_node_that_is_gone_during_a_load_costs_the_load_alone",
        WRONG_BYTES,
    ),
    (
        (broken.ForgetsSavesOfAGoneNode,),
        "test_a_node_that_is_gone_during_a_save_gives_the_blocks_back",
        NEVER,
    ),
    (
        (broken.ForgetsAfterARestart,),
        "test_a_node_that_comes_back_is_used_again_without_help",
        "nothing is shared",
    ),
    (
        (broken.BelievesTheNodeBefore,),
        "test_a_node_that_comes_back_is_used_again_without_help",
        "0 instead of 40",
    ),
    (
        (broken.LoadsFromTheNodeAfter,),
        "test_a_node_that_restarts_during_a_load_and_a_save_costs_those_alone",
        WRONG_BYTES,
    ),
    (
        (broken.KeepsLeasesOfTheKilled,),
        "test_an_engine_that_is_killed_during_a_load_leaves_nothing_in_the_node",
        "1 leases",
    ),
    (
        (broken.PublishesFirst,),
        "test_an_engine_that_is_killed_during_a_save_leaves_nothing_half_written",
        WRONG_BYTES,
    ),
    (
        (broken.CallsFailuresGood,),
        "test_a_life_at_random_keeps_bytes_right_and_returns_everything",
        f"seed [0-9]: BrokenError: .*{WRONG_BYTES}.*; after: ",
    ),
]


def fleet_with(defects: tuple[Defect, ...]) -> MemoryFleet:
    parts: dict[str, Any] = {}
    for defect in defects:
        kinds = (("scheduler", MemoryScheduler), ("worker", MemoryWorker), ("store", KvStore))
        parts[next(name for name, base in kinds if issubclass(defect, base))] = defect
    return MemoryFleet(**parts)


@pytest.mark.parametrize(
    ("defects", "test", "says"), PLANTED, ids=[defects[0].__name__ for defects, _, _ in PLANTED]
)
def test_a_planted_defect_is_caught(
    defects: tuple[Defect, ...], test: str, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []
    for steps, recovery_s in PATIENCE:
        monkeypatch.setattr(fake_engine, "MAX_STEPS", steps)
        monkeypatch.setattr(connector_contract, "RECOVERY_S", recovery_s)
        fleet = fleet_with(defects)
        try:
            found.append(failure(ConnectorContract, test, fleet=fleet))
        finally:
            fleet.close()
        if re.search(says, found[-1]):
            return
    pytest.fail(f"{test} says {found}")


def test_every_test_of_the_suite_catches_something() -> None:
    assert not set(names_of(ConnectorContract)) - {test for _, test, _ in PLANTED}
