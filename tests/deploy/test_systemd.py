"""The keeper's unit runs a command that there is, with settings that there are."""

import configparser
import shlex
import tomllib
from pathlib import Path

from kvferry.cli.main import VERBS
from kvferry.keeper.settings import KEEPER_SETTINGS

ROOT = Path(__file__).parents[2]
UNIT = ROOT / "deploy" / "systemd" / "kvferry-keeper.service"


def _unit() -> configparser.ConfigParser:
    parser = configparser.ConfigParser(strict=False, interpolation=None)
    parser.optionxform = str
    parser.read(UNIT)
    return parser


def test_the_unit_starts_the_keeper_and_names_its_file() -> None:
    service = _unit()["Service"]
    program, verb = shlex.split(service["ExecStart"])
    assert Path(program).name == "kvferry"
    assert verb == "keeper"
    assert verb in VERBS
    assert service["Environment"].startswith("KVFERRY_CONFIG=/etc/kvferry/")
    assert service["Restart"] == "always"


def test_the_example_of_the_settings_has_the_names_of_settings() -> None:
    section = (ROOT / "docs" / "settings.md").read_text().split("## A keeper")[1].split("## An engine")[0]
    example = "\n".join(line[4:] for line in section.splitlines() if line.startswith("    "))
    names = {setting.name for setting in KEEPER_SETTINGS}
    assert set(tomllib.loads(example)) <= names
    assert "listen" in tomllib.loads(example)
