"""A digest names a prefix: all that precedes it enters, nothing that follows does."""

from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.identity.examples import KEY, NAMESPACE, chain, tokens

from kvferry.errors import BrokenError, RefusedError
from kvferry.identity.chunks import MAX_SALT_BYTES, ChunkChain, Extras, MultimodalItem
from kvferry.identity.domain import DomainKey

token_lists = st.lists(st.integers(0, 2**32 - 1), max_size=60)
item_lists = st.lists(
    st.builds(
        MultimodalItem,
        digest=st.binary(min_size=1, max_size=4),
        offset=st.integers(0, 70),
        length=st.integers(1, 40),
    ),
    max_size=4,
).map(tuple)
extras_strategy = st.builds(
    Extras,
    adapter=st.none() | st.binary(min_size=1, max_size=8),
    cache_salt=st.none() | st.text(max_size=8),
    items=item_lists,
)


def _digests(token_ids: list[int], chunk_tokens: int, extras: Extras | None = None) -> list[bytes]:
    return ChunkChain(KEY, NAMESPACE, chunk_tokens=chunk_tokens, extras=extras).extend(token_ids)


def _first_difference(one: list[bytes], other: list[bytes]) -> int:
    """The index from which on two chains differ; fails if any later digest is equal again."""
    first = next((i for i, (a, b) in enumerate(zip(one, other, strict=True)) if a != b), len(one))
    assert not set(one[first:]) & set(other[first:])
    return first


@given(token_ids=token_lists, chunk_tokens=st.integers(1, 9), extras=extras_strategy, data=st.data())
def test_extending_bit_by_bit_equals_one_shot(
    *, token_ids: list[int], chunk_tokens: int, extras: Extras, data: st.DataObject
) -> None:
    whole = _digests(token_ids, chunk_tokens, extras)
    assert len(whole) == len(token_ids) // chunk_tokens
    grown = ChunkChain(KEY, NAMESPACE, chunk_tokens=chunk_tokens, extras=extras)
    new: list[bytes] = []
    start = 0
    while start < len(token_ids):
        end = start + data.draw(st.integers(1, len(token_ids) - start))
        new += grown.extend(token_ids[start:end])
        start = end
    assert new == grown.digests == whole
    assert grown.tokens == len(token_ids)


@given(
    token_ids=token_lists.filter(bool), chunk_tokens=st.integers(1, 9), extras=extras_strategy, data=st.data()
)
def test_a_changed_token_changes_its_chunk_and_all_later_ones_only(
    *, token_ids: list[int], chunk_tokens: int, extras: Extras, data: st.DataObject
) -> None:
    position = data.draw(st.integers(0, len(token_ids) - 1))
    changed = list(token_ids)
    changed[position] ^= 1 << data.draw(st.integers(0, 31))
    before, after = _digests(token_ids, chunk_tokens, extras), _digests(changed, chunk_tokens, extras)
    assert _first_difference(before, after) == min(position // chunk_tokens, len(before))


@given(extras=extras_strategy, other=extras_strategy)
def test_a_changed_adapter_or_salt_changes_every_digest(extras: Extras, other: Extras) -> None:
    one = _digests(tokens(32), 8, Extras(extras.adapter, extras.cache_salt, extras.items))
    two = _digests(tokens(32), 8, Extras(other.adapter, other.cache_salt, extras.items))
    same = (extras.adapter, extras.cache_salt) == (other.adapter, other.cache_salt)
    assert _first_difference(one, two) == (4 if same else 0)


@given(item=st.integers(0, 79), length=st.integers(1, 80), extras=extras_strategy)
def test_a_multimodal_item_changes_the_chunks_from_its_first_token_on(
    *, item: int, length: int, extras: Extras
) -> None:
    more = Extras(extras.adapter, extras.cache_salt, (*extras.items, MultimodalItem(b"new!!", item, length)))
    assert _first_difference(_digests(tokens(80), 8, extras), _digests(tokens(80), 8, more)) == item // 8


@pytest.mark.parametrize(
    ("changed", "first"),
    [
        (MultimodalItem(b"other", 20, 30), 2),
        (MultimodalItem(b"image", 21, 30), 2),
        (MultimodalItem(b"image", 20, 31), 2),
        (MultimodalItem(b"image", 15, 35), 1),
    ],
)
def test_content_place_and_length_of_an_item_all_enter(changed: MultimodalItem, first: int) -> None:
    before = _digests(tokens(80), 8, Extras(items=(MultimodalItem(b"image", 20, 30),)))
    assert _first_difference(before, _digests(tokens(80), 8, Extras(items=(changed,)))) == first


@given(items=item_lists, data=st.data())
def test_the_order_in_which_items_are_given_does_not_matter(
    items: tuple[MultimodalItem, ...], data: st.DataObject
) -> None:
    shuffled = tuple(data.draw(st.permutations(items)))
    assert _digests(tokens(80), 8, Extras(items=items)) == _digests(tokens(80), 8, Extras(items=shuffled))


def test_key_namespace_and_chunk_size_each_change_every_digest() -> None:
    chains = [
        chain(64),
        chain(64, key=DomainKey.default("default")),
        chain(64, namespace=bytes(16)),
        chain(64, chunk_tokens=32),
        chain(64, extras=Extras(cache_salt="")),
        chain(64, extras=Extras(cache_salt="a")),
        chain(64, extras=Extras(adapter=b"a")),
    ]
    digests = [digest for made in chains for digest in made.digests]
    assert len(set(digests)) == len(digests)
    assert all(len(digest) == 32 for digest in digests)


@pytest.mark.parametrize(
    "salt",
    ["\ud800", "a\udfff", "x" * (MAX_SALT_BYTES + 1), "é" * (MAX_SALT_BYTES // 2 + 1), 7, b"bytes", ["x"]],
)
def test_a_salt_that_is_not_short_unicode_text_is_refused_without_repeating_it(salt: object) -> None:
    with pytest.raises(RefusedError, match="cache_salt") as caught:
        Extras(cache_salt=salt)  # type: ignore[arg-type]
    assert "xxx" not in str(caught.value)
    assert caught.value.__cause__ is None


@pytest.mark.parametrize(
    "make",
    [
        lambda: Extras(adapter=b""),
        lambda: Extras(adapter=bytes(65)),
        lambda: Extras(adapter="text"),  # type: ignore[arg-type]
        lambda: Extras(items=(MultimodalItem("text", 0, 1),)),  # type: ignore[arg-type]
        lambda: Extras(items=(MultimodalItem(b"", 0, 1),)),
        lambda: Extras(items=(MultimodalItem(bytes(257), 0, 1),)),
        lambda: Extras(items=(MultimodalItem(b"a", -1, 1),)),
        lambda: Extras(items=(MultimodalItem(b"a", 0, 0),)),
        lambda: Extras(items=(MultimodalItem(b"a", 1 << 40, 1),)),
        lambda: Extras(items=(MultimodalItem(b"a", 0, 1),) * 65537),
    ],
)
def test_extras_out_of_bounds_are_refused(make) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(RefusedError):
        make()


@pytest.mark.parametrize("bad", [[1, -1], [2**32], [1.5], ["a"], b"12345678", "1234", [None], 7])
def test_unusable_token_ids_are_refused_and_leave_the_chain_as_it_was(bad: object) -> None:
    made = chain(20)
    with pytest.raises(RefusedError, match="token ids"):
        made.extend(bad)  # type: ignore[arg-type]
    assert made.tokens == 20
    assert made.extend(tokens(40)[20:]) == chain(40).digests[1:]


def test_any_sequence_of_integers_gives_the_same_digests() -> None:
    ids = tokens(64)
    expected = _digests(ids, 16)
    assert _digests(tuple(ids), 16) == expected  # type: ignore[arg-type]
    assert _digests(array("q", ids), 16) == expected  # type: ignore[arg-type]
    assert _digests(range(64), 16) == _digests(list(range(64)), 16)  # type: ignore[arg-type]


@pytest.mark.parametrize(("namespace", "chunk_tokens"), [(b"short", 16), (NAMESPACE, 0), (NAMESPACE, -1)])
def test_a_chain_without_a_proper_start_is_a_defect(namespace: bytes, chunk_tokens: int) -> None:
    with pytest.raises(BrokenError):
        ChunkChain(KEY, namespace, chunk_tokens=chunk_tokens)
