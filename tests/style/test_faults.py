"""docs/faults.md: every fault has tests that exist, and a counter that exists."""

import re
from pathlib import Path

import pytest
from tests.style.named_tests import defined, missing, named, section_rows

from kvferry.engines.vllm.counters import COUNTERS, FAILURES
from kvferry.node.wire import Reason
from kvferry.observe.keeper_metrics import KEEPER_METRICS
from kvferry.observe.metrics import METRICS
from kvferry.observe.router_metrics import ROUTER_METRICS
from kvferry.pool.entries import DeclineReason
from kvferry.tiers.contract import Outcome
from kvferry.tiers.disk.books import Cause as DiskCause
from kvferry.tiers.objects.bucket import Trouble
from kvferry.tiers.valkey.jobs import Cause

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "faults.md"
FAULTS = range(1, 42)

NODE = "".join(file.read_text() for file in (ROOT / "src/kvferry/node").glob("*.py"))

_METRIC = re.compile(r"`((?:vllm:)?kvferry_\w+)`")


ALL = section_rows(PAGE, "All faults")
REPORTED = section_rows(PAGE, "Faults that other caches were reported with")


def test_every_fault_has_one_row() -> None:
    assert [int(row[0]) for row in ALL] == list(FAULTS)


@pytest.mark.parametrize("row", ALL, ids=lambda row: row[0])
def test_no_cell_is_empty_for_a_part_that_exists(row: list[str]) -> None:
    assert len(row) == 6
    number, fault, beyond, into, tests, counted = row
    assert fault and beyond and into
    assert int(number)
    assert named(tests)
    assert counted.strip("-")


@pytest.mark.parametrize("row", [*ALL, *REPORTED], ids=lambda row: row[0][:40])
def test_every_test_that_is_named_exists(row: list[str]) -> None:
    assert not missing(" ".join(row))


def test_every_reported_fault_has_a_test() -> None:
    assert REPORTED
    assert not [row for row in REPORTED if not named(row[1])]


def test_every_counter_that_is_named_exists() -> None:
    known = {metric.exposed_name for metric in (*METRICS, *KEEPER_METRICS, *ROUTER_METRICS)}
    known |= {f"vllm:kvferry_{name}_total" for name in (*COUNTERS, FAILURES)}
    found = {name for row in ALL for name in _METRIC.findall(row[5])}
    assert found
    assert not found - known


def test_every_cause_that_is_named_exists() -> None:
    words: set[str] = {
        kind.value for kinds in (Cause, DiskCause, Trouble, Outcome, Reason, DeclineReason) for kind in kinds
    }
    words |= set(re.findall(r'"([a-z]+(?:-[a-z]+)*)"', NODE))
    found = {name for row in ALL for name in re.findall(r"`(?!kvferry)([a-z_-]+)`", row[5])}
    assert found
    assert not found - words


def test_a_test_that_does_not_exist_would_be_noticed() -> None:
    assert "test_a_hole_ends_the_prefix" in defined("node/test_node.py")
    assert "test_that_nobody_wrote" not in defined("node/test_node.py")
    assert not defined("node/test_that_nobody_wrote.py")
