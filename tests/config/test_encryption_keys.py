"""The file of encryption keys, as a setting of a node: from anywhere, or one line that shows no key."""

import subprocess
import sys
from pathlib import Path

import pytest

from kvferry.config import load_node_settings
from kvferry.errors import MisconfiguredError

VALKEY = "valkey://127.0.0.1:6379"
SECRET = "5ec4e7" * 10 + "abcd"


def key_file(tmp_path: Path, text: str = SECRET, *, mode: int = 0o600) -> Path:
    path = tmp_path / "encryption.keys"
    path.write_text(text + "\n")
    path.chmod(mode)
    return path


def test_keys_come_by_flag_environment_or_file(tmp_path: Path) -> None:
    path = key_file(tmp_path)
    toml = tmp_path / "node.toml"
    toml.write_text(f'valkey = "{VALKEY}"\nencryption_key_file = "{path}"\n')
    found = [
        load_node_settings({"valkey": VALKEY, "encryption_key_file": str(path)}, environ={}),
        load_node_settings({"valkey": VALKEY}, environ={"KVFERRY_ENCRYPTION_KEY_FILE": str(path)}),
        load_node_settings(environ={}, config_path=toml),
    ]
    rings = [settings.encryption_keys for settings in found]
    assert [len(ring.keys) for ring in rings if ring is not None] == [1, 1, 1]
    for settings in found:
        assert SECRET[:12] not in repr(settings)
    assert load_node_settings({"valkey": VALKEY}, environ={}).encryption_keys is None


def test_keys_without_valkey_are_a_mistake(tmp_path: Path) -> None:
    with pytest.raises(MisconfiguredError, match="--valkey"):
        load_node_settings({"encryption_key_file": str(key_file(tmp_path))}, environ={})


@pytest.mark.parametrize(
    ("text", "mode", "words"),
    [
        (SECRET, 0o644, "chmod 600"),
        (SECRET[:-1], 0o600, "line 1"),
        (f"{SECRET}\n{SECRET[:30]}", 0o600, "line 2"),
        ("", 0o600, "openssl rand -hex 32"),
    ],
)
def test_a_node_with_a_wrong_key_file_ends_with_one_line(
    tmp_path: Path, text: str, mode: int, words: str
) -> None:
    path = key_file(tmp_path, text, mode=mode)
    ended = subprocess.run(
        [sys.executable, "-m", "kvferry", "node", "--valkey", VALKEY, "--encryption-key-file", str(path)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert ended.returncode != 0
    assert ended.stderr.count("\n") == 1, ended.stderr
    assert words in ended.stderr
    assert str(path) in ended.stderr
    assert SECRET[:12] not in ended.stderr + ended.stdout


def test_without_keys_the_package_is_not_loaded() -> None:
    code = "import sys, kvferry.config, kvferry.tiers.valkey.tier; sys.exit('cryptography' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0
