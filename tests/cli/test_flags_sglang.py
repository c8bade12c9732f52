"""The arguments for SGLang: its own parser of them is satisfied, and so are our settings."""

import json
import shlex
from pathlib import Path

import pytest

from kvferry.cli.main import main
from kvferry.config import default_socket_path
from kvferry.engines.sglang.settings import BackendSettings, parse_settings


def printed(capsys: pytest.CaptureFixture[str], *more: str) -> tuple[list[str], dict[str, object]]:
    assert main(["flags", "sglang", *more]) == 0
    *flags, value = shlex.split(capsys.readouterr().out)
    return flags, json.loads(value)


def test_the_arguments_survive_a_shell_and_hold_only_what_differs(capsys: pytest.CaptureFixture[str]) -> None:
    flags, extra = printed(capsys)
    assert flags[-3:] == ["--hicache-storage-backend", "dynamic", "--hicache-storage-backend-extra-config"]
    assert extra == {
        "backend_name": "kvferry",
        "module_path": "kvferry.engines.sglang.backend",
        "class_name": "KvferryStorage",
        "interface_v1": 1,
    }


def test_what_is_printed_is_what_the_backend_accepts(capsys: pytest.CaptureFixture[str]) -> None:
    _, extra = printed(capsys)
    assert parse_settings(extra, environ={}) == BackendSettings(socket=default_socket_path({}))
    options = ["--socket", "/run/it's.sock", "--deadline-cap-ms", "500", "--domain", "team"]
    _, extra = printed(capsys, *options, "--domain-key-file", "/k", "--token-file", "/t")
    assert parse_settings(extra, environ={}) == BackendSettings(
        socket=Path("/run/it's.sock"),
        deadline_s=0.5,
        domain="team",
        domain_key_file=Path("/k"),
        token_file=Path("/t"),
    )


def test_json_is_the_value_alone(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["flags", "sglang", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["interface_v1"] == 1


def test_what_is_for_another_engine_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["flags", "sglang", "--chunk-tokens", "256"]) == 2
    assert "--chunk-tokens is not for sglang" in capsys.readouterr().err
