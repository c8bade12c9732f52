"""transformers: what cannot be named is not shared, and what is not supported is refused in one line."""

from collections.abc import Callable
from typing import Any

import pytest

from kvferry.errors import MisconfiguredError, RefusedError

pytestmark = pytest.mark.engine

CHUNK = 32
PROMPT = 3 * CHUNK + 5


def _training(model: Any) -> Any:
    return model.train()


def _adapter(model: Any) -> Any:
    model.peft_config = {"default": object()}
    return model


def _tensor_parallel(model: Any) -> Any:
    model._tp_size = 2
    return model


def _offloaded(model: Any) -> Any:
    """As accelerate leaves what it keeps elsewhere; what runs is in memory, so that the model still does."""
    model.register_parameter("elsewhere", type(model.lm_head.weight)(model.lm_head.weight.to("meta")))
    return model


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_training, "training mode"),
        (_adapter, "adapters"),
        (_tensor_parallel, "tensor parallelism"),
        (_offloaded, "elsewhere is not in memory"),
    ],
)
def test_a_model_whose_kv_cannot_be_named_is_refused(
    change: Callable[[Any], Any], message: str, kit: Any, open_cache: Callable[..., Any]
) -> None:
    with pytest.raises(MisconfiguredError, match=message):
        open_cache(change(kit.llama()))


@pytest.mark.parametrize(
    ("rope", "message"),
    [
        ({"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}, "dynamic position embeddings"),
        (
            {
                "rope_type": "longrope",
                "factor": 2.0,
                "rope_theta": 1e4,
                "short_factor": [1.0] * 8,
                "long_factor": [2.0] * 8,
                "original_max_position_embeddings": 1024,
            },
            "longrope position embeddings",
        ),
    ],
)
def test_positions_that_depend_on_the_whole_length_are_refused(
    rope: dict[str, Any], message: str, kit: Any, open_cache: Callable[..., Any]
) -> None:
    with pytest.raises(MisconfiguredError, match=message):
        open_cache(kit.llama(rope_parameters=rope))


def test_recurrent_layers_are_refused(kit: Any, open_cache: Callable[..., Any]) -> None:
    import transformers

    config = transformers.Lfm2Config(
        vocab_size=512,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        layer_types=["conv", "full_attention"],
    )
    with pytest.raises(MisconfiguredError, match="layer 0 of the model keeps a LinearAttentionLayer"):
        open_cache(kit.make("Lfm2ForCausalLM", config))


def test_encoder_decoder_models_are_refused(kit: Any, open_cache: Callable[..., Any]) -> None:
    import transformers

    config = transformers.T5Config(vocab_size=512, d_model=64, d_kv=16, d_ff=128, num_layers=1, num_heads=4)
    with pytest.raises(MisconfiguredError, match="encoder-decoder"):
        open_cache(kit.make("T5ForConditionalGeneration", config))


def test_another_release_of_transformers_is_refused(
    kit: Any, open_cache: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    from kvferry.engines.transformers import identity

    monkeypatch.setattr(identity, "version", lambda name: "5.20.1")
    with pytest.raises(MisconfiguredError, match=r"transformers 5\.20\.1 is not supported: 5\.19 is"):
        open_cache(kit.llama())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"pool": "64MiB"}, "not both"),
        ({"socket": None, "valkey": "valkey://localhost"}, "valkey needs a pool"),
        ({"socket": None, "pool": "1MiB"}, "at least 64 MiB"),
        ({"socket": None, "pool": "64MiB", "valkey": "http://x"}, "valkey"),
        ({"chunk_tokens": 0}, "chunk_tokens"),
        ({"domain_key_file": "/nowhere"}, "domain key file"),
        ({"chunk_tokens": "a"}, "chunk_tokens='a' is no whole number"),
        ({"socket": 5}, "socket=5 is no path"),
        ({"socket": None, "pool": 1.5}, "pool=1.5 is not a size"),
        ({"model_name": 5}, "model_name=5 is no text"),
    ],
)
def test_settings_that_cannot_be_meant_are_refused(
    options: dict[str, Any], message: str, kit: Any, open_cache: Callable[..., Any]
) -> None:
    with pytest.raises(MisconfiguredError, match=message):
        open_cache(kit.llama(), **options)


def _found(cache: Any, ids: Any, **options: Any) -> int:
    return int(cache.load(ids, **options).get_seq_length())


def test_what_changes_the_kv_keeps_prefixes_apart(kit: Any, open_cache: Callable[..., Any]) -> None:
    import torch

    ids, model = kit.prompt(PROMPT), kit.llama()
    cache = open_cache(model)
    assert cache.save(ids, kit.own_prefix(model, ids, PROMPT), salt="one") == 3 * CHUNK
    assert [_found(cache, ids, salt=salt) for salt in ("one", "two", None)] == [3 * CHUNK, 0, 0]

    assert _found(open_cache(kit.llama()), ids, salt="one") == 3 * CHUNK  # an equal one, made anew
    touched = kit.llama()
    touched.model.layers[1].mlp.up_proj.weight.data[17, 3] += 1.0
    eager = kit.llama(attn_implementation="eager")
    others = [
        open_cache(touched),
        open_cache(eager),
        open_cache(kit.llama(rope_parameters={"rope_type": "default", "rope_theta": 5e4})),
        open_cache(kit.llama().to(torch.bfloat16)),
        open_cache(model, chunk_tokens=2 * CHUNK),
        open_cache(model, model_name="another"),
    ]
    assert [_found(other, ids, salt="one") for other in others] == [0] * len(others)


def test_weights_that_change_while_it_is_open_end_the_sharing_and_say_so_once(
    kit: Any, open_cache: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    import torch

    ids, model = kit.prompt(PROMPT), kit.llama()
    cache = open_cache(model)
    own = kit.own_prefix(model, ids, PROMPT)
    assert cache.save(ids, own) == 3 * CHUNK
    with torch.no_grad():
        model.lm_head.weight.mul_(0.5)
    assert (_found(cache, ids), cache.match(ids), cache.save(ids, own)) == (0, 0, 0)
    assert cache.statistics().refused == {"changed weights": 3}
    assert caplog.text.count("weights have changed") == 1


@pytest.mark.parametrize("given", [None, object()])
def test_what_is_no_model_is_refused(given: Any, kit: Any, open_cache: Callable[..., Any]) -> None:
    with pytest.raises(MisconfiguredError, match="is no model of transformers"):
        open_cache(given)


def test_arguments_of_a_call_that_cannot_be_meant_are_refused(
    kit: Any, open_cache: Callable[..., Any]
) -> None:
    import torch
    from transformers import BatchEncoding

    ids, model = kit.prompt(PROMPT), kit.llama()
    cache = open_cache(model)
    with pytest.raises(RefusedError, match=r'pass its \["input_ids"\]'):
        cache.load(BatchEncoding({"input_ids": ids}))
    with pytest.raises(RefusedError, match="a NoneType is no cache"):
        cache.save(ids, None)
    own = kit.own_prefix(model, ids, PROMPT)
    for mask in (torch.ones(2, PROMPT), torch.ones(1, PROMPT + 1), torch.ones(1, 1, PROMPT), "mask"):
        with pytest.raises(RefusedError, match="attention_mask"):
            cache.load(ids, attention_mask=mask)
        with pytest.raises(RefusedError, match="attention_mask"):
            cache.save(ids, own, attention_mask=mask)
    assert cache.save(ids, own, attention_mask=torch.ones(1, PROMPT - 9)) == 3 * CHUNK  # of the prompt alone


def test_attention_that_is_set_anew_while_it_is_open_ends_the_sharing(
    kit: Any, open_cache: Callable[..., Any]
) -> None:
    ids, model = kit.prompt(PROMPT), kit.llama()
    cache = open_cache(model)
    own = kit.own_prefix(model, ids, PROMPT)
    before = model.config._attn_implementation
    model.set_attn_implementation("eager" if before != "eager" else "sdpa")
    assert (cache.save(ids, own), cache.match(ids)) == (0, 0)
    assert cache.statistics().refused == {"changed attention": 2}
    model.set_attn_implementation(before)
    assert cache.save(ids, own) == 3 * CHUNK


def test_a_prompt_whose_tokens_do_not_say_it_all_is_computed(
    kit: Any, open_cache: Callable[..., Any]
) -> None:
    import torch

    model = kit.llama(image_token_id=2)
    ids, cache = kit.prompt(PROMPT), open_cache(model)
    own = kit.own_prefix(model, ids, PROMPT)
    assert cache.save(ids, own) == 3 * CHUNK
    shows = ids.clone()
    shows[0, -1] = 2
    mask = torch.ones_like(ids)
    assert _found(cache, ids, attention_mask=mask) == 3 * CHUNK
    mask[0, 0] = 0
    assert (_found(cache, shows), _found(cache, ids, attention_mask=mask)) == (0, 0)
    assert cache.save(shows, own) == cache.save(ids, own, attention_mask=mask) == 0
    assert cache.statistics().refused == {"not only text": 2, "padding": 2}
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert (_found(cache, ids), cache.save(ids, own)) == (0, 0)
    model.train()
    assert (_found(cache, ids), cache.save(ids, own)) == (0, 0)


def test_a_cache_that_is_not_this_models_is_not_stored(kit: Any, open_cache: Callable[..., Any]) -> None:
    import torch
    from transformers import DynamicCache

    ids, model = kit.prompt(PROMPT), kit.llama()
    cache = open_cache(model)
    other = kit.llama(num_key_value_heads=4)
    with pytest.raises(RefusedError, match="another model's cache"):
        cache.save(ids, kit.own_prefix(other, ids, PROMPT))
    with pytest.raises(RefusedError, match="the model more"):
        cache.save(ids, kit.own_prefix(kit.llama(num_hidden_layers=1), ids, PROMPT))
    halved = kit.llama().to(torch.bfloat16)
    with pytest.raises(RefusedError, match="another model's cache"):
        cache.save(ids, kit.own_prefix(halved, ids, PROMPT))

    class Other(DynamicCache):
        """Keeps something else besides."""

    with pytest.raises(RefusedError, match="a Other is not supported"):
        cache.save(ids, kit.own_prefix(model, ids, PROMPT, Other(config=model.config)))
    assert cache.match(ids) == 0


@pytest.mark.parametrize("ids", [[[[1, 2]]], [0.5, 0.25], "text", [[1], [1, 2]], [-1] * 99])
def test_token_ids_that_are_none_are_refused(
    ids: Any, kit: Any, open_cache: Callable[..., Any], llama_cache: list[Any]
) -> None:
    if not llama_cache:
        llama_cache.append(kit.llama())
    with pytest.raises(RefusedError):
        open_cache(llama_cache[0]).load(ids)


@pytest.fixture(scope="module")
def llama_cache() -> list[Any]:
    """The model of the test above, made once."""
    return []


def test_lists_and_flat_tensors_name_the_same_prompt(kit: Any, open_cache: Callable[..., Any]) -> None:
    ids, model = kit.prompt(PROMPT), kit.llama()
    cache = open_cache(model)
    cache.save(ids[0].tolist(), kit.own_prefix(model, ids, PROMPT))
    assert [_found(cache, given) for given in (ids, ids[0], ids[0].tolist(), ids.tolist())] == [3 * CHUNK] * 4
