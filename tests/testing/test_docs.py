"""The examples of docs/testing.md run as they stand."""

import os
import re
import subprocess
import sys
from pathlib import Path

from kvferry.testing.connector_contract import ConnectorFleet
from kvferry.testing.faults import Ending
from kvferry.testing.proxy import Proxy, obey
from kvferry.testing.tier_contract import TierStore

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "testing.md").read_text()
_BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_FILE = re.compile(r"# (\w+\.py)\n")


def blocks(language: str) -> list[str]:
    found = [text for name, text in _BLOCK.findall(PAGE) if name == language]
    assert found
    return found


def test_every_python_block_is_a_file_that_passes(tmp_path: Path) -> None:
    for text in blocks("python"):
        name = _FILE.match(text)
        assert name, f"no file name: {text[:40]!r}"
        assert not (tmp_path / name[1]).exists()
        (tmp_path / name[1]).write_text(text)
    env = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-W", "error", str(tmp_path)]
    found = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stdout


def test_every_command_of_the_proxy_is_understood() -> None:
    with Proxy(("127.0.0.1", 1)) as proxy:
        for text in blocks("proxy"):
            for line in text.splitlines():
                obey(proxy, line)


def test_the_tables_name_every_method_and_every_ending() -> None:
    for kind in (TierStore, ConnectorFleet):
        methods = [name for name in vars(kind) if not name.startswith("_")]
        assert not [name for name in methods if f"`{name}(" not in PAGE]
    assert not [ending.name for ending in Ending if f"`{ending.name}`" not in PAGE]
