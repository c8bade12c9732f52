"""Flags, environment and file map to the same fields; mistakes are named with a way out."""

import grp
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.config import (
    NODE_SETTINGS,
    NodeSettings,
    client_group,
    client_token,
    default_socket_path,
    format_size,
    load_node_settings,
    parse_size,
)
from kvferry.engines.vllm.settings import parse_settings
from kvferry.errors import MisconfiguredError
from kvferry.identity.domain import DomainKey
from kvferry.secret import Secret
from kvferry.tiers.valkey.tls import Tls
from kvferry.values import TlsFiles, parse_group


def test_flag_wins_over_environment_over_file(tmp_path: Path) -> None:
    file = tmp_path / "node.toml"
    file.write_text('pool = "1GiB"\ndeadline_cap_ms = 100\nmetrics_port = 1\n')
    environ = {"KVFERRY_CONFIG": str(file), "KVFERRY_POOL": "2GiB", "KVFERRY_DEADLINE_CAP_MS": "200"}
    settings = load_node_settings({"pool": "3GiB", "valkey": None}, environ=environ)
    assert (settings.pool_bytes, settings.deadline_cap_ms, settings.metrics_port) == (3 << 30, 200, 1)


def test_every_setting_reaches_a_field_of_its_own_name() -> None:
    fields = set(NodeSettings.__dataclass_fields__)
    targets = {setting.target for setting in NODE_SETTINGS}
    assert {"valkey" if target == "valkey_password" else target for target in targets} == fields


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("4GiB", 4 << 30),
        ("512MiB", 512 << 20),
        ("1.5G", 1_500_000_000),
        ("64gb", 64 * 10**9),
        ("123", 123),
        ("7k", 7000),
    ],
)
def test_sizes_are_binary_with_an_i_and_decimal_without(text: str, nbytes: int) -> None:
    assert parse_size(text) == nbytes


@given(st.integers(0, 1 << 50))
def test_a_size_in_bytes_is_read_as_written(nbytes: int) -> None:
    assert parse_size(str(nbytes)) == parse_size(nbytes) == nbytes


@given(st.integers(0, 1023), st.sampled_from(["B", "KiB", "MiB", "GiB"]))
def test_a_shown_size_reads_back(number: int, unit: str) -> None:
    nbytes = parse_size(f"{number}{unit}")
    assert parse_size(format_size(nbytes)) == nbytes


@pytest.mark.parametrize(
    ("flags", "environ", "message"),
    [
        ({"pool": "lots"}, {}, "--pool: 'lots' is not a size; write it like 4GiB"),
        ({"pool": "1MiB"}, {}, "a pool of 1 MiB holds no prefix"),
        ({"pool": "900000GiB"}, {}, "is larger than this host's memory"),
        ({"deadline_cap_ms": "soon"}, {}, "--deadline-cap-ms: 'soon' is not a whole number"),
        ({"metrics_port": "70000"}, {}, "--metrics-port: 70000 is outside 0 to 65535"),
        ({"valkey": "valky://h"}, {}, "--valkey: Valkey URL: unknown scheme 'valky': did you mean valkey://"),
        ({"valkey": "localhost:6379"}, {}, "--valkey: Valkey URL: no '://' found"),
        ({}, {"KVFERRY_VALKEY": "valkey://h:0x5"}, "KVFERRY_VALKEY: Valkey URL: port '0x5'"),
        (
            {},
            {"KVFERRY_POOLL": "1GiB"},
            "unknown environment variable: KVFERRY_POOLL; did you mean KVFERRY_POOL",
        ),
        ({"valkey_password_file": "/nonexistent/x"}, {}, "cannot read /nonexistent/x: No such file"),
        ({}, {"KVFERRY_VALKEY_PASSWORD": "x"}, "a Valkey password is set, but no Valkey URL"),
        ({"disk": "/kv"}, {}, "disk and disk_size belong together; set disk_size too"),
        ({"disk_size": "1TiB"}, {}, "disk and disk_size belong together; set disk too"),
        (
            {"disk": "/kv", "disk_size": "1TiB", "valkey": "valkey://h"},
            {},
            "disk and valkey are both set; a node has one of them behind it: keep one",
        ),
        ({}, {"KVFERRY_CONFIG": "/nonexistent.toml"}, "cannot read the configuration /nonexistent.toml"),
    ],
)
def test_bad_input_is_named_with_its_value_and_a_hint(
    flags: dict[str, str | None], environ: dict[str, str], message: str
) -> None:
    with pytest.raises(MisconfiguredError) as caught:
        load_node_settings(flags, environ=environ)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("pol = 1", "unknown setting in {}: pol; did you mean pool?"),
        ("pool = true", "pool in {}: a bool is neither a text nor a whole number"),
        ("pool = ", "{} is not valid TOML"),
        (
            'valkey_password = "x"',
            "unknown setting in {}: valkey_password; did you mean valkey_password_file?",
        ),
    ],
)
def test_a_mistake_in_the_file_names_the_file(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "node.toml"
    file.write_text(text)
    with pytest.raises(MisconfiguredError) as caught:
        load_node_settings(environ={}, config_path=file)
    assert message.format(file) in str(caught.value)


@pytest.mark.parametrize(
    "setting", [setting.name for setting in NODE_SETTINGS if not setting.environment_only]
)
def test_a_value_of_the_wrong_kind_is_not_shown(tmp_path: Path, setting: str) -> None:
    file = tmp_path / "node.toml"
    for value in ('["hunter2"]', '{ password = "hunter2" }'):
        file.write_text(f"{setting} = {value}")
        with pytest.raises(MisconfiguredError) as caught:
            load_node_settings(environ={}, config_path=file)
        assert setting in str(caught.value)
        assert "hunter2" not in str(caught.value)


def test_what_is_no_regular_file_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe, 0o600)
    pair = tmp_path / "pair.pem"
    pair.write_text("-----BEGIN")
    pair.chmod(0o600)
    file = str(pipe)
    valkey = "valkey://127.0.0.1"
    calls: list[Callable[[], object]] = [
        lambda: load_node_settings(environ={}, config_path=file),
        lambda: load_node_settings(environ={"KVFERRY_CONFIG": file}),
        lambda: load_node_settings({"token_file": file}, environ={}),
        lambda: load_node_settings({"valkey": valkey, "valkey_password_file": file}, environ={}),
        lambda: load_node_settings({"valkey": valkey, "encryption_key_file": file}, environ={}),
        lambda: client_token(environ={"KVFERRY_TOKEN_FILE": file}),
        lambda: DomainKey.from_file(pipe),
        lambda: Tls(TlsFiles(file, None, None)),
        lambda: Tls(TlsFiles(None, file, str(pair))),
        lambda: Tls(TlsFiles(None, str(pair), file)),
    ]
    for call in calls:
        with pytest.raises(MisconfiguredError, match="not a regular file") as caught:
            call()
        assert file in str(caught.value)
        assert "\n" not in str(caught.value)


def test_secrets_come_from_a_file_or_the_environment_and_are_never_shown(tmp_path: Path) -> None:
    file = tmp_path / "password"
    file.write_text("hunter2\n")
    file.chmod(0o600)
    flags = {"valkey": "valkey://user@h", "valkey_password_file": str(file)}
    for settings in (
        load_node_settings(flags, environ={}),
        load_node_settings({"valkey": "valkey://user@h"}, environ={"KVFERRY_VALKEY_PASSWORD": "hunter2"}),
    ):
        assert settings.valkey is not None
        assert settings.valkey.password == "hunter2"
        assert "hunter2" not in f"{settings!r}{settings}{settings.valkey}"
    assert "hunter2" not in f"{Secret('hunter2')!r}{Secret('hunter2')}"


def test_a_password_among_arguments_is_refused_without_showing_it() -> None:
    with pytest.raises(MisconfiguredError, match="KVFERRY_VALKEY_PASSWORD") as caught:
        load_node_settings({"valkey": "valkey://user:hunter2@h"}, environ={})
    assert "hunter2" not in str(caught.value)


def test_node_and_engines_of_a_user_meet_without_being_told(tmp_path: Path) -> None:
    assert default_socket_path({"KVFERRY_SOCKET": "/a/b"}) == Path("/a/b")
    assert default_socket_path({"XDG_RUNTIME_DIR": str(tmp_path)}) == tmp_path / "kvferry" / "node.sock"
    assert default_socket_path({"KVFERRY_SOCKET": "~/s"}) == Path("~/s").expanduser()
    assert default_socket_path({}).name == "node.sock"


@pytest.mark.parametrize("runtime", ["", "relative", "/nonexistent/runtime"])
def test_a_runtime_directory_that_is_none_is_not_created(runtime: str) -> None:
    assert default_socket_path({"XDG_RUNTIME_DIR": runtime}) == default_socket_path({})


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("KVFERRY_VALKEY", "valkey://u:geheim\n@h"),
        ("KVFERRY_VALKEY", "valkey://u:ge?heim@h"),
        ("KVFERRY_VALKEY", "u:geheim@h"),
        ("KVFERRY_VALKEY", "valkey://u:geheim@h h"),
        ("KVFERRY_TOKEN", "geheim\nheim"),
        ("KVFERRY_TOKEN", "heim" * 2000),
        ("KVFERRY_TOKEN", ""),
        ("KVFERRY_VALKEY_PASSWORD", "\udcffheim"),
    ],
)
def test_a_secret_that_is_wrong_is_refused_by_name_and_not_shown(variable: str, value: str) -> None:
    with pytest.raises(MisconfiguredError) as caught:
        load_node_settings({}, environ={variable: value})
    assert variable in str(caught.value)
    assert "heim" not in str(caught.value)
    if variable == "KVFERRY_TOKEN" and value:
        with pytest.raises(MisconfiguredError, match="KVFERRY_TOKEN"):
            client_token(environ={variable: value})


def test_a_list_of_urls_in_the_file_is_refused_without_its_password(tmp_path: Path) -> None:
    file = tmp_path / "node.toml"
    file.write_text('valkey = ["valkey://u:geheim@h"]\n')
    with pytest.raises(MisconfiguredError, match=r"valkey in .*a list") as caught:
        load_node_settings({}, environ={}, config_path=file)
    assert "heim" not in str(caught.value)


@pytest.mark.parametrize(
    "line",
    [
        "socket = 5",
        'socket = ""',
        'socket = "/"',
        'socket = "/a\\u0000b"',
        'socket = "~nobody-of-this-name/s"',
        'domain = ""',
        "domain = 5",
        'domain = "a\\nb"',
        f'domain = "{"x" * 201}"',
        "valkey = 5",
        f"metrics_port = {'1' * 5000}",
        f'metrics_port = "{"1" * 5000}"',
        f'pool = "{"1" * 5000}"',
        'token_file = ""',
        "a = " + "[" * 20000,
        "# " + "x" * (1 << 20),
    ],
)
def test_any_value_of_any_setting_is_refused_in_one_error(tmp_path: Path, line: str) -> None:
    file = tmp_path / "node.toml"
    file.write_text(line + "\n")
    with pytest.raises(MisconfiguredError) as caught:
        load_node_settings({}, environ={}, config_path=file)
    assert str(file) in str(caught.value)


def test_the_token_comes_from_a_file_or_the_environment_and_is_never_shown(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text("open sesame\n")
    file.chmod(0o600)
    from_file = load_node_settings({"token_file": str(file)}, environ={})
    from_environment = load_node_settings({}, environ={"KVFERRY_TOKEN": "open sesame"})
    assert from_file.token == from_environment.token == Secret("open sesame")
    assert "sesame" not in repr(from_file)
    assert client_token(environ={}) == ""
    assert client_token(file, environ={}) == "open sesame"
    assert client_token(environ={"KVFERRY_TOKEN_FILE": str(file)}) == "open sesame"
    assert client_token(environ={"KVFERRY_TOKEN": "open sesame"}) == "open sesame"
    with pytest.raises(MisconfiguredError, match="keep one"):
        load_node_settings({"token_file": str(file)}, environ={"KVFERRY_TOKEN": "x"})


@pytest.mark.parametrize("mode", [0o604, 0o622, 0o601])
@pytest.mark.parametrize("name", ["token_file", "valkey_password_file"])
def test_a_secret_that_others_can_reach_is_refused(tmp_path: Path, name: str, mode: int) -> None:
    file = tmp_path / "secret"
    file.write_text("hunter2\n")
    file.chmod(mode)
    with pytest.raises(MisconfiguredError, match="chmod 600") as caught:
        load_node_settings({name: str(file), "valkey": "valkey://h"}, environ={})
    assert "hunter2" not in str(caught.value)


def test_a_token_file_that_cannot_be_read_is_named_with_its_variable() -> None:
    with pytest.raises(MisconfiguredError, match="KVFERRY_TOKEN_FILE: cannot read /nonexistent/token"):
        client_token(environ={"KVFERRY_TOKEN_FILE": "/nonexistent/token"})


def test_a_group_is_a_name_of_this_host_or_a_number() -> None:
    own = grp.getgrgid(0)
    assert {parse_group(text) for text in (own.gr_name, "0", 0)} == {0}
    assert load_node_settings({"group": "54100"}, environ={}).group == 54100
    assert load_node_settings({}, environ={"KVFERRY_GROUP": own.gr_name}).group == 0
    assert client_group(environ={}) is None
    assert client_group("7", environ={"KVFERRY_GROUP": "8"}) == 7
    assert client_group(environ={"KVFERRY_GROUP": "8"}) == 8
    for environ, extra, wanted in (({}, {}, None), ({"KVFERRY_GROUP": "8"}, {}, 8), ({}, {"group": "7"}, 7)):
        assert parse_settings(extra, environ=environ).group == wanted


@pytest.mark.parametrize("wrong", ["no such group", "-1", "4294967295", "", True, None, 1.5, "a\nb"])
def test_what_is_no_group_is_named(wrong: object) -> None:
    with pytest.raises(MisconfiguredError) as caught:
        parse_group(wrong)
    assert "\n" not in str(caught.value)
    if wrong is not None:
        with pytest.raises(MisconfiguredError, match="kv_connector_extra_config: group"):
            parse_settings({"group": wrong}, environ={})


@pytest.mark.parametrize("wrong", ["localhost", "127.0.0.1:80", "", "300.0.0.1"])
def test_the_metrics_host_is_an_address(wrong: str) -> None:
    with pytest.raises(MisconfiguredError, match="--metrics-host"):
        load_node_settings({"metrics_host": wrong}, environ={})
    assert load_node_settings({"metrics_host": "::1"}, environ={}).metrics_host == "::1"
