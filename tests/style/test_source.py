"""Rules of the source that no linter knows."""

import ast
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "kvferry"
MAX_LINES = 440
MAX_FUNCTION_LINES = 75
FORBIDDEN_NAMES = {"utils", "util", "common", "helpers", "helper", "manager", "misc"}

MODULES = sorted(SOURCE.rglob("*.py"))
TESTS = sorted((ROOT / "tests").rglob("*.py"))


def _name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def _tracked() -> list[Path]:
    listing = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=False
    ).stdout
    return [ROOT / name for name in listing.split("\0") if name]


def _is_public(name: str) -> bool:
    return not name.startswith("_")


def test_the_rules_look_at_the_whole_source() -> None:
    assert len(MODULES) > 15
    assert SOURCE / "errors.py" in MODULES


@pytest.mark.parametrize("path", MODULES + TESTS, ids=_name)
def test_a_file_can_be_read_in_one_sitting(path: Path) -> None:
    lines = len(path.read_text().splitlines())
    assert lines <= MAX_LINES, f"{lines} lines: split it by meaning"


@pytest.mark.parametrize("path", MODULES, ids=_name)
def test_a_module_is_named_for_what_it_does(path: Path) -> None:
    assert not FORBIDDEN_NAMES & set(path.relative_to(SOURCE).with_suffix("").parts)


@pytest.mark.parametrize("path", MODULES, ids=_name)
def test_public_names_say_what_they_are(path: Path) -> None:
    tree = ast.parse(path.read_text())
    missing = []
    if tree.body and not ast.get_docstring(tree):
        missing.append("the module")
    for node in tree.body:
        if not isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        if _is_public(node.name) and not ast.get_docstring(node):
            missing.append(node.name)
    assert not missing, f"no docstring: {missing}"


@pytest.mark.parametrize("path", MODULES, ids=_name)
def test_a_function_fits_a_screen(path: Path) -> None:
    long = [
        f"{node.name} ({node.end_lineno - node.lineno + 1})"
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and node.end_lineno is not None
        and node.end_lineno - node.lineno + 1 > MAX_FUNCTION_LINES
    ]
    assert not long


@pytest.mark.parametrize("path", MODULES, ids=_name)
def test_runtime_checks_raise_one_of_our_errors(path: Path) -> None:
    """Nor in testing/: pytest explains an assert in a user's own files only."""
    asserts = [node.lineno for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Assert)]
    assert not asserts, f"assert disappears under -O: lines {asserts}"


@pytest.mark.parametrize("path", MODULES, ids=_name)
def test_wall_clock_decides_nothing(path: Path) -> None:
    """Durations and deadlines use the monotonic clock; a clock jump must not matter."""
    calls = [
        node.lineno
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute)
        and node.attr == "time"
        and isinstance(node.value, ast.Name)
        and node.value.id == "time"
    ]
    assert not calls, f"time.time: lines {calls}"


def test_no_file_knows_the_machine_it_was_written_on() -> None:
    # Written in two pieces so that this file does not find itself.
    pattern = re.compile(r"(?<![\w.])/wo" + r"rk/|/tmp/bash" + "_jobs")
    found = []
    for path in _tracked():
        if not path.is_file():
            continue
        try:
            text = path.read_text()
        except UnicodeDecodeError:
            continue
        if pattern.search(text):
            found.append(_name(path))
    assert not found
