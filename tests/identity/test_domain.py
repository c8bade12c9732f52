"""A domain's key comes from where it was said to, and goes nowhere else."""

import copy
import pickle
from pathlib import Path

import pytest

from kvferry.errors import MisconfiguredError
from kvferry.identity.domain import KEY_VARIABLE, DomainKey

RAW = bytes(range(200, 232))


def _key_file(directory: Path, content: bytes, mode: int = 0o600) -> Path:
    path = directory / "domain.key"
    path.write_bytes(content)
    path.chmod(mode)
    return path


@pytest.mark.parametrize("content", [RAW, RAW.hex().encode(), RAW.hex().upper().encode() + b"\n"])
def test_a_key_file_holds_the_bytes_or_their_hexadecimal_digits(tmp_path: Path, content: bytes) -> None:
    assert DomainKey.from_file(_key_file(tmp_path, content)) == DomainKey(RAW)


@pytest.mark.parametrize("content", [b"", b"secret", RAW + b"\n", RAW.hex().encode()[:32], b"z" * 64])
def test_a_file_that_holds_no_key_is_refused_without_showing_it(tmp_path: Path, content: bytes) -> None:
    with pytest.raises(MisconfiguredError, match="openssl rand -hex 32") as caught:
        DomainKey.from_file(_key_file(tmp_path, content))
    assert content[:6].decode("latin-1") not in str(caught.value) or not content
    assert caught.value.__cause__ is None


@pytest.mark.parametrize("mode", [0o604, 0o602, 0o620, 0o644])
def test_a_key_file_that_others_can_reach_is_refused(tmp_path: Path, mode: int) -> None:
    with pytest.raises(MisconfiguredError, match="chmod 600"):
        DomainKey.from_file(_key_file(tmp_path, RAW, mode))


def test_a_missing_key_file_is_an_error_and_never_the_default_key(tmp_path: Path) -> None:
    with pytest.raises(MisconfiguredError, match="No such file"):
        DomainKey.load("d", key_file=tmp_path / "absent", environ={})


def test_the_file_comes_before_the_environment_and_that_before_the_default(tmp_path: Path) -> None:
    path = _key_file(tmp_path, RAW)
    environment = {KEY_VARIABLE: bytes(32).hex()}
    assert DomainKey.load("d", key_file=path, environ=environment) == DomainKey(RAW)
    assert DomainKey.load("d", environ=environment) == DomainKey(bytes(32))
    assert DomainKey.load("d", environ={}) == DomainKey.default("d")
    with pytest.raises(MisconfiguredError, match=KEY_VARIABLE):
        DomainKey.load("d", environ={KEY_VARIABLE: ""})


def test_only_the_default_key_is_marked_as_no_secret() -> None:
    assert DomainKey.default("d").is_default
    assert not DomainKey(RAW).is_default
    assert DomainKey.default("d") != DomainKey.default("e")
    with pytest.raises(MisconfiguredError):
        DomainKey.default("\ud800")


def test_a_key_is_never_shown_or_serialised() -> None:
    key = DomainKey(RAW)
    for text in (repr(key), str(key), f"{key}"):
        assert RAW.hex()[:8] not in text
        assert key.key_id.hex() in text
    assert key.key_id not in RAW
    for serialise in (pickle.dumps, copy.copy):
        with pytest.raises(TypeError, match="not serialised"):
            serialise(key)


@pytest.mark.parametrize("length", [0, 16, 31, 33])
def test_a_key_of_another_length_is_refused(length: int) -> None:
    with pytest.raises(MisconfiguredError, match=str(length)):
        DomainKey(bytes(length))
