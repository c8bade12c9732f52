"""Multimodal items are named by content, processing and place; vLLM's identifiers are not believed.

With vLLM's own Request and feature objects, as its scheduler hands them to the connector.
"""

import threading
import warnings
from collections.abc import Iterator
from typing import Any

import pytest

from kvferry.engines.planning import Eligibility
from kvferry.engines.vllm import requests
from kvferry.engines.vllm.identity import AdapterDigests
from kvferry.engines.vllm.multimodal import ItemDigests
from kvferry.engines.vllm.requests import Admission, Tracked
from kvferry.errors import RefusedError
from kvferry.identity.chunks import MultimodalItem
from kvferry.identity.domain import DomainKey

pytestmark = pytest.mark.engine

CHUNK, TOKENS, IMAGE = 4, 32, 9
WAIT_S = 30.0


@pytest.fixture(scope="module", autouse=True)
def vllm() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # those of the engine's own imports
        import vllm.v1.request  # noqa: F401


@pytest.fixture
def digests() -> Iterator[ItemDigests]:
    made = ItemDigests()
    yield made
    made.close()


@pytest.fixture
def admission(digests: ItemDigests) -> Iterator[Admission]:
    adapters = AdapterDigests()
    yield Admission(
        key=DomainKey.default("default"),
        namespace=bytes(16),
        chunk_tokens=CHUNK,
        adapters=adapters,
        items=digests,
    )
    adapters.close()


def data(seed: int, *, dtype: str = "float32", **more: Any) -> Any:
    """What a processor made of one image."""
    import torch
    from vllm.multimodal.inputs import MultiModalBatchedField, MultiModalFieldElem, MultiModalKwargsItem

    pixels = torch.arange(3 * 8 * 8, dtype=torch.float32).reshape(3, 8, 8) + seed
    fields = {"pixel_values": pixels.to(getattr(torch, dtype)), **more}
    field = MultiModalBatchedField()
    return MultiModalKwargsItem({name: MultiModalFieldElem(value, field) for name, value in fields.items()})


def feature(
    item: Any, *, identifier: str = "id", offset: int = 6, modality: str = "image", mask: Any = None
) -> Any:
    from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange

    place = PlaceholderRange(offset=offset, length=IMAGE, is_embed=mask)
    return MultiModalFeatureSpec(data=item, modality=modality, identifier=identifier, mm_position=place)


def request(name: str, *features: Any, **fields: Any) -> Any:
    from vllm import SamplingParams
    from vllm.v1.request import Request

    return Request(
        request_id=name,
        prompt_token_ids=list(range(TOKENS)),
        sampling_params=SamplingParams(max_tokens=1),
        pooling_params=None,
        mm_features=list(features),
        **fields,
    )


def admitted(admission: Admission, asked: Any) -> Tracked:
    tracked = admission.admit(asked, now=0.0)
    for future in (tracked.items, tracked.adapter):
        if future is not None:
            future.exception(WAIT_S)
    assert admission.ready(tracked, now=0.0)
    return tracked


def chunks(admission: Admission, *features: Any, **fields: Any) -> list[bytes]:
    """Digests of all chunks of a request with these items."""
    tracked = admitted(admission, request("r", *features, **fields))
    assert tracked.eligibility is Eligibility.YES
    return tracked.digests(TOKENS // CHUNK, chunk_tokens=CHUNK)


def shared(one: list[bytes], other: list[bytes]) -> int:
    """Leading chunks in common; a chain never meets again."""
    equal = [a == b for a, b in zip(one, other, strict=True)]
    count = equal.index(False) if False in equal else len(equal)
    assert not any(equal[count:])
    return count


def test_what_stands_before_an_image_is_shared_and_nothing_from_its_first_chunk_on(
    admission: Admission,
) -> None:
    one = chunks(admission, feature(data(1)))
    assert shared(one, chunks(admission, feature(data(2), identifier="other"))) == 6 // CHUNK
    assert shared(one, chunks(admission)) == 6 // CHUNK


def test_equal_content_is_one_item_whatever_a_client_or_another_engine_calls_it(admission: Admission) -> None:
    one = chunks(admission, feature(data(1), identifier="/models/a:5f"))
    assert chunks(admission, feature(data(1), identifier="photo.jpg")) == one


@pytest.mark.parametrize(
    "change",
    [
        {"item": {"dtype": "bfloat16"}},
        {"item": {"image_grid_thw": [1, 8, 8]}},
        {"item": {"second": "pixel_values"}},
        {"modality": "video"},
        {"offset": 7},
        {"mask": [True] * (IMAGE - 1) + [False]},
    ],
)
def test_processing_kind_and_place_are_part_of_the_name(admission: Admission, change: dict[str, Any]) -> None:
    import torch

    change = dict(change)
    more = change.pop("item", {})
    if "mask" in change:
        change["mask"] = torch.tensor(change["mask"])
    other = feature(data(1, **more), identifier="other", **change)
    assert shared(chunks(admission, feature(data(1))), chunks(admission, other)) == 6 // CHUNK


def test_nested_and_empty_tensors_have_names_of_their_own(digests: ItemDigests) -> None:
    import torch

    a, b = torch.zeros(2), torch.ones(3)
    kinds: list[Any] = [
        [a, b],
        [[a], b],
        [[a, b]],
        [a],
        [],
        torch.zeros(0),
        a,
        a.reshape(2, 1),
        torch.zeros(2).int(),
    ]
    found = set()
    for number, value in enumerate(kinds):
        named = digests.items([feature(data(1, more=value), identifier=str(number))])
        assert named is not None
        found.add(named.result(WAIT_S)[0].digest)
    assert len(found) == len(kinds)


def test_strides_and_views_do_not_count(digests: ItemDigests) -> None:
    import torch

    whole = torch.arange(12.0).reshape(3, 4)
    names = [
        digests.items([feature(data(1, more=value), identifier=str(number))])
        for number, value in enumerate([whole, whole.T.contiguous().T, torch.cat([whole, whole])[3:]])
    ]
    assert len({named.result(WAIT_S) for named in names if named is not None}) == 1


def test_an_identifier_of_two_contents_is_refused_from_then_on(admission: Admission) -> None:
    """vLLM would find the one's encoder output, or its own prefix, for the other."""
    first = admitted(admission, request("a", feature(data(1), identifier="mine")))
    assert admission.still_named(first)
    for content in (2, 1):
        other = admitted(admission, request("b", feature(data(content), identifier="mine")))
        assert other.eligibility is Eligibility.MULTIMODAL
    assert not admission.still_named(first)
    assert first.eligibility is Eligibility.MULTIMODAL
    assert chunks(admission, feature(data(1), identifier="theirs"))


def test_a_request_that_takes_no_part_is_remembered_for_its_identifiers(admission: Admission) -> None:
    refused = admitted(admission, request("a", feature(data(1)), resumable=True))
    assert refused.eligibility is Eligibility.STREAMING
    assert admitted(admission, request("b", feature(data(2)))).eligibility is Eligibility.MULTIMODAL


def _measures(**fields: Any) -> Any:
    """What an engine is given of an item whose embeddings come another way."""
    from vllm.multimodal.inputs import MultiModalBatchedField, MultiModalFieldElem, MultiModalKwargsItem

    field = MultiModalBatchedField()
    return MultiModalKwargsItem({name: MultiModalFieldElem(value, field) for name, value in fields.items()})


def _in_shared_memory() -> Any:
    """As vLLM hands an item over whose tensors lie in shared memory."""
    from vllm.multimodal.cache.shm import ShmObjectStoreSenderCache

    return ShmObjectStoreSenderCache.address_as_item(None, 4096, 7, [1, 2, 3])


def test_an_address_or_an_items_measures_name_nothing(admission: Admission) -> None:
    """Another image may lie at the same address of another engine, and has the same size."""
    import torch

    grid, times = torch.tensor([[1, 4, 4]]), torch.arange(9.0)
    items = [
        _in_shared_memory(),
        _measures(image_grid_thw=grid),
        _measures(video_grid_thw=grid, timestamps=times),
        _measures(video_grid_thw=grid, timestamps=[times]),
        _measures(audio_num_tokens=[9]),
    ]
    for number, item in enumerate(items):
        tracked = admitted(admission, request("a", feature(item, identifier=str(number))))
        assert tracked.eligibility is Eligibility.MULTIMODAL


@pytest.mark.parametrize("missing", ["item", "tensor"])
def test_an_item_without_its_tensors_is_served_without_the_cache(admission: Admission, missing: str) -> None:
    """As on an engine that receives KV in place of images."""
    item = None if missing == "item" else data(1, more=None)
    asked = request("a", feature(item))
    assert admitted(admission, asked).eligibility is Eligibility.MULTIMODAL
    assert admitted(admission, request("b", feature(data(1)))).eligibility is Eligibility.MULTIMODAL


def test_what_cannot_be_read_in_time_is_served_without_the_cache(
    admission: Admission, digests: ItemDigests
) -> None:
    busy = threading.Event()
    digests._pool.submit(busy.wait, WAIT_S)
    tracked = admission.admit(request("a", feature(data(1))), now=0.0)
    assert not admission.ready(tracked, now=requests.NAMING_WAIT_S)
    assert admission.ready(tracked, now=requests.NAMING_WAIT_S + 0.1)
    busy.set()
    assert tracked.eligibility is Eligibility.MULTIMODAL


def test_an_item_is_read_once_as_long_as_the_engine_keeps_it(
    digests: ItemDigests, monkeypatch: pytest.MonkeyPatch
) -> None:
    item = data(1)
    before = digests.items([feature(item)])
    assert before is not None
    named = before.result(WAIT_S)
    monkeypatch.setattr("kvferry.engines.vllm.multimodal._content", lambda modality, data: b"read again")
    again, other = digests.items([feature(item)]), digests.items([feature(data(1), identifier="other")])
    assert again is not None
    assert other is not None
    assert again.result(WAIT_S) == named != other.result(WAIT_S)


def test_spans_that_no_chunk_can_name_are_refused(digests: ItemDigests) -> None:
    named = digests.items([feature(data(1), offset=-1)])
    assert named is not None
    assert isinstance(named.exception(WAIT_S), RefusedError)


def test_items_carry_their_place(digests: ItemDigests) -> None:
    named = digests.items([feature(data(1), offset=3), feature(data(2), identifier="2", offset=20)])
    assert named is not None
    first, second = named.result(WAIT_S)
    assert first == MultimodalItem(first.digest, 3, IMAGE)
    assert second == MultimodalItem(second.digest, 20, IMAGE)
