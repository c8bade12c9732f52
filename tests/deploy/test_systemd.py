"""Units run commands that there are, with settings that there are."""

import configparser
import shlex
import tomllib
from pathlib import Path

from kvferry.cli.main import VERBS
from kvferry.keeper.settings import KEEPER_SETTINGS
from kvferry.router.http.limits import Limits
from kvferry.router.settings import ROUTER_SETTINGS

ROOT = Path(__file__).parents[2]
UNITS = ROOT / "deploy" / "systemd"


def _unit(name: str) -> configparser.ConfigParser:
    parser = configparser.ConfigParser(strict=False, interpolation=None)
    parser.optionxform = str
    assert parser.read(UNITS / f"kvferry-{name}.service")
    return parser


def test_the_unit_starts_the_keeper_and_names_its_file() -> None:
    service = _unit("keeper")["Service"]
    program, verb = shlex.split(service["ExecStart"])
    assert Path(program).name == "kvferry"
    assert verb == "keeper"
    assert verb in VERBS
    assert service["Environment"].startswith("KVFERRY_CONFIG=/etc/kvferry/")
    assert service["Restart"] == "always"


def test_the_example_of_the_settings_has_the_names_of_settings() -> None:
    section = (ROOT / "docs" / "settings.md").read_text().split("## A keeper")[1].split("## A router")[0]
    example = "\n".join(line[4:] for line in section.splitlines() if line.startswith("    "))
    names = {setting.name for setting in KEEPER_SETTINGS}
    assert set(tomllib.loads(example)) <= names
    assert "listen" in tomllib.loads(example)


def test_the_router_s_unit_starts_it_and_gives_requests_the_time_that_it_gives_them() -> None:
    service = _unit("router")["Service"]
    program, verb, *flags = shlex.split(service["ExecStart"])
    assert Path(program).name == "kvferry" and verb == "router" and verb in VERBS
    assert set(flags[::2]) <= {setting.flag for setting in ROUTER_SETTINGS}
    assert Path(flags[1]).parent.name == service["RuntimeDirectory"]
    assert service["Environment"].startswith("KVFERRY_CONFIG=/etc/kvferry/")
    assert int(service["TimeoutStopSec"]) > Limits().drain_s


def test_the_example_of_the_router_s_settings_has_the_names_of_settings() -> None:
    section = (ROOT / "docs" / "settings.md").read_text().split("## A router")[1].split("## An engine")[0]
    example = "\n".join(line[4:] for line in section.splitlines() if line.startswith("    "))
    assert set(tomllib.loads(example)) <= {setting.name for setting in ROUTER_SETTINGS}
    assert "worker" in tomllib.loads(example)
