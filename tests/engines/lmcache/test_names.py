"""Names of LMCache's objects: golden values, and what makes two of them differ."""

from dataclasses import dataclass, replace

import pytest

from kvferry.engines.lmcache.names import Layout, Names, layout_of
from kvferry.errors import RefusedError
from kvferry.identity.domain import DomainKey, domain_tag

KEY = DomainKey(bytes(range(32)))
LAYOUT = layout_of([[2, 4, 256, 128]], ["torch.bfloat16"], [2])


@dataclass(frozen=True)
class Name:
    chunk_hash: bytes = bytes(range(32))
    model_name: str = "meta-llama/Llama-3.1-8B"
    kv_rank: int = 0x02010201
    object_group_id: int = 0
    cache_salt: str = ""


def names(
    *,
    domain: str = "prod",
    key: DomainKey = KEY,
    engine_format: str = "0.5",
    weights: str = "",
    serde: str = "",
) -> Names:
    return Names(domain, key, engine_format=engine_format, weights=weights, serde=serde)


def test_golden_names() -> None:
    ref = names().ref(Name(), LAYOUT)
    assert ref.nbytes == 524288
    assert ref.key.part == 0
    assert ref.key.namespace.hex() == "a878ad541dbf0660a35aa26de6539ead"
    assert ref.key.chunk.hex() == "b594536a851f3db7d4d3e59771aef3486d443d65cfe018fddd72a4eca1e1eba8"
    salted = names(weights="main", serde='{"type":"fp8"}').ref(
        Name(cache_salt="alice", object_group_id=3), LAYOUT
    )
    assert salted.key.namespace.hex() == "a878ad54351e445ed529cb99946702d2"
    assert salted.key.chunk.hex() == "943296325db93b394f3f1a4ade0005c2d0e23e892abac19984deecdac4149536"


def test_a_namespace_begins_with_its_domains_tag() -> None:
    assert names().ref(Name(), LAYOUT).key.namespace[:4] == domain_tag("prod", KEY.key_id)


@pytest.mark.parametrize(
    "other",
    [
        Name(chunk_hash=bytes(32)),
        Name(chunk_hash=bytes(range(31))),
        Name(model_name="meta-llama/Llama-3.1-8b"),
        Name(kv_rank=0x02000201),
        Name(object_group_id=1),
        Name(cache_salt="a"),
    ],
)
def test_every_field_of_a_name_matters(other: Name) -> None:
    assert names().ref(other, LAYOUT).key != names().ref(Name(), LAYOUT).key


def test_salt_and_hash_do_not_run_together() -> None:
    one = names().ref(Name(cache_salt="ab", chunk_hash=b"c"), LAYOUT)
    other = names().ref(Name(cache_salt="a", chunk_hash=b"bc"), LAYOUT)
    assert one.key != other.key


def test_every_setting_and_every_part_of_a_layout_matters() -> None:
    layouts = [
        LAYOUT,
        replace(LAYOUT, shapes=((2, 256, 4, 128),)),
        replace(LAYOUT, shapes=((2, 4, 256, 128), ())),
        replace(LAYOUT, dtypes=("torch.float16",)),
    ]
    layouts[2] = replace(layouts[2], dtypes=("torch.bfloat16", "torch.bfloat16"))
    found = [names().ref(Name(), layout).key for layout in layouts]
    made = [
        names(domain="dev"),
        names(key=DomainKey(bytes(32))),
        names(engine_format="0.6"),
        names(weights="w"),
        names(serde="s"),
    ]
    found += [one.ref(Name(), LAYOUT).key for one in made]
    assert len({key.namespace for key in found}) == len(found)


def test_of_a_secret_key_nothing_but_the_salted_hash_depends_on_the_request() -> None:
    one = names().ref(Name(cache_salt="alice"), LAYOUT).key
    assert b"alice" not in one.chunk + one.namespace
    assert one.namespace == names().ref(Name(cache_salt="bob"), LAYOUT).key.namespace
    assert one.chunk != names(key=DomainKey(bytes(32))).ref(Name(cache_salt="alice"), LAYOUT).key.chunk


def test_with_a_serde_the_layout_does_not_enter_and_the_first_stripe_is_asked_for() -> None:
    one = names(serde="s")
    head = one.head(Name(), None)
    assert head is not None
    assert head.nbytes == 1
    for layout in (LAYOUT, replace(LAYOUT, dtypes=("torch.uint8",))):
        assert one.ref(Name(), layout).key == head.key


def test_without_a_layout_there_is_nothing_to_ask_for() -> None:
    assert names().head(Name(), None) is None
    assert names().head(Name(), LAYOUT) == names().ref(Name(), LAYOUT)


def test_names_stay_right_when_more_kinds_are_met_than_are_remembered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("kvferry.engines.lmcache.names.MAX_SPACES", 2)
    one = names()
    first = [one.ref(Name(kv_rank=rank), LAYOUT) for rank in range(7)]
    assert first == [one.ref(Name(kv_rank=rank), LAYOUT) for rank in range(7)]
    assert len({ref.key.namespace for ref in first}) == 7


@pytest.mark.parametrize(("shape", "item"), [((0, 4), 2), ((1 << 20, 1 << 20), 2), ((), 0)])
def test_sizes_that_no_part_can_have_are_refused(shape: tuple[int, ...], item: int) -> None:
    with pytest.raises(RefusedError, match="an object of"):
        layout_of([shape], ["torch.bfloat16"], [item])


def test_a_layout_of_several_tensors_has_all_their_bytes() -> None:
    assert layout_of([[2, 3], [5]], ["a", "b"], [2, 1]) == Layout(((2, 3), (5,)), ("a", "b"), 17)
