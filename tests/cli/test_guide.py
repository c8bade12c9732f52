"""docs/guide/index.md can be followed: its commands run, and print what it shows."""

import gzip
import importlib.util
import re
import shlex
import shutil
import textwrap
from pathlib import Path

import pytest

from kvferry.cli.main import main

ROOT = Path(__file__).parents[2]
GUIDE = ROOT / "docs" / "guide"
SAMPLE = "requests.jsonl.gz"
BLOCK = re.compile(r"(?:^    .*\n|^\n(?=    ))+", re.MULTILINE)


def commands() -> list[tuple[list[str], str]]:
    """Each command of the page, with what the page shows below it."""
    found = []
    for block in BLOCK.findall((GUIDE / "index.md").read_text()):
        for shell in re.split(r"^(?=\$ )", textwrap.dedent(block), flags=re.MULTILINE):
            line, _, shown = shell.partition("\n")
            if line.startswith("$ "):
                found.append((shlex.split(line[2:]), shown))
    return found


def test_every_command_of_the_guide_prints_what_it_shows(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    shutil.copy(GUIDE / SAMPLE, tmp_path)
    monkeypatch.chdir(tmp_path)
    verbs = set()
    for words, shown in commands():
        assert words[0] == "kvferry"
        argv, _, target = (" ".join(words[1:])).partition(" > ")
        assert main(argv.split()) == 0, argv
        printed = capsys.readouterr().out
        if target:
            Path(target).write_text(printed)
        at = 0
        for part in re.split(r"^\.\.\.\n", shown, flags=re.MULTILINE):
            for line in filter(None, part.splitlines()):
                at = printed.find(line.strip(), at)
                assert at >= 0, f"{argv} does not print, or not there: {line}"
        verbs.add(words[1])
    assert verbs == {"size", "concurrency", "analyze", "plan", "price"}


def test_the_sample_is_what_its_script_writes() -> None:
    spec = importlib.util.spec_from_file_location("guide_log", ROOT / "tools" / "guide_log.py")
    assert spec is not None
    assert spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    assert gzip.decompress(script.log()) == gzip.decompress((GUIDE / SAMPLE).read_bytes())
