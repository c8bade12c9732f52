"""vLLM's own descriptions of KV caches become groups, parts and reasons."""

import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.engines.test_identity import KEY, SETTINGS, config, model_directory

from kvferry.engines.vllm.compat import unsupported_reason
from kvferry.engines.vllm.groups import (
    kv_groups,
    kv_heads,
    layer_specs,
    layers_by_group,
    surely_equal_heads,
    unshared,
)
from kvferry.engines.vllm.identity import assign, chunk_geometry, rank_parts
from kvferry.engines.vllm.kv_memory import KvMemory
from kvferry.engines.vllm.messages import GroupFacts, WorkerFacts
from kvferry.errors import MisconfiguredError
from kvferry.identity.geometry import Geometry, GroupKind, KvGroup

pytestmark = pytest.mark.engine

BLOCKS = 6

Spec = Callable[[Any], Any]
"""Of vLLM's ``kv_cache_interface``."""


@pytest.fixture(scope="module")
def vllm() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # those of the engine's own imports
        from vllm.v1 import kv_cache_interface
    return kv_cache_interface


def attention(vllm: Any, name: str = "FullAttentionSpec", **changes: Any) -> Any:
    """A layer's description."""
    fields = {"block_size": 16, "num_kv_heads": 2, "head_size": 8, "dtype": vllm.torch.bfloat16}
    return getattr(vllm, name)(**(fields | changes))


def state(vllm: Any, **changes: Any) -> Any:
    """Of a layer with recurrent state."""
    fields = {
        "block_size": 64,
        "shapes": ((3, 5), (2, 7)),
        "dtypes": (vllm.torch.bfloat16, vllm.torch.float32),
        "mamba_cache_mode": "align",
    }
    return vllm.MambaSpec(**(fields | changes))


def unlike(vllm: Any, **changes: Any) -> Any:
    """A group of two layers, of which the second is another."""
    layers = {"a": attention(vllm), "b": attention(vllm, **changes)}
    return vllm.UniformTypeKVCacheSpecs(block_size=16, kv_cache_specs=layers)


def cache(vllm: Any, *specs: Any, **changes: Any) -> Any:
    """One group for each, of one layer."""
    groups = [vllm.KVCacheGroupSpec([f"layer{n}"], spec, **changes) for n, spec in enumerate(specs)]
    return vllm.KVCacheConfig(num_blocks=BLOCKS, kv_cache_tensors=[], kv_cache_groups=groups)


SERVED: dict[str, tuple[Spec, GroupKind, int]] = {
    "full": (attention, GroupKind.FULL, 0),
    "full, computed as a window": (
        lambda vllm: attention(vllm, sliding_window=32),
        GroupKind.FULL,
        0,
    ),
    "MLA": (lambda vllm: attention(vllm, "MLAAttentionSpec", num_kv_heads=1), GroupKind.FULL, 0),
    "window": (lambda vllm: attention(vllm, "SlidingWindowSpec", sliding_window=100), GroupKind.WINDOW, 100),
    "window that drafts look beyond": (
        lambda vllm: attention(vllm, "SlidingWindowSpec", sliding_window=100, extra_retained_tokens=3),
        GroupKind.WINDOW,
        103,
    ),
    "chunked": (
        lambda vllm: attention(vllm, "ChunkedLocalAttentionSpec", attention_chunk_size=64),
        GroupKind.WINDOW,
        64,
    ),
    "state": (state, GroupKind.STATE, 0),
    "layers of unlike sizes": (lambda vllm: unlike(vllm, head_size=16), GroupKind.FULL, 0),
}


@pytest.mark.parametrize("name", SERVED)
def test_a_group_that_can_be_shared_has_its_kind(vllm: Any, name: str) -> None:
    spec, kind, window = SERVED[name]
    kv_cache = cache(vllm, spec(vllm), attention(vllm))
    assert unshared(kv_cache) is None
    found = kv_groups(kv_cache)[0]
    assert (found.kind, found.window_tokens) == (kind, window)
    assert found.block_tokens == spec(vllm).block_size


REFUSED: dict[str, tuple[Spec, str]] = {
    "encoder": (lambda vllm: attention(vllm, "EncoderOnlyAttentionSpec"), "EncoderOnlyAttentionSpec"),
    "cross": (lambda vllm: attention(vllm, "CrossAttentionSpec"), "CrossAttentionSpec"),
    "of the prompt's length": (lambda vllm: attention(vllm, "RSWASpec", rswa_window=8), "depend on more"),
    "compressed": (lambda vllm: attention(vllm, "MLAAttentionSpec", tokens_per_state=4), "compressed"),
    "of later tokens": (lambda vllm: attention(vllm, non_causal=True), "non-causal"),
    "scratch": (lambda vllm: attention(vllm, "CircularBufferSpec"), "CircularBufferSpec"),
    "state anywhere": (lambda vllm: state(vllm, mamba_cache_mode="none"), "block boundaries"),
    "replayed": (
        lambda vllm: attention(vllm, "SlidingWindowMLASpec", sliding_window=16, bounded_replay=True),
        "depend on more",
    ),
    "one layer of a group": (lambda vllm: unlike(vllm, non_causal=True), "non-causal"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_group_that_cannot_be_shared_has_a_reason(vllm: Any, name: str) -> None:
    spec, word = REFUSED[name]
    reason = unshared(cache(vllm, attention(vllm), spec(vllm)))
    assert reason is not None
    assert word in reason


def test_groups_that_an_engine_keeps_to_itself_and_models_without_any_have_a_reason(vllm: Any) -> None:
    full = attention(vllm)
    assert "to itself" in str(unshared(cache(vllm, full, host_resident=True)))
    assert "to itself" in str(unshared(cache(vllm, full, enable_kv_transfer=False)))
    assert "without" in str(unshared(cache(vllm)))
    with pytest.raises(MisconfiguredError, match="CrossAttentionSpec"):
        kv_groups(cache(vllm, attention(vllm, "CrossAttentionSpec")))


def test_with_drafts_states_over_pipeline_stages_have_a_reason(vllm: Any, tmp_path: Path) -> None:
    """Stages but the last put accepted states in place later than with the step that stores them."""
    engine, states = config(tmp_path), cache(vllm, attention(vllm), state(vllm))
    engine.speculative_config = SimpleNamespace(method="ngram")
    assert unsupported_reason(engine, states) is None
    engine.parallel_config.pipeline_parallel_size = 2
    assert "pipeline stages" in str(unsupported_reason(engine, states))
    assert unsupported_reason(engine, cache(vllm, attention(vllm))) is None
    engine.speculative_config = None
    assert unsupported_reason(engine, states) is None


HEADS: list[tuple[Spec, int, int, int]] = [
    (lambda vllm: [attention(vllm)], 8, 4, 8),
    (lambda vllm: [attention(vllm, num_kv_heads=1)], 2, 4, 2),
    (lambda vllm: [attention(vllm)], 16, 4, 8),  # these layers have other heads than the rest
    (lambda vllm: [attention(vllm, num_kv_heads=1)], 16, 4, 0),
    (lambda vllm: [attention(vllm)], 16, 1, 2),
    (lambda vllm: [attention(vllm, "MLAAttentionSpec", num_kv_heads=1)], 1, 4, 1),
    (lambda vllm: [state(vllm)], 8, 4, 0),
    (lambda vllm: [state(vllm, tp_replicated=True)], 8, 4, 1),
    (lambda vllm: [attention(vllm), attention(vllm)], 8, 4, 8),
    (lambda vllm: [attention(vllm), attention(vllm, num_kv_heads=4)], 8, 4, 0),
]


@pytest.mark.parametrize(("specs", "total", "ranks", "heads"), HEADS)
def test_ranks_share_what_is_surely_equal(vllm: Any, specs: Spec, total: int, ranks: int, heads: int) -> None:
    """And keep parts of their own where it is not."""
    assert kv_heads(specs(vllm), total_heads=total, ranks=ranks) == heads


UNLIKE: list[tuple[dict[str, Any], int]] = [
    ({"num_key_value_heads": 4, "num_attention_heads": 64}, 4),
    ({"num_key_value_heads": 4, "swa_num_key_value_heads": 8}, 0),
    ({"num_key_value_heads": 4, "num_global_key_value_heads": None}, 4),
    ({"num_attention_groups": 4, "attention_other_setting": {"num_attention_groups": 8}}, 0),
    ({"block_configs": [{"attention": {"n_heads_in_group": 8}}, {"attention": {"n_heads_in_group": 4}}]}, 0),
    ({"num_kv_heads": [4, 8]}, 0),
]


@pytest.mark.parametrize(("config", "heads"), UNLIKE)
def test_one_head_each_is_no_copy_where_layers_have_unlike_numbers_of_heads(
    vllm: Any, config: dict[str, Any], heads: int
) -> None:
    """Eight ranks have one head each of four, twice, or one each of eight: the engine's numbers are equal."""
    one_each = [attention(vllm, num_kv_heads=1)]
    surely = surely_equal_heads([config, {}], total_heads=4, ranks=8)
    assert kv_heads(one_each, total_heads=surely, ranks=8) == heads
    assert surely_equal_heads([config, {}], total_heads=4, ranks=4) == 4  # where nothing is a copy


def test_layers_go_to_their_groups_as_they_were_registered(vllm: Any) -> None:
    two = cache(vllm, attention(vllm), state(vllm))
    assert layers_by_group(two, ["layer1", "shares another's", "layer0"]) == [["layer0"], ["layer1"]]
    one = cache(vllm, attention(vllm))
    assert layers_by_group(one, ["layer0", "shares another's"]) == [["layer0", "shares another's"]]
    assert [len(specs) for specs in layer_specs(two)] == [1, 1]


# -- memory that groups lie in together ------------------------------------------------------------


def overlaid(torch: Any, page: int) -> tuple[Any, dict[str, Any]]:
    """Two layers in one allocation: attention with two heads, and a state of two tensors in padded pages."""
    storage = torch.zeros(BLOCKS * page, dtype=torch.uint8)
    halves = storage.view(torch.bfloat16)
    attention = torch.as_strided(halves, (BLOCKS, 2, 16, 16), (page // 2, 256, 16, 1))
    convolution = torch.as_strided(halves, (BLOCKS, 3, 5), (page // 2, 5, 1))
    recurrent = torch.as_strided(storage.view(torch.float32), (BLOCKS, 2, 7), (page // 4, 7, 1), 8)
    return storage, {"layer0": attention, "layer1": [convolution, recurrent]}


def test_states_of_several_tensors_move_whole_and_leave_the_rest_of_their_block_alone(vllm: Any) -> None:
    page, torch = 1024, vllm.torch
    storage, kv_caches = overlaid(torch, page)
    memory = KvMemory(kv_caches, groups=[["layer0"], ["layer1"]], blocks=BLOCKS, part_blocks=[4, 1])
    try:
        full, kept = memory.layouts
        assert full is not None
        assert kept is not None
        assert (full.block_bytes, kept.block_bytes) == (1024, 3 * 5 * 2 + 2 * 7 * 4)
        storage.copy_(torch.randint(0, 256, storage.shape, dtype=torch.uint8))
        before = storage.clone()
        part = bytearray(kept.block_bytes)
        copier = memory.copiers[1]
        assert copier is not None
        copier.save([2], memoryview(part), after=None)
        copier.load(memoryview(part), [5], first=0, after=None)
        for tensor in kv_caches["layer1"]:
            assert torch.equal(tensor[5].view(torch.uint8), tensor[2].view(torch.uint8))
        changed = (storage != before).view(BLOCKS, page)
        assert not changed[:5].any()
        assert not changed[5, 30:32].any()
        assert not changed[5, 32 + 56 :].any()
    finally:
        memory.close()


# -- stages and ranks ------------------------------------------------------------------------------


@st.composite
def geometries(draw: st.DrawFn) -> Geometry:
    """Of engines whose stages need not have layers of every group, and whose ranks may hold equal bytes."""
    stages, ranks = draw(st.integers(1, 3)), draw(st.sampled_from([1, 2, 4]))
    groups = []
    for at in range(draw(st.integers(1, 3))):
        sizes = draw(st.lists(st.sampled_from([0, 8, 24]), min_size=stages, max_size=stages))
        sizes[draw(st.integers(0, stages - 1))] = 8
        layers = tuple((f"{at}.{n}",) if size else () for n, size in enumerate(sizes))
        kind = draw(st.sampled_from([GroupKind.FULL, GroupKind.STATE]))
        groups.append(KvGroup(kind, 4, layers, tuple(sizes), draw(st.sampled_from([0, 1, 2, 4]))))
    return Geometry(tuple(groups), 8, ranks, stages)


@given(geometries())
def test_every_part_that_exists_is_held_and_each_rank_holds_one_per_group_its_stage_has(
    geometry: Geometry,
) -> None:
    held = rank_parts(geometry)
    assert len(held) == geometry.tensor_ranks * geometry.pipeline_ranks
    numbers: list[int] = []
    for rank, parts in enumerate(held):
        stage = rank // geometry.tensor_ranks
        for group, part in zip(geometry.groups, parts, strict=True):
            assert (part is not None) == bool(group.stages[stage])
            if part is not None:
                numbers.append(part.number)
                assert geometry.part_bytes[part.number]
    existing = {number for number, nbytes in enumerate(geometry.part_bytes) if nbytes}
    assert set(numbers) == existing
    assert all(part.replicas == numbers.count(part.number) for parts in held for part in parts if part)


def facts(rank: int, stage: int, sizes: Sequence[int], **changes: Any) -> WorkerFacts:
    """Of a rank that has a layer of each group with a size."""
    groups = tuple(
        GroupFacts((f"{stage}.{at}",) if size else (), size, f"X/{size}" if size else "", 2)
        for at, size in enumerate(sizes)
    )
    return WorkerFacts(rank, stage, groups, changes.get("packing", "vec"), "cpu")


def test_stages_make_up_one_namespace_and_what_they_hold_enters_it(vllm: Any, tmp_path: Path) -> None:
    model = model_directory(tmp_path / "m")
    groups = kv_groups(cache(vllm, attention(vllm), state(vllm)))
    chunks = chunk_geometry(groups, SETTINGS, device="cpu")

    def assigned(*ranks: WorkerFacts) -> Any:
        return assign(config(model, ranks=1), SETTINGS, key=KEY, facts=ranks, chunks=chunks)

    both = assigned(facts(0, 0, (8, 24)), facts(1, 1, (8, 0)))
    assert both.namespace.part_bytes == (32, 32, 24, 0)
    assert both.namespace.trailing == (0, 0, 1, 0)
    assert both.parts == (((0, 1), (2, 1)), ((1, 1), None))
    names = {
        assigned(*ranks).namespace.namespace
        for ranks in (
            (facts(0, 0, (8, 24)), facts(1, 1, (8, 0))),
            (facts(0, 0, (8, 0)), facts(1, 1, (8, 24))),
            (facts(0, 0, (8, 24)),),
            (facts(0, 0, (8, 24)), facts(1, 1, (16, 0))),
        )
    }
    assert len(names) == 4
    with pytest.raises(MisconfiguredError, match="describes stage 0, not 1"):
        assigned(facts(0, 0, (8, 24)), facts(0, 0, (8, 24)))
    with pytest.raises(MisconfiguredError, match="differently"):
        assigned(facts(0, 0, (8, 24)), facts(1, 1, (8, 0), packing="amx"))
