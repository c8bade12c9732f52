"""What the engines' settings share is read in one way, whichever engine hands them over."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from kvferry.engines.lmcache import settings as lmcache
from kvferry.engines.settings import NodeAccess
from kvferry.engines.sglang import settings as sglang
from kvferry.engines.vllm import settings as vllm
from kvferry.errors import MisconfiguredError

Parse = Callable[[Mapping[str, Any], Mapping[str, str]], Any]


def _vllm(given: Mapping[str, Any], environ: Mapping[str, str]) -> vllm.ConnectorSettings:
    return vllm.parse_settings(given, environ=environ)


def _sglang(given: Mapping[str, Any], environ: Mapping[str, str]) -> sglang.BackendSettings:
    return sglang.parse_settings({"interface_v1": 1, **given}, environ=environ)


def _lmcache(given: Mapping[str, Any], environ: Mapping[str, str]) -> lmcache.AdapterSettings:
    return lmcache.parse_settings({"valkey": "valkey://host", **given}, environ=environ)


OF_A_NODE: tuple[Parse, ...] = (_vllm, _sglang)
ALL: tuple[Parse, ...] = (*OF_A_NODE, _lmcache)


def _complaint(parse: Parse, given: Mapping[str, Any]) -> str:
    """Without the name that the engine has for its settings."""
    with pytest.raises(MisconfiguredError) as refused:
        parse(given, {})
    key = next(iter(given))
    return str(refused.value).partition(f": {key}: ")[2]


@pytest.mark.parametrize("value", ["", 5, True, ["x"], "two\nlines", "x" * 201])
def test_a_wrong_domain_is_refused_in_the_same_words(value: object) -> None:
    complaints = {_complaint(parse, {"domain": value}) for parse in ALL}
    assert len(complaints) == 1
    assert "" not in complaints


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("socket", "/"),
        ("socket", "/" + "x" * 200),
        ("token_file", 5),
        ("group", "no such group"),
        ("group", True),
        ("model_name", ""),
        ("revision", 7),
    ],
)
def test_what_leads_to_a_node_is_refused_in_the_same_words(key: str, value: object) -> None:
    complaints = {_complaint(parse, {key: value}) for parse in OF_A_NODE}
    assert len(complaints) == 1
    assert "" not in complaints


@pytest.mark.parametrize("value", ["5", 5.0, True, [5]])
def test_a_number_that_is_none_is_refused_in_the_same_words(value: object) -> None:
    keys = ((_vllm, "deadline_cap_ms"), (_sglang, "deadline_ms"), (_lmcache, "load_deadline_ms"))
    for parse, key in keys:
        assert _complaint(parse, {key: value}).startswith(f"{value!r} is not a whole number; give one from ")


@pytest.mark.parametrize("parse", ALL)
def test_a_key_without_a_value_is_one_that_is_left_out(parse: Parse) -> None:
    assert parse({"domain": None, "domain_key_file": None}, {}) == parse({}, {})


@pytest.mark.parametrize("parse", OF_A_NODE)
def test_settings_win_over_the_environment_which_fills_in(parse: Parse) -> None:
    environ = {"KVFERRY_SOCKET": "/of/environment", "KVFERRY_GROUP": "7"}
    found: NodeAccess = parse({}, environ)
    assert (found.socket, found.group) == (Path("/of/environment"), 7)
    found = parse({"socket": "~/node.sock", "group": 8}, environ | {"KVFERRY_GROUP": "no such group"})
    assert (found.socket, found.group) == (Path("~/node.sock").expanduser(), 8)
