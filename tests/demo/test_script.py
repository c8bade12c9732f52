"""``./demo`` itself: what it answers before it installs gigabytes. Its Python here installs nothing."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
INSTALLS = 97


@pytest.fixture
def demo(tmp_path: Path) -> Path:
    """A copy of the directory whose environment has the core alone, and whose pip fails."""
    for name in ("tools", "locks", "src", "pyproject.toml"):
        (tmp_path / name).symlink_to(ROOT / name)
    script = tmp_path / "demo"
    script.write_bytes((ROOT / "demo").read_bytes())
    script.chmod(0o755)
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    (tmp_path / ".venv" / ".locks").mkdir()
    python = tmp_path / ".venv" / "bin" / "python"
    python.write_text(
        f"#!/bin/sh\n"
        f'if [ "$1 $2" = "-m pip" ]; then echo "pip was called: $*" >&2; exit {INSTALLS}; fi\n'
        f'exec {sys.executable} "$@"\n'
    )
    python.chmod(0o755)
    with (ROOT / "locks" / "core.txt").open("rb") as lock:
        digest = subprocess.run(["cksum"], stdin=lock, capture_output=True, check=True).stdout
    (tmp_path / ".venv" / ".locks" / "core").write_bytes(digest)
    return script


def ask(demo: Path, *arguments: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run([demo, *arguments], capture_output=True, text=True, timeout=60, check=False)


def test_help_is_answered_before_the_engine_is_installed(demo: Path) -> None:
    done = ask(demo, "--help")
    assert done.returncode == 0
    assert "--replicas N" in done.stdout
    assert "--check-only" not in done.stdout
    assert done.stderr == ""


@pytest.mark.parametrize(
    ("arguments", "said"),
    [(["--replcas", "2"], "--replicas"), (["--replicas", "99"], "99"), (["--valkey", "http://x"], "http")],
)
def test_a_mistake_is_one_line_before_the_engine_is_installed(
    demo: Path, arguments: list[str], said: str
) -> None:
    done = ask(demo, *arguments)
    assert done.returncode == 2
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert line.startswith("kvferry: ")
    assert said in line


def test_a_good_command_line_goes_on_to_install_the_engine(demo: Path) -> None:
    done = ask(demo, "--replicas", "2", "--report", str(demo.parent / "report.html"))
    assert done.returncode == 2
    assert "pip was called" in done.stderr
    assert "locks/engine.txt" in done.stderr
