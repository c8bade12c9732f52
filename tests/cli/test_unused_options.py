"""An option that a command would not look at is refused, with what to do, before anything is done."""

import os

import pytest

from kvferry.cli.main import main

KEEPERS = ("--keepers", "127.0.0.1:1")
VALKEY = ("--valkey", "valkey://127.0.0.1:1")
NODE = ("--socket", "/tmp/nobody.sock")
WITH_ENGINE = ("warm", "--engine", "http://127.0.0.1:1", "prompts.txt")
MOST = ("warm", "--most-reused", "1h", "--max", "1GiB")


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith("KVFERRY_"):
            monkeypatch.delenv(name)


@pytest.mark.parametrize(
    ("argv", "flag", "hint"),
    [
        (("drop", "memory", *KEEPERS), "--keepers", "leave it out"),
        (("drop", "memory", "--keeper-token-file", "f"), "--keeper-token-file", "leave it out"),
        (("drop", "memory", *VALKEY), "--valkey", "leave it out"),
        (("drop", "disk", *VALKEY), "--valkey", "keepers drop from there"),
        (("drop", "objects", *VALKEY), "--valkey", "keepers drop from there"),
        (("drop", "valkey", *VALKEY, *KEEPERS), "--keepers", "leave one of them out"),
        (("drop", "valkey", *VALKEY, "--keeper-tls-ca", "f"), "--keeper-tls-ca", "leave one of them out"),
        (("drop", "valkey", *VALKEY, "--request", "r"), "--valkey", "leave one of them out"),
        (("drop", "all", *VALKEY, "--request", "r"), "--valkey", "leave one of them out"),
        (("drop", "all", "--request", "r", "--older-than", "1h"), "--request", "leave --namespace and"),
        (("status", *KEEPERS, *NODE), "--socket", "leave one of them out"),
        (("status", *KEEPERS, "--group", "g"), "--group", "leave one of them out"),
        (("status", "--keeper-token-file", "f"), "--keeper-token-file", "name them with --keepers"),
        (("status", "--keeper-tls-ca", "f"), "--keeper-tls-ca", "name them with --keepers"),
        ((*WITH_ENGINE, *KEEPERS), "--keepers", "leave it out"),
        ((*WITH_ENGINE, *NODE), "--socket", "leave it out"),
        ((*WITH_ENGINE, "--into", "memory"), "--into", "leave it out"),
        ((*WITH_ENGINE, "--max", "1GiB"), "--max", "--most-reused 24h"),
        ((*MOST, "--model", "m"), "--model", "leave it out"),
        ((*MOST, "--concurrency", "4"), "--concurrency", "leave it out"),
        ((*MOST, "--timeout", "600"), "--timeout", "leave it out"),
        (("warm", "--request", "r", "--concurrency", "4"), "--concurrency", "leave it out"),
        (("warm", "--request", "r", "--max", "1GiB"), "--max", "--most-reused 24h"),
        (
            ("keeper", *VALKEY, "--objects", "file:///o", "--metrics-port", "0", "--metrics-host", "::1"),
            "metrics_host",
            "set a port",
        ),
        (("node", "--metrics-port", "0", "--metrics-host", "::1"), "metrics_host", "set a port"),
        (("keeper", *VALKEY, "--disk-size", "1TiB", "--objects", "file:///o"), "disk_size", "set disk too"),
        (
            ("keeper", *VALKEY, "--disk", "d", "--disk-size", "1TiB", "--objects-age", "1d"),
            "objects_age",
            "--objects",
        ),
        (("keeper", *VALKEY, "--objects", "file:///o", "--tls-ca", "f"), "tls_ca", "no tls_cert"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_it_is_named_with_what_to_do(
    capsys: pytest.CaptureFixture[str], argv: tuple[str, ...], flag: str, hint: str
) -> None:
    assert main(argv) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert flag in err
    assert hint in err
