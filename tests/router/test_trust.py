"""Nobody gets at a salt that somebody else has, and a malformed one ends here."""

import hashlib
import json
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from tests.runs import runs

from kvferry.errors import MisconfiguredError, RefusedError
from kvferry.router.trust import (
    MAX_SALT_CHARACTERS,
    ClientSalt,
    Rules,
    StrangerError,
    Trust,
    Unlisted,
    api_key,
)
from kvferry.router.trustfile import read_rules
from kvferry.secret import Secret

BODY = b'{"model":"m","prompt":"p"}'
TRUST = Trust(secret=Secret("one"))


def _bearer(key: str) -> list[tuple[bytes, bytes]]:
    return [(b"Host", b"x"), (b"Authorization", b"Bearer " + key.encode())]


def _salt(trust: Trust, headers: list[tuple[bytes, bytes]], body: bytes = BODY) -> str | None:
    """In the body that a worker gets."""
    salt, settled = trust.settled(trust.caller(headers), body)
    found: str | None = json.loads(settled).get("cache_salt")
    assert (found or "") == salt
    return found


def test_each_key_has_a_salt_of_its_own_that_all_routers_with_the_secret_give_it() -> None:
    first, second = _salt(TRUST, _bearer("a")), _salt(TRUST, _bearer("b"))
    assert first and second and first != second
    assert _salt(Trust(secret=Secret("one")), _bearer("a")) == first
    assert _salt(Trust(secret=Secret("two")), _bearer("a")) != first
    assert first not in {hashlib.sha256(b"a").hexdigest()[:32], "a"}


def test_a_request_without_a_key_keeps_its_very_bytes() -> None:
    assert TRUST.settled(TRUST.caller([(b"Host", b"x")]), BODY) == ("", BODY)


@hypothesis_settings(max_examples=runs(200), deadline=None)
@given(st.text(min_size=1, max_size=40), st.sampled_from(["", "a", "b"]), st.sampled_from(["", "a", "b"]))
def test_no_salt_that_a_client_sends_leads_to_what_another_has(sent: str, mine: str, other: str) -> None:
    if any(c in sent for c in "@/\\\0"):
        return
    theirs = {_salt(TRUST, _bearer(other)), _salt(TRUST, _bearer(other), _with(sent))}
    for salt in (sent, *filter(None, theirs)):
        reached = _salt(TRUST, _bearer(mine), _with(salt))
        assert reached != salt
        if mine != other:
            assert reached not in theirs


def _with(salt: object) -> bytes:
    return json.dumps({"cache_salt": salt, "prompt": "p"}).encode()


def test_a_client_keeps_its_own_users_apart_inside_its_group() -> None:
    salts = {_salt(TRUST, _bearer("a"), _with(user)) for user in ("x", "y")} | {_salt(TRUST, _bearer("a"))}
    assert len(salts) == 3


def test_stripped_salts_do_not_count() -> None:
    trust = Trust(Rules(client_salt=ClientSalt.STRIP), Secret("one"))
    assert _salt(trust, _bearer("a"), _with("x")) == _salt(trust, _bearer("a"))
    assert _salt(trust, [], _with("x")) is None


def test_trusted_salts_count_as_they_are() -> None:
    trust = Trust(Rules(client_salt=ClientSalt.TRUST), Secret("one"))
    assert _salt(trust, _bearer("a"), _with("x")) == "x"
    assert _salt(trust, _bearer("a")) == _salt(TRUST, _bearer("a"))


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        ({"do_remote_prefill": True, "remote_host": "10.0.0.1", "remote_block_ids": [1]}, None),
        ({"remote_host": "10.0.0.1", "max_load_tokens": 5}, {"max_load_tokens": 5}),
        ({"max_load_tokens": 0}, {"max_load_tokens": 0}),
        (["remote_host"], None),
        (None, None),
    ],
)
def test_no_client_says_where_kv_comes_from(given: object, kept: object) -> None:
    body = json.dumps({"kv_transfer_params": given, "prompt": "p"}).encode()
    for escaped in (body, body.replace(b"kv_", b"kv\\u005f")):
        found = json.loads(TRUST.settled(TRUST.caller(_bearer("a")), escaped)[1])
        assert found.pop("cache_salt") and found.pop("prompt") == "p"
        assert found == ({} if kept is None else {"kv_transfer_params": kept})
    gateway = Trust(Rules(client_salt=ClientSalt.TRUST))
    assert json.loads(gateway.settled(gateway.caller([]), body)[1])["kv_transfer_params"] == given


@pytest.mark.parametrize("rule", ClientSalt)
@pytest.mark.parametrize(
    "salt", ["", 5, True, ["a"], {"a": 1}, "\ud800", "a\0b", "../x", "x" * (MAX_SALT_CHARACTERS + 1)]
)
def test_a_salt_that_no_worker_can_use_is_refused_by_name(rule: ClientSalt, salt: object) -> None:
    trust = Trust(Rules(client_salt=rule))
    with pytest.raises(RefusedError, match=r"cache_salt|hex escape"):
        trust.settled(trust.caller([]), _with(salt))


@pytest.mark.parametrize("salt", [" ", "x" * MAX_SALT_CHARACTERS, "\U0001f642", "tenant:42", None])
def test_any_other_is_taken(salt: object) -> None:
    assert TRUST.settled(TRUST.caller([]), _with(salt))


@pytest.mark.parametrize("body", [b"", b"[]", b"--x\r\n", b"\x01\x02"])
def test_what_is_no_object_passes_as_it_is(body: bytes) -> None:
    assert TRUST.settled(TRUST.caller(_bearer("a")), body)[1] == body


@pytest.mark.parametrize(
    ("headers", "key"),
    [
        ([(b"authorization", b"bearer  k ")], b"k"),
        ([(b"X-Api-Key", b"k")], b"k"),
        ([(b"api-key", b"k"), (b"AUTHORIZATION", b"Bearer k")], b"k"),
        ([(b"Authorization", b"Bearer"), (b"x-api-key", b" ")], b""),
        ([(b"Authorization", b"Basic abc")], b"Basic abc"),
    ],
)
def test_the_key_is_found_in_any_usual_header(headers: list[tuple[bytes, bytes]], key: bytes) -> None:
    assert api_key(headers) == key


def test_two_keys_in_one_request_are_refused_and_not_shown() -> None:
    for second in (b"x-api-key", b"Authorization"):
        with pytest.raises(RefusedError, match="different API keys") as refused:
            api_key([(b"Authorization", b"Bearer sesame"), (second, b"Bearer open")])
        assert "sesame" not in str(refused.value)


def test_nothing_shows_a_key_or_the_secret() -> None:
    rules = Rules(listed={hashlib.sha256(b"sesame").digest(): "g"})
    trust = Trust(rules, Secret("whisper"))
    shown = f"{trust!r} {trust.caller(_bearer('sesame'))!r} {trust.caller(_bearer('other'))!r}"
    assert not any(word in shown for word in ("sesame", "other", "whisper", rules.listed and "13cb9e"))


def _file(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "trust.toml"
    path.write_text(text)
    return path


def _sha(key: str) -> str:
    return "sha256:" + hashlib.sha256(key.encode()).hexdigest()


def test_keys_of_one_group_share_and_unlisted_ones_are_met_as_the_file_says(tmp_path: Path) -> None:
    text = f'unlisted = "refuse"\nkeyless = "refuse"\n[groups.g]\nkeys = ["{_sha("a")}", "{_sha("b")}"]\n'
    text += f'[groups.h]\nkeys = ["{_sha("c")}"]\n'
    trust = Trust(read_rules(_file(tmp_path, text)), Secret("one"))
    assert trust.caller(_bearer("a")) == trust.caller(_bearer("b")) != trust.caller(_bearer("c"))
    assert trust.caller(_bearer("a")).group == "g"
    for headers in (_bearer("d"), []):
        with pytest.raises(StrangerError, match="API key"):
            trust.caller(headers)


def test_a_group_that_is_called_like_the_one_without_a_salt_is_another() -> None:
    trust = Trust(Rules(listed={hashlib.sha256(b"a").digest(): "shared"}), Secret("one"))
    assert _salt(trust, _bearer("a"), _with("x")) != _salt(trust, [], _with("x"))


def test_shared_keys_have_no_salt() -> None:
    trust = Trust(Rules(unlisted=Unlisted.SHARED))
    assert _salt(trust, _bearer("a")) is None
    assert _salt(trust, _bearer("a"), _with("x")) == _salt(trust, _bearer("b"), _with("x"))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("unlistd = 1", "did you mean unlisted"),
        ('unlisted = "open"', "there are own, shared, refuse"),
        ("client_salt = 5", "there are namespace, strip, trust"),
        ("groups = 5", "write \\[groups.NAME\\]"),
        ("[groups]\na = 5", "groups.a is no table"),
        ("[groups.a]\nkey = []", "did you mean keys"),
        ("[groups.a]\nkeys = 'x'", "no list"),
        ("[groups.a]\nkeys = ['sesame']", "keys\\[0\\] is not sha256:"),
        (f"[groups.a]\nkeys = ['{_sha('a')}']\n[groups.b]\nkeys = ['{_sha('a')}']", "also in groups.a"),
        ("[groups.'']\nkeys = []", "give it a name"),
        ("= 5", "not valid TOML"),
    ],
)
def test_a_file_that_says_something_else_is_one_line(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(MisconfiguredError, match=words) as found:
        read_rules(_file(tmp_path, text))
    assert "sesame" not in str(found.value) and "trust.toml" in str(found.value)


def test_a_file_that_is_not_there_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(MisconfiguredError, match="cannot read"):
        read_rules(tmp_path / "none")


@hypothesis_settings(max_examples=runs(200), deadline=None)
@given(st.binary(max_size=200))
@example(b'{"cache_salt":"a"')
def test_any_body_is_settled_or_refused(body: bytes) -> None:
    try:
        TRUST.settled(TRUST.caller(_bearer("a")), body)
    except RefusedError as error:
        assert str(error)
