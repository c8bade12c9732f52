"""SGLang's own classes over a node: the cases in ``cases``, each a test of its own here.

They run in one child process: SGLang changes transformers and torch for the whole process it is imported in.
"""

import ast
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest

CASES = Path(__file__).parent / "cases"
ROOT = Path(__file__).parents[3]
LIMIT_S = 540.0


def _cases() -> list[str]:
    """``file::function`` of every case."""
    return [
        f"{path.stem}::{node.name}"
        for path in sorted(CASES.glob("case_*.py"))
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    ]


class Outcomes:
    """What became of every case."""

    def __init__(self, directory: Path) -> None:
        report = directory / "report.xml"
        ran = subprocess.run(
            [
                *(sys.executable, "-m", "pytest", "-q", str(CASES), "-o", "python_files=case_*.py"),
                *("-p", "tests.engines.sglang.cases.plugin"),
                *(f"--junitxml={report}", "--basetemp", str(directory / "tmp")),
            ],
            cwd=ROOT,
            env={**os.environ, "TMPDIR": str(directory)},
            capture_output=True,
            text=True,
            check=False,
            timeout=LIMIT_S,
        )
        self._output = ran.stdout[-20_000:] + ran.stderr[-5_000:]
        self._found: dict[str, list[str]] = {}
        if report.exists():
            for case in ET.parse(report).getroot().iter("testcase"):
                module = case.attrib["classname"].rpartition(".")[2]
                name = f"{module}::{case.attrib['name'].partition('[')[0]}"
                bad = [child for child in case if child.tag in ("failure", "error", "skipped")]
                texts = [f"{case.attrib['name']}: {child.text or child.attrib}" for child in bad]
                self._found.setdefault(name, []).extend(texts)

    def check(self, name: str) -> None:
        """Fails unless that case ran and every example of it passed."""
        if name not in self._found:
            pytest.fail(f"{name} did not run:\n{self._output}")
        if self._found[name]:
            pytest.fail("\n".join(self._found[name]))


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Outcomes]:
    yield Outcomes(tmp_path_factory.mktemp("sg"))


@pytest.mark.engine
@pytest.mark.parametrize("name", _cases())
def test_with_the_classes_of_sglang(name: str, outcomes: Outcomes) -> None:
    outcomes.check(name)
