"""A keeper's settings, and a node's of its keepers: what cannot work is refused in one line, at start."""

from pathlib import Path

import pytest

from kvferry.addresses import Address
from kvferry.config import KEEPERS_SETTINGS, client_keepers, load_node_settings
from kvferry.errors import MisconfiguredError
from kvferry.keeper.access import KeeperAccess
from kvferry.keeper.address import parse_keepers, parse_listen
from kvferry.keeper.settings import KEEPER_SETTINGS, KeeperSettings, load_keeper_settings
from kvferry.values import TlsFiles, parse_age

VALKEY = {"valkey": "valkey://h"}
DISK = {"disk": "/d", "disk_size": "1TiB"}
WHOLE = {**VALKEY, **DISK}


def _secret(directory: Path, text: str = "ours") -> Path:
    path = directory / "token"
    path.touch(mode=0o600)
    path.write_text(f"{text}\n")
    return path


def test_every_setting_reaches_a_field_of_its_own() -> None:
    fields = set(KeeperSettings.__dataclass_fields__)
    targets = {setting.target for setting in KEEPER_SETTINGS}
    assert targets - {"valkey_password"} == fields


def test_flags_environment_and_file_meet(tmp_path: Path) -> None:
    file = tmp_path / "keeper.toml"
    file.write_text(
        'valkey = "valkeys://kv@h:6379"\ndisk = "/d"\ndisk_size = "1TiB"\nname = "file"\nmetrics_port = 1\n'
        'objects = "s3://b/p"\nobjects_age = "30d"\nobjects_size = "5TiB"\n'
        f'token_file = "{_secret(tmp_path)}"\n'
        'keepers = "flag,other"\nencryption_key_ids = "5f0c31aa, 00112233"\n'
    )
    environ = {"KVFERRY_CONFIG": str(file), "KVFERRY_NAME": "environment", "KVFERRY_METRICS_PORT": "2"}
    found = load_keeper_settings({"name": "flag", "listen": "0.0.0.0:7", "disk": None}, environ=environ)
    assert (found.name, found.metrics_port, found.listen) == ("flag", 2, Address("0.0.0.0", 7))
    assert (found.disk, found.disk_bytes) == (Path("/d"), 1 << 40)
    assert (found.objects, found.objects_age_s, found.objects_bytes) == ("s3://b/p", 30 * 86400, 5 << 40)
    assert found.key_ids == (bytes.fromhex("5f0c31aa"), bytes.fromhex("00112233"))
    assert found.keepers == ("flag", "other")
    assert found.token is not None
    assert found.token.reveal() == "ours"
    assert "ours" not in repr(found)


def test_loopback_is_the_default_and_needs_no_token() -> None:
    found = load_keeper_settings(WHOLE, environ={})
    assert found.listen == Address("127.0.0.1", 9472)
    assert (found.token, found.tls) == (None, None)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (DISK, "name it with --valkey"),
        (VALKEY, "set --disk, --objects or both"),
        ({**VALKEY, "disk": "/d"}, "set disk_size too"),
        ({**VALKEY, "disk_size": "1TiB"}, "needs a place"),
        ({**WHOLE, "objects_age": "30d"}, "objects_age is set, but no objects"),
        ({**WHOLE, "objects_size": "1TiB"}, "objects_size is set, but no objects"),
        ({**WHOLE, "tls_cert": "/c"}, "tls_cert and tls_key belong together"),
        ({**WHOLE, "tls_ca": "/c"}, "tls_ca is set, but no tls_cert"),
        ({**WHOLE, "listen": "10.0.0.5"}, "everyone who reaches 10.0.0.5:9472"),
        ({**WHOLE, "listen": "[::]:5"}, "everyone who reaches [::]:5"),
        ({**WHOLE, "listen": "0.0.0.0:5", "tls_cert": "/c", "tls_key": "/k"}, "everyone who reaches"),
        ({**WHOLE, "listen": "store1:5"}, "--listen: 'store1' is no IP address"),
        ({**WHOLE, "listen": "127.0.0.1:99999"}, "99999 is outside"),
        ({**WHOLE, "keepers": "a,b", "name": "c"}, "'c', which is none of keepers a,b"),
        ({**WHOLE, "keepers": "a,a"}, "give each once"),
        ({**WHOLE, "name": "a,b"}, "is no name of a keeper"),
        ({**WHOLE, "buffer": "1MiB"}, "a buffer of 1 MiB is too small"),
        ({**WHOLE, "encryption_key_ids": "5f0c31aa,5f0c31aa"}, "give each once"),
        ({**WHOLE, "objects": "s3://b", "objects_age": "soon"}, "write it like 12h or 30d"),
        ({"valkey": "http://h", **DISK}, "--valkey: Valkey URL: unknown scheme"),
    ],
)
def test_what_cannot_work_is_refused(flags: dict[str, str], words: str) -> None:
    with pytest.raises(MisconfiguredError) as refused:
        load_keeper_settings(flags, environ={})
    assert words in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    "admits", [{"token_file": "TOKEN"}, {"tls_cert": "/c", "tls_key": "/k", "tls_ca": "/a"}]
)
def test_beyond_loopback_a_token_or_nodes_certificates_are_needed(
    admits: dict[str, str], tmp_path: Path
) -> None:
    flags = {name: str(_secret(tmp_path)) if text == "TOKEN" else text for name, text in admits.items()}
    assert load_keeper_settings({**WHOLE, "listen": "0.0.0.0", **flags}, environ={}).listen.host == "0.0.0.0"


def test_a_key_in_place_of_its_id_is_not_shown() -> None:
    with pytest.raises(MisconfiguredError) as refused:
        load_keeper_settings({**WHOLE, "encryption_key_ids": "ab" * 32}, environ={})
    assert "abab" not in str(refused.value)


def test_a_name_of_a_nodes_setting_is_refused_with_what_there_is() -> None:
    with pytest.raises(MisconfiguredError, match="unknown environment variable: KVFERRY_POOL"):
        load_keeper_settings(WHOLE, environ={"KVFERRY_POOL": "1GiB"})


def test_where_commands_find_a_node_is_no_business_of_a_keeper() -> None:
    given = {"KVFERRY_SOCKET": "/run/kvferry/node.sock"}
    assert load_keeper_settings(WHOLE, environ=given) == load_keeper_settings(WHOLE, environ={})


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("store1", [("store1", 9472)]),
        ("store1, store2:7", [("store1", 9472), ("store2", 7)]),
        ("[::1]:7,::1", [("::1", 7), ("::1", 9472)]),
        ("10.0.0.5:1,10.0.0.5:1", [("10.0.0.5", 1)]),
    ],
)
def test_keepers_are_found_by_name_or_address(text: str, found: list[tuple[str, int]]) -> None:
    assert list(parse_keepers(text)) == found


@pytest.mark.parametrize(
    "text", ["", "a,,b", ":5", "a:0", "a:b", "a:65536", "[::1", "[::1]5", "http://a", "user@a", "a b", "a..b"]
)
def test_what_is_no_address_is_refused(text: str) -> None:
    with pytest.raises(MisconfiguredError):
        parse_keepers(text)


def test_any_port_may_be_listened_at() -> None:
    assert parse_listen("127.0.0.1:0") == Address("127.0.0.1", 0)


@pytest.mark.parametrize(("text", "seconds"), [("90s", 90), ("15m", 900), ("1.5h", 5400), ("30d", 2_592_000)])
def test_ages_have_units(text: str, seconds: float) -> None:
    assert parse_age(text) == seconds


@pytest.mark.parametrize("text", ["", "0", "90", "-1d", "1w", "1 year", "1e9", "99999999d"])
def test_what_is_no_age_is_refused(text: str) -> None:
    with pytest.raises(MisconfiguredError):
        parse_age(text)


# ---- of a node and of commands


def test_a_node_knows_its_keepers_and_how_to_get_in(tmp_path: Path) -> None:
    flags = {"keepers": "a,b:7", "keeper_token_file": str(_secret(tmp_path)), "keeper_tls_ca": "/ca"}
    found = load_node_settings({**VALKEY, **flags}, environ={})
    assert found.keepers == (Address("a", 9472), Address("b", 7))
    assert found.keeper_access == KeeperAccess("ours", TlsFiles("/ca"))
    assert "ours" not in repr(found) + repr(found.keeper_access)
    environ = {f"KVFERRY_{name.upper()}": text for name, text in flags.items()}
    assert client_keepers(environ=environ) == (found.keepers, found.keeper_access)
    assert client_keepers({"keepers": "c"}, environ={"KVFERRY_POOL": "1GiB"}) == (
        (Address("c", 9472),),
        KeeperAccess(),
    )


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"keepers": "a"}, "keepers are set, but no Valkey URL"),
        ({**VALKEY, "keeper_tls_ca": "/ca"}, "keeper_tls_ca is set, but no keepers"),
        ({**VALKEY, "keepers": "a", "keeper_tls_cert": "/c"}, "belong together"),
        ({**VALKEY, "keepers": "a", "keeper_tls_cert": "/c", "keeper_tls_key": "/k"}, "no keeper_tls_ca"),
    ],
)
def test_a_node_whose_keepers_cannot_work_is_refused(flags: dict[str, str], words: str) -> None:
    with pytest.raises(MisconfiguredError, match=words):
        load_node_settings(flags, environ={})


def test_settings_of_keepers_are_a_nodes_too() -> None:
    names = {setting.name for setting in KEEPERS_SETTINGS}
    assert names == {
        *("keepers", "keeper_token", "keeper_token_file"),
        *("keeper_tls_ca", "keeper_tls_cert", "keeper_tls_key"),
    }
