"""The tier contract over a real server fails where the Valkey tier is broken: it reaches what it checks."""

import re
from typing import Any

import pytest
from tests.servers import Server
from tests.testing.suites import failure
from tests.tiers.stores import ValkeyStore

from kvferry.testing import expectations
from kvferry.testing.tier_contract import TierContract
from kvferry.tiers.contract import Outcome
from kvferry.tiers.valkey import jobs, protection
from kvferry.tiers.valkey import tier as valkey_tier
from kvferry.tiers.valkey.tier import ValkeyTier

# How long the suite waits for what never comes. Longer only where a slow machine did not get there.
WAITS_S = (2.0, 30.0)

FAILED_IS_MISS = {
    verdict: Outcome.OK if outcome is Outcome.OK else Outcome.MISS
    for verdict, outcome in jobs._OUTCOMES.items()
}
FAILED_IS_OK = dict.fromkeys(jobs._OUTCOMES, Outcome.OK)


def nothing(*_: Any, **__: Any) -> None:
    pass


def count_as_missed(self: ValkeyTier, part: Any, counter: Any) -> None:
    with self._lock:
        self._missed += part.lost


stored = valkey_tier.store_jobs


def store_but_one(*arguments: Any, **options: Any) -> Any:
    return stored(*arguments, **options)[1:]


PLANTED: dict[str, tuple[Any, str, Any, str, str]] = {
    "checksums are not compared": (
        protection._Checked,
        "result",
        lambda self: protection.Received(self._expected, intact=True),
        "test_a_damaged_part_is_corrupt_and_then_a_miss",
        "after a bit flip it is Outcome.OK",
    ),
    "a failure is reported as a miss": (
        jobs,
        "_OUTCOMES",
        FAILED_IS_MISS,
        "test_a_failure_is_never_a_miss",
        "a fetch that failed is Outcome.MISS",
    ),
    "a failure is counted as a miss": (
        ValkeyTier,
        "_count",
        count_as_missed,
        "test_a_failure_is_never_a_miss",
        "a failure was counted as a miss",
    ),
    "a failed store is called done": (
        jobs,
        "_OUTCOMES",
        FAILED_IS_OK,
        "test_a_store_that_failed_says_so_and_leaves_nothing_wrong",
        "stores that failed are",
    ),
    "a stripe is forgotten": (
        valkey_tier,
        "store_jobs",
        store_but_one,
        "test_what_is_stored_comes_back_byte_for_byte",
        "not reported",
    ),
    "nothing is removed": (
        ValkeyTier,
        "remove",
        nothing,
        "test_a_removed_part_is_a_miss",
        "its removal",
    ),
}


@pytest.mark.parametrize("name", PLANTED, ids=lambda name: name.replace(" ", "-"))
def test_a_planted_defect_is_caught(name: str, server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    owner, attribute, instead, test, says = PLANTED[name]
    monkeypatch.setattr(owner, attribute, instead)
    found = []
    for wait_s in WAITS_S:
        monkeypatch.setattr(expectations, "WAIT_S", wait_s)
        store = ValkeyStore([server], server.settings)
        tier = store.open()
        try:
            found.append(failure(TierContract, test, store=store, tier=tier))
        finally:
            tier.close()
        if re.search(says, found[-1]):
            return
    pytest.fail(f"{test} says {found}")
