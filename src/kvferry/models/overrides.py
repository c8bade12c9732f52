"""What any config may say beside its architecture's own fields: single layers, and what nobody read."""

import re
from collections.abc import Mapping
from dataclasses import replace

from kvferry.models.facts import Facts
from kvferry.models.layers import Layer, Span

# Fields that shape a KV cache. One that is there, and that no rule of the model_type read, is no detail.
SHAPING = (
    "attention_chunk_size", "attn_layer_indices", "attn_layer_period", "attn_type_list", "block_configs",
    "cla_share_factor", "compress_ratios", "cross_attention_layers", "full_attention_interval",
    "full_attn_idxs", "global_head_dim", "hybrid_layer_ids", "hybrid_layer_pattern",
    "hybrid_override_pattern", "index_head_dim", "interleaved_sliding_window", "kv_lora_rank",
    "kv_source_layer_ids", "layer_types", "layers_block_type", "linear_attn_config", "mamba_d_state",
    "num_global_key_value_heads", "num_key_value_heads_per_layer", "num_kv_shared_layers", "sliding_window",
    "sliding_windows", "sparse_attention_config", "ssm_state_size", "swa_num_key_value_heads", "v_head_dim",
)  # fmt: skip
_ALL = {"full_attention", "attention", "global_attention", "indexed_attention", "deepseek_sparse_attention"}
_DRAFTS = (
    "num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_layers", "mtp_num_layers",
    "num_mtp_modules",
)  # fmt: skip
_KV_WORD = re.compile(r"key_value|head_dim|window|chunk|kv_|lora|index|skip|state|conv|layer_type")
_MAX_LAYER_DIGITS = 4


def apply(facts: Facts, layers: tuple[Layer, ...]) -> tuple[Layer, ...]:
    """``per_layer_config``: fields of single layers, in place of common ones. Raises MisconfiguredError."""
    if not facts.fields.get("per_layer_config"):
        return layers
    given = facts.inner("per_layer_config").fields
    facts.used["per_layer_config"] = f"fields of {len(given)} layers"
    found = list(layers)
    for name, fields in given.items():
        if not isinstance(fields, Mapping) or not (name.isdecimal() and len(name) <= _MAX_LAYER_DIGITS):
            raise facts.refuse(f"per_layer_config has {name!r}, which is no layer with its fields")
        changing = {field: value for field, value in fields.items() if _KV_WORD.search(field)}
        if not changing:
            continue
        index = int(name)
        if index >= len(found) or any(layer.beside for layer in found):
            raise facts.refuse(f"per_layer_config changes layer {index}, which cannot be told apart here")
        found[index] = _changed(facts, index, found[index], changing)
    return tuple(found)


def _changed(facts: Facts, index: int, layer: Layer, fields: Mapping[str, object]) -> Layer:
    own = Facts(fields, name=facts.name, model_type=facts.model_type)
    for field in fields:
        if field == "sliding_window" and layer.span is Span.WINDOW:
            layer = replace(layer, span_tokens=own.number(field))
        elif field in ("num_key_value_heads", "head_dim") and layer.shares_layer is not None:
            continue  # it keeps nothing
        elif field == "num_key_value_heads" and layer.heads is not None:
            layer = replace(layer, heads=replace(layer.heads, kv_heads=own.number(field)))
        elif field == "head_dim" and layer.heads is not None and layer.heads.key_dim == layer.heads.value_dim:
            width = own.number(field)
            layer = replace(layer, heads=replace(layer.heads, key_dim=width, value_dim=width))
        else:
            raise facts.refuse(f"per_layer_config gives layer {index} a {field}, which is not known here")
    return layer


def refuse_unread(facts: Facts) -> None:
    """Raise MisconfiguredError for fields that shape a KV cache where no rule of the model_type read them."""
    longest = facts.optional("max_position_embeddings") or 1 << 62
    for field in SHAPING:
        value = facts.fields.get(field)
        if not value or field in facts.used or field in facts.settled:
            continue
        if field == "layer_types" and isinstance(value, list) and set(map(str, value)) <= _ALL:
            continue
        if field == "attn_type_list" and isinstance(value, list) and all(mark == 1 for mark in value):
            continue
        if field == "sliding_window":
            whole = isinstance(value, int) and value >= longest
            if whole or "layer_types" in facts.used:
                continue
        raise facts.refuse(
            f"the config has {field}, which such models are not known to have: its meaning would be a guess; "
            f"if it means nothing here, --set {field}=null"
        )


def note_drafts(facts: Facts) -> None:
    """Layers that only speculative decoding runs keep KV of their own when they are served."""
    for field in _DRAFTS:
        if facts.has(field) and (drafts := facts.optional(field)):
            facts.note(
                f"{drafts} draft layer{'s' if drafts > 1 else ''} for speculative decoding left out: served, "
                "each keeps KV as one layer more"
            )
            return
