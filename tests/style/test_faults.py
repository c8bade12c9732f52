"""docs/faults.md: every fault has tests that exist, and a counter that exists."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest

from kvferry.engines.vllm.counters import COUNTERS, FAILURES
from kvferry.node.wire import Reason
from kvferry.observe.metrics import METRICS
from kvferry.pool.entries import DeclineReason
from kvferry.tiers.contract import Outcome
from kvferry.tiers.valkey.jobs import Cause

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "faults.md"
FAULTS = range(1, 42)
LATER = {22, 23, 24, 25, 26, 36, 37}  # of parts that do not exist yet: a disk, objects, a router, events

NODE = "".join(file.read_text() for file in (ROOT / "src/kvferry/node").glob("*.py"))

_TEST = re.compile(r"`([\w/]+\.py)::(\w+)`")
_METRIC = re.compile(r"`((?:vllm:)?kvferry_\w+)`")


def rows(heading: str) -> list[list[str]]:
    """The cells of the table under a heading."""
    section = PAGE.read_text().split(f"## {heading}\n", 1)[1].split("\n## ", 1)[0]
    lines = [line for line in section.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines[2:]]


ALL = rows("All faults")
REPORTED = rows("Faults that other caches were reported with")


@cache
def defined(path: str) -> frozenset[str]:
    """Functions and classes of a test file, methods included."""
    known = [root / path for root in (ROOT / "tests", ROOT / "src" / "kvferry", ROOT)]
    file = next((file for file in known if file.is_file()), None)
    if file is None:
        return frozenset()
    kinds = (ast.FunctionDef, ast.ClassDef)
    return frozenset(node.name for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, kinds))


def test_every_fault_has_one_row() -> None:
    assert [int(row[0]) for row in ALL] == list(FAULTS)


@pytest.mark.parametrize("row", ALL, ids=lambda row: row[0])
def test_no_cell_is_empty_for_a_part_that_exists(row: list[str]) -> None:
    assert len(row) == 6
    number, fault, beyond, into, tests, counted = row
    assert fault and beyond and into
    if int(number) in LATER:
        assert into.startswith("comes with")
    else:
        assert _TEST.findall(tests)
        assert counted.strip("-")


@pytest.mark.parametrize("row", [*ALL, *REPORTED], ids=lambda row: row[0][:40])
def test_every_test_that_is_named_exists(row: list[str]) -> None:
    named = [(path, name) for cell in row for path, name in _TEST.findall(cell)]
    assert not [f"{path}::{name}" for path, name in named if name not in defined(path)]


def test_every_reported_fault_has_a_test() -> None:
    assert REPORTED
    assert not [row for row in REPORTED if not _TEST.findall(row[1])]


def test_every_counter_that_is_named_exists() -> None:
    known = {metric.exposed_name for metric in METRICS}
    known |= {f"vllm:kvferry_{name}_total" for name in (*COUNTERS, FAILURES)}
    named = {name for row in ALL for name in _METRIC.findall(row[5])}
    assert named
    assert not named - known


def test_every_cause_that_is_named_exists() -> None:
    words: set[str] = {kind.value for kinds in (Cause, Outcome, Reason, DeclineReason) for kind in kinds}
    words |= set(re.findall(r'"([a-z]+(?:-[a-z]+)*)"', NODE))
    named = {name for row in ALL for name in re.findall(r"`(?!kvferry)([a-z_-]+)`", row[5])}
    assert named
    assert not named - words


def test_a_test_that_does_not_exist_would_be_noticed() -> None:
    assert "test_a_hole_ends_the_prefix" in defined("node/test_node.py")
    assert "test_that_nobody_wrote" not in defined("node/test_node.py")
    assert not defined("node/test_that_nobody_wrote.py")
