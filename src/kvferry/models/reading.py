"""From a config to a model: the text part of it, by the rules of its ``model_type``, or refused."""

from collections.abc import Callable, Mapping
from typing import Any

from kvferry.errors import MisconfiguredError
from kvferry.models import attention, latent, mamba, older, overrides, recurrent
from kvferry.models.facts import Facts
from kvferry.models.layers import Layer, Model
from kvferry.models.published import published
from kvferry.sources import suggestion

Reader = Callable[[Facts], tuple[Layer, ...]]

# Where a config for several kinds of input keeps its language model.
NESTED = ("text_config", "llm_config", "language_config")
CONTEXT_FIELDS = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "model_max_length")

# Heads, and those that they share: the second divides the first.
HEADS = (
    ("num_attention_heads", "num_key_value_heads"),
    ("num_attention_heads", "num_global_key_value_heads"),
    ("num_attention_heads", "num_attention_groups"),
    ("swa_num_attention_heads", "swa_num_key_value_heads"),
    ("linear_num_value_heads", "linear_num_key_heads"),
)


def _table(groups: Mapping[Reader, str]) -> dict[str, Reader]:
    return {name: reader for reader, names in groups.items() for name in names.split()}


READERS: dict[str, Reader] = _table(
    {
        attention.full: (
            "apertus aquila arcee arctic aria_text bailing_moe bailing_moe_v2 bitnet "
            "cohere cosmos3_edge_text csm cwm deepseek deepseek_ocr2_text diffllama doge "
            "emu3_text_model ernie4_5 ernie4_5_moe ernie4_5_moe_vl ernie4_5_vl_moe_text flex_olmo "
            "gemma glm glm4 glm4_moe glm4v_moe_text glm4v_text glm_ocr_text granite "
            "granite4_vision_text granitemoe granitemoeshared helium hunyuan_vl_text hy_v3 "
            "hyperclovax internlm2 internlm3 jais2 llama minicpm minimax_m2 molmo nanochat nemotron "
            "olmo olmo2 olmoe orion paddleocr_vl_text phi qwen3_vl_moe_text qwen3_vl_text "
            "seed_oss solar_open stablelm"
        ),
        attention.full_own_heads: (
            "gpt_neox gpt_neox_japanese baichuan xverse opt persimmon biogpt qwen internlm"
        ),
        attention.windowed: (
            "mistral mixtral phi3 phi3_v phi4mm phi4_multimodal phimoe starcoder2 ministral3 "
            "kyutai_speech_to_text voxtral_realtime_text"
        ),
        attention.switched: (
            "qwen2 qwen2_moe qwen3 qwen3_moe qwen2_5_omni_text qwen3_omni_moe_text smollm3 "
            "qwen2_vl_text qwen2_5_vl_text qwen2_vl qwen2_5_vl mimo dots1"
        ),
        attention.listed: (
            "afmoe cohere2_moe exaone4 exaone_moe granite_swa granitemoe_swa laguna mellum ministral "
            "muse_glimmer_text"
        ),
        attention.step: "step3p5 step3p7",
        attention.gemma2: "gemma2 vaultgemma",
        attention.gemma3: "gemma3_text gemma3",
        attention.gemma3n: "gemma3n_text gemma3n",
        attention.gemma4: "gemma4_text gemma4 gemma4_unified_text",
        attention.cohere2: "cohere2",
        attention.olmo3: "olmo3",
        attention.gpt_oss: "gpt_oss",
        attention.llama4: "llama4_text llama4",
        attention.mimo_v2: "mimo_v2_flash mimo_v2",
        attention.block_configs: "nemotron-nas deci",
        attention.hunyuan: "hunyuan hunyuan_v1_dense hunyuan_v1_moe",
        attention.minimax_m3: "minimax_m3 minimax_m3_vl minimax_m3_vl_text",
        latent.latent: (
            "deepseek_v2 deepseek_v3 deepseek_v32 kimi_k2 glm_moe_dsa glm4_moe_lite pangu_ultra_moe axk1"
        ),
        latent.indexed: "hy_v4",
        latent.expanded: "axk2 youtu mistral4 sarvam_mla",
        latent.twice: "longcat_flash",
        latent.windows_and_latents: "dots3_note",
        latent.lightning: "bailing_hybrid",
        latent.pooled: "glm5_next_text glm5_next",
        latent.compressed: "deepseek_v4 deepseek_ref",
        recurrent.gated_delta: "qwen3_next qwen3_5_text qwen3_5_moe_text qwen3_5 qwen3_5_moe olmo_hybrid",
        recurrent.indexed_delta: "qwen4_exp_text qwen4_exp",
        recurrent.short_convolutions: "inkling_text inkling_model inkling_mm_model",
        recurrent.nemotron_h: "nemotron_h",
        recurrent.granite_hybrid: "granitemoehybrid",
        recurrent.lfm2: "lfm2 lfm2_moe",
        recurrent.kimi_linear: "kimi_linear",
        mamba.mamba: "mamba falcon_mamba",
        mamba.mamba_2: "mamba2",
        mamba.jamba: "jamba",
        mamba.bamba: "bamba",
        mamba.falcon_h1: "falcon_h1",
        mamba.zamba2: "zamba2",
        mamba.recurrent_gemma: "recurrent_gemma",
        mamba.minimax: "minimax minimax_text_01 minimax_m1",
        older.one_head_each: "bloom codegen gpt2 gptj xglm",
        older.grouped: "exaone",
        older.falcon: "falcon",
        older.gpt_bigcode: "gpt_bigcode",
        older.mosaic: "dbrx mpt",
        older.chatglm: "chatglm",
        older.jetmoe: "jetmoe",
        older.openelm: "openelm",
        older.step3: "step3_text",
    }
)


def read_model(
    config: Mapping[str, Any], *, name: str, source: str = "", parameters: float = 0.0, wide: float = 0.0
) -> Model:
    """The layers that a config describes. wide: weights that a quantized checkpoint leaves in 16 bits.

    Raises MisconfiguredError for an architecture that is not known, for missing fields (all of them named)
    and for values that contradict each other.
    """
    outer = config.get("model_type")
    text = _text_config(config)
    model_type = text.get("model_type", outer)
    if not isinstance(model_type, str) or not model_type:
        raise MisconfiguredError(
            f"{name}: the config has no model_type; without it the size would be a guess: take the model's "
            "own config.json, or give it yourself like --set model_type=llama"
        )
    if config.get("is_encoder_decoder") or text.get("is_encoder_decoder"):
        raise MisconfiguredError(
            f"{name} (model_type {model_type}): an encoder-decoder's cross-attention depends on the "
            "encoder's input, which is not counted here; only decoders are"
        )
    if model_type not in READERS:
        raise MisconfiguredError(
            f"{name}: model_type {model_type!r} is not known here, and its size would be a guess; "
            f"{_nearest(model_type)} if the layers are of a known kind, say which: --set model_type=llama"
        )
    facts = Facts(text, name=name, model_type=model_type)
    _check_heads(Facts(text, name=name, model_type=model_type))
    layers = overrides.apply(facts, READERS[model_type](facts))
    overrides.refuse_unread(facts)
    overrides.note_drafts(facts)
    if not any(layer.keeps for layer in layers):
        raise facts.refuse("no layer keeps KV or state; is this the model's own config.json?")
    context = max((facts.optional(field) for field in CONTEXT_FIELDS[:1] if facts.has(field)), default=0)
    if not context:
        context = next((facts.optional(field) for field in CONTEXT_FIELDS if facts.has(field)), 0)
    return Model(
        name=name,
        model_type=model_type,
        layers=layers,
        max_context=context,
        facts=tuple(facts.used.items()),
        notes=tuple(facts.notes),
        source=source,
        parameters=parameters,
        published=published(text, config, wide=wide),
    )


def _check_heads(facts: Facts) -> None:
    """Heads that share a KV head are equally many everywhere. Raises MisconfiguredError."""
    for field, sharing in HEADS:
        if not facts.has(field):
            continue
        heads = facts.number(field)
        if isinstance(facts.fields.get(sharing), list):
            continue  # of each layer, which its reader judges
        if facts.has(sharing) and heads % facts.number(sharing):
            raise facts.refuse(
                f"{field} is {heads} and {sharing} is {facts.number(sharing)}: "
                "the second has to divide the first"
            )


def _text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The language model's fields: of the nested config where there is one, the outer ones otherwise."""
    thinker = config.get("thinker_config")
    if isinstance(thinker, Mapping):
        return _text_config(thinker)
    for field in NESTED:
        nested = config.get(field)
        if isinstance(nested, Mapping) and nested:
            return nested
    return config


def _nearest(model_type: str) -> str:
    hint = suggestion(model_type, READERS)
    return hint if hint.startswith("did you") else f"{len(READERS)} others are;"
