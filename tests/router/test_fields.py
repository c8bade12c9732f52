"""Fields of a body are set as if it had been read and written anew, and the rest stays what it was."""

import json

import pytest
from hypothesis import example, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from tests.runs import runs

from kvferry.errors import RefusedError
from kvferry.router.fields import edited, is_object, may_have

NAME = "cache_salt"
SALT = b'"0123"'
_texts = st.text(max_size=12) | st.sampled_from([NAME, "cache\\u005fsalt", '"cache_salt"', "é", "\\"])
_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | _texts,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(_texts, inner, max_size=4),
    max_leaves=12,
)
_objects = st.dictionaries(_texts, _values, max_size=6)
_spaces = st.text(" \t\n\r", max_size=3)


def _escaped(name: str, mask: int, upper: bool) -> str:
    """As a JSON text in which some letters are escapes."""
    digits = "{:04X}" if upper else "{:04x}"
    return '"{}"'.format(
        "".join("\\u" + digits.format(ord(c)) if mask >> i & 1 else c for i, c in enumerate(name))
    )


@hypothesis_settings(max_examples=runs(300), deadline=None)
@given(_objects, st.booleans(), _spaces, _spaces, st.booleans())
@example(fields={}, plain=True, before="", inside=" ", marked=False)
@example(fields={NAME: "mine"}, plain=True, before="", inside="", marked=False)
@example(fields={"a": {NAME: "deep"}}, plain=True, before="", inside="", marked=True)
def test_an_object_gets_the_field_and_keeps_all_else(
    fields: dict[str, object], plain: bool, before: str, inside: str, marked: bool
) -> None:
    text = json.dumps(fields, ensure_ascii=plain)
    body = ("\ufeff" if marked else "") + before + "{" + inside + text[1:] + before
    result = json.loads(edited(body.encode(), {NAME: SALT}))
    assert result == {**fields, NAME: "0123"}
    assert [name for name in result if name != NAME] == [name for name in fields if name != NAME]


@hypothesis_settings(max_examples=runs(200), deadline=None)
@given(
    _objects,
    st.lists(st.tuples(st.integers(0, (1 << len(NAME)) - 1), st.booleans(), _values), min_size=1, max_size=3),
    st.integers(0, 6),
)
def test_no_spelling_and_no_repetition_of_the_name_gets_past(
    fields: dict[str, object], given_salts: list[tuple[int, bool, object]], at: int
) -> None:
    pieces = [f"{json.dumps(name)}:{json.dumps(value)}" for name, value in fields.items()]
    mine = [_escaped(NAME, mask, upper) + " : " + json.dumps(value) for mask, upper, value in given_salts]
    text = "{" + ",".join(pieces[:at] + mine + pieces[at:]) + "}"
    result = edited(text.encode(), {NAME: SALT})
    assert json.loads(result) == {**fields, NAME: "0123"}
    assert json.loads(result, object_pairs_hook=lambda pairs: [name for name, _ in pairs]).count(NAME) == 1


@hypothesis_settings(max_examples=runs(100), deadline=None)
@given(_objects)
def test_what_is_dropped_is_gone_and_nothing_else(fields: dict[str, object]) -> None:
    body = json.dumps({**fields, "stream": True}).encode()
    rest = {name: value for name, value in fields.items() if name not in ("stream", NAME)}
    assert json.loads(edited(body, {}, drop=("stream", NAME))) == rest


def test_what_has_no_such_field_keeps_its_very_bytes() -> None:
    body = b' { "b" : 1e3 , "b" : [ 1.50 , "\\u00e9" ] } '
    assert edited(body, {NAME: SALT}) == b' { "cache_salt":"0123","b" : 1e3 , "b" : [ 1.50 , "\\u00e9" ] } '
    assert edited(body, {}, drop=(NAME,)) == body


def test_values_keep_their_bytes_where_the_name_was_given() -> None:
    body = b'{"x": 1e3, "cache_salt": "a", "y": [ 1.50, {"cache_salt" : 1, "cache_salt": 2} ]}'
    assert edited(body, {NAME: SALT}) == (
        b'{"cache_salt":"0123","x":1e3,"y":[ 1.50, {"cache_salt" : 1, "cache_salt": 2} ]}'
    )


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"", "empty"),
        (b"  \n", "empty"),
        (b'[{"a":1}]', "a list at byte 0"),
        (b'\n "x"', "a text at byte 2"),
        (b"null", "null at byte 0"),
        (b"hello", "no JSON at byte 0"),
        (b"{", "at byte 1"),
        (b" {a:1}", "at byte 2"),
        ('{"a":1}'.encode("utf-16-le"), "at byte 1"),
        (b'{"cache_salt":1,}', "no JSON object"),
        (b'{"cache_salt":' + b"[" * 100_000, "no JSON object"),
        (b'{"cache_salt":"\xff"', "no JSON object"),
    ],
)
def test_what_is_no_object_is_refused_with_the_place(body: bytes, words: str) -> None:
    with pytest.raises(RefusedError, match=words):
        edited(body, {NAME: SALT})


@pytest.mark.parametrize("space", ["", " ", "\n\n"])
@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-be", "utf-16-le", "utf-32", "utf-32-be", "utf-32-le"])
def test_an_object_that_a_worker_would_read_in_another_encoding_is_refused(encoding: str, space: str) -> None:
    body = (space + '{"cache_salt":"mine"}').encode(encoding)
    assert json.loads(body) == {NAME: "mine"}
    with pytest.raises(RefusedError, match="UTF-8"):
        is_object(body)


def test_objects_are_told_from_other_bodies() -> None:
    assert is_object(b" \r\n{}") and is_object(b"\xef\xbb\xbf{}") and is_object(b" " * 1000 + b"{")
    assert not any(map(is_object, (b"", b"[]", b"--boundary", b" ")))


def test_a_name_inside_a_text_is_no_name() -> None:
    assert not may_have(json.dumps({"a": 'say "cache_salt" and é'}).encode(), [NAME])
    assert may_have(b'{"a":"cache_salt"}', [NAME])  # may: it is looked at more closely then
