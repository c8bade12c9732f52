"""Models beside the one that answers: encoders of images and sound, and drafts. What of them changes KV."""

import json
from typing import TYPE_CHECKING

from kvferry.engines.checkpoints import local_directory
from kvferry.errors import MisconfiguredError
from kvferry.identity.namespace import Setting
from kvferry.identity.weights import model_fingerprint

if TYPE_CHECKING:
    from vllm.config import VllmConfig

_ENCODER_SETTINGS = (
    "mm_encoder_attn_backend",
    "mm_device_do_normalize",
    "mm_processor_kwargs",
    "video_pruning_rate",
    "video_pruning_method",
)
DRAFTS_WITHOUT_KV = ("ngram", "ngram_gpu", "suffix", "medusa", "mlp_speculator")
# Their layers keep KV in the blocks of the model's own. It is a function of the tokens before it and, where
# the drafts are EAGLE's or MTP's, of the one after: that may cost an accepted draft, never an answer.
DRAFTS_WITH_KV = ("draft_model", "eagle", "eagle3", "mtp")


def unsupported_companion(config: "VllmConfig") -> str | None:
    """Why an engine with such a companion is served without the cache; None where it need not be."""
    multimodal = getattr(config.model_config, "multimodal_config", None)
    if multimodal is not None and multimodal.mm_encoder_attn_dtype is not None:
        return f"an encoder whose attention is quantised ({multimodal.mm_encoder_attn_dtype})"
    speculative = config.speculative_config
    if speculative is not None and speculative.method not in (*DRAFTS_WITHOUT_KV, *DRAFTS_WITH_KV):
        return f"speculative decoding with drafts of kind {speculative.method}"
    return None


def encoder_settings(config: "VllmConfig") -> list[Setting]:
    """What turns an item's tensors into KV beside the model itself; the tensors name how they were made."""
    multimodal = getattr(config.model_config, "multimodal_config", None)
    if multimodal is None:
        return []
    found = {name: getattr(multimodal, name) for name in _ENCODER_SETTINGS}
    if config.lora_config is not None:
        found["enable_tower_connector_lora"] = config.lora_config.enable_tower_connector_lora
    return [
        Setting(name, json.dumps(value, sort_keys=True, default=str))
        for name, value in found.items()
        if value is not None
    ]


def draft_settings(config: "VllmConfig") -> list[Setting]:
    """What names the drafts' part of a block.

    Raises MisconfiguredError for drafts whose weights are in no local directory.
    """
    speculative = config.speculative_config
    if speculative is None or speculative.method not in DRAFTS_WITH_KV:
        return []
    draft = speculative.draft_model_config
    found = {
        "draft": speculative.method,
        "draft_dtype": str(draft.dtype).removeprefix("torch."),
        "draft_quantization": str(draft.quantization or "none"),
        "draft_kv_dtype": str(speculative.kv_cache_dtype or "the model's"),
    }
    if str(draft.model) != str(config.model_config.model):
        directory = local_directory(str(draft.model), revision=draft.revision)
        if directory is None:
            raise MisconfiguredError(
                f"the draft weights of {draft.model} are in no local directory, so they cannot be named"
            )
        found["draft_weights"] = model_fingerprint(directory).hex()
    return [Setting(name, value) for name, value in found.items()]
