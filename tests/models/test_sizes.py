"""Properties of the sizes: monotone, linear where they must be, splits add up."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.errors import MisconfiguredError
from kvferry.models.catalogue import entries, find_model
from kvferry.models.layers import Heads, Index, Latent, Layer, Model, Span, State
from kvferry.models.precision import KV_DTYPES, kv_dtype
from kvferry.models.reading import read_model
from kvferry.models.reserve import Allocator, EngineRules
from kvferry.models.sizes import Sizing, stages, state_bytes, token_bytes

BF16 = kv_dtype("bf16")
TOKENS = st.integers(0, 1 << 20)
DTYPES = st.sampled_from([dtype for dtype in KV_DTYPES.values() if dtype.name != "fp8_ds_mla"])
WIDTHS = st.sampled_from([64, 96, 128, 192, 256])

heads = st.builds(Heads, st.sampled_from([1, 2, 4, 8, 16, 64]), WIDTHS, WIDTHS)
index = st.none() | st.builds(Index, st.just(128), st.sampled_from([0, 128]))
full_layers = st.builds(Layer, st.just(Span.FULL), heads=heads, index=index) | st.builds(
    Layer, st.just(Span.FULL), latent=st.just(Latent(512, 64)), index=index
)
window_layers = st.builds(Layer, st.just(Span.WINDOW), st.integers(1, 8192), heads=heads)
chunk_layers = st.builds(Layer, st.just(Span.CHUNK), st.integers(1, 8192), heads=heads)
states = st.builds(
    State, st.sampled_from([1024, 6144]), st.integers(1, 3), st.sampled_from([16, 64]), WIDTHS, WIDTHS,
    st.sampled_from([2, 4]),
)  # fmt: skip
state_layers = st.builds(Layer, st.just(Span.NONE), state=states)


def models(*kinds: st.SearchStrategy[Layer]) -> st.SearchStrategy[Model]:
    return st.lists(st.one_of(kinds), min_size=1, max_size=12).map(
        lambda layers: Model("m", "t", tuple(layers), 0, (), ())
    )


ANY = models(full_layers, window_layers, chunk_layers, state_layers)
RULES = st.builds(
    EngineRules,
    st.sampled_from([1, 16, 64]),
    st.sampled_from([16, 2048, 8192]),
    st.sampled_from(list(Allocator)),
)
TENSOR = st.sampled_from([1, 2, 4, 8])


@given(ANY, DTYPES, RULES, TENSOR, TOKENS, TOKENS)
def test_a_longer_request_never_takes_less(
    model: Model, dtype, rules: EngineRules, tensor: int, tokens: int, more: int
) -> None:
    """Of chunks, what is live falls as one ends: there it is the peak that grows."""
    sizing = Sizing(model, dtype, tensor=tensor, engine=rules)
    short, long = sizing.request(tokens), sizing.request(tokens + more)
    assert short.peak <= long.peak
    assert short.gpu_reserved <= long.gpu_reserved
    assert short.replica_reserved <= long.replica_reserved
    assert short.kv <= short.peak
    if not any(layer.span is Span.CHUNK for layer in model.layers):
        assert short.kv == short.peak
        assert short.gpu_live <= long.gpu_live


@given(models(full_layers), DTYPES, TOKENS, TOKENS)
def test_layers_that_keep_all_are_linear_in_tokens(model: Model, dtype, first: int, second: int) -> None:
    sizing = Sizing(model, dtype)
    assert sizing.request(first).kv == first * sizing.full_token_bytes
    assert sizing.request(first + second).kv == sizing.request(first).kv + sizing.request(second).kv


@given(ANY, TOKENS)
def test_bounded_layers_stop_growing_at_their_span(model: Model, tokens: int) -> None:
    sizing = Sizing(model, BF16)
    grown = sizing.request(tokens + 8192).peak - sizing.request(8192).peak
    assert grown == tokens * sizing.full_token_bytes


@given(ANY, TOKENS)
def test_state_does_not_depend_on_the_length_nor_the_kv_dtype(model: Model, tokens: int) -> None:
    assert Sizing(model, BF16).request(tokens).state == Sizing(model, kv_dtype("fp8")).request(0).state


@given(ANY, DTYPES, TENSOR)
def test_tensor_parallel_shares_add_up(model: Model, dtype, tensor: int) -> None:
    """Split heads give one copy in all; what cannot be split is on every rank, whole."""
    for layer in model.layers:
        copy, rank = token_bytes(layer, dtype), token_bytes(layer, dtype, tensor)
        if layer.heads is not None:
            each = dtype.head_bytes(layer.heads)
            repeats = max(1, tensor // layer.heads.kv_heads)
            extra = (tensor - 1) * (dtype.index_bytes(layer.index) if layer.index else 0)
            assert tensor * rank == copy + extra + (repeats - 1) * layer.heads.kv_heads * each
        if layer.latent is not None:
            assert rank == copy
        assert tensor * state_bytes(layer, tensor) == state_bytes(layer)


@given(ANY, TOKENS, st.integers(1, 12))
def test_pipeline_stages_hold_every_layer_once(model: Model, tokens: int, pipeline: int) -> None:
    if pipeline > len(model.layers):
        with pytest.raises(MisconfiguredError, match="--pp"):
            Sizing(model, BF16, pipeline=pipeline)
        return
    whole, split = Sizing(model, BF16).request(tokens), Sizing(model, BF16, pipeline=pipeline).request(tokens)
    assert split.replica_live == whole.replica_live == whole.kv + whole.state
    assert split.gpu_live <= whole.gpu_live <= pipeline * split.gpu_live


@given(st.integers(1, 200), st.integers(1, 200))
def test_stages_differ_by_at_most_one_layer(count: int, pipeline: int) -> None:
    if pipeline > count:
        return
    spans = stages(count, pipeline)
    assert [index for span in spans for index in span] == list(range(count))
    assert max(map(len, spans)) - min(map(len, spans)) <= 1


def longcat() -> Model:
    config = {
        "model_type": "longcat_flash", "num_layers": 28, "kv_lora_rank": 512, "qk_rope_head_dim": 64,
    }  # fmt: skip
    return read_model(config, name="longcat")


@pytest.mark.parametrize("pipeline", [2, 3, 5, 28])
def test_two_attentions_of_a_layer_stay_on_one_stage(pipeline: int) -> None:
    """LongCat: 28 layers that keep 2 latents each, so a stage's bytes are its layers times twice one."""
    model = longcat()
    assert (model.layer_count, len(model.layers)) == (28, 56)
    request = Sizing(model, BF16, pipeline=pipeline).request(1000)
    assert request.gpu_live == math.ceil(28 / pipeline) * 2 * 576 * 2 * 1000
    with pytest.raises(MisconfiguredError, match="--pp is 29 for 28 layers"):
        Sizing(model, BF16, pipeline=29)


@pytest.mark.parametrize("pipeline", [1, 2, 4, 61])
def test_a_window_and_its_compressed_entries_stay_on_one_stage(pipeline: int) -> None:
    """DeepSeek V4 Pro: the bytes of a stage are counted here from the config's own list of layers."""
    model = find_model("deepseek-v4-pro")
    assert model.layer_count == 61
    ratios = dict(model.facts)["compress_ratios"][:61]
    tokens = 131_072

    def layer_bytes(ratio: int) -> int:
        entry = 1024 + (256 if ratio == 4 else 0)
        return 128 * 1024 + (tokens // ratio * entry if ratio > 1 else 0)

    sizes = [sum(layer_bytes(ratios[i]) for i in stage) for stage in stages(61, pipeline)]
    request = Sizing(model, BF16, pipeline=pipeline).request(tokens)
    assert request.gpu_live == max(sizes)
    assert request.replica_live == request.kv == sum(sizes)
    with pytest.raises(MisconfiguredError, match="--pp is 62 for 61 layers"):
        Sizing(model, BF16, pipeline=62)


def test_entries_of_one_layer_carry_its_number() -> None:
    assert longcat().numbers == tuple(number for number in range(28) for _ in range(2))
    assert find_model("qwen3-8b").numbers == tuple(range(36))


@given(ANY, DTYPES, RULES, TENSOR, TOKENS)
def test_an_engine_reserves_no_less_than_is_live(
    model: Model, dtype, rules: EngineRules, tensor: int, tokens: int
) -> None:
    request = Sizing(model, dtype, tensor=tensor, engine=rules).request(tokens)
    assert request.gpu_reserved >= request.gpu_live
    assert request.replica_reserved >= request.replica_live


@given(models(full_layers), RULES, TOKENS)
def test_of_plain_layers_an_engine_reserves_whole_blocks_and_no_more(
    model: Model, rules: EngineRules, tokens: int
) -> None:
    sizing = Sizing(model, BF16, engine=rules)
    blocks = math.ceil(tokens / rules.block_tokens)
    assert sizing.request(tokens).gpu_reserved == blocks * rules.block_tokens * sizing.full_token_bytes


def test_eight_bits_are_half_of_sixteen_and_four_a_quarter() -> None:
    model = find_model("llama-3.3-70b")
    full = Sizing(model, BF16).full_token_bytes
    assert full == 327_680
    assert Sizing(model, kv_dtype("fp8")).full_token_bytes == full // 2
    assert Sizing(model, kv_dtype("fp4")).full_token_bytes == full // 4
    assert Sizing(model, kv_dtype("nvfp4")).full_token_bytes == full * 9 // 32
    assert Sizing(model, kv_dtype("mxfp4")).full_token_bytes == full * 17 // 64
    scales = 80 * 8 * 2 * 4
    assert Sizing(model, kv_dtype("fp8_per_token_head")).full_token_bytes == full // 2 + scales


def test_the_packed_layout_of_mla_has_656_bytes_a_layer_and_its_indexer_132() -> None:
    assert Sizing(find_model("deepseek-v3"), kv_dtype("fp8_ds_mla")).full_token_bytes == 61 * 656
    assert Sizing(find_model("deepseek-v3.2"), kv_dtype("fp8_ds_mla")).full_token_bytes == 61 * (656 + 132)
    with pytest.raises(MisconfiguredError, match="MLA"):
        Sizing(find_model("qwen3-8b"), kv_dtype("fp8_ds_mla"))


def test_latents_are_on_every_rank_and_heads_fewer_than_ranks_too() -> None:
    mla = Sizing(find_model("deepseek-v3"), BF16, tensor=8).request(1024)
    assert mla.replica_live == 8 * mla.kv
    qwen = Sizing(find_model("qwen3-30b-a3b"), BF16, tensor=8).request(1024)
    assert qwen.replica_live == 2 * qwen.kv


def test_ranks_that_do_not_divide_the_heads_are_refused() -> None:
    with pytest.raises(MisconfiguredError, match="8 KV heads over 3 tensor-parallel ranks"):
        Sizing(find_model("llama-3.1-8b"), BF16, tensor=3)


def test_mamba_groups_are_repeated_where_ranks_do_not_divide_them() -> None:
    """As vLLM does: every rank has a group of its own."""
    model = find_model("granite-4.0-h-small")
    mamba = next(layer for layer in model.layers if layer.state)
    recurrent = 128 * 64 * 128 * 2
    assert state_bytes(mamba) == (8192 + 2 * 128) * 3 * 2 + recurrent
    assert 4 * state_bytes(mamba, 4) == (8192 + 4 * 2 * 128) * 3 * 2 + recurrent


def test_without_the_hybrid_allocator_every_layer_keeps_every_token() -> None:
    """vLLM's own log of gpt-oss-120b: 5.38 GiB for 78,384 tokens, which is 73,728 B a token."""
    rules = EngineRules(allocator=Allocator.WHOLE)
    request = Sizing(find_model("gpt-oss-120b"), BF16, engine=rules).request(78_384)
    assert request.gpu_reserved == 78_384 * 73_728
    assert round(request.gpu_reserved / (1 << 30), 2) == 5.38


def test_compressed_attention_keeps_windows_and_an_entry_per_4_or_128_tokens() -> None:
    """DeepSeek V4 Flash: 43 windows, 21 layers of 4 with an indexer, 20 of 128."""
    sizing = Sizing(find_model("deepseek-v4-flash"), BF16)
    tokens = 131_072
    entries_4, entries_128 = 21 * (1024 + 256) * (tokens // 4), 20 * 1024 * (tokens // 128)
    assert sizing.request(tokens).kv == 43 * 1024 * 128 + entries_4 + entries_128
    assert sizing.request(tokens + 3).kv == sizing.request(tokens).kv
    assert sizing.full_token_bytes == 21 * 320 + 20 * 8


def test_a_million_tokens_of_deepseek_are_what_vllm_published() -> None:
    """vLLM's announcement of DeepSeek V4, 2026-04-24: 83.9 GiB for V3.2 and 9.62 GiB for V4 Pro, in bf16."""
    for name, gib in (("deepseek-v3.2", 83.9), ("deepseek-v4-pro", 9.62)):
        assert Sizing(find_model(name), BF16).request(1 << 20).kv / (1 << 30) == pytest.approx(gib, abs=0.05)


def test_just_after_a_chunk_ends_only_the_new_one_is_live() -> None:
    sizing = Sizing(find_model("llama-4-scout"), BF16)
    assert sizing.request(8193).kv == 8193 * 49_152 + 147_456
    assert sizing.request(8193).peak == 8193 * 49_152 + 8192 * 147_456


@pytest.mark.parametrize("name", [entry.name for entry in entries()])
def test_every_model_of_the_catalogue_can_be_sized_at_its_longest(name: str) -> None:
    model = find_model(name)
    request = Sizing(model, BF16).request(model.max_context)
    assert 0 < request.kv + request.state <= request.gpu_reserved
