"""Anything that changes the bytes changes the namespace."""

import dataclasses
import enum
from collections.abc import Iterator
from typing import Any

import pytest
from tests.identity.examples import HARD, KEY, PLAIN

from kvferry.errors import BrokenError, MisconfiguredError
from kvferry.identity.domain import domain_tag
from kvferry.identity.geometry import Geometry, GroupKind, KvGroup
from kvferry.identity.namespace import KvScale, NamespaceSpec, Setting, encode, fingerprint


def _variants(value: Any, path: str = "spec") -> Iterator[tuple[str, Any]]:
    """Copies of ``value`` that differ in one place each, found by walking the dataclasses' fields."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            if field.name in ("kv_heads", "tensor_ranks"):  # one must divide the other
                current = getattr(value, field.name)
                yield f"{path}.{field.name}", (value, field.name, 2 * current or 4)
                continue
            for place, changed in _variants(getattr(value, field.name), f"{path}.{field.name}"):
                yield place, (value, field.name, changed)
    elif isinstance(value, tuple):
        for index, item in enumerate(value):
            for place, changed in _variants(item, f"{path}[{index}]"):
                yield place, (*value[:index], changed, *value[index + 1 :])
        if value:
            yield f"{path} shortened", value[:-1]
            yield f"{path} reversed", value[::-1]
    elif isinstance(value, enum.Enum):
        yield from ((f"{path}={other}", other) for other in type(value) if other is not value)
    elif isinstance(value, str):
        yield path, value + "x"
    elif isinstance(value, bytes):
        yield path, bytes([value[0] ^ 1]) + value[1:]
    elif isinstance(value, int):
        yield path, value + 1
    elif isinstance(value, float):
        yield path, value + 2**-30
    else:
        raise AssertionError(f"{path} is a {type(value).__name__}: give it a variant")


def _rebuild(change: Any) -> Any:
    """Apply a nested change without the checks of __post_init__: the encoding is what is tested."""
    if isinstance(change, tuple) and len(change) == 3 and isinstance(change[1], str):
        original, name, changed = change
        copy = object.__new__(type(original))
        for field in dataclasses.fields(original):
            value = _rebuild(changed) if field.name == name else getattr(original, field.name)
            object.__setattr__(copy, field.name, value)
        return copy
    if isinstance(change, tuple):
        return tuple(_rebuild(item) for item in change)
    return change


def _all_variants() -> list[tuple[str, Any]]:
    return [(path, _rebuild(change)) for path, change in _variants(HARD)]


def test_every_field_of_every_part_of_the_specification_enters(monkeypatch: pytest.MonkeyPatch) -> None:
    for cls in (NamespaceSpec, Geometry, KvGroup):
        monkeypatch.setattr(cls, "__post_init__", lambda self: None)
    variants = _all_variants()
    names = {path for path, _ in variants}
    for field in dataclasses.fields(NamespaceSpec):
        assert any(path.startswith(f"spec.{field.name}") for path in names), field.name
    unordered = {"spec.kv_scales reversed", "spec.settings reversed"}
    seen = {fingerprint(HARD): "the original"}
    for path, variant in variants:
        found = fingerprint(variant)
        if path in unordered:
            assert found == fingerprint(HARD), path
        elif path.endswith(" reversed") and encode(variant) == encode(HARD):
            assert _is_palindrome(path), path
        else:
            assert found not in seen, f"{path} collides with {seen.get(found)}"
            seen[found] = path


def _is_palindrome(path: str) -> bool:
    """Reversing this tuple of the example changes nothing."""
    value: Any = HARD
    for step in path.removeprefix("spec.").removesuffix(" reversed").replace("[", ".[").split("."):
        value = value[int(step[1:-1])] if step.startswith("[") else getattr(value, step)
    return bool(value == value[::-1])


@pytest.mark.parametrize(
    ("kv_heads", "ranks", "equal"), [(1, (1, 2, 8), True), (2, (2, 4), True), (8, (1, 2), False)]
)
def test_engines_whose_ranks_hold_equal_bytes_share_a_namespace(
    kv_heads: int, ranks: tuple[int, ...], equal: bool
) -> None:
    found = set()
    for count in ranks:
        group = dataclasses.replace(PLAIN.geometry.groups[0], kv_heads=kv_heads)
        geometry = dataclasses.replace(PLAIN.geometry, groups=(group,), tensor_ranks=count)
        found.add(fingerprint(dataclasses.replace(PLAIN, geometry=geometry)))
    assert (len(found) == 1) is equal


def test_all_namespaces_of_a_domain_begin_with_its_tag_and_no_others_do() -> None:
    tag = domain_tag(PLAIN.domain, PLAIN.domain_key_id)
    assert fingerprint(PLAIN)[:4] == tag
    assert fingerprint(dataclasses.replace(PLAIN, model="another"))[:4] == tag
    renamed = dataclasses.replace(PLAIN, domain="another")
    rekeyed = dataclasses.replace(PLAIN, domain_key_id=KEY.key_id)
    for other in (renamed, rekeyed):
        assert fingerprint(other)[:4] == domain_tag(other.domain, other.domain_key_id) != tag
        assert fingerprint(other)[4:] != fingerprint(PLAIN)[4:]  # not told apart by a short tag alone


def test_text_cannot_move_from_one_field_to_the_next() -> None:
    one = dataclasses.replace(PLAIN, engine="vllm", engine_format="0.32")
    other = dataclasses.replace(PLAIN, engine="vllm0", engine_format=".32")
    assert fingerprint(one) != fingerprint(other)
    scales = dataclasses.replace(PLAIN, kv_scales=(KvScale("k", (1.0, 2.0)),))
    split = dataclasses.replace(PLAIN, kv_scales=(KvScale("k", (1.0,)), KvScale("k2", (2.0,))))
    assert fingerprint(scales) != fingerprint(split)


def test_an_integer_scale_is_the_same_scale() -> None:
    whole = dataclasses.replace(PLAIN, kv_scales=(KvScale("k", (1,)),))
    real = dataclasses.replace(PLAIN, kv_scales=(KvScale("k", (1.0,)),))
    assert fingerprint(whole) == fingerprint(real)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": ""}, "model"),
        ({"packing": ""}, "packing"),
        ({"weights": b"short"}, "weights"),
        ({"domain_key_id": b""}, "domain_key_id"),
        ({"domain_key_id": bytes(7)}, "domain_key_id"),
        ({"kv_dtype": "fp8_e4m3"}, "scales"),
        ({"kv_scales": (KvScale("k", (float("nan"),)),)}, "finite"),
        ({"kv_scales": (KvScale("k", ()),)}, "finite"),
        ({"kv_scales": (KvScale("k", (1.0,)), KvScale("k", (2.0,)))}, "repeated"),
        ({"settings": (Setting("a", "1"), Setting("a", "1"))}, "repeated"),
        ({"settings": (Setting("", "1"),)}, "empty"),
    ],
)
def test_what_is_missing_or_ambiguous_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(MisconfiguredError, match=message):
        dataclasses.replace(PLAIN, **changes)


@pytest.mark.parametrize(
    "changes",
    [
        {"model": "\ud800"},
        {"settings": (Setting("\udfff", "1"),)},
        {"settings": (Setting("a", "x" * 65537),)},
        {"weights_generation": -1},
        {"weights_generation": 1 << 64},
    ],
)
def test_what_has_no_encoding_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(MisconfiguredError, match="namespace: spec"):
        fingerprint(dataclasses.replace(PLAIN, **changes))


@pytest.mark.parametrize("value", [True, None, [1]])
def test_a_field_of_an_unexpected_type_is_a_defect_and_not_guessed(value: object) -> None:
    with pytest.raises(BrokenError, match="no encoding"):
        fingerprint(dataclasses.replace(PLAIN, weights_generation=value))  # type: ignore[arg-type]


def test_a_group_kind_is_encoded_by_its_value() -> None:
    assert b"kind" in encode(PLAIN)
    assert GroupKind.FULL.value.encode() in encode(PLAIN)
