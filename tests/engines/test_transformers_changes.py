"""transformers: a model that changes while it is in use, however it is done, takes no further part."""

from collections.abc import Callable
from typing import Any

import pytest

from kvferry.errors import RefusedError

pytestmark = pytest.mark.engine

CHUNK = 32
PROMPT = 3 * CHUNK + 5


def _found(cache: Any, ids: Any) -> int:
    return int(cache.load(ids).get_seq_length())


def _data(model: Any) -> Any:
    return model.model.layers[1].self_attn.k_proj.weight.data


def _merge(model: Any) -> None:
    _data(model).add_(0.01)


def _overwrite(model: Any) -> None:
    _data(model).copy_(_data(model).flip(0))


def _by_numpy(model: Any) -> None:
    array = _data(model).numpy()
    array *= 2


def _one_element(model: Any) -> None:
    """Which no sample holds: the places of one are known here, and this is not among them."""
    from kvferry.engines.transformers.weights import _places

    flat = _data(model).view(-1)
    sampled = set(_places(flat.numel(), flat.device).tolist())
    flat[next(place for place in range(flat.numel()) if place not in sampled)] += 1


def _positions(model: Any) -> None:
    model.model.rotary_emb.inv_freq.data.mul_(2)


def _epsilon(model: Any) -> None:
    model.model.layers[0].input_layernorm.variance_epsilon = 0.5


def _position_scale(model: Any) -> None:
    model.model.rotary_emb.attention_scaling = 3.0


def _scale(model: Any) -> None:
    model.model.layers[1].self_attn.scaling = 0.01


def _order(model: Any) -> None:
    one, other = (layer.self_attn for layer in model.model.layers[:2])
    one.layer_idx, other.layer_idx = other.layer_idx, one.layer_idx


def _all_see_all(model: Any) -> None:
    model.model.layers[0].self_attn.is_causal = False


def _activation(model: Any) -> None:
    import torch

    model.model.layers[0].mlp.act_fn = torch.nn.ReLU()


def _function(model: Any) -> None:
    import torch

    model.model.layers[0].mlp.forward = torch.nn.functional.silu


def _configured(model: Any) -> None:
    model.config.sliding_window = 8


UNCOUNTED = [_merge, _overwrite, _by_numpy, _positions]  # torch counts no such write
ELSEWHERE = [_epsilon, _position_scale, _scale, _order, _all_see_all, _activation, _function, _configured]


@pytest.mark.parametrize("change", [*UNCOUNTED, *ELSEWHERE])
def test_no_change_to_what_is_computed_goes_unnoticed(
    change: Callable[[Any], None], kit: Any, open_cache: Callable[..., Any]
) -> None:
    ids, model = kit.prompt(PROMPT), kit.llama()
    cache = open_cache(model)
    own = kit.own_prefix(model, ids, PROMPT)
    assert (cache.save(ids, own), _found(cache, ids)) == (3 * CHUNK, 3 * CHUNK)
    change(model)
    assert (_found(cache, ids), cache.match(ids), cache.save(ids, own)) == (0, 0, 0)
    assert cache.statistics().refused == {"changed weights" if change in UNCOUNTED else "changed model": 3}
    assert _found(open_cache(model), ids) == 0  # and the changed model is another one
    assert _found(open_cache(kit.llama()), ids) == 3 * CHUNK


def test_a_change_between_the_sampled_elements_is_not_saved(kit: Any, open_cache: Callable[..., Any]) -> None:
    ids, model = kit.prompt(PROMPT), kit.llama()
    cache = open_cache(model)
    _one_element(model)
    assert cache.save(ids, kit.own_prefix(model, ids, PROMPT)) == 0
    assert cache.statistics().refused == {"changed weights": 1}
    assert _found(open_cache(kit.llama()), ids) == 0


def test_a_cache_is_not_saved_under_anothers_tokens(kit: Any, open_cache: Callable[..., Any]) -> None:
    ids, other, model = kit.prompt(PROMPT), kit.prompt(PROMPT, seed=2), kit.llama()
    cache = open_cache(model)
    for found in (0, 3 * CHUNK):
        past = cache.load(ids)
        assert past.get_seq_length() == found
        said, _ = kit.answer(model, ids, past)
        with pytest.raises(RefusedError, match="the cache was loaded for a prompt whose token 0 is"):
            cache.save(other, past)
        assert cache.save(said, past) == cache.save(ids, past) == 3 * CHUNK
    assert cache.match(other) == 0
