"""Names what a transformers model's KV depends on, and refuses models whose KV cannot be named or reused."""

import hashlib
import json
import re
from importlib.metadata import version
from typing import Any

import torch
from transformers.cache_utils import DynamicCache

from kvferry.engines.transformers.form import form_of
from kvferry.engines.transformers.layout import KvLayout, LayerForm, dtype_name, plan_layout
from kvferry.engines.transformers.states import window_of
from kvferry.engines.transformers.weights import loaded_fingerprint
from kvferry.errors import MisconfiguredError
from kvferry.identity.domain import DomainKey
from kvferry.identity.geometry import DEFAULT_GPU_CHUNK_TOKENS
from kvferry.identity.names import MAX_PART_BYTES
from kvferry.identity.namespace import NamespaceSpec, Setting

ENGINE = "transformers"
# Raised when the bytes of a part change: their order, or what a supported release computes.
ENGINE_FORMAT = "5.19"
LAYOUT = "layer,kv,head,token"
SUPPORTED = (5, 19)
CPU_CHUNK_TOKENS = 128
PROBE_TOKENS = 2

# Of a configuration, what changes no KV: paths and versions, and what is returned besides.
_UNIMPORTANT = (
    "_name_or_path",
    "transformers_version",
    "use_cache",
    "output_attentions",
    "output_hidden_states",
)
_OTHER_MODALITY = re.compile(r"(image|video|audio|vision|speech|boi|eoi|boa|eoa)")
_CHANGING_ROPE = ("dynamic", "longrope")


def check_supported(model: Any) -> None:
    """Raises MisconfiguredError, one line, for what is not supported."""
    installed = version("transformers")
    if tuple(int(number) for number in re.findall(r"\d+", installed)[:2]) != SUPPORTED:
        supported = ".".join(map(str, SUPPORTED))
        raise MisconfiguredError(f"transformers {installed} is not supported: {supported} is")
    config: Any = getattr(model, "config", None)
    if not isinstance(model, torch.nn.Module) or not hasattr(config, "to_dict"):
        raise MisconfiguredError(
            f"a {type(model).__name__} is no model of transformers: give one as from_pretrained returns it"
        )
    if model.training:
        raise MisconfiguredError("the model is in training mode, where KV is random: call model.eval()")
    if config.is_encoder_decoder:
        raise MisconfiguredError("encoder-decoder models are not supported")
    if getattr(model, "_hf_peft_config_loaded", False) or hasattr(model, "peft_config"):
        raise MisconfiguredError("adapters are not supported: merge them (merge_and_unload) or remove them")
    if getattr(model, "_tp_size", None) not in (None, 1):
        raise MisconfiguredError("tensor parallelism is not supported: a process holds a share of each head")
    for rope in re.findall(r'"(?:rope_type|type)": "(\w+)"', _config_text(config)):
        if rope in _CHANGING_ROPE:
            raise MisconfiguredError(
                f"{rope} position embeddings are not supported: what they compute for a token depends on the "
                "length of the whole sequence"
            )
    other_token_ids(config)


def other_token_ids(config: Any) -> frozenset[int]:
    """Placeholders of what is no text. A prompt with one is not shared: the tokens do not say what it shows.

    Raises MisconfiguredError for a model that takes more than text and names none.
    """
    parts = [name for name in getattr(config, "sub_configs", {}) if _OTHER_MODALITY.search(name)]
    found = {
        value
        for name, value in config.to_dict().items()
        if _OTHER_MODALITY.search(name) and re.search(r"token_(id|index)$", name) and isinstance(value, int)
    }
    if parts and not found:
        raise MisconfiguredError(
            f"the model takes more than text ({', '.join(parts)}), and its configuration does not say by "
            "which tokens"
        )
    return frozenset(found)


def measure_layout(model: Any, *, chunk_tokens: int | None) -> KvLayout:
    """Runs the model on two tokens and looks at what its cache holds then.

    chunk_tokens: None takes 128 on a CPU, 256 elsewhere, or less where a part would be too large.
    Raises MisconfiguredError.
    """
    cache = DynamicCache(config=model.config)
    token_ids = torch.zeros((1, PROBE_TOKENS), dtype=torch.long, device=model.device)
    with torch.no_grad():
        model(input_ids=token_ids, past_key_values=cache, use_cache=True)
    forms: list[LayerForm] = []
    kinds: set[tuple[torch.dtype, torch.device]] = set()
    layer: Any
    for index, layer in enumerate(cache.layers):
        window = window_of(layer)
        if window is None:
            raise MisconfiguredError(
                f"layer {index} of the model keeps a {type(layer).__name__}: only models whose layers all "
                "keep full or sliding-window attention are supported"
            )
        keys, values = layer.keys, layer.values
        kept = min(PROBE_TOKENS, window - 1) if window else PROBE_TOKENS
        if keys is None or values is None or keys.shape[2] != kept:
            raise MisconfiguredError(f"layer {index} of the model does not use its cache as the others do")
        forms.append(LayerForm(index, window, keys.shape[1], keys.shape[3], values.shape[1], values.shape[3]))
        kinds |= {(keys.dtype, keys.device), (values.dtype, values.device)}
    if len(kinds) != 1:
        raise MisconfiguredError(f"the model's layers keep KV as {kinds}: one type on one device is needed")
    dtype, device = kinds.pop()
    if chunk_tokens is None:
        chunk_tokens = _default_chunk(forms, dtype, device)
    return plan_layout(forms, dtype=dtype, device=device, chunk_tokens=chunk_tokens)


def _default_chunk(forms: list[LayerForm], dtype: torch.dtype, device: torch.device) -> int:
    tokens = CPU_CHUNK_TOKENS if device.type == "cpu" else DEFAULT_GPU_CHUNK_TOKENS
    token_bytes = sum(form.token_items for form in forms) * dtype.itemsize
    while tokens > 1 and tokens * token_bytes > MAX_PART_BYTES:
        tokens //= 2
    return tokens


def namespace_spec(
    model: Any, layout: KvLayout, *, domain: str, key: DomainKey, model_name: str | None
) -> NamespaceSpec:
    """Everything that must be equal for another process to use the bytes."""
    dtype = dtype_name(layout.dtype)
    return NamespaceSpec(
        domain=domain,
        domain_key_id=key.key_id,
        model=model_name or type(model).__name__,
        weights=loaded_fingerprint(model),
        weights_generation=0,
        compute_dtype=dtype_name(model.dtype),
        kv_dtype=dtype,
        kv_scales=(),
        engine=ENGINE,
        engine_format=ENGINE_FORMAT,
        layout=LAYOUT,
        packing="none",
        geometry=layout.geometry,
        settings=(
            Setting("config", config_of(model)),
            Setting("attention", attention_of(model)),
            Setting("form", form_of(model)),
        ),
    )


def attention_of(model: Any) -> str:
    """How it is computed, which can be set while the model is loaded and shows in the bits."""
    return str(model.config._attn_implementation)


def config_of(model: Any) -> str:
    """A digest, in hex. Some of it is read at every step, as a window is."""
    return hashlib.sha256(_config_text(model.config).encode()).hexdigest()


def _config_text(config: Any) -> str:
    return json.dumps(_important(config.to_dict()), sort_keys=True, default=str)


def _important(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(name): _important(inner) for name, inner in value.items() if name not in _UNIMPORTANT}
    return value
