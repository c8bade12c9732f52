"""docs/engines.md: no claim without a test that exists."""

from pathlib import Path

import pytest
from tests.style.named_tests import ROOT, missing, named, section_rows

PAGE = ROOT / "docs" / "engines.md"
ENGINES = {"vLLM", "SGLang", "LMCache", "transformers"}
TESTED = section_rows(PAGE, "What is tested")
NOT_RUN = section_rows(PAGE, "What was not run here")


@pytest.mark.parametrize("row", TESTED, ids=lambda row: f"{row[1]} {row[0][:40]}")
def test_a_claim_names_its_engine_how_it_was_tested_and_tests_that_exist(row: list[str]) -> None:
    assert len(row) == 4
    feature, engine, how, tests = row
    assert feature and how
    assert engine in ENGINES
    assert named(tests)
    assert not missing(tests)


def test_every_engine_that_has_a_room_has_claims() -> None:
    rooms = {path.name for path in (ROOT / "src" / "kvferry" / "engines").iterdir() if _has_source(path)}
    assert rooms == {engine.lower() for _, engine, *_ in TESTED}


def test_no_claim_is_made_twice() -> None:
    claims = [(feature, engine) for feature, engine, *_ in TESTED]
    assert len(claims) == len(set(claims))


@pytest.mark.parametrize("row", NOT_RUN, ids=lambda row: f"{row[1]} {row[0][:40]}")
def test_what_was_not_run_says_why(row: list[str]) -> None:
    assert len(row) == 3
    assert row[1] in ENGINES | {"all"}
    assert row[2]
    assert not missing(row[2])


def _has_source(path: Path) -> bool:
    return path.is_dir() and any(path.glob("*.py"))
