"""Sets and removes fields of a JSON object without encoding the rest anew. Pure.

A body that has none of the names, in any spelling, gets its fields spliced in after the opening brace. Only
one that has them is taken apart, at the top alone: values stay the bytes they were.
"""

import re
from collections.abc import Collection, Iterable, Mapping
from functools import lru_cache

import msgspec

from kvferry.errors import RefusedError

JSON_SPACE = b" \t\n\r"
_BOM = b"\xef\xbb\xbf"
_HEAD = re.compile(rb'[ \t\n\r]*\{[ \t\n\r]*(?=(["}])?)')
_FIELDS = msgspec.json.Decoder(dict[str, msgspec.Raw])
# Readers of JSON that look for UTF-16 and UTF-32 find it by these.
_WIDE = (b"\xff\xfe", b"\xfe\xff")


def is_object(body: bytes) -> bool:
    """Whether this is meant as a JSON object. Raises RefusedError for one in another encoding than UTF-8.

    Workers read such: what is not seen here would be seen there.
    """
    if body.startswith(_WIDE) or b"\0" in body[:4]:
        raise RefusedError("the body is not UTF-8, at byte 0: send JSON as UTF-8")
    return _HEAD.match(body, len(_BOM) if body.startswith(_BOM) else 0) is not None


def looks_like_object(body: bytes) -> bool:
    """Whether it begins as one, whatever it is said to be."""
    return _HEAD.match(body) is not None


def edited(body: bytes, put: Mapping[str, bytes], *, drop: Collection[str] = ()) -> bytes:
    """The object with these fields, each once, and without those in drop.

    put: values as JSON. The rest of the object is as it was. Raises RefusedError for what is no object, and,
    where it has to be taken apart, for what is no JSON.
    """
    names = frozenset((*put, *drop))
    if may_have(body, names):
        return joined(parts(body), put, drop=drop)
    return spliced(body, put)


def spliced(body: bytes, put: Mapping[str, bytes]) -> bytes:
    """The object with these fields, of which it has none (``may_have``). Raises RefusedError."""
    body = body.removeprefix(_BOM)
    head = _HEAD.match(body)
    if head is None or head[1] is None:
        raise RefusedError(_not_an_object(body, head))
    if not put:
        return body
    comma = b"" if head[1] == b"}" else b","
    return b"".join((body[: head.end()], _listed(put.items()), comma, memoryview(body)[head.end() :]))


def joined(
    fields: Mapping[str, msgspec.Raw], put: Mapping[str, bytes], *, drop: Collection[str] = ()
) -> bytes:
    """An object of ``parts``, with these fields and without those in drop."""
    kept = [(name, bytes(raw)) for name, raw in fields.items() if name not in put and name not in drop]
    return b"{" + _listed((*put.items(), *kept)) + b"}"


def parts(body: bytes) -> dict[str, msgspec.Raw]:
    """The fields of an object, their values as they were written; of equal names the last, as readers do.

    Raises RefusedError.
    """
    try:
        return _FIELDS.decode(body.removeprefix(_BOM))
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise RefusedError(f"the body is no JSON object: {error}") from error
    except RecursionError as error:
        raise RefusedError("the body is no JSON object that can be read: it is nested too deeply") from error


def may_have(body: bytes, names: Collection[str]) -> bool:
    """Whether one of these may be a name in it, at any depth; False is certain."""
    # A single byte is looked for 20 times as fast as several.
    escapes = b"\\" in body and b"\\u00" in body
    if not escapes and not any(name.encode() in body for name in names):
        return False
    return _spelled(frozenset(names)).search(body) is not None


@lru_cache(maxsize=64)
def _spelled(names: frozenset[str]) -> re.Pattern[bytes]:
    """Any of these as a JSON text, each letter plain or escaped."""
    words = (b"".join(_letter(character) for character in name) for name in sorted(names))
    return re.compile(b'"(?:' + b"|".join(words) + b')"')


def _letter(character: str) -> bytes:
    if not (character.isascii() and (character.isalnum() or character == "_")):
        raise ValueError(f"{character!r} has more spellings in JSON than are looked for")
    digits = "".join(f"[{digit}{digit.upper()}]" for digit in f"{ord(character):04x}")
    return rf"(?:{character}|\\u{digits})".encode()


def _listed(fields: Iterable[tuple[str, bytes]]) -> bytes:
    return b",".join(msgspec.json.encode(name) + b":" + value for name, value in fields)


def _not_an_object(body: bytes, head: re.Match[bytes] | None) -> str:
    if head is not None:
        at = head.end()
        return f"the body is no JSON object in UTF-8: a name in quotes is missing at byte {at}"
    begin = len(body) - len(body.lstrip(JSON_SPACE))
    if begin == len(body):
        return "the body is empty: a JSON object is wanted"
    kinds = {b"[": "a list", b'"': "a text", b"n": "null"}
    return f"the body is {kinds.get(body[begin : begin + 1], 'no JSON')} at byte {begin}: an object is wanted"
