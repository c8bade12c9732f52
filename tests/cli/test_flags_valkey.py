"""The line for Valkey: one domain's keys, the commands a node sends, and no secret."""

import json
from pathlib import Path

import pytest

from kvferry.cli.main import main
from kvferry.identity.domain import DomainKey, domain_tag

KEY = "5a" * 32


@pytest.fixture
def key_file(tmp_path: Path) -> Path:
    path = tmp_path / "domain.key"
    path.write_text(KEY)
    path.chmod(0o600)
    return path


def test_the_line_limits_the_user_to_the_domains_keys(
    key_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["flags", "valkey", "--domain", "payments", "--domain-key-file", str(key_file), "--user", "p"]
    assert main(arguments) == 0
    out, err = capsys.readouterr()
    tag = domain_tag("payments", DomainKey.from_file(key_file).key_id).hex()
    assert out.startswith(f"ACL SETUSER p reset on >PASSWORD ~kvf1:{tag}* +get ")
    assert (out.count("\n"), err) == (1, "")
    assert KEY not in out
    assert main([*arguments, "--json"]) == 0
    assert json.loads(capsys.readouterr().out) + "\n" == out


def test_a_keepers_user_may_also_look_through_the_keys(
    key_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["flags", "valkey", "--domain", "payments", "--domain-key-file", str(key_file)]
    assert main(arguments) == 0
    node = capsys.readouterr().out.strip()
    assert main([*arguments, "--keeper"]) == 0
    keeper = capsys.readouterr().out.strip()
    more = " +scan +object|idletime +object|freq +getrange +client|no-touch"
    assert keeper == node.replace("SETUSER kvferry ", "SETUSER kvferry-keeper ") + more


def test_a_domain_without_a_key_is_named_as_such(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("KVFERRY_DOMAIN_KEY", raising=False)
    assert main(["flags", "valkey"]) == 0
    out, err = capsys.readouterr()
    tag = domain_tag("default", DomainKey.default("default").key_id).hex()
    assert f" ~kvf1:{tag}* " in out
    assert "without a key" in err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["valkey", "--socket", "/s"], "--socket is not for valkey"),
        (["valkey", "--chunk-tokens", "16"], "--chunk-tokens is not for valkey"),
        (["vllm", "--user", "x"], "--user is not for vllm"),
        (["sglang", "--keeper"], "--keeper is not for sglang"),
        (["valkey", "--user", "a b"], "'a b'"),
        (["valkey", "--user", ""], "--user ''"),
        (["valkey", "--user", "a\nb"], "letters"),
        (["valkey", "--domain-key-file", "/nonexistent/key"], "No such file"),
    ],
)
def test_a_mistake_is_one_line_and_no_half_of_the_answer(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["flags", *arguments]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert said in err
