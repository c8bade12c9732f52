"""Tests that pages name, as `engines/test_vllm.py::test_it`, and whether they exist."""

import ast
import re
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
_TEST = re.compile(r"`([\w/]+\.py)::(\w+)`")


def section_rows(page: Path, heading: str) -> list[list[str]]:
    """The cells of the table under a heading of a page."""
    section = page.read_text().split(f"## {heading}\n", 1)[1].split("\n## ", 1)[0]
    lines = [line for line in section.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines[2:]]


def named(text: str) -> list[tuple[str, str]]:
    """Files and names."""
    return _TEST.findall(text)


def missing(text: str) -> list[str]:
    """Those that do not exist."""
    return [f"{path}::{name}" for path, name in named(text) if name not in defined(path)]


@cache
def defined(path: str) -> frozenset[str]:
    """Functions and classes of a test file, methods included."""
    known = [root / path for root in (ROOT / "tests", ROOT / "src" / "kvferry", ROOT)]
    file = next((file for file in known if file.is_file()), None)
    if file is None:
        return frozenset()
    kinds = (ast.FunctionDef, ast.ClassDef)
    return frozenset(node.name for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, kinds))
