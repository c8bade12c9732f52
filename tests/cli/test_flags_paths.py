"""Paths in an engine's flag mean the same file wherever the engine is started."""

import json
from pathlib import Path

import pytest

from kvferry.cli.main import main

FLAGS = {"--domain-key-file": "domain_key_file", "--token-file": "token_file", "--socket": "socket"}


def _settings(target: str, capsys: pytest.CaptureFixture[str], *more: str) -> dict[str, object]:
    assert main(["flags", target, "--json", *more]) == 0
    value: dict[str, object] = json.loads(capsys.readouterr().out)
    extra = value.get("kv_connector_extra_config", value)
    assert isinstance(extra, dict)
    return extra


@pytest.mark.parametrize("target", ["vllm", "sglang"])
@pytest.mark.parametrize(("flag", "key"), FLAGS.items())
def test_a_relative_path_is_printed_in_full(
    target: str,
    flag: str,
    key: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert _settings(target, capsys, flag, "here/it")[key] == str(tmp_path / "here/it")
    assert _settings(target, capsys, flag, "/there/it")[key] == "/there/it"
    monkeypatch.setenv("HOME", "/home/of-mine")
    assert _settings(target, capsys, flag, "~/it")[key] == "/home/of-mine/it"


def test_a_socket_is_as_long_as_its_whole_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    deep = tmp_path / ("d" * 80)
    deep.mkdir()
    monkeypatch.chdir(deep)
    assert main(["flags", "vllm", "--socket", "s" * 30]) == 2
    assert "longer than 107 bytes" in capsys.readouterr().err


def test_a_directory_that_is_gone_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    assert main(["flags", "vllm", "--token-file", "token"]) == 2
    assert "give an absolute path" in capsys.readouterr().err
    monkeypatch.chdir(tmp_path)
